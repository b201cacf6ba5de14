"""The plan of a pipeline's session: measured against the original clocks, corrected, or ended."""

from __future__ import annotations

import math
from dataclasses import replace

from wattspan.model import DecisionReason, Move
from wattspan.tuning.decisions.sequential_test import Evidence
from wattspan.tuning.pipeline.comparison import ORIGINAL_RUN, plan_run
from wattspan.tuning.pipeline.dag import PipelineDag
from wattspan.tuning.pipeline.plan import RankClockPlan, RankClocks
from wattspan.tuning.pipeline.session_state import (
    DEVIATIONS,
    MODEL_ERROR,
    PipelinePhase,
    PipelineState,
    PlanTask,
    decline,
    request,
    request_original,
    request_plan,
)

TARGET_PART = 0.97
"""The part of the budget that a plan may use: the rest pays the profile and errors."""

_LEAST_PAIRS = 3
"""Comparisons after which a plan is judged."""

_CORRECTED_AFTER = frozenset({3, 8, 20, 50, 120})
"""Comparisons after which the plan is searched again."""

_TOLERANCE = 0.05
"""The part of the budget by which a plan may be slower than a search for it permits."""

_CLEAR_SAVING = 0.001
"""The part of the energy that another plan must save to replace the present one."""

_DRIFT = 0.05
"""Difference of the iteration times at the original clocks after which the job has changed."""

_DRIFT_DEVIATIONS = 6.0
_MOST_NOISE = 0.02  # a change of the job raises the noise too


def hold(state: PipelineState, dag: PipelineDag) -> PipelineState:
    """Alternate runs at the plan and at the original clocks, within the allowance.

    The present level is in force.
    """
    if state.level:
        run = state.comparison.hold(state.run)
        if state.lost_bound > state.usable:
            return _release(replace(state, comparison=run))
        if state.run.iterations >= plan_run(state.compared):
            return request_original(replace(state, comparison=run), DecisionReason.SENTINEL)
        return state
    if state.run.iterations < ORIGINAL_RUN or not state.may_resume:
        return state
    noise = min(state.noise, _MOST_NOISE)
    if abs(state.comparison.drifted(state.run)) > max(_DRIFT, _DRIFT_DEVIATIONS * noise):
        sentence = "The iteration time at the original clocks has changed: it is measured again."
        state = decline(state, DecisionReason.CHANGED, sentence)
        return replace(state, phase=PipelinePhase.OBSERVE, retries=state.retries - 1)
    compared = state.compared
    state = _compare(state)
    energy = state.comparison.energy(state.noise)
    if energy.n >= _LEAST_PAIRS and energy.likely(-DEVIATIONS) > 0:
        sentence = "By measurement, the plan saves no energy."
        return decline(state, DecisionReason.NO_SAVING, sentence)
    if compared < state.compared and state.compared in _CORRECTED_AFTER:
        state = request_corrected_plan(state, dag)
    return request(state, state.plan, *_plan_decision(state))


def _release(state: PipelineState) -> PipelineState:
    """Restore the original clocks until the account permits the plan again."""
    if not state.explorer:
        return request_original(state, DecisionReason.OVER_BUDGET)
    sentence = (
        f"The ranks have the original clocks: {state.explorer} measures lower ones for this job,"
        " and needs the rest of its slowdown budget."
    )
    return request(state, 0, Move.DECLINE, DecisionReason.WAITING, sentence)


def request_corrected_plan(state: PipelineState, dag: PipelineDag) -> PipelineState:
    """Ask for the plan of the budget, corrected by the measured slowdown of the present one."""
    target = TARGET_PART * state.policy.max_slowdown
    state = request_plan(state, dag, target)
    task = state.task
    if task is None or not state.plan:
        return state
    predicted = task.slowdown_of(state.settings[state.plan - 1])
    compared = _combined(math.log1p(predicted), state.comparison.slower(state.noise))
    error = math.expm1(compared.mean) - predicted
    return replace(state, task=task._replace(slowdown=max(target - error, 0.0), error=error))


def is_better(state: PipelineState, task: PlanTask, plan: RankClockPlan) -> bool:
    """True if a plan saves clearly more than the present one, or if that one is too slow."""
    search = RankClocks(task.model)
    present = search.evaluated(state.settings[state.plan - 1])
    if present.clocks == plan.clocks:
        return False
    slowest = task.slowdown + _TOLERANCE * state.policy.max_slowdown
    if present.seconds > search.fastest.seconds * (1 + slowest):
        return True
    return plan.joules < present.joules * (1 - _CLEAR_SAVING)


# ------------------------------------------------------------------------------------ comparison


def _compare(state: PipelineState) -> PipelineState:
    comparison = state.comparison.compare(state.run)
    if comparison.times == state.comparison.times:
        return replace(state, comparison=comparison)
    slower = _combined(state.predicted, comparison.slower(state.noise))
    known = {**state.slower, state.plan: slower}
    return replace(state, comparison=comparison, slower=known, compared=state.compared + 1)


def _combined(predicted: float, slower: Evidence) -> Evidence:
    """The slowdown from its prediction and the comparisons, each weighted by its accuracy."""
    model, compared = 1 / MODEL_ERROR**2, slower.n / slower.deviation**2
    mean = (model * predicted + compared * slower.mean) / (model + compared)
    return Evidence(1, mean, 1 / math.sqrt(model + compared))


def _plan_decision(state: PipelineState) -> tuple[Move, DecisionReason, str]:
    clocks = " ".join(map(str, state.settings[state.plan - 1]))
    slower = state.comparison.slower(state.noise)
    held = f"The ranks have {clocks} MHz"
    if slower.n < _LEAST_PAIRS:
        return Move.PROBE, DecisionReason.CERTIFYING, f"{held}, which is compared."
    bound = math.expm1(slower.upper(1 - state.policy.confidence))
    if bound > state.policy.max_slowdown:
        known = f"{held}: {math.expm1(slower.mean):+.2%} time per iteration, not proven yet."
        return Move.PROBE, DecisionReason.CERTIFYING, known
    known = f"{held}: {math.expm1(slower.mean):+.2%} time per iteration, at most {bound:+.2%}."
    return Move.HOLD, DecisionReason.CERTIFIED, known
