"""The emulated server in virtual time, and its reaction to clocks and caps."""

from __future__ import annotations

import random

import pytest
from testbed import serving_replay as serving
from testbed.continuous_batching import ContinuousBatching, EmulatedRequest, ModelCosts
from testbed.serving_plant import IDLE_WATTS, VirtualServer

EVEN = ModelCosts(noise=0.0, drift=0.0)


def arrivals(count: int, seed: int, rate: float = 4.0) -> list[tuple[float, int, int]]:
    chance, at, found = random.Random(seed), 0.0, []
    for _ in range(count):
        at += chance.expovariate(rate)
        found.append((at, chance.randint(1, 4000), chance.randint(1, 200)))
    return found


def iterated(
    requests: list[tuple[float, int, int]], slots: int
) -> tuple[list[EmulatedRequest], float]:
    """The same requests in the engine that runs each iteration; its joules above idle."""
    engine = ContinuousBatching(EVEN, slots=slots)
    coming = [EmulatedRequest(n, at, prompt, out) for n, (at, prompt, out) in enumerate(requests)]
    waiting, energy = list(coming), 0.0
    while waiting or engine.busy:
        if not engine.busy:
            engine.now = max(engine.now, waiting[0].arrived)
        while waiting and waiting[0].arrived <= engine.now:
            engine.add(waiting.pop(0))
        energy += engine.iterate().energy
    return coming, energy


@pytest.mark.parametrize("slots", [4, 64])
def test_virtual_server_serves_as_the_engine_that_runs_each_iteration(slots: int) -> None:
    requests = arrivals(150, slots)
    expected, energy = iterated(requests, slots)

    server = VirtualServer(requests, EVEN, slots=slots)
    while not server.exhausted:
        server.advance(server.now + 1.0)

    served = sorted(server.finished, key=lambda one: one.arrived)
    assert len(served) == len(expected)
    for one, true in zip(served, expected, strict=True):
        assert one.first_token == pytest.approx(true.first_token, rel=1e-3)
        assert one.ended == pytest.approx(true.ended, rel=1e-3)
    assert server.energy - IDLE_WATTS * server.now == pytest.approx(energy, rel=1e-3)
    assert server.tokens == sum(out for _, _, out in requests)
    lasting = sum(one.ended - one.arrived for one in served)
    assert server.in_flight == pytest.approx(lasting, rel=1e-3)


def test_load_tracking_lowers_the_clock_of_a_steady_server() -> None:
    requests = serving.doubled(1, rate=3.0, at=400, after=0)
    original = serving.serve(requests, serving.fixed(0))
    tracked = serving.serve(requests, serving.tracking())
    assert tracked.energy < original.energy
    assert tracked.missed <= original.missed + 0.01
    assert {clock for _, clock in tracked.clocks} >= {1980, 1590}


def test_request_that_is_added_later_is_served() -> None:
    server = VirtualServer((), EVEN)
    server.advance(1.0)
    server.add(1.0, 100, 2)
    assert not server.exhausted
    server.advance(2.0)
    assert [one.arrived for one in server.finished] == [1.0]
    assert server.exhausted
