"""The phases of a search (learn, screen, certify, hold, rest) and the transitions between them."""

from __future__ import annotations

import math

from wattspan.model import DecisionReason, Move, Nanoseconds
from wattspan.tuning.decisions import report, safety, search, tenants
from wattspan.tuning.decisions.blocks import ENERGY_TIMEOUT
from wattspan.tuning.decisions.estimates import Estimates
from wattspan.tuning.decisions.report import decline_decision, probe_decision, release_decision
from wattspan.tuning.decisions.safety import SIGNAL_TIMEOUT, decline_and_pause, release_and_pause
from wattspan.tuning.decisions.search import ProbePlan, TunerPhase, TunerState
from wattspan.tuning.decisions.sequential_test import pairs_needed
from wattspan.tuning.decisions.values import Observation, WorkloadKind

_MAX_NEEDED_PAIRS = 500.0
_SCREENING_SHARE = 0.5
"""The share of the allowance that screening may use."""

_CERTIFYING_SHARE = 0.85

_MAX_REFINEMENTS = 3

_BLOCKS_BEFORE_REFINEMENT = 20
"""Blocks for which a certified level is held before a lower one is tried."""

_LEAST_GAIN = 0.06
"""Share of the budget by which a lower level must be slower to be worth its certification."""

_STEADY_COMPARISONS = 4
"""Comparisons of a held level after which they become half as frequent."""

_EVIDENCE = (
    *("pairing", "cusum", "level_shift", "serving", "slack", "miss_alarm", "unmatched"),
    *("candidate", "certified", "recertifying", "failed_candidates", "refinements"),
    *("judged_pairs", "refined_pairs"),
)
"""Fields of the state that are invalid after the job has changed."""

_LOST_BLOCKS = 4
"""Blocks at the original setting without a comparison after which the probe is repeated."""


def decide(state: TunerState, observation: Observation) -> TunerState:
    """The state after the decision of its phase."""
    if state.phase is TunerPhase.REST:
        rested = observation.now >= state.rest_until
        return relearn(state) if rested and state.last_unit_end > state.requested_at else state
    if state.phase is TunerPhase.LEARN:
        return _learn(state, observation)
    if state.phase is not TunerPhase.HOLD:
        if not observation.may_explore:
            return _return_to_original(state, observation)
        cause = _comparison_impossible(state, observation.now)
        if cause is not None:
            return decline_and_pause(state, observation.now, *cause)
    if state.phase is TunerPhase.SCREEN:
        return _screen(state, observation)
    if state.phase is TunerPhase.PROVE:
        return _certify(state, observation)
    return _hold(state, observation)


def _request_level(state: TunerState, now: int, level: int, blocks: int) -> TunerState:
    if level == state.plan.level:
        return state._replace(plan=ProbePlan(level, blocks))
    return state._replace(
        plan=ProbePlan(level, blocks),
        previous_level=state.plan.level,
        requested_at=now,
        latency=state.latency.change(now),
    )


def plan_ends(state: TunerState) -> int | None:
    """The time at which the plan's blocks are complete by the clock; None where units decide.

    Units are known seconds after their end, because exporters send batches. Waiting for them
    would lengthen every block. Blocks of requests are periods of time anyway.
    """
    if state.policy.kind is not WorkloadKind.STEPS or state.samples.level != state.plan.level:
        return None
    if not state.account.units:
        return None
    lasts = search.block_time(state) * state.plan.blocks + search.unit_time(state)
    return state.samples.periods[-1].since + state.policy.settle_time + round(lasts)


def measures_latency(state: TunerState) -> bool:
    """True if energy readings after each change are of use."""
    return state.phase is not TunerPhase.REST and not state.latency.measured


def _plan_complete(state: TunerState, now: int) -> bool:
    return all(_blocks_complete(one, now) for one in tenants.everyone(state))


def _blocks_complete(state: TunerState, now: int) -> bool:
    if state.samples.level != state.plan.level:
        return False
    ends = plan_ends(state)
    return state.samples.full_blocks >= state.plan.blocks or (ends is not None and now >= ends)


def _probe(state: TunerState, reason: DecisionReason, level: int) -> TunerState:
    return state._replace(decision=probe_decision(state, reason, level))


def _return_to_original(state: TunerState, observation: Observation) -> TunerState:
    state = _request_level(state, observation.now, state.top, 1)
    if state.decision.reason is DecisionReason.WAITING:
        return state
    return state._replace(decision=decline_decision(DecisionReason.WAITING))


# -------------------------------------------------------------------------------------- learn


def relearn(state: TunerState) -> TunerState:
    """Restart, because the job may have changed; only noise and power are kept."""
    estimates = Estimates(
        variance=state.estimates.variance,
        blocks=search.MIN_BASELINE_BLOCKS - 2,
        power=state.estimates.power,
    )
    defaults = TunerState._field_defaults
    return tenants.each(state, relearn)._replace(
        account=search.closed_account(state),
        phase=TunerPhase.LEARN,
        plan=ProbePlan(state.top, 1),
        estimates=estimates,
        ladder=state.ladder.plain(),
        resume_level=None if state.resume_level is None else state.ladder.base(state.resume_level),
        **{name: defaults[name] for name in _EVIDENCE},
    )


def _learn(state: TunerState, observation: Observation) -> TunerState:
    estimates, policy, now = state.estimates, state.policy, observation.now
    everyone = tenants.everyone(state)
    if not all(map(_has_units, everyone)):
        return state
    if state.ladder.rungs < 1 or min(one.policy.max_slowdown for one in everyone) <= 0:
        return decline_and_pause(state, now, DecisionReason.NO_ROOM)
    cause = _comparison_impossible(state, now)
    if cause is not None:
        decision = decline_decision(*cause)
        unchanged = state.decision.sentence == decision.sentence
        return state if unchanged else state._replace(decision=decision)
    if min(one.estimates.blocks for one in everyone) < search.MIN_BASELINE_BLOCKS:
        if state.decision.reason is DecisionReason.BASELINE:
            return state
        return _probe(state, DecisionReason.BASELINE, state.top)
    if estimates.energies < 1 and now - state.begun < ENERGY_TIMEOUT + SIGNAL_TIMEOUT:
        return state
    if estimates.energies < 1:
        return decline_and_pause(
            state, now, DecisionReason.NO_SIGNAL, "the energy of its devices is unknown"
        )
    if not search.cap_binds(state):
        return decline_and_pause(state, now, DecisionReason.NOT_BINDING, _draw_text(state))
    needed = max(
        pairs_needed(0.5 * one.budget, search.pair_deviation(one), one.error) for one in everyone
    )
    if needed > _MAX_NEEDED_PAIRS:
        return decline_and_pause(state, now, DecisionReason.TOO_NOISY)
    if not policy.apply:
        if state.decision.reason is DecisionReason.ADVICE:
            return state
        first = state.resume_level or search.start_level(state)
        return state._replace(decision=report.advice_decision(state, first, max(needed, 12.0)))
    if not observation.may_explore:
        return _return_to_original(state, observation)
    if state.resume_level is not None:
        return _begin_certification(
            state._replace(recertifying=True), observation, state.resume_level
        )
    level = search.start_level(state)
    state = state._replace(
        phase=TunerPhase.SCREEN, probe_level=level, wanted_pairs=tenants.screening_pairs(state)
    )
    return _screen(state, observation)


def _draw_text(state: TunerState) -> str:
    cause = report.cause_text(DecisionReason.NOT_BINDING)
    highest, lowest = max(state.estimates.draws) / 1000, state.ladder.bottom / 1000
    return f"{cause}, {highest:.0f} W at most of {lowest:.0f} W"


def _has_units(state: TunerState) -> bool:
    return bool(state.account.units or state.samples.last_end or state.latencies)


def _comparison_impossible(state: TunerState, now: int) -> tuple[DecisionReason, str] | None:
    """As safety.comparison_impossible, of any tenant."""
    causes = (safety.comparison_impossible(one, now) for one in tenants.everyone(state))
    return next(filter(None, causes), None)


# ------------------------------------------------------------------------------------- screen


def _screen(state: TunerState, observation: Observation) -> TunerState:
    level, now = state.probe_level, observation.now
    if state.plan.level == level:
        if not _plan_complete(state, now):
            return state
        return _probe(_request_level(state, now, state.top, 1), DecisionReason.SCREENING, level)
    if tenants.pairs(state, level) >= state.wanted_pairs:
        following = tenants.next_level(state)
        if following is None:
            return _choose_candidate(state, observation)
        state = state._replace(probe_level=following, wanted_pairs=tenants.screening_pairs(state))
        level = following
    elif not _compared(state, now):
        shown = state.decision.reason in (DecisionReason.SCREENING, DecisionReason.BASELINE)
        return state if shown else _probe(state, DecisionReason.SCREENING, level)
    if not tenants.affordable(state, level, 2 * tenants.block_time(state), _SCREENING_SHARE):
        return state
    return _probe(_request_level(state, now, level, 1), DecisionReason.SCREENING, level)


def _compared(state: TunerState, now: int) -> bool:
    """True if the last probe was compared with the original setting, or never will be."""
    if not _plan_complete(state, now):
        return False
    return all(map(_blocks_compared, tenants.everyone(state)))


def _blocks_compared(state: TunerState) -> bool:
    present = state.pairing.present
    at_top = present is not None and present.head[0].level == state.top
    return (at_top and not state.samples.waiting) or state.samples.full_blocks >= _LOST_BLOCKS


def _choose_candidate(state: TunerState, observation: Observation) -> TunerState:
    """Screening has ended: certify the most promising level."""
    now, levels = observation.now, state.estimates.levels
    if not all(map(_monotone, tenants.everyone(state))):
        return decline_and_pause(state, now, DecisionReason.NOT_MONOTONE)
    lowest = levels[min(levels)]
    slowest = tenants.slowdown(state, min(levels))
    if abs(lowest.power.mean) < 0.01 and slowest < 0.01 + search.pair_deviation(state):
        return decline_and_pause(state, now, DecisionReason.INERT)
    level = tenants.candidate(state, search.first_pairs)
    if level is None:
        return decline_and_pause(state, now, DecisionReason.NO_SAVING)
    return _begin_certification(state, observation, level)


def _monotone(state: TunerState) -> bool:
    """True if no lower level was significantly faster than a higher one."""
    ordered = sorted(state.estimates.levels.items(), reverse=True)
    deviation = search.pair_deviation(state)
    for position, (_, high) in enumerate(ordered):
        for _, low in ordered[position + 1 :]:
            error = deviation * math.sqrt(1 / high.time.n + 1 / low.time.n)
            if high.time.mean - low.time.mean > 0.02 + 3 * error:
                return False
    return True


# ------------------------------------------------------------------------------------ certify


def _begin_certification(state: TunerState, observation: Observation, level: int) -> TunerState:
    state = tenants.fresh_comparison(state)._replace(
        phase=TunerPhase.PROVE,
        candidate=level,
        resume_level=None,
        judged_pairs=tenants.pairs(state, level),
        recertifying=state.recertifying and state.candidate is None,
    )
    return _alternate(state, observation, level)


def _alternate(state: TunerState, observation: Observation, level: int) -> TunerState:
    """Alternate the level with the original, with as many blocks as the account permits."""
    if not _plan_complete(state, observation.now) and state.plan.level in (level, state.top):
        return _show_certification(state)
    if state.plan.level != state.top:
        return _show_certification(
            _request_level(state, observation.now, state.top, search.free_blocks(state))
        )
    duration = tenants.block_time(state)
    state, extra = search.random_choice(state, 2)
    for blocks in range(2 * search.reach(state), 0, -1):
        if tenants.affordable(state, level, (blocks + 2) * duration, _CERTIFYING_SHARE):
            state = _request_level(state, observation.now, level, blocks + extra)
            break
    return _show_certification(state)


def _show_certification(state: TunerState) -> TunerState:
    level, decision = state.chosen, state.decision
    reason = DecisionReason.RECERTIFYING if state.recertifying else DecisionReason.CERTIFYING
    if (
        decision.reason is reason
        and decision.caps == state.ladder.caps(state.plan.level)
        and decision.shown.get("pairs") == state.estimates.at(level).time.n
    ):
        return state
    return _probe(state, reason, level)


def _safety_release(state: TunerState, observation: Observation) -> TunerState | None:
    """The release of a level that breaks the budget, the latency or the balance of ranks."""
    everyone = tenants.everyone(state)
    slow = tenants.over_budget(state)
    if slow is not None:
        return _release_over_budget(state, slow, observation)
    if any(map(safety.latency_missed, everyone)):
        return release_and_pause(state, observation.now, DecisionReason.TAIL)
    if state.phase is TunerPhase.HOLD and any(one.level_shift.changed for one in everyone):
        return _restart_for_changed_job(state, observation)
    if search.slack_outdated(state):
        return _equalize_ranks(state, observation)
    return None


def _certify(state: TunerState, observation: Observation) -> TunerState:
    released = _safety_release(state, observation)
    if released is not None:
        return released
    level = state.chosen
    pairs = tenants.pairs(state, level)
    if pairs == state.judged_pairs:
        return _alternate(state, observation, level)
    state = state._replace(judged_pairs=pairs)
    certain = tenants.certain(state, level) and tenants.latency_holds(state, level)
    if certain and search.step_time_certified(state, level):
        return _certified(state, observation, level)
    if tenants.hopeless(state, level):
        return _next_candidate(state, observation)
    return _alternate(state, observation, level)


def _certified(state: TunerState, observation: Observation, level: int) -> TunerState:
    """Hold the level, if it certainly saves energy."""
    estimate = state.estimates.at(level)
    # A cap makes no job faster: a saving must come from the power.
    time = tenants.slowdown(state, level)
    value = search.objective_value(state, time, estimate.power.mean)
    error = math.hypot(estimate.time.deviation, estimate.power.deviation)
    error /= math.sqrt(estimate.time.n)
    if value + 2 * error > -0.001 and state.certified is None:
        lower = tenants.candidate(state, lambda one: 2.0 * one.estimates.at(level).time.n)
        if lower is not None and lower < level and state.refinements < _MAX_REFINEMENTS:
            state = state._replace(refinements=state.refinements + 1)
            return _begin_certification(state, observation, lower)
    if value + 2 * error > -0.001 or not search.saves_energy(state, level):
        return _fall_back(state, observation, DecisionReason.NO_SAVING)
    state = state._replace(
        phase=TunerPhase.HOLD,
        certified=level,
        refined_pairs=estimate.time.n,
        retries=0,
        committed=Nanoseconds(observation.now - state.begun)
        if state.committed is None
        else state.committed,
    )
    return _hold(state, observation)


def _next_candidate(state: TunerState, observation: Observation) -> TunerState:
    """The candidate failed: certify a higher one, or return to the certified one."""
    level = state.chosen
    state = state._replace(failed_candidates=state.failed_candidates + 1)
    following = None
    if state.certified is None and state.failed_candidates < search.MAX_CANDIDATES:
        above = level + max(state.ladder.step, round(0.012 * level)) - state.ladder.step
        judged = state.judged_pairs
        following = tenants.candidate(
            state, lambda one: max(search.first_pairs(one), judged), above
        )
    if following is None:
        return _fall_back(state, observation, DecisionReason.TOO_NOISY)
    return _begin_certification(state, observation, following)


def _fall_back(state: TunerState, observation: Observation, reason: DecisionReason) -> TunerState:
    """Return to the level that was certified before, if there is one."""
    if state.certified is None:
        return decline_and_pause(state, observation.now, reason)
    state = tenants.empty_comparison(state)._replace(
        phase=TunerPhase.HOLD,
        candidate=state.certified,
        refined_pairs=max(state.estimates.at(state.certified).time.n, state.refined_pairs),
    )
    return _hold(state, observation)


def _release_over_budget(
    state: TunerState, slow: TunerState, observation: Observation
) -> TunerState:
    """Release the level, too slow for the tenant ``slow``; certify a higher one after the pause."""
    level = state.chosen
    recent = slow.estimates.at(level).pairs[-3:]
    slowdown = max(sum(max(one.busy, one.span) for one in recent) / len(recent), slow.budget)
    share = min(0.7 * slow.budget / slowdown, 0.9)
    higher = state.ladder.level(state.top - (search.origin(state) - level) * share)
    state = release_and_pause(state, observation.now, DecisionReason.OVER_BUDGET)
    return state._replace(resume_level=higher if higher < state.top else None, certified=None)


# --------------------------------------------------------------------------------------- hold


def _equalize_ranks(state: TunerState, observation: Observation) -> TunerState:
    """Set the same cap on all ranks again: their waiting has changed."""
    decision = release_decision(state, DecisionReason.CHANGED, state.chosen)
    state = _fall_back(
        state._replace(certified=state.ladder.base(state.chosen)),
        observation,
        DecisionReason.CHANGED,
    )
    return state._replace(decision=decision) if state.plan.level == state.top else state


def _hold(state: TunerState, observation: Observation) -> TunerState:
    released = _safety_release(state, observation)
    if released is not None:
        return released
    level, now = state.chosen, observation.now
    estimate = state.estimates.at(level)
    if observation.may_explore and _held_long(state, now):
        lower = tenants.lower_level(state, _lower_candidate)
        if lower is not None:
            state = state._replace(refined_pairs=estimate.time.n, refinements=state.refinements + 1)
            return _begin_certification(state, observation, lower)
        lowered = None if state.tenants else search.lower_waiting_ranks(state)
        if lowered is not None and lowered.slack.lowered is not None:
            return _begin_certification(lowered, observation, lowered.slack.lowered)
    complete = _plan_complete(state, now)
    if state.plan.level == state.top != level:
        if not complete:
            return state
        state, extra = search.random_choice(state, 4)
        blocks = min(map(_hold_blocks, tenants.everyone(state)))
        state = _request_level(state, now, level, blocks + extra)
        return state._replace(decision=report.hold_decision(state, level, estimate))
    suspected = any(map(_suspicious, tenants.everyone(state)))
    soon = suspected and state.samples.full_blocks >= 6 and state.samples.level == level
    if state.plan.level != level or complete or soon:
        state = _request_level(state, now, state.top, search.free_blocks(state))
        return _probe(state, DecisionReason.SENTINEL, level)
    if state.decision.move is Move.HOLD and state.decision.shown.get("pairs") == estimate.time.n:
        return state
    return state._replace(decision=report.hold_decision(state, level, estimate))


def _suspicious(state: TunerState) -> bool:
    return state.level_shift.suspected or state.cusum.suspicious


def _held_long(state: TunerState, now: int) -> bool:
    """True if the level was in force long enough since the last comparison to try another one."""
    held = state.samples.level == state.plan.level == state.chosen
    lasts = _BLOCKS_BEFORE_REFINEMENT * search.block_time(state)
    return held and now - state.samples.periods[-1].since >= lasts


def _hold_blocks(state: TunerState) -> int:
    """Blocks until the next comparison: fewer where the level is less certain or new."""
    if state.cusum.suspicious or state.level_shift.suspected:
        return 6
    time = state.estimates.at(state.chosen).time
    margin = (state.budget - time.upper(state.error)) / state.budget
    blocks = 80 if margin > 0.03 and time.n >= 16 else 48
    return 2 * blocks if state.cusum.pairs >= _STEADY_COMPARISONS else blocks


def _lower_candidate(state: TunerState) -> int | None:
    """A lower level worth certifying, now that more is known."""
    level = state.certified
    if level is None or level <= state.ladder.bottom or level in state.ladder.lowered:
        return None
    if state.failed_candidates >= search.MAX_CANDIDATES or state.refinements >= _MAX_REFINEMENTS:
        return None
    time = state.estimates.at(level).time
    if state.cusum.suspicious or state.level_shift.suspected:
        return None
    target = search.certifiable_slowdown(state, max(2.0 * time.n, 32.0))
    gain = max(_LEAST_GAIN * state.budget, 0.0015)
    if target - time.mean < gain:
        return None
    shape = search.fitted_curve(state)
    following = search.candidate(state, target, shape=shape)
    if following is None or shape.time(following) - shape.time(level) < gain:
        return None
    return following


def _restart_for_changed_job(state: TunerState, observation: Observation) -> TunerState:
    """The job has changed, so that nothing known of it holds: learn and certify again."""
    level = state.ladder.base(state.chosen)
    state = relearn(state._replace(resume_level=level))._replace(plan=ProbePlan(level, 1))
    state = _request_level(state, observation.now, state.top, 1)
    return state._replace(
        decision=release_decision(state, DecisionReason.CHANGED, level), resume_level=level
    )
