"""A tuned job whose board draws less than the lowest permitted cap."""

from __future__ import annotations

import pytest
from testbed.tuner.clock_knob import BUDGET, clock_curves, run


@pytest.mark.exhaustive
@pytest.mark.slow
def test_clock_is_held_within_the_budget_without_a_trial_of_caps() -> None:
    curve = clock_curves()[0]
    found = run(curve, 0.01, 1, 600)
    assert found.slowdown <= BUDGET
    assert found.saving > 0.05
    assert found.committed is not None
    assert found.clock < curve.original
    assert not found.capped
