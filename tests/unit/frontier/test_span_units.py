"""Units of work in received spans: real requests to a trial's receiver, and a clock by hand."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from testbed.otlp import BEGIN, PROTOBUF, request, span

from wattspan.frontier.span_units import SpanReceiver, SpanUnits
from wattspan.frontier.work import Completion, UnitSpan
from wattspan.model import SECOND
from wattspan.ports import ConfigError
from wattspan.sdk import API_SOCKET, OTLP_HTTP_SOCKET
from wattspan.testing import ManualClock
from wattspan.training.spans import AgentSpanExporter

STEP = UnitSpan("step", "samples")


@dataclass
class Bench:
    clock: ManualClock
    units: SpanUnits
    start: int  # monotonic, at BEGIN

    def send(self, *spans: Span) -> None:
        self.post(request(*spans).SerializeToString())

    def post(self, body: bytes) -> None:
        address = self.units.environ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"]
        asked = urllib.request.Request(address, body, {"Content-Type": PROTOBUF})
        urllib.request.urlopen(asked, timeout=20).close()

    @property
    def found(self) -> list[tuple[float, float]]:
        """Seconds from BEGIN, and work."""
        return [((one.at - self.start) / SECOND, one.work) for one in self.units.completions()]


@pytest.fixture
def bench() -> Iterator[Bench]:
    clock = ManualClock(wall=BEGIN)
    with SpanReceiver(STEP, clock, environ={}).open() as units:
        start = clock.monotonic()
        clock.advance(10)
        yield Bench(clock, units, start)


def step(number: int, end: float, name: str = "step", **attributes: float) -> Span:
    made = span(number, **attributes)
    made.name = name
    made.start_time_unix_nano = BEGIN
    made.end_time_unix_nano = BEGIN + round(end * SECOND)
    return made


def test_work_has_the_times_of_the_spans_ends_in_order(bench: Bench) -> None:
    bench.send(step(1, 4, samples=8), step(2, 3, name="other", samples=5))
    bench.send(step(3, 2, samples=2.5), step(4, 6, samples=1))
    assert bench.found == [(2, 2.5), (4, 8), (6, 1)]
    until = bench.start + 4 * SECOND
    assert list(bench.units.completions(until)) == [
        Completion(bench.start + 2 * SECOND, 2.5),
        Completion(until, 8),
    ]


def test_repeated_request_counts_once_and_equal_ids_of_two_ranks_twice(bench: Bench) -> None:
    bench.send(step(1, 4, samples=8))
    bench.send(step(1, 4, samples=8))
    bench.send(step(1, 4.001, samples=8))
    assert bench.found == [(4, 8), (4.001, 8)]


def test_spans_that_end_together_are_one_completion(bench: Bench) -> None:
    bench.send(*(step(n, 4, samples=8) for n in range(1, 4)), step(5, 5, samples=8))
    assert bench.found == [(4, 24), (5, 8)]


def test_span_that_ends_in_the_future_is_ignored(bench: Bench) -> None:
    bench.send(step(1, 10.5, samples=8), step(2, 12, samples=8))
    assert bench.found == [(10.5, 8)]


def test_step_of_the_wall_clock_moves_no_earlier_work(bench: Bench) -> None:
    bench.send(step(1, 4, samples=8))
    bench.clock.step_wall(3600)
    bench.clock.advance(1)
    bench.send(step(2, 3610.5, samples=8))
    assert bench.found == [(4, 8), (10.5, 8)]


def test_delay_is_that_of_slow_senders(bench: Bench) -> None:
    assert bench.units.delay == SECOND
    made = step(1, 7, samples=8)
    made.start_time_unix_nano = made.end_time_unix_nano
    bench.send(made)
    assert 4 * SECOND <= bench.units.delay < 5 * SECOND


@pytest.mark.parametrize("samples", [0.0, -1.0, float("nan"), float("inf")])
def test_invalid_work_is_no_work_and_named(bench: Bench, samples: float) -> None:
    bench.send(step(1, 4, samples=samples), step(2, 5))
    assert bench.found == []
    assert "2 spans 'step' without a number above 0 in the attribute 'samples'" in (
        bench.units.trouble
    )
    bench.send(step(3, 6, samples=1))
    assert bench.units.trouble == ""


def test_unreadable_spans_are_named(bench: Bench) -> None:
    with pytest.raises(urllib.error.HTTPError) as refusal:
        bench.post(b"no spans")
    refusal.value.close()
    assert bench.units.trouble == "It sent 1 requests or spans that cannot be read."


def test_other_spans_are_named_up_to_five(bench: Bench) -> None:
    bench.send(*(step(n, n, name=f"span {n}") for n in range(1, 9)))
    assert "no span 'step', but spans such as 'span 1', 'span 2'" in bench.units.trouble
    assert "span 6" not in bench.units.trouble


def test_training_callbacks_send_to_the_trial(bench: Bench) -> None:
    body = request(step(1, 4, samples=8)).SerializeToString()
    directory = bench.units.environ["WATTSPAN_RUN_DIR"]
    AgentSpanExporter(lambda _: body, lambda: [directory]).export([])
    assert bench.found == [(4, 8)]
    assert Path(directory, OTLP_HTTP_SOCKET).is_socket()


def test_command_reaches_the_agent_in_the_directory_of_the_trial(tmp_path: Path) -> None:
    missing, agent = tmp_path / "missing", tmp_path / "agent"
    agent.mkdir()
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(agent / API_SOCKET))
        receiver = SpanReceiver(STEP, ManualClock(), (str(missing), str(agent)), {})
        with receiver.open() as units:
            directory = Path(units.environ["WATTSPAN_RUN_DIR"])
            assert (directory / API_SOCKET).resolve() == agent / API_SOCKET
        assert not directory.exists()
        assert (agent / API_SOCKET).is_socket()


def test_address_of_other_signals_is_kept() -> None:
    known = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}
    with SpanReceiver(STEP, ManualClock(), environ=known).open() as units:
        assert units.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://collector:4318"
        traces = units.environ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"]
    assert traces.startswith("http://127.0.0.1:")


def test_disabled_spans_are_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="OTEL_SDK_DISABLED=true disables all spans"):
        SpanReceiver(STEP, ManualClock(), environ={"OTEL_SDK_DISABLED": "True"})
