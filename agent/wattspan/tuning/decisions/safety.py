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


def check_safety(state: TunerState, seen: Observation) -> TunerState | None:
    """The state after what comes from outside; None if nothing speaks against going on."""
    if state.stage is TunerPhase.ENDED:
        return state
    if seen.ended:
        return _end_cap(state)
    if seen.vetoes:
        return _refuse(state, seen.now, min(seen.vetoes))
    capped = state.plan.level != state.top
    if capped and seen.now - max(state.heard, state.asked_at) > _signal_timeout(state):
        return pause_until(state, seen.now, DecisionReason.PAUSED, until=seen.now)
    # A cap that lapsed was in force for long: it is asked for again, and has that long anew.
    since = max(state.asked_at, state.tape.stretches[-1].since)
    if capped and state.tape.level is None and seen.now - since > ENFORCEMENT_TIMEOUT:
        return release_and_pause(state, seen.now, DecisionReason.FOREIGN_WRITER)
    return None


def _signal_timeout(state: TunerState) -> int:
    unit = state.spending.elapsed // max(state.spending.units, 1)
    return SIGNAL_TIMEOUT + _SIGNAL_TIMEOUT_UNITS * unit


def _end_cap(state: TunerState) -> TunerState:
    level = state.plan.level
    if state.committed is None and state.spending.units < state.policy.least_units:
        decision = explanations.decline_decision(DecisionReason.TOO_SHORT)
    else:
        decision = explanations.release_decision(state, DecisionReason.ENDED, level)
    return state._replace(stage=TunerPhase.ENDED, plan=ProbePlan(state.top, 1), decision=decision)


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
    return pause_until(state._replace(releases=releases[-8:]), now, reason, until=now + wait)


def pause_until(state: TunerState, now: int, reason: DecisionReason, until: int) -> TunerState:
    """Uncapped until then; what was held is proved anew afterwards."""
    level = state.plan.level
    held = state.held
    decision = explanations.release_decision(
        state, reason, level if level != state.top else held or level
    )
    return state._replace(
        stage=TunerPhase.REST,
        plan=ProbePlan(state.top, 1),
        before=level,
        asked_at=now,
        decision=decision,
        until=until,
        resume=state.certified if state.certified is not None else state.resume,
    )


def decline_for_long(state: TunerState, now: int, decision: Decision) -> TunerState:
    """No more search for a while: the reason will hardly be gone soon."""
    wait = state.policy.dwell << min(state.retries + 1, _MAX_REST_DOUBLINGS)
    return state._replace(
        stage=TunerPhase.REST,
        plan=ProbePlan(state.top, 1),
        before=state.plan.level,
        asked_at=now,
        decision=decision,
        until=now + wait,
        retries=state.retries + 1,
        resume=None,
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
    if state.unmatched >= _UNMATCHED and state.stage in (TunerPhase.SCREEN, TunerPhase.PROVE):
        more = ", for the load is hardly ever the same twice"
        return explanations.decline_decision(DecisionReason.TOO_NOISY, more)
    lasted, came = state.spending.elapsed, state.spending.units
    if state.limit is None:
        lasted, came = now - state.begun, len(state.latencies)
    if lasted >= _MAX_BLOCK_TIME and came * _MAX_BLOCK_TIME < state.policy.block_units * lasted:
        return explanations.decline_decision(
            DecisionReason.TOO_NOISY, ", for too few requests come"
        )
    return None


def update_load_shift(raw: LevelShift, state: TunerState, block: Block) -> LevelShift:
    """As watch.look, of a setting that is held under requests: was it judged at such a load?

    Time and power per request change with the load, which is the clients' affair; only what
    happens at a higher load than was compared nobody knows.
    """
    judged = state.serving.get(block.level)
    known = judged is not None and judged.covers(block_load(block))
    if raw.level != block.level:
        raw = LevelShift(block.level)
    return replace(raw, shifted=0 if known else raw.shifted + 1, blocks=raw.blocks + 1)


def learn_latency_limit(state: TunerState, seen: Observation) -> TunerState:
    """The state with the latency that must hold, once enough requests have shown it.

    While a setting is held every request is counted that takes longer.
    """
    if not seen.units:
        return state
    if state.limit is None:
        state = state._replace(heard=max(unit.end for unit in seen.units))
        latencies = state.latencies + tuple(seen.units)
        if len(latencies) < _RELIABLE_SAMPLE_FACTOR * units_to_learn(state.policy):
            return state._replace(latencies=latencies)
        return state._replace(latencies=(), limit=latency_limit(state.policy, latencies))
    if state.alarm is None or state.tape.level != state.plan.level or state.held is None:
        return state
    if state.plan.level == state.top:
        return state
    late = sum(unit.end - unit.start > state.limit for unit in seen.units)
    return state._replace(alarm=state.alarm.add(len(seen.units), late))


def add_request_units(
    state: TunerState, tape: SampleBuffer, seen: Observation
) -> tuple[SampleBuffer, list[Block], list[LevelTime]]:
    """As blocks.take, of requests."""
    waiting = list(tape.waiting)
    times: list[LevelTime] = []
    if state.limit is not None:
        tape = tape._replace(served_to=tape.served_to or seen.now)
        apart = state.spending.elapsed / max(state.spending.units, 1)
        tape, told, times = add_requests(
            tape, state.policy, seen.units, seen.now, state.limit, apart
        )
        waiting += told
    tape, blocks = add_energy(tape, waiting, seen.energy, seen.now)
    return tape, blocks, times


def compare_latency(state: TunerState, block: Block) -> TunerState:
    """The state with one more block of requests, for the tail of the level in question."""
    level = state.held if state.held is not None else state.probe
    if not level or block.level not in (level, state.top):
        return state
    serving = state.serving.get(level, ServingComparison()).add(
        block_load(block), block.level != state.top
    )
    alarm = state.alarm
    if alarm is None or state.held is None:
        alarm = serving.alarm(state.policy)
    return state._replace(serving=MappingProxyType({**state.serving, level: serving}), alarm=alarm)


def latency_holds(state: TunerState, level: int) -> bool:
    """Whether the latency surely holds at a level; of jobs without requests it always does."""
    if state.policy.kind is WorkloadKind.STEPS:
        return True
    return state.serving.get(level, ServingComparison()).verdict(state.policy).passes


def latency_missed(state: TunerState) -> bool:
    """Whether too many requests were late at the level that is held."""
    if state.policy.kind is WorkloadKind.STEPS or state.held is None:
        return False
    if state.alarm is not None and state.alarm.rings:
        return True
    return state.serving.get(state.held, ServingComparison()).verdict(state.policy).fails
