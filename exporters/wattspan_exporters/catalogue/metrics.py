"""The list of every metric, for all exporters and the reference page."""

from __future__ import annotations

from wattspan_exporters.catalogue import agent, energy, gpu, tuning
from wattspan_exporters.catalogue.definition import Chapter, Instrument, Metric
from wattspan_exporters.catalogue.footprint import FOOTPRINT
from wattspan_exporters.catalogue.tuning import TUNING

COUNTER, UPDOWN = Instrument.COUNTER, Instrument.UPDOWN
GAUGE, INFO = Instrument.GAUGE, Instrument.INFO

HARDWARE_ATTRIBUTES = ("hw.id", "hw.type", "hw.name", "hw.parent", "provenance")
TYPE_ATTRIBUTES = ("hw.id", "hw.type", "provenance")
NAME_ATTRIBUTES = ("hw.id", "hw.name")

ATTRIBUTES = {
    "applied": "`true` if the tuner applies the job's decisions, `false` for advice only",
    "bound": "`lower` or `upper` bound of the interval at the configured confidence level",
    "clock": "`sm` or `memory`",
    "command": "command of the process; `other` for all processes without their own series",
    "currency": "currency of the amounts, from `[cost] currency`",
    "direction": "`input` or `output`",
    "emulated": "`true` on an emulated host; its figures are not measurements",
    "exporter": "name of the exporter",
    "footprint": "`cost` or `carbon`",
    "group": "name of the container, pod, job, unit, cgroup or user",
    "group_kind": "`container`, `pod`, `job`, `unit`, `cgroup` or `user`",
    "host.name": "name of the host",
    "holder": "owner of the cap: a job, `operator` for a fixed cap, `budget` for the power budget",
    "hw.driver_version": "driver version of the device",
    "hw.id": "stable identity of the domain: a zone such as `intel-rapl:0`, the UUID of a GPU",
    "hw.model": "model of the device",
    "hw.name": "display name of the domain",
    "hw.parent": "absent for members of the cover; else the domain that contains or "
    f"duplicates this one, or `{energy.OUTSIDE_COVER}`",
    "hw.type": "`cpu`, `gpu`, `memory` or `enclosure`",
    "in_cover": "`true` if the domain is in the cover, whose sum is the energy of the host",
    "job": "name of the tuned job, at most 100 characters. Prometheus calls it `exported_job`, "
    "because `job` is the scrape job; rules and dashboards use that name. Keep the default of "
    "`honor_labels`. OTLP sends `exported_job`",
    "knob": "`gpu_power`, `gpu_clock` or `cpu_power`",
    "limit": "`minimum`, `default`, `maximum`, `requested` or `enforced`; for a device "
    "that can be capped, `original` is the limit before the first write of the capper, and "
    "`ceiling` its share of the power budget",
    "listener": "`prometheus`, `http`, `grpc`, `unix` (both Unix sockets for spans) or `api`",
    "method": "attribution method of the domain's energy; for compared energy, `counter` or "
    "`integrated`",
    "mig": "`true` if the GPU is divided into MIG instances; absent if unknown",
    "mode": "`off`, `advise` or `apply`",
    "move": "`probe`, `hold`, `release` or `decline`",
    "origin": "source of the rate: `constant`, `schedule` (a tariff file) or `metric` (a server "
    "or a file that another program updates)",
    "pid": "process id in the agent's pid namespace; absent for work that outlived its process",
    "provenance": "origin of the figure: `measured` by an energy counter (for a power "
    "sensor: by the sensor), `derived` from measured power, `estimated` by a load model, "
    "`emulated` on an emulated host; for a sum, the least reliable of its parts",
    "reason": "reason, one of a fixed set of each metric",
    "resolution": "update interval of the counter",
    "service.name": "`service.name` of the spans' resource; with `span_name`, `other` for all "
    "names beyond the limit",
    "source": "name of the counter source",
    "span.name": "name of the spans",
    "state": "`waiting`, `exploring`, `holding`, `released`, `declined` or `ended`",
    "trouble": "`denied`, `absent`, `retry`, `stuck` or `malformed`",
}
"""Description of each attribute in Markdown."""


ENERGY = Chapter(
    "Energy and power by domain",
    "Settled energy is divided among processes, idle and unattributed energy: the accounts below "
    "sum to it in every scrape. `wattspan_pending_energy_joules` is measured energy before its "
    "division.",
    (
        Metric(
            "hw.energy", COUNTER, "J",
            "Energy of one domain since its discovery.",
            HARDWARE_ATTRIBUTES, energy.domain_energy, lasting=True,
        ),
        Metric(
            "hw.power", GAUGE, "W",
            "Mean power of one domain over about the last second.",
            HARDWARE_ATTRIBUTES, energy.domain_power,
        ),
        Metric(
            "hw.host.energy", COUNTER, "J",
            "Energy of all domains of the cover, without double counting.",
            ("provenance",), energy.host_energy, lasting=True,
        ),
        Metric(
            "hw.host.power", GAUGE, "W",
            "Mean power of the cover; absent while the power of any member is unknown.",
            ("provenance",), energy.host_power,
        ),
        Metric(
            "wattspan.domain.up", GAUGE, "",
            "Presence of the domain: 1 if present, 0 if only its account remains.",
            ("hw.id",), energy.domain_up,
        ),
        Metric(
            "wattspan.gap.time", COUNTER, "s",
            "Time with unknown energy, by reason. The agent does not interpolate it.",
            ("hw.id", "reason"), energy.gap_time, lasting=True,
            # The translation rules would keep "time" in the name.
            series="wattspan_gap_seconds_total",
        ),
        Metric(
            "wattspan.domain.info", INFO, "",
            "Description of a domain and of the origin of its figures.",
            (*HARDWARE_ATTRIBUTES[:4], "source", "provenance", "method", "in_cover", "resolution"),
            energy.domain_info,
        ),
    ),
)  # fmt: skip

ACCOUNTS = Chapter(
    "Attribution",
    "For each attributed domain, energy = share of processes + idle + unattributed, to the "
    "microjoule. The sum of increases of all process series of one `hw_type`, including `other`, "
    "is the share of processes. The energy of a process that loses its series counts in `other` "
    "from then on; its earlier energy stays in an account that is not exported, so that no joule "
    "counts twice. Groups overlap (a process is in its container *and* its user): sum within one "
    "`group_kind` only.",
    (
        Metric(
            "wattspan.process.energy", COUNTER, "J",
            "Energy attributed to one listed process, or to all other processes as `other`.",
            ("hw.type", "pid", "command", "group", "provenance"), energy.process_energy,
            lasting=True, begins=energy.process_start_times,
        ),
        Metric(
            "wattspan.group.energy", COUNTER, "J",
            "Energy attributed to one group of processes, including ended processes.",
            ("hw.type", "group_kind", "group", "provenance"), energy.group_energy,
            lasting=True,
        ),
        Metric(
            "wattspan.idle.energy", COUNTER, "J",
            "Idle energy of a domain, by its learned idle power.",
            TYPE_ATTRIBUTES, energy.idle_energy, lasting=True,
        ),
        Metric(
            "wattspan.unattributed.energy", COUNTER, "J",
            "Active energy of a domain that cannot be attributed to a process.",
            TYPE_ATTRIBUTES, energy.unattributed_energy, lasting=True,
        ),
        Metric(
            "wattspan.pending.energy", UPDOWN, "J",
            "Measured energy before its division; no counter includes it yet.",
            TYPE_ATTRIBUTES, energy.pending_energy,
        ),
        Metric(
            "wattspan.idle.power", GAUGE, "W",
            "Learned idle power of the domain.",
            TYPE_ATTRIBUTES, energy.idle_power,
        ),
    ),
)  # fmt: skip

SPANS = Chapter(
    "Spans",
    "Energy is *exclusive*: at every instant the agent divides the power of a process among its "
    "innermost open spans, so the sum of spans never exceeds the energy of their processes. A span "
    "counts in all of these series at once, when it has ended and its energy has settled. A span "
    "with unknown energy counts in `wattspan_span_outcomes_total` only. In OpenMetrics the energy "
    "has exemplars: trace id, span id and joules of the span with the most energy in the last "
    "15 s. [How to see spans](../how-to/see-spans.md).",
    (
        Metric(
            "wattspan.span.energy", COUNTER, "J",
            "Exclusive energy of the spans of one name.",
            ("hw.type", "service.name", "span.name", "provenance"), energy.span_energy,
            exemplars=energy.span_exemplars, lasting=True,
        ),
        Metric(
            "wattspan.span.time", COUNTER, "s",
            "Sum of the measured durations of the spans of one name.",
            ("service.name", "span.name"), energy.span_gauge(lambda row: row.time), lasting=True,
            # The translation rules would keep "time" in the name.
            series="wattspan_span_seconds_total",
        ),
        Metric(
            "wattspan.spans", COUNTER, "{span}",
            "Number of spans of one name.",
            ("service.name", "span.name"), energy.span_gauge(lambda row: row.count), lasting=True,
        ),
        Metric(
            "wattspan.span.tokens", COUNTER, "{token}",
            "Tokens in the `gen_ai.usage.*` attributes of the spans of one name.",
            ("service.name", "span.name", "direction"), energy.span_tokens, lasting=True,
        ),
        Metric(
            "wattspan.span.outside.energy", COUNTER, "J",
            "Energy of a service's processes outside of their spans.",
            ("hw.type", "service.name", "provenance"), energy.energy_outside_spans, lasting=True,
        ),
        Metric(
            "wattspan.span.outcomes", COUNTER, "{span}",
            "Spans by outcome of the attribution; docs/how-to/see-spans.md lists the reasons.",
            ("reason",), energy.spans_by_reason(lambda spans: spans.outcomes),
        ),
        Metric(
            "wattspan.spans.received", COUNTER, "{span}",
            "Accepted spans.",
            (), energy.span_total(lambda spans: spans.received),
        ),
        Metric(
            "wattspan.spans.refused", COUNTER, "{span}",
            "Rejected spans, by reason.",
            ("reason",), energy.spans_by_reason(lambda spans: spans.refused),
        ),
        Metric(
            "wattspan.spans.deferred", COUNTER, "{span}",
            "Spans answered with a retry status because of a full buffer, once for each attempt.",
            (), energy.span_total(lambda spans: spans.deferred),
        ),
        Metric(
            "wattspan.spans.open", UPDOWN, "{span}",
            "Announced spans that have not ended.",
            (), energy.span_total(lambda spans: spans.open),
        ),
        Metric(
            "wattspan.spans.announcers", UPDOWN, "{connection}",
            "Connections to the side channel, on which processes announce spans.",
            (), energy.span_total(lambda spans: spans.announcers),
        ),
        Metric(
            "wattspan.spans.announcers.refused", COUNTER, "{connection}",
            "Side-channel connections closed by the agent, by reason: limit or protocol error.",
            ("reason",), energy.spans_by_reason(lambda spans: spans.announcers_refused),
        ),
        Metric(
            "wattspan.spans.announcements.lost", COUNTER, "{record}",
            "Announced starts and ends overwritten before the agent read them.",
            (), energy.span_total(lambda spans: spans.announcements_lost),
        ),
        Metric(
            "wattspan.spans.forwarded", COUNTER, "{span}",
            "Spans accepted by the collector to which the agent forwards.",
            (), energy.span_total(lambda spans: spans.forwarded),
        ),
        Metric(
            "wattspan.spans.forward.drops", COUNTER, "{span}",
            "Spans not forwarded to the collector, by reason.",
            ("reason",), energy.spans_by_reason(lambda spans: spans.forward_drops),
        ),
        Metric(
            "wattspan.spans.forward.repeats", COUNTER, "{span}",
            "Spans sent again after an unknown result; the collector may have duplicates.",
            (), energy.span_total(lambda spans: spans.forward_repeats),
        ),
        Metric(
            "wattspan.spans.forward.queue", UPDOWN, "By",
            "Bytes in the queue for the collector.",
            (), energy.span_total(lambda spans: spans.forward_queue),
        ),
    ),
)  # fmt: skip

GPUS = Chapter(
    "GPUs",
    "A series is absent if the device does not report the figure. Never add the compared energies "
    "to `hw_energy_joules_total`: they are the same joules, measured in two ways.",
    (
        Metric(
            "wattspan.power.limit", GAUGE, "W",
            "Power limit of the device.",
            ("hw.id", "limit"), tuning.all_power_limits,
        ),
        Metric(
            "wattspan.gpu.power.average", GAUGE, "W",
            "Average power by the sensor, over the sensor's own window.",
            (*NAME_ATTRIBUTES, "provenance"), gpu.power_sensor(lambda gpu: gpu.power_average),
        ),
        Metric(
            "wattspan.gpu.power.instant", GAUGE, "W",
            "Instantaneous power by the sensor.",
            (*NAME_ATTRIBUTES, "provenance"), gpu.power_sensor(lambda gpu: gpu.power_instant),
        ),
        Metric(
            "wattspan.gpu.compared.energy", GAUGE, "J",
            "Energy of one interval, by the counter and by integrated power.",
            ("hw.id", "method", "provenance"), gpu.compared_energy,
        ),
        Metric(
            "wattspan.gpu.energy.divergence", GAUGE, "1",
            "Ratio of integrated power to counted energy, minus 1.",
            NAME_ATTRIBUTES, gpu.gpu_gauge(gpu.divergence),
        ),
        Metric(
            "hw.gpu.utilization", GAUGE, "1",
            "Fraction of time with a running kernel on the GPU.",
            NAME_ATTRIBUTES, gpu.gpu_gauge(lambda gpu: gpu.utilisation),
        ),
        Metric(
            # hw.gpu.memory.utilization is the used fraction of the memory.
            "wattspan.gpu.memory.busy", GAUGE, "1",
            "Fraction of time with reads or writes of the GPU memory.",
            NAME_ATTRIBUTES, gpu.gpu_gauge(lambda gpu: gpu.memory_utilisation),
        ),
        Metric(
            "hw.gpu.memory.usage", UPDOWN, "By",
            "GPU memory in use.",
            NAME_ATTRIBUTES, gpu.gpu_gauge(lambda gpu: gpu.memory_used),
        ),
        Metric(
            "hw.gpu.memory.limit", UPDOWN, "By",
            "Size of the GPU memory.",
            NAME_ATTRIBUTES, gpu.gpu_gauge(lambda gpu: gpu.memory_total),
        ),
        Metric(
            "hw.temperature", GAUGE, "Cel",
            "Temperature of the device.",
            ("hw.id", "hw.type", "hw.name"), gpu.temperature,
        ),
        Metric(
            "wattspan.gpu.clock", GAUGE, "Hz",
            "Current clock frequency.",
            (*NAME_ATTRIBUTES, "clock"), gpu.clocks,
        ),
        Metric(
            "wattspan.gpu.throttled", COUNTER, "s",
            "Time of throttled clocks, by reason.",
            ("hw.id", "reason"), gpu.throttled_time, begins=energy.boot_start_times,
        ),
        Metric(
            "wattspan.gpu.throttling", GAUGE, "",
            "Throttling of the clocks for this reason: 1 while active, else 0.",
            ("hw.id", "reason"), gpu.throttling,
        ),
        Metric(
            "wattspan.gpu.info", INFO, "",
            "Description of a GPU.",
            (*NAME_ATTRIBUTES, "hw.model", "hw.driver_version", "mig"), gpu.gpu_info,
        ),
    ),
)  # fmt: skip

SOURCES = Chapter(
    "Sources",
    "Health of the counter sources. An unreadable counter affects its own series only.",
    (
        Metric(
            "wattspan.source.up", GAUGE, "",
            "Result of the last read: 1 if any domain of the source was readable, else 0.",
            ("source",), agent.source_value(lambda health: int(health.up)),
        ),
        Metric(
            "wattspan.source.reads", COUNTER, "",
            "Reads of the source.",
            ("source",), agent.source_value(lambda health: health.reads),
        ),
        Metric(
            "wattspan.source.failures", COUNTER, "",
            "Failed readings.",
            ("source",), agent.source_value(lambda health: health.failed),
        ),
        Metric(
            "wattspan.source.unreadable", GAUGE, "",
            "Currently unreadable items of the source, by kind of trouble.",
            ("source", "trouble"), agent.unreadable,
        ),
        Metric(
            "wattspan.source.read", GAUGE, "s",
            "Duration of the last read of the source.",
            ("source",), agent.source_value(lambda health: health.read_nanoseconds),
        ),
    ),
)  # fmt: skip

AGENT = Chapter(
    "The agent",
    "Resources and losses of the agent itself.",
    (
        Metric(
            "wattspan.host.info", INFO, "",
            "Name of the host; `emulated` is true on an emulated host.",
            ("host.name", "emulated"), agent.host_info,
        ),
        Metric(
            "wattspan.snapshot.time", GAUGE, "s",
            "Unix time of the figures in this scrape.",
            (), agent.snapshot_time,
        ),
        Metric(
            "wattspan.agent.start.time", GAUGE, "s",
            "Unix time of the start of the agent.",
            (), agent.agent_value(lambda stats: stats.started.wall),
        ),
        Metric(
            "wattspan.agent.ticks", COUNTER, "",
            "Polls of the sampler.",
            (), agent.agent_value(lambda stats: stats.ticks),
        ),
        Metric(
            "wattspan.agent.missed.ticks", COUNTER, "",
            "Polls skipped because the previous poll was still running.",
            (), agent.agent_value(lambda stats: stats.missed_ticks),
        ),
        Metric(
            "wattspan.agent.cpu", COUNTER, "s",
            "CPU time of the agent.",
            (), agent.agent_value(lambda stats: round(stats.cpu_seconds * 1e9)),
        ),
        Metric(
            "wattspan.agent.resident.memory", GAUGE, "By",
            "Resident memory of the agent.",
            (), agent.agent_value(lambda stats: stats.rss_bytes),
        ),
        Metric(
            "wattspan.agent.processes", GAUGE, "",
            "Processes tracked by the agent.",
            (), agent.agent_value(lambda stats: stats.processes),
        ),
        Metric(
            "wattspan.agent.late.usages", COUNTER, "",
            "Usage records later than the settlement of their interval.",
            (), agent.agent_value(lambda stats: stats.late_usages),
        ),
        Metric(
            "wattspan.agent.unnamed.groups", COUNTER, "",
            "Attributions to the group `other` because of the limit of groups.",
            (), agent.agent_value(lambda stats: stats.unnamed_groups),
        ),
        Metric(
            "wattspan.agent.dropped.history", COUNTER, "",
            "Entries dropped from the in-memory history by its memory limit.",
            (), agent.agent_value(lambda stats: stats.dropped_history),
        ),
        Metric(
            "wattspan.agent.exporter.drops", COUNTER, "",
            "Items dropped by an exporter.",
            ("exporter",), agent.exporter_drops,
        ),
        Metric(
            "wattspan.agent.refusals", COUNTER, "{request}",
            "Connections and requests rejected by a listener.",
            ("listener", "reason"), agent.refusals,
        ),
    ),
)  # fmt: skip

CHAPTERS = (ENERGY, ACCOUNTS, SPANS, GPUS, TUNING, FOOTPRINT, SOURCES, AGENT)

CATALOGUE = tuple(metric for chapter in CHAPTERS for metric in chapter.metrics)
