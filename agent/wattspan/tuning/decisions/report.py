"""Where a tuner stands, in figures, and what is worth to be remembered of it."""

from __future__ import annotations

import math

from wattspan.model import SettingResult
from wattspan.tuning.decisions import phases, search
from wattspan.tuning.decisions.budget import allowance
from wattspan.tuning.decisions.state import TunerPhase, TunerState
from wattspan.tuning.decisions.values import CertifiedLevels, TunerReport


def report(state: TunerState) -> TunerReport:
    """The figures; asking changes nothing."""
    spending = state.spending
    shape = search.fitted_curve(state)
    lost = spending.lost(lambda level: search.expected_slowdown(state, level, shape)[0])
    bound = spending.bound(lambda level: search.slowdown_bound(state, level, shape))
    held = (
        state.known.at(state.candidate)
        if state.stage is TunerPhase.HOLD and state.candidate
        else None
    )
    low, likely, high = phases.saved_energy(state)
    before = spending.closed_saved
    metered = bool(spending.metered) or any(before)
    return TunerReport(
        exploring=state.stage in (TunerPhase.SCREEN, TunerPhase.PROVE)
        or (state.stage is TunerPhase.LEARN and state.known.blocks >= phases.MIN_BASELINE_BLOCKS),
        slowdown=spending.slowdown(lost) if spending.elapsed else None,
        slowdown_bound=spending.slowdown(bound) if spending.elapsed else None,
        held_slowdown=math.expm1(held.time.mean) if held else None,
        held_bound=math.expm1(held.time.upper(state.error)) if held else None,
        saving=-math.expm1(held.energy) if held else None,
        saved=round(likely + before[1]) if metered else None,
        saved_low=round(low + before[0]) if metered else None,
        saved_high=round(high + before[2]) if metered else None,
        exploration=round(
            spending.explored(lambda level: search.expected_slowdown(state, level, shape)[0])
        ),
        pairs=sum(one.time.n for one in state.known.levels.values()),
        units=spending.units,
        committed=state.committed,
        noise=state.known.noise if state.known.blocks else None,
        tried=tuple(
            _tested_settings(state, level) for level in sorted(state.known.levels, reverse=True)
        ),
        lost=round(lost) if spending.elapsed else None,
        allowance=round(allowance(state.policy.max_slowdown, spending.elapsed)),
    )


def _tested_settings(state: TunerState, level: int) -> SettingResult:
    seen = state.known.at(level)
    bound = seen.time.upper(state.error)
    return SettingResult(
        level,
        math.expm1(seen.time.mean),
        math.expm1(bound) if bound < 5 else None,
        -math.expm1(seen.energy) if seen.power.n else None,
        seen.time.n,
        level == state.certified,
    )


def certified_levels(state: TunerState) -> CertifiedLevels | None:
    """What was certified, if anything was."""
    level = state.certified
    if level is None:
        return None
    seen = state.known.at(level)
    return CertifiedLevels(
        knob=state.policy.knob,
        level=state.ladder.base(level),
        original=state.top,
        slowdown=math.expm1(seen.time.mean),
        saving=-math.expm1(seen.energy),
        pairs=seen.time.n,
        noise=state.known.noise,
        levels=state.ladder.caps(level),
    )
