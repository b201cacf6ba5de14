"""What ends every cap at once, whatever the tuner is about.

Requests: the latency that must hold, and whether it does.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from wattspan.model import SECOND, Decision, DecisionReason
from wattspan.tuning.decisions import explanations
from wattspan.tuning.decisions.blocks import Block, LevelTime, SampleBuffer, add_energy
from wattspan.tuning.decisions.drift import LevelShift
from wattspan.tuning.decisions.serving import (
    ServingComparison,
    add_requests,
    block_load,
    latency_limit,
    units_to_learn,
)
from wattspan.tuning.decisions.state import ProbePlan, TunerPhase, TunerState
from wattspan.tuning.decisions.values import Observation, WorkloadKind

ENFORCEMENT_TIMEOUT = 30 * SECOND
"""How long the device may take until what was asked for is in force."""

SIGNAL_TIMEOUT = 60 * SECOND
_SIGNAL_TIMEOUT_UNITS = 20
_HOUR = 3600 * SECOND
_MAX_REST_DOUBLINGS = 6  # doublings of the dwell


def check_safety(state: TunerState, observation: Observation) -> TunerState | None:
    """The state after what comes from outside; None if nothing speaks against going on."""
    if state.phase is TunerPhase.ENDED:
        return state
    if observation.ended:
        return _end_cap(state)
    if observation.vetoes:
        return _refuse(state, observation.now, min(observation.vetoes))
    capped = state.plan.level != state.top
    if capped and observation.now - max(state.last_unit_end, state.requested_at) > _signal_timeout(
        state
    ):
        return pause_until(
            state, observation.now, DecisionReason.PAUSED, rest_until=observation.now
        )
    # A cap that lapsed was in force for long: it is asked for again, and has that long anew.
    since = max(state.requested_at, state.samples.periods[-1].since)
    if capped and state.samples.level is None and observation.now - since > ENFORCEMENT_TIMEOUT:
        return release_and_pause(state, observation.now, DecisionReason.FOREIGN_WRITER)
    return None


def _signal_timeout(state: TunerState) -> int:
    unit = state.account.elapsed // max(state.account.units, 1)
    return SIGNAL_TIMEOUT + _SIGNAL_TIMEOUT_UNITS * unit


def _end_cap(state: TunerState) -> TunerState:
    level = state.plan.level
    if state.committed is None and state.account.units < state.policy.least_units:
        decision = explanations.decline_decision(DecisionReason.TOO_SHORT)
    else:
        decision = explanations.release_decision(state, DecisionReason.ENDED, level)
    return state._replace(phase=TunerPhase.ENDED, plan=ProbePlan(state.top, 1), decision=decision)


def _refuse(state: TunerState, now: int, reason: DecisionReason) -> TunerState:
    if state.plan.level != state.top:
        return release_and_pause(state, now, reason)
    if state.decision.reason is reason:
        return state
    return state._replace(decision=explanations.decline_decision(reason))


def release_and_pause(state: TunerState, now: int, reason: DecisionReason) -> TunerState:
    """Release, and rest the longer the more often that was so in the last hour."""
    releases = (*(at for at in state.releases if now - at < _HOUR), now)
    wait = state.policy.dwell << min(len(releases) - 1, _MAX_REST_DOUBLINGS)
    return pause_until(state._replace(releases=releases[-8:]), now, reason, rest_until=now + wait)


def pause_until(state: TunerState, now: int, reason: DecisionReason, rest_until: int) -> TunerState:
    """Uncapped until then; what was held is proved anew afterwards."""
    level = state.plan.level
    held = state.held
    decision = explanations.release_decision(
        state, reason, level if level != state.top else held or level
    )
    return state._replace(
        phase=TunerPhase.REST,
        plan=ProbePlan(state.top, 1),
        previous_level=level,
        requested_at=now,
        decision=decision,
        rest_until=rest_until,
        resume_level=state.certified if state.certified is not None else state.resume_level,
    )


def decline_for_long(state: TunerState, now: int, decision: Decision) -> TunerState:
    """No more search for a while: the reason will hardly be gone soon."""
    wait = state.policy.dwell << min(state.retries + 1, _MAX_REST_DOUBLINGS)
    return state._replace(
        phase=TunerPhase.REST,
        plan=ProbePlan(state.top, 1),
        previous_level=state.plan.level,
        requested_at=now,
        decision=decision,
        rest_until=now + wait,
        retries=state.retries + 1,
        resume_level=None,
        candidate=None,
        certified=None,
    )


_RELIABLE_SAMPLE_FACTOR = (
    4  # times as many requests as just show a percentile, for one that is to be relied on
)


_MAX_BLOCK_TIME = 600 * SECOND
"""Where it takes longer until there are requests enough for one block, nothing is compared."""

_UNMATCHED = 12
"""So many comparisons in a row of loads that differ: it will not be otherwise soon."""


def comparison_impossible(state: TunerState, now: int) -> Decision | None:
    """Why settings cannot be compared as requests come; None where they can, or are no requests."""
    if state.policy.kind is WorkloadKind.STEPS:
        return None
    if state.unmatched >= _UNMATCHED and state.phase in (TunerPhase.SCREEN, TunerPhase.PROVE):
        more = ", for the load is hardly ever the same twice"
        return explanations.decline_decision(DecisionReason.TOO_NOISY, more)
    lasted, came = state.account.elapsed, state.account.units
    if state.limit is None:
        lasted, came = now - state.begun, len(state.latencies)
    if lasted >= _MAX_BLOCK_TIME and came * _MAX_BLOCK_TIME < state.policy.block_units * lasted:
        return explanations.decline_decision(
            DecisionReason.TOO_NOISY, ", for too few requests come"
        )
    return None


def update_load_shift(level_shift: LevelShift, state: TunerState, block: Block) -> LevelShift:
    """As watch.look, of a setting that is held under requests: was it judged at such a load?

    Time and power per request change with the load, which is the clients' affair; only what
    happens at a higher load than was compared nobody knows.
    """
    judged_pairs = state.serving.get(block.level)
    estimates = judged_pairs is not None and judged_pairs.covers(block_load(block))
    if level_shift.level != block.level:
        level_shift = LevelShift(block.level)
    return replace(
        level_shift,
        shifted=0 if estimates else level_shift.shifted + 1,
        blocks=level_shift.blocks + 1,
    )


def learn_latency_limit(state: TunerState, observation: Observation) -> TunerState:
    """The state with the latency that must hold, once enough requests have shown it.

    While a setting is held every request is counted that takes longer.
    """
    if not observation.units:
        return state
    if state.limit is None:
        state = state._replace(last_unit_end=max(unit.end for unit in observation.units))
        latencies = state.latencies + tuple(observation.units)
        if len(latencies) < _RELIABLE_SAMPLE_FACTOR * units_to_learn(state.policy):
            return state._replace(latencies=latencies)
        return state._replace(latencies=(), limit=latency_limit(state.policy, latencies))
    if state.miss_alarm is None or state.samples.level != state.plan.level or state.held is None:
        return state
    if state.plan.level == state.top:
        return state
    late = sum(unit.end - unit.start > state.limit for unit in observation.units)
    return state._replace(miss_alarm=state.miss_alarm.add(len(observation.units), late))


def add_request_units(
    state: TunerState, samples: SampleBuffer, observation: Observation
) -> tuple[SampleBuffer, list[Block], list[LevelTime]]:
    """As blocks.take, of requests."""
    waiting = list(samples.waiting)
    times: list[LevelTime] = []
    if state.limit is not None:
        samples = samples._replace(served_to=samples.served_to or observation.now)
        apart = state.account.elapsed / max(state.account.units, 1)
        samples, told, times = add_requests(
            samples, state.policy, observation.units, observation.now, state.limit, apart
        )
        waiting += told
    samples, blocks = add_energy(samples, waiting, observation.energy, observation.now)
    return samples, blocks, times


def compare_latency(state: TunerState, block: Block) -> TunerState:
    """The state with one more block of requests, for the tail of the level in question."""
    level = state.held if state.held is not None else state.probe_level
    if not level or block.level not in (level, state.top):
        return state
    serving = state.serving.get(level, ServingComparison()).add(
        block_load(block), block.level != state.top
    )
    miss_alarm = state.miss_alarm
    if miss_alarm is None or state.held is None:
        miss_alarm = serving.miss_alarm(state.policy)
    return state._replace(
        serving=MappingProxyType({**state.serving, level: serving}), miss_alarm=miss_alarm
    )


def latency_holds(state: TunerState, level: int) -> bool:
    """Whether the latency surely holds at a level; of jobs without requests it always does."""
    if state.policy.kind is WorkloadKind.STEPS:
        return True
    return state.serving.get(level, ServingComparison()).verdict(state.policy).passes


def latency_missed(state: TunerState) -> bool:
    """Whether too many requests were late at the level that is held."""
    if state.policy.kind is WorkloadKind.STEPS or state.held is None:
        return False
    if state.miss_alarm is not None and state.miss_alarm.alarmed:
        return True
    return state.serving.get(state.held, ServingComparison()).verdict(state.policy).fails
