"""A fleet without a quorum of etcd for an hour by the hosts' clock.

The members of etcd, its adapter, the agents' and the leader's code and the capper's ceiling are
real; devices are numbers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from testbed.etcd import EtcdCluster
from testbed.simulated_fleet import SimulatedFleet, SimulatedHost, W

from wattspan.fleet.coordination import CoordinationError
from wattspan.fleet.records import read_state
from wattspan.model import SECOND

pytestmark = [pytest.mark.needs_etcd, pytest.mark.exhaustive]

HOSTS, BUDGET, SAFE = 3, 2400 * W, 800 * W
HASTE = SECOND // 4
"""Time limit of a call without a quorum, which takes as long in real time."""


class HastyClient:
    """A client of etcd that is patient as long as the cluster has a quorum."""

    def __init__(self, cluster: HastyCluster) -> None:
        self._cluster = cluster
        self._patient = cluster.etcd.client()
        self._hasty = cluster.etcd.client(timeout=HASTE)

    def __getattr__(self, name: str) -> object:
        return getattr(self._hasty if self._cluster.is_hasty else self._patient, name)


class HastyCluster:
    def __init__(self, etcd: EtcdCluster) -> None:
        self.etcd, self.is_hasty = etcd, False

    def client(self) -> HastyClient:
        return HastyClient(self)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[HastyCluster]:
    with EtcdCluster(tmp_path, 3) as etcd:
        yield HastyCluster(etcd)


def test_hour_without_quorum_leaves_the_safe_allotments(cluster: HastyCluster) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        fleet = SimulatedFleet(Path(folder), HOSTS, budgets={"": BUDGET}, cluster=cluster)
        hosts = list(fleet.hosts.values())
        rich, *others = hosts
        for host in hosts:
            host.power = 1500 * W if host is rich else 350 * W
        wait_for(fleet, lambda: rich.enforced > 1200 * W and are_safe(hosts), 200)
        for host in hosts:
            host.power = 1500 * W

        for member in (1, 2):
            cluster.etcd.kill(member)
        cluster.is_hasty = True
        samples = pass_time(fleet, 20, agents_every=4)
        fallen = [host.ceiling.limit for host in hosts]
        assert fallen[0] == SAFE
        assert max(fallen) <= SAFE
        for minute in range(0, 60, 2):
            if minute == 20:
                others[0].restart_capper()
            if minute == 40:
                others[1].kill_agent()
                others[1].start_agent()
            samples += pass_time(fleet, 120, agents_every=120)
            assert [host.ceiling.limit for host in hosts] == fallen
            assert [host.enforced for host in hosts] == fallen
            assert not any(host.participant.status.in_contact for host in hosts)
        assert samples > 3600 * HOSTS
        assert "No etcd member decides" in rich.participant.status.trouble

        for member in (1, 2):
            cluster.etcd.start(member)
        cluster.is_hasty = False
        wait_for(fleet, lambda: is_as_before(fleet), 300)
        stop(hosts)
        assert all(host.ceiling.until is None for host in hosts)


def are_safe(hosts: list[SimulatedHost]) -> bool:
    """True if all hosts are registered and know their final safe allotments."""
    return all(host.ceiling.safe == SAFE for host in hosts)


def is_as_before(fleet: SimulatedFleet) -> bool:
    """True if every host is in contact, has its newest allotment in force, and power is used."""
    try:
        state = read_state(fleet.keys, fleet.operator.read(fleet.keys.prefix))
    except CoordinationError:
        return False  # the members elect a leader
    return (
        all(host.participant.status.in_contact for host in fleet.hosts.values())
        and all(
            state.book.hosts[name].allotment.limit == host.ceiling.limit == host.enforced
            for name, host in fleet.hosts.items()
        )
        and fleet.enforced >= BUDGET - 20 * W
    )


def wait_for(fleet: SimulatedFleet, is_so: Callable[[], bool], seconds: int) -> None:
    """Pass time of the hosts' clock until something is so; the members answer in real time."""
    for _ in range(seconds):
        pass_time(fleet, 1, agents_every=1)
        if is_so():
            return
    raise AssertionError([host.participant.status for host in fleet.hosts.values()])


def pass_time(fleet: SimulatedFleet, seconds: int, *, agents_every: int) -> int:
    """Pass time, check the sum of limits at each change and each second; the number of checks."""
    for second in range(1, seconds + 1):
        fleet.clock.advance(1)
        for host in fleet.hosts.values():
            host.settle()
            if second % agents_every == 0:
                host.step()
            assert fleet.enforced <= BUDGET, fleet.limits
    return seconds * len(fleet.hosts)


def stop(hosts: list[SimulatedHost]) -> None:
    for host in hosts:
        host.stop_agent()
