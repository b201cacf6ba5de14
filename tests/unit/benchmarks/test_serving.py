"""The emulated server in virtual time, and its reaction to clocks and caps."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from benchmarks import serving, serving_stack
from benchmarks.serving_plant import CLOCK_DELAY, IDLE_WATTS, VirtualServer
from testbed.clock_scaling import costs_at_clock
from testbed.continuous_batching import (
    ContinuousBatching,
    EmulatedRequest,
    ModelCosts,
)

from wattspan.emulation.boards import H100

EVEN = ModelCosts(noise=0.0, drift=0.0)
SILICON = H100.silicon


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


def test_costs_at_the_highest_clock_are_unchanged() -> None:
    assert costs_at_clock(EVEN, SILICON, SILICON.max_mhz) == replace(EVEN)


def test_prefill_slows_with_the_clock_and_decode_hardly() -> None:
    low = costs_at_clock(EVEN, SILICON, 1185)
    assert low.token_time == pytest.approx(EVEN.token_time * 1980 / 1185)
    assert low.weights_time < 1.08 * EVEN.weights_time
    assert low.overhead == EVEN.overhead
    assert low.token_energy < EVEN.token_energy
    assert low.active_power < EVEN.active_power


def test_decode_slows_once_the_memory_is_not_kept_busy() -> None:
    low = costs_at_clock(EVEN, SILICON, 495)
    assert low.weights_time == pytest.approx(2 * EVEN.weights_time)


def test_clock_is_in_force_after_a_delay() -> None:
    server = VirtualServer([(0.0, 100, 5000)], EVEN)
    server.advance(1.0)
    server.set_clock(1185)
    server.set_clock(1185)
    server.advance(1.0 + CLOCK_DELAY / 2)
    assert server.clock == 1980
    server.advance(1.5)
    assert server.clock == 1185


def test_power_cap_slows_prefill_only() -> None:
    def run(limit: float) -> tuple[float, float]:
        server = VirtualServer([(0.0, 2048, 400)], EVEN, limit=limit)
        server.advance(30.0)
        one = server.finished[0]
        return one.to_first, one.between

    free, capped = run(700.0), run(400.0)
    assert capped[0] > 1.1 * free[0]
    assert capped[1] == pytest.approx(free[1])


def test_cap_below_the_lowest_power_is_exceeded() -> None:
    server = VirtualServer([(0.0, 2048, 2)], EVEN, limit=1.0)
    server.advance(30.0)
    assert len(server.finished) == 1


def test_trace_has_the_published_size() -> None:
    assert len(serving.trace()) == 19_366
    assert serving.trace()[-1][0] == pytest.approx(3502, abs=1)
    assert len(serving.rotated(0.3)) == 19_366


def test_tables_are_those_that_do_not_fall_with_the_load() -> None:
    tables = serving.tables()
    assert len(tables) == 10
    assert all(low >= middle >= high for low, middle, high in tables)


def test_load_tracking_lowers_the_clock_of_a_steady_server() -> None:
    requests = serving.doubled(1, rate=3.0, at=400, after=0)
    original = serving.serve(requests, serving.fixed(0))
    tracked = serving.serve(requests, serving.tracking())
    assert tracked.energy < original.energy
    assert tracked.missed <= original.missed + 0.01
    assert {clock for _, clock in tracked.clocks} >= {1980, 1590}


def test_table_of_results_is_complete() -> None:
    run = dict.fromkeys(
        ("original_missed", "saved", "extra", "oracle", "oracle_extra", "single", "single_extra"),
        0.1,
    )
    text = serving.table(
        {"replays": [{**run, "literal_saved": 0.0}], "bursty": run, "steps": [3.0, None, 6.0]}
    )
    assert "| share of that oracle | 100% |" in text
    assert "| 1 of 2, and at the step already in 1 |" in text


def test_request_that_is_added_later_is_served() -> None:
    server = VirtualServer((), EVEN)
    server.advance(1.0)
    server.add(1.0, 100, 2)
    assert not server.exhausted
    server.advance(2.0)
    assert [one.arrived for one in server.finished] == [1.0]
    assert server.exhausted


def test_excerpt_begins_at_zero() -> None:
    arrivals = serving_stack.excerpt(1450, 600)
    assert 0 <= arrivals[0][0] < 5
    assert 595 < arrivals[-1][0] < 600
    assert all(one in serving.trace() for one in serving_stack.excerpt(0, 10))


def test_table_of_stacks_compares_them() -> None:
    def run(mode: str, clocks: list[tuple[float, int]], energy: int) -> serving_stack.StackRun:
        served = serving_stack.ServedExcerpt(200, 1, 1000, energy, clocks, 0.12)
        return serving_stack.StackRun(mode, served, {}, unlocked=True)

    text = serving_stack.table(
        run("apply", [(0.0, 1980), (10.0, 1590), (40.0, 1590)], 80_000_000),
        run("advise", [(0.0, 1980), (40.0, 1980)], 100_000_000),
    )
    tracked = (
        "| load tracking | 200 | 1 (0.50%) | 0.080 | 20.0% | 1980 MHz 25%, 1590 MHz 75% | 0.1 s |"
    )
    assert tracked in text
    assert "| original | 200 | 1 (0.50%) | 0.100 | 0.0% | 1980 MHz 100% | 0.1 s |" in text
