"""Miss rate with repeated looks, and the alarm for a higher rate."""

from __future__ import annotations

import random

import pytest

from wattspan.tuning.decisions.sequential_test import MissAlarm, MissCounts


def tallied(requests: int, misses: int) -> MissCounts:
    return MissCounts().add(requests, misses)


def test_three_hundred_requests_without_a_miss_bound_the_rate_at_one_percent() -> None:
    # Looking once, 299 would do (the rule of three); this many may be looked at all the while.
    assert tallied(350, 0).at_most(0.05) <= 0.01 < tallied(300, 0).at_most(0.05)


def test_miss_rate_is_unknown_without_requests() -> None:
    nothing = MissCounts().add(0, 0)
    assert nothing.groups == 0
    assert nothing.ratio is None
    assert nothing.at_most(0.05) == pytest.approx(1.0)
    assert nothing.at_least(0.05) == pytest.approx(0.0)


@pytest.mark.parametrize("misses", [0, 1, 7, 50, 100])
def test_bounds_enclose_the_observed_rate(misses: int) -> None:
    tally = tallied(100, misses)
    assert tally.at_least(0.05) <= misses / 100 <= tally.at_most(0.05)


def test_bounds_close_in_on_the_truth() -> None:
    tally = tallied(1_000_000, 10_000)
    assert 0.0095 < tally.at_least(0.05) < 0.01 < tally.at_most(0.05) < 0.0105


def test_clustered_misses_widen_the_bounds() -> None:
    crowds, strangers = MissCounts(), MissCounts()
    for turn in range(40):
        crowds = crowds.add(100, 20 if turn % 10 == 0 else 0)
        strangers = strangers.add(100, 2)
    assert crowds.misses == strangers.misses
    assert strangers.dispersion == 1.0
    assert crowds.dispersion > 10
    assert crowds.at_most(0.05) > strangers.at_most(0.05)
    assert crowds.at_least(0.05) < strangers.at_least(0.05)


def test_clustering_of_other_settings_widens_the_bounds() -> None:
    assert tallied(350, 0).at_most(0.05, dispersion=4.0) > 0.03


@pytest.mark.parametrize("misses", [0, 30])
def test_uniform_misses_have_no_clustering(misses: int) -> None:
    assert tallied(30, misses).add(30, misses).dispersion == 1.0


def test_claim_is_refuted_too_early_no_more_often_than_admitted() -> None:
    """The true rate stays below its bound at every look, in all but a twentieth of the courses."""
    chance = random.Random(1)
    wrong = 0
    for _ in range(100):
        tally = MissCounts()
        for _ in range(20):
            tally = tally.add(50, sum(chance.random() < 0.05 for _ in range(50)))
            if tally.at_most(0.05) < 0.05:
                wrong += 1
                break
    assert wrong <= 11  # of 100: threshold exceeded by a true 5 % with a probability below 1 %


def test_alarm_rings_at_once_when_everything_is_late() -> None:
    assert not MissAlarm(0.01).add(3, 3).alarmed
    assert MissAlarm(0.01).add(4, 4).alarmed


def test_alarm_is_early_at_ten_times_the_miss_rate() -> None:
    alarm, seen = MissAlarm(0.01), 0
    while not alarm.alarmed:
        alarm = alarm.add(10, 1)
        seen += 10
    assert seen <= 150


def test_alarm_is_quiet_as_long_as_no_more_than_allowed_are_late() -> None:
    alarm = MissAlarm(0.01)
    for _ in range(1000):
        alarm = alarm.add(100, 1)
        assert not alarm.alarmed


def test_good_times_do_not_make_up_for_bad_ones_to_come() -> None:
    quiet = MissAlarm(0.01).add(1_000_000, 0)
    assert quiet == MissAlarm(0.01)
