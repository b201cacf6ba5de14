"""A synchronous job on several hosts keeps its budget, and hosts compare settings in turn only."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.ranks_on_hosts import RankedHosts, RankHost, spread
from wattspan.fleet.job_records import RECORD_LIFETIME
from wattspan.model import SECOND

pytestmark = pytest.mark.slow

STEP = 0.1
REPORTED = 2 * STEP
"""Seconds of the step that runs now, and of rounding."""


class DisturbedJob:
    """Agents are killed and started, lose and find the service, and GPUs throttle."""

    def __init__(self, hosts: int, budget: float, noise: float, seed: int) -> None:
        self.chance = random.Random(seed)
        loads = [STEP * self.chance.choice([1.0, 1.0, 0.97, 0.9]) for _ in range(hosts)]
        later = [number for number in range(1, hosts) if self.chance.random() < 0.5]
        self.budget = budget
        self.job = RankedHosts(
            loads, spread(hosts, max_slowdown=budget), later, noise=noise,
            random=random.Random(seed),
        )  # fmt: skip
        self.lost_at: dict[str, int] = {}
        self.compared: set[str] = set()

    def disturb(self, rate: float) -> None:
        """At most one event, which happens in a second with a probability of ``rate``."""
        one = self.chance.choice(self.job.members)
        if not one.runs:
            if self.chance.random() < max(20 * rate, 1 / 30):
                one.start()
        elif self.chance.random() < rate:
            self.chance.choice([self.kill, self.kill_explorer, self.cut, self.throttle])(one)
        elif not one.client.connected and self.chance.random() < 10 * rate:
            one.client.connected = True
            self.lost_at.pop(one.name, None)

    def kill(self, one: RankHost) -> None:
        one.kill()
        self.lost_at.pop(one.name, None)

    def kill_explorer(self, one: RankHost) -> None:
        for found in self.job.members:
            if found.compares:
                self.kill(found)

    def cut(self, one: RankHost) -> None:
        one.client.connected = False
        self.lost_at.setdefault(one.name, one.host.clock.monotonic())

    def throttle(self, one: RankHost) -> None:
        gpu = one.host.gpus[0]
        gpu.throttling = () if gpu.throttling else ("hw_slowdown",)

    def check(self) -> None:
        job = self.job
        now = job.hosts[0].clock.monotonic()
        comparing = [one.name for one in job.members if one.compares]
        self.compared.update(comparing)
        for name in comparing:  # a host out of contact stops before its turn passes on
            lost = now - self.lost_at.get(name, now)
            assert lost <= RECORD_LIFETIME + 1.5 * SECOND, name
        assert comparing in ([], [job.explorer])
        assert job.lost <= self.budget * job.together.usual + REPORTED, job.elapsed


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
