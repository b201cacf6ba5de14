"""Pipelines of one job on several hosts: stragglers, the turn to explore, and the common budget."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
from testbed.job_hosts import JOB, TAIL, JobHost, RunningJob
from testbed.pipelines import WATTS
from testbed.saved_state import saved

from wattspan.fleet.job_records import RECORD_LIFETIME, JobRecord
from wattspan.model import SECOND, DecisionReason
from wattspan.tuning.pipeline.replicas import NO_PARTNERS, PipelineGroup
from wattspan.tuning.pipeline.session_state import (
    JobLoss,
    PipelinePhase,
    PipelinePolicy,
    begin_session,
    decline,
)

POLICY = PipelinePolicy(1600, 800, max_slowdown=0.05, blocking_watts=WATTS)
BASES = (0.1, 0.06)
STARTS = (1000.0, 90_000.0)
SLOW = {1: 1.3}


def until(
    job: RunningJob, holds: Callable[[], bool], longer: dict[int, float] | None = None
) -> None:
    """Run the job until something holds."""
    for _ in range(600):
        if holds():
            return
        job.iterate(longer)
    raise AssertionError([host.session.decision for host in job.hosts])


@saved
def planned() -> RunningJob:
    """A job whose two hosts have plans."""
    job = RunningJob(POLICY, BASES, STARTS)
    until(job, lambda: all(host.session.plan for host in job.hosts))
    return job


@saved
def following() -> RunningJob:
    """A job whose first host has lower clocks for the second one."""
    job = planned()
    (host, _) = job.hosts
    until(job, lambda: bool(host.session.straggler_plan), SLOW)
    job.run(3, SLOW)
    assert host.session.phase is PipelinePhase.STRAGGLE
    assert max(host.clocks) < 1600
    return job


def explorers(job: RunningJob) -> list[JobHost]:
    return [
        host
        for host in job.hosts
        if host.session.phase is PipelinePhase.PROFILE and host.session.level
    ]


@pytest.mark.exhaustive
def test_one_host_explores_at_a_time() -> None:
    job = RunningJob(POLICY, BASES, (*STARTS, 5.0))
    explored: set[str] = set()
    sentences = set()
    while not all(host.session.plan for host in job.hosts):
        job.iterate()
        present = explorers(job)
        assert len(present) <= 1
        explored |= {host.name for host in present}
        sentences |= {
            host.session.decision.sentence
            for host in job.hosts
            if host.session.decision.reason is DecisionReason.WAITING
        }
    assert explored == {host.name for host in job.hosts}
    assert (
        "The ranks have the original clocks while host-0 measures lower ones for this job."
        in sentences
    )


def test_host_without_contact_explores_alone() -> None:
    job = RunningJob(POLICY, BASES, STARTS)
    for host in job.hosts:
        host.client.connected = False
    until(job, lambda: len(explorers(job)) == 2)
    (figures,) = job.hosts[0].partners.figures
    assert figures.sentence.startswith("No endpoint answers")


def test_turn_that_is_taken_away_restores_the_original_clocks() -> None:
    job = RunningJob(POLICY, BASES, STARTS)
    until(job, lambda: bool(explorers(job)))
    (host,) = explorers(job)
    taken = replace(host.partners, explorer="host-9", may_explore=False)
    for _ in range(2):  # the energy of an iteration is known with the next one
        observed = host.observed(host.clocks, 1.0, 1.2)
        host.group = host.group.step({host.name: observed}, taken)
    assert host.clocks == ()
    assert host.session.decision.reason is DecisionReason.WAITING
    assert "while host-9 measures lower ones" in host.session.decision.sentence


def test_plan_leaves_half_of_the_allowance_to_a_host_that_explores() -> None:
    job = planned()
    host, _ = job.hosts
    until(job, lambda: host.session.lost_bound > 0.8 * host.session.allowed and bool(host.clocks))
    beside = replace(host.partners, explorer="host-9", may_explore=False)
    for _ in range(3):
        observed = host.observed(host.clocks or host.pipeline.original, 1.0, 1.2)
        host.group = host.group.step({host.name: observed}, beside)
    assert host.clocks == ()
    assert host.session.decision.reason is DecisionReason.WAITING
    assert "host-9 measures lower ones for this job, and needs" in host.session.decision.sentence
    until(job, lambda: bool(host.clocks))  # nobody explores


def test_straggler_on_another_host_is_followed_until_it_recovers() -> None:
    job = following()
    host, straggler = job.hosts
    assert host.session.decision.reason is DecisionReason.STRAGGLER
    sentence = host.session.decision.sentence
    assert re.match(r"Pipeline host-1 of host-1 takes 1\.[23]\d s per iteration, and", sentence)
    lost = job.lost
    job.run(10, SLOW)
    waits = [job.latest_loss for _ in range(3) if job.iterate(SLOW) is None]
    assert straggler.session.phase is not PipelinePhase.STRAGGLE
    if not straggler.session.level:
        assert max(waits) <= 0.005
    assert job.lost - lost <= 14 * 0.1
    job.iterate()
    assert host.clocks == ()
    assert host.session.decision.reason is DecisionReason.SENTINEL
    assert host.session.partner == ""


@pytest.mark.exhaustive
def test_expired_record_restores_the_original_clocks_without_an_iteration() -> None:
    job = following()
    host, _ = job.hosts
    now = host.clock.monotonic() + RECORD_LIFETIME + 1
    nothing = host.observed(host.clocks, 1.0, 1.3)._replace(now=now, units=(), instructions=())
    held = host.group.step({host.name: nothing}, host.partners)
    assert held.controls[host.name].session.phase is PipelinePhase.STRAGGLE
    restored = host.group.step({host.name: nothing}, NO_PARTNERS)
    assert restored.controls[host.name].session.decision.clocks == ()
    assert restored.controls[host.name].session.phase is PipelinePhase.HOLD


@pytest.mark.slow
def test_lost_contact_restores_the_original_clocks_after_the_lifetime() -> None:
    job = following()
    host, _ = job.hosts
    host.client.connected = False
    passed = 0.0
    while host.session.phase is PipelinePhase.STRAGGLE:
        job.iterate(SLOW)
        passed += 1.3
    assert passed <= RECORD_LIFETIME / SECOND + 4
    (trouble, expired) = host.partners.figures
    assert trouble.sentence.startswith("No endpoint answers")
    assert "is not used any more" in expired.sentence
    job.run(30, SLOW)
    assert host.session.phase is not PipelinePhase.STRAGGLE
    host.client.connected = True
    until(job, lambda: host.session.phase is PipelinePhase.STRAGGLE, SLOW)


def lying() -> tuple[RunningJob, JobHost]:
    """A job whose second host claims that it ends last in each iteration, which it does not."""
    job = planned()
    host, liar = job.hosts
    publish = liar.exchange.publish

    def lie(name: str, record: JobRecord, *, explores: bool) -> None:
        pipelines = tuple(
            msgspec.structs.replace(one, computed=one.whole, tail=0.0) for one in record.pipelines
        )
        told = msgspec.structs.replace(record, pipelines=pipelines, losses=())
        publish(name, told, explores=explores)

    liar.exchange.publish = lie  # type: ignore[method-assign, assignment]
    return job, host


@pytest.mark.exhaustive
def test_lying_host_is_refuted_by_longer_iterations() -> None:
    job, host = lying()
    until(job, lambda: host.session.phase is PipelinePhase.STRAGGLE)
    lost, usual = job.lost, job.usual
    until(job, lambda: bool(host.session.refuted))
    assert host.session.decision.clocks == ()
    assert host.session.decision.sentence.startswith(
        "The iterations became longer beside lower clocks for pipeline host-1 of host-1: the ranks"
    )
    # Beside the loss of the plan, a few iterations were longer by the exchange of gradients.
    assert job.lost - lost <= POLICY.max_slowdown * (job.usual - usual) + 10 * TAIL
    number = job.number
    until(job, lambda: host.session.refuted == 2)
    assert job.number - number >= 20
    third = job.number
    until(job, lambda: host.session.refuted == 3)
    assert job.number - third >= 40


def test_straggler_that_explores_is_not_followed() -> None:
    job = planned()
    host, _ = job.hosts
    view = host.exchange.view
    host.exchange.view = lambda name: view(name)._replace(  # type: ignore[method-assign]
        explorer="host-1", may_explore=False
    )
    job.run(40, SLOW)
    assert host.session.watch.straggler is not None
    assert host.session.phase is PipelinePhase.HOLD
    host.exchange.view = view  # type: ignore[method-assign]
    until(job, lambda: host.session.phase is PipelinePhase.STRAGGLE, SLOW)


@pytest.mark.slow
def test_lying_host_does_not_exceed_the_budget() -> None:
    job, _ = lying()
    job.run(400)
    assert job.lost <= 1.1 * POLICY.max_slowdown * job.usual


@pytest.mark.slow
def test_loss_of_another_host_counts_in_the_account() -> None:
    job = RunningJob(POLICY, BASES, STARTS, joins=(0, 10_000))
    host, _ = job.hosts
    until(job, lambda: bool(host.session.plan))
    assert host.session.elsewhere == JobLoss()
    alone = host.session.lost
    both = planned()
    first, second = both.hosts
    assert first.session.elsewhere.bound >= first.session.elsewhere.lost > 0
    assert second.session.elsewhere.lost > 0.5 * alone
    for one in both.hosts:
        account, loss = one.group.running_account
        assert loss == JobLoss(one.session.lost, one.session.lost_bound)
        assert loss.lost / 1e9 == pytest.approx(both.lost, rel=0.2)
        assert one.group.closed_account.closed_lost == pytest.approx(loss.lost)
        assert one.group.closed_account.closed_bound == pytest.approx(loss.bound)
        assert account.elapsed > 0


@pytest.mark.slow
def test_group_that_goes_on_does_not_count_other_hosts_twice() -> None:
    host = planned().hosts[0]
    before = host.group.running_account[1]
    declined = decline(host.session, DecisionReason.CHANGED, "")
    group = host.group.ended({host.name: declined})
    assert group.running_account[1].lost == pytest.approx(before.lost)
    again = PipelineGroup.begin(
        {host.name: begin_session(POLICY, group.closed_account)}, group.closed_account
    )
    assert again.running_account[1].lost == pytest.approx(before.lost)


@pytest.mark.slow
def test_host_that_is_not_tuned_tells_its_iterations() -> None:
    job = planned()
    host, other = job.hosts
    session = decline(other.session, DecisionReason.THROTTLED, "")
    group = other.group
    for _ in range(6):
        observed = other.observed(other.pipeline.original, 1.3, 1.35)
        group = group.ended({other.name: session}, {other.name: observed})
    (summary,) = group.record("s", 1).pipelines
    assert (summary.state, summary.clocks) == ("declined", ())
    assert group.controls[other.name].waiting == ()
    assert not group.explores
    assert host.exchange.view(JOB).trouble == ""
