"""Settings, figures and sentences of load tracking."""

from __future__ import annotations

import pytest

from wattspan.model import (
    SECOND,
    DecisionReason,
    Knob,
    LoadFigures,
    Move,
    Nanoseconds,
    ObjectiveFigures,
)
from wattspan.tuning.decisions.load_cells import LatencyObjective, LoadCells
from wattspan.tuning.decisions.load_tracking import (
    TrackingPolicy,
    TrackingState,
    TrackingTotals,
    begin_tracking,
)
from wattspan.tuning.decisions.report import (
    load_figures,
    refused_decision,
    tracked_settings,
    tracking_decision,
    tracking_figures,
)
from wattspan.tuning.decisions.values import KnobRange, LevelLadder

OBJECTIVES = LatencyObjective(True, 400_000_000, 0.01), LatencyObjective(False, 10**8, 0.01)
NAMES = "ttft_p99", "tbt_p99"
LADDER = LevelLadder.over([KnobRange("GPU-0", 1980, 1185, 15)])
FIGURES = LoadFigures(11.3, 4, 16.0, 2.8, (ObjectiveFigures("ttft_p99", 0.4, 0.01, 1200, 6),))


def state(**more: object) -> TrackingState:
    policy = TrackingPolicy(OBJECTIVES, (1980, 1590, 1185))
    return begin_tracking(policy, 0)._replace(**more)


def test_settings_are_far_enough_apart_to_be_certified() -> None:
    assert tracked_settings(LADDER) == (1980, 1590, 1275)
    watts = LevelLadder.over([KnobRange("GPU-0", 700_000, 420_000)])
    assert tracked_settings(watts) == (700_000, 560_000, 448_000)
    assert tracked_settings(LevelLadder.over([KnobRange("GPU-0", 1980, 1900, 15)])) == (1980,)
    wide = tracked_settings(LevelLadder.over([KnobRange("GPU-0", 10**6, 1, 1)]))
    assert len(wide) == 8


def test_figures_have_the_misses_of_each_objective() -> None:
    totals = TrackingTotals(requests=1210, misses=(6, 0), counted=(1200, 0), saved=0.0)
    figures = load_figures(state(totals=totals), NAMES)
    assert figures.objectives == (
        ObjectiveFigures("ttft_p99", 0.4, 0.01, 1200, 6),
        ObjectiveFigures("tbt_p99", 0.1, 0.01, 0, 0),
    )
    assert [one.miss_ratio for one in figures.objectives] == [0.005, None]
    assert (figures.load, figures.bin, figures.bin_bound) == (0.0, 0, 1.0)
    assert figures.headroom is figures.used is None
    assert FIGURES.used == pytest.approx(1 / 2.8)


def test_saving_is_known_with_the_energy_of_both_settings_only() -> None:
    assert tracking_figures(state()).saving is None
    assert tracking_figures(state()).saved is None
    cells = LoadCells(state().cells.gates)
    for _ in range(6):
        cells = cells.add_energy(0, 0, 1e6, 10).add_energy(0, 1, 8e5, 10)
    totals = TrackingTotals(saved=2e6, metered=9e6)
    lower = tracking_figures(state(setting=1, cells=cells, totals=totals))
    (met,) = load_figures(state(setting=1, cells=cells), NAMES).bins
    assert (met.bin, met.setting, met.requests, met.kept) == (0, 1980, 0, None)
    assert (met.joules_per_token, met.original_joules_per_token) == (0.1, 0.1)
    assert lower.saving == pytest.approx(0.2)
    assert lower.saved == 2_000_000
    assert tracking_figures(state(cells=cells, totals=totals)).saving is None
    assert tracking_figures(state(setting=2, cells=cells, totals=totals)).saving is None


def test_lower_setting_is_held_or_certified() -> None:
    held = tracking_decision(
        state(setting=1, reason=DecisionReason.CERTIFIED), Knob.GPU_CLOCK, LADDER, FIGURES
    )
    assert (held.move, held.reason, held.caps) == (
        Move.HOLD,
        DecisionReason.CERTIFIED,
        {"GPU-0": 1590},
    )
    assert held.sentence == (
        "Hold 1590 MHz: load 11.3, load bin up to 16, certified up to 2.8 times the "
        "load; 0.5 % of 1200 requests over the limit ttft_p99."
    )
    trial = tracking_decision(
        state(setting=2, trial=True), Knob.GPU_CLOCK, LADDER, LoadFigures(3.0, 2, 4.0)
    )
    assert (trial.move, trial.reason, trial.caps) == (
        Move.PROBE,
        DecisionReason.CERTIFYING,
        {"GPU-0": 1185},
    )
    assert trial.sentence == ("Certify 1185 MHz at this load: load 3.0, load bin up to 4.")
    unknown = tracking_decision(state(setting=1), Knob.GPU_CLOCK, LADDER, LoadFigures(3.0, 2, 4.0))
    assert "no request has ended yet" in unknown.sentence


def test_original_setting_is_learned_or_held_or_restored() -> None:
    learned = tracking_decision(state(), Knob.GPU_CLOCK, LADDER, FIGURES)
    assert (learned.move, learned.reason, learned.caps) == (
        Move.PROBE,
        DecisionReason.BASELINE,
        {},
    )
    left_trial = state(reason=DecisionReason.CERTIFIED)
    again = tracking_decision(left_trial, Knob.GPU_CLOCK, LADDER, FIGURES)
    assert (again.move, again.reason) == (Move.PROBE, DecisionReason.BASELINE)
    raised = state(reason=DecisionReason.CERTIFIED, committed=Nanoseconds(SECOND))
    held = tracking_decision(raised, Knob.GPU_CLOCK, LADDER, FIGURES)
    assert (held.move, held.reason, held.caps) == (Move.HOLD, DecisionReason.CERTIFIED, {})
    assert "no lower one is certified for this load" in held.sentence
    cells = LoadCells(state().cells.gates, certified={0: 1})
    after_veto = tracking_decision(
        state(reason=DecisionReason.SHARED, cells=cells, committed=Nanoseconds(SECOND)),
        Knob.GPU_CLOCK,
        LADDER,
        FIGURES,
    )
    assert (after_veto.move, after_veto.reason) == (Move.HOLD, DecisionReason.CERTIFIED)
    assert "the next step down waits" in after_veto.sentence


ALARMS = DecisionReason.TAIL, DecisionReason.CHANGED, DecisionReason.PAUSED


@pytest.mark.parametrize("alarm", ALARMS)
def test_every_alarm_is_a_release_with_its_cause(alarm: DecisionReason) -> None:
    decision = tracking_decision(state(reason=alarm), Knob.GPU_CLOCK, LADDER, FIGURES)
    assert (decision.move, decision.reason, decision.caps) == (Move.RELEASE, alarm, {})
    assert decision.sentence.startswith("Restore the original setting: ")


def test_external_reason_names_the_released_setting() -> None:
    released = refused_decision(state(), Knob.GPU_CLOCK, 1, DecisionReason.SHARED)
    assert released.move is Move.RELEASE
    assert released.sentence.startswith("Release 1590 MHz: another tenant")
    watts = begin_tracking(TrackingPolicy(OBJECTIVES, (700_000, 560_000), 5 * SECOND), 0)
    released = refused_decision(watts, Knob.GPU_POWER, 1, DecisionReason.NO_SIGNAL, "it is silent")
    assert released.sentence == "Release 560 W: it is silent."
    kept = refused_decision(state(), Knob.GPU_CLOCK, 0, DecisionReason.NO_DEVICE)
    assert kept.move is Move.DECLINE
    assert kept.sentence == "Keep the original setting: no device."
