"""Metrics of the agent, of its sources, and of the cost and carbon of the host's energy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from operator import attrgetter

from wattspan.model import Certainty, RatedEnergy, Snapshot, SourceHealth, Trouble
from wattspan_exporters.catalogue.definition import (
    Draw,
    Metric,
    Sample,
    declared,
    each,
    items_of,
    single,
)
from wattspan_exporters.catalogue.energy import worst_provenance

# -------------------------------------------------------------------------------------- sources


def _source(value: Callable[[SourceHealth], int | None]) -> Draw:
    """One figure of every source's health."""
    return each(attrgetter("health"), lambda health: (health.source,), value)


def unreadable(snapshot: Snapshot) -> Iterator[Sample]:
    for health in snapshot.health:
        counts = Counter(failure.trouble for failure in health.failures)
        for trouble in Trouble:
            yield (health.source, trouble), counts[trouble]


SOURCES = (
    declared("wattspan.source.up", _source(lambda health: int(health.up))),
    declared("wattspan.source.reads", _source(attrgetter("reads"))),
    declared("wattspan.source.failures", _source(attrgetter("failed"))),
    declared("wattspan.source.unreadable", unreadable),
    declared("wattspan.source.read", _source(attrgetter("read_nanoseconds"))),
    declared("wattspan.source.calls", _source(attrgetter("calls"))),
)

# ---------------------------------------------------------------------------------------- agent


def _agent(name: str, field: str) -> Metric:
    """A metric of one field of AgentStats."""
    return declared(f"wattspan.agent.{name}", single(attrgetter(f"stats.{field}")))


def host_info(snapshot: Snapshot) -> Iterator[Sample]:
    yield (snapshot.host, "true" if snapshot.emulated else "false"), 1


AGENT = (
    declared("wattspan.host.info", host_info),
    declared("wattspan.snapshot.time", single(attrgetter("at.wall"))),
    _agent("start.time", "started.wall"),
    _agent("ticks", "ticks"),
    _agent("missed.ticks", "missed_ticks"),
    _agent("interval", "interval"),
    declared("wattspan.agent.consumers", items_of(attrgetter("stats.demands"))),
    declared(
        "wattspan.agent.cpu", single(lambda snapshot: round(snapshot.stats.cpu_seconds * 1e9))
    ),
    _agent("resident.memory", "rss_bytes"),
    _agent("processes", "processes"),
    _agent("late.usages", "late_usages"),
    _agent("unnamed.groups", "unnamed_groups"),
    _agent("dropped.history", "dropped_history"),
    declared("wattspan.agent.exporter.drops", items_of(attrgetter("stats.exporter_drops"))),
    declared("wattspan.agent.refusals", lambda snapshot: snapshot.stats.refusals.items()),
    declared("wattspan.pool.refusals", lambda snapshot: snapshot.stats.pool_refusals.items()),
    declared("wattspan.pool.used", items_of(attrgetter("stats.pools_used"))),
)

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
    declared("wattspan.host.cost", cost),
    declared("wattspan.host.carbon", carbon),
    declared("wattspan.energy.price", price),
    declared("wattspan.carbon.intensity", intensity),
    declared("wattspan.unweighed.energy", energy_without_rate),
)
