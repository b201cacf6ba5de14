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
    account = state.account
    shape = search.fitted_curve(state)
    lost = account.lost(lambda level: search.expected_slowdown(state, level, shape)[0])
    bound = account.bound(lambda level: search.slowdown_bound(state, level, shape))
    held = (
        state.estimates.at(state.candidate)
        if state.phase is TunerPhase.HOLD and state.candidate
        else None
    )
    low, likely, high = phases.saved_energy(state)
    before = account.closed_saved
    metered = bool(account.metered) or any(before)
    return TunerReport(
        exploring=state.phase in (TunerPhase.SCREEN, TunerPhase.PROVE)
        or (
            state.phase is TunerPhase.LEARN and state.estimates.blocks >= phases.MIN_BASELINE_BLOCKS
        ),
        slowdown=account.slowdown(lost) if account.elapsed else None,
        slowdown_bound=account.slowdown(bound) if account.elapsed else None,
        held_slowdown=math.expm1(held.time.mean) if held else None,
        held_bound=math.expm1(held.time.upper(state.error)) if held else None,
        saving=-math.expm1(held.energy) if held else None,
        saved=round(likely + before[1]) if metered else None,
        saved_low=round(low + before[0]) if metered else None,
        saved_high=round(high + before[2]) if metered else None,
        exploration=round(
            account.explored(lambda level: search.expected_slowdown(state, level, shape)[0])
        ),
        pairs=sum(one.time.n for one in state.estimates.levels.values()),
        units=account.units,
        committed=state.committed,
        noise=state.estimates.noise if state.estimates.blocks else None,
        tried=tuple(
            _tested_settings(state, level) for level in sorted(state.estimates.levels, reverse=True)
        ),
        lost=round(lost) if account.elapsed else None,
        allowance=round(allowance(state.policy.max_slowdown, account.elapsed)),
    )


def _tested_settings(state: TunerState, level: int) -> SettingResult:
    seen = state.estimates.at(level)
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
    seen = state.estimates.at(level)
    return CertifiedLevels(
        knob=state.policy.knob,
        level=state.ladder.base(level),
        original=state.top,
        slowdown=math.expm1(seen.time.mean),
        saving=-math.expm1(seen.energy),
        pairs=seen.time.n,
        noise=state.estimates.noise,
        levels=state.ladder.caps(level),
    )
