"""Grafana dashboards as code: the committed JSON in ``grafana/`` and its generator."""

from dashboards.queries import Query, Variable, fill, queries, variables

__all__ = ["Query", "Variable", "fill", "queries", "variables"]
