"""From a sending process to scrape, report and collector, with real programs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from testbed.collector import Fault, GrpcCollector, GrpcStatus, HttpCollector, Reply
from testbed.program import Running, counters, fallen, wattspan
from testbed.requirements import ROOT
from testbed.span_senders import ByHand, Scrape, UnixConnection, made, post
from testbed.waiting import eventually

from wattspan.sdk.client import request_json

SENDER = """
import os, random, sys, time
from pathlib import Path
from testbed.span_senders import UnixConnection, made, post

run_dir, service = Path(sys.argv[1]), sys.argv[2]
seconds, seed = float(sys.argv[3]), int(sys.argv[4])
connection, rng = UnixConnection(run_dir / "otlp.sock"), random.Random(seed)
trace, long, began = bytes([9]) * 16, os.urandom(8), time.time_ns()
sent = turns = 0
until = time.monotonic() + seconds
while time.monotonic() < until:
    before = time.time_ns()
    sum(i * i for i in range(300_000))
    now, spans = time.time_ns(), []
    for _ in range(64):
        start = rng.randint(before - 10**8, now)
        parent = rng.choice([b"", long, *(span.span_id for span in spans[-3:])])
        name = f"n{rng.choice([1, 2, 3, 4, rng.randint(5, 400)])}"
        spans.append(made(name, start, rng.randint(start, now), parent=parent, trace=trace))
    odd = [
        [],
        [made("future", now + 10**12, now + 2 * 10**12)],
        [made("ancient", 10**9, 2 * 10**9)],
        [made("inverted", now, before)],
        [spans[0]],
        [made("as old as time", 1, now)],
        [made("whenever", 0, 2**64 - 1)],
        [made("an instant", now, now)],
    ]
    spans += odd[turns % len(odd)]
    turns += 1
    assert post(connection, spans, service).status == 200
    sent += len(spans)
spans = [made("long", began, time.time_ns(), id=long, trace=trace)]
assert post(connection, spans, service).status == 200
print(sent + 1, flush=True)
sys.stdin.read()
"""


@contextmanager
def senders(run_dir: Path, count: int, seconds: float) -> Iterator[list[subprocess.Popen[str]]]:
    """Computing processes that send badly nested and overlapping spans."""
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SENDER, str(run_dir), f"service {n}", str(seconds), str(n)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )
        for n in range(count)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def page(agent: Running) -> Scrape:
    return Scrape(agent.scrape("text/plain"))


def outcomes(scrape: Scrape) -> dict[str, float]:
    found = scrape.by("wattspan_span_outcomes_total", "reason")
    return {reason: count for reason, count in found.items() if count}


def answered(scrape: Scrape) -> float:
    """All spans that have an outcome or were refused."""
    return sum(outcomes(scrape).values()) + scrape.total("wattspan_spans_refused_total")


def claimed(scrape: Scrape) -> float:
    """All that spans, and processes outside of them, say they spent."""
    return scrape.total("wattspan_span_energy_joules_total") + scrape.total(
        "wattspan_span_outside_energy_joules_total"
    )


def spent(agent: Running, pid: int) -> float:
    """All that a process has spent in the last minute, by the agent's answer."""
    facts = request_json(
        "/v1/energy", {"pid": str(pid), "start": "-60s"}, directories=(str(agent.run_dir),)
    )
    return sum(facts["process"]["joules"].values())


def test_span_energy_never_exceeds_process_energy(
    tmp_path: Path,
) -> None:
    with Running(
        tmp_path,
        spans__names=5,
        store__enabled="true",
        store__interval="1s",
    ) as agent:
        agent.measuring()
        with senders(agent.run_dir, 2, 4.0) as processes:
            before: dict[str, float] = {}
            counts: list[int] = []
            counting = threading.Thread(
                target=lambda: counts.extend(int(p.stdout.readline()) for p in processes)
            )
            counting.start()
            scrape = page(agent)
            while len(counts) < 2 or answered(scrape) < sum(counts):
                assert all(process.poll() is None for process in processes)
                text = agent.scrape("text/plain")
                scrape, now = Scrape(text), counters(text)
                told = claimed(scrape)
                assert told <= sum(spent(agent, process.pid) for process in processes) + 1e-5
                assert fallen(before, now) == {}
                before = now
            counting.join()
        assert len(scrape.by("wattspan_spans_total", "span_name")) <= 6
        refused = scrape.total("wattspan_spans_refused_total")
        assert 0 < refused < sum(counts) / 10  # those with impossible times
        assert scrape.total("wattspan_spans_received_total") == sum(counts) - refused
        found = outcomes(scrape)
        assert found["joined"] > 0
        assert {"future", "inverted", "duplicate", "no_energy"} <= found.keys()
        assert scrape.total("wattspan_span_energy_joules_total") > 0
        assert scrape.total("wattspan_span_seconds_total") < sum(counts) * 10  # no ages
        services = set(scrape.by("wattspan_span_outside_energy_joules_total", "service_name"))
        assert services == {"service 0", "service 1"}

        def reported() -> bool:
            told = wattspan("report", "--by", "span", "--state-dir", str(agent.state_dir)).stdout
            return "service 0" in told and "other spans" in told and "outside spans" in told

        eventually(reported, "the report names the spans")
        assert agent.end() == 0


def test_accepted_spans_are_joined_and_forwarded_at_shutdown(tmp_path: Path) -> None:
    with HttpCollector() as collector:
        with (
            Running(tmp_path, spans__forward=collector.url, store__enabled="true") as agent,
            ByHand(agent.measuring().run_dir) as announcing,
        ):
            announcing.flood(time.monotonic_ns(), 5000)
            eventually(lambda: page(agent).total("wattspan_spans_open") == 5000, "they are open")
            taken = 0
            with UnixConnection(agent.run_dir / "otlp.sock") as connection:
                for _ in range(20):
                    now = time.time_ns()
                    spans = [made("last words", now - 10**8, now) for _ in range(256)]
                    taken += 256 * (post(connection, spans).status == 200)
            assert agent.end() == 0
            assert taken > 0
        assert len(collector.spans) == taken
        told = {
            attribute.value.string_value
            for span in collector.spans
            for attribute in span.attributes
            if attribute.key == "wattspan.energy.outcome"
        }
        assert told <= {"joined", "partial", "late", "no_energy"}


@pytest.mark.parametrize(
    ("kind", "away"), [(HttpCollector, Reply(503)), (GrpcCollector, GrpcStatus(14))]
)
def test_late_collector_receives_ordered_spans_with_energy(
    kind: type[HttpCollector | GrpcCollector], away: Fault, tmp_path: Path
) -> None:
    with kind() as collector, Running(tmp_path, spans__forward=collector.url) as agent:
        agent.measuring()
        collector.script(*[away] * 2)
        with UnixConnection(agent.run_dir / "otlp.sock") as connection:
            for number in range(40):
                before = time.time_ns()
                sum(i * i for i in range(50_000))
                assert post(connection, [made(str(number), before, time.time_ns())]).status == 200
        spans = collector.wait_for(40)
        assert [span.name for span in spans] == [str(number) for number in range(40)]
        for span in spans:
            told = {attribute.key: attribute.value for attribute in span.attributes}
            assert told["wattspan.energy.provenance"].string_value == "emulated"
            assert told["wattspan.energy.outcome"].string_value == "joined"
            assert 0 <= told["wattspan.energy.exclusive"].double_value < 10
            assert (
                told["wattspan.energy.exclusive"].double_value
                <= told["wattspan.energy.inclusive"].double_value + 1e-9
            )
        eventually(
            lambda: page(agent).total("wattspan_spans_forwarded_total") == 40, "they are counted"
        )
        assert agent.end() == 0
