"""Tuners of hosts on which the stages of one pipeline run."""

from __future__ import annotations

import pytest
from testbed.saved_state import saved
from testbed.tuned_pipeline import JOB, TOP
from testbed.tuned_stages import StagedHosts, StageHost, staged

from wattspan.fleet.coordination import KeyWrite
from wattspan.fleet.job_records import RECORD_LIFETIME
from wattspan.model import SECOND, DecisionReason, Move, TuningState

BUDGET = 0.05
PLANNED = DecisionReason.CERTIFYING, DecisionReason.CERTIFIED, DecisionReason.SENTINEL
SOON = RECORD_LIFETIME / SECOND + 4


def plans(hosts: StagedHosts) -> bool:
    """True if a plan with lower clocks is in force on all hosts that it lowers."""
    planner = hosts.planner
    if planner is None or planner.row.decision.reason not in PLANNED:
        return False
    (pipeline,) = planner.row.pipelines
    planned = [rank.planned for rank in pipeline.ranks]
    return None not in planned and [rank.clock for rank in pipeline.ranks] == planned


def run_until_planned(hosts: StagedHosts) -> StagedHosts:
    hosts.run(2400, until=lambda: plans(hosts))
    assert plans(hosts)
    return hosts


@saved
def planned() -> StagedHosts:
    """Two hosts of three stages, whose plan is in force."""
    return run_until_planned(StagedHosts())


def roles(hosts: StagedHosts) -> tuple[StageHost, StageHost]:
    """The host that plans for two hosts, and the other one."""
    planner = hosts.planner
    assert planner is not None
    (other,) = (one for one in hosts.members if one is not planner)
    return planner, other


def original(hosts: StagedHosts) -> bool:
    return not any(one.clocked for one in hosts.members)


@pytest.mark.exhaustive
def test_one_host_plans_the_clocks_of_all_ranks() -> None:
    holding = planned()
    planner = holding.planner
    (pipeline,) = planner.row.pipelines
    other = next(one for one in holding.members if one is not planner)
    own = [one.device for one in planner.host.gpus]
    theirs = [f"{other.name}/{one.device}" for one in other.host.gpus]
    assert [rank.device for rank in pipeline.ranks] == own + theirs
    assert other.row.pipelines == ()
    # The middle stage is the shortest, and has the lowest clock.
    clocks = {rank.device.rpartition("/")[2]: rank.clock for rank in pipeline.ranks[:2]}
    assert clocks["GPU-1"] == min(rank.clock or 0 for rank in pipeline.ranks) < TOP
    for one in holding.members:
        assert one.clocked == {
            device.removeprefix(f"{one.name}/"): mhz
            for device, mhz in ((rank.device, rank.planned) for rank in pipeline.ranks)
            if mhz is not None and mhz < TOP and ("/" in device) == (one is other)
        }


def test_other_host_shows_the_decision_of_the_planner() -> None:
    holding = planned()
    planner, other = roles(holding)
    holding.run(10)  # both records are newer than the last decision
    ours, theirs = planner.row.decision, other.row.decision
    assert theirs.sentence == f"{planner.name} plans: {ours.sentence}"
    assert (theirs.move, theirs.reason) == (ours.move, ours.reason)
    (figures,) = other.row.partners
    assert (figures.host, figures.used) == (planner.name, True)
    assert figures.sentence == "It plans the clocks of this pipeline."
    (figures,) = planner.row.partners
    assert (figures.host, figures.used) == (other.name, True)
    assert figures.sentence.endswith("of this pipeline.")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_pipeline_on_two_hosts_saves_energy_within_its_budget() -> None:
    hosts = planned()
    hosts.run(900)
    planner = hosts.planner
    row = planner.row
    assert 0 < hosts.lost <= BUDGET * hosts.usual
    assert row.slowdown <= row.slowdown_bound <= 1.02 * BUDGET
    assert hosts.lost / hosts.usual <= row.slowdown_bound
    assert row.saving > 0.05


@pytest.mark.slow
def test_lost_contact_restores_the_clocks_of_both_hosts() -> None:
    hosts = planned()
    for one in hosts.members:
        one.client.connected = False
    hosts.run(SOON)
    assert original(hosts)
    for one in hosts.members:
        decision = one.row.decision
        assert decision.reason is DecisionReason.WAITING
        assert "out of contact" in decision.sentence
    for one in hosts.members:
        one.client.connected = True
    run_until_planned(hosts)


@pytest.mark.parametrize("planner", [True, False])
@pytest.mark.slow
def test_killed_agent_restores_the_clocks_of_all_hosts(planner: bool) -> None:
    hosts = planned()
    killed = next(one for one in hosts.members if (one is hosts.planner) == planner)
    (other,) = (one for one in hosts.members if one is not killed)
    killed.kill()
    hosts.run(SOON + 10)
    assert original(hosts)
    assert other.row.decision.reason is DecisionReason.WAITING
    assert "1 are known" in other.row.decision.sentence
    used = hosts.training.used
    count = len(used)
    hosts.run(30)
    assert set(used[count:]) == {(TOP,) * 3}
    killed.start()
    if planner:
        run_until_planned(hosts)


@pytest.mark.slow
def test_account_of_the_run_continues_on_the_next_planning_host() -> None:
    hosts = planned()
    first, other = roles(hosts)
    lost = first.row.lost
    assert lost
    hosts.run(10)
    first.kill()
    hosts.run(40)
    first.start()
    hosts.run(60, until=lambda: hosts.planner is not None)
    assert hosts.planner is other
    hosts.run(30)
    assert other.row.lost >= 0.9 * lost


@pytest.mark.slow
def test_throttled_host_restores_the_clocks_of_all() -> None:
    hosts = planned()
    planner, other = roles(hosts)
    other.host.gpus[0].throttling = ("hw_slowdown",)
    hosts.run(SOON)
    assert original(hosts)
    decision = planner.row.decision
    assert decision.reason is DecisionReason.THROTTLED
    assert decision.sentence == (
        f"The ranks have the original clocks: on {other.name}, the device throttles itself."
    )
    assert other.row.decision.reason is DecisionReason.THROTTLED
    assert other.row.decision.move in (Move.RELEASE, Move.DECLINE)
    (figures,) = planner.row.partners
    assert figures.sentence.endswith("of this pipeline, and the device throttles itself.")


@pytest.mark.slow
def test_throttled_planner_restores_the_clocks_of_all() -> None:
    hosts = planned()
    planner = hosts.planner
    planner.host.gpus[0].throttling = ("hw_slowdown",)
    hosts.run(SOON)
    assert original(hosts)
    for one in hosts.members:
        assert one.row.decision.reason is DecisionReason.THROTTLED


def test_wall_clocks_that_differ_decline_the_pipeline() -> None:
    hosts = StagedHosts()
    hosts.members[1].host.clock.step_wall(0.02)
    hosts.run(120)
    planner = hosts.planner
    decision = planner.row.decision
    assert decision.reason is DecisionReason.BAD_PIPELINE
    assert "differ by" in decision.sentence
    assert original(hosts)


@pytest.mark.exhaustive
def test_step_of_a_wall_clock_restores_the_clocks() -> None:
    hosts = planned()
    planner, other = roles(hosts)
    before = len(planner.host.book.decided)
    other.host.clock.step_wall(-0.5)
    hosts.run(SOON)
    assert original(hosts)
    sentences = [one.decision.sentence for one in planner.host.book.decided[before:]]
    assert any(f"The wall clock of {other.name} has changed by -0.5" in one for one in sentences)
    other.host.clock.step_wall(-3600)
    hosts.run(10)
    assert "Synchronise them." in planner.row.decision.sentence
    other.host.clock.step_wall(3600.5)
    run_until_planned(hosts)


def test_host_waits_for_the_other_hosts() -> None:
    hosts = StagedHosts()
    hosts.members[1].runs = False
    hosts.run(60)
    decision = hosts.members[0].row.decision
    assert (decision.move, decision.reason) == (Move.DECLINE, DecisionReason.WAITING)
    assert decision.sentence == (
        "Keep the original clocks. The ranks of this pipeline run on 2 hosts (`hosts`), and 1 are"
        " known."
    )
    assert hosts.members[0].row.state is TuningState.WAITING
    assert hosts.members[0].row.pipelines == ()


@pytest.mark.slow
def test_unreadable_record_of_the_planner_restores_the_clocks() -> None:
    hosts = planned()
    planner, other = roles(hosts)
    key = f"/fleet-jobs/gpt%2Fiteration/hosts/{planner.name}"
    assert hosts.cluster.read(key).entries
    hosts.cluster.client().commit((KeyWrite(key, b"{}"),))
    other.exchange.round()
    other.host.clock.advance(2)
    other.exchange.round()
    other.host.tuner.step()
    assert other.clocked == {}
    assert "which plans this pipeline, is not known yet" in other.row.decision.sentence


def test_more_hosts_than_configured_are_not_planned() -> None:
    hosts = StagedHosts(((0.05,), (0.03,), (0.05,)), settings=staged(2))
    hosts.run(120)
    assert original(hosts)
    assert any("and 3 are known" in one.row.decision.sentence for one in hosts.members)


@pytest.mark.exhaustive
def test_three_hosts_with_one_stage_each_are_planned() -> None:
    hosts = run_until_planned(StagedHosts(((0.05,), (0.03,), (0.05,))))
    hosts.run(300)
    assert 0 < hosts.lost <= BUDGET * hosts.usual


def test_gpus_with_other_clocks_on_another_host_decline_the_pipeline() -> None:
    hosts = StagedHosts()
    capper = hosts.members[1].host.capper
    capper.highest_clock = TOP - 150
    hosts.run(60)
    planner = hosts.members[0].row.decision
    assert planner.reason is DecisionReason.NO_DEVICE
    assert "GPUs with different clocks" in planner.sentence


@pytest.mark.slow
def test_changed_ranks_of_another_host_begin_anew() -> None:
    hosts = planned()
    planner, other = roles(hosts)
    before = len(planner.host.book.decided)
    other.start()  # its next session has the same ranks
    hosts.run(20)
    assert original(hosts)
    sentences = [one.decision.sentence for one in planner.host.book.decided[before:]]
    assert any("have changed" in one or "is unknown" in one for one in sentences)
    run_until_planned(hosts)


@pytest.mark.slow
def test_host_without_a_capper_restores_the_clocks_of_all() -> None:
    hosts = planned()
    planner, other = roles(hosts)
    other.host.capper.refusal = ("no_permission", "The capper refuses.")
    hosts.run(SOON)
    assert not planner.clocked
    assert planner.row.decision.reason is DecisionReason.WAITING


@pytest.mark.slow
def test_unwritable_clock_is_reported_to_the_planner() -> None:
    hosts = planned()
    planner, other = roles(hosts)
    other.host.capper.unusable = True
    hosts.run(SOON)
    assert original(hosts)
    decision = planner.row.decision
    assert decision.reason is DecisionReason.NO_PERMISSION
    assert f"on {other.name}, the capper has no permission" in decision.sentence
    assert other.row.decision.reason is DecisionReason.NO_PERMISSION
    assert not other.row.applied


def test_ended_pipeline_is_withdrawn() -> None:
    hosts = StagedHosts()
    hosts.run(40)
    assert hosts.cluster.read("/fleet-jobs/").entries
    for one in hosts.members:
        for job in one.host.jobs:
            job.alive = False
    hosts.run(20)
    assert hosts.cluster.read("/fleet-jobs/").entries == ()
    for one in hosts.members:
        assert one.row.decision.reason is DecisionReason.ENDED
        assert one.row.partners == ()
        assert one.row.state is TuningState.ENDED
    assert original(hosts)


def test_pipeline_without_a_fleet_is_not_tuned() -> None:
    hosts = StagedHosts()
    first = hosts.members[0]
    first.host._job_records = None
    first.host.restart()
    hosts.run(20)
    decision = first.row.decision
    assert decision.reason is DecisionReason.WAITING
    assert "[fleet] names no service" in decision.sentence


def test_pipeline_on_several_hosts_is_not_planned_as_advice() -> None:
    hosts = StagedHosts(settings=staged(2, mode="advise"))
    hosts.run(40)
    for one in hosts.members:
        assert one.row.decision.reason is DecisionReason.ADVICE
        assert 'mode = "apply" only' in one.row.decision.sentence
        assert one.exchange.view(JOB).records == ()
