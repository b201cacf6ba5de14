"""The latency of caps is measured from the energy around changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from testbed.tuning_plant import QUICK, TOP, Plant, Run

from wattspan.model import SECOND
from wattspan.tuning.decisions.blocks import CHANGES, MAX_LATENCY, CapLatency
from wattspan.tuning.decisions.step import begin, step
from wattspan.tuning.decisions.values import EnergyPoint


def driven(
    delay: float, ramp: float, *, run: float = 12.0, low: float = 200.0, every: float = 0.5
) -> CapLatency:
    """Alternation of 300 W and ``low``, with dead time and a ramp after each change, in seconds."""
    latency, at, energy, grain = CapLatency(), 0.0, 0.0, 0.05
    old, new, changed, next_read = 300.0, 300.0, -100.0, 0.0
    while at < 40 * run and not latency.measured:
        if at - changed >= run:
            old, new, changed = new, low if new == 300.0 else 300.0, at
            latency = latency.change(int(at * SECOND))
        part = min(max((at - changed - delay) / max(ramp, 1e-9), 0.0), 1.0)
        energy += grain * (old + part * (new - old)) * 1e6
        at += grain
        if at >= next_read:
            next_read += every
            latency = latency.add([EnergyPoint(int(at * SECOND), int(energy))])
    return latency


@pytest.mark.parametrize(("delay", "ramp"), [(0.2, 0.6), (0.1, 3.0), (1.0, 1.0)])
@pytest.mark.parametrize("run", [12.0, 20.0])
def test_latency_is_twice_the_mean_delay(delay: float, ramp: float, run: float) -> None:
    latency = driven(delay, ramp, run=run)
    assert len(latency.delays) == CHANGES
    assert latency.settled_after / SECOND == pytest.approx(2 * delay + ramp, abs=0.4)


def test_latency_is_measured_between_changes_of_three_seconds() -> None:
    latency = driven(0.2, 0.4, run=3.2)
    assert latency.settled_after / SECOND == pytest.approx(0.8, abs=0.4)


def test_latency_is_unknown_while_changes_are_too_close() -> None:
    assert driven(0.2, 0.4, run=1.5).settled_after == 0


def test_latency_is_unknown_without_a_difference_of_power() -> None:
    assert driven(0.2, 0.4, low=295.0).settled_after == 0


def test_latency_is_unknown_with_rare_readings() -> None:
    assert not driven(0.2, 0.4, every=6.0).delays


def test_latency_is_bounded_and_final() -> None:
    latency = CapLatency(delays=(float(MAX_LATENCY),) * CHANGES)
    assert latency.settled_after == MAX_LATENCY
    assert latency.change(5) is latency
    assert latency.add([EnergyPoint(1, 1)]) is latency


def ramped(turns: int, settle_time: int = SECOND) -> Run:
    """A search on a device whose caps take 4 s, with readings twice a second."""
    run = Run(Plant(turn=0.5, cv=0.002), replace(QUICK, settle_time=settle_time))
    state = begin(run.policy, run.ranges, now=0)
    lag, spent = TOP, 0.0
    for _ in range(turns):
        seen = run.plant.observe(run.decisions[-1] if run.decisions else None)
        lag += (run.plant.level - lag) // 4
        spent += 0.5 * lag * 1e3
        seen = replace(seen, energy=(EnergyPoint(seen.now, int(spent)),))
        state, decision = step(state, seen)
        run.decisions.append(decision)
    run.state = state
    return run


def test_slow_caps_lengthen_the_settling_time() -> None:
    run = ramped(2_000)
    assert run.state.latency.measured
    assert run.state.policy.settle_time > 1.5 * SECOND


def test_slightly_slower_caps_lengthen_the_settling_time() -> None:
    known = ramped(2_000).state
    settle_time = known.policy.settle_time * 9 // 10
    state = ramped(2_000, settle_time).state
    assert settle_time < state.policy.settle_time < 1.5 * settle_time


def test_latency_is_measured_from_the_beginning() -> None:
    run = ramped(10)
    assert not run.state.latency.measured
