"""The expected growth of the hypervolume, and the choice of the next trial by it."""

from __future__ import annotations

import random

import msgspec
import pytest
from testbed.studies import hypervolume, power_settings, study, trial

from wattspan.frontier.schedule import Planned, TrialSchedule, affordable_trials
from wattspan.frontier.statistics import (
    PRIOR_SPREAD,
    LogPoint,
    PlacedFigure,
    SettingFigures,
    best,
    expected_gain,
    gains,
    predictions,
)
from wattspan.frontier.trials import PowerLimit, Setting, Study, Trial, grid, places

REFERENCE = LogPoint(1.0, 1.0)
LEVELS = power_settings(100, 90, 80, 70, 60)


# ----------------------------------------------------------------------------------- hypervolume


@pytest.mark.parametrize(
    ("points", "area"),
    [
        ([], 0.0),
        ([(0.0, 0.0)], 1.0),
        ([(0.0, 0.5), (0.5, 0.0)], 0.75),
        ([(0.5, 0.0), (0.0, 0.5), (0.6, 0.6)], 0.75),  # the last one is beaten
        ([(0.0, 0.0), (0.0, 0.0)], 1.0),
        ([(-1.0, 0.5)], 1.0),
        ([(2.0, -5.0)], 0.0),  # beyond the reference
        ([(-5.0, 2.0)], 0.0),
    ],
)
def test_hypervolume_is_the_dominated_area(points: list[tuple[float, float]], area: float) -> None:
    assert hypervolume([LogPoint(*one) for one in points], REFERENCE) == pytest.approx(area)


def test_gain_of_a_certain_point_is_the_growth_of_the_area() -> None:
    others = [LogPoint(0.2, 0.6), LogPoint(0.5, 0.3)]
    for point in (LogPoint(0.1, 0.9), LogPoint(0.3, 0.4), LogPoint(0.9, -1), LogPoint(0.6, 0.7)):
        growth = hypervolume([*others, point], REFERENCE) - hypervolume(others, REFERENCE)
        assert expected_gain(point, others, REFERENCE) == pytest.approx(growth)


def test_expected_gain_is_the_mean_of_random_points() -> None:
    others = [LogPoint(0.2, 0.6), LogPoint(0.5, 0.3)]
    mean, rng = LogPoint(0.4, 0.5), random.Random(1)
    drawn = [LogPoint(rng.gauss(mean.time, 0.2), rng.gauss(mean.energy, 0.1)) for _ in range(4000)]
    found = [expected_gain(one, others, REFERENCE) for one in drawn]
    expected = expected_gain(mean, others, REFERENCE, LogPoint(0.2, 0.1))
    assert sum(found) / len(found) == pytest.approx(expected, rel=0.05)


# ------------------------------------------------------------------------------------- surrogate


def test_prediction_returns_to_the_baseline_away_from_figures() -> None:
    near, far = predictions([PlacedFigure((0.0,), 0.3, 1e-6)], [(0.0,), (9.0,)])
    assert near.mean == pytest.approx(0.3, abs=1e-3)
    assert near.variance < 1e-4
    assert far.mean == pytest.approx(0.0, abs=1e-6)
    assert far.variance > 0.5 * PRIOR_SPREAD**2


def test_noisy_figure_is_believed_less() -> None:
    ((exact, _),) = predictions([PlacedFigure((0.0,), 0.3, 1e-6)], [(0.0,)])
    ((noisy, _),) = predictions([PlacedFigure((0.0,), 0.3, 0.1)], [(0.0,)])
    assert 0 < noisy < exact


def test_large_differences_widen_the_spread() -> None:
    def spread(value: float) -> float:
        figures = [PlacedFigure((0.0,), 0.0, 1e-6), PlacedFigure((1.0,), value, 1e-6)]
        return predictions(figures, [(9.0,)])[0].variance

    assert spread(2.0) > 5 * spread(0.1)


def test_places_are_the_ranks_of_the_values_that_vary() -> None:
    assert places(LEVELS[:3]) == [(0.0,), (0.5,), (1.0,)]
    chosen = grid([PowerLimit(0.5)], [1500, 900], {"batch": ["8"], "lr": ["1", "2"]})
    assert places(chosen)[:2] == [(0.0, 0.0, 0.0), (1.0, 0.0, 0.0)]
    assert places(chosen)[-1] == (1.0, 1.0, 1.0)
    assert places([Setting(), Setting()]) == [(), ()]


# ------------------------------------------------------------------------------------- selection


NOISE = LogPoint(4e-4, 4e-4)


def test_unmeasured_setting_gains_more_than_a_known_one() -> None:
    results = {0: SettingFigures(LogPoint(0.0, 0.0), 1), 1: SettingFigures(LogPoint(0.1, -0.1), 3)}
    found = gains([1, 2], [(0.0,), (0.5,), (1.0,)], results, NOISE, LogPoint(0.4, 0.4))
    assert found[2] > 10 * found[1] >= 0


def test_setting_near_the_frontier_gains_more_than_a_beaten_one() -> None:
    results = {
        0: SettingFigures(LogPoint(0.0, 0.0), 2),
        1: SettingFigures(LogPoint(0.01, -0.10), 1),
        2: SettingFigures(LogPoint(0.015, -0.10), 1),
        3: SettingFigures(LogPoint(0.3, 0.2), 1),
    }
    found = gains([2, 3], places(LEVELS[:4]), results, NOISE, LogPoint(0.4, 0.4))
    assert found[2] > 10 * found[3] >= 0


def test_most_gain_is_chosen_and_the_first_of_equal_ones() -> None:
    rng = random.Random(0)
    assert best({3: 0.1, 1: 0.2, 2: 0.2}, {}, rng) == 1


def test_without_gain_a_setting_with_the_fewest_trials_is_chosen_by_chance() -> None:
    found, trials = {1: 1e-9, 2: 0.0, 3: 0.0}, {1: 2, 2: 1, 3: 1}
    chosen = {best(found, trials, random.Random(seed)) for seed in range(20)}
    assert chosen == {2, 3}
    assert best(found, trials, random.Random(7)) == best(found, trials, random.Random(7))
    assert best({4: 0.0, 2: 0.0}, {2: 1}, random.Random(0)) == 4  # without any trial


# ----------------------------------------------------------------------------------- time budget


def timed(setting: Setting, block: int, joules: float = 1.0, **other: str) -> Trial:
    """A trial that took 20 s."""
    return msgspec.structs.replace(
        trial(setting, block, 1.0, joules, **other), elapsed_seconds=20.0
    )


def after(*trials: Trial, repeat: int = 3) -> Study:
    return study(LEVELS, repeat=repeat, trials=trials)


AMPLE = TrialSchedule(time_budget=1e6)


def test_first_trial_is_the_baseline() -> None:
    assert AMPLE.next(after()) == Planned(LEVELS[0], 0)


def test_budget_counts_whole_trials_by_their_mean_time() -> None:
    assert affordable_trials(after(), 15.0) == 1  # warm-up and window
    assert affordable_trials(after(), 14.9) == 0
    begun = after(timed(LEVELS[0], 0))
    assert affordable_trials(begun, 39.9) == 0
    assert affordable_trials(begun, 61.0) == 2
    assert affordable_trials(begun, 1.0) == 0
    assert TrialSchedule(time_budget=39.9).next(begun) is None
    assert TrialSchedule(time_budget=39.9).remaining(begun) == 0
    assert TrialSchedule(time_budget=61.0).remaining(begun) == 2


def test_trial_of_an_older_release_counts_as_no_time() -> None:
    assert affordable_trials(after(trial(LEVELS[0], 0, 1.0, 1.0)), 30.0) == 2


def test_next_trial_is_not_measured_yet_in_its_block() -> None:
    begun = after(timed(LEVELS[0], 0), timed(LEVELS[4], 0))
    planned = AMPLE.next(begun)
    assert planned.block == 0
    assert planned.setting in LEVELS[1:4]


def test_complete_block_is_followed_by_the_baseline_of_the_next() -> None:
    assert AMPLE.next(after(*(timed(one, 0) for one in LEVELS))) == Planned(LEVELS[0], 1)


def test_block_ends_once_a_repetition_gains_more_than_a_new_setting() -> None:
    """A setting between two measured ones far beyond the reference can hardly gain."""
    known = {0: (1.0, 1.0), 1: (1.0, 0.99), 2: (9.0, 9.0), 4: (9.0, 9.0)}
    trials = [
        msgspec.structs.replace(trial(LEVELS[n], 0, *figures), elapsed_seconds=20.0)
        for n, figures in known.items()
    ]
    assert AMPLE.next(after(*trials)) == Planned(LEVELS[0], 1)
    # A block that may not end yet takes the new setting.
    assert AMPLE.next(after(*trials[:3])) in (Planned(LEVELS[3], 0), Planned(LEVELS[4], 0))


def test_last_block_goes_back_to_the_trials_that_earlier_ones_lack() -> None:
    done = [
        timed(one, block) for block in (0, 1) for one in LEVELS if (one, block) != (LEVELS[2], 0)
    ]
    assert AMPLE.next(after(*done, repeat=2)) == Planned(LEVELS[2], 0)


def test_failed_setting_is_not_chosen_before_the_study_is_resumed() -> None:
    failed = Trial(setting=LEVELS[1], block=0, started_unix=0.0, failure="exit code 1")
    begun = after(timed(LEVELS[0], 0), failed, *(timed(one, 0) for one in LEVELS[2:]), repeat=1)
    assert AMPLE.next(begun) is None
    resumed = TrialSchedule(time_budget=1e6, resumed=len(begun.trials))
    assert resumed.next(begun) == Planned(LEVELS[1], 0)


def test_failed_baseline_is_tried_again_in_the_next_block() -> None:
    failed = Trial(setting=LEVELS[0], block=0, started_unix=0.0, failure="exit code 1")
    begun = after(failed, *(timed(one, 0) for one in LEVELS[1:]), repeat=2)
    assert AMPLE.next(begun) == Planned(LEVELS[0], 1)
    first = AMPLE.next(after(failed))  # nothing can be compared yet
    assert first.setting in LEVELS[1:]


def test_baseline_is_completed_though_all_others_are_pruned() -> None:
    begun = after(timed(LEVELS[0], 0), timed(LEVELS[1], 1))
    pruned = msgspec.structs.replace(begun, pruned=[(one, "slow") for one in LEVELS[1:]])
    assert AMPLE.next(pruned) == Planned(LEVELS[0], 1)
    assert AMPLE.remaining(pruned) == 2
    done = [timed(LEVELS[0], block) for block in (0, 1)]
    assert AMPLE.next(msgspec.structs.replace(pruned, trials=done)) == Planned(LEVELS[0], 2)


def test_gain_counts_within_the_slowdown_budget_only() -> None:
    """Beyond it nothing is gained, so the setting inside it is repeated first."""
    known = ((1.0, 1.0), (1.04, 0.9), (1.4, 0.5), (1.42, 0.5), (1.44, 0.5))
    trials = [
        msgspec.structs.replace(trial(LEVELS[n], 0, *figures), elapsed_seconds=20.0)
        for n, figures in enumerate(known)
    ]
    begun = after(*trials, timed(LEVELS[0], 1))
    schedule = TrialSchedule(longest=2.0, max_slowdown=0.05, time_budget=1e6)
    assert schedule.next(begun) == Planned(LEVELS[1], 1)
    unlimited = TrialSchedule(longest=2.0, time_budget=1e6).next(begun)
    assert unlimited.setting in LEVELS[2:]
