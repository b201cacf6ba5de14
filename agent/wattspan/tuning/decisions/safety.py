"""Conditions that end every cap at once, and the latency of requests."""

from __future__ import annotations

from dataclasses import replace

from wattspan.model import SECOND, Decision, DecisionReason
from wattspan.tuning.decisions.blocks import Block
from wattspan.tuning.decisions.report import decline_decision, release_decision
from wattspan.tuning.decisions.search import ProbePlan, TunerPhase, TunerState
from wattspan.tuning.decisions.sequential_test import LevelShift, MissAlarm
from wattspan.tuning.decisions.serving import ServingComparison, latency_limit, units_to_learn
from wattspan.tuning.decisions.values import Observation, WorkloadKind

ENFORCEMENT_TIMEOUT = 30 * SECOND
"""Time that a device may take until a requested level is in force."""

SIGNAL_TIMEOUT = 60 * SECOND
_SIGNAL_TIMEOUT_UNITS = 20
_HOUR = 3600 * SECOND
_MAX_PAUSE_DOUBLINGS = 6

_MAX_BLOCK_TIME = 600 * SECOND
"""Settings are not compared where a block of requests takes longer."""

_MAX_UNMATCHED = 12
"""Comparisons in a row with different loads after which the search ends."""

_SAMPLE_FACTOR = 4
"""Requests for a reliable percentile, relative to those that just determine it."""


def check_safety(state: TunerState, observation: Observation) -> TunerState | None:
    """The state after an external reason to stop; None to continue."""
    if state.phase is TunerPhase.ENDED:
        return state
    if observation.ended:
        return _end(state)
    now = observation.now
    if observation.vetoes:
        return _refuse(state, now, min(observation.vetoes))
    if state.level == state.top:
        return None
    if any(_is_silent(one, now) for one in (state, *state.tenants)):
        return _pause(state, now, DecisionReason.PAUSED, rest_until=now)
    # A cap that expired after a long time in force is requested again, with a new timeout.
    since = max(state.search.requested_at, state.samples.periods[-1].since)
    if state.samples.level is None and now - since > ENFORCEMENT_TIMEOUT:
        return release_and_pause(state, now, DecisionReason.FOREIGN_WRITER)
    return None


def _is_silent(state: TunerState, now: int) -> bool:
    """True if no unit has ended for a long time at a setting below the original."""
    unit = state.account.elapsed // max(state.account.units, 1)
    timeout = SIGNAL_TIMEOUT + _SIGNAL_TIMEOUT_UNITS * unit
    return now - state.last_unit_end > timeout


def _end(state: TunerState) -> TunerState:
    if state.committed is None and state.account.units < state.policy.least_units:
        decision = decline_decision(DecisionReason.TOO_SHORT)
    else:
        decision = release_decision(state, DecisionReason.ENDED, state.level)
    ended = state.searching(phase=TunerPhase.ENDED, plan=ProbePlan(state.top, 1))
    return ended._replace(decision=decision)


def _refuse(state: TunerState, now: int, reason: DecisionReason) -> TunerState:
    if state.level != state.top:
        return release_and_pause(state, now, reason)
    if state.decision.reason is reason:
        return state
    return state._replace(decision=decline_decision(reason))


def release_and_pause(state: TunerState, now: int, reason: DecisionReason) -> TunerState:
    """Release, and pause; the pause doubles with each release within an hour."""
    releases = (*(one for one in state.search.releases if now - one < _HOUR), now)
    pause = state.policy.dwell << min(len(releases) - 1, _MAX_PAUSE_DOUBLINGS)
    return _pause(state.searching(releases=releases[-8:]), now, reason, rest_until=now + pause)


def _pause(state: TunerState, now: int, reason: DecisionReason, rest_until: int) -> TunerState:
    """Release until ``rest_until``; a certified level is certified again afterwards."""
    level, search = state.level, state.search
    released = level if level != state.top else state.held or level
    decision = release_decision(state, reason, released)
    resumed = search.certified if search.certified is not None else search.resume_level
    return _rest(state.searching(resume_level=resumed), now, rest_until, decision)


def decline_and_pause(
    state: TunerState, now: int, reason: DecisionReason, cause: str = ""
) -> TunerState:
    """End the search for a long time, because the reason will hardly change soon."""
    retries = state.search.retries + 1
    pause = state.policy.dwell << min(retries, _MAX_PAUSE_DOUBLINGS)
    failed = state.searching(retries=retries, resume_level=None, candidate=None, certified=None)
    return _rest(failed, now, now + pause, decline_decision(reason, cause))


def _rest(state: TunerState, now: int, until: int, decision: Decision) -> TunerState:
    return state._replace(decision=decision).searching(
        phase=TunerPhase.REST,
        plan=ProbePlan(state.top, 1),
        previous_level=state.level,
        requested_at=now,
        rest_until=until,
    )


# ----------------------------------------------------------------------------------- requests


def comparison_impossible(state: TunerState, now: int) -> tuple[DecisionReason, str] | None:
    """The reason why the arriving requests do not permit to compare settings, if any."""
    if state.policy.kind is WorkloadKind.STEPS:
        return None
    compares = state.phase in (TunerPhase.SCREEN, TunerPhase.PROVE)
    if state.evidence.unmatched >= _MAX_UNMATCHED and compares:
        return DecisionReason.TOO_NOISY, "the load is hardly ever the same twice"
    elapsed, units = state.account.elapsed, state.account.units
    if state.latency_limit is None:
        elapsed, units = now - state.begun, len(state.latencies)
    if elapsed >= _MAX_BLOCK_TIME and units * _MAX_BLOCK_TIME < state.policy.block_units * elapsed:
        return DecisionReason.TOO_NOISY, "too few requests arrive to compare settings"
    return None


def latency_holds(state: TunerState, level: int) -> bool:
    """True if the latency certainly holds at a level; always for jobs without requests."""
    return state.policy.kind is WorkloadKind.STEPS or _serving(state, level).passes(state.policy)


def latency_missed(state: TunerState) -> bool:
    """True if too many requests were late at the held level."""
    if state.policy.kind is WorkloadKind.STEPS or state.held is None:
        return False
    if state.evidence.miss_alarm is not None and state.evidence.miss_alarm.alarmed:
        return True
    return _serving(state, state.held).fails(state.policy)


def _serving(state: TunerState, level: int) -> ServingComparison:
    return state.evidence.serving.get(level, ServingComparison())


def learn_latency_limit(state: TunerState, observation: Observation) -> TunerState:
    """Learn the latency that must hold; afterwards count misses while a level is held."""
    units = observation.units
    if not units:
        return state
    if state.latency_limit is None:
        state = state._replace(last_unit_end=max(unit.end for unit in units))
        latencies = state.latencies + tuple(units)
        if len(latencies) < _SAMPLE_FACTOR * units_to_learn(state.policy):
            return state._replace(latencies=latencies)
        return state._replace(latencies=(), latency_limit=latency_limit(state.policy, latencies))
    held = state.held is not None and state.samples.level == state.level != state.top
    if state.evidence.miss_alarm is None or not held:
        return state
    late = sum(unit.end - unit.start > state.latency_limit for unit in units)
    return state.knowing(miss_alarm=state.evidence.miss_alarm.add(len(units), late))


def compare_latency(state: TunerState, block: Block) -> TunerState:
    """Add a block of requests to the latency comparison of the level in question."""
    level = state.held if state.held is not None else state.search.probe_level
    if not level or block.level not in (level, state.top):
        return state
    serving = _serving(state, level).add(block, block.level != state.top)
    alarm = state.evidence.miss_alarm
    if alarm is None or state.held is None:
        alarm = MissAlarm(serving.allowed(state.policy))
    return state.knowing(serving={**state.evidence.serving, level: serving}, miss_alarm=alarm)


def shifted_load(shift: LevelShift, state: TunerState, block: Block) -> LevelShift:
    """As LevelShift.add, for requests: whether the level was compared at such a load.

    Time and power per request change with the load, which is the clients' choice. Only the effect
    of higher loads than compared is unknown.
    """
    serving = state.evidence.serving.get(block.level)
    covered = serving is not None and serving.covers(block)
    if shift.level != block.level:
        shift = LevelShift(block.level)
    return replace(shift, shifted=0 if covered else shift.shifted + 1, blocks=shift.blocks + 1)
