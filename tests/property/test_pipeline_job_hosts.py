"""Hosts of one job lower clocks beside a fresh straggler only, and keep the job's budget."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testbed.job_hosts import RunningJob

from wattspan.fleet.job_records import RECORD_LIFETIME
from wattspan.tuning.pipeline.session_state import PipelinePhase, PipelinePolicy

pytestmark = pytest.mark.slow

BASES = (0.1, 0.06)
STARTS = (3.0, 1000.0, 500_000.0)
HOUR = 3600
ORIGINAL, FLOOR = 1600, 800


def events(
    job: RunningJob, chance: random.Random, slow: dict[int, float], *, losses: float = 0.0
) -> None:
    """Random changes before an iteration: stragglers, wall clocks, and lost or found contact.

    A host whose own speed changes while it measures its costs misjudges them, on one host too.
    """
    number = chance.randrange(len(job.hosts))
    host = job.hosts[number]
    steady = host.session.phase not in (PipelinePhase.OBSERVE, PipelinePhase.PROFILE)
    if chance.random() < 0.03 and steady and slow.pop(number, None) is None:
        slow[number] = chance.choice([1.1, 1.3])
    if chance.random() < 0.05:
        host.clock.step_wall(chance.uniform(-HOUR, HOUR))
    if chance.random() < losses:
        host.client.connected = not host.client.connected


def of_random_jobs(test: Callable[[int, float, float, int], None]) -> Callable[[], None]:
    """Run ``test`` with numbers of hosts, budgets, noises and seeds."""
    given_jobs = given(
        st.integers(2, 3),
        st.sampled_from([0.02, 0.05]),
        st.sampled_from([0.0, 0.004]),
        st.integers(0, 2**16),
    )
    return settings(max_examples=settings().max_examples // 12, deadline=None)(given_jobs(test))


def job_on(hosts: int, budget: float, chance: random.Random) -> RunningJob:
    """A job whose hosts join at random times."""
    policy = PipelinePolicy(ORIGINAL, FLOOR, max_slowdown=budget)
    joins = [0, *(chance.randrange(60) for _ in range(hosts - 1))]
    return RunningJob(policy, BASES, STARTS[:hosts], joins)


@of_random_jobs
def test_clocks_are_lowered_beside_a_fresh_straggler_only(
    hosts: int, budget: float, noise: float, seed: int
) -> None:
    """Agents join late, contact is lost and found, stragglers come and go, wall clocks step."""
    chance = random.Random(seed)
    job = job_on(hosts, budget, chance)
    slow: dict[int, float] = {}
    for _ in range(220):
        events(job, chance, slow, losses=0.02)
        job.iterate(slow, 1 + noise * chance.gauss(0, 1))
        for host in job.hosts:
            session, now = host.session, host.clock.monotonic()
            fresh = {seen.host for seen in host.partners.records}
            assert host.name not in fresh
            assert all(now - seen.seen <= RECORD_LIFETIME for seen in host.partners.records)
            if session.phase is PipelinePhase.STRAGGLE:  # the host has one pipeline
                assert fresh
                assert session.partner.rpartition(" of ")[2] in {one.name for one in job.hosts}
            assert all(FLOOR <= mhz <= ORIGINAL for mhz in host.clocks)
            account, loss = host.group.running_account
            assert loss.bound >= loss.lost >= 0
            assert account.elapsed / 1e9 <= job.lost + job.usual + 1e-3


@of_random_jobs
def test_hosts_of_one_job_keep_its_budget(
    hosts: int, budget: float, noise: float, seed: int
) -> None:
    """The account of each host has the loss of the whole job, and the job keeps the budget."""
    chance = random.Random(seed)
    job = job_on(hosts, budget, chance)
    slow: dict[int, float] = {}
    for number in range(260):
        events(job, chance, slow)
        job.iterate(slow, 1 + noise * chance.gauss(0, 1))
        if number > 130:
            # A record is seconds old, and a recovered straggler is noticed after its iteration.
            assert job.lost <= 1.2 * budget * job.usual
