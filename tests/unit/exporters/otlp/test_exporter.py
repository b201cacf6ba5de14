"""The exporter's decisions, one push at a time, on a manual clock."""

from __future__ import annotations

from dataclasses import replace

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from testbed.forwarding import ScriptedTransport
from testbed.otlp_sink import Point, count_points, points
from testbed.scrapes import full_host

from wattspan.model import SECOND, Snapshot
from wattspan.otlp.destination import METRICS, parse_destination
from wattspan.otlp.transport import MAX_BACKOFF, ExportResult, ExportStatus, retry_result
from wattspan.testing import ManualClock
from wattspan.util.throttle import RetryBackoff
from wattspan_exporters.catalogue import CATALOGUE
from wattspan_exporters.otlp.encoder import MetricsEncoder
from wattspan_exporters.otlp.exporter import OtlpExporter

INTERVAL = 10 * SECOND
AWAY = retry_result("connection refused", "Is it running?")
REFUSED = ExportResult(ExportStatus.REFUSED, "it answered 401", METRICS.credentials)
TOO_LARGE = ExportResult(ExportStatus.TOO_LARGE, "it answered 413")


class Bench:
    """An exporter with a scripted receiver, turned by hand; the snapshot is always of now."""

    def __init__(self, *answers: ExportResult, limit: int = 2 << 20) -> None:
        self.clock = ManualClock()
        self.receiver = ScriptedTransport(*answers)
        self.said: list[str] = []
        self.sequence = 0
        self.stuck: Snapshot | None = None
        self.exporter = OtlpExporter(
            parse_destination("http://collector:4318", METRICS),
            self.receiver,
            MetricsEncoder(lambda _: {}, "", CATALOGUE, limit),
            self.clock,
            self.said.append,
            interval=INTERVAL,
            backoff=RetryBackoff(SECOND, MAX_BACKOFF),
        )
        self.exporter._view = self.look

    def look(self) -> Snapshot:
        if self.stuck is not None:
            return self.stuck
        self.sequence += 1
        return replace(full_host(), at=self.clock.now(), sequence=self.sequence)

    def wait(self, seconds: float) -> None:
        """Let so much time pass, with every turn that is due in it."""
        end = self.clock.monotonic() + round(seconds * SECOND)
        while (due := self.exporter.turn()) <= end:
            self.clock.sleep_until(due)
        self.clock.sleep_until(end)

    @property
    def pushes(self) -> list[list[Point]]:
        return [
            list(points(ExportMetricsServiceRequest.FromString(body)))
            for body in self.receiver.taken
        ]

    @property
    def times(self) -> list[int]:
        """When the pushes were made, in seconds since the first."""
        at = [push[0].time for push in self.pushes]
        return [(each - at[0]) // SECOND for each in at]


def test_newest_snapshot_is_pushed_at_every_interval() -> None:
    bench = Bench()
    bench.wait(45)
    assert bench.times == [0, 10, 20, 30, 40]
    assert bench.exporter.drops == 0
    assert bench.said == []


def test_snapshot_is_not_pushed_twice() -> None:
    bench = Bench()
    bench.stuck = full_host()
    bench.wait(60)
    assert len(bench.pushes) == 1
    assert bench.exporter.drops == 0


def test_recovered_receiver_gets_only_the_newest_snapshot() -> None:
    bench = Bench(*[AWAY] * 8)
    bench.wait(200)
    attempts = [
        {point.time for point in points(ExportMetricsServiceRequest.FromString(body))}
        for body in bench.receiver.sent
    ]
    assert all(len(times) == 1 for times in attempts)
    times = [time for (time,) in attempts]
    assert times == sorted(set(times))  # each was of another snapshot than the one before
    assert bench.pushes[0][0].time == times[8]
    assert bench.times[1] - bench.times[0] <= 10


@pytest.mark.exhaustive
def test_retries_of_pushes_back_off_within_a_bound() -> None:
    bench = Bench(*[AWAY] * 1000)
    bench.wait(3600)
    assert 355 <= len(bench.receiver.sent) <= 455


def test_lost_points_are_counted_once_an_interval() -> None:
    bench = Bench(*[AWAY] * 1000)
    bench.wait(1000.5)
    pushed = ExportMetricsServiceRequest.FromString(bench.receiver.sent[0])
    points_a_push = count_points(pushed)
    assert bench.exporter.drops % points_a_push == 0
    assert 93 <= bench.exporter.drops // points_a_push <= 100


def test_push_that_succeeds_on_retry_drops_nothing() -> None:
    bench = Bench(AWAY)
    bench.wait(9)
    assert len(bench.pushes) == 1
    assert bench.exporter.drops == 0


def test_failure_and_recovery_of_pushes_are_logged_once() -> None:
    bench = Bench(*[AWAY] * 9)
    bench.wait(400)
    failing, working = bench.said
    assert failing == (
        "Cannot push metrics to http://collector:4318/v1/metrics: connection refused. Is it "
        "running? The newest are pushed as soon as they can be, and no total is lost."
    )
    assert working.startswith("http://collector:4318/v1/metrics takes metrics again, after ")


def test_pushes_are_retried_after_a_refusal() -> None:
    bench = Bench(REFUSED)
    bench.wait(60)
    assert "Give the collector's credentials in `headers`." in bench.said[0]
    assert len(bench.pushes) >= 5


def test_refused_request_costs_no_other_one() -> None:
    def picky(body: bytes) -> ExportResult:
        return REFUSED if b"hw.energy" in body else ExportResult(ExportStatus.TAKEN)

    bench = Bench(limit=1)  # each request has one point
    bench.receiver.answers.extend([picky] * 20_000)
    bench.wait(16)  # pushes after 0, 1, 3, 7 and 15 s, of which one interval has ended
    names = {point.name for push in bench.pushes for point in push}
    assert {"hw.power", "hw.host.energy", "wattspan.process.energy"} <= names
    assert not bench.exporter.health.up
    assert len(bench.said) == 1
    refused = [body for body in bench.receiver.sent if b"hw.energy" in body]
    assert 5 * bench.exporter.drops == len(refused)


def test_pushes_respect_a_requested_delay() -> None:
    bench = Bench(ExportResult(ExportStatus.AGAIN, "it answered 429", after=35 * SECOND))
    bench.wait(34)
    assert len(bench.receiver.sent) == 1
    bench.wait(2)
    assert len(bench.receiver.sent) == 2


def test_oversized_push_is_split() -> None:
    def picky(body: bytes) -> ExportResult:
        return TOO_LARGE if len(body) > 100_000 else ExportResult(ExportStatus.TAKEN)

    bench = Bench()
    bench.receiver.answers.extend([picky] * 1000)
    bench.exporter._encoder.limit = 400_000
    whole = bench.look()
    crowd = replace(
        whole, processes=tuple(replace(r, info=replace(r.info, command=f"{r.info.command}{n}"))
                               for n in range(600) for r in whole.processes[:1]),
    )  # fmt: skip
    bench.stuck = crowd
    bench.wait(9)
    received = {point.key for push in bench.pushes for point in push}
    assert (
        len([key for key in received if key[0] == "wattspan.process.energy"]) == 2 * 600 + 2
    )  # and two of others
    assert max(map(len, bench.receiver.taken)) <= 100_000


def test_rejected_points_are_counted_and_logged() -> None:
    bench = Bench(ExportResult(ExportStatus.TAKEN, "it rejected 3 metrics (too old)", rejected=3))
    bench.wait(60)
    assert bench.exporter.drops == 3
    assert bench.said == [
        "http://collector:4318/v1/metrics takes metrics, but it rejected 3 metrics (too old)."
    ]


def test_health_of_the_receiver_is_that_of_a_source() -> None:
    bench = Bench(AWAY)
    bench.exporter.turn()
    health = bench.exporter.health
    assert (health.source, health.up) == ("otlp", False)
    assert "connection refused" in str(health.failures[0])
    bench.wait(5)
    assert bench.exporter.health.up


def test_small_clock_step_back_delays_pushes() -> None:
    bench = Bench()
    bench.wait(5)
    bench.clock.step_wall(-20)
    bench.wait(60)
    times = [push[0].time for push in bench.pushes]
    assert times == sorted(set(times))
    assert len(times) == 5


def test_large_clock_step_back_does_not_end_pushes() -> None:
    bench = Bench()
    bench.wait(5)
    bench.clock.step_wall(-86_400)
    bench.wait(200)
    assert len(bench.pushes) >= 10
    for push in bench.pushes:
        assert all(point.start <= point.time for point in push)


def test_encoding_error_loses_one_snapshot_and_is_logged() -> None:
    bench = Bench()
    broken = replace(full_host(), spans=None)  # type: ignore[arg-type]
    bench.stuck = broken
    for _ in range(3):
        bench.exporter._guarded(bench.exporter.turn)
        bench.clock.advance(10)
    health = bench.exporter.health
    assert not health.up
    assert "a push failed unexpectedly (AttributeError: " in str(health.failures[0])
    bench.stuck = None
    bench.wait(5)
    said, over = bench.said
    assert said == str(health.failures[0])
    assert "takes metrics again" in over
    assert bench.exporter.health.up
    assert len(bench.pushes) == 1


def test_stop_before_start_closes_the_connection() -> None:
    bench = Bench()
    bench.exporter.stop()
    assert bench.receiver.closed
