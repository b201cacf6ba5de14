"""The course of a search: learn, screen, prove, hold, rest; and what comes after each."""

from __future__ import annotations

import math
from types import MappingProxyType

from wattspan.model import DecisionReason, Move
from wattspan.tuning.decisions import explanations, rank_balancing, search
from wattspan.tuning.decisions.budget import close_account
from wattspan.tuning.decisions.drift import Cusum, LevelShift
from wattspan.tuning.decisions.estimates import Estimates, Pairing
from wattspan.tuning.decisions.ranks import RankSlack
from wattspan.tuning.decisions.safety import (
    comparison_impossible,
    decline_for_long,
    latency_holds,
    latency_missed,
    release_and_pause,
)
from wattspan.tuning.decisions.search import affordable, block_time, pair_deviation
from wattspan.tuning.decisions.sequential_test import pairs_needed
from wattspan.tuning.decisions.state import (
    MAX_CANDIDATES,
    ProbePlan,
    TunerPhase,
    TunerState,
    random_choice,
)
from wattspan.tuning.decisions.values import Observation

MIN_BASELINE_BLOCKS = 4
"""Blocks of the original setting, until its noise is known."""

_NOISY = 500.0  # pairs
_PROBES = 0.5
"""The part of the allowance that looking at levels may use up."""

_CONSIDERED = 3
"""More pairs of a certified level, before a lower one is considered."""

_DEEPER = 2
"""How often a lower one is tried."""

_TAILS = 64
"""Pairs after which a tail that is still not sure to hold is taken not to."""

_LOST_TRACK = 4  # blocks at the original without a comparison: try again


def decide(state: TunerState, seen: Observation) -> TunerState:
    """The state after deciding on its own account."""
    if state.stage is TunerPhase.REST:
        return _resting(state, seen)
    if state.stage is TunerPhase.LEARN:
        return _learning(state, seen)
    if state.stage is not TunerPhase.HOLD:
        if not seen.turn:
            return _return_to_original(state, seen)
        why = comparison_impossible(state, seen.now)
        if why is not None:
            return decline_for_long(state, seen.now, why)
    if state.stage is TunerPhase.SCREEN:
        return _screening(state, seen)
    if state.stage is TunerPhase.PROVE:
        return _proving(state, seen)
    return _holding(state, seen)


def _request_level(state: TunerState, now: int, level: int, blocks: int) -> TunerState:
    """Ask for a level."""
    if level == state.plan.level:
        return state._replace(plan=ProbePlan(level, blocks))
    return state._replace(plan=ProbePlan(level, blocks), before=state.plan.level, asked_at=now)


def _plan_complete(state: TunerState) -> bool:
    """Whether the planned blocks are full."""
    return state.tape.level == state.plan.level and state.tape.full >= state.plan.blocks


def _probing(state: TunerState, reason: DecisionReason, level: int) -> TunerState:
    decision = explanations.probe_decision(state, reason, level)
    return state._replace(decision=decision)


# ---------------------------------------------------------------------------------- the stages


def _return_to_original(state: TunerState, seen: Observation) -> TunerState:
    state = _request_level(state, seen.now, state.top, 1)
    if state.decision.reason is DecisionReason.WAITING:
        return state
    return state._replace(decision=explanations.decline_decision(DecisionReason.WAITING))


def _resting(state: TunerState, seen: Observation) -> TunerState:
    awake = seen.now >= state.until and state.heard > state.asked_at
    if not awake:
        return state
    return relearn(state, seen.now)


def relearn(state: TunerState, now: int) -> TunerState:
    """From the beginning, with what may still be good: the job has perhaps become another one."""
    known = Estimates(
        variance=state.known.variance, blocks=MIN_BASELINE_BLOCKS - 2, power=state.known.power
    )
    return settle_account(state)._replace(
        stage=TunerPhase.LEARN,
        plan=ProbePlan(state.top, 1),
        known=known,
        pairing=Pairing(),
        cusum=Cusum(),
        raw=LevelShift(),
        serving=MappingProxyType({}),
        ladder=state.ladder.plain(),
        resume=None if state.resume is None else state.ladder.base(state.resume),
        slack=RankSlack(),
        alarm=None,
        unmatched=0,
        again=False,
        candidate=None,
        certified=None,
        tried=0,
        deepened=0,
        judged=0,
        refined=0,
    )


def settle_account(state: TunerState) -> TunerState:
    """What was lost and saved so far is written down for good."""
    shape = search.fitted_curve(state)
    return state._replace(
        spending=close_account(
            state.spending,
            lambda level: search.expected_slowdown(state, level, shape)[0],
            lambda level: search.slowdown_bound(state, level, shape),
            saved_energy(state),
        ),
    )


def saved_energy(state: TunerState) -> tuple[float, float, float]:
    """Microjoules since the job last changed: low, likely, high."""

    def at(sign: float, level: int) -> float:
        seen = state.known.at(level)
        if not seen.time.n or not seen.power.n:
            return 0.0
        error = 2.0 * math.hypot(
            seen.time.deviation / math.sqrt(seen.time.n),
            seen.power.deviation / math.sqrt(seen.power.n),
        )
        return seen.energy + sign * (error if seen.time.n > 1 else 2 * error)

    low = state.spending.saved(lambda level: at(1.0, level), 0.0)
    likely = state.spending.saved(lambda level: at(0.0, level), 0.5)
    high = state.spending.saved(lambda level: at(-1.0, level), 1.0)
    return min(low, likely), likely, max(likely, high)


def _learning(state: TunerState, seen: Observation) -> TunerState:
    known, policy = state.known, state.policy
    if not state.spending.units and not state.tape.reached and not state.latencies:
        return state
    if state.ladder.rungs < 1 or policy.max_slowdown <= 0:
        return decline_for_long(
            state, seen.now, explanations.decline_decision(DecisionReason.NO_ROOM)
        )
    why = comparison_impossible(state, seen.now)
    if why is not None:
        return state if state.decision.sentence == why.sentence else state._replace(decision=why)
    if known.blocks < MIN_BASELINE_BLOCKS:
        if state.decision.reason is DecisionReason.BASELINE:
            return state
        return _probing(state, DecisionReason.BASELINE, state.top)
    if known.energies < 1:
        more = ", for the energy of its devices is not known"
        return decline_for_long(
            state, seen.now, explanations.decline_decision(DecisionReason.NO_SIGNAL, more)
        )
    needed = pairs_needed(0.5 * state.budget, pair_deviation(state), state.error)
    if needed > _NOISY:
        return decline_for_long(
            state, seen.now, explanations.decline_decision(DecisionReason.TOO_NOISY)
        )
    if not policy.apply:
        if state.decision.reason is DecisionReason.ADVICE:
            return state
        first = state.resume or search.start_level(state)
        return state._replace(
            decision=explanations.advice_decision(state, first, max(needed, 12.0))
        )
    if not seen.turn:
        return _return_to_original(state, seen)
    if state.resume is not None:
        return _begin_certification(state._replace(again=True), seen, state.resume)
    probe = search.start_level(state)
    state = state._replace(stage=TunerPhase.SCREEN, probe=probe, goal=search.screening_pairs(state))
    return _screening(state, seen)


def _screening(state: TunerState, seen: Observation) -> TunerState:
    level, now = state.probe, seen.now
    if state.plan.level == level:
        if not _plan_complete(state):
            return state
        return _probing(_request_level(state, now, state.top, 1), DecisionReason.SCREENING, level)
    if state.known.at(level).time.n >= state.goal:
        following = search.next_level(state)
        if following is None:
            return _choose(state, seen)
        state = state._replace(probe=following, goal=search.screening_pairs(state))
        level = following
    elif not _ready_for_more(state):
        return (
            _probing(state, DecisionReason.SCREENING, level) if _decision_changed(state) else state
        )
    if not affordable(state, level, 2 * block_time(state), _PROBES):
        return state
    state = _request_level(state, now, level, 1)
    return _probing(state, DecisionReason.SCREENING, level)


def _decision_changed(state: TunerState) -> bool:
    """Whether the decision that stands is another one."""
    return state.decision.reason not in (DecisionReason.SCREENING, DecisionReason.BASELINE)


def _ready_for_more(state: TunerState) -> bool:
    """Whether what was capped last has been compared, or never will be."""
    if not _plan_complete(state):
        return False
    present = state.pairing.present
    at_top = present is not None and present.head[0].level == state.top
    return (at_top and not state.tape.waiting) or state.tape.full >= _LOST_TRACK


def _choose(state: TunerState, seen: Observation) -> TunerState:
    """The way down has ended: what is worth to be proved?"""
    levels = state.known.levels
    monotone = _monotone(state)
    if not monotone:
        return decline_for_long(
            state, seen.now, explanations.decline_decision(DecisionReason.NOT_MONOTONE)
        )
    deepest = min(levels)
    seen_there = levels[deepest]
    deviation = pair_deviation(state)
    if abs(seen_there.power.mean) < 0.01 and seen_there.time.mean < 0.01 + deviation:
        return decline_for_long(
            state, seen.now, explanations.decline_decision(DecisionReason.INERT)
        )
    aim = search.certifiable_slowdown(state, search.first_pairs(state))
    level = search.candidate(state, aim)
    if level is None:
        return decline_for_long(
            state, seen.now, explanations.decline_decision(DecisionReason.NO_SAVING)
        )
    return _begin_certification(state, seen, level)


def _monotone(state: TunerState) -> bool:
    """Whether no lower level was surely faster than a higher one."""
    ordered = sorted(state.known.levels.items(), reverse=True)
    deviation = pair_deviation(state)
    for at, (_, high) in enumerate(ordered):
        for _, low in ordered[at + 1 :]:
            error = deviation * math.sqrt(1 / high.time.n + 1 / low.time.n)
            if high.time.mean - low.time.mean > 0.02 + 3 * error:
                return False
    return True


def _begin_certification(state: TunerState, seen: Observation, level: int) -> TunerState:
    state = state._replace(
        stage=TunerPhase.PROVE,
        candidate=level,
        resume=None,
        judged=state.known.at(level).time.n,
        again=state.again and state.candidate is None,
        cusum=Cusum(),
        alarm=None,
        pairing=Pairing(present=state.pairing.present),
    )
    return _alternate(state, seen, level)


def _alternate(state: TunerState, seen: Observation, level: int) -> TunerState:
    """A level against the original, as much of the level as the account allows."""
    if state.plan.level != state.top:
        if state.plan.level == level and not _plan_complete(state):
            return _certifying(state)
        return _certifying(_request_level(state, seen.now, state.top, search.free_blocks(state)))
    if not _plan_complete(state):
        return _certifying(state)
    lasts = block_time(state)
    state, extra = random_choice(state, 2)
    # Until something is certified that is to come soon; later only what it costs matters.
    for blocks in (6, 4, 2) if state.certified is None else (14, 8, 4, 2):
        if affordable(state, level, (blocks + 2) * lasts, 0.85):
            return _certifying(_request_level(state, seen.now, level, blocks + extra))
    return _certifying(state)


def _certifying(state: TunerState) -> TunerState:
    level = state.chosen
    pairs = state.known.at(level).time.n
    reason = DecisionReason.RECERTIFYING if state.again else DecisionReason.CERTIFYING
    shown = state.decision
    if (
        shown.reason is reason
        and shown.caps == state.ladder.caps(state.plan.level)
        and shown.shown.get("pairs") == pairs
    ):
        return state
    return _probing(state, reason, level)


def _proving(state: TunerState, seen: Observation) -> TunerState:
    level = state.chosen
    time = state.known.at(level).time
    if state.cusum.alarmed:
        return _release_over_budget(state, seen)
    if latency_missed(state):
        return release_and_pause(state, seen.now, DecisionReason.TAIL)
    if rank_balancing.slack_outdated(state):
        return _equalize_ranks(state, seen)
    if time.n == state.judged:
        return _alternate(state, seen, level)
    state = state._replace(judged=time.n)
    sure = time.n >= state.policy.least_pairs and time.upper(state.error) <= state.budget
    if sure and latency_holds(state, level) and rank_balancing.step_time_certified(state, level):
        return _certify(state, seen, level)
    if time.n >= 6:
        mean, error = search.expected_slowdown(state, level)
        # Few pairs may have been unlucky: the benefit of the doubt is one standard error.
        needed = pairs_needed(state.budget - mean + error, time.deviation, state.error)
        if needed > max(1.5 * time.n, 56) or (sure and time.n >= _TAILS):
            return _next_candidate(state, seen)
    return _alternate(state, seen, level)


def _certify(state: TunerState, seen: Observation, level: int) -> TunerState:
    found = state.known.at(level)
    value = search.objective_value(state, found.time.mean, found.power.mean)
    doubt = math.hypot(found.time.deviation, found.power.deviation) / math.sqrt(found.time.n)
    # Nothing is held that may save nothing.
    if value + 2 * doubt > -0.001 or not rank_balancing.saves_energy(state, level):
        return _fall_back(state, seen, DecisionReason.NO_SAVING)
    state = state._replace(
        stage=TunerPhase.HOLD,
        certified=level,
        refined=found.time.n,
        retries=0,
        committed=state.committed if state.committed is not None else seen.now - state.begun,
    )
    return _holding(state, seen)


def _next_candidate(state: TunerState, seen: Observation) -> TunerState:
    """The candidate will not do: a higher one, or the one that did before."""
    level = state.chosen
    state = state._replace(tried=state.tried + 1)
    following = None
    if state.certified is None and state.tried < MAX_CANDIDATES:
        aim = search.certifiable_slowdown(state, max(search.first_pairs(state), state.judged))
        above = level + max(state.ladder.step, round(0.012 * level)) - state.ladder.step
        following = search.candidate(state, aim, above)
    if following is None:
        return _fall_back(state, seen, DecisionReason.TOO_NOISY)
    return _begin_certification(state, seen, following)


def _fall_back(state: TunerState, seen: Observation, reason: DecisionReason) -> TunerState:
    """To the level that was certified before, if there is one."""
    if state.certified is None:
        return decline_for_long(state, seen.now, explanations.decline_decision(reason))
    state = state._replace(
        stage=TunerPhase.HOLD,
        candidate=state.certified,
        refined=max(state.known.at(state.certified).time.n, state.refined),
        cusum=Cusum(),
        pairing=Pairing(),
    )
    return _holding(state, seen)


def _release_over_budget(state: TunerState, seen: Observation) -> TunerState:
    """The level is slower than it may be: release it, and look for a higher one after a rest."""
    level = state.chosen
    recent = state.known.at(level).pairs[-3:]
    now_costs = max(sum(max(one.busy, one.span) for one in recent) / len(recent), state.budget)
    part = min(0.7 * state.budget / now_costs, 0.9)
    softer = state.ladder.level(state.top - (search.origin(state) - level) * part)
    state = release_and_pause(state, seen.now, DecisionReason.OVER_BUDGET)
    return state._replace(resume=softer if softer < state.top else None, certified=None)


# --------------------------------------------------------------------------------------- hold


def _equalize_ranks(state: TunerState, seen: Observation) -> TunerState:
    """All have one cap again: ranks wait otherwise than when some were given less."""
    level = state.chosen
    told = explanations.release_decision(state, DecisionReason.CHANGED, level)
    state = _fall_back(
        state._replace(certified=state.ladder.base(level)), seen, DecisionReason.CHANGED
    )
    return state._replace(decision=told) if state.plan.level == state.top else state


def _holding(state: TunerState, seen: Observation) -> TunerState:
    level = state.chosen
    found = state.known.at(level)
    if state.cusum.alarmed or found.time.lower(1 - state.policy.confidence) > state.budget:
        return _release_over_budget(state, seen)
    if latency_missed(state):
        return release_and_pause(state, seen.now, DecisionReason.TAIL)
    if state.raw.changed:
        return _restart_for_changed_job(state, seen, level)
    if rank_balancing.slack_outdated(state):
        return _equalize_ranks(state, seen)
    if seen.turn:
        deeper = _lower_candidate(state)
        if deeper is not None:
            state = state._replace(refined=found.time.n, deepened=state.deepened + 1)
            return _begin_certification(state, seen, deeper)
        lowered = rank_balancing.lower_waiting_ranks(state)
        if lowered is not None and lowered.slack.lowered is not None:
            return _begin_certification(lowered, seen, lowered.slack.lowered)
    if state.plan.level not in (level, state.top):
        state = _request_level(state, seen.now, state.top, search.free_blocks(state))
        return _probing(state, DecisionReason.SENTINEL, level)
    if state.plan.level != level:
        if not _plan_complete(state):
            return state
        state, extra = random_choice(state, 4)
        state = _request_level(state, seen.now, level, _hold_blocks(state) + extra)
        return state._replace(decision=explanations.hold_decision(state, level, found))
    hurried = (state.raw.hurried or state.cusum.suspicious) and state.tape.full >= 3
    if _plan_complete(state) or (hurried and state.tape.level == level):
        state = _request_level(state, seen.now, state.top, search.free_blocks(state))
        return _probing(state, DecisionReason.SENTINEL, level)
    if state.decision.move is Move.HOLD and state.decision.shown.get("pairs") == found.time.n:
        return state
    return state._replace(decision=explanations.hold_decision(state, level, found))


def _hold_blocks(state: TunerState) -> int:
    """Blocks until the next comparison: the fewer, the less sure the level is."""
    level = state.chosen
    if state.cusum.suspicious or state.raw.hurried:
        return 3
    time = state.known.at(level).time
    room = (state.budget - time.upper(state.error)) / state.budget
    return 40 if room > 0.03 and time.n >= 16 else 24


def _lower_candidate(state: TunerState) -> int | None:
    """A lower level that is worth to be proved, now that more is known."""
    level = state.certified
    if level is None or state.tried >= MAX_CANDIDATES or level <= state.ladder.bottom:
        return None
    if level in state.ladder.lowered:
        return None
    time = state.known.at(level).time
    if time.n < state.refined + _CONSIDERED or state.deepened >= _DEEPER:
        return None
    if state.cusum.suspicious or state.raw.hurried:
        return None
    pairs = max(2.0 * time.n, 32.0)
    aim = search.certifiable_slowdown(state, pairs)
    gain = max(0.05 * state.budget, 0.0015)
    if aim - time.mean < gain:
        return None
    shape = search.fitted_curve(state)
    following = search.candidate(state, aim)
    if following is None or shape.time(following) - shape.time(level) < gain:
        return None
    return following


def _restart_for_changed_job(state: TunerState, seen: Observation, level: int) -> TunerState:
    """The job is another one: nothing that was shown of it holds, so it is shown again."""
    level = state.ladder.base(level)
    state = relearn(state._replace(resume=level), seen.now)
    state = _request_level(state._replace(plan=ProbePlan(level, 1)), seen.now, state.top, 1)
    return state._replace(
        decision=explanations.release_decision(state, DecisionReason.CHANGED, level), resume=level
    )
