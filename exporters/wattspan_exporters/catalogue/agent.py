"""Metrics of the agent, of its sources, and of the cost and carbon of the host's energy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from operator import attrgetter

from wattspan.model import Certainty, RatedEnergy, Snapshot, SourceHealth, Trouble
from wattspan_exporters.catalogue.definition import (
    Instrument,
    Metric,
    Sample,
    each,
    items_of,
    single,
)
from wattspan_exporters.catalogue.energy import worst_provenance

COUNTER, GAUGE, INFO = Instrument.COUNTER, Instrument.GAUGE, Instrument.INFO

# -------------------------------------------------------------------------------------- sources


def _source(
    name: str,
    instrument: Instrument,
    unit: str,
    text: str,
    value: Callable[[SourceHealth], int | None],
) -> Metric:
    """A metric of one figure of every source's health."""
    draw = each(attrgetter("health"), lambda health: (health.source,), value)
    return Metric(f"wattspan.source.{name}", instrument, unit, text, ("source",), draw)


def unreadable(snapshot: Snapshot) -> Iterator[Sample]:
    for health in snapshot.health:
        counts = Counter(failure.trouble for failure in health.failures)
        for trouble in Trouble:
            yield (health.source, trouble), counts[trouble]


SOURCES = (
    _source("up", GAUGE, "",
            "Result of the last read: 1 if any domain of the source was readable, else 0.",
            lambda health: int(health.up)),
    _source("reads", COUNTER, "", "Reads of the source.", attrgetter("reads")),
    _source("failures", COUNTER, "", "Failed readings.", attrgetter("failed")),
    Metric("wattspan.source.unreadable", GAUGE, "",
           "Currently unreadable items of the source, by kind of trouble.",
           ("source", "trouble"), unreadable),
    _source("read", GAUGE, "s", "Duration of the last read of the source.",
            attrgetter("read_nanoseconds")),
    _source("calls", COUNTER, "",
            "Calls of the driver's library (NVML, AMD SMI) by the source.", attrgetter("calls")),
)  # fmt: skip

# ---------------------------------------------------------------------------------------- agent


def _agent(name: str, instrument: Instrument, unit: str, text: str, field: str) -> Metric:
    """A metric of one field of AgentStats."""
    draw = single(attrgetter(f"stats.{field}"))
    return Metric(f"wattspan.agent.{name}", instrument, unit, text, (), draw)


def host_info(snapshot: Snapshot) -> Iterator[Sample]:
    yield (snapshot.host, "true" if snapshot.emulated else "false"), 1


AGENT = (
    Metric("wattspan.host.info", INFO, "",
           "Name of the host; `emulated` is true on an emulated host.",
           ("host.name", "emulated"), host_info),
    Metric("wattspan.snapshot.time", GAUGE, "s", "Unix time of the figures in this scrape.",
           (), single(attrgetter("at.wall"))),
    _agent("start.time", GAUGE, "s", "Unix time of the start of the agent.", "started.wall"),
    _agent("ticks", COUNTER, "", "Polls of the sampler.", "ticks"),
    _agent("missed.ticks", COUNTER, "",
           "Polls skipped because the previous poll was still running.", "missed_ticks"),
    _agent("interval", GAUGE, "s", "Present time between two polls of the sampler.", "interval"),
    Metric("wattspan.agent.consumers", GAUGE, "{consumer}",
           "Processes and parts of the agent for which it samples at the fine interval.",
           ("reason",), items_of(attrgetter("stats.demands"))),
    Metric("wattspan.agent.cpu", COUNTER, "s", "CPU time of the agent.",
           (), single(lambda snapshot: round(snapshot.stats.cpu_seconds * 1e9))),
    _agent("resident.memory", GAUGE, "By", "Resident memory of the agent.", "rss_bytes"),
    _agent("processes", GAUGE, "", "Processes tracked by the agent.", "processes"),
    _agent("late.usages", COUNTER, "",
           "Usage records later than the settlement of their interval.", "late_usages"),
    _agent("unnamed.groups", COUNTER, "",
           "Attributions to the group `other` because of the limit of groups.", "unnamed_groups"),
    _agent("dropped.history", COUNTER, "",
           "Entries dropped from the in-memory history by its memory limit.", "dropped_history"),
    Metric("wattspan.agent.exporter.drops", COUNTER, "", "Items dropped by an exporter.",
           ("exporter",), items_of(attrgetter("stats.exporter_drops"))),
    Metric("wattspan.agent.refusals", COUNTER, "{request}",
           "Connections and requests rejected by a listener.",
           ("listener", "reason"), lambda snapshot: snapshot.stats.refusals.items()),
    Metric("wattspan.pool.refusals", COUNTER, "{request}",
           "Items that found a bounded pool full, or lost a place to an owner with fewer.",
           ("pool", "reason"), lambda snapshot: snapshot.stats.pool_refusals.items()),
    Metric("wattspan.pool.used", GAUGE, "1",
           "Used part of the limit of a bounded pool; of several pools of one name, the fullest.",
           ("pool",), items_of(attrgetter("stats.pools_used"))),
)  # fmt: skip

# ----------------------------------------------- cost and carbon: rates and totals in billionths


def _known(rated: RatedEnergy | None, snapshot: Snapshot) -> RatedEnergy | None:
    """None while the energy of every device is unknown, and with it the amount."""
    unknown = rated is not None and snapshot.host_energy[1] is Certainty.UNKNOWN
    return None if rated is None or (unknown and not rated.total) else rated


def cost(snapshot: Snapshot) -> Iterator[Sample]:
    if (rated := _known(snapshot.footprint.cost, snapshot)) is not None:
        yield (rated.unit, rated.origin, worst_provenance(snapshot.summed) or ""), rated.total


def carbon(snapshot: Snapshot) -> Iterator[Sample]:
    if (rated := _known(snapshot.footprint.carbon, snapshot)) is not None:
        yield (rated.origin, worst_provenance(snapshot.summed) or ""), rated.total


def price(snapshot: Snapshot) -> Iterator[Sample]:
    rated = snapshot.footprint.cost
    if rated is not None and rated.rate is not None:
        yield (rated.unit, rated.origin), rated.rate


def intensity(snapshot: Snapshot) -> Iterator[Sample]:
    rated = snapshot.footprint.carbon
    if rated is not None and rated.rate is not None:
        yield (rated.origin,), rated.rate


def energy_without_rate(snapshot: Snapshot) -> Iterator[Sample]:
    """Yield zero as well, so that the first increase is visible to rate functions."""
    for name in ("cost", "carbon"):
        if (rated := getattr(snapshot.footprint, name)) is not None:
            yield (name, worst_provenance(snapshot.summed) or ""), rated.unknown


FOOTPRINT = (
    Metric("wattspan.host.cost", COUNTER, "{currency}", "Cost of the host's energy.",
           ("currency", "origin", "provenance"), cost, lasting=True),
    Metric("wattspan.host.carbon", COUNTER, "g",
           "Carbon dioxide equivalent of the host's energy.",
           ("origin", "provenance"), carbon, lasting=True),
    Metric("wattspan.energy.price", GAUGE, "{currency}/kWh", "Current price of a kilowatt-hour.",
           ("currency", "origin"), price),
    Metric("wattspan.carbon.intensity", GAUGE, "g/kWh",
           "Current carbon dioxide equivalent of a kilowatt-hour.", ("origin",), intensity),
    Metric("wattspan.unweighed.energy", COUNTER, "J",
           "Energy of the host while the rate was unknown.",
           ("footprint", "provenance"), energy_without_rate, lasting=True),
)  # fmt: skip
