"""Reports of load tracking: settings to track, figures, and decisions as sentences.

The number of instances of a server follows from the energy of one instance at each load. Instances
share the load equally, and the number of generated tokens does not depend on their number: E(n) is
proportional to the joules per token of an instance at the load total / n. Only load bins that were
met have figures: nothing is interpolated.
"""

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
    ObjectiveFigures,
    TuningFigures,
)
from wattspan.tuning.decisions.load import BIN_RATIO, bin_bound
from wattspan.tuning.decisions.load_cells import LoadCell
from wattspan.tuning.decisions.load_tracking import LoadAlarm, TrackingState, headroom
from wattspan.tuning.decisions.report import cause_text, level_text
from wattspan.tuning.decisions.values import LevelLadder

SETTING_RATIO = 0.8
"""Ratio of two neighbouring settings: each must be certified by some hundred requests."""

_LEAST_RATIO = 0.9  # of the last setting to the one above
_MAX_SETTINGS = 8

_ALARMS = {
    LoadAlarm.MISSES.value: "too many requests exceed a latency limit",
    LoadAlarm.GROWTH.value: "more requests arrive than end",
    LoadAlarm.SILENCE.value: "no request has begun or ended for a long time",
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
    clause = cause or cause_text(reason)
    if before:
        name = level_text(knob, state.policy.settings[before])
        return Decision(Move.RELEASE, reason, f"Release {name}: {clause}.")
    return Decision(Move.DECLINE, reason, f"Keep the original setting: {clause}.")


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
