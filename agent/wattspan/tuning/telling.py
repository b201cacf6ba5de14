"""Where a tuner stands, in figures, and what is worth to be remembered of it."""

from __future__ import annotations

import math

from wattspan.model import Tried
from wattspan.tuning import course, search
from wattspan.tuning.spending import allowance
from wattspan.tuning.state import Stage, State
from wattspan.tuning.values import Remembered, Report


def report(state: State) -> Report:
    """The figures; asking changes nothing."""
    spending = state.spending
    shape = search.curve(state)
    lost = spending.lost(lambda level: search.expected(state, level, shape)[0])
    bound = spending.bound(lambda level: search.worst(state, level, shape))
    held = (
        state.known.at(state.candidate) if state.stage is Stage.HOLD and state.candidate else None
    )
    low, likely, high = course.saved(state)
    before = spending.closed_saved
    metered = bool(spending.metered) or any(before)
    return Report(
        exploring=state.stage in (Stage.SCREEN, Stage.PROVE)
        or (state.stage is Stage.LEARN and state.known.blocks >= course.LEARNED),
        slowdown=spending.slowdown(lost) if spending.elapsed else None,
        slowdown_bound=spending.slowdown(bound) if spending.elapsed else None,
        held_slowdown=math.expm1(held.time.mean) if held else None,
        held_bound=math.expm1(held.time.upper(state.error)) if held else None,
        saving=-math.expm1(held.energy) if held else None,
        saved=round(likely + before[1]) if metered else None,
        saved_low=round(low + before[0]) if metered else None,
        saved_high=round(high + before[2]) if metered else None,
        exploration=round(spending.explored(lambda level: search.expected(state, level, shape)[0])),
        pairs=sum(one.time.n for one in state.known.levels.values()),
        units=spending.units,
        committed=state.committed,
        noise=state.known.noise if state.known.blocks else None,
        tried=tuple(_tried(state, level) for level in sorted(state.known.levels, reverse=True)),
        lost=round(lost) if spending.elapsed else None,
        allowance=round(allowance(state.policy.max_slowdown, spending.elapsed)),
    )


def _tried(state: State, level: int) -> Tried:
    seen = state.known.at(level)
    bound = seen.time.upper(state.error)
    return Tried(
        level,
        math.expm1(seen.time.mean),
        math.expm1(bound) if bound < 5 else None,
        -math.expm1(seen.energy) if seen.power.n else None,
        seen.time.n,
        level == state.certified,
    )


def remember(state: State) -> Remembered | None:
    """What was certified, if anything was."""
    level = state.certified
    if level is None:
        return None
    seen = state.known.at(level)
    return Remembered(
        knob=state.policy.knob,
        level=state.ladder.base(level),
        original=state.top,
        slowdown=math.expm1(seen.time.mean),
        saving=-math.expm1(seen.energy),
        pairs=seen.time.n,
        noise=state.known.noise,
        levels=state.ladder.caps(level),
    )
