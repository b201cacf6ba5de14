"""A pipeline with stages on several hosts keeps its budget, and a lost host restores the clocks."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testbed.hosts_in_step import Disturbances
from testbed.tuned_pipeline import TOP
from testbed.tuned_stages import StagedHosts, StageHost, staged

from wattspan.fleet.job_records import RECORD_LIFETIME
from wattspan.model import SECOND

pytestmark = pytest.mark.slow

STAGES = (((0.05, 0.03), (0.05,)), ((0.03,), (0.05, 0.04)), ((0.04,), (0.04,), (0.03,)))
REACTION = RECORD_LIFETIME + 1.5 * SECOND
"""Nanoseconds after which a host without contact has the original clocks."""


class DisturbedPipeline(Disturbances[StageHost]):
    """Wall clocks step, too."""

    def __init__(self, budget: float, noise: float, seed: int) -> None:
        chance = random.Random(seed)
        stages = chance.choice(STAGES)
        self.budget = budget
        self.hosts = StagedHosts(stages, staged(len(stages), max_slowdown=budget), noise)
        super().__init__(self.hosts, chance)
        self.kinds.append(self.step)
        self.lowered = False

    def step(self, one: StageHost) -> None:
        one.host.clock.step_wall(self.chance.choice([-0.003, 0.003, 0.05, -3600, 3600]))

    def check(self) -> None:
        hosts = self.hosts
        for one in hosts.members:
            assert not one.clocked or self.lost(one) <= REACTION, one.name
            assert all(0.5 * TOP <= mhz < TOP for mhz in one.clocked.values())
        self.lowered = self.lowered or any(one.clocked for one in hosts.members)
        longest = hosts.training.seconds((TOP // 2,) * len(hosts.training.ranks))
        assert hosts.lost <= self.budget * hosts.usual + longest


@pytest.mark.exhaustive
@settings(max_examples=5, deadline=None)
@given(st.sampled_from([0.02, 0.05, 0.1]), st.sampled_from([0.0005, 0.004]), st.integers(0, 2**16))
def test_disturbed_pipeline_keeps_its_budget(budget: float, noise: float, seed: int) -> None:
    disturbed = DisturbedPipeline(budget, noise, seed)
    rate = disturbed.chance.choice([0.0, 1 / 200, 1 / 60])
    for _ in range(600):
        disturbed.disturb(rate)
        disturbed.hosts.run(1)
        disturbed.check()
    assert disturbed.lowered or rate
