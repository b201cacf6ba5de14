"""The account that data-parallel pipelines share, and their steps together."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from testbed.pipelines import WATTS, RunningPipeline, RunningReplicas, observation

from wattspan.model import SECOND, DecisionReason
from wattspan.tuning.decisions.budget import SlowdownAccount, lost_part
from wattspan.tuning.decisions.sequential_test import Evidence
from wattspan.tuning.decisions.values import WorkUnit
from wattspan.tuning.pipeline.control import (
    ENERGY_PATIENCE,
    ChargedIteration,
    PipelineControl,
    PipelineObservation,
)
from wattspan.tuning.pipeline.iterations import (
    MOST_AHEAD,
    AssembledIteration,
)
from wattspan.tuning.pipeline.replicas import PipelineGroup, ReplicaAccount
from wattspan.tuning.pipeline.session_state import (
    JobLoss,
    PipelinePhase,
    PipelinePolicy,
    PipelineState,
    begin_session,
    decline,
)

POLICY = PipelinePolicy(1600, 800, blocking_watts=WATTS, pipelines=2)
SLOWER = {1: Evidence(1, 0.1, 0.0), 2: Evidence(1, 0.2, 0.0)}


def session(**more: object) -> PipelineState:
    return replace(begin_session(POLICY), slower=SLOWER, **more)  # type: ignore[arg-type]


SESSIONS = session(), session()


def charged(number: int, level: int, lasted: float = 1.0) -> ChargedIteration:
    """The iteration of a pipeline that begins with second ``number``."""
    start, end = number * SECOND, round((number + lasted) * SECOND)
    iteration = AssembledIteration(number, (WorkUnit(start, end),), ())
    return ChargedIteration(iteration, end - start, level, SLOWER.get(level, Evidence(0, 0, 0)))


def account(*pipelines: tuple[ChargedIteration, ...]) -> ReplicaAccount:
    begun = ReplicaAccount.begin(len(pipelines), SlowdownAccount())
    return begun.add(pipelines, SESSIONS)


def test_iteration_of_the_job_is_charged_with_its_largest_loss() -> None:
    one = account((charged(0, 1), charged(1, 0)), (charged(0, 2), charged(1, 1)))
    assert one.account.elapsed == 2 * SECOND
    assert one.account.units == 2
    assert one.loss.lost == pytest.approx(SECOND * (lost_part(0.2) + lost_part(0.1)))
    assert one.combinations == ((1, 2), (0, 1))


def test_iteration_of_the_job_lasts_as_long_as_its_slowest_pipeline() -> None:
    one = account((charged(0, 0, 0.8),), (charged(0, 1, 1.2),))
    assert one.account.elapsed == round(1.2 * SECOND)
    assert one.loss.lost == pytest.approx(1.2 * SECOND * lost_part(0.1))


def test_iterations_wait_for_those_of_the_other_pipeline() -> None:
    one = account((charged(0, 1),), ())
    assert one.account.elapsed == 0
    one = one.add(((), (charged(0, 0),)), SESSIONS)
    assert one.account.elapsed == SECOND
    assert one.loss.lost == pytest.approx(SECOND * lost_part(0.1))


def test_pipeline_without_iterations_takes_no_part() -> None:
    alone = tuple(charged(number, 1) for number in range(MOST_AHEAD + 3))
    one = account(alone, ())
    assert one.account.units == 3
    assert one.combinations == ((1, 0),)


def test_iterations_at_other_times_are_two_of_the_job() -> None:
    one = account((charged(0, 1), charged(5, 1)), (charged(5, 2),))
    assert one.account.units == 2
    assert one.combinations == ((1, 0), (1, 2))


def test_loss_follows_the_estimates_of_the_sessions() -> None:
    one = account((charged(0, 1),), (charged(0, 0),))
    better = session(), session()
    better = replace(better[0], slower={**SLOWER, 1: Evidence(1, 0.05, 0.01)}), better[1]
    one = one.add(((), ()), better)
    assert one.loss.lost == pytest.approx(SECOND * lost_part(0.05))
    assert one.loss.bound == pytest.approx(SECOND * lost_part(0.07))


def test_restarted_session_closes_the_account() -> None:
    one = account((charged(0, 1), charged(1, 2)), (charged(0, 0),))
    lost = one.loss.lost
    restarted = replace(SESSIONS[0], slower={}), SESSIONS[1]
    closed = one.add(((), ()), restarted)
    # The iteration that waited for the other pipeline is charged too.
    assert closed.loss.lost == pytest.approx(lost + SECOND * lost_part(0.2))
    assert (closed.combinations, closed.waiting) == ((), ((), ()))
    assert closed.account.elapsed == one.account.elapsed


def test_many_combinations_close_the_account() -> None:
    levels = 40
    slower = {level: Evidence(1, level / 1000, 0.0) for level in range(1, levels)}
    sessions = session(), session()
    sessions = replace(sessions[0], slower=slower), replace(sessions[1], slower=slower)
    one = ReplicaAccount.begin(2, SlowdownAccount())
    for number in range(levels * levels):
        first, second = divmod(number, levels)
        both = (charged(number, first),), (charged(number, second),)
        one = one.add(both, sessions)
    assert len(one.combinations) <= 1024
    assert one.account.units == levels * levels
    expected = sum(
        lost_part(max(first, second) / 1000) for first in range(levels) for second in range(levels)
    )
    assert one.loss.lost == pytest.approx(SECOND * expected)


# ------------------------------------------------------------------------------------- the group


@cache
def trained() -> RunningReplicas:
    """Two pipelines that have plans."""
    training = RunningReplicas(POLICY, (0.1, 0.06))
    for _ in range(150):
        training.iterate((1.0, 1.0))
    return training


def test_pipelines_of_a_group_have_sessions_of_their_own() -> None:
    group = trained().group
    for control in group.controls.values():
        assert control.session.dag.rank_count == 2
        assert control.session.plan
        assert control.statistics.ranks == 2
        assert control.statistics.saved(1600)
    account, loss = group.running_account
    assert account.units >= 148
    assert all(control.session.job == loss for control in group.controls.values())
    assert group.followed == frozenset()


def test_ended_group_keeps_the_account_of_the_run() -> None:
    group = trained().group
    ended = group.ended(
        {
            name: decline(one.session, DecisionReason.SHARED, "")
            for name, one in group.controls.items()
        },
        {"0": PipelineObservation(10**6 * SECOND)},
    )
    assert {one.session.phase for one in ended.controls.values()} == {PipelinePhase.DECLINED}
    before, after = group.closed_account, ended.closed_account
    assert after.elapsed == before.elapsed
    assert after.closed_lost == pytest.approx(before.closed_lost)
    assert ended.controls["0"].statistics == group.controls["0"].statistics


def test_single_pipeline_has_the_account_of_its_session() -> None:
    state = begin_session(replace(POLICY, pipelines=1), SlowdownAccount(SECOND, 3))
    group = PipelineGroup.begin({"": state}, SlowdownAccount(SECOND, 3))
    group = group.step({"": PipelineObservation(SECOND)})
    assert group.running_account == (state.account, JobLoss(0.0, 0.0))
    assert group.closed_account.units == 3


def test_slower_pipeline_makes_the_other_wait() -> None:
    training = RunningReplicas(POLICY, (0.1, 0.06))
    for _ in range(30):
        training.iterate((1.0, 1.2))
    assert training.session(0).watch.waits
    assert not training.session(1).watch.waits


def test_straggler_is_followed_until_it_recovers() -> None:
    training = RunningReplicas(POLICY, (0.1, 0.06))
    while not training.session(0).plan:
        training.iterate((1.0, 1.0))
    while not training.session(0).straggler_plan:
        training.iterate((1.0, 1.3))
    training.iterate((1.0, 1.3))
    followed = training.session(0)
    assert followed.decision.reason is DecisionReason.STRAGGLER
    assert max(followed.decision.clocks) < 1600
    lost = training.lost
    training.iterate((1.0, 1.0))
    assert training.session(0).decision.reason is DecisionReason.SENTINEL
    assert training.session(0).decision.clocks == ()
    training.iterate((1.0, 1.0))
    assert training.lost - lost < 0.5


def test_iteration_waits_for_another_pipeline_for_a_while() -> None:
    executed = RunningPipeline((0.1, 0.06), 3).iteration()
    one = PipelineControl(begin_session(POLICY))
    one = one.receive(observation(executed, (1600, 1600)))
    waits = one.decide([()])
    assert (waits.charged, len(waits.waiting)) == ((), 1)
    assert len(one.decide([one.times()]).charged) == 1
    late = waits.receive(PipelineObservation(one.stepped + ENERGY_PATIENCE + 1))
    assert len(late.decide([()]).charged) == 1


def test_iterations_beside_a_straggler_wait_for_no_energy() -> None:
    executed = RunningPipeline((0.1, 0.06), 3).iteration()
    state = begin_session(POLICY)
    one = PipelineControl(state, energy={0: ()})
    one = one.receive(observation(executed, (1600, 1600)))
    followed = replace(one, session=replace(state, phase=PipelinePhase.STRAGGLE, straggler_plan=1))
    assert followed._ready(one.waiting[0], [], followed.session)


def test_iteration_times_are_those_without_own_losses() -> None:
    pipeline = RunningPipeline((0.1, 0.06), 3)
    state = begin_session(POLICY)
    state = replace(state, settings=((1500, 1500),), slower={1: Evidence(1, 0.1, 0.0)})
    one = PipelineControl(state)
    for _ in range(2):
        executed = pipeline.iteration((1500, 1500))
        one = one.receive(observation(executed, (1500, 1500)))
    _, second = one.times()
    lasted = one.recent[-1].computed - one.recent[-1].start
    assert one.recent[-1].computed - second.computed == pytest.approx(
        lasted * lost_part(0.1), rel=1e-6
    )
