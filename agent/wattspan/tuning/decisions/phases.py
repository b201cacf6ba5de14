"""The phases of a search (learn, screen, certify, hold, rest) and the transitions between them."""

from __future__ import annotations

import math

from wattspan.model import Decision, DecisionReason, Move, Nanoseconds
from wattspan.tuning.decisions import safety, search, tenants
from wattspan.tuning.decisions.blocks import ENERGY_TIMEOUT
from wattspan.tuning.decisions.estimates import Estimates, LevelEstimate
from wattspan.tuning.decisions.rank_balancing import (
    lower_waiting_ranks,
    saves_energy,
    slack_outdated,
    step_time_certified,
)
from wattspan.tuning.decisions.report import (
    cause_text,
    decline_decision,
    level_figures,
    percent_text,
    release_decision,
    saving_text,
    setting_text,
    slowdown_text,
)
from wattspan.tuning.decisions.safety import SIGNAL_TIMEOUT, decline_and_pause, release_and_pause
from wattspan.tuning.decisions.search import LevelEvidence, ProbePlan, TunerPhase, TunerState
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

_LOST_BLOCKS = 4
"""Blocks at the original setting without a comparison after which the probe is repeated."""


def decide(state: TunerState, observation: Observation) -> TunerState:
    """The state after the decision of its phase."""
    if state.phase is TunerPhase.REST:
        rested = observation.now >= state.search.rest_until
        worked = state.last_unit_end > state.search.requested_at
        return relearn(state) if rested and worked else state
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
    plan, previous = ProbePlan(level, blocks), state.level
    if level == previous:
        return state.searching(plan=plan)
    state = state.searching(plan=plan, previous_level=previous, requested_at=now)
    return state._replace(latency=state.latency.change(now))


def plan_ends(state: TunerState) -> int | None:
    """The time at which the plan's blocks are complete by the clock; None where units decide.

    Units are known seconds after their end, because exporters send batches. Waiting for them
    would lengthen every block. Blocks of requests are periods of time anyway.
    """
    in_force = state.samples.level == state.level
    if state.policy.kind is not WorkloadKind.STEPS or not in_force or not state.account.units:
        return None
    lasts = search.block_time(state) * state.search.plan.blocks + search.unit_time(state)
    return state.samples.periods[-1].since + state.policy.settle_time + round(lasts)


def _plan_complete(state: TunerState, now: int) -> bool:
    return all(_blocks_complete(one, now) for one in tenants.everyone(state))


def _blocks_complete(state: TunerState, now: int) -> bool:
    if state.samples.level != state.level:
        return False
    ends = plan_ends(state)
    return state.samples.full_blocks >= state.search.plan.blocks or (
        ends is not None and now >= ends
    )


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
    known, blocks = state.estimates, search.MIN_BASELINE_BLOCKS - 2
    estimates = Estimates(variance=known.variance, blocks=blocks, power=known.power)
    account, resumed = search.closed_account(state), state.search.resume_level
    state = tenants.each(state, relearn)
    state = state._replace(account=account, estimates=estimates, evidence=LevelEvidence())
    return state.searching(
        ladder=state.ladder.plain(),
        plan=ProbePlan(state.top, 1),
        phase=TunerPhase.LEARN,
        candidate=None,
        recertifying=False,
        failed_candidates=0,
        refinements=0,
        certified=None,
        resume_level=None if resumed is None else state.ladder.base(resumed),
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
        first = state.search.resume_level or search.start_level(state)
        return state._replace(decision=_advice_decision(state, first, max(needed, 12.0)))
    if not observation.may_explore:
        return _return_to_original(state, observation)
    if state.search.resume_level is not None:
        again = state.searching(recertifying=True)
        return _begin_certification(again, observation, state.search.resume_level)
    level, wanted = search.start_level(state), tenants.screening_pairs(state)
    state = state.searching(phase=TunerPhase.SCREEN, probe_level=level, wanted_pairs=wanted)
    return _screen(state, observation)


def _draw_text(state: TunerState) -> str:
    cause = cause_text(DecisionReason.NOT_BINDING)
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
    level, now = state.search.probe_level, observation.now
    if state.level == level:
        if not _plan_complete(state, now):
            return state
        return _probe(_request_level(state, now, state.top, 1), DecisionReason.SCREENING, level)
    if tenants.pairs(state, level) >= state.search.wanted_pairs:
        following = tenants.next_level(state)
        if following is None:
            return _choose_candidate(state, observation)
        level, wanted = following, tenants.screening_pairs(state)
        state = state.searching(probe_level=level, wanted_pairs=wanted)
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
    present = state.evidence.pairing.present
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
    state = tenants.fresh_comparison(state).knowing(judged_pairs=tenants.pairs(state, level))
    state = state.searching(
        phase=TunerPhase.PROVE,
        candidate=level,
        resume_level=None,
        recertifying=state.search.recertifying and state.search.candidate is None,
    )
    return _alternate(state, observation, level)


def _refined(state: TunerState) -> TunerState:
    """The state after one more try of a lower level."""
    return state.searching(refinements=state.search.refinements + 1)


def _alternate(state: TunerState, observation: Observation, level: int) -> TunerState:
    """Alternate the level with the original, with as many blocks as the account permits."""
    if not _plan_complete(state, observation.now) and state.level in (level, state.top):
        return _show_certification(state)
    if state.level != state.top:
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
    reason = DecisionReason.RECERTIFYING if state.search.recertifying else DecisionReason.CERTIFYING
    unchanged = decision.reason is reason and decision.caps == state.ladder.caps(state.level)
    if unchanged and decision.shown.get("pairs") == state.estimates.at(level).time.n:
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
    changed = any(one.evidence.level_shift.changed for one in everyone)
    if changed and state.phase is TunerPhase.HOLD:
        return _restart_for_changed_job(state, observation)
    if slack_outdated(state):
        return _equalize_ranks(state, observation)
    return None


def _certify(state: TunerState, observation: Observation) -> TunerState:
    released = _safety_release(state, observation)
    if released is not None:
        return released
    level = state.chosen
    pairs = tenants.pairs(state, level)
    if pairs == state.evidence.judged_pairs:
        return _alternate(state, observation, level)
    state = state.knowing(judged_pairs=pairs)
    certain = tenants.certain(state, level) and tenants.latency_holds(state, level)
    if certain and step_time_certified(state, level):
        return _certified(state, observation, level)
    if tenants.hopeless(state, level):
        return _next_candidate(state, observation)
    return _alternate(state, observation, level)


def _certified(state: TunerState, observation: Observation, level: int) -> TunerState:
    """Hold the level, if it certainly saves energy, and more than the one certified before."""
    estimate = state.estimates.at(level)
    # A cap makes no job faster: a saving must come from the power.
    time = tenants.slowdown(state, level)
    value = search.objective_value(state, time, estimate.power.mean)
    error = math.hypot(estimate.time.deviation, estimate.power.deviation)
    error /= math.sqrt(estimate.time.n)
    if value + 2 * error > -0.001 and state.search.certified is None:
        lower = tenants.candidate(state, lambda one: 2.0 * one.estimates.at(level).time.n)
        if lower is not None and lower < level and state.search.refinements < _MAX_REFINEMENTS:
            return _begin_certification(_refined(state), observation, lower)
    saves = value + 2 * error <= -0.001 and saves_energy(state, level)
    if not saves or _is_worse(state, level, value):
        return _fall_back(state, observation, DecisionReason.NO_SAVING)
    state = state.knowing(refined_pairs=estimate.time.n)
    state = state.searching(phase=TunerPhase.HOLD, certified=level, retries=0)
    if state.committed is None:
        state = state._replace(committed=Nanoseconds(observation.now - state.begun))
    return _hold(state, observation)


def _is_worse(state: TunerState, level: int, value: float) -> bool:
    """True if another level is certified whose value is lower by its own comparison."""
    known = state.search.certified
    if known is None or known == level:
        return False
    time, power = tenants.slowdown(state, known), state.estimates.at(known).power.mean
    return search.objective_value(state, time, power) < value


def _next_candidate(state: TunerState, observation: Observation) -> TunerState:
    """The candidate failed: certify a higher one, or return to the certified one."""
    level, step = state.chosen, state.ladder.step
    state = state.searching(failed_candidates=state.search.failed_candidates + 1)
    following, judged = None, state.evidence.judged_pairs
    if state.search.certified is None and state.search.failed_candidates < search.MAX_CANDIDATES:
        following = tenants.candidate(
            state,
            lambda one: max(search.first_pairs(one), judged),
            level + max(step, round(0.012 * level)) - step,
        )
    if following is None:
        return _fall_back(state, observation, DecisionReason.TOO_NOISY)
    return _begin_certification(state, observation, following)


def _fall_back(state: TunerState, observation: Observation, reason: DecisionReason) -> TunerState:
    """Return to the level that was certified before, if there is one."""
    level = state.search.certified
    if level is None:
        return decline_and_pause(state, observation.now, reason)
    pairs = max(state.estimates.at(level).time.n, state.evidence.refined_pairs)
    state = tenants.empty_comparison(state).knowing(refined_pairs=pairs)
    return _hold(state.searching(phase=TunerPhase.HOLD, candidate=level), observation)


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
    return state.searching(resume_level=higher if higher < state.top else None, certified=None)


# --------------------------------------------------------------------------------------- hold


def _equalize_ranks(state: TunerState, observation: Observation) -> TunerState:
    """Set the same cap on all ranks again: their waiting has changed."""
    decision = release_decision(state, DecisionReason.CHANGED, state.chosen)
    state = state.searching(certified=state.ladder.base(state.chosen))
    state = _fall_back(state, observation, DecisionReason.CHANGED)
    return state._replace(decision=decision) if state.level == state.top else state


def _hold(state: TunerState, observation: Observation) -> TunerState:
    released = _safety_release(state, observation)
    if released is not None:
        return released
    level, now = state.chosen, observation.now
    estimate = state.estimates.at(level)
    if observation.may_explore and _held_long(state, now):
        lower = tenants.lower_level(state, _lower_candidate)
        if lower is not None:
            state = _refined(state.knowing(refined_pairs=estimate.time.n))
            return _begin_certification(state, observation, lower)
        lowered = None if state.tenants else lower_waiting_ranks(state)
        if lowered is not None and lowered.evidence.slack.lowered is not None:
            return _begin_certification(lowered, observation, lowered.evidence.slack.lowered)
    complete = _plan_complete(state, now)
    if state.level == state.top != level:
        if not complete:
            return state
        state, extra = search.random_choice(state, 4)
        blocks = min(map(_hold_blocks, tenants.everyone(state)))
        state = _request_level(state, now, level, blocks + extra)
        return state._replace(decision=_hold_decision(state, level, estimate))
    suspected = any(one.suspicious for one in tenants.everyone(state))
    soon = suspected and state.samples.full_blocks >= 6 and state.samples.level == level
    if state.level != level or complete or soon:
        state = _request_level(state, now, state.top, search.free_blocks(state))
        return _probe(state, DecisionReason.SENTINEL, level)
    if state.decision.move is Move.HOLD and state.decision.shown.get("pairs") == estimate.time.n:
        return state
    return state._replace(decision=_hold_decision(state, level, estimate))


def _held_long(state: TunerState, now: int) -> bool:
    """True if the level was in force long enough since the last comparison to try another one."""
    held = state.samples.level == state.level == state.chosen
    lasts = _BLOCKS_BEFORE_REFINEMENT * search.block_time(state)
    return held and now - state.samples.periods[-1].since >= lasts


def _hold_blocks(state: TunerState) -> int:
    """Blocks until the next comparison: fewer where the level is less certain or new."""
    if state.suspicious:
        return 6
    time = state.estimates.at(state.chosen).time
    margin = (state.budget - time.upper(state.error)) / state.budget
    blocks = 80 if margin > 0.03 and time.n >= 16 else 48
    return 2 * blocks if state.evidence.cusum.pairs >= _STEADY_COMPARISONS else blocks


def _lower_candidate(state: TunerState) -> int | None:
    """A lower level worth certifying, now that more is known."""
    progress, level = state.search, state.search.certified
    if level is None or level <= state.ladder.bottom or level in state.ladder.lowered:
        return None
    tried = progress.failed_candidates >= search.MAX_CANDIDATES
    if tried or progress.refinements >= _MAX_REFINEMENTS or state.suspicious:
        return None
    time = state.estimates.at(level).time
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
    state = relearn(state).searching(plan=ProbePlan(level, 1), resume_level=level)
    state = _request_level(state, observation.now, state.top, 1)
    return state._replace(decision=release_decision(state, DecisionReason.CHANGED, level))


# ---------------------------------------------------------------------------------- sentences


def _hold_decision(state: TunerState, level: int, estimate: LevelEstimate) -> Decision:
    bound = estimate.time.upper(state.error)
    sentence = (
        f"Hold {setting_text(state, level)}: {slowdown_text(estimate.time.mean)} "
        f"({100 * state.policy.confidence:.0f} % bound {percent_text(math.expm1(bound))}) of a "
        f"{100 * state.policy.max_slowdown:g} % budget, {saving_text(estimate.energy)}, "
        f"{estimate.time.n} pairs."
    )
    caps = state.ladder.caps(level)
    return Decision(
        Move.HOLD, DecisionReason.CERTIFIED, sentence, caps, level_figures(state, level)
    )


def probe_decision(state: TunerState, reason: DecisionReason, level: int) -> Decision:
    time = state.estimates.at(level).time
    name = setting_text(state, level)
    so_far = f"{slowdown_text(time.mean)} so far, {time.n} pairs" if time.n else "no pair yet"
    sentence = {
        DecisionReason.BASELINE: f"Learn the original setting: {_noise(state)}.",
        DecisionReason.SCREENING: f"Screen {name}: {so_far}.",
        DecisionReason.CERTIFYING: f"Certify {name}: {so_far}.",
        DecisionReason.RECERTIFYING: f"Certify {name} again: {so_far}.",
        DecisionReason.SENTINEL: f"Compare {name} with the original setting: {so_far}.",
    }[reason]
    caps = state.ladder.caps(state.level)
    return Decision(Move.PROBE, reason, sentence, caps, level_figures(state, level))


def _noise(state: TunerState) -> str:
    blocks = state.estimates.blocks
    if not blocks:
        return "its noise is not known yet"
    return f"{blocks} block{'s' if blocks > 1 else ''}, {percent_text(state.estimates.noise)} noise"


def _advice_decision(state: TunerState, level: int, pairs: float) -> Decision:
    minutes = search.block_time(state) * 5 * pairs / 60e9
    sentence = (
        f"Advice: try {setting_text(state, level)} first; the job's noise is "
        f"{percent_text(state.estimates.noise)}, so certifying a setting would take about "
        f"{minutes:.0f} minutes."
    )
    return Decision(Move.DECLINE, DecisionReason.ADVICE, sentence, {}, {"setting": float(level)})
