"""The session of one running pipeline: observe its iterations, profile, hold a plan, decide.

A pure state machine. ``add_iteration`` adds one finished iteration, ``use_plan`` the result of a
search that the session asked for: that search takes up to seconds, so that the caller makes it
elsewhere. The requested clocks are those of ``PipelineState.decision``.

- *Observe*: the order of instructions is verified over 20 iterations at the original clocks.
- *Profile*: ranks have lower clocks for a few iterations. A probe with a loss waits until the
  slowdown account can pay it.
- *Hold*: runs of iterations at the plan and at the original clocks alternate. Their comparisons
  correct the plan's predicted slowdown, and the account ends a plan that would exceed the budget.
- *Straggle*: another data-parallel pipeline is slower, so that time up to its end costs nothing.

A pipeline on another host is known by its records only. Iterations that become longer beside lower
clocks for it refute them, whatever they say.
"""

from __future__ import annotations

import math
from dataclasses import replace

from wattspan.model import SECOND, DecisionReason, Move
from wattspan.tuning.decisions.blocks import LevelTime
from wattspan.tuning.decisions.sequential_test import Evidence
from wattspan.tuning.pipeline.costs import WARM_UP_ITERATIONS
from wattspan.tuning.pipeline.dag import BadPipelineError, PipelineDag
from wattspan.tuning.pipeline.iterations import (
    PARTNER_CHECKED,
    PARTNER_GROWTH,
    STRAGGLER_ITERATIONS,
    STRAGGLER_MARGIN,
    VERIFIED_ITERATIONS,
    PipelineIteration,
    StragglerWatch,
    observed,
    require_same,
)
from wattspan.tuning.pipeline.online_profile import (
    PipelineProbes,
    probe_completed,
    probe_iterations,
)
from wattspan.tuning.pipeline.plan import ClockPlan, RankClocks
from wattspan.tuning.pipeline.session_state import (
    DEVIATIONS,
    MODEL_ERROR,
    ORIGINAL_RUN,
    IterationRun,
    PipelinePhase,
    PipelineState,
    PlanComparison,
    PlanTask,
    begin_session,
    decline,
    plan_run,
    request,
    request_original,
    request_plan,
    with_measured_run,
    with_setting,
)

_EXPLORATION_PART = 0.8
"""The part of the allowance that the profile may use."""

_PROFILED_RUN = 16
"""Iterations of a run that are added to the profile; more cost time and add little."""

_BASELINE = 40
"""Iterations at the original clocks that are kept."""

_STRAGGLER_GROWTH = 1.02
"""Relative length of a straggler's iteration for which another plan is searched."""

_RETRY_AFTER = 200
"""Iterations after which a declined pipeline is observed again; they double each time."""

_MAX_DOUBLINGS = 6

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


def add_iteration(state: PipelineState, iteration: PipelineIteration) -> PipelineState:
    """Add a finished iteration, and decide. Iterations are in order, and each occurs once."""
    dag = state.dag
    if dag is None:
        return _observe(state, iteration)
    try:
        require_same(dag, iteration.spans, iteration.number, state.first)
    except BadPipelineError as error:
        return decline(state, DecisionReason.BAD_PIPELINE, str(error))
    level = state.level_of(iteration.clocks)
    state = _measure(_charge(state, iteration), dag, iteration, level)
    if state.phase is PipelinePhase.STRAGGLE:
        return _straggle(state, dag, level, iteration.number)
    if state.phase is PipelinePhase.PROFILE:
        decides = level == state.level or not state.may_explore
        return _profile(state, dag) if decides else state
    straggler = state.watch.straggler
    if straggler is not None and state.plan and state.task is None:
        partner, usual = state.watch.partner, state.watch.usual
        # The figures of a host that explores vary, and a wrong record costs time.
        if not partner or (state.may_resume and not state.explorer):
            return _follow(replace(state, partner=partner, usual=usual), dag, straggler)
    return hold(state, dag) if state.plan and level == state.level else state


def use_plan(state: PipelineState, plan: ClockPlan | None) -> PipelineState:
    """Use the result of ``state.task``."""
    task, state = state.task, replace(state, task=None)
    if task is None:  # it is not wanted any more
        return state
    if state.phase is PipelinePhase.STRAGGLE:
        level = state.level
        if plan is not None:
            state, level = with_setting(state, plan.clocks, math.log1p(task.slowdown))
        return _request_for_straggler(replace(state, straggler_plan=level), level)
    if plan is None:
        sentence = "No clocks within the slowdown budget save energy."
        return decline(state, DecisionReason.NO_SAVING, sentence)
    if state.plan and not is_better(state, task, plan):
        return state
    predicted = math.log1p(task.slowdown_of(plan.clocks) + task.error)
    state, level = with_setting(state, plan.clocks, predicted)
    state = replace(state, plan=level, predicted=predicted, comparison=PlanComparison())
    return request_original(state, DecisionReason.SENTINEL)


# --------------------------------------------------------------------------------- observation


def _observe(state: PipelineState, iteration: PipelineIteration) -> PipelineState:
    """Collect iterations at the original clocks until their order is verified."""
    account = state.account.add_time(_time(iteration, 0), 0, 0, held=False)
    if state.phase is PipelinePhase.DECLINED:
        if state.skipped < _RETRY_AFTER << min(state.retries - 1, _MAX_DOUBLINGS):
            return replace(state, skipped=state.skipped + 1, account=account)
        state = replace(begin_session(state.policy), retries=state.retries)
    state = replace(state, account=account)
    if iteration.clocks is None or set(iteration.clocks) != {state.policy.original}:
        return state
    seen = (*state.seen, iteration)
    if len(seen) < WARM_UP_ITERATIONS + VERIFIED_ITERATIONS:
        return replace(state, seen=seen)
    # Numbered from 0: the first iterations that were seen may be incomplete, whatever their number.
    spans = [
        span._replace(iteration=number) for number, one in enumerate(seen) for span in one.spans
    ]
    try:
        dag = observed(spans)
    except BadPipelineError as error:
        return decline(state, DecisionReason.BAD_PIPELINE, str(error))
    kept = seen[WARM_UP_ITERATIONS:]
    profile = state.profile
    for one in kept:
        profile = profile.add(one)
    state = replace(
        state,
        phase=PipelinePhase.PROFILE,
        seen=(),
        dag=dag,
        first=kept[0].number,
        profile=profile,
        baseline=tuple(math.log(one.seconds) for one in kept),
    )
    return _profile(state, dag)


def _time(iteration: PipelineIteration, level: int) -> LevelTime:
    return LevelTime(level, round(iteration.whole * SECOND), 1)


def _charge(state: PipelineState, iteration: PipelineIteration) -> PipelineState:
    """Charge the time to the account, and watch the waiting for other pipelines."""
    planned = state.phase is PipelinePhase.STRAGGLE
    watch = state.watch.add(iteration, planned=planned)
    # An iteration that waits is no longer than that of the other pipeline.
    charged = 0 if watch.waits else state.charged_level(iteration.clocks)
    held = charged != 0 and charged == state.plan
    account = state.account.add_time(_time(iteration, charged), charged, 0, held=held)
    return replace(state, account=account, watch=watch, charged=charged)


def _measure(
    state: PipelineState, dag: PipelineDag, iteration: PipelineIteration, level: int | None
) -> PipelineState:
    """Add the durations and energies to the profile, the baseline and the present run."""
    if level is None:
        return state
    seconds = iteration.seconds
    if level == 0 or state.run.iterations < _PROFILED_RUN:
        state = replace(state, profile=state.profile.add(iteration))
    if level == 0:
        state = replace(state, baseline=(*state.baseline[1 - _BASELINE :], math.log(seconds)))
    if level != state.level:
        return state
    return replace(state, run=state.run.add(seconds, iteration.watts(dag.rank_count)))


# ------------------------------------------------------------------------------------- profile


def _profile(state: PipelineState, dag: PipelineDag) -> PipelineState:
    """Measure the next clocks, wait for another host or the allowance, or search a plan."""
    if not state.may_explore:
        sentence = "The ranks have the original clocks until it is this host's turn to explore."
        if state.explorer:
            sentence = (
                f"The ranks have the original clocks while {state.explorer} measures lower ones for"
                " this job."
            )
        return request(state, 0, Move.DECLINE, DecisionReason.WAITING, sentence)
    if state.level:
        if not probe_completed(state.profile, dag, state.settings[state.level - 1]):
            return state
        state = with_measured_run(state)
    budget = state.policy.max_slowdown
    probes = PipelineProbes(state.profile, dag, state.policy.clocks)
    probe = probes.next(budget, TARGET_PART * budget)
    if probe is None:
        state = request_original(state, DecisionReason.BASELINE)
        return request_corrected_plan(replace(state, phase=PipelinePhase.HOLD), dag)
    lasts = probe_iterations(dag) * state.original_seconds * SECOND + state.policy.lag
    cost = probe.slowdown * lasts
    lost = state.lost + state.policy.pipelines * cost  # all pipelines may probe at the same time
    if lost > _EXPLORATION_PART * state.allowed:
        return request_original(state, DecisionReason.BASELINE)
    state, level = with_setting(state, probe.clocks, math.log1p(probe.slowdown))
    lowered = sorted({mhz for mhz in probe.clocks if mhz < state.policy.original})
    sentence = f"Ranks have {', '.join(map(str, lowered))} MHz, which measures their costs."
    return request(state, level, Move.PROBE, DecisionReason.SCREENING, sentence)


# ---------------------------------------------------------------------------------------- hold


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


def is_better(state: PipelineState, task: PlanTask, plan: ClockPlan) -> bool:
    """True if a plan saves clearly more than the present one, or if that one is too slow."""
    search = RankClocks(task.model)
    present = search.evaluated(state.settings[state.plan - 1])
    if present.clocks == plan.clocks:
        return False
    slowest = task.slowdown + _TOLERANCE * state.policy.max_slowdown
    if present.seconds > search.fastest.seconds * (1 + slowest):
        return True
    return plan.joules < present.joules * (1 - _CLEAR_SAVING)


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


# ------------------------------------------------------------------------------------- straggler


def _follow(state: PipelineState, dag: PipelineDag, straggler: float) -> PipelineState:
    """Measure lower clocks as far as the straggler's iteration permits, then plan for it."""
    state = replace(
        state,
        phase=PipelinePhase.STRAGGLE,
        straggler=straggler,
        straggler_plan=0,
        watch=StragglerWatch(),
    )
    relative = straggler / state.original_seconds
    slowdown = relative * (1 - STRAGGLER_MARGIN) - 1
    probe = PipelineProbes(state.profile, dag, state.policy.clocks).next(slowdown, slowdown)
    if probe is None or probe.slowdown > slowdown:
        return request_plan(state, dag, slowdown, relative)
    state, level = with_setting(state, probe.clocks, math.log1p(probe.slowdown))
    return _request_for_straggler(state, level)


def without_straggler(state: PipelineState) -> PipelineState:
    """Restore the original clocks because nothing shows that another pipeline is slower."""
    comparison = replace(state.comparison, before=IterationRun(), held=IterationRun())
    state = replace(
        state,
        phase=PipelinePhase.HOLD,
        straggler=0.0,
        task=None,
        comparison=comparison,
        partner="",
        watch=StragglerWatch(),
    )
    return request_original(state, DecisionReason.SENTINEL)


def _straggle(
    state: PipelineState, dag: PipelineDag, level: int | None, number: int
) -> PipelineState:
    """Restore the original clocks at once when the other pipeline is no longer slower."""
    if not state.watch.waits:
        return without_straggler(state)
    checked = state.partner and state.level and state.run.iterations == PARTNER_CHECKED
    if checked and state.watch.usual > PARTNER_GROWTH * state.usual:
        return _refute(state, number)
    if level is None or level != state.level or state.task is not None:
        return state
    probes = state.level != state.straggler_plan
    if probes and probe_completed(state.profile, dag, state.settings[state.level - 1]):
        return _follow(with_measured_run(state), dag, state.straggler)
    slowest = state.watch.straggler
    if slowest is not None and slowest > _STRAGGLER_GROWTH * state.straggler:
        # On another host, it is measured again beside the original clocks.
        return without_straggler(state) if state.partner else _follow(state, dag, slowest)
    return state


def _refute(state: PipelineState, number: int) -> PipelineState:
    """Charge the lost time, and use no pipeline of another host for a while after ``number``."""
    lost = SECOND * PARTNER_CHECKED * (state.watch.usual - state.usual)
    account = replace(
        state.account,
        closed_lost=state.account.closed_lost + lost,
        closed_bound=state.account.closed_bound + lost,
    )
    ignored = STRAGGLER_ITERATIONS << min(state.refuted, _MAX_DOUBLINGS)
    sentence = (
        f"The iterations became longer beside lower clocks for pipeline {state.partner}: the ranks"
        f" have the original clocks, and records of other hosts are not used for {ignored}"
        " iterations."
    )
    state = replace(
        without_straggler(state),
        account=account,
        refuted=state.refuted + 1,
        partners_from=number + 1 + ignored,
    )
    return request(state, 0, Move.PROBE, DecisionReason.SENTINEL, sentence)


def _request_for_straggler(state: PipelineState, level: int) -> PipelineState:
    clocks = " ".join(map(str, state.settings[level - 1] if level else state.original))
    slower = f"Pipeline {state.partner}" if state.partner else "Another pipeline"
    sentence = (
        f"{slower} takes {state.straggler:.3g} s per iteration, and this one waits for it: its"
        f" ranks have {clocks} MHz meanwhile."
    )
    return request(state, level, Move.HOLD, DecisionReason.STRAGGLER, sentence)
