"""The fault schedule can fail: late answers, lost spans, energy made up."""

from __future__ import annotations

import http.client
import time
from contextlib import closing
from dataclasses import replace
from typing import cast

import pytest
from testbed.faults.arrivals import FORWARDED, NONE_DROPPED, all_arrived
from testbed.faults.collector import Collector
from testbed.faults.judge import Deviation
from testbed.faults.observation import NANO, Sight
from testbed.faults.schedule import APART, EXACT, SILENCE, Fault, Outcome, ceiling_of
from testbed.faults.stage import Stage, Watcher
from testbed.forwarding import request
from testbed.waiting import eventually

FAULT = Fault("a fault", lambda _: None, lambda _: None, "nothing")
STOOD = Outcome(FAULT, [], [], [], {}, None, 0.1, [], alive=True, unanswered=0.1)
NO_STAGE = cast(Stage, None)


def deviation(told: float, true: float, gaps: float = 0.0, domain: str = "gpu:0") -> Deviation:
    return Deviation(domain, told, true, gaps, 20.0)


def told(forwarded: int = 0, dropped: int = 0, *, at: int = 0) -> Sight:
    drops = 'wattspan_spans_forward_drops_total{reason="queue_full"}'
    return Sight(at or time.monotonic_ns(), {FORWARDED: forwarded * NANO, drops: dropped * NANO})


def post(collector: Collector, body: bytes) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", collector.port, timeout=20)
    connection.request("POST", "/v1/traces", body)
    assert connection.getresponse().status == 200
    connection.close()


# ------------------------------------------------------------------------------------ answers


def test_unresponsive_agent_fails_the_fault() -> None:
    assert STOOD.wrong == []
    silent = replace(STOOD, unanswered=SILENCE + 1)
    assert silent.wrong == [f"no answer for {SILENCE + 1:.1f} s"]


def test_agent_that_is_stopped_need_not_answer() -> None:
    stopped = replace(FAULT, unanswered="it is stopped")
    assert replace(STOOD, fault=stopped, unanswered=60.0).wrong == []


def test_scrapes_that_fail_make_a_stretch_without_an_answer() -> None:
    watcher = Watcher(lambda: "", every=0.001)  # no listener
    with closing(watcher):
        began = time.monotonic_ns()
        eventually(lambda: watcher.unanswered(began) > 0.05, "a stretch without an answer")


# -------------------------------------------------------------------------------------- spans


def test_false_claim_fails_the_fault() -> None:
    assert replace(STOOD, untrue=["all is well"]).broken == ["not true: all is well"]


def test_forwarded_span_without_arrival_is_lost() -> None:
    with Collector() as collector:
        claim = all_arrived(lambda _: collector)
        post(collector, request("a", "b").SerializeToString())
        assert claim.true(NO_STAGE, [told(2)])
        assert not claim.true(NO_STAGE, [told(2), told(3), told(2)])


def test_late_arrival_does_not_offset_an_earlier_loss() -> None:
    with Collector() as collector:
        early = told(1)
        post(collector, request("a").SerializeToString())
        assert not all_arrived(lambda _: collector).true(NO_STAGE, [early])


def test_repeated_span_does_not_offset_a_loss() -> None:
    with Collector() as collector:
        for _ in range(2):
            post(collector, request("a").SerializeToString())
        assert not all_arrived(lambda _: collector).true(NO_STAGE, [told(2)])


def test_dropped_span_is_detected() -> None:
    assert NONE_DROPPED.true(NO_STAGE, [told(dropped=1), told(dropped=1)])
    assert not NONE_DROPPED.true(NO_STAGE, [told(dropped=1), told(dropped=2)])


# ------------------------------------------------------------------------------------- energy


@pytest.mark.parametrize(
    ("domain", "watts"), [("gpu:0", 760), ("rapl:a", 130), ("rapl:a/dram", 16)]
)
def test_domain_tolerance_is_a_moment_of_its_power(domain: str, watts: float) -> None:
    allowed = APART * watts + 1000 * EXACT / 100
    assert ceiling_of(domain) == watts
    for sign in (1, -1):
        near = deviation(1000 + sign * (allowed - 0.1), 1000, domain=domain)
        far = deviation(1000 + sign * (allowed + 0.1), 1000, domain=domain)
        assert replace(STOOD, worst=near).wrong == []
        assert replace(STOOD, worst=far).wrong != []


def test_missing_energy_is_bounded_by_gaps_and_never_invented() -> None:
    less, more = deviation(5000, 10_000, gaps=10), deviation(10_500, 10_000, gaps=10)
    assert replace(STOOD, worst=less).wrong == []
    assert replace(STOOD, worst=more).wrong != []
    nobody_measures = replace(FAULT, missing=100.0)
    assert replace(STOOD, fault=nobody_measures, worst=deviation(0, 10_000)).wrong == []
    assert replace(STOOD, fault=nobody_measures, worst=more).wrong != []
