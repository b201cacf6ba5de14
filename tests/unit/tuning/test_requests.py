"""Serving: requests side by side keep their throughput and their tail."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from testbed.tuning_plant import GPU, QUICK, RANGES, TOP

from wattspan.model import SECOND, Decision, DecisionReason, Move
from wattspan.tuning.decisions.search import TunerState
from wattspan.tuning.decisions.step import begin, step
from wattspan.tuning.decisions.values import EnergyPoint, Observation, WorkloadKind, WorkUnit

POLICY = replace(QUICK, kind=WorkloadKind.REQUESTS, block_units=20, dwell=60 * SECOND)


class Server:
    """Requests come by chance, eight a second, and each takes its time."""

    def __init__(self, slower: Callable[[int], float], limit: int | None = None) -> None:
        self.slower = slower
        self.random = Random(4)
        self.now = self.next = self.joules = 0.0
        self.flight: list[tuple[float, float]] = []
        self.level, self.since = TOP, 0.0
        self.state: TunerState = begin(replace(POLICY, latency=limit), RANGES, now=0)
        self.decisions: list[Decision] = []
        self.rate = 8.0

    def on(self) -> Decision:
        asked = self.decisions[-1].caps.get(GPU, TOP) if self.decisions else TOP
        if asked != self.level:
            self.level, self.since = asked, self.now
        self.now += 1
        while self.next < self.now:
            took = 0.4 * self.slower(self.level) * self.random.lognormvariate(0, 0.1)
            heapq.heappush(self.flight, (self.next + took, self.next))
            self.next += self.random.expovariate(self.rate)
        units = []
        while self.flight and self.flight[0][0] <= self.now:
            end, start = heapq.heappop(self.flight)
            units.append(WorkUnit(int(start * 1e9), int(end * 1e9)))
        self.joules += 390 * self.level / TOP
        now = int(self.now * SECOND)
        seen = Observation(
            now=now,
            units=tuple(units),
            energy=(EnergyPoint(now, int(self.joules * 1e6)),),
            in_force={GPU: self.level} if self.level != TOP else {},
            since=int(self.since * SECOND),
            draw={GPU: min(390_000, self.level)},
        )
        self.state, decision = step(self.state, seen)
        if not self.decisions or decision is not self.decisions[-1]:
            self.decisions.append(decision)
        return decision

    def until(self, wanted: Callable[[Decision], bool], turns: int = 20_000) -> Decision:
        for _ in range(turns):
            if wanted(self.on()):
                return self.decisions[-1]
        raise AssertionError(f"never, but: {self.decisions[-1].sentence}")


def held(decision: Decision) -> bool:
    return decision.move is Move.HOLD


def little(level: int) -> float:
    return 1 + 0.1 * (1 - level / TOP)


def test_server_is_held_where_its_latency_and_its_tail_hold() -> None:
    server = Server(little, limit=700_000_000)
    level = server.until(held).caps[GPU]
    assert little(level) < 1.05
    assert server.state.evidence.serving[level].passes(POLICY)


def test_latency_that_must_hold_is_learned_from_the_original_setting() -> None:
    server = Server(little)
    server.until(lambda one: bool(one.caps))
    assert 0.45e9 < server.state.latency_limit < 0.65e9
    assert server.state.latencies == ()


def test_tail_that_breaks_releases_at_once() -> None:
    server = Server(little, limit=700_000_000)
    server.until(held)
    server.slower = lambda level: little(level) if level == TOP else 2.0
    decision = server.until(lambda one: one.move is Move.RELEASE, turns=60)
    assert decision.reason is DecisionReason.TAIL


def test_load_that_was_not_compared_is_compared_before_it_is_held() -> None:
    server = Server(little, limit=700_000_000)
    server.until(held)
    server.rate = 12.0
    server.until(lambda one: one.reason is DecisionReason.SENTINEL, turns=40)
    assert server.until(held, turns=80).caps


@pytest.mark.slow
def test_tail_that_does_not_hold_is_not_certified() -> None:
    server = Server(little, limit=470_000_000)
    for _ in range(4_000):
        server.on()
    assert all(one.move is not Move.HOLD for one in server.decisions)


def test_changed_load_is_not_compared() -> None:
    server = Server(little, limit=700_000_000)
    for turn in range(3_000):
        server.rate = 4.0 if turn // 7 % 2 else 16.0
        server.on()
    compared = sum(level.time.n for level in server.state.estimates.levels.values())
    assert compared < 20


def test_tail_violation_during_proof_releases() -> None:
    server = Server(little, limit=700_000_000)
    server.until(lambda one: one.reason is DecisionReason.CERTIFYING)
    server.slower = lambda level: 1.0 if level == TOP else 2.0
    decision = server.until(lambda one: one.move is Move.RELEASE, turns=300)
    assert decision.reason in (DecisionReason.TAIL, DecisionReason.OVER_BUDGET)
