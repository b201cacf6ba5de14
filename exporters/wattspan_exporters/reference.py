"""The reference page of the metrics, made from the catalogue."""

from __future__ import annotations

from collections.abc import Iterator

from wattspan_exporters.catalogue.definition import Chapter, Metric, prometheus_name
from wattspan_exporters.catalogue.metrics import ATTRIBUTES, CHAPTERS
from wattspan_exporters.prometheus.self_metrics import SelfMetrics

_INTRODUCTION = """\
# Metrics

Every metric the agent exports, with its OpenTelemetry name and its Prometheus name. Prometheus
names follow OpenTelemetry's translation rules; an exception is marked with an asterisk.

**Exact.** Energy is counted in whole microjoules and written as an exact decimal number of
joules, power in milliwatts, time in nanoseconds. A figure that is not known is absent, never
zero.

**Summing.** Domains overlap: a package contains its cores, a platform its packages. Only the
*cover* is disjoint, and its members are the ones without `hw_parent`:

```promql
# each joule once: equals hw_host_energy_joules_total
sum(hw_energy_joules_total{hw_parent=""})
# watts
sum by (hw_type) (rate(hw_energy_joules_total{hw_parent=""}[5m]))
```

**Honest.** Every energy and power series has a `provenance` label: `measured`, `derived`,
`estimated` or `emulated`; limits and caps are settings and have none. It speaks of the
joules; how they are divided among processes is `method` on `wattspan_domain_info`. A series
changes its identity if its provenance changes, so aggregate with `without (provenance)` or
`by (...)`.

**Rates.** Use `rate()` or `increase()` on the counters; they survive a restart of the agent.
Prometheus takes the first value of a new series as its starting point, so what a process was
charged before its first scrape shows in its value and not in `increase()`.

**Labels** longer than 128 characters, or with control characters, are made fit and end in `~`
and a digest of the original. Labels that would be empty are left out.
"""

_SERVER = """\
## The Prometheus endpoint itself

Served beside the catalogue at `/metrics`, and by no other exporter. The `process_*` series are
prometheus-client's own, about the agent's process.
"""


def page() -> str:
    """The whole page, as Markdown."""
    parts = [_INTRODUCTION, *map(_chapter, CHAPTERS), _attributes(), _SERVER + _server()]
    return "\n".join(parts)


def _chapter(chapter: Chapter) -> str:
    rows = "".join(map(_row, chapter.metrics))
    return (
        f"## {chapter.title}\n\n{chapter.prose}\n\n"
        "| Prometheus | OpenTelemetry | instrument, unit | labels | meaning |\n"
        "|---|---|---|---|---|\n" + rows
    )


def _row(metric: Metric) -> str:
    translated = prometheus_name(metric.name, metric.unit, metric.instrument)
    mark = "" if metric.series == translated else "*"
    labels = " ".join(f"`{label}`" for label in metric.labels)
    unit = f", {metric.unit}" if metric.unit else ""
    kind = f"{metric.instrument}{unit}"
    return f"| `{metric.series}`{mark} | `{metric.name}` | {kind} | {labels} | {metric.help} |\n"


def _attributes() -> str:
    rows = "".join(
        f"| `{name.replace('.', '_')}` | {meaning} |\n"
        for name, meaning in sorted(ATTRIBUTES.items())
    )
    return f"## Labels\n\n| label | meaning |\n|---|---|\n{rows}"


def _server() -> str:
    rows = "".join(f"| `{name}` | {meaning} |\n" for name, meaning in _own_series())
    return f"\n| Prometheus | meaning |\n|---|---|\n{rows}"


def _own_series() -> Iterator[tuple[str, str]]:
    for family in SelfMetrics("").collect():
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        yield f"{family.name}{suffix}", family.documentation
