"""Since when a series counts, and that a receiver of differences never sees one fall."""

from __future__ import annotations

from dataclasses import replace

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from testbed.otlp_sink import Point, points, total_seen
from testbed.snapshots import CPU, NOON

from wattspan.model import (
    SECOND,
    AgentStats,
    Consumer,
    HwType,
    Instant,
    Microjoules,
    PayerInfo,
    ProcessRow,
    Provenance,
    Snapshot,
)
from wattspan_exporters.catalogue import CATALOGUE
from wattspan_exporters.catalogue.definition import (
    Distribution,
    Histogram,
    Instrument,
    Metric,
    no_samples,
)
from wattspan_exporters.catalogue.series import CACHE_SLACK
from wattspan_exporters.otlp.encoder import MetricsEncoder

BOOT = NOON - 10**12
STARTED = NOON - SECOND
(PROCESSES,) = [metric for metric in CATALOGUE if metric.name == "wattspan.process.energy"]


def world(seconds: int, joules: dict[str, int], began: int = 1) -> Snapshot:
    """Processes by command, each of which began ``began`` clock ticks after the boot."""
    rows = tuple(
        ProcessRow(
            PayerInfo(Consumer(number, began), command), {CPU: Microjoules(10**6 * spent)}, {}
        )
        for number, (command, spent) in enumerate(joules.items(), start=100)
    )
    at = Instant(10**12 + seconds * SECOND, NOON + seconds * SECOND)
    return Snapshot(
        at=at, sequence=seconds, host="node7", processes=rows,
        provenance={CPU: Provenance.MEASURED},
        stats=AgentStats(Instant(10**12, STARTED)), since=Instant(0, STARTED),
    )  # fmt: skip


def pushes(*snapshots: Snapshot) -> dict[str, list[Point]]:
    """State of a receiver of all pushes after each command, in order."""
    one = MetricsEncoder(lambda _: {}, "", [PROCESSES])
    found: dict[str, list[Point]] = {}
    for snapshot in snapshots:
        for request in one.encode(snapshot):
            for point in points(ExportMetricsServiceRequest.FromString(request.body)):
                found.setdefault(str(point.attributes["command"]), []).append(point)
    return found


def test_growing_series_keeps_its_start_time() -> None:
    found = pushes(*[world(n, {"python": n}) for n in range(5)])["python"]
    assert {point.start for point in found} == {STARTED}
    assert [point.value for point in found] == [0, 1, 2, 3, 4]


def test_falling_series_restarts_at_the_previous_push() -> None:
    found = pushes(world(0, {"sh": 7}), world(10, {"sh": 9}), world(20, {"sh": 2}))["sh"]
    assert [point.start for point in found] == [STARTED, STARTED, NOON + 10 * SECOND]
    assert total_seen(found) == 11


@pytest.mark.parametrize("first", [{}, {CPU: Provenance.MEASURED}])
def test_energy_of_a_series_whose_provenance_changes_is_counted_once(
    first: dict[HwType, Provenance],
) -> None:
    worlds = [world(10 * n, {"sh": joules}) for n, joules in enumerate((5, 9, 11, 14, 3))]
    known = (first, first, {CPU: Provenance.DERIVED}, {CPU: Provenance.ESTIMATED})
    found = pushes(*map(_of, worlds, (*known, known[-1])))["sh"]
    assert [point.start - NOON for point in found[2:]] == [10 * SECOND, 20 * SECOND, 30 * SECOND]
    assert total_seen(found) == 17


def test_observations_of_a_series_whose_provenance_changes_are_counted_once() -> None:
    drawn = Histogram(
        (10,),
        lambda now: [((now.provenance[CPU],), Distribution(now.sequence, 7 * now.sequence, (1,)))],
    )
    metric = Metric(
        "x", Instrument.HISTOGRAM, "J", "", ("provenance",), no_samples, histogram=drawn
    )
    encoder = MetricsEncoder(lambda _: {}, "", [metric])
    encoder.encode(world(3, {}))
    (request,) = encoder.encode(_of(world(5, {}), {CPU: Provenance.DERIVED}))
    sent = ExportMetricsServiceRequest.FromString(request.body)
    (point,) = sent.resource_metrics[0].scope_metrics[0].metrics[0].histogram.data_points
    assert (point.count, round(point.sum * 1e6), [*point.bucket_counts]) == (2, 14, [0, 2])


def _of(one: Snapshot, provenance: dict[HwType, Provenance]) -> Snapshot:
    return replace(one, provenance=provenance)


def test_returning_row_restarts_at_its_last_absent_push() -> None:
    found = pushes(world(0, {"sh": 9}), world(10, {}), world(20, {}), world(30, {"sh": 4}))["sh"]
    assert found[-1].start == NOON + 20 * SECOND
    assert total_seen(found) == 13


def test_row_absent_for_one_push_is_not_counted_twice() -> None:
    found = pushes(world(0, {"sh": 9}), world(10, {}), world(20, {"sh": 12}))["sh"]
    assert total_seen(found) == 12


def test_forgotten_series_restarts_after_its_removal() -> None:
    crowd = {f"job {n}": 5 for n in range(3 * CACHE_SLACK)}
    found = pushes(
        world(0, {"sh": 9}), world(10, {"sh": 10, **crowd}), world(20, {}), world(30, {"sh": 4})
    )["sh"]
    assert found[-1].start == NOON + 20 * SECOND
    assert total_seen(found) == 14


def test_remembered_series_are_bounded() -> None:
    one = MetricsEncoder(lambda _: {}, "", [PROCESSES])
    most = 0
    for n in range(60):
        one.encode(world(n, {f"job {n}-{each}": 1 for each in range(50)}))
        most = max(most, one.kept)
    assert most <= 3 * 50 + CACHE_SLACK


def test_series_that_is_there_twice_is_sent_once() -> None:
    snapshot = world(0, {"sh": 9})
    twice = replace(PROCESSES, draw=lambda world: [*PROCESSES.draw(world), *PROCESSES.draw(world)])
    (request,) = MetricsEncoder(lambda _: {}, "", [twice]).encode(snapshot)
    assert request.points == 1


def test_series_start_is_never_in_the_future() -> None:
    """A clock that was set back is before the checkpoint."""
    past = replace(world(0, {"sh": 1}), at=Instant(10**12, STARTED - 10**15))
    (point,) = pushes(past)["sh"]
    assert point.start <= point.time


def test_process_of_a_later_boot_is_another_stream_than_its_namesake() -> None:
    """The agent has no memory over a restart, and a receiver still gets correct deltas."""
    before = pushes(world(0, {"init": 500}))["init"]
    later = replace(
        world(0, {"init": 3}), at=Instant(10 * SECOND, NOON + 10**12), since=Instant(0, STARTED)
    )
    after = pushes(later)["init"]
    assert after[0].start > before[0].time
    assert total_seen([*before, *after]) == 503
