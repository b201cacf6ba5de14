"""Applications that mean harm, or do it: floods of announced spans, senders that never rest."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from testbed.collector import HttpCollector
from testbed.program import Running
from testbed.span_senders import ByHand, Scrape, UnixConnection, made, post, send
from testbed.waiting import eventually

pytestmark = pytest.mark.alone

OPEN = 5000


def resident(agent: Running) -> int:
    """Pages of memory."""
    return int(Path(f"/proc/{agent.process.pid}/statm").read_text().split()[1])


def page(agent: Running) -> Scrape:
    return Scrape(agent.scrape("text/plain"))


def test_flood_of_announced_spans_is_bounded(tmp_path: Path) -> None:
    with Running(tmp_path, spans__open_spans=OPEN) as agent:
        agent.measuring()
        before = resident(agent)
        announcing = [ByHand(agent.run_dir) for _ in range(4)]
        try:
            for turn in range(10):
                for one in announcing:
                    one.flood(time.monotonic_ns(), 65_536)
                now = time.time_ns()
                assert send(agent.run_dir, [made(f"{turn}", now - 10**7, now)], "honest") == 200
                assert page(agent).total("wattspan_spans_open") <= OPEN
            assert resident(agent) < 2.5 * before
            eventually(
                lambda: (
                    (now := page(agent)).total("wattspan_spans_total", service_name="honest") == 10
                    and now.total("wattspan_spans_open") == OPEN
                    and now.total("wattspan_spans_announcers") == 4
                ),
                "the honest are heard",
                within=60,  # of the two million records before them
            )
        finally:
            for one in announcing:
                one.close()
        assert agent.end() == 0
        assert "failed" not in agent.said


def test_protocol_violation_disconnects_and_is_counted(tmp_path: Path) -> None:
    with Running(tmp_path) as agent, ByHand(agent.measuring().run_dir) as honest:
        honest.flood(time.monotonic_ns(), 3)
        with ByHand(agent.run_dir) as liar:
            liar.skip(65_536 << 30)
            liar.flood(time.monotonic_ns(), 1)
            eventually(
                lambda: page(agent).total(
                    "wattspan_spans_announcers_refused_total", reason="protocol"
                ),
                "it is put out",
            )
        eventually(lambda: page(agent).total("wattspan_spans_open") == 3, "the other is heard")
        assert agent.end() == 0


def test_excess_spans_are_delayed_and_accepted_ones_kept(
    tmp_path: Path,
) -> None:
    answers: Counter[int] = Counter()
    delays: set[str | None] = set()
    counting = threading.Lock()

    def insist(run_dir: Path) -> None:
        with UnixConnection(run_dir / "otlp.sock") as connection:
            for _ in range(30):
                now = time.time_ns()
                answer = post(connection, [made("x", now - 10**6, now) for _ in range(100)])
                with counting:
                    answers[answer.status] += 100
                    if answer.status != 200:
                        delays.add(answer.headers["Retry-After"])

    with (
        HttpCollector() as collector,
        Running(tmp_path, spans__buffer="1MiB", spans__forward=collector.url) as agent,
    ):
        before = resident(agent.measuring())
        senders = [threading.Thread(target=insist, args=(agent.run_dir,)) for _ in range(16)]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()
        assert answers.keys() == {200, 503}
        assert delays == {"1"}
        assert len(collector.wait_for(answers[200])) == answers[200]
        eventually(
            lambda: page(agent).total("wattspan_spans_forwarded_total") == answers[200],
            "they are counted",
        )
        now = page(agent)
        assert now.total("wattspan_spans_received_total") == answers[200]
        assert now.total("wattspan_spans_deferred_total") == answers[503]
        assert sum(now.by("wattspan_span_outcomes_total", "reason").values()) == answers[200]
        assert resident(agent) < 1.5 * before
        assert agent.end() == 0
