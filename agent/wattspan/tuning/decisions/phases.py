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


def decide(state: TunerState, observation: Observation) -> TunerState:
    """The state after deciding on its own account."""
    if state.phase is TunerPhase.REST:
        return _resting(state, observation)
    if state.phase is TunerPhase.LEARN:
        return _learning(state, observation)
    if state.phase is not TunerPhase.HOLD:
        if not observation.may_explore:
            return _return_to_original(state, observation)
        why = comparison_impossible(state, observation.now)
        if why is not None:
            return decline_for_long(state, observation.now, why)
    if state.phase is TunerPhase.SCREEN:
        return _screening(state, observation)
    if state.phase is TunerPhase.PROVE:
        return _proving(state, observation)
    return _holding(state, observation)


def _request_level(state: TunerState, now: int, level: int, blocks: int) -> TunerState:
    """Ask for a level."""
    if level == state.plan.level:
        return state._replace(plan=ProbePlan(level, blocks))
    return state._replace(
        plan=ProbePlan(level, blocks), previous_level=state.plan.level, requested_at=now
    )


def _plan_complete(state: TunerState) -> bool:
    """Whether the planned blocks are full."""
    return (
        state.samples.level == state.plan.level and state.samples.full_blocks >= state.plan.blocks
    )


def _probing(state: TunerState, reason: DecisionReason, level: int) -> TunerState:
    decision = explanations.probe_decision(state, reason, level)
    return state._replace(decision=decision)


# ---------------------------------------------------------------------------------- the stages


def _return_to_original(state: TunerState, observation: Observation) -> TunerState:
    state = _request_level(state, observation.now, state.top, 1)
    if state.decision.reason is DecisionReason.WAITING:
        return state
    return state._replace(decision=explanations.decline_decision(DecisionReason.WAITING))


def _resting(state: TunerState, observation: Observation) -> TunerState:
    awake = observation.now >= state.rest_until and state.last_unit_end > state.requested_at
    if not awake:
        return state
    return relearn(state, observation.now)


def relearn(state: TunerState, now: int) -> TunerState:
    """From the beginning, with what may still be good: the job has perhaps become another one."""
    estimates = Estimates(
        variance=state.estimates.variance,
        blocks=MIN_BASELINE_BLOCKS - 2,
        power=state.estimates.power,
    )
    return settle_account(state)._replace(
        phase=TunerPhase.LEARN,
        plan=ProbePlan(state.top, 1),
        estimates=estimates,
        pairing=Pairing(),
        cusum=Cusum(),
        level_shift=LevelShift(),
        serving=MappingProxyType({}),
        ladder=state.ladder.plain(),
        resume_level=None if state.resume_level is None else state.ladder.base(state.resume_level),
        slack=RankSlack(),
        miss_alarm=None,
        unmatched=0,
        recertifying=False,
        candidate=None,
        certified=None,
        failed_candidates=0,
        deepened=0,
        judged_pairs=0,
        refined_pairs=0,
    )


def settle_account(state: TunerState) -> TunerState:
    """What was lost and saved so far is written down for good."""
    shape = search.fitted_curve(state)
    return state._replace(
        account=close_account(
            state.account,
            lambda level: search.expected_slowdown(state, level, shape)[0],
            lambda level: search.slowdown_bound(state, level, shape),
            saved_energy(state),
        ),
    )


def saved_energy(state: TunerState) -> tuple[float, float, float]:
    """Microjoules since the job last changed: low, likely, high."""

    def at(sign: float, level: int) -> float:
        observation = state.estimates.at(level)
        if not observation.time.n or not observation.power.n:
            return 0.0
        error = 2.0 * math.hypot(
            observation.time.deviation / math.sqrt(observation.time.n),
            observation.power.deviation / math.sqrt(observation.power.n),
        )
        return observation.energy + sign * (error if observation.time.n > 1 else 2 * error)

    low = state.account.saved(lambda level: at(1.0, level), 0.0)
    likely = state.account.saved(lambda level: at(0.0, level), 0.5)
    high = state.account.saved(lambda level: at(-1.0, level), 1.0)
    return min(low, likely), likely, max(likely, high)


def _learning(state: TunerState, observation: Observation) -> TunerState:
    estimates, policy = state.estimates, state.policy
    if not state.account.units and not state.samples.last_end and not state.latencies:
        return state
    if state.ladder.rungs < 1 or policy.max_slowdown <= 0:
        return decline_for_long(
            state, observation.now, explanations.decline_decision(DecisionReason.NO_ROOM)
        )
    why = comparison_impossible(state, observation.now)
    if why is not None:
        return state if state.decision.sentence == why.sentence else state._replace(decision=why)
    if estimates.blocks < MIN_BASELINE_BLOCKS:
        if state.decision.reason is DecisionReason.BASELINE:
            return state
        return _probing(state, DecisionReason.BASELINE, state.top)
    if estimates.energies < 1:
        more = ", for the energy of its devices is not known"
        return decline_for_long(
            state, observation.now, explanations.decline_decision(DecisionReason.NO_SIGNAL, more)
        )
    needed = pairs_needed(0.5 * state.budget, pair_deviation(state), state.error)
    if needed > _NOISY:
        return decline_for_long(
            state, observation.now, explanations.decline_decision(DecisionReason.TOO_NOISY)
        )
    if not policy.apply:
        if state.decision.reason is DecisionReason.ADVICE:
            return state
        first = state.resume_level or search.start_level(state)
        return state._replace(
            decision=explanations.advice_decision(state, first, max(needed, 12.0))
        )
    if not observation.may_explore:
        return _return_to_original(state, observation)
    if state.resume_level is not None:
        return _begin_certification(
            state._replace(recertifying=True), observation, state.resume_level
        )
    probe_level = search.start_level(state)
    state = state._replace(
        phase=TunerPhase.SCREEN, probe_level=probe_level, wanted_pairs=search.screening_pairs(state)
    )
    return _screening(state, observation)


def _screening(state: TunerState, observation: Observation) -> TunerState:
    level, now = state.probe_level, observation.now
    if state.plan.level == level:
        if not _plan_complete(state):
            return state
        return _probing(_request_level(state, now, state.top, 1), DecisionReason.SCREENING, level)
    if state.estimates.at(level).time.n >= state.wanted_pairs:
        following = search.next_level(state)
        if following is None:
            return _choose(state, observation)
        state = state._replace(probe_level=following, wanted_pairs=search.screening_pairs(state))
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
    return (at_top and not state.samples.waiting) or state.samples.full_blocks >= _LOST_TRACK


def _choose(state: TunerState, observation: Observation) -> TunerState:
    """The way down has ended: what is worth to be proved?"""
    levels = state.estimates.levels
    monotone = _monotone(state)
    if not monotone:
        return decline_for_long(
            state, observation.now, explanations.decline_decision(DecisionReason.NOT_MONOTONE)
        )
    deepest = min(levels)
    seen_there = levels[deepest]
    deviation = pair_deviation(state)
    if abs(seen_there.power.mean) < 0.01 and seen_there.time.mean < 0.01 + deviation:
        return decline_for_long(
            state, observation.now, explanations.decline_decision(DecisionReason.INERT)
        )
    aim = search.certifiable_slowdown(state, search.first_pairs(state))
    level = search.candidate(state, aim)
    if level is None:
        return decline_for_long(
            state, observation.now, explanations.decline_decision(DecisionReason.NO_SAVING)
        )
    return _begin_certification(state, observation, level)


def _monotone(state: TunerState) -> bool:
    """Whether no lower level was surely faster than a higher one."""
    ordered = sorted(state.estimates.levels.items(), reverse=True)
    deviation = pair_deviation(state)
    for at, (_, high) in enumerate(ordered):
        for _, low in ordered[at + 1 :]:
            error = deviation * math.sqrt(1 / high.time.n + 1 / low.time.n)
            if high.time.mean - low.time.mean > 0.02 + 3 * error:
                return False
    return True


def _begin_certification(state: TunerState, observation: Observation, level: int) -> TunerState:
    state = state._replace(
        phase=TunerPhase.PROVE,
        candidate=level,
        resume_level=None,
        judged_pairs=state.estimates.at(level).time.n,
        recertifying=state.recertifying and state.candidate is None,
        cusum=Cusum(),
        miss_alarm=None,
        pairing=Pairing(present=state.pairing.present),
    )
    return _alternate(state, observation, level)


def _alternate(state: TunerState, observation: Observation, level: int) -> TunerState:
    """A level against the original, as much of the level as the account allows."""
    if state.plan.level != state.top:
        if state.plan.level == level and not _plan_complete(state):
            return _certifying(state)
        return _certifying(
            _request_level(state, observation.now, state.top, search.free_blocks(state))
        )
    if not _plan_complete(state):
        return _certifying(state)
    lasts = block_time(state)
    state, extra = random_choice(state, 2)
    # Until something is certified that is to come soon; later only what it costs matters.
    for blocks in (6, 4, 2) if state.certified is None else (14, 8, 4, 2):
        if affordable(state, level, (blocks + 2) * lasts, 0.85):
            return _certifying(_request_level(state, observation.now, level, blocks + extra))
    return _certifying(state)


def _certifying(state: TunerState) -> TunerState:
    level = state.chosen
    pairs = state.estimates.at(level).time.n
    reason = DecisionReason.RECERTIFYING if state.recertifying else DecisionReason.CERTIFYING
    shown = state.decision
    if (
        shown.reason is reason
        and shown.caps == state.ladder.caps(state.plan.level)
        and shown.shown.get("pairs") == pairs
    ):
        return state
    return _probing(state, reason, level)


def _proving(state: TunerState, observation: Observation) -> TunerState:
    level = state.chosen
    time = state.estimates.at(level).time
    if state.cusum.alarmed:
        return _release_over_budget(state, observation)
    if latency_missed(state):
        return release_and_pause(state, observation.now, DecisionReason.TAIL)
    if rank_balancing.slack_outdated(state):
        return _equalize_ranks(state, observation)
    if time.n == state.judged_pairs:
        return _alternate(state, observation, level)
    state = state._replace(judged_pairs=time.n)
    sure = time.n >= state.policy.least_pairs and time.upper(state.error) <= state.budget
    if sure and latency_holds(state, level) and rank_balancing.step_time_certified(state, level):
        return _certify(state, observation, level)
    if time.n >= 6:
        mean, error = search.expected_slowdown(state, level)
        # Few pairs may have been unlucky: the benefit of the doubt is one standard error.
        needed = pairs_needed(state.budget - mean + error, time.deviation, state.error)
        if needed > max(1.5 * time.n, 56) or (sure and time.n >= _TAILS):
            return _next_candidate(state, observation)
    return _alternate(state, observation, level)


def _certify(state: TunerState, observation: Observation, level: int) -> TunerState:
    found = state.estimates.at(level)
    value = search.objective_value(state, found.time.mean, found.power.mean)
    doubt = math.hypot(found.time.deviation, found.power.deviation) / math.sqrt(found.time.n)
    # Nothing is held that may save nothing.
    if value + 2 * doubt > -0.001 or not rank_balancing.saves_energy(state, level):
        return _fall_back(state, observation, DecisionReason.NO_SAVING)
    state = state._replace(
        phase=TunerPhase.HOLD,
        certified=level,
        refined_pairs=found.time.n,
        retries=0,
        committed=state.committed if state.committed is not None else observation.now - state.begun,
    )
    return _holding(state, observation)


def _next_candidate(state: TunerState, observation: Observation) -> TunerState:
    """The candidate will not do: a higher one, or the one that did before."""
    level = state.chosen
    state = state._replace(failed_candidates=state.failed_candidates + 1)
    following = None
    if state.certified is None and state.failed_candidates < MAX_CANDIDATES:
        aim = search.certifiable_slowdown(state, max(search.first_pairs(state), state.judged_pairs))
        above = level + max(state.ladder.step, round(0.012 * level)) - state.ladder.step
        following = search.candidate(state, aim, above)
    if following is None:
        return _fall_back(state, observation, DecisionReason.TOO_NOISY)
    return _begin_certification(state, observation, following)


def _fall_back(state: TunerState, observation: Observation, reason: DecisionReason) -> TunerState:
    """To the level that was certified before, if there is one."""
    if state.certified is None:
        return decline_for_long(state, observation.now, explanations.decline_decision(reason))
    state = state._replace(
        phase=TunerPhase.HOLD,
        candidate=state.certified,
        refined_pairs=max(state.estimates.at(state.certified).time.n, state.refined_pairs),
        cusum=Cusum(),
        pairing=Pairing(),
    )
    return _holding(state, observation)


def _release_over_budget(state: TunerState, observation: Observation) -> TunerState:
    """The level is slower than it may be: release it, and look for a higher one after a rest."""
    level = state.chosen
    recent = state.estimates.at(level).pairs[-3:]
    now_costs = max(sum(max(one.busy, one.span) for one in recent) / len(recent), state.budget)
    part = min(0.7 * state.budget / now_costs, 0.9)
    softer = state.ladder.level(state.top - (search.origin(state) - level) * part)
    state = release_and_pause(state, observation.now, DecisionReason.OVER_BUDGET)
    return state._replace(resume_level=softer if softer < state.top else None, certified=None)


# --------------------------------------------------------------------------------------- hold


def _equalize_ranks(state: TunerState, observation: Observation) -> TunerState:
    """All have one cap again: ranks wait otherwise than when some were given less."""
    level = state.chosen
    told = explanations.release_decision(state, DecisionReason.CHANGED, level)
    state = _fall_back(
        state._replace(certified=state.ladder.base(level)), observation, DecisionReason.CHANGED
    )
    return state._replace(decision=told) if state.plan.level == state.top else state


def _holding(state: TunerState, observation: Observation) -> TunerState:
    level = state.chosen
    found = state.estimates.at(level)
    if state.cusum.alarmed or found.time.lower(1 - state.policy.confidence) > state.budget:
        return _release_over_budget(state, observation)
    if latency_missed(state):
        return release_and_pause(state, observation.now, DecisionReason.TAIL)
    if state.level_shift.changed:
        return _restart_for_changed_job(state, observation, level)
    if rank_balancing.slack_outdated(state):
        return _equalize_ranks(state, observation)
    if observation.may_explore:
        deeper = _lower_candidate(state)
        if deeper is not None:
            state = state._replace(refined_pairs=found.time.n, deepened=state.deepened + 1)
            return _begin_certification(state, observation, deeper)
        lowered = rank_balancing.lower_waiting_ranks(state)
        if lowered is not None and lowered.slack.lowered is not None:
            return _begin_certification(lowered, observation, lowered.slack.lowered)
    if state.plan.level not in (level, state.top):
        state = _request_level(state, observation.now, state.top, search.free_blocks(state))
        return _probing(state, DecisionReason.SENTINEL, level)
    if state.plan.level != level:
        if not _plan_complete(state):
            return state
        state, extra = random_choice(state, 4)
        state = _request_level(state, observation.now, level, _hold_blocks(state) + extra)
        return state._replace(decision=explanations.hold_decision(state, level, found))
    suspected = (
        state.level_shift.suspected or state.cusum.suspicious
    ) and state.samples.full_blocks >= 3
    if _plan_complete(state) or (suspected and state.samples.level == level):
        state = _request_level(state, observation.now, state.top, search.free_blocks(state))
        return _probing(state, DecisionReason.SENTINEL, level)
    if state.decision.move is Move.HOLD and state.decision.shown.get("pairs") == found.time.n:
        return state
    return state._replace(decision=explanations.hold_decision(state, level, found))


def _hold_blocks(state: TunerState) -> int:
    """Blocks until the next comparison: the fewer, the less sure the level is."""
    level = state.chosen
    if state.cusum.suspicious or state.level_shift.suspected:
        return 3
    time = state.estimates.at(level).time
    room = (state.budget - time.upper(state.error)) / state.budget
    return 40 if room > 0.03 and time.n >= 16 else 24


def _lower_candidate(state: TunerState) -> int | None:
    """A lower level that is worth to be proved, now that more is known."""
    level = state.certified
    if level is None or state.failed_candidates >= MAX_CANDIDATES or level <= state.ladder.bottom:
        return None
    if level in state.ladder.lowered:
        return None
    time = state.estimates.at(level).time
    if time.n < state.refined_pairs + _CONSIDERED or state.deepened >= _DEEPER:
        return None
    if state.cusum.suspicious or state.level_shift.suspected:
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


def _restart_for_changed_job(state: TunerState, observation: Observation, level: int) -> TunerState:
    """The job is another one: nothing that was shown of it holds, so it is shown again."""
    level = state.ladder.base(level)
    state = relearn(state._replace(resume_level=level), observation.now)
    state = _request_level(state._replace(plan=ProbePlan(level, 1)), observation.now, state.top, 1)
    return state._replace(
        decision=explanations.release_decision(state, DecisionReason.CHANGED, level),
        resume_level=level,
    )
