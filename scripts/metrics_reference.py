"""The reference page of the metrics: the catalogue with chapters and the meaning of labels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from wattspan_exporters.catalogue.agent import AGENT, FOOTPRINT, SOURCES
from wattspan_exporters.catalogue.definition import Metric, prometheus_name
from wattspan_exporters.catalogue.energy import ACCOUNTS, ENERGY, OUTSIDE_COVER, SPANS
from wattspan_exporters.catalogue.gpu import GPUS
from wattspan_exporters.catalogue.inference import INFERENCE
from wattspan_exporters.catalogue.tuning import FLEET, TUNING
from wattspan_exporters.prometheus.exporter import SelfMetrics


class Chapter(NamedTuple):
    """Related metrics with an introduction."""

    title: str
    prose: str
    metrics: tuple[Metric, ...]


_INTRODUCTION = """\
# Metrics

Every metric the agent exports, with its OpenTelemetry name and its Prometheus name. Prometheus
names follow OpenTelemetry's translation rules; an exception is marked with an asterisk.

**Exact.** Energy is counted in whole microjoules and written as an exact decimal number of
joules, power in milliwatts, time in nanoseconds. A figure that is not known is absent, never
zero.

**Certain, or said not to be.** A figure is known, a lower bound (a part of it is unknown) or
unknown. `wattspan_host_certainty_info`, `wattspan_domain_certainty_info` and
`wattspan_attribution_certainty_info` say so for the host, each domain, and the energy of processes,
groups, spans and requests. The counter of a device without readings stands still: its
`wattspan_domain_up` is 0, its power is absent, and `wattspan_gap_seconds_total` counts the time.
A rate over such time is a lower bound too:

```promql
# hosts whose power is incomplete now
wattspan_host_certainty_info{figure="power", certainty!="known"}
# joules of processes that the unknown idle power may hide
wattspan_baseline_unknown_energy_joules_total
```

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
`by (...)`; a counter keeps the least reliable one of its joules. By OTLP the new series begins
at 0.

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

CHAPTERS = (
    Chapter(
        "Energy and power by domain",
        "Settled energy is divided among processes, idle and unattributed energy: the accounts "
        "below sum to it in every scrape. `wattspan_pending_energy_joules` is measured energy "
        "before its division.",
        ENERGY,
    ),
    Chapter(
        "Attribution",
        "For each attributed domain, energy = share of processes + idle + unattributed, to the "
        "microjoule. The sum of increases of all process series of one `hw_type`, including "
        "`other`, is the share of processes. The energy of a process that loses its series "
        "counts in `other` from then on; its earlier energy stays in an account that is not "
        "exported, so that no joule counts twice. Groups overlap (a process is in its container "
        "*and* its user): sum within one `group_kind` only.",
        ACCOUNTS,
    ),
    Chapter(
        "Spans",
        "Energy is *exclusive*: at every instant the agent divides the power of a process among "
        "its innermost open spans, so the sum of spans never exceeds the energy of their "
        "processes. A span counts in all of these series at once, when it has ended and its "
        "energy has settled. A span with unknown energy counts in "
        "`wattspan_span_outcomes_total` only. In OpenMetrics the energy has exemplars: trace "
        "id, span id and joules of the span with the most energy in the last 15 s. [How to see "
        "spans](../how-to/see-spans.md).",
        SPANS,
    ),
    Chapter(
        "Requests to language models",
        "The GPU energy of the processes of an engine, divided among its concurrent requests. A "
        "request counts when all its energy has settled, half a minute or more after its end. "
        "The same joules are in the series of processes and groups, and in those of spans where "
        "the sender of the spans uses the GPU itself: do not add them. Energy of tokens + idle "
        "energy is that of the engines' processes since their first request, except for requests "
        "that wait. [Energy of a request](../explanation/energy-of-a-request.md).",
        INFERENCE,
    ),
    Chapter(
        "GPUs",
        "A series is absent if the device does not report the figure. Never add the compared "
        "energies to `hw_energy_joules_total`: they are the same joules, measured in two ways.",
        GPUS,
    ),
    Chapter(
        "Tuning and caps",
        "Whole-run figures include everything since the job was first seen, exploration too, "
        "and are relative to its original setting. The bound of the whole-run slowdown "
        "is one of 99 %, that of a held setting has the configured confidence. Savings are "
        "estimates from comparisons, with an interval of two standard errors on each side; its "
        "lower end has only energy between comparisons. `wattspan_autotune_saved_joules_total` "
        "counts the highest lower bound so far, so it never falls; `provenance` is that of the "
        "compared energies. The counters of a job continue under another `knob` when that one "
        "is tuned. `wattspan tune explain` shows the reasons of a job's state.",
        TUNING,
    ),
    Chapter(
        "Fleet",
        "Power budgets that several hosts share. Absent outside a "
        "[fleet](../explanation/fleet-budgets.md). They are limits and requests, and of an "
        "emulated host those of emulated devices. The sums of a place come from the leader of the "
        "fleet only, which changes: take the maximum over all hosts.",
        FLEET,
    ),
    Chapter(
        "Cost and carbon",
        "Energy of the cover, multiplied by the rate of a kilowatt-hour at the time of "
        "settlement. Absent unless `[cost]` and `[carbon]` set a rate "
        "([how](../how-to/cost-and-carbon.md)). A rate is absent while it is unknown; a price "
        "below zero counts as unknown. Energy without a known rate is in "
        "`wattspan_unweighed_energy_joules_total` and in no total. On an emulated host the "
        "figures are not measurements: `provenance` is `emulated`.",
        FOOTPRINT,
    ),
    Chapter(
        "Sources",
        "Health of the counter sources. An unreadable counter affects its own series only.",
        SOURCES,
    ),
    Chapter(
        "The agent",
        "Resources and losses of the agent itself.",
        AGENT,
    ),
)

ATTRIBUTES = {
    "applied": "`true` if the tuner applies the job's decisions, `false` for advice only",
    "bound": "`lower` or `upper` end of the interval",
    "certainty": "`known`; `lower_bound`: a part is unknown, and the true figure is not smaller; "
    "`unknown`: there is no number",
    "clock": "`sm` or `memory`",
    "command": "command of the process; `other` for all processes without their own series",
    "currency": "currency of the amounts, from `[cost] currency`",
    "direction": "`input` or `output`",
    "model": "language model that the engine reports; `other` beyond 64 pairs of service and model",
    "role": "`client`: calls a model elsewhere; `engine`: without known energy of a GPU",
    "part": "`gpu`, `cpu`, `memory` or `idle`",
    "token_type": "`input` (the prompt), `output` (generated tokens) or `all`",
    "division": "`model`: by the learned energy of the model's tokens; `tokens`: by token counts "
    "while that energy is not known, or by the common energy of the pooled models beyond the eight "
    "most active ones of a GPU",
    "emulated": "`true` on an emulated host; its figures are not measurements",
    "engine": "name of a `[[serving.engine]]`",
    "exporter": "name of the exporter",
    "figure": "`energy` or `power`",
    "footprint": "`cost` or `carbon`",
    "group": "name of the virtual machine, container, pod, job, unit, cgroup or user; below a "
    "delegated cgroup or inside a container it begins with its author: `alice/foo.service`, "
    "`0123456789ab/nginx.service`",
    "group_kind": "`vm`, `container`, `pod`, `job`, `unit`, `cgroup` or `user`",
    "host.name": "name of the host",
    "holder": "owner of the cap: a job, `operator` for a fixed cap, `budget` for the power budget",
    "hw.driver_version": "driver version of the device",
    "hw.id": "stable identity of the domain: a zone such as `intel-rapl:0`, the UUID of a GPU",
    "hw.model": "model of the device",
    "hw.name": "display name of the domain",
    "hw.parent": "absent for members of the cover; else the domain that contains or "
    f"duplicates this one, or `{OUTSIDE_COVER}`",
    "basis": "origin of the static power: `configured`, `fitted` or `lower_bound`; of a GPU's "
    "energy: `counter` or `power`",
    "sensors": "`agree` or `disagree`: energy counter and integrated power of a GPU, within their "
    "stated errors; `unknown` in its first minute",
    "hw.type": "`cpu`, `gpu`, `memory` or `enclosure`",
    "in_cover": "`true` if the domain is in the cover, whose sum is the energy of the host",
    "job": "name of the tuned job, at most 100 characters. Prometheus calls it `exported_job`, "
    "because `job` is the scrape job; rules and dashboards use that name. Keep the default of "
    "`honor_labels`. OTLP sends `exported_job`",
    "k8s.container.name": "name of the container in its pod",
    "k8s.namespace.name": "namespace of the pod",
    "k8s.pod.name": "name of the pod",
    "knob": "`gpu_power`, `gpu_clock` or `cpu_power`",
    "limit": "`minimum`, `default`, `maximum`, `requested` or `enforced`; for a device "
    "that can be capped, `original` is the limit before the first write of the capper, and "
    "`ceiling` its fixed cap or its share of the power budget",
    "listener": "`prometheus`, `http`, `grpc`, `unix` (both Unix sockets for spans) or `api`",
    "method": "attribution method of the domain's energy: `cpu-time`, `learned`, `counters`, "
    "`gpu-sm-utilisation`, `mig-gpm`, `mig-dcgm`, `mig-equal`, ...; for compared energy, "
    "`counter` or `integrated`; `engine_metrics`: by an engine's own counters of tokens",
    "mig": "`true` if the GPU is divided into MIG instances; absent if unknown",
    "mode": "`off`, `advise` or `apply`",
    "move": "`probe`, `hold`, `release` or `decline`",
    "origin": "source of the rate: `constant`, `schedule` (a tariff file) or `metric` (a server "
    "or a file that another program updates)",
    "pid": "process id in the agent's pid namespace; absent for work that outlived its process",
    "place": "row or rack of the fleet, such as `row-1/rack-3`; `fleet` for all hosts",
    "pool": "bounded pool that users fill, listed in docs/security.md",
    "provenance": "origin of the figure: `measured` by an energy counter (for a power "
    "sensor: by the sensor), `derived` from measured power, `estimated` by a load model, "
    "`emulated` on an emulated host; for a sum, the least reliable of its parts",
    "quality": "`baseline_learned`, `baseline_remembered`, `baseline_doubtful` or "
    "`baseline_unknown`",
    "reason": "reason, one of a fixed set of each metric",
    "slo": "key of a latency limit in `slo`, such as `ttft_p99`",
    "resolution": "update interval of the counter",
    "service.name": "`service.name` of the spans' resource; with `span_name`, `other` for all "
    "names beyond the limit",
    "source": "name of the counter source",
    "span.name": "name of the spans",
    "owner": "principal of the process, as the kernel proves it: a user, a user and a "
    "container, or a pod",
    "state": "`waiting`, `exploring`, `holding`, `released`, `declined` or `ended`",
    "trouble": "`denied`, `absent`, `retry`, `stuck`, `malformed` or `suspended`",
    "window": "length of the window: `1s`, `10s` or `60s`",
}
"""Description of each attribute in Markdown."""


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
    return ((metric.series, metric.help) for metric in SelfMetrics("").metrics)
