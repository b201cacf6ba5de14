"""Known series: of the catalogue, of the recording rules, and Prometheus's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dashboards.expressions import grouping
from wattspan_exporters.catalogue import CATALOGUE
from wattspan_exporters.catalogue.definition import Instrument, counters

RULES = Path(__file__).parent / "prometheus" / "recording.yml"

SCRAPE = {"job", "instance"}
"""Labels that Prometheus gives to everything it scrapes."""


@dataclass(frozen=True, slots=True)
class Known:
    """A series as stored in Prometheus."""

    labels: frozenset[str]
    counter: bool


PROMETHEUS = {
    "up": Known(frozenset(SCRAPE), counter=False),
    "ALERTS": Known(frozenset(SCRAPE | {"alertname", "alertstate", "severity"}), counter=False),
}
"""Series that Prometheus adds."""


def exported() -> dict[str, Known]:
    """Metrics exported by the agent. A label ``job`` of its own becomes ``exported_job``."""
    return {
        metric.series: Known(
            labels=frozenset(
                {"exported_job" if label == "job" else label for label in metric.labels} | SCRAPE
            ),
            counter=metric.instrument is Instrument.COUNTER,
        )
        for listed in CATALOGUE
        for metric in counters(listed)
    }


def recorded(rules: Mapping[str, Any]) -> dict[str, Known]:
    """Series recorded by the recording rules: all gauges, with the labels that their sums keep."""
    found: dict[str, Known] = {}
    for group in rules["groups"]:
        for rule in group["rules"]:
            if name := rule.get("record"):
                labels = grouping(rule["expr"]) | rule.get("labels", {}).keys()
                for other, known in found.items():
                    if not rule["expr"].startswith("sum") and other in rule["expr"]:
                        labels |= known.labels
                found[name] = Known(frozenset(labels), counter=False)
    return found


def everything(rules: Mapping[str, Any]) -> dict[str, Known]:
    return exported() | recorded(rules) | PROMETHEUS
