"""Fleets of real agents under any schedule of faults: no budget is exceeded, none is lost."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testbed.simulated_fleet import SimulatedFleet, SimulatedHost, W

FAULTS = (
    "cut",
    "deaf",
    "mend",
    "kill agent",
    "start agent",
    "stop agent",
    "hang",
    "resume",
    "kill capper",
    "restart capper",
    "switch off",
    "switch on",
    "load",
    "no load",
    "slow devices",
    "suspend",
    "step clock",
    "compact",
)
EVENTS = st.lists(
    st.tuples(st.sampled_from(FAULTS), st.integers(0, 3), st.sampled_from([0.25, 1, 3, 8, 20])),
    max_size=25,
)
BUDGETS = {"": 3000 * W, "row-1": 1700 * W, "row-2": 1900 * W}
SHORT = 4.0
"""Seconds without a capper, which a service manager restarts."""


@pytest.mark.slow
@settings(max_examples=settings().max_examples - 20)  # five in `make test`
@given(events=EVENTS)
def test_budgets_hold_under_any_faults_and_are_used_after_them(
    events: list[tuple[str, int, float]],
) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        fleet = SimulatedFleet(Path(folder), 4, budgets=BUDGETS, places=("row-1", "row-2"))
        fleet.run(8)  # until all hosts are registered
        fleet.is_strict = True
        hosts = list(fleet.hosts.values())
        for fault, number, seconds in events:
            happen(fleet, hosts[number], fault)
            fleet.run(seconds)
        for host in hosts:
            heal(host)
        fleet.run(90)
        assert fleet.enforced >= 2990 * W, fleet.limits
        assert all(host.participant.status.in_contact for host in hosts)


def happen(fleet: SimulatedFleet, host: SimulatedHost, fault: str) -> None:
    if not host.is_on and fault != "switch on":
        return
    match fault:
        case "cut":
            host.client.connected = False
        case "deaf":
            host.client.deaf = True
        case "mend":
            host.client.connected, host.client.deaf = True, False
        case "kill agent":
            host.kill_agent()
        case "start agent" if host.participant is None:
            host.start_agent()
        case "stop agent":
            host.stop_agent()
        case "hang":
            host.is_hung = True
        case "resume":
            host.is_hung = False
        case "kill capper":
            host.capper_runs = False
            fleet.run(SHORT)
            host.restart_capper()
        case "restart capper":
            host.restart_capper()
        case "switch off":
            host.switch_off()
        case "switch on" if not host.is_on:
            host.switch_on()
        case "load":
            host.power = 1500 * W
        case "no load":
            host.power = 100 * W
        case "slow devices":
            host.lag = 4.0
        case "suspend":
            fleet.clock.suspend(5)
        case "step clock":
            fleet.clock.step_wall(-1_000_000)
        case "compact":
            fleet.cluster.compact()


def heal(host: SimulatedHost) -> None:
    host.is_hung = False
    host.client.connected, host.client.deaf = True, False
    host.power, host.lag = 1500 * W, 0.0
    if not host.is_on:
        host.switch_on()
    elif host.participant is None:
        host.start_agent()
