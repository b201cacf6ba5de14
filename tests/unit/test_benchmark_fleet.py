"""The simulated fleet of the benchmark: agents' code in virtual time."""

from __future__ import annotations

import pytest
from benchmarks.fleet_plant import Fleet

pytestmark = pytest.mark.slow


def test_simulated_fleet_is_within_its_budgets_and_uses_them() -> None:
    fleet = Fleet(12, seed=3)
    fleet.run(20)
    assert all(host.joined is None for host in fleet.hosts)
    assert fleet.sums[""] > 0.95 * fleet.budgets[""]
    fleet.ratios.clear()
    fleet.begin_faults()
    fleet.run(60)
    assert fleet.count.total() > 30
    assert max(fleet.ratios.values()) <= 1
