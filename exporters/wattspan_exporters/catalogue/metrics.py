"""Every metric, once: each exporter and the reference page are made from this list."""

from __future__ import annotations

from wattspan_exporters.catalogue import agent, energy, gpu, tuning
from wattspan_exporters.catalogue.footprint import FOOTPRINT
from wattspan_exporters.catalogue.metric import Chapter, Instrument, Metric
from wattspan_exporters.catalogue.tuning import TUNING

COUNTER, UPDOWN = Instrument.COUNTER, Instrument.UPDOWN
GAUGE, INFO = Instrument.GAUGE, Instrument.INFO

HARDWARE_ATTRIBUTES = ("hw.id", "hw.type", "hw.name", "hw.parent", "provenance")
TYPE_ATTRIBUTES = ("hw.id", "hw.type", "provenance")
NAME_ATTRIBUTES = ("hw.id", "hw.name")

ATTRIBUTES = {
    "applied": "`true` if the job's decisions are carried out, `false` if they are advice",
    "bound": "`lower` or `upper`, of the interval at the declared confidence",
    "clock": "`sm` or `memory`",
    "command": "the process's command name; `other` for all processes that are not listed",
    "currency": "what amounts are in, as `[cost] currency` says",
    "direction": "`input` or `output`",
    "emulated": "`true` on an emulated host: its figures are true of no machine",
    "exporter": "the exporter's name",
    "footprint": "`cost` or `carbon`",
    "group": "the name of the container, pod, job, unit, cgroup or user",
    "group_kind": "`container`, `pod`, `job`, `unit`, `cgroup` or `user`",
    "host.name": "the host's name",
    "holder": "who holds the cap: a job, `operator` for a fixed one, `budget` for the host's",
    "hw.driver_version": "the version of the device's driver",
    "hw.id": "the domain's stable identity: a zone such as `intel-rapl:0`, a GPU's UUID",
    "hw.model": "the device's model",
    "hw.name": "the domain's name for people",
    "hw.parent": "absent for members of the cover; else the domain this one lies within or "
    f"repeats, or `{energy.OUTSIDE_COVER}`",
    "hw.type": "`cpu`, `gpu`, `memory` or `enclosure`",
    "in_cover": "`true` if the domain is part of the disjoint set that may be summed",
    "job": "the tuned job's name, of at most 100 characters; Prometheus, whose own `job` is the "
    "scrape's, calls it `exported_job`, and so do rules and dashboards: leave the scrape's "
    "`honor_labels` at its default; OTLP sends it as `exported_job`",
    "knob": "`gpu_power`, `gpu_clock` or `cpu_power`",
    "limit": "`minimum`, `default`, `maximum`, `requested` or `enforced`; where the device can be "
    "capped, `original` is what stood before the agent set anything, and `ceiling` its part of "
    "the host's power budget",
    "listener": "`prometheus`, `http`, `grpc`, `unix` (both Unix sockets for spans) or `api`",
    "method": "how the domain's energy is charged to processes; for compared energy, `counter` "
    "or `integrated`",
    "mig": "`true` if the GPU is split into instances; absent where that is not known",
    "mode": "`off`, `advise` or `apply`",
    "move": "`probe`, `hold`, `release` or `decline`",
    "origin": "where the rate comes from: `constant`, `schedule` (a tariff file) or `metric` (a "
    "server or a file that somebody else keeps)",
    "pid": "the process id, in the agent's namespace; absent for work that outlived its process",
    "provenance": "how the figure was obtained: `measured` by an energy counter (for a power "
    "sensor: by the sensor), `derived` from measured power, `estimated` by a model of load, "
    "`emulated` on an emulated host; for a sum, the least trustworthy of its parts",
    "reason": "why",
    "resolution": "how often the counter moves",
    "service.name": "the service's name, as its spans' resource says; with `span_name`, `other` "
    "for all names for which there was no room",
    "source": "the counter source's name",
    "span.name": "the spans' name",
    "state": "`waiting`, `exploring`, `holding`, `released`, `declined` or `ended`",
    "trouble": "`denied`, `absent`, `retry`, `stuck` or `malformed`",
}
"""What each attribute means, in Markdown."""


ENERGY = Chapter(
    "Energy and power by domain",
    "Settled energy: what has been divided among processes, idle and unattributed, so that the "
    "accounts below add up to it in every scrape. What is measured and not yet divided is "
    "`wattspan_pending_energy_joules`.",
    (
        Metric(
            "hw.energy", COUNTER, "J",
            "Energy spent in one domain since it was first seen.",
            HARDWARE_ATTRIBUTES, energy.domain_energy, lasting=True,
        ),
        Metric(
            "hw.power", GAUGE, "W",
            "Mean power of one domain over about the last second.",
            HARDWARE_ATTRIBUTES, energy.domain_power,
        ),
        Metric(
            "hw.host.energy", COUNTER, "J",
            "Energy spent in all domains of the cover, each joule once.",
            ("provenance",), energy.host_energy, lasting=True,
        ),
        Metric(
            "hw.host.power", GAUGE, "W",
            "Mean power of the cover; absent while that of any member is unknown.",
            ("provenance",), energy.host_power,
        ),
        Metric(
            "wattspan.domain.up", GAUGE, "",
            "Whether the domain is there: 0 keeps the account of one that is gone.",
            ("hw.id",), energy.domain_up,
        ),
        Metric(
            "wattspan.gap.time", COUNTER, "s",
            "Time whose energy is unknown, by reason; nothing is guessed for it.",
            ("hw.id", "reason"), energy.gap_time, lasting=True,
            # Fixed without the "time" that the rules would keep.
            series="wattspan_gap_seconds_total",
        ),
        Metric(
            "wattspan.domain.info", INFO, "",
            "What a domain is, and how its figures are obtained.",
            (*HARDWARE_ATTRIBUTES[:4], "source", "provenance", "method", "in_cover", "resolution"),
            energy.domain_info,
        ),
    ),
)  # fmt: skip

ACCOUNTS = Chapter(
    "Who spent it",
    "For each attributed domain, energy = its processes' share + idle + unattributed, to the "
    "microjoule. Summed over `hw_type`, the increases of the process series, `other` included, "
    "are the processes' share: a process that is no longer listed keeps what it was charged in "
    "an account of its own inside the agent, which is not exported, and spends into `other` "
    "from then on, so its series ends and no joule is counted twice. Groups overlap (a process "
    "is in its container *and* its user): sum within one `group_kind` only.",
    (
        Metric(
            "wattspan.process.energy", COUNTER, "J",
            "Energy charged to one process while it is listed, and to all others as one.",
            ("hw.type", "pid", "command", "group", "provenance"), energy.process_energy,
            lasting=True, begins=energy.process_start_times,
        ),
        Metric(
            "wattspan.group.energy", COUNTER, "J",
            "Energy charged to one group of processes, those that have ended included.",
            ("hw.type", "group_kind", "group", "provenance"), energy.group_energy,
            lasting=True,
        ),
        Metric(
            "wattspan.idle.energy", COUNTER, "J",
            "Energy a domain drew for doing nothing, by its learned baseline.",
            TYPE_ATTRIBUTES, energy.idle_energy, lasting=True,
        ),
        Metric(
            "wattspan.unattributed.energy", COUNTER, "J",
            "Active energy of a domain that no process can be charged for.",
            TYPE_ATTRIBUTES, energy.unattributed_energy, lasting=True,
        ),
        Metric(
            "wattspan.pending.energy", UPDOWN, "J",
            "Energy measured and not yet divided; in no counter until it is.",
            TYPE_ATTRIBUTES, energy.pending_energy,
        ),
        Metric(
            "wattspan.idle.power", GAUGE, "W",
            "The learned baseline: what the domain draws when nothing runs.",
            TYPE_ATTRIBUTES, energy.idle_power,
        ),
    ),
)  # fmt: skip

SPANS = Chapter(
    "Spans",
    "Energy is *exclusive*: at every instant the power of a process is divided among its innermost "
    "open spans, so the rows add up and never exceed their processes. A span counts when it has "
    "ended and its energy has settled, in all of these series at once; one whose energy is not "
    "known is in none of them but in `wattspan_span_outcomes_total`. Over OpenMetrics the energy "
    "carries exemplars: the trace and span id of the span that spent most in the last 15 s, and "
    "its joules. [How to see spans](../how-to/see-spans.md).",
    (
        Metric(
            "wattspan.span.energy", COUNTER, "J",
            "Exclusive energy of the spans of one name.",
            ("hw.type", "service.name", "span.name", "provenance"), energy.span_energy,
            exemplars=energy.span_exemplars, lasting=True,
        ),
        Metric(
            "wattspan.span.time", COUNTER, "s",
            "Summed durations of the spans of one name, as far as they were measured.",
            ("service.name", "span.name"), energy.span_gauge(lambda row: row.time), lasting=True,
            # Fixed without the "time" that the rules would keep.
            series="wattspan_span_seconds_total",
        ),
        Metric(
            "wattspan.spans", COUNTER, "{span}",
            "Spans of one name.",
            ("service.name", "span.name"), energy.span_gauge(lambda row: row.count), lasting=True,
        ),
        Metric(
            "wattspan.span.tokens", COUNTER, "{token}",
            "Tokens that the spans of one name told of, as `gen_ai.usage.*`.",
            ("service.name", "span.name", "direction"), energy.span_tokens, lasting=True,
        ),
        Metric(
            "wattspan.span.outside.energy", COUNTER, "J",
            "Energy of a service's processes while none of their spans was open.",
            ("hw.type", "service.name", "provenance"), energy.energy_outside_spans, lasting=True,
        ),
        Metric(
            "wattspan.span.outcomes", COUNTER, "{span}",
            "Spans by what became of them; the reasons are told in the how-to.",
            ("reason",), energy.spans_by_reason(lambda spans: spans.outcomes),
        ),
        Metric(
            "wattspan.spans.received", COUNTER, "{span}",
            "Spans that were received and taken.",
            (), energy.span_total(lambda spans: spans.received),
        ),
        Metric(
            "wattspan.spans.refused", COUNTER, "{span}",
            "Spans that were received and could not be taken, by reason.",
            ("reason",), energy.spans_by_reason(lambda spans: spans.refused),
        ),
        Metric(
            "wattspan.spans.deferred", COUNTER, "{span}",
            "Spans whose sender was asked to come again, because too many waited for their energy; "
            "once for each time.",
            (), energy.span_total(lambda spans: spans.deferred),
        ),
        Metric(
            "wattspan.spans.open", UPDOWN, "{span}",
            "Spans that were announced and have not ended.",
            (), energy.span_total(lambda spans: spans.open),
        ),
        Metric(
            "wattspan.spans.announcers", UPDOWN, "{connection}",
            "Connections of processes that announce their spans.",
            (), energy.span_total(lambda spans: spans.announcers),
        ),
        Metric(
            "wattspan.spans.announcers.refused", COUNTER, "{connection}",
            "Connections to announce spans that were ended by the agent: for want of room, or "
            "because the protocol was broken.",
            ("reason",), energy.spans_by_reason(lambda spans: spans.announcers_refused),
        ),
        Metric(
            "wattspan.spans.announcements.lost", COUNTER, "{record}",
            "Announced starts and ends that were overwritten before the agent could read them.",
            (), energy.span_total(lambda spans: spans.announcements_lost),
        ),
        Metric(
            "wattspan.spans.forwarded", COUNTER, "{span}",
            "Spans that the collector behind the agent has taken.",
            (), energy.span_total(lambda spans: spans.forwarded),
        ),
        Metric(
            "wattspan.spans.forward.drops", COUNTER, "{span}",
            "Spans that the collector behind the agent did not get, by reason.",
            ("reason",), energy.spans_by_reason(lambda spans: spans.forward_drops),
        ),
        Metric(
            "wattspan.spans.forward.repeats", COUNTER, "{span}",
            "Spans that were sent again although the collector may have had them.",
            (), energy.span_total(lambda spans: spans.forward_repeats),
        ),
        Metric(
            "wattspan.spans.forward.queue", UPDOWN, "By",
            "Bytes of spans that wait for the collector behind the agent.",
            (), energy.span_total(lambda spans: spans.forward_queue),
        ),
    ),
)  # fmt: skip

GPUS = Chapter(
    "GPUs",
    "Absent series are figures the device does not give. Never sum the compared energies with "
    "`hw_energy_joules_total`: they are the same joules, measured in two ways.",
    (
        Metric(
            "wattspan.power.limit", GAUGE, "W",
            "A power limit of the device.",
            ("hw.id", "limit"), tuning.all_power_limits,
        ),
        Metric(
            "wattspan.gpu.power.average", GAUGE, "W",
            "What the power sensor reports as its average, over a window of its own.",
            (*NAME_ATTRIBUTES, "provenance"), gpu.power_sensor(lambda gpu: gpu.power_average),
        ),
        Metric(
            "wattspan.gpu.power.instant", GAUGE, "W",
            "What the power sensor reports as the present power.",
            (*NAME_ATTRIBUTES, "provenance"), gpu.power_sensor(lambda gpu: gpu.power_instant),
        ),
        Metric(
            "wattspan.gpu.compared.energy", GAUGE, "J",
            "Energy over one stretch of time, by the counter and by integrated power.",
            ("hw.id", "method", "provenance"), gpu.compared_energy,
        ),
        Metric(
            "wattspan.gpu.energy.divergence", GAUGE, "1",
            "Integrated power over counted energy, less one.",
            NAME_ATTRIBUTES, gpu.gpu_gauge(gpu.divergence),
        ),
        Metric(
            "hw.gpu.utilization", GAUGE, "1",
            "Fraction of time in which the GPU ran anything.",
            NAME_ATTRIBUTES, gpu.gpu_gauge(lambda gpu: gpu.utilisation),
        ),
        Metric(
            # Not hw.gpu.memory.utilization: that is how full the memory is, this how busy.
            "wattspan.gpu.memory.busy", GAUGE, "1",
            "Fraction of time in which the GPU's memory was read or written.",
            NAME_ATTRIBUTES, gpu.gpu_gauge(lambda gpu: gpu.memory_utilisation),
        ),
        Metric(
            "hw.gpu.memory.usage", UPDOWN, "By",
            "GPU memory in use.",
            NAME_ATTRIBUTES, gpu.gpu_gauge(lambda gpu: gpu.memory_used),
        ),
        Metric(
            "hw.gpu.memory.limit", UPDOWN, "By",
            "GPU memory there is.",
            NAME_ATTRIBUTES, gpu.gpu_gauge(lambda gpu: gpu.memory_total),
        ),
        Metric(
            "hw.temperature", GAUGE, "Cel",
            "Temperature of the device.",
            ("hw.id", "hw.type", "hw.name"), gpu.temperature,
        ),
        Metric(
            "wattspan.gpu.clock", GAUGE, "Hz",
            "Present clock frequency.",
            (*NAME_ATTRIBUTES, "clock"), gpu.clocks,
        ),
        Metric(
            "wattspan.gpu.throttled", COUNTER, "s",
            "Time the device has held its clocks down, by reason.",
            ("hw.id", "reason"), gpu.throttled_time, begins=energy.boot_start_times,
        ),
        Metric(
            "wattspan.gpu.throttling", GAUGE, "",
            "Whether the device holds its clocks down for this reason now.",
            ("hw.id", "reason"), gpu.throttling,
        ),
        Metric(
            "wattspan.gpu.info", INFO, "",
            "What a GPU is.",
            (*NAME_ATTRIBUTES, "hw.model", "hw.driver_version", "mig"), gpu.gpu_info,
        ),
    ),
)  # fmt: skip

SOURCES = Chapter(
    "Sources",
    "A counter that cannot be read costs its own series only; here it is seen.",
    (
        Metric(
            "wattspan.source.up", GAUGE, "",
            "Whether the source could read any of its domains at its last turn.",
            ("source",), agent.source_value(lambda health: int(health.up)),
        ),
        Metric(
            "wattspan.source.reads", COUNTER, "",
            "Turns the source has taken.",
            ("source",), agent.source_value(lambda health: health.reads),
        ),
        Metric(
            "wattspan.source.failures", COUNTER, "",
            "Readings that failed.",
            ("source",), agent.source_value(lambda health: health.failed),
        ),
        Metric(
            "wattspan.source.unreadable", GAUGE, "",
            "Things the source cannot read now, by what is wrong with them.",
            ("source", "trouble"), agent.unreadable,
        ),
        Metric(
            "wattspan.source.read", GAUGE, "s",
            "How long the source's last turn took.",
            ("source",), agent.source_value(lambda health: health.read_nanoseconds),
        ),
    ),
)  # fmt: skip

AGENT = Chapter(
    "The agent",
    "What the agent spends and drops itself.",
    (
        Metric(
            "wattspan.host.info", INFO, "",
            "The host, and whether it is an emulated one.",
            ("host.name", "emulated"), agent.host_info,
        ),
        Metric(
            "wattspan.snapshot.time", GAUGE, "s",
            "Unix time of the figures in this scrape.",
            (), agent.snapshot_time,
        ),
        Metric(
            "wattspan.agent.start.time", GAUGE, "s",
            "Unix time at which the agent started.",
            (), agent.agent_value(lambda stats: stats.started.wall),
        ),
        Metric(
            "wattspan.agent.ticks", COUNTER, "",
            "Polls of the counters.",
            (), agent.agent_value(lambda stats: stats.ticks),
        ),
        Metric(
            "wattspan.agent.missed.ticks", COUNTER, "",
            "Polls that were due while another was still running, and were left out.",
            (), agent.agent_value(lambda stats: stats.missed_ticks),
        ),
        Metric(
            "wattspan.agent.cpu", COUNTER, "s",
            "CPU time the agent has used.",
            (), agent.agent_value(lambda stats: round(stats.cpu_seconds * 1e9)),
        ),
        Metric(
            "wattspan.agent.resident.memory", GAUGE, "By",
            "Memory the agent holds.",
            (), agent.agent_value(lambda stats: stats.rss_bytes),
        ),
        Metric(
            "wattspan.agent.processes", GAUGE, "",
            "Processes the agent follows.",
            (), agent.agent_value(lambda stats: stats.processes),
        ),
        Metric(
            "wattspan.agent.late.usages", COUNTER, "",
            "Usage that arrived after its interval had been settled.",
            (), agent.agent_value(lambda stats: stats.late_usages),
        ),
        Metric(
            "wattspan.agent.unnamed.groups", COUNTER, "",
            "Charges that went to a kind's group `other`, for want of room for more groups.",
            (), agent.agent_value(lambda stats: stats.unnamed_groups),
        ),
        Metric(
            "wattspan.agent.dropped.history", COUNTER, "",
            "Entries of the recent past pushed out by its memory bound.",
            (), agent.agent_value(lambda stats: stats.dropped_history),
        ),
        Metric(
            "wattspan.agent.exporter.drops", COUNTER, "",
            "What an exporter could not send or serve, and dropped.",
            ("exporter",), agent.exporter_drops,
        ),
        Metric(
            "wattspan.agent.refusals", COUNTER, "{request}",
            "Connections and requests that a listener turned away.",
            ("listener", "reason"), agent.refusals,
        ),
    ),
)  # fmt: skip

CHAPTERS = (ENERGY, ACCOUNTS, SPANS, GPUS, TUNING, FOOTPRINT, SOURCES, AGENT)

CATALOGUE = tuple(metric for chapter in CHAPTERS for metric in chapter.metrics)
