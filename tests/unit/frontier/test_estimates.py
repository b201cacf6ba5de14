"""Estimates by setting, the frontier and recommendations, against known curves."""

from __future__ import annotations

import random
from math import inf, isfinite

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testbed.studies import noisy_trial, power_settings, trial

from wattspan.frontier.estimates import SettingEstimates, dominated, frontier
from wattspan.frontier.recommendation import (
    ONE_SIDED,
    Constraints,
    NoSettingError,
    recommend,
)
from wattspan.frontier.statistics import f_upper_tail, quantile, upper_tail
from wattspan.frontier.trials import Setting

FULL, SAVING, SLOW, WASTEFUL = power_settings(100, 80, 60, 40)
CURVE = {FULL: (1.0, 300.0), SAVING: (1.03, 250.0), SLOW: (1.3, 240.0), WASTEFUL: (1.6, 290.0)}


def measured(noise: float, blocks: int, seed: int = 1) -> SettingEstimates:
    rng = random.Random(seed)
    return SettingEstimates(
        list(CURVE),
        [
            noisy_trial(CURVE.__getitem__, setting, block, noise, rng)
            for block in range(blocks)
            for setting in CURVE
        ],
    )


# -------------------------------------------------------------------------------- Student's t


@pytest.mark.parametrize(
    ("probability", "freedom", "expected"),
    [  # tables of the t distribution
        (0.975, 1, 12.7062),
        (0.975, 2, 4.30265),
        (0.95, 4, 2.13185),
        (0.975, 10, 2.22814),
        (0.995, 30, 2.75000),
        (0.95, 1000, 1.64638),
    ],
)
def test_quantile_is_that_of_the_tables(probability: float, freedom: int, expected: float) -> None:
    assert quantile(probability, freedom) == pytest.approx(expected, rel=1e-5)
    assert quantile(1 - probability, freedom) == pytest.approx(-expected, rel=1e-5)


@given(st.floats(-50, 50), st.integers(1, 500))
def test_tails_sum_up_to_one(t: float, freedom: int) -> None:
    assert upper_tail(t, freedom) + upper_tail(-t, freedom) == pytest.approx(1.0)
    assert upper_tail(0.0, freedom) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("f", "freedom", "other", "expected"),
    [(6.608, 1, 5, 0.05), (3.490, 3, 12, 0.05), (7.559, 2, 10, 0.01), (0.0, 2, 7, 1.0)],
)
def test_tail_of_f_is_that_of_the_tables(
    f: float, freedom: int, other: int, expected: float
) -> None:
    assert f_upper_tail(f, freedom, other) == pytest.approx(expected, rel=2e-3)


@given(st.floats(0, 50), st.integers(1, 500))
def test_tail_of_f_with_one_degree_is_that_of_t(t: float, freedom: int) -> None:
    assert f_upper_tail(t * t, 1, freedom) == pytest.approx(2 * upper_tail(t, freedom), abs=1e-9)


# ---------------------------------------------------------------------------------- estimates


def test_estimates_without_noise_are_the_truth() -> None:
    found = measured(0.0, 2)
    for number, truth in enumerate(CURVE.values()):
        assert found.time.value(number).value == pytest.approx(truth[0])
        assert found.energy.value(number).value == pytest.approx(truth[1])
        assert found.power.value(number).value == pytest.approx(truth[1] / truth[0])
    assert found.time.ratio(1, 0).value == pytest.approx(1.03)
    assert found.time.ratio(0, 0) == (1.0, 1.0, 1.0)


def test_drift_between_blocks_does_not_widen_ratios() -> None:
    drifting = [
        trial(setting, block, seconds * (1 + 0.2 * block), joules * (1 + 0.2 * block))
        for block in range(3)
        for setting, (seconds, joules) in CURVE.items()
    ]
    ratio = SettingEstimates(list(CURVE), drifting).time.ratio(1, 0)
    assert ratio.low == pytest.approx(1.03) == ratio.high


def test_blocks_without_differences_cost_no_freedom() -> None:
    plain = measured(0.02, 3, seed=5).time
    assert plain.freedom == 12 - 4
    shifted = [
        trial(setting, block, seconds * (1 + 0.2 * block) * (1 + 0.001 * n), joules)
        for block in range(3)
        for n, (setting, (seconds, joules)) in enumerate(CURVE.items())
        if n < 3 or block
    ]
    assert SettingEstimates(list(CURVE), shifted).time.freedom == len(shifted) - 4 - 2


def test_single_trials_have_no_interval() -> None:
    interval = measured(0.0, 1).time.value(0)
    assert (interval.low, interval.high) == (0.0, inf)
    assert dominated(measured(0.0, 1)) == []


def test_setting_that_misses_a_block_is_compared_within_the_others() -> None:
    trials = [one for one in measured(0.0, 3).trials if one.setting != SAVING or one.block != 2]
    found = SettingEstimates(list(CURVE), trials)
    assert found.time.ratio(1, 0).value == pytest.approx(1.03)
    assert found.measured == [0, 1, 2, 3]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000))
def test_intervals_are_ordered_and_finite(seed: int) -> None:
    found = measured(0.05, 3, seed)
    for number in found.measured:
        low, high = found.time.value(number)[1:]
        assert 0 < low <= found.time.value(number).value <= high
        assert isfinite(high)


def test_interval_contains_the_truth_as_often_as_it_says() -> None:
    hits = 0
    for seed in range(400):
        interval = measured(0.05, 3, seed).time.ratio(1, 0)
        hits += interval.low <= 1.03 <= interval.high
    assert 0.92 <= hits / 400 <= 0.98


# ----------------------------------------------------------------------------------- frontier


def test_frontier_without_noise_is_exact() -> None:
    found = measured(0.0, 2)
    assert frontier(found) == [0, 1, 2]
    (out,) = dominated(found)
    assert out.setting == 3
    assert out.by in (1, 2)


def test_difference_within_noise_is_a_tie() -> None:
    near = {FULL: (1.0, 300.0), SAVING: (1.002, 300.5)}
    rng = random.Random(3)
    trials = [
        noisy_trial(near.__getitem__, setting, block, 0.05, rng)
        for block in range(4)
        for setting in near
    ]
    assert set(frontier(SettingEstimates(list(near), trials))) == {0, 1}


def test_equal_time_is_not_left_out_for_more_energy_alone() -> None:
    """A setting is left out only beyond noise in both figures."""
    equal = {FULL: (1.0, 300.0), SAVING: (1.0, 250.0)}
    trials = [trial(setting, block, *equal[setting]) for block in range(3) for setting in equal]
    assert set(frontier(SettingEstimates(list(equal), trials))) == {0, 1}


def test_members_are_left_out_by_chance_as_rarely_as_stated() -> None:
    wrong = sum(not {0, 1, 2} <= set(frontier(measured(0.05, 3, seed))) for seed in range(200))
    assert wrong <= 0.05 * 200


# ----------------------------------------------------------------------------- recommendation


def chosen(found: SettingEstimates, **constraints: float) -> Setting:
    return recommend(found, Constraints(**constraints)).setting


def test_recommendation_without_constraints_has_the_least_energy() -> None:
    assert chosen(measured(0.0, 2)) == SLOW


def test_recommendation_keeps_each_constraint() -> None:
    found = measured(0.0, 2)
    assert chosen(found, max_slowdown=0.05) == SAVING
    assert chosen(found, deadline=1.01) == FULL
    assert chosen(found, energy_budget=260.0) == SAVING  # the fastest within it
    assert chosen(found, watts=250.0) == SAVING
    assert chosen(found, energy_budget=260.0, max_slowdown=0.5) == SLOW


def test_eta_weighs_energy_against_time() -> None:
    found = measured(0.0, 2)
    assert chosen(found, eta=0.0, max_watts=300.0) == FULL
    assert chosen(found, eta=1.0, max_watts=300.0) == SLOW
    assert chosen(found, eta=0.5, max_watts=300.0) == SAVING


def test_figures_of_the_recommendation_are_relative_to_the_baseline() -> None:
    found = recommend(measured(0.0, 2), Constraints(max_slowdown=0.05))
    assert found.time_ratio.value == pytest.approx(1.03)
    assert found.energy_ratio.value == pytest.approx(250 / 300)


def test_setting_that_may_exceed_the_constraint_by_more_than_the_tolerance_is_refused() -> None:
    found = measured(0.01, 3, seed=4)
    value, _, high = found.time.ratio(1, 0, ONE_SIDED)
    assert chosen(found, max_slowdown=value - 1 - 1e-6) == FULL  # the estimate exceeds it
    assert chosen(found, max_slowdown=value - 1 + 1e-6, tolerance=0.0) == FULL
    assert chosen(found, max_slowdown=high - 1 + 1e-6, tolerance=0.0) == SAVING
    just = high / value - 1
    assert chosen(found, max_slowdown=value - 1 + 1e-6, tolerance=just) == SAVING


def test_settings_of_equal_energy_are_named_as_ties() -> None:
    found = recommend(measured(0.05, 3), Constraints())
    assert set(found.ties) <= set(CURVE) - {found.setting}
    assert {SAVING, SLOW} <= {found.setting, *found.ties}


def test_no_setting_within_the_constraints_is_explained() -> None:
    with pytest.raises(NoSettingError, match="fastest one, original limits, takes 1 "):
        recommend(measured(0.0, 2), Constraints(deadline=0.5))
    with pytest.raises(NoSettingError, match="no setting was measured twice"):
        recommend(measured(0.0, 1), Constraints(max_slowdown=0.5, deadline=3.0))
    with pytest.raises(NoSettingError, match="baseline has no usable trial"):
        recommend(SettingEstimates(list(CURVE), [trial(SAVING, 0, 1.0, 1.0)]), Constraints())


def test_budget_is_kept_in_at_least_95_of_100_recommendations() -> None:
    broken = sum(
        CURVE[chosen(measured(0.05, 3, seed), max_slowdown=0.05)][0] > 1.05 for seed in range(200)
    )
    assert broken <= 0.05 * 200
