"""Energy of processes on a host that is busy when the agent starts, by laws of its power."""

from __future__ import annotations

import statistics

import pytest
from testbed.idle_baseline import LAWS, SCENARIOS, resting, run, steady


@pytest.mark.parametrize("law", ["straight line", "Fan et al."])
@pytest.mark.parametrize("load", ["variation of 15 %", "requests"])
def test_process_energy_beside_a_busy_start_meets_its_goals(load: str, law: str) -> None:
    runs = [run(SCENARIOS[load], LAWS[law], seconds=40, seed=seed) for seed in range(3)]
    assert all(one.known_after is not None and one.known_after <= 30 for one in runs)
    assert statistics.median(abs(one.error(30, 40)) for one in runs) <= 0.05
    assert max(one.error(0, 5) for one in runs) <= 0.05


def test_load_without_variation_has_a_lower_bound_of_process_energy_only() -> None:
    one = run(steady, LAWS["Fan et al."], seconds=20, seed=1)
    assert one.known_after is None
    assert -1 < one.error(0, 20) < -0.5


@pytest.mark.parametrize("law", LAWS)
def test_process_energy_with_a_remembered_idle_power_is_exact_at_once(law: str) -> None:
    before = run(resting, LAWS[law], seconds=40, seed=1).checkpoint
    one = run(steady, LAWS[law], seconds=70, seed=2, checkpoint=before)
    assert abs(one.error(0, 5)) <= 0.02
    assert abs(one.error(60, 70)) <= 0.02
