"""Samples of metrics of the agent itself and its sources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from wattspan.model import AgentStats, Snapshot, SourceHealth, Trouble
from wattspan_exporters.catalogue.definition import Draw, Sample


def source_value(field: Callable[[SourceHealth], int]) -> Draw:
    """Return samples of one field of every source's health, labelled ``source``."""

    def draw(snapshot: Snapshot) -> Iterator[Sample]:
        for health in snapshot.health:
            yield (health.source,), field(health)

    return draw


def unreadable(snapshot: Snapshot) -> Iterator[Sample]:
    for health in snapshot.health:
        counts = Counter(failure.trouble for failure in health.failures)
        for trouble in Trouble:
            yield (health.source, trouble), counts[trouble]


def agent_value(field: Callable[[AgentStats], int | None]) -> Draw:
    """Return a sample of one figure of the agent, without labels."""

    def draw(snapshot: Snapshot) -> Iterator[Sample]:
        if (value := field(snapshot.stats)) is not None:
            yield (), value

    return draw


def exporter_drops(snapshot: Snapshot) -> Iterator[Sample]:
    for exporter, drops in snapshot.stats.exporter_drops.items():
        yield (exporter,), drops


def refusals(snapshot: Snapshot) -> Iterator[Sample]:
    yield from snapshot.stats.refusals.items()


def snapshot_time(snapshot: Snapshot) -> Iterator[Sample]:
    yield (), snapshot.at.wall


def host_info(snapshot: Snapshot) -> Iterator[Sample]:
    yield (snapshot.host, "true" if snapshot.emulated else "false"), 1
