"""A synchronous job on several hosts keeps its budget, and hosts compare settings in turn only."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testbed.hosts_in_step import Disturbances
from testbed.ranks_on_hosts import RankedHosts, RankHost, spread

from wattspan.fleet.job_records import RECORD_LIFETIME
from wattspan.model import SECOND

pytestmark = pytest.mark.slow

STEP = 0.1
REPORTED = 2 * STEP
"""Seconds of the step that runs now, and of rounding."""


class DisturbedJob(Disturbances[RankHost]):
    """Agents that compare settings are killed, too."""

    def __init__(self, hosts: int, budget: float, noise: float, seed: int) -> None:
        chance = random.Random(seed)
        loads = [STEP * chance.choice([1.0, 1.0, 0.97, 0.9]) for _ in range(hosts)]
        later = [number for number in range(1, hosts) if chance.random() < 0.5]
        self.budget = budget
        self.job = RankedHosts(
            loads, spread(hosts, max_slowdown=budget), later, noise=noise,
            random=random.Random(seed),
        )  # fmt: skip
        super().__init__(self.job, chance)
        self.kinds = [self.kill, self.kill_explorer, self.cut, self.throttle]
        self.compared: set[str] = set()

    def kill_explorer(self, one: RankHost) -> None:
        for found in self.job.members:
            if found.compares:
                self.kill(found)

    def check(self) -> None:
        job = self.job
        comparing = [one for one in job.members if one.compares]
        names = [one.name for one in comparing]
        self.compared.update(names)
        for one in comparing:  # a host out of contact stops before its turn passes on
            assert self.lost(one) <= RECORD_LIFETIME + 1.5 * SECOND, one.name
        assert names in ([], [job.explorer])
        assert job.lost <= self.budget * job.together.usual + REPORTED, job.elapsed


@pytest.mark.exhaustive
@settings(max_examples=6, deadline=None)
@given(
    st.integers(2, 4),
    st.sampled_from([0.02, 0.05, 0.1]),
    st.sampled_from([0.002, 0.01]),
    st.integers(0, 2**16),
)
def test_hosts_compare_in_turn_and_keep_the_budget(
    hosts: int, budget: float, noise: float, seed: int
) -> None:
    disturbed = DisturbedJob(hosts, budget, noise, seed)
    rate = disturbed.chance.choice([0.0, 1 / 200, 1 / 60])
    for _ in range(600):
        disturbed.disturb(rate)
        disturbed.job.run(1)
        disturbed.check()
    assert disturbed.compared or rate
