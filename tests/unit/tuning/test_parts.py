"""The chapters of the decision core, one by one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from testbed.tuning_plant import FLOOR, GPU, QUICK, RANGES, TOP

from wattspan.model import SECOND, Decision, DecisionReason, Move
from wattspan.tuning.decisions.blocks import (
    ENERGY_TIMEOUT,
    Block,
    SampleBuffer,
    empty_buffer,
    set_level,
)
from wattspan.tuning.decisions.budget import SlowdownAccount, allowance
from wattspan.tuning.decisions.estimates import (
    POWER_CAP_PRIOR,
    Estimates,
    LevelEstimate,
    Pair,
    Pairing,
    ResponsePoint,
    fit_curve,
)
from wattspan.tuning.decisions.phases import probe_decision
from wattspan.tuning.decisions.report import (
    decline_decision,
    release_decision,
    report,
    saving_text,
    slowdown_text,
)
from wattspan.tuning.decisions.sequential_test import (
    MIN_SHIFTED_BLOCKS,
    Cusum,
    Evidence,
    LevelShift,
    evidence,
    half_width,
    pairs_needed,
)
from wattspan.tuning.decisions.step import (
    add_block,
    add_units,
    begin,
    observe,
    with_block,
    with_pair,
)
from wattspan.tuning.decisions.values import (
    EnergyPoint,
    KnobRange,
    LevelLadder,
    Observation,
    WorkUnit,
)

S = SECOND
POLICY = replace(QUICK, block_units=2, block_time=S, settle_units=1, settle_time=S)


# ------------------------------------------------------------------------------------ sequence


def test_single_pair_has_no_bound() -> None:
    assert half_width(1, 0.05) == math.inf
    assert half_width(2, 1e-6) == math.inf


def test_bound_narrows_with_pairs_and_with_the_error_allowed() -> None:
    assert half_width(100, 0.05) < half_width(20, 0.05) < half_width(20, 0.01)


def test_unreachable_bound_needs_infinitely_many_pairs() -> None:
    assert pairs_needed(0.0, 0.01, 0.05) == math.inf
    assert pairs_needed(1e-9, 1.0, 0.05) == math.inf
    assert 4 <= pairs_needed(0.01, 0.01, 0.05) < 40


def test_one_outlier_hardly_moves_the_mean() -> None:
    values = [0.03 + 0.001 * (at % 5 - 2) for at in range(20)]
    assert evidence([*values, 0.5], 0.001).mean == pytest.approx(0.03, abs=0.001)
    assert evidence([], 0.01) == Evidence(0, 0.0, 0.01)
    assert evidence([0.2], 0.01) == Evidence(1, 0.2, 0.01)


def test_equal_values_are_not_assumed_exact() -> None:
    assert evidence([0.03, 0.03, 0.03], 0.01).deviation == pytest.approx(0.007)


def test_lower_bound_lies_below_the_mean_and_the_upper_above() -> None:
    found = Evidence(20, 0.03, 0.01)
    assert found.lower(0.05) < found.likely(-1) < 0.03 < found.likely(1) < found.upper(0.05)


# -------------------------------------------------------------------------------------- blocks


def units(start: float, count: int, lasts: float = 1.0, gap: float = 0.0) -> list[WorkUnit]:
    every = lasts + gap
    return [
        WorkUnit(int((start + at * every) * S), int((start + at * every + lasts) * S))
        for at in range(count)
    ]


def added(
    tape: SampleBuffer, some: list[WorkUnit], to: float = 1_000.0
) -> tuple[SampleBuffer, list[Block]]:
    points = [EnergyPoint(at * S, at * 100) for at in range(int(to))]
    tape, blocks, _ = add_units(tape, POLICY, some, points, int(to * S))
    return tape, blocks


def test_unit_counts_if_it_began_after_the_setting_settled() -> None:
    _, blocks = added(empty_buffer(TOP, 0), units(0, 6))
    assert [(one.start // S, one.end // S, one.units) for one in blocks] == [(2, 4, 2), (4, 6, 2)]
    assert [one.energy for one in blocks] == [200, 200]


def test_unit_counts_if_it_ended_before_the_setting_changed() -> None:
    tape = set_level(empty_buffer(TOP, 0), FLOOR, int(6.5 * S))
    tape, blocks = added(tape, units(0, 12))
    assert [(one.level, one.start // S, one.end // S) for one in blocks] == [
        (TOP, 2, 4),
        (TOP, 4, 6),
        (FLOOR, 9, 11),
    ]
    assert tape.level == FLOOR
    assert tape.full_blocks == 1


def test_partial_block_counts_at_a_setting_change() -> None:
    tape = set_level(empty_buffer(TOP, 0), FLOOR, 5 * S)
    _, blocks = added(tape, units(0, 6))
    assert [one.units for one in blocks] == [2, 1]


def test_partial_block_ends_with_its_last_unit() -> None:
    """The unit in which the setting changes is in neither block: its power is of both settings."""
    tape = set_level(empty_buffer(TOP, 0), FLOOR, int(3.5 * S))
    tape, none = added(tape, units(0, 2), 2)
    _, blocks = added(tape, units(2, 4), 6)
    assert none == []
    assert [(one.level, one.start // S, one.end // S, one.energy) for one in blocks] == [
        (TOP, 2, 3, 100)
    ]


def test_units_under_an_unknown_setting_are_nobodys() -> None:
    tape = set_level(empty_buffer(TOP, 0), None, 0 * S + 1)
    tape = set_level(tape, FLOOR, 6 * S)
    _, blocks = added(tape, units(1, 9))
    assert {one.level for one in blocks} == {FLOOR}


def test_idle_time_has_no_effect() -> None:
    tape = empty_buffer(TOP, 5)
    assert set_level(tape, TOP, 5) is tape


def test_pause_is_cut_out_and_energy_is_unknown_then() -> None:
    _, blocks = added(empty_buffer(TOP, 0), [*units(0, 3), *units(60, 2)])
    assert blocks[0].span == blocks[0].busy == 2 * S
    assert blocks[0].energy is None


def test_short_gap_is_time_of_the_work() -> None:
    _, blocks = added(empty_buffer(TOP, 0), units(0, 8, 1.0, 0.25))
    assert blocks[0].span == pytest.approx(2.5 * S)
    assert blocks[0].busy == 2 * S


def test_concurrent_units_count_their_new_time() -> None:
    both = [one for unit in units(0, 6) for one in (unit,) * 3]
    _, blocks = added(empty_buffer(TOP, 0), both)
    assert blocks[0].span < blocks[0].busy


def test_block_waits_for_its_energy_within_a_bound() -> None:
    tape, blocks, _ = add_units(empty_buffer(TOP, 0), POLICY, units(0, 4), (), 4 * S)
    assert blocks == []
    assert tape.full_blocks == 1
    tape, blocks, _ = add_units(tape, POLICY, (), (), 5 * S + ENERGY_TIMEOUT)
    assert [one.energy for one in blocks] == [None]


def test_energy_that_began_later_is_unknown() -> None:
    points = [EnergyPoint(3 * S, 0), EnergyPoint(9 * S, 5)]
    _, blocks, _ = add_units(empty_buffer(TOP, 0), POLICY, units(0, 4), points, 9 * S)
    assert blocks[0].energy is None


def test_counter_that_does_not_move_is_unknown() -> None:
    points = [EnergyPoint(0, 7), EnergyPoint(9 * S, 7)]
    _, blocks, _ = add_units(empty_buffer(TOP, 0), POLICY, units(0, 4), points, 9 * S)
    assert blocks[0].energy is None


def test_points_are_bounded_and_old_ones_removed() -> None:
    tape = empty_buffer(TOP, 0)
    points = [EnergyPoint(at, at) for at in range(2_000)]
    tape, _, _ = add_units(tape, POLICY, (), points, 2_000)
    assert len(tape.points) < 2_000
    for at in range(40):
        start = 10.0 * at
        more = [EnergyPoint(int((start + one) * S), at * 10 + one) for one in range(10)]
        tape, _, _ = add_units(tape, POLICY, units(start, 10), more, int((start + 10) * S))
    assert len(tape.points) < 128


# --------------------------------------------------------------------------------------- pairs


def block(level: int, at: int, busy: float = 2.0, energy: float | None = 200.0) -> Block:
    start = at * 2 * S
    return Block(level, start, start + 2 * S, 2, 2, int(busy * S), int(busy * S), 2.0, energy, at)


def test_drift_cancels_between_neighbouring_blocks() -> None:
    pairing, pair = Pairing(), None
    for at, level in enumerate((FLOOR, TOP, FLOOR)):
        cost = (1.1 if level == FLOOR else 1.0) * (2.0 + 0.1 * at)
        pairing, pair = add_block(pairing, block(level, at, cost), TOP, reach=1, screening=False)
    assert pair.busy == pytest.approx(math.log(1.1), abs=0.001)
    assert pair.power == pytest.approx(0.0)


def test_blocks_far_apart_are_not_compared() -> None:
    pairing = Pairing()
    for level, at in ((FLOOR, 0), (TOP, 50), (FLOOR, 51)):
        pairing, pair = add_block(pairing, block(level, at), TOP, reach=1, screening=False)
        assert pair is None
    same = block(FLOOR, 52)._replace(period=51)
    pairing, _ = add_block(pairing, same, TOP, reach=1, screening=False)
    later = block(FLOOR, 99)._replace(period=51)
    pairing, _ = add_block(pairing, later, TOP, reach=1, screening=False)
    assert pairing.middle is None


def test_two_levels_around_the_original_are_no_comparison() -> None:
    pairing = Pairing()
    for at, level in enumerate((FLOOR, TOP, FLOOR + 10_000)):
        pairing, pair = add_block(pairing, block(level, at), TOP, reach=1, screening=False)
    assert pair is None


def test_pair_without_energy_gives_time_evidence_only() -> None:
    pairing, pair = Pairing(), None
    for at, level in enumerate((TOP, FLOOR, TOP)):
        pairing, pair = add_block(
            pairing, block(level, at, 2.0, None), TOP, reach=1, screening=True
        )
    assert pair.power is None


def test_long_runs_use_each_block_once() -> None:
    pairing, found = Pairing(), []
    levels = [FLOOR] * 6 + [TOP] * 6 + [FLOOR] * 6
    for at, level in enumerate(levels):
        one = block(level, at)._replace(period=at // 6)
        pairing, pair = add_block(pairing, one, TOP, reach=3, screening=False)
        found += [pair] if pair else []
    assert len(found) == 1
    assert found[0].weight == pytest.approx(1 / 12 + 1 / 12)


# --------------------------------------------------------------------------------- estimates


def test_noise_is_estimated_from_uncapped_blocks() -> None:
    known = with_block(Estimates(), block(FLOOR, 0), TOP)
    assert known.blocks == 0
    assert with_block(Estimates(), block(TOP, 0)._replace(units=1), TOP).blocks == 0


def test_straggler_does_not_decide_the_noise() -> None:
    known = Estimates()
    for at in range(6):
        known = with_block(known, block(TOP, at)._replace(squares=2.02 * S * S), TOP)
    wild = with_block(known, block(TOP, 9)._replace(squares=200.0 * S * S), TOP)
    assert wild.noise < 3 * known.noise


def test_blocks_without_energy_give_time_evidence() -> None:
    known = with_block(Estimates(), block(TOP, 0, 2.0, None), TOP)
    assert (known.blocks, known.energies) == (1, 0)


def test_few_pairs_have_no_variance_estimate() -> None:
    known = Estimates(variance=0.01)
    for at in range(12):
        known = with_pair(known, Pair(FLOOR, at, 0.05 * (at % 2), 0.0, 0.0, 0.1))
        if at < 3:
            assert known.spread(0.1) == known.deviation(0.1)
    assert known.spread(0.1) >= known.deviation(0.1)


# --------------------------------------------------------------------------------------- curve


def point(level: int, time: float, power: float = -0.1, variance: float = 1e-6) -> ResponsePoint:
    return ResponsePoint(level, time, power, variance)


def test_unknown_slowdown_is_absent() -> None:
    curve = fit_curve((), TOP)
    assert curve.time(FLOOR) == 0.0
    assert curve.power(FLOOR) == 0.0


def test_curve_passes_through_certain_points() -> None:
    points = [point(360_000, 0.01), point(320_000, 0.03, -0.2), point(280_000, 0.08, -0.3)]
    curve = fit_curve(points, TOP)
    for one in points:
        assert curve.time(one.level) == pytest.approx(one.time, abs=0.002)
        assert curve.power(one.level) == pytest.approx(one.power, abs=0.01)
    assert curve.time(TOP) == 0.0
    assert curve.time(260_000) > 0.08
    assert curve.power(260_000) == pytest.approx(-0.35, abs=0.03)


def test_predictions_of_many_levels_are_those_of_each() -> None:
    curve = fit_curve([point(360_000, 0.01), point(300_000, 0.06, -0.25)], TOP, POWER_CAP_PRIOR)
    levels = range(FLOOR, TOP + 20_000, 7_000)
    assert list(curve.predictions(levels)) == [
        (level, curve.time(level), curve.power(level)) for level in levels
    ]


def test_one_point_is_read_as_half_a_line() -> None:
    curve = fit_curve([point(320_000, 0.04)], TOP)
    assert curve.time(320_000) == pytest.approx(0.04, abs=0.001)
    assert 0.01 < curve.time(360_000) <= 0.025


@pytest.mark.parametrize("times", [(0.001, 0.08), (0.06, 0.07)])
def test_parabola_terms_are_nonnegative(times: tuple[float, float]) -> None:
    points = [
        point(360_000, times[0], variance=1e-2),
        point(320_000, times[1], variance=1e-2),
    ]
    curve = fit_curve(points, TOP)
    assert curve.slowdown.linear >= 0
    assert curve.slowdown.square >= 0
    assert curve.slowdown.linear == 0 or curve.slowdown.square == 0


# ------------------------------------------------------------------------------------ spending


def test_zero_spending_is_no_slowdown() -> None:
    assert SlowdownAccount().slowdown(0.0) == 0.0
    assert allowance(0.05, 105.0) == pytest.approx(5.0)


# --------------------------------------------------------------------------------------- watch


def test_jump_to_eight_percent_alarms_within_five_pairs_at_five_percent_noise() -> None:
    cusum = Cusum()
    while not cusum.alarmed:
        cusum = cusum.add(math.log(1.08), 0.04, math.log(1.05), 0.012)
    assert cusum.pairs <= 5


def test_jump_to_fifteen_percent_alarms_within_two() -> None:
    cusum = Cusum()
    while not cusum.alarmed:
        cusum = cusum.add(math.log(1.15), 0.04, math.log(1.05), 0.012)
    assert cusum.pairs == 2


def test_single_pair_never_alarms() -> None:
    assert not Cusum().add(3.0, 0.04, 0.05, 0.01).alarmed
    assert Cusum(inconclusive=True).suspicious


def shifted(raw: LevelShift, count: int, seconds: float) -> LevelShift:
    for at in range(count):
        raw = raw.add(block(FLOOR, at, seconds), 0.01)
    return raw


def test_lasting_shift_of_blocks_is_detected() -> None:
    raw = shifted(LevelShift(), MIN_SHIFTED_BLOCKS, 2.0)
    assert raw.blocks == MIN_SHIFTED_BLOCKS
    raw = shifted(raw, MIN_SHIFTED_BLOCKS, 2.5)
    assert raw.suspected
    assert raw.changed


def test_end_of_a_disturbance_at_the_start_is_no_shift() -> None:
    raw = shifted(shifted(LevelShift(), 6, 2.3), 6, 2.0)
    assert raw.suspected
    raw = shifted(raw, 2 * MIN_SHIFTED_BLOCKS, 2.0)
    assert not raw.suspected
    assert not raw.changed
    assert raw.time == pytest.approx(math.log(S))


def test_usual_scatter_of_blocks_is_no_shift() -> None:
    raw = LevelShift()
    for at in range(40):
        raw = raw.add(block(FLOOR, at, 2.0 * (1 + 0.03 * (-1) ** at)), 0.01)
    assert raw.add(block(FLOOR, 40, 2.0 * 1.08), 0.01).shifted == 0
    assert raw.add(block(FLOOR, 40, 2.0 * 1.15), 0.01).shifted == 1


def test_shift_of_power_is_seen() -> None:
    power = LevelShift(FLOOR, math.log(S), math.log(200 / (2 * S)), 0, 9)
    power = power.add(block(FLOOR, 1), 0.01)
    assert power.shifted == 0
    assert power.add(block(FLOOR, 2, 2.0, 260.0), 0.01).shifted == 1
    assert power.add(block(FLOOR, 2, 2.0, None), 0.01).power == power.power


# -------------------------------------------------------------------------------------- ladder


def test_caps_are_within_the_device_range() -> None:
    ladder = LevelLadder.over([KnobRange(GPU, TOP, FLOOR), KnobRange("GPU-2", 300_000, 280_000)])
    assert ladder.caps(ladder.top) == {}
    assert ladder.level(10**9) == TOP
    assert ladder.level(0) == FLOOR
    assert LevelLadder.over([]).rungs == 0


def test_rounding_by_the_device_is_obedience() -> None:
    ladder = LevelLadder.over(RANGES)
    assert ladder.is_in_force(300_000, {GPU: 300_500})
    assert not ladder.is_in_force(300_000, {GPU: 310_000})
    assert not ladder.is_in_force(300_000, {})


# ------------------------------------------------------------------------------------- telling


def test_tuner_without_observations_has_an_empty_report() -> None:
    figures = report(begin(QUICK, RANGES, now=0))
    assert (figures.slowdown, figures.saved, figures.lost, figures.committed) == (None,) * 4
    assert figures.units == figures.pairs == 0


def test_explanation_names_faster_and_costlier_settings() -> None:
    assert slowdown_text(-0.02) == "2.0 % faster"
    assert saving_text(0.03) == "3.0 % more energy"


def test_reason_without_a_text_is_shown_verbatim() -> None:
    assert "held" in decline_decision(DecisionReason.HELD).sentence
    state = begin(QUICK, RANGES, now=0)
    release = release_decision(state, DecisionReason.HELD, TOP)
    assert release.sentence == "Release 400 W: held."
    assert isinstance(release, Decision)
    assert release.move is Move.RELEASE


def test_levels_without_pairs_have_the_assumed_cost() -> None:
    state = begin(QUICK, RANGES, now=0)
    state = observe(state, Observation(now=S, units=tuple(units(0, 3))))
    assert state.samples.last_end == 3 * S
    assert LevelEstimate().energy == 0.0


def test_unobserved_figures_are_absent() -> None:
    state = begin(QUICK, [KnobRange(GPU, FLOOR, TOP, TOP)], now=0)

    def learning(known: Estimates) -> str:
        return probe_decision(
            state._replace(estimates=known), DecisionReason.BASELINE, TOP
        ).sentence

    assert learning(Estimates()) == "Learn the original setting: its noise is not known yet."
    one = with_block(Estimates(), block(TOP, 0), TOP)
    assert learning(one).startswith("Learn the original setting: 1 block, ")
    two = with_block(one, block(TOP, 1), TOP)
    assert learning(two).startswith("Learn the original setting: 2 blocks, ")
    assert learning(two).endswith(" % noise.")
