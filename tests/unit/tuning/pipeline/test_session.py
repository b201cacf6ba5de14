"""Sessions of running pipelines: observation, profile, plans within the budget, stragglers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from testbed.pipelines import RunningPipeline

from wattspan.model import DecisionReason, Move
from wattspan.tuning.decisions.sequential_test import Evidence
from wattspan.tuning.pipeline.plan import ClockPlan
from wattspan.tuning.pipeline.session import add_iteration, is_better, use_plan
from wattspan.tuning.pipeline.session_state import (
    PipelinePhase,
    PipelinePolicy,
    PipelineState,
    PlanComparison,
    PlanTask,
    begin_session,
    request,
    with_setting,
)

POLICY = PipelinePolicy(1600, 800, max_slowdown=0.05, blocking_watts=70.0)
UNEQUAL = (0.1, 0.06, 0.1)


def begun(policy: PipelinePolicy = POLICY) -> PipelineState:
    return begin_session(policy)


def after(
    pipeline: RunningPipeline, iterations: int, state: PipelineState | None = None
) -> PipelineState:
    *_, last = pipeline.drive(state or begun(), iterations)
    return last


@cache
def held(bases: tuple[float, ...] = UNEQUAL, policy: PipelinePolicy = POLICY) -> PipelineState:
    """The state when the plan was requested."""
    for state in RunningPipeline(bases).drive(begun(policy), 1000):
        if state.plan and state.level == state.plan:
            return state
    raise AssertionError("no plan was held")


def with_plan(state: PipelineState, clocks: tuple[int, ...]) -> PipelineState:
    state, level = with_setting(state, clocks, 0.01)
    state = request(state, level, Move.PROBE, DecisionReason.CERTIFYING, "")
    return replace(state, plan=level, predicted=0.01, comparison=PlanComparison())


# ---------------------------------------------------------------------------------- observation


def test_session_waits_for_22_iterations() -> None:
    states = list(RunningPipeline().drive(begun(), 22))
    assert {state.phase for state in states[:21]} == {PipelinePhase.OBSERVE}
    assert states[20].decision.reason is DecisionReason.NO_SIGNAL
    assert states[21].phase is PipelinePhase.PROFILE
    assert states[21].dag is not None
    assert len(states[21].baseline) == 20


@pytest.mark.parametrize("clocks", [(1600, 1600, 1500), None])
def test_observation_ignores_iterations_at_other_clocks(clocks: tuple[int, ...] | None) -> None:
    pipeline = RunningPipeline()
    state = after(pipeline, 20)
    other = pipeline.iteration(clocks, reported=clocks is not None)
    assert add_iteration(state, other).seen == state.seen


def test_changed_order_during_observation_is_declined() -> None:
    pipeline = RunningPipeline()
    state = after(pipeline, 21)
    one = pipeline.iteration()
    spans = tuple(span for span in one.spans if span.rank != 1)
    state = add_iteration(state, one._replace(spans=spans))
    assert state.phase is PipelinePhase.DECLINED
    assert (state.decision.move, state.decision.reason) == (
        Move.DECLINE,
        DecisionReason.BAD_PIPELINE,
    )
    assert "The ranks changed" in state.decision.sentence


def test_changed_ranks_release_a_plan() -> None:
    pipeline = RunningPipeline(UNEQUAL)
    state = held()
    one = pipeline.iteration(state.decision.clocks)
    state = add_iteration(state, one._replace(spans=one.spans[:-1]))
    assert state.decision[:2] == (Move.RELEASE, DecisionReason.BAD_PIPELINE)
    assert state.decision.clocks == ()


def test_skewed_clocks_of_ranks_are_declined() -> None:
    pipeline = RunningPipeline()
    state = after(pipeline, 22)
    one = pipeline.iteration()
    spans = [
        span._replace(start=span.start - 0.02, end=span.end - 0.02) if span.rank == 2 else span
        for span in one.spans
    ]
    state = add_iteration(state, one._replace(spans=tuple(spans)))
    assert state.decision.reason is DecisionReason.BAD_PIPELINE
    assert "differ by 20 ms" in state.decision.sentence


def test_declined_pipeline_is_observed_again_later_each_time() -> None:
    pipeline = RunningPipeline()
    state = after(pipeline, 22)
    for wait in (200, 400):
        one = pipeline.iteration()
        state = add_iteration(state, one._replace(spans=one.spans[:-1]))
        assert state.phase is PipelinePhase.DECLINED
        state = after(pipeline, wait, state)
        assert state.phase is PipelinePhase.DECLINED
        state = after(pipeline, 22, state)
        assert state.phase is PipelinePhase.PROFILE


def test_declined_pipeline_keeps_its_account() -> None:
    pipeline = RunningPipeline(UNEQUAL)
    state = held()
    state = after(pipeline, 30, state)
    assert state.lost > 0
    one = pipeline.iteration(state.decision.clocks)
    declined = add_iteration(state, one._replace(spans=one.spans[:-1]))
    assert declined.account.elapsed == state.account.elapsed
    assert declined.lost == pytest.approx(state.lost)
    assert declined.lost_bound == pytest.approx(state.lost_bound)


# -------------------------------------------------------------------------------------- profile


def test_profile_lowers_ranks_with_slack_first() -> None:
    policy = replace(POLICY, max_slowdown=0.01)
    states = RunningPipeline(UNEQUAL).drive(begun(policy), 100)
    first = next(state for state in states if state.level)
    assert first.decision[:2] == (Move.PROBE, DecisionReason.SCREENING)
    clocks = first.decision.clocks
    assert clocks[1] < 1600
    assert clocks[0] == clocks[2] == 1600


def test_profile_waits_for_the_allowance() -> None:
    states = list(RunningPipeline((0.1, 0.1)).drive(begun(replace(POLICY, max_slowdown=0.01)), 120))
    probes = [number for number, state in enumerate(states) if state.level]
    assert probes[0] > 22
    assert states[21].decision.reason is DecisionReason.BASELINE
    for state in states:
        assert state.lost <= state.allowed


def test_iterations_at_former_clocks_complete_no_probe() -> None:
    pipeline = RunningPipeline(UNEQUAL)
    state = next(state for state in pipeline.drive(begun(), 100) if state.level)
    for _ in range(20):
        state = add_iteration(state, pipeline.iteration())
    assert state.run.iterations == 0
    assert state.level


def test_floor_ends_the_profile() -> None:
    policy = replace(POLICY, floor=1500)
    states = list(RunningPipeline(UNEQUAL).drive(begun(policy), 120))
    requested = {mhz for state in states for mhz in state.decision.clocks}
    assert min(requested) >= 1500
    assert states[-1].phase is PipelinePhase.HOLD


def test_profile_without_energies_is_declined() -> None:
    pipeline = RunningPipeline(UNEQUAL)
    state = begun(replace(POLICY, floor=1600))
    for _ in range(22):
        state = add_iteration(state, pipeline.iteration(metered=False))
    assert state.decision.reason is DecisionReason.NO_DEVICE


def test_pipeline_without_lower_clocks_is_declined() -> None:
    state = after(RunningPipeline(UNEQUAL), 22, begun(replace(POLICY, floor=1600)))
    assert state.decision.reason is DecisionReason.NO_SAVING
    assert state.phase is PipelinePhase.DECLINED


# ----------------------------------------------------------------------------------------- plans


def test_plan_lowers_the_ranks_with_slack_and_keeps_the_budget() -> None:
    pipeline = RunningPipeline(UNEQUAL)
    states = list(pipeline.drive(begun(), 600))
    last = states[-1]
    assert last.phase is PipelinePhase.HOLD
    plan = last.settings[last.plan - 1]
    assert plan[1] < min(plan[0], plan[2])
    usual = pipeline.iteration()
    at_plan = pipeline.iteration(plan)
    assert at_plan.seconds <= 1.05 * usual.seconds
    for state in states:
        assert state.lost_bound <= 1.02 * state.allowed
    assert last.account.slowdown(last.lost) <= 0.05
    watts = at_plan.watts(3), usual.watts(3)
    assert watts[0] is not None
    assert watts[1] is not None
    truth = 1 - watts[0] * at_plan.seconds / (watts[1] * usual.seconds)
    assert last.saving == pytest.approx(truth, abs=0.01)
    assert last.saving > 0.08


def test_plan_is_certified_by_comparisons() -> None:
    pipeline = RunningPipeline(UNEQUAL)
    reasons = [state.decision.reason for state in pipeline.drive(begun(), 1000)]
    assert reasons[-1] in (DecisionReason.CERTIFIED, DecisionReason.SENTINEL)
    certified = reasons.index(DecisionReason.CERTIFIED)
    assert reasons.index(DecisionReason.CERTIFYING) < certified


def test_plan_is_compared_with_the_original_clocks_again_and_again() -> None:
    pipeline = RunningPipeline(UNEQUAL)
    state = held()
    original = [not one.decision.clocks for one in pipeline.drive(state, 400)]
    assert 0.02 < sum(original) / len(original) < 0.25


def test_unwanted_plan_is_ignored() -> None:
    state = begun()
    assert use_plan(state, ClockPlan((1500,), 1.0, 1.0)) == state


def test_slow_plan_is_ended_when_the_allowance_is_used_up() -> None:
    pipeline = RunningPipeline(UNEQUAL)
    state = held()
    state = after(pipeline, 6, state)
    slower = {**state.slower, state.level: Evidence(1, 1.0, 0.0)}
    state = replace(state, slower=slower)
    state = after(pipeline, 1, state)
    assert state.decision[:2] == (Move.RELEASE, DecisionReason.OVER_BUDGET)
    assert after(pipeline, 3, state).level == 0


def test_wrong_prediction_is_corrected() -> None:
    pipeline = RunningPipeline(UNEQUAL)
    state = held()
    slow = with_plan(state, (1300, 1300, 1300))
    for state in pipeline.drive(slow, 3000):
        if state.plan != slow.plan:
            break
    else:
        raise AssertionError("the plan was not replaced")
    assert min(state.settings[state.plan - 1]) < 1600
    assert pipeline.iteration(state.settings[state.plan - 1]).seconds <= (
        1.05 * pipeline.iteration().seconds
    )


def test_plan_that_is_too_slow_is_replaced_by_any_within_the_budget() -> None:
    state = held()
    assert state.dag is not None
    model = state.profile.model(state.dag, 15, 70.0)
    assert model is not None
    task = PlanTask(model, 0.02)
    slow = state.settings[0]
    assert task.slowdown_of(slow) > 0.03
    costly = ClockPlan(state.original, 1.0, 1e9)
    assert is_better(with_plan(state, slow), task, costly)


def test_plan_with_higher_energy_is_declined() -> None:
    pipeline = RunningPipeline(UNEQUAL)
    for state in pipeline.drive(held(), 400, watts=200.0):
        if state.phase is PipelinePhase.DECLINED:
            break
    assert state.decision.reason is DecisionReason.NO_SAVING
    assert "By measurement" in state.decision.sentence


def test_changed_iteration_time_is_observed_anew() -> None:
    pipeline = RunningPipeline(UNEQUAL)
    state = after(pipeline, 30, held())
    states = list(pipeline.drive(state, 200, longer=1.5))
    changed = next(one for one in states if one.decision.reason is DecisionReason.CHANGED)
    assert changed.phase is PipelinePhase.OBSERVE
    assert changed.decision.clocks == ()
    assert states[-1].phase in (PipelinePhase.PROFILE, PipelinePhase.HOLD)


def test_same_plan_is_kept() -> None:
    state = held()
    assert state.dag is not None
    model = state.profile.model(state.dag, 15, 70.0, state.settings[state.plan - 1])
    assert model is not None
    task = PlanTask(model, 0.05)
    present = ClockPlan(state.settings[state.plan - 1], 1.0, 1.0)
    assert use_plan(replace(state, task=task), present) == state


def test_missing_plan_ends_the_session() -> None:
    state = held()
    assert state.dag is not None
    model = state.profile.model(state.dag, 15, 70.0)
    assert model is not None
    state = use_plan(replace(state, task=PlanTask(model, 0.0)), None)
    assert state.decision[:2] == (Move.RELEASE, DecisionReason.NO_SAVING)


def test_search_without_a_feasible_clock_finds_no_plan() -> None:
    state = held()
    assert state.dag is not None
    model = state.profile.model(state.dag, 15, 70.0)
    assert model is not None
    assert PlanTask(model, -0.5).solved() is None


# ------------------------------------------------------------------------------------ stragglers


def test_straggler_permits_lower_clocks_until_it_recovers() -> None:
    pipeline = RunningPipeline(UNEQUAL)
    state = after(pipeline, 100, held())
    usual = pipeline.iteration().seconds
    states = list(pipeline.drive(state, 120, until=1.3 * usual))
    followed = [one for one in states if one.phase is PipelinePhase.STRAGGLE]
    assert states.index(followed[0]) >= 19
    last = states[-1]
    assert last.decision.reason is DecisionReason.STRAGGLER
    assert last.level == last.straggler_plan
    slow = pipeline.iteration(last.decision.clocks)
    assert 1.1 * usual < slow.seconds < 1.3 * usual
    assert last.lost <= state.lost * 1.01 + 1e8
    restored = after(pipeline, 1, last)
    assert restored.phase is PipelinePhase.HOLD
    assert restored.decision.clocks == ()
    assert after(pipeline, 3, restored).level == restored.plan


def test_slower_straggler_gets_another_plan() -> None:
    pipeline = RunningPipeline(UNEQUAL)
    state = after(pipeline, 100, held())
    usual = pipeline.iteration().seconds
    state = list(pipeline.drive(state, 100, until=1.15 * usual))[-1]
    assert state.level == state.straggler_plan
    first = pipeline.iteration(state.decision.clocks).seconds
    state = list(pipeline.drive(state, 100, until=1.4 * usual))[-1]
    assert state.phase is PipelinePhase.STRAGGLE
    assert pipeline.iteration(state.decision.clocks).seconds > 1.05 * first


def test_straggler_of_a_slightly_longer_iteration_is_ignored() -> None:
    pipeline = RunningPipeline(UNEQUAL)
    state = after(pipeline, 100, held())
    slowest = max(
        pipeline.iteration(clocks).seconds
        for clocks in (pipeline.original, state.settings[state.plan - 1])
    )
    states = pipeline.drive(state, 60, until=1.01 * slowest)
    assert {one.phase for one in states} == {PipelinePhase.HOLD}


def test_straggler_without_a_plan_keeps_the_present_clocks() -> None:
    pipeline = RunningPipeline(UNEQUAL)
    state = replace(held(), phase=PipelinePhase.STRAGGLE)
    assert state.dag is not None
    model = state.profile.model(state.dag, 15, 70.0)
    assert model is not None
    waiting = use_plan(replace(state, task=PlanTask(model, 0.2, 1.2)), None)
    assert waiting.decision.clocks == state.decision.clocks
    assert waiting.phase is PipelinePhase.STRAGGLE
    usual = pipeline.iteration().seconds
    again = add_iteration(waiting, pipeline.iteration(waiting.decision.clocks, until=2 * usual))
    assert again.task is None


def test_unfinished_search_for_a_straggler_is_not_repeated() -> None:
    pipeline = RunningPipeline(UNEQUAL)
    state = replace(held(), phase=PipelinePhase.STRAGGLE, straggler=2.0)
    assert state.dag is not None
    model = state.profile.model(state.dag, 15, 70.0)
    assert model is not None
    state = replace(state, task=PlanTask(model, 0.2, 1.2))
    usual = pipeline.iteration().seconds
    for _ in range(25):
        state = add_iteration(state, pipeline.iteration(state.decision.clocks, until=1.5 * usual))
    assert state.straggler == 2.0
    assert state.task is not None


def test_straggler_before_the_first_plan_changes_nothing() -> None:
    pipeline = RunningPipeline(UNEQUAL)
    usual = pipeline.iteration().seconds
    states = list(pipeline.drive(begun(), 60, until=1.3 * usual))
    assert PipelinePhase.STRAGGLE not in {state.phase for state in states}
    assert states[-1].lost == 0


def test_iteration_at_changing_clocks_is_charged_to_the_requested_ones() -> None:
    pipeline = RunningPipeline(UNEQUAL)
    state = held()
    lost = state.lost
    state = add_iteration(state, pipeline.iteration(state.decision.clocks, reported=False))
    assert state.run.iterations == 0
    assert state.lost > lost


def test_iterations_at_the_original_clocks_lose_nothing() -> None:
    pipeline = RunningPipeline(UNEQUAL)
    state = held()
    lost = state.lost
    state = add_iteration(state, pipeline.iteration())
    assert state.lost == pytest.approx(lost)
