"""Budgets and allotments of a simulated fleet: agents' code in virtual time."""

from __future__ import annotations

import pytest
from testbed.fleet_events import simulate
from testbed.fleet_plant import Fleet
from testbed.fleet_services import memory_service

from wattspan.testing import ManualClock

pytestmark = pytest.mark.slow


def test_simulated_fleet_is_within_its_budgets_and_uses_them() -> None:
    clock = ManualClock()
    with memory_service(clock) as service:
        fleet = Fleet(12, 3, service, clock)
        fleet.run(20)
        assert all(host.joined is None for host in fleet.hosts)
        assert fleet.sums[""] > 0.95 * fleet.budgets[""]
        fleet.ratios.clear()
        fleet.begin_faults()
        fleet.run(60)
        assert fleet.count.total() > 30
        assert max(fleet.ratios.values()) <= 1


@pytest.mark.exhaustive
def test_power_of_hosts_that_join_or_leave_is_allotted_within_5_seconds() -> None:
    clock = ManualClock()
    with memory_service(clock) as service:
        rows = simulate(Fleet(40, 3, service, clock), seconds=0, quiet=5, events=5)
    bounds = {
        "first allotment, all agents start at once": 5,
        "share of a new host while all ask for all their power (5)": 5,
        "power of a drained host is allotted to others (5)": 5,
        "power of an agent that stops in order is allotted to others (5)": 5,
        "power of an agent that crashes is allotted to others (5)": 17,
    }
    for name, bound in bounds.items():
        assert float(rows[name].split("max ")[1].removesuffix(" s")) <= bound, rows
