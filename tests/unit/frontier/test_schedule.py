"""The order of trials and the settings that are left out early."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest
from testbed.studies import noisy_trial, power_settings, study, trial

from wattspan.frontier.schedule import TrialSchedule
from wattspan.frontier.trials import PowerLimit, Setting, Study, Trial, grid

LEVELS = power_settings(100, 90, 80, 70, 60, 50, 40)


def share(setting: Setting) -> float:
    return 1.0 if setting.power is None else setting.power.value


def flat(setting: Setting) -> tuple[float, float]:
    """Time hardly rises, and energy falls with the limit."""
    return 1.0 + 0.1 * (1 - share(setting)), 300 * share(setting)


def steep(setting: Setting) -> tuple[float, float]:
    """Below 80 % time and energy rise."""
    lack = max(0.0, 0.8 - share(setting))
    return 1.0 + 3 * lack, 300 * share(setting) if lack == 0 else 240 * (1 + 2 * lack)


def carried_out(
    before: Study,
    curve: Callable[[Setting], tuple[float, float]],
    noise: float = 0.0,
    seed: int = 1,
    schedule: TrialSchedule | None = None,
) -> Study:
    schedule = schedule or TrialSchedule()
    rng, now = random.Random(seed), before
    while (planned := schedule.next(now)) is not None:
        assert schedule.remaining(now) > 0
        done = noisy_trial(curve, planned.setting, planned.block, noise, rng)
        now = msgspec.structs.replace(now, trials=[*now.trials, done])
        now = msgspec.structs.replace(now, pruned=[*now.pruned, *schedule.pruned(now)])
    assert schedule.remaining(now) == 0
    return now


def test_every_setting_is_repeated_in_each_block() -> None:
    done = carried_out(study(LEVELS, repeat=3), flat)
    assert done.pruned == []
    assert len({(one.setting, one.block) for one in done.trials}) == len(done.trials) == 21


def test_first_block_descends_and_the_others_are_shuffled() -> None:
    done = carried_out(study(LEVELS, repeat=3), flat)
    blocks = [[one.setting for one in done.trials if one.block == block] for block in range(3)]
    assert blocks[0] == LEVELS
    assert sorted(blocks[1], key=LEVELS.index) == LEVELS
    assert blocks[1] != LEVELS
    assert blocks[1] != blocks[2]


def test_resumed_study_goes_on_in_the_same_order() -> None:
    whole = carried_out(study(LEVELS, repeat=2), flat)
    half = msgspec.structs.replace(whole, trials=whole.trials[:9])
    assert carried_out(half, flat).trials == whole.trials


def test_descent_ends_once_energy_has_risen_twice() -> None:
    done = carried_out(study(LEVELS), steep)
    out = dict(done.pruned)
    assert set(LEVELS[5:]) <= set(out)
    assert "energy rises from 60 % on" in out[LEVELS[5]]
    assert not {LEVELS[0], LEVELS[1], LEVELS[2]} & set(out)


def test_descent_ends_at_the_longest_time() -> None:
    def slow(setting: Setting) -> tuple[float, float]:
        return 1.0 / share(setting) ** 2, 300 * share(setting)

    done = carried_out(study(LEVELS), slow)
    reasons = dict(done.pruned)
    assert LEVELS[-1] in reasons
    assert "1.5 times as long" in reasons[LEVELS[-1]]
    assert LEVELS[1] not in reasons


def test_baseline_is_measured_in_every_block() -> None:
    def worst(setting: Setting) -> tuple[float, float]:
        return (9.0, 9000.0) if setting.power is None else flat(setting)

    done = carried_out(study(LEVELS, repeat=3), worst)
    assert sum(one.setting == LEVELS[0] for one in done.trials) == 3


def test_failed_trial_does_not_end_a_descent() -> None:
    failed = Trial(setting=LEVELS[2], block=0, started_unix=0.0, failure="exit code 1")
    begun = [trial(LEVELS[0], 0, *flat(LEVELS[0])), trial(LEVELS[1], 0, *flat(LEVELS[1])), failed]
    done = carried_out(study(LEVELS, trials=begun), flat)
    assert {one.setting for one in done.trials} == set(LEVELS)
    assert len(done.trials) == 21


def test_resumed_study_repeats_trials_that_failed() -> None:
    failed = Trial(setting=LEVELS[1], block=0, started_unix=0.0, failure="the agent ended")
    begun = study(LEVELS[:2], repeat=1, trials=[trial(LEVELS[0], 0, 1.0, 300.0), failed])
    assert carried_out(begun, flat).trials == begun.trials
    again = carried_out(begun, flat, schedule=TrialSchedule(resumed=2)).trials
    assert [one.setting for one in again[2:]] == [LEVELS[1]]


def test_each_value_of_a_parameter_descends_on_its_own() -> None:
    chosen = grid([PowerLimit(0.8), PowerLimit(0.6)], [], {"batch": ["8", "16"]})

    def curve(setting: Setting) -> tuple[float, float]:
        small = dict(setting.parameters)["batch"] == "8"
        return (steep if small else flat)(setting)

    done = carried_out(study(chosen), curve)
    assert all(dict(setting.parameters)["batch"] == "8" for setting, _ in done.pruned)


@pytest.mark.exhaustive
def test_noise_alone_ends_few_descents() -> None:
    """Of the settings of a flat curve with 5 % noise, nearly all are measured to the end."""
    pruned = sum(
        len(carried_out(study(LEVELS), lambda setting: (1.0, 300.0), 0.05, seed).pruned)
        for seed in range(40)
    )
    assert pruned <= 0.1 * 40 * len(LEVELS)


def near_budget(setting: Setting) -> tuple[float, float]:
    """At 80 % within 0.5 % of a budget of 5 %, at 90 % far inside it, at 70 % far beyond it."""
    times = {1.0: 1.0, 0.9: 1.01, 0.8: 1.045, 0.7: 1.3}
    return times[share(setting)], 300 * share(setting)


def test_undecided_setting_is_repeated_further() -> None:
    done = carried_out(
        study(LEVELS[:4], repeat=6),
        near_budget,
        0.01,
        schedule=TrialSchedule(max_slowdown=0.05),
    )
    counts = [sum(one.setting == setting for one in done.trials) for setting in LEVELS[:4]]
    assert counts[3] == 1
    assert counts[2] > 3
    assert counts[0] >= counts[2]  # the baseline is in each block
    assert len(done.trials) <= 24


def test_decided_settings_are_repeated_until_the_noise_is_known() -> None:
    done = carried_out(
        study(LEVELS[:4]), near_budget, 0.0001, schedule=TrialSchedule(max_slowdown=0.05)
    )
    counts = [sum(one.setting == setting for one in done.trials) for setting in LEVELS[:4]]
    assert counts[3] == 1
    assert min(counts[0], counts[2]) >= 2
    assert len(done.trials) < 12


def test_known_budget_needs_no_more_trials_than_a_whole_study() -> None:
    def at_budget(setting: Setting) -> tuple[float, float]:
        return 1.0 if setting.power is None else 1.05, 300 * share(setting)

    schedule = TrialSchedule(max_slowdown=0.05)
    for seed in range(5):
        done = carried_out(study(LEVELS[:2]), at_budget, 0.01, seed, schedule)
        assert len(done.trials) <= 6


def test_descent_ends_beyond_the_budget() -> None:
    def slow(setting: Setting) -> tuple[float, float]:
        return 1.0 / share(setting), 300 * share(setting)

    done = carried_out(study(LEVELS), slow, schedule=TrialSchedule(max_slowdown=0.05))
    assert "60 % exceeds" not in str(done.pruned)
    reasons = dict(done.pruned)
    assert "exceeds the slowdown budget" in reasons[LEVELS[-1]]
    assert LEVELS[1] not in reasons


def linear(setting: Setting) -> tuple[float, float]:
    """3 % more time for each tenth of the limit."""
    return 1.0 + 0.3 * (1 - share(setting)), 300 * share(setting)


def test_descent_of_a_budget_takes_every_second_setting_first() -> None:
    done = carried_out(study(LEVELS), linear, schedule=TrialSchedule(max_slowdown=0.1))
    first = [one.setting for one in done.trials if one.block == 0]
    assert first == [*LEVELS[0:7:2], LEVELS[3], LEVELS[5]]  # 60 % may keep the budget within noise
    assert dict(done.pruned)[LEVELS[1]] == "not beside the best setting within the slowdown budget"


def test_descent_of_a_budget_measures_both_sides_of_the_least_energy() -> None:
    def least_at_80(setting: Setting) -> tuple[float, float]:
        return 1.0, 300 * (1 + 2 * abs(share(setting) - 0.8))

    done = carried_out(study(LEVELS), least_at_80, schedule=TrialSchedule(max_slowdown=0.5))
    assert {LEVELS[1], LEVELS[3]} <= {one.setting for one in done.trials}


def test_failed_trial_of_the_coarse_descent_leaves_its_neighbours() -> None:
    failed = Trial(setting=LEVELS[2], block=0, started_unix=0.0, failure="exit code 1")
    begun = study(LEVELS, trials=[trial(LEVELS[0], 0, *linear(LEVELS[0])), failed])
    done = carried_out(begun, linear, schedule=TrialSchedule(max_slowdown=0.1))
    assert LEVELS[3] in {one.setting for one in done.trials}


def test_resumed_study_of_a_budget_goes_on_in_the_same_order() -> None:
    schedule = TrialSchedule(max_slowdown=0.05)
    whole = carried_out(study(LEVELS[:4]), near_budget, 0.0, schedule=schedule)
    half = msgspec.structs.replace(whole, trials=whole.trials[:6])
    assert carried_out(half, near_budget, 0.0, schedule=schedule).trials == whole.trials
