"""The benchmark of jobs whose clocks are tuned: its curves, its oracle, and one run."""

from __future__ import annotations

import pytest
from benchmarks.tuner.clock_knob import BUDGET, LOWEST, clock_curves, oracle, run
from testbed.tuned_host import DEFAULT


@pytest.mark.parametrize("curve", clock_curves(), ids=lambda curve: curve.name)
def test_no_permitted_cap_binds(curve: object) -> None:
    assert 1.15 * curve.draw < LOWEST * DEFAULT / 1000  # type: ignore[attr-defined]


@pytest.mark.parametrize("curve", clock_curves(), ids=lambda curve: curve.name)
def test_oracle_is_the_best_clock_within_the_budget(curve: object) -> None:
    saving, clock = oracle(curve)  # type: ignore[arg-type]
    assert curve.at(clock).time <= 1 + BUDGET  # type: ignore[attr-defined]
    assert 0.1 < saving < 0.3


@pytest.mark.slow
def test_clock_is_held_within_the_budget_without_a_trial_of_caps() -> None:
    curve = clock_curves()[0]
    found = run(curve, 0.01, 1, 600)
    assert found.slowdown <= BUDGET
    assert found.saving > 0.05
    assert found.committed is not None
    assert found.clock < curve.original
    assert not found.capped
