"""What ends every cap at once, whatever the tuner is about."""

from __future__ import annotations

from wattspan.model import SECOND, Decision, Reason
from wattspan.tuning import sentences
from wattspan.tuning.state import Plan, Stage, State
from wattspan.tuning.values import Observation

OBEYED = 30 * SECOND
"""How long the device may take until what was asked for is in force."""

SILENT = 60 * SECOND
_SILENT_UNITS = 20
_HOUR = 3600 * SECOND
_MOST = 6  # doublings of the dwell


def guard(state: State, seen: Observation) -> State | None:
    """The state after what comes from outside; None if nothing speaks against going on."""
    if state.stage is Stage.ENDED:
        return state
    if seen.ended:
        return _end(state)
    if seen.vetoes:
        return _refuse(state, seen.now, min(seen.vetoes))
    capped = state.plan.level != state.top
    if capped and seen.now - max(state.heard, state.asked_at) > _patience(state):
        return rest(state, seen.now, Reason.PAUSED, until=seen.now)
    # A cap that lapsed was in force for long: it is asked for again, and has that long anew.
    since = max(state.asked_at, state.tape.stretches[-1].since)
    if capped and state.tape.level is None and seen.now - since > OBEYED:
        return let_go(state, seen.now, Reason.FOREIGN_WRITER)
    return None


def _patience(state: State) -> int:
    unit = state.spending.elapsed // max(state.spending.units, 1)
    return SILENT + _SILENT_UNITS * unit


def _end(state: State) -> State:
    level = state.plan.level
    if state.committed is None and state.spending.units < state.policy.least_units:
        decision = sentences.decline(Reason.TOO_SHORT)
    else:
        decision = sentences.release(state, Reason.ENDED, level)
    return state._replace(stage=Stage.ENDED, plan=Plan(state.top, 1), decision=decision)


def _refuse(state: State, now: int, reason: Reason) -> State:
    if state.plan.level != state.top:
        return let_go(state, now, reason)
    if state.decision.reason is reason:
        return state
    return state._replace(decision=sentences.decline(reason))


def let_go(state: State, now: int, reason: Reason) -> State:
    """Release, and rest the longer the more often that was so in the last hour."""
    releases = (*(at for at in state.releases if now - at < _HOUR), now)
    wait = state.policy.dwell << min(len(releases) - 1, _MOST)
    return rest(state._replace(releases=releases[-8:]), now, reason, until=now + wait)


def rest(state: State, now: int, reason: Reason, until: int) -> State:
    """Uncapped until then; what was held is proved anew afterwards."""
    level = state.plan.level
    held = state.held
    decision = sentences.release(state, reason, level if level != state.top else held or level)
    return state._replace(
        stage=Stage.REST,
        plan=Plan(state.top, 1),
        before=level,
        asked_at=now,
        decision=decision,
        until=until,
        resume=state.certified if state.certified is not None else state.resume,
    )


def give_up(state: State, now: int, decision: Decision) -> State:
    """No more search for a while: the reason will hardly be gone soon."""
    wait = state.policy.dwell << min(state.retries + 1, _MOST)
    return state._replace(
        stage=Stage.REST,
        plan=Plan(state.top, 1),
        before=state.plan.level,
        asked_at=now,
        decision=decision,
        until=now + wait,
        retries=state.retries + 1,
        resume=None,
        candidate=None,
        certified=None,
    )
