"""Agents and etcd members at three places whose links are cut, under a schedule of 100 faults.

Agents run on both sides of each partition. The agents' and the leader's code, the capper's ceiling,
etcd and the network are real; devices are numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path

import pytest
from testbed.etcd import EtcdCluster
from testbed.network import Network
from testbed.real_time_fleet import RealTimeHost, Schedule, real_time_fleet
from testbed.simulated_fleet import W

pytestmark = [pytest.mark.needs_etcd, pytest.mark.needs_network, pytest.mark.exhaustive]

PLACES, HOSTS, BUDGET, FAULTS, SEED = 3, 9, 7200 * W, 100, 20261128


class Partitions(Schedule):
    """Links and paths between places that are cut, one partition at a time, and agents that end."""

    def __init__(
        self, hosts: list[RealTimeHost], cluster: EtcdCluster, network: Network, seed: int
    ) -> None:
        super().__init__(hosts, seed)
        self._cluster, self._network = cluster, network
        self._is_cut = False
        self.seen: Counter[str] = Counter()
        """Contacts of hosts at the ends of partitions."""

    @property
    def kinds(self) -> tuple[Callable[[], bool], ...]:
        return (
            self.isolate_place, self.isolate_place, self.isolate_etcd_leader, self.isolate_leader,
            self.silence_place, self.silence_place, self.separate_two, self.block_one_way,
            self.isolate_all, self.random.choice(super().kinds),
        )  # fmt: skip

    def isolate_place(self) -> bool:
        return self._cut_links([self.random.randrange(PLACES)])

    def isolate_etcd_leader(self) -> bool:
        try:
            return not self._is_cut and self._cut_links([self._cluster.leader()])
        except AssertionError:
            return False

    def isolate_leader(self) -> bool:
        leader = self._host(lambda host: host.leads)
        return leader is not None and self._cut_links([place_of(self.hosts.index(leader))])

    def isolate_all(self) -> bool:
        """No side has a quorum."""
        return self._cut_links(list(range(PLACES)))

    def silence_place(self) -> bool:
        place = self.random.randrange(PLACES)
        others = [other for other in range(PLACES) if other != place]
        paths = [(place, other) for other in others] + [(other, place) for other in others]
        return self._cut_paths(paths, [place])

    def separate_two(self) -> bool:
        """Two places do not reach each other, and both reach the third one."""
        one, other = self.random.sample(range(PLACES), 2)
        return self._cut_paths([(one, other), (other, one)])

    def block_one_way(self) -> bool:
        return self._cut_paths([self.random.choice(list(permutations(range(PLACES), 2)))])

    def _cut_links(self, places: list[int]) -> bool:
        return self._cut({(place,) for place in places}, places)

    def _cut_paths(self, paths: list[tuple[int, int]], isolated: list[int] = ()) -> bool:
        return self._cut(set(paths), isolated)

    def _cut(self, cuts: set[tuple[int, ...]], isolated: list[int]) -> bool:
        """Cut links of places and paths of pairs for some time, unless some are cut already."""
        if self._is_cut:
            return False
        self._is_cut = True
        for one in cuts:
            (self._network.cut if len(one) == 1 else self._network.cut_path)(*one)

        def mend() -> None:
            if isolated:
                self._note_contacts(isolated)
            for one in cuts:
                (self._network.join if len(one) == 1 else self._network.join_path)(*one)
            self._is_cut = False

        return self.later(1, 6, mend)

    def _note_contacts(self, isolated: list[int]) -> None:
        for number, host in enumerate(self.hosts):
            if host.participant is not None:
                side = "isolated" if place_of(number) in isolated else "connected"
                contact = "in contact" if host.in_contact else "without contact"
                self.seen[f"{side}, {contact}"] += 1


def place_of(number: int) -> int:
    return number % PLACES


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(PLACES) as network, network.at_router():
        yield network


def test_budget_holds_at_every_change_in_100_partitions(
    network: Network, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with (
        EtcdCluster(tmp_path, PLACES, network=network) as cluster,
        real_time_fleet(
            cluster, HOSTS, BUDGET, lambda number: network.enter(place_of(number))
        ) as fleet,
    ):
        schedule = Partitions(fleet.hosts, cluster, network, SEED)
        fleet.run(schedule, FAULTS)
    assert fleet.sums.violations == []
    assert schedule.seen["isolated, without contact"] > 0
    assert schedule.seen["connected, in contact"] > 0
    figures = {
        "faults": dict(schedule.done),
        "hosts at the end of an isolation": dict(schedule.seen),
        "changes": fleet.sums.changes,
        "highest": fleet.sums.highest,
    }
    record_property("figures", figures)
    print(figures)
