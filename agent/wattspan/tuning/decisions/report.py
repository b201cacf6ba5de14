"""Reports of a tuner: its figures, its certified setting, and its decisions as sentences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from wattspan.model import (
    Decision,
    DecisionReason,
    Knob,
    LoadBinFigures,
    LoadFigures,
    Microjoules,
    Move,
    Nanoseconds,
    ObjectiveFigures,
    SettingResult,
    TuningFigures,
)
from wattspan.tuning.decisions import search
from wattspan.tuning.decisions.budget import allowance
from wattspan.tuning.decisions.estimates import LevelEstimate
from wattspan.tuning.decisions.load import BIN_RATIO, bin_bound
from wattspan.tuning.decisions.load_cells import LoadCell
from wattspan.tuning.decisions.load_tracking import TrackingState, headroom
from wattspan.tuning.decisions.search import TunerPhase, TunerState
from wattspan.tuning.decisions.values import CertifiedLevels, LevelLadder


def report(state: TunerState) -> TuningFigures:
    account = state.account
    shape = search.fitted_curve(state)

    def likely_slowdown(level: int) -> float:
        return search.expected_slowdown(state, level, shape)[0]

    lost = account.lost(likely_slowdown)
    bound = account.bound(lambda level: search.slowdown_bound(state, level, shape))
    level = state.search.candidate if state.phase is TunerPhase.HOLD else None
    held = state.estimates.at(level) if level else None
    saved = zip(search.saved_energy(state), account.closed_saved, strict=True)
    low, likely, high = (
        Microjoules(round(now + before)) if account.metered else None for now, before in saved
    )
    unit_time = (account.elapsed - lost) / account.units if account.units else None
    watched = unit_time is not None and state.estimates.energies > 0
    unit_energy = state.estimates.power * (unit_time or 0) / 1e6  # milliwatts and nanoseconds
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
        tried=tuple(_result(state, one) for one in sorted(state.estimates.levels, reverse=True)),
        lost=Nanoseconds(round(lost)) if account.elapsed else None,
        allowance=Nanoseconds(round(allowance(state.policy.max_slowdown, account.elapsed))),
        unit_time=None if unit_time is None else Nanoseconds(round(unit_time)),
        unit_energy=Microjoules(round(unit_energy)) if watched else None,
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
        level=state.ladder.base(level),
        original=state.top,
        slowdown=math.expm1(estimate.time.mean),
        saving=-math.expm1(estimate.energy),
        pairs=estimate.time.n,
        noise=state.estimates.noise,
        levels=state.ladder.caps(level),
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
    if knob is not Knob.GPU_CLOCK and level in state.ladder.lowered:
        base, settings = state.ladder.lowered[level]
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


# ------------------------------------------------------------------------------------ load tracking


SETTING_RATIO = 0.8
"""Ratio of two neighbouring settings: each must be certified by some hundred requests."""

_LEAST_RATIO = 0.9  # of the last setting to the one above
_MAX_SETTINGS = 8

_ALARMS = {
    DecisionReason.TAIL: "too many requests exceed a latency limit",
    DecisionReason.CHANGED: "more requests arrive than end",
    DecisionReason.PAUSED: "no request has begun or ended for a long time",
}


def tracked_settings(ladder: LevelLadder) -> tuple[int, ...]:
    """The settings to track, from the original downwards."""
    settings = [ladder.top]
    while len(settings) < _MAX_SETTINGS:
        level = ladder.level(settings[-1] * SETTING_RATIO)
        if level > settings[-1] * _LEAST_RATIO:
            break
        settings.append(level)
    return tuple(settings)


def load_figures(state: TrackingState, names: Sequence[str]) -> LoadFigures:
    """The load, the bins that were met, and the misses of each objective, by ``names`` in order."""
    totals = state.totals
    each = zip(names, state.policy.objectives, totals.counted, totals.misses, strict=True)
    return LoadFigures(
        state.load.load,
        state.bin,
        bin_bound(state.bin),
        headroom(state),
        tuple(
            ObjectiveFigures(name, one.limit / 1e9, one.allowed, counted, missed)
            for name, one, counted, missed in each
        ),
        tuple(_bin_figures(state, number) for number in sorted(state.cells.met)),
    )


def _bin_figures(state: TrackingState, number: int) -> LoadBinFigures:
    cells = state.cells
    setting = cells.cheapest(number, cells.lowest(number))
    return LoadBinFigures(
        number,
        bin_bound(number),
        state.policy.settings[setting],
        max(one.missed.requests for one in cells.cell(number, setting).counts),
        cells.keeps(number, setting),
        _joules_per_token(cells.cell(number, setting)),
        _joules_per_token(cells.cell(number, 0)),
    )


def _joules_per_token(cell: LoadCell) -> float | None:
    return None if cell.energy_per_token is None else cell.energy_per_token / 1e6


def tracking_figures(state: TrackingState) -> TuningFigures:
    """Figures of the job. Savings are relative to the original setting in the same load bins.

    ``saving`` is that of the energy per generated token in the present bin.
    """
    totals, number = state.totals, state.load.usual_bin
    original = state.cells.cell(number, 0).energy_per_token
    held = state.cells.cell(number, state.setting).energy_per_token if state.setting else None
    return TuningFigures(
        saving=None if held is None or original is None else 1 - held / original,
        saved=Microjoules(round(totals.saved)) if totals.metered else None,
        units=totals.requests,
        committed=state.committed,
    )


def tracking_decision(
    state: TrackingState, knob: Knob, ladder: LevelLadder, figures: LoadFigures
) -> Decision:
    """The decision of a state: the setting, its reason, and a sentence."""
    level = state.policy.settings[state.setting]
    load = _load_text(figures)
    shown = {"load": figures.load, "setting": float(level)}
    if not state.setting:
        if state.reason in _ALARMS:
            sentence = f"Restore the original setting: {_ALARMS[state.reason]}; {load}."
            return Decision(Move.RELEASE, state.reason, sentence, {}, shown)
        if state.committed is None:
            requests = f"{state.totals.requests} requests so far"
            sentence = f"Learn the original setting: {load}, {requests}."
            return Decision(Move.PROBE, DecisionReason.BASELINE, sentence, {}, shown)
        waits = state.cells.lowest(state.bin) > 0
        why = "the next step down waits" if waits else "no lower one is certified for this load"
        sentence = f"Hold the original setting: {why}; {load}."
        return Decision(Move.HOLD, DecisionReason.CERTIFIED, sentence, {}, shown)
    name = level_text(knob, level)
    caps = ladder.caps(level)
    if state.trial:
        sentence = f"Certify {name} at this load: {load}."
        return Decision(Move.PROBE, DecisionReason.CERTIFYING, sentence, caps, shown)
    sentence = f"Hold {name}: {load}{_headroom_text(figures)}; {_misses_text(figures)}."
    return Decision(Move.HOLD, DecisionReason.CERTIFIED, sentence, caps, shown)


def refused_decision(
    state: TrackingState, knob: Knob, before: int, reason: DecisionReason, cause: str = ""
) -> Decision:
    """Restore the original, or leave it, for an external reason; ``before`` was the setting."""
    if not before:
        return decline_decision(reason, cause)
    name = level_text(knob, state.policy.settings[before])
    return Decision(Move.RELEASE, reason, f"Release {name}: {cause or cause_text(reason)}.")


def _load_text(figures: LoadFigures) -> str:
    return f"load {figures.load:.1f}, load bin up to {figures.bin_bound:g}"


def _headroom_text(figures: LoadFigures) -> str:
    if figures.headroom is None:
        return ""
    return f", certified up to {figures.headroom:.1f} times the load"


def _misses_text(figures: LoadFigures) -> str:
    known = [
        f"{100 * ratio:.2g} % of {one.requests} requests over the limit {one.name}"
        for one in figures.objectives
        if (ratio := one.miss_ratio) is not None
    ]
    return ", ".join(known) or "no request has ended yet"


# --------------------------------------------------------------------------------- instances
# The number of instances of a server follows from the energy of one instance at each load: they
# share the load equally, and the number of generated tokens does not depend on their number. E(n)
# is proportional to the joules per token of an instance at the load total / n. Only load bins that
# were met have figures: nothing is interpolated.

_ROUNDING = 1e-9


class InstanceRange(NamedTuple):
    """Numbers of instances whose loads are in one bin; ``most`` is None without a limit.

    ``change`` is the relative change of the energy against the present number, None if unknown.
    """

    least: int
    most: int | None
    bin: LoadBinFigures
    change: float | None


def instance_ranges(load: LoadFigures, instances: int) -> list[InstanceRange]:
    """The numbers of instances with known figures, from the fewest.

    ``load`` is that of one of ``instances`` (1 at least) with the same load.
    """
    total = load.load * instances
    if total <= 0:
        return []
    now = next((one.joules_per_token for one in load.bins if one.bin == load.bin), None)
    found = []
    for one in sorted(load.bins, key=lambda one: -one.bin):
        least = max(1, math.ceil(total / one.bin_bound - _ROUNDING))
        most = math.ceil(total / one.bin_bound * BIN_RATIO - _ROUNDING) - 1 if one.bin else None
        if most is None or most >= least:
            energy = one.joules_per_token
            change = energy / now - 1 if energy is not None and now else None
            found.append(InstanceRange(least, most, one, change))
    return found


def best_range(ranges: Iterable[InstanceRange]) -> InstanceRange | None:
    """The range with the least energy of those that certainly keep the limits, None without one."""
    kept = [one for one in ranges if one.bin.kept and one.change is not None]
    return min(kept, key=lambda one: one.change or 0.0, default=None)
