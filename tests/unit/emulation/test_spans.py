"""Spans of the jobs of a demo: one for each finished unit of work, with its exact times."""

from __future__ import annotations

import http.server
import json
import socketserver
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from wattspan.emulation.jobs import SpanSender
from wattspan.emulation.workloads import CompletedUnit, FinishedUnit, WorkLog
from wattspan.model import SECOND, Instant

STEP = CompletedUnit(began=3 * SECOND, ended=5 * SECOND, ideal=SECOND, work=256)
NOW = Instant(6 * SECOND, 106 * SECOND)


def test_work_log_numbers_units_and_forgets_the_oldest() -> None:
    log = WorkLog(kept=3)
    for second in range(1, 6):
        log.record(second * SECOND, [FinishedUnit(0.5, 0.25, 0.2, 10)])
    assert (log.units, log.took, log.ideal) == (5, 1_250_000_000, SECOND)
    assert [unit.ended for unit in log.since(4)] == [4_750_000_000]
    assert len(log.since(0)) == 3, "two are forgotten, and counted"
    assert log.since(5) == log.since(9) == ()
    assert log.summary(4)["finished"] == [[4_500_000_000, 4_750_000_000, 200_000_000, 10]]


def sender(path: Path, kind: str = "steps") -> SpanSender:
    return SpanSender(str(path), "trainer", kind)


def test_training_step_becomes_one_span(tmp_path: Path) -> None:
    steps = sender(tmp_path / "absent")
    steps.add([STEP], NOW)
    (span,) = steps.waiting
    assert span["name"] == "train_step"
    assert (span["startTimeUnixNano"], span["endTimeUnixNano"]) == ("103000000000", "105000000000")
    assert span["attributes"] == [{"key": "samples", "value": {"intValue": "256"}}]


def test_request_span_has_token_counts(tmp_path: Path) -> None:
    requests = sender(tmp_path / "absent", "requests")
    requests.add([STEP], NOW)
    (span,) = requests.waiting
    assert span["name"] == "chat"
    assert "gen_ai.usage.output_tokens" in str(span["attributes"])


def test_unix_times_of_adjacent_spans_stay_adjacent_and_follow_a_clock_step(tmp_path: Path) -> None:
    steps = sender(tmp_path / "absent")
    for turn, start in enumerate((100, 110, 120)):  # slewed a little
        steps.add([STEP._replace(began=start, ended=start + 10)], Instant(turn, 900 + turn * 300))
    times = [(span["startTimeUnixNano"], span["endTimeUnixNano"]) for span in steps.waiting]
    assert len(times) == 3
    assert all(before[1] == after[0] for before, after in pairwise(times))
    steps.add([STEP._replace(began=100)], Instant(200, 1_100 + SECOND))
    assert steps.waiting[-1]["startTimeUnixNano"] == str(1_000 + SECOND)


class Agent(socketserver.UnixStreamServer):
    """An agent at a Unix socket that answers with ``status``; ``received`` is what it accepted."""

    def __init__(self, path: Path) -> None:
        self.status = 200
        self.received: list[str] = []
        super().__init__(str(path), AgentHandler)


class AgentHandler(http.server.BaseHTTPRequestHandler):
    server: Agent

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.status == 200:
            spans = body["resourceSpans"][0]["scopeSpans"][0]["spans"]
            self.server.received += [span["name"] for span in spans]
        self.send_response(self.server.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def address_string(self) -> str:
        return "a Unix socket"

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is logged."""


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    with Agent(tmp_path / "otlp.sock") as one:
        thread = threading.Thread(target=one.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield one
        one.shutdown()
        thread.join()


def test_accepted_spans_are_sent_once(agent: Agent, tmp_path: Path) -> None:
    steps = sender(tmp_path / "otlp.sock")
    steps.add([STEP], NOW)
    steps.send()
    steps.send()
    assert agent.received == ["train_step"]


def test_rejected_spans_are_sent_again(agent: Agent, tmp_path: Path) -> None:
    steps = sender(tmp_path / "otlp.sock")
    agent.status = 503
    steps.add([STEP], NOW)
    steps.send()
    agent.status = 200
    steps.add([STEP], NOW)
    steps.send()
    assert agent.received == ["train_step", "train_step"]


def test_spans_wait_without_an_agent(tmp_path: Path) -> None:
    steps = sender(tmp_path / "absent")
    for _ in range(1500):
        steps.add([STEP], NOW)
    steps.send()
    assert len(steps.waiting) == 1000, "the limit"
