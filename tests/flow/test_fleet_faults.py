"""Ten agents in real time over three members of etcd, under a schedule of 100 faults.

The agents' and the leader's code, the capper's ceiling and etcd are real; devices are numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from testbed.etcd import EtcdCluster
from testbed.fixtures import entered_in
from testbed.real_time_fleet import RealTimeHost, Schedule, real_time_fleet
from testbed.simulated_fleet import W
from testbed.waiting import eventually

from wattspan.clock import SystemClock
from wattspan.model import SECOND

pytestmark = [pytest.mark.needs_etcd, pytest.mark.exhaustive]

HOSTS, BUDGET, FAULTS, SEED = 10, 8000 * W, 100, 20261127


class ProcessFaults(Schedule):
    """Agents, hosts and members of etcd that are killed, stopped and hung."""

    def __init__(self, hosts: list[RealTimeHost], cluster: EtcdCluster, seed: int) -> None:
        super().__init__(hosts, seed)
        self.cluster = cluster
        self._down: set[int] = set()

    @property
    def kinds(self) -> tuple[Callable[[], bool], ...]:
        return (
            self.kill_agent, self.kill_leader, self.kill_leader, self.cut, self.cut,
            self.switch_off, self.restart_capper, self.step_clock, self.stop_agent,
            self.kill_member, self.kill_etcd_leader, self.hang_member, self.lose_quorum,
        )  # fmt: skip

    def _lose(self, members: list[int], seconds: tuple[float, float]) -> bool:
        if self._down:
            return False
        self._down = set(members)
        for member in members:
            self.cluster.kill(member)

        def restart() -> None:
            for member in members:
                self.cluster.start(member)
            self._down = set()

        return self.later(*seconds, restart)

    def kill_member(self) -> bool:
        return self._lose([self.random.randrange(3)], (1, 4))

    def kill_etcd_leader(self) -> bool:
        if self._down:
            return False
        try:
            return self._lose([self.cluster.leader()], (1, 4))
        except AssertionError:
            return False

    def lose_quorum(self) -> bool:
        return self._lose(self.random.sample(range(3), 2), (4, 10))

    def hang_member(self) -> bool:
        if self._down:
            return False
        member = self.random.randrange(3)
        self._down = {member}
        self.cluster.hang(member)

        def resume() -> None:
            self.cluster.resume(member)
            self._down = set()

        return self.later(1, 6, resume)


cluster = entered_in(lambda folder: EtcdCluster(folder, 3))


def test_budget_holds_at_every_change_under_100_faults(
    cluster: EtcdCluster, record_property: Callable[[str, object], None]
) -> None:
    clock = SystemClock()
    with real_time_fleet(cluster, HOSTS, BUDGET) as fleet:
        schedule = ProcessFaults(fleet.hosts, cluster, SEED)
        fleet.run(schedule, FAULTS)
        began, leaving = clock.monotonic(), fleet.hosts[0]
        leaving.stop_agent()
        leaving.start_agent()
        eventually(lambda: leaving.in_contact and fleet.uses_budget, "it joins again")
        joined = (clock.monotonic() - began) / SECOND
    assert fleet.sums.violations == []
    figures = {
        "faults": dict(schedule.done),
        "changes": fleet.sums.changes,
        "highest": fleet.sums.highest,
        "join_seconds": round(joined, 2),
    }
    record_property("figures", figures)
    print(figures)
