"""Spans of the jobs of a demo: one for each finished unit of work, with its exact times."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from wattspan.emulation.workload import (
    EmulatedSpan,
    RequestSpans,
    SpanSender,
    StepSpans,
    UnixTimeMapping,
)
from wattspan.emulation.workloads import CompletedUnit, FinishedUnit, WorkLog
from wattspan.model import SECOND, Instant

STEP = CompletedUnit(
    began=3 * SECOND, computed=4 * SECOND, ended=5 * SECOND, ideal=SECOND, work=256
)


def test_work_log_numbers_units_and_forgets_the_oldest() -> None:
    log = WorkLog(kept=3)
    for second in range(1, 6):
        log.record(second * SECOND, [FinishedUnit(0.5, 0.25, 0.25, 0.2, 10)])
    assert (log.units, log.took, log.ideal, log.work) == (5, 1_250_000_000, SECOND, 50)
    assert [unit.ended for unit in log.since(4)] == [4_750_000_000]
    assert len(log.since(0)) == 3, "two are forgotten, and counted"
    assert log.since(5) == log.since(9) == ()
    assert log.summary(4)["finished"] == [
        [4_500_000_000, 4_750_000_000, 4_750_000_000, 200_000_000, 10]
    ]


def test_training_step_becomes_one_span() -> None:
    (call,) = StepSpans().spans_of(STEP)
    assert call == EmulatedSpan("train_step", 3 * SECOND, 5 * SECOND, {"samples": 256})


def test_rank_has_a_child_span_for_its_own_part() -> None:
    (call,) = StepSpans(rank=1).spans_of(STEP)
    assert call.attributes == {"samples": 256, "rank": 1}
    assert call.parts == (EmulatedSpan("compute", 3 * SECOND, 4 * SECOND, {"rank": 1}),)


def test_request_span_has_token_counts() -> None:
    (call,) = RequestSpans().spans_of(STEP)
    assert (call.name, call.start, call.end) == ("chat", STEP.began, STEP.ended)
    assert call.attributes["gen_ai.usage.output_tokens"]


def test_unix_times_of_adjacent_spans_stay_adjacent_and_follow_a_clock_step() -> None:
    unix = UnixTimeMapping(Instant(100, 1_000, 100))
    calls = [EmulatedSpan("step", start, start + 10, {}) for start in (100, 110, 120)]
    told = []
    for turn, call in enumerate(calls):
        unix.update(Instant(100 + turn, 1_000 + turn * 300, 100 + turn))  # slewed a little
        told.append(unix.convert(call))
    assert all(before.end == after.start for before, after in pairwise(told))
    unix.update(Instant(200, 1_100 + SECOND, 200))
    assert unix.convert(calls[0]).start == 1_000 + SECOND


def test_span_sender_queues_spans_without_an_agent(tmp_path: Path) -> None:
    teller = SpanSender(tmp_path / "nobody.sock", "trainer")
    for number in range(3):
        for call in StepSpans(rank=0).spans_of(STEP._replace(work=number)):
            teller.add(call)
    teller.send(1)
    waiting = list(teller._waiting)
    assert len(waiting) == 6
    assert [span.get("parentSpanId", "") for span in waiting[:2]] == ["", waiting[0]["spanId"]]


# --------------------------------------------------------------------- an agent that takes its time


class Agent:
    """An agent at a Unix socket that answers when the test says so."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.settimeout(0)
        self._asking: socket.socket | None = None

    def asked(self) -> list[str]:
        """Names of the spans received now; empty without a receiver."""
        try:
            asking, _ = self._listener.accept()
        except BlockingIOError:
            return []
        self.close_asking()
        asking.settimeout(60)
        with asking.makefile("rb") as request:
            headers = dict(
                line.split(b": ", 1) for line in iter(request.readline, b"\r\n") if b": " in line
            )
            body = json.loads(request.read(int(headers[b"Content-Length"])))
        self._asking = asking
        return [span["name"] for span in body["resourceSpans"][0]["scopeSpans"][0]["spans"]]

    def answer(self, status: str) -> None:
        assert self._asking is not None
        self._asking.sendall(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode())

    def close_asking(self) -> None:
        if self._asking is not None:
            self._asking.close()
            self._asking = None

    def close(self) -> None:
        self.close_asking()
        self._listener.close()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    one = Agent(tmp_path / "otlp.sock")
    yield one
    one.close()


@pytest.fixture
def teller(agent: Agent, tmp_path: Path) -> Iterator[SpanSender]:
    """The client has sent one span, and has one more."""
    one = SpanSender(tmp_path / "otlp.sock", "trainer")
    one.add(EmulatedSpan("first", 0, 1, {}))
    one.send(SECOND)
    one.add(EmulatedSpan("second", 1, 2, {}))
    yield one
    agent.answer("200 OK")
    one.send(60 * SECOND)


def test_unanswered_spans_are_not_sent_again(agent: Agent, teller: SpanSender) -> None:
    assert agent.asked() == ["first"]
    for second in range(2, 9):
        teller.send(second * SECOND)
        assert agent.asked() == []
    agent.answer("200 OK")
    teller.send(9 * SECOND)
    assert agent.asked() == ["second"]


@pytest.mark.parametrize("ends", ["refused", "gone", "silent"])
def test_rejected_spans_are_sent_again(agent: Agent, teller: SpanSender, ends: str) -> None:
    assert agent.asked() == ["first"]
    if ends == "refused":
        agent.answer("503 Service Unavailable")
    elif ends == "gone":
        agent.close_asking()
    teller.send(12 * SECOND)
    assert agent.asked() == ["first", "second"]
