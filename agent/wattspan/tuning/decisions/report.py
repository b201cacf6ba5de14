"""Reports of a tuner: its figures, its certified setting, and its decisions as sentences."""

from __future__ import annotations

import math

from wattspan.model import (
    Decision,
    DecisionReason,
    Knob,
    Microjoules,
    Move,
    Nanoseconds,
    SettingResult,
    TuningFigures,
)
from wattspan.tuning.decisions import search
from wattspan.tuning.decisions.budget import allowance
from wattspan.tuning.decisions.estimates import LevelEstimate
from wattspan.tuning.decisions.search import TunerPhase, TunerState
from wattspan.tuning.decisions.values import CertifiedLevels


def report(state: TunerState) -> TuningFigures:
    account = state.account
    shape = search.fitted_curve(state)

    def likely_slowdown(level: int) -> float:
        return search.expected_slowdown(state, level, shape)[0]

    lost = account.lost(likely_slowdown)
    bound = account.bound(lambda level: search.slowdown_bound(state, level, shape))
    held = (
        state.estimates.at(state.search.candidate)
        if state.search.phase is TunerPhase.HOLD and state.search.candidate
        else None
    )
    saved = zip(search.saved_energy(state), account.closed_saved, strict=True)
    low, likely, high = (
        Microjoules(round(now + before)) if account.metered else None for now, before in saved
    )
    unit_time = (account.elapsed - lost) / account.units if account.units else None
    watched = unit_time is not None and state.estimates.energies > 0
    return TuningFigures(
        slowdown=account.slowdown(lost) if account.elapsed else None,
        slowdown_bound=account.slowdown(bound) if account.elapsed else None,
        held_slowdown=math.expm1(held.time.mean) if held else None,
        held_bound=math.expm1(held.time.upper(state.error)) if held else None,
        saving=-math.expm1(held.energy) if held else None,
        saved=likely,
        saved_low=low,
        saved_high=high,
        exploration=Nanoseconds(round(account.explored(likely_slowdown))),
        pairs=sum(one.time.n for one in state.estimates.levels.values()),
        units=account.units,
        committed=state.committed,
        tried=tuple(
            _result(state, level) for level in sorted(state.estimates.levels, reverse=True)
        ),
        lost=Nanoseconds(round(lost)) if account.elapsed else None,
        allowance=Nanoseconds(round(allowance(state.policy.max_slowdown, account.elapsed))),
        unit_time=None if unit_time is None else Nanoseconds(round(unit_time)),
        # milliwatts and nanoseconds
        unit_energy=Microjoules(round(state.estimates.power * (unit_time or 0) / 1e6))
        if watched
        else None,
    )


def _result(state: TunerState, level: int) -> SettingResult:
    estimate = state.estimates.at(level)
    return SettingResult(
        level,
        math.expm1(estimate.time.mean),
        _bound(state, estimate),
        -math.expm1(estimate.energy) if estimate.power.n else None,
        estimate.time.n,
        level == state.search.certified,
    )


def _bound(state: TunerState, estimate: LevelEstimate) -> float | None:
    """The upper bound of a level's slowdown; None where it is still meaningless."""
    bound = estimate.time.upper(state.error)
    return math.expm1(bound) if bound < 5 else None


def certified_levels(state: TunerState) -> CertifiedLevels | None:
    """The certified setting, for the next run of the same job."""
    level = state.search.certified
    if level is None:
        return None
    estimate = state.estimates.at(level)
    return CertifiedLevels(
        level=state.search.ladder.base(level),
        original=state.top,
        slowdown=math.expm1(estimate.time.mean),
        saving=-math.expm1(estimate.energy),
        pairs=estimate.time.n,
        noise=state.estimates.noise,
        levels=state.search.ladder.caps(level),
    )


# ------------------------------------------------------------------------------- decisions

CAUSES = {
    DecisionReason.OVER_BUDGET: "the job is probably slower than the budget permits",
    DecisionReason.CHANGED: "the job has changed",
    DecisionReason.PAUSED: "no unit of work has ended for a long time",
    DecisionReason.ENDED: "the job has ended",
    DecisionReason.TAIL: "too many requests exceed the required latency",
    DecisionReason.NO_SIGNAL: "no unit of work was received yet",
    DecisionReason.BAD_WORK: "the attribute that counts the work is missing, zero or negative",
    DecisionReason.TOO_SHORT: "the job ended before tuning could save energy",
    DecisionReason.TOO_NOISY: "certification would cost more than it could save",
    DecisionReason.NOT_MONOTONE: "a lower setting was faster than a higher one",
    DecisionReason.NOT_BINDING: "the job draws less than the lowest permitted cap",
    DecisionReason.INERT: "no permitted setting changes time or power",
    DecisionReason.NO_SAVING: "no setting within the budget saves energy",
    DecisionReason.NO_ROOM: "the budget or the range of the knob leaves no setting to try",
    DecisionReason.BAD_PIPELINE: "the spans of the job are not those of a complete pipeline",
    DecisionReason.STRAGGLER: "a slower data-parallel pipeline permits lower clocks",
    DecisionReason.WAITING: "another job of this host, or another host of this job, explores",
    DecisionReason.FOREIGN_WRITER: "another program sets the device's limits",
    DecisionReason.THROTTLED: "the device throttles itself",
    DecisionReason.SHARED: "another tenant of the device has no units of work or may not be tuned",
    DecisionReason.MIG: "the processes of the device's instances are not all of one declared job",
    DecisionReason.NO_PERMISSION: "the capper has no permission to write limits",
    DecisionReason.NO_CAPPER: "the capper does not answer",
    DecisionReason.LOST_DEVICE: "a device does not answer",
}


def cause_text(reason: DecisionReason) -> str:
    """The reason as a clause."""
    return CAUSES.get(reason, reason.value.replace("_", " "))


def setting_text(state: TunerState, level: int) -> str:
    """``"320 W"``, ``"1410 MHz"``; the lowest setting too where settings differ."""
    knob = state.policy.knob
    if knob is not Knob.GPU_CLOCK and level in state.search.ladder.lowered:
        base, settings = state.search.ladder.lowered[level]
        lowest = level_text(knob, min(settings.values()))
        return f"{level_text(knob, base)}, {lowest} where ranks wait"
    return level_text(knob, level)


def level_text(knob: Knob, level: int) -> str:
    """``"320 W"``, ``"1410 MHz"``."""
    return f"{level} MHz" if knob is Knob.GPU_CLOCK else f"{level / 1000:.0f} W"


def slowdown_text(ratio: float) -> str:
    """A log ratio of time in words."""
    slowdown = math.expm1(ratio)
    return f"{percent_text(abs(slowdown))} {'slower' if slowdown >= 0 else 'faster'}"


def saving_text(ratio: float) -> str:
    """A log ratio of energy in words."""
    saving = -math.expm1(ratio)
    return f"{percent_text(abs(saving))} {'less' if saving >= 0 else 'more'} energy"


def percent_text(ratio: float) -> str:
    """``"4.2 %"`` for 0.042."""
    return f"{100 * ratio:.1f} %"


def level_figures(state: TunerState, level: int) -> dict[str, float]:
    """The figures of a level by name."""
    estimate = state.estimates.at(level)
    figures = {
        "setting": float(level),
        "budget": state.policy.max_slowdown,
        "pairs": float(estimate.time.n),
    }
    if estimate.time.n:
        figures["slowdown"] = math.expm1(estimate.time.mean)
        figures["saving"] = -math.expm1(estimate.energy)
        bound = _bound(state, estimate)
        if bound is not None:
            figures["bound"] = bound
    return figures


def release_decision(state: TunerState, reason: DecisionReason, level: int) -> Decision:
    """Restore the original setting now."""
    sentence = f"Release {setting_text(state, level)}: {cause_text(reason)}."
    return Decision(Move.RELEASE, reason, sentence, {}, level_figures(state, level))


def decline_decision(reason: DecisionReason, cause: str = "") -> Decision:
    """Keep the original setting; ``cause`` replaces the usual clause of the reason."""
    sentence = f"Keep the original setting: {cause or cause_text(reason)}."
    return Decision(Move.DECLINE, reason, sentence)
