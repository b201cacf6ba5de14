"""For any change of series between two pushes, the streams are valid OTLP."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from testbed.otlp_sink import Key, Point, points, total_seen
from testbed.snapshots import NOON

from wattspan.model import SECOND, AgentStats, Instant, Snapshot
from wattspan_exporters.catalogue.definition import Instrument, Labels, Metric
from wattspan_exporters.catalogue.series import CACHE_SLACK
from wattspan_exporters.otlp.encoder import MetricsEncoder

names = st.sampled_from("abcdefgh")
worlds = st.dictionaries(names, st.integers(0, 2**70))
crowds = st.sampled_from((0, 0, 3, 2 * CACHE_SLACK))
histories = st.lists(st.tuples(worlds, crowds, st.integers(1, 10**12)), min_size=1, max_size=12)


def pushed(
    history: list[tuple[dict[str, int], int, int]], metric: str, unit: str, limit: int
) -> list[tuple[dict[str, int], list[Point]]]:
    """Every push with its drawn values: named series of any value, and a churning crowd."""
    now: dict[Labels, int] = {}
    one = MetricsEncoder(
        lambda _: {},
        "",
        [Metric(metric, Instrument.COUNTER, unit, "", ("name",), lambda _: now.items())],
        limit,
    )
    found = []
    wall = NOON
    for turn, (values, crowd, passed) in enumerate(history):
        wall += passed
        now = {(name,): value for name, value in values.items()}
        now |= {(f"{turn} {n}",): 1 for n in range(crowd)}
        started = AgentStats(Instant(0, NOON - SECOND))
        snapshot = Snapshot(Instant(wall - NOON, wall), turn, "host", stats=started)
        received: list[Point] = []
        for request in one.encode(snapshot):
            parsed = ExportMetricsServiceRequest.FromString(request.body)
            assert request.points == len(list(points(parsed)))
            received += points(parsed)
        assert one.kept <= 2 * len(now) + CACHE_SLACK
        found.append((values, received))
    return found


@given(histories, st.integers(50, 3000))
def test_start_times_never_go_back_and_within_one_no_value_falls(
    history: list[tuple[dict[str, int], int, int]], limit: int
) -> None:
    streams: dict[Key, list[Point]] = {}
    for values, received in pushed(history, "wattspan.test", "J", limit):
        assert {str(point.attributes["name"]) for point in received} >= values.keys()
        for point in received:
            assert point.start <= point.time
            streams.setdefault(point.key, []).append(point)
    for series in streams.values():
        assert total_seen(series) >= max(point.value for point in series)  # asserts the rest


@given(histories)
def test_receiver_sees_each_value_as_it_was_drawn(
    history: list[tuple[dict[str, int], int, int]],
) -> None:
    for values, received in pushed(history, "wattspan.test", "J", 10**6):
        seen = {str(point.attributes["name"]): point.value for point in received}
        assert len(seen) == len(received)
        for name, value in values.items():
            assert seen[name] == value / 10**6  # the nearest double there is


@given(st.dictionaries(st.text(), st.integers(-(2**63), 2**63 - 1), min_size=1))
def test_counts_arrive_as_the_integers_they_are(drawn: dict[str, int]) -> None:
    metric = Metric(
        "wattspan.test", Instrument.UPDOWN, "{thing}", "", ("name",),
        lambda _: [((name,), value) for name, value in drawn.items()],
    )  # fmt: skip
    snapshot = Snapshot(Instant(1, NOON), 1, "host", stats=AgentStats(Instant(0, NOON)))
    (request,) = MetricsEncoder(lambda _: {}, "", [metric]).encode(snapshot)
    received = list(points(ExportMetricsServiceRequest.FromString(request.body)))
    assert sorted(point.value for point in received) == sorted(drawn.values())
    assert all(isinstance(point.value, int) for point in received)
