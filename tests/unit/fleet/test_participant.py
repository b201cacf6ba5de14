"""A fleet of agents: budgets, joins, losses of contact, restarts, and the operator's changes."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from testbed.memory_cluster import MemoryCluster, MemoryCoordination
from testbed.simulated_fleet import SimulatedFleet, SimulatedHost, W
from testbed.waiting import eventually

from wattspan.capper.protocol import AllotmentRow
from wattspan.fleet.coordination import Changes, KeyChange, KeyWrite
from wattspan.model import SECOND
from wattspan.model.settings import Duration
from wattspan.testing import ManualClock

BUDGET = 3000 * W


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory, since every change of an allotment is synchronized with the disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def fleet(folder: Path) -> SimulatedFleet:
    return SimulatedFleet(folder, 4, budgets={"": BUDGET})


def test_hosts_share_the_whole_budget(fleet: SimulatedFleet) -> None:
    fleet.run(10, BUDGET)
    assert fleet.limits == [750 * W] * 4


@pytest.mark.slow
def test_power_moves_to_the_host_that_needs_it(fleet: SimulatedFleet) -> None:
    for host in fleet.hosts.values():
        host.power = 350 * W
    fleet.hosts["host0"].power = 1400 * W
    fleet.run(120, BUDGET)
    assert fleet.hosts["host0"].enforced >= 1400 * W


def test_power_of_a_tuned_job_that_pauses_moves_to_others(fleet: SimulatedFleet) -> None:
    host = fleet.hosts["host0"]
    host.power = 200 * W
    host.held, host.powers = {"gpu:a": (500 * W, 600 * W)}, {"gpu:a": 70 * W}
    fleet.run(20, BUDGET)
    assert fleet.limits == [300 * W, 900 * W, 900 * W, 900 * W]


@pytest.mark.slow
def test_lost_host_falls_back_before_its_power_is_given_to_others(fleet: SimulatedFleet) -> None:
    for name, host in fleet.hosts.items():
        host.power = 1500 * W if name == "host0" else 350 * W
        host.lag = 3.0
    fleet.run(120, BUDGET)
    host = fleet.hosts["host0"]
    assert host.enforced > 1000 * W
    for other in fleet.hosts.values():
        other.power = 1500 * W
    host.client.connected = False
    fleet.run(60, BUDGET)
    assert host.enforced <= 750 * W
    assert fleet.enforced == BUDGET
    host.client.connected = True
    fleet.run(60, BUDGET)
    assert fleet.limits == [750 * W] * 4


@pytest.mark.slow
def test_others_grow_only_when_devices_have_obeyed(fleet: SimulatedFleet) -> None:
    for name, host in fleet.hosts.items():
        host.power = 1500 * W if name == "host0" else 350 * W
    fleet.run(90, BUDGET)
    host = fleet.hosts["host0"]
    assert host.enforced > 1000 * W
    host.lag = 4.0
    for other in fleet.hosts.values():
        other.power = 1500 * W
    fleet.run(60, BUDGET)
    assert fleet.limits == [750 * W] * 4


def test_killed_agent_and_its_host_fall_back(fleet: SimulatedFleet) -> None:
    fleet.run(10, BUDGET)
    fleet.hosts["host1"].kill_agent()
    fleet.run(60, BUDGET)
    assert fleet.hosts["host1"].enforced <= 750 * W
    fleet.hosts["host1"].start_agent()
    fleet.run(60, BUDGET)
    assert fleet.limits == [750 * W] * 4


@pytest.mark.parametrize("seconds", [0, 1, 8])
def test_agent_that_follows_a_killed_one_joins_within_5_seconds(
    fleet: SimulatedFleet, seconds: float
) -> None:
    """It ends the session of the killed one, whose power comes free as early."""
    host = skewed(fleet)
    host.kill_agent()
    fleet.run(seconds, BUDGET)
    host.start_agent()
    assert seconds_until(fleet, lambda: fleet.limits == [750 * W] * 4) <= 5
    fleet.run(20, BUDGET)


def test_restarted_host_awaits_the_end_of_its_former_session(fleet: SimulatedFleet) -> None:
    """A record of another boot may be a copy's."""
    fleet.run(10, BUDGET)
    host = fleet.hosts["host1"]
    host.switch_off()
    host.switch_on()
    fleet.run(1, BUDGET)
    assert "has not ended" in host.participant.status.waiting
    fleet.run(20, BUDGET)
    assert host.participant.status.in_contact


@pytest.mark.exhaustive
def test_service_lost_for_an_hour_leaves_the_safe_allotments(fleet: SimulatedFleet) -> None:
    fleet.run(10, BUDGET)
    for host in fleet.hosts.values():
        host.client.connected = False
    fleet.run(3600, BUDGET)
    assert fleet.limits == [750 * W] * 4
    status = fleet.hosts["host0"].participant.status
    assert not status.in_contact
    assert "No endpoint answers" in status.trouble
    for host in fleet.hosts.values():
        host.client.connected = True
    fleet.run(60, BUDGET)
    assert all(host.participant.status.in_contact for host in fleet.hosts.values())


def test_leader_lost_is_followed_by_another(fleet: SimulatedFleet) -> None:
    fleet.run(10, BUDGET)
    (leader,) = [host for host in fleet.hosts.values() if host.participant.status.leads]
    leader.switch_off()
    fleet.run(60, BUDGET)
    assert sum(host.participant.status.leads for host in fleet.hosts.values() if host.is_on) == 1
    leader.switch_on()
    fleet.run(60, BUDGET)
    assert fleet.enforced == BUDGET


def test_host_joins_when_others_have_shrunk(folder: Path) -> None:
    fleet = SimulatedFleet(folder, 4, budgets={"": BUDGET})
    late = fleet.hosts["host3"]
    late.switch_off()
    fleet.run(10, BUDGET)
    assert fleet.limits == [1000 * W] * 3 + [0]
    late.switch_on()
    late.enforced = late.floor
    before = fleet.clock.monotonic()
    while late.enforced < 740 * W:
        fleet.run(0.25)
    assert fleet.clock.monotonic() - before <= 5e9
    fleet.run(10, BUDGET)
    assert fleet.limits == [750 * W] * 4


@pytest.mark.parametrize("lag", [0.0, 2.75])
def test_host_joins_within_5_seconds(folder: Path, lag: float) -> None:
    fleet = SimulatedFleet(folder, 4, budgets={"": BUDGET})
    late = fleet.hosts["host3"]
    late.switch_off()
    fleet.run(10, BUDGET)
    for host in fleet.hosts.values():
        host.lag = lag
    for phase in range(4):  # of the beats of the others
        fleet.run(0.75 * phase, BUDGET)
        late.switch_on()
        assert late.enforced == late.floor
        assert seconds_until(fleet, lambda: late.enforced >= 740 * W) <= 5
        late.switch_off()
        late.lose_record()
        fleet.operator_removes("host3")
        fleet.run(10, BUDGET)
        assert fleet.enforced == BUDGET


@pytest.mark.parametrize("lag", [0.0, 2.0])
def test_power_of_a_stopped_host_is_used_within_5_seconds(
    fleet: SimulatedFleet, lag: float
) -> None:
    leaving = skewed(fleet)
    leaving.lag = lag
    leaving.stop_agent()
    assert seconds_until(fleet, lambda: fleet.enforced >= BUDGET - 20 * W and below(leaving)) <= 5
    leaving.start_agent()
    fleet.run(5, BUDGET)
    assert fleet.limits == [750 * W] * 4


def test_power_of_a_drained_host_is_used_within_5_seconds(fleet: SimulatedFleet) -> None:
    fleet.run(10, BUDGET)
    fleet.drain("host1")
    assert seconds_until(fleet, lambda: fleet.limits == [900 * W, 300 * W, 900 * W, 900 * W]) <= 5


@pytest.mark.slow
def test_stopped_host_with_slow_devices_is_awaited_without_the_time_of_contact(
    fleet: SimulatedFleet,
) -> None:
    """The fallback takes longer than an agent may take to end."""
    leaving = skewed(fleet)
    leaving.lag = 5.0
    leaving.stop_agent()
    seconds = seconds_until(fleet, lambda: fleet.enforced >= BUDGET - 20 * W and below(leaving))
    assert 5 < seconds <= 8  # `fallback` and the steps of limits are 6 s
    assert leaving.participant is None


def test_leader_that_stops_is_followed_at_once(fleet: SimulatedFleet) -> None:
    fleet.run(10, BUDGET)
    (leader,) = [host for host in fleet.hosts.values() if host.participant.status.leads]
    leader.lag = 3.0
    leader.stop_agent()
    others = [host for host in fleet.hosts.values() if host is not leader]
    led = seconds_until(fleet, lambda: any(one.participant.status.leads for one in others))
    assert led <= 3


def test_removed_host_returns_with_its_floor(fleet: SimulatedFleet) -> None:
    """No budget counts the fallback that it has stored."""
    fleet.run(10, BUDGET)
    back = fleet.hosts["host3"]
    back.switch_off()
    fleet.run(30, BUDGET)
    fleet.operator_removes("host3")
    fleet.run(10, BUDGET)
    fleet.set_budgets({"": 2000 * W})
    fleet.run(5)
    back.switch_on()
    assert back.enforced == 750 * W  # more than the share for which the others make room
    assert seconds_until(fleet, lambda: back.enforced == back.floor) <= 1
    fleet.run(8)  # until it is admitted
    fleet.run(8, 2000 * W)
    assert fleet.limits == [500 * W] * 4


def skewed(fleet: SimulatedFleet) -> SimulatedHost:
    """A host with more than its safe allotment, which others could use now."""
    for name, host in fleet.hosts.items():
        host.power = 1500 * W if name == "host1" else 350 * W
    fleet.run(90, BUDGET)
    for host in fleet.hosts.values():
        host.power = 1500 * W
    assert fleet.hosts["host1"].enforced > 1000 * W
    return fleet.hosts["host1"]


def below(host: SimulatedHost) -> bool:
    return host.enforced <= 750 * W


def seconds_until(fleet: SimulatedFleet, is_so: Callable[[], bool]) -> float:
    began = fleet.clock.monotonic()
    while not is_so():
        assert fleet.clock.monotonic() - began < 60 * SECOND, fleet.limits
        fleet.run(0.25)
    return (fleet.clock.monotonic() - began) / SECOND


def test_second_host_of_a_name_does_not_join(fleet: SimulatedFleet) -> None:
    fleet.run(10, BUDGET)
    twin = fleet.hosts["host1"]
    first, client = twin.participant, twin.client
    twin.start_agent()
    second = twin.participant
    for _ in range(280):
        fleet.run(0.25, BUDGET)
        first.round()
    assert "another host with the same [fleet] name" in second.status.waiting
    assert first.status.in_contact
    assert first.health()[0].failures == ()
    (failure,) = second.health()[0].failures
    assert str(failure).startswith("Cannot join the fleet: A session of this host's name")
    assert client.connected


@pytest.mark.slow
def test_stuck_device_keeps_its_power_from_others(fleet: SimulatedFleet) -> None:
    fleet.run(10, BUDGET)
    stuck = fleet.hosts["host0"]
    stuck.is_stuck = True
    for host in fleet.hosts.values():
        host.power = 1500 * W
    stuck.power = 300 * W
    fleet.run(120, BUDGET)
    assert stuck.enforced == 750 * W
    stuck.is_stuck = False
    fleet.run(120, BUDGET)
    assert fleet.enforced >= BUDGET - 200 * W


def test_lowered_budget_is_reached_and_a_raised_one_used(fleet: SimulatedFleet) -> None:
    fleet.run(10, BUDGET)
    fleet.set_budgets({"": 2000 * W})
    fleet.run(5)
    fleet.run(5, 2000 * W)
    fleet.set_budgets({"": 4000 * W})
    fleet.run(10, 4000 * W)
    assert fleet.enforced == 4000 * W


def test_lost_answers_of_commits_do_not_end_a_session(fleet: SimulatedFleet) -> None:
    fleet.run(10, BUDGET)
    for host in fleet.hosts.values():
        host.client.deaf = True
    fleet.run(60, BUDGET)
    assert fleet.limits == [750 * W] * 4
    assert all(host.participant.status.in_contact for host in fleet.hosts.values())


def test_dead_capper_is_reported(fleet: SimulatedFleet) -> None:
    fleet.run(10, BUDGET)
    host = fleet.hosts["host2"]
    host.capper_runs = False
    fleet.run(5, BUDGET)
    assert "No capper answers" in host.participant.status.trouble
    host.restart_capper()
    fleet.run(60, BUDGET)
    assert fleet.limits == [750 * W] * 4


@pytest.mark.slow
def test_slow_ramp_delays_the_use_of_a_lost_host_s_power(folder: Path) -> None:
    fleet = SimulatedFleet(folder, 3, budgets={"": BUDGET}, ramp=20 * W)
    for name, host in fleet.hosts.items():
        host.power = 1500 * W if name == "host0" else 350 * W
    fleet.run(120, BUDGET)
    host = fleet.hosts["host0"]
    assert host.enforced > 1400 * W
    for other in fleet.hosts.values():
        other.power = 1500 * W
    host.kill_agent()
    fleet.run(180, BUDGET)
    assert host.enforced <= 1000 * W
    assert fleet.enforced >= BUDGET - 10 * W


def test_ramp_that_is_too_slow_for_a_fleet_is_reported(folder: Path) -> None:
    fleet = SimulatedFleet(folder, 1, budgets={"": BUDGET}, ramp=W)
    fleet.run(3, BUDGET)
    assert (
        "are too slow for a fleet: a fallback by 1200 W"
        in fleet.hosts["host0"].participant.status.trouble
    )


@pytest.mark.slow
def test_unexpected_error_does_not_end_the_thread(fleet: SimulatedFleet) -> None:
    fleet.run(5, BUDGET)
    host, lines = fleet.hosts["host1"], []

    class Broken:
        calls = 0

        def allotment(self) -> AllotmentRow:
            self.calls += 1
            if self.calls > 2:
                return host.allotment()
            raise ZeroDivisionError("a bug")

        allot = host.allot

    broken = Broken()
    host.kill_agent()
    settings = replace(host.settings, contact=Duration(3 * SECOND))
    host.settings = settings
    participant = host.new_participant(host.client, broken, lines.append)
    participant.start()

    def goes_on() -> bool:
        fleet.clock.advance(0.05)
        return broken.calls > 4

    eventually(goes_on, "it goes on", within=20)
    participant.stop(20)
    assert "ZeroDivisionError: a bug" in lines[0]


def test_stepped_clocks_change_nothing(fleet: SimulatedFleet) -> None:
    fleet.run(10, BUDGET)
    fleet.clock.step_wall(10**7)
    fleet.run(30, BUDGET)
    fleet.clock.step_wall(-(10**8))
    fleet.run(30, BUDGET)
    assert fleet.limits == [750 * W] * 4


class SingleChanges:
    """A service that delivers each change on its own."""

    def __init__(self, cluster: MemoryCluster) -> None:
        self._cluster = cluster

    def client(self) -> Any:
        return self._Client(self._cluster.client())

    class _Client:
        def __init__(self, client: MemoryCoordination) -> None:
            self._client = client

        def __getattr__(self, name: str) -> Any:
            return getattr(self._client, name)

        def watch(self, prefix: str, after: int) -> SingleChanges._Stream:
            return SingleChanges._Stream(self._client.watch(prefix, after))

    class _Stream:
        def __init__(self, changes: Changes) -> None:
            self._changes = changes
            self._left: deque[KeyChange] = deque()

        def wait(self, seconds: float) -> tuple[KeyChange, ...]:
            self._left.extend(self._changes.wait(seconds))
            if not self._left:
                return ()
            return (self._left.popleft(),)

        def close(self) -> None:
            self._changes.close()


@pytest.mark.parametrize("writes", [2, 900, pytest.param(20_000, marks=pytest.mark.exhaustive)])
def test_flood_of_changes_is_caught_up_by_one_round(folder: Path, writes: int) -> None:
    clock = ManualClock()
    memory = MemoryCluster(clock)
    fleet = SimulatedFleet(folder, 2, budgets={"": BUDGET}, cluster=SingleChanges(memory))
    fleet.run(10, BUDGET)
    (leader,) = (one for one in fleet.hosts.values() if one.participant.status.leads)
    stranger = memory.client()
    for number in range(writes):
        stranger.commit([KeyWrite(f"{fleet.keys.prefix}strange/{number % 7}", b"x")])
    rounds = 0
    while leader.participant.observe(0.0):
        leader.participant.round()
        rounds += 1
        assert rounds < 5  # its own writes are changes as well
    fleet.run(10, BUDGET)
    assert fleet.limits == [1500 * W] * 2
