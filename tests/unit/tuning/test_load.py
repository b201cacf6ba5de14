"""Load of a server: bins, averages, surges, projection, growth and silence."""

from __future__ import annotations

import random

import pytest

from wattspan.model import SECOND
from wattspan.tuning.decisions.load import (
    MAX_BIN,
    RISE_WINDOW,
    LoadSample,
    LoadTracker,
    bin_bound,
    load_bin,
)

PERIOD = 5 * SECOND


def steady(
    tracker: LoadTracker,
    seconds: int,
    in_flight: float,
    *,
    rate: int = 5,
    ended: int | None = None,
    tokens: tuple[float, float] = (100.0, 20.0),
    at: int = 0,
) -> LoadTracker:
    """Samples of a second each; ``rate`` requests arrive in each, ``ended`` or as many end."""
    for second in range(at, at + seconds):
        tracker = tracker.add(
            LoadSample(
                second * SECOND,
                (second + 1) * SECOND,
                in_flight,
                rate,
                rate if ended is None else ended,
                *tokens,
            )
        )
    return tracker


@pytest.mark.parametrize(("load", "number"), [(0.0, 0), (1.0, 0), (1.01, 1), (2.0, 1), (16.0, 4)])
def test_bins_are_spaced_logarithmically(load: float, number: int) -> None:
    assert load_bin(load) == number
    assert load <= bin_bound(number) + 1e-9


def test_highest_bin_has_no_bound() -> None:
    assert load_bin(1e30) == MAX_BIN


def test_load_of_an_unknown_server_is_zero() -> None:
    tracker = LoadTracker(PERIOD)
    assert tracker.load == 0.0
    assert tracker.projected == 0.0
    assert not tracker.silent(100 * SECOND)
    assert not tracker.growing


def test_sample_without_duration_is_ignored() -> None:
    tracker = LoadTracker(PERIOD)
    assert tracker.add(LoadSample(5, 5, 3.0, 1, 1)) is tracker


def test_steady_load_is_the_requests_in_flight() -> None:
    tracker = steady(LoadTracker(PERIOD), 120, 12.0)
    assert tracker.load == pytest.approx(12.0)
    assert tracker.projected == pytest.approx(12.0)
    assert not tracker.surging


def test_doubled_load_is_known_within_a_period() -> None:
    tracker = steady(LoadTracker(PERIOD), 120, 12.0)
    assert tracker.bin == tracker.usual_bin == 4
    tracker = steady(tracker, 5, 24.0, at=120)
    assert tracker.surging
    assert tracker.load > 16.0
    assert tracker.bin == 5
    assert tracker.usual_bin == 4


def test_doubled_arrivals_are_a_surge_before_requests_accumulate() -> None:
    tracker = steady(LoadTracker(PERIOD), 120, 12.0)
    tracker = steady(tracker, 5, 12.0, rate=10, at=120)
    assert tracker.surging
    assert tracker.bin == 5


def test_end_of_a_surge_of_arrivals_is_known_within_a_period() -> None:
    tracker = steady(LoadTracker(PERIOD), 120, 12.0)
    tracker = steady(tracker, 3, 12.0, rate=12, at=120)
    assert tracker.surging
    assert not steady(tracker, 5, 12.0, at=123).surging


def test_usual_poisson_arrivals_seldom_surge() -> None:
    chance = random.Random(4)
    tracker, surges = steady(LoadTracker(PERIOD), 30, 10.0), 0
    for second in range(30, 1530):
        before = tracker.surging
        rate = sum(chance.random() < 0.055 for _ in range(100))
        tracker = steady(tracker, 1, 10.0, rate=rate, at=second)
        surges += tracker.surging and not before
    assert surges <= 25  # once in a minute


def test_bursts_that_are_usual_are_no_surge() -> None:
    tracker = LoadTracker(PERIOD)
    for second in range(0, 3600, 10):
        tracker = steady(tracker, 5, 10.0, rate=10, at=second)
        tracker = steady(tracker, 5, 10.0, rate=1, at=second + 5)
    surging = []
    for second in range(3600, 3700, 10):
        for step in range(10):
            tracker = steady(tracker, 1, 10.0, rate=10 if step < 5 else 1, at=second + step)
            surging.append(tracker.surging)
    assert not any(surging)


def test_arrivals_after_idleness_are_not_compared() -> None:
    tracker = steady(LoadTracker(PERIOD), 120, 0.0, rate=0)
    assert not steady(tracker, 1, 1.0, rate=50, at=120).arrival_test.surging


def test_first_load_is_no_surge() -> None:
    tracker = steady(LoadTracker(PERIOD), 10, 0.0, rate=0)
    assert steady(tracker, 3, 4.0, at=10).load < 4.0


def test_small_variation_is_no_surge() -> None:
    tracker = steady(LoadTracker(PERIOD), 120, 12.0)
    tracker = steady(tracker, 2, 16.0, at=120)
    assert not tracker.surging
    assert tracker.load < 13.5


def test_heavier_requests_scale_the_load() -> None:
    tracker = steady(LoadTracker(PERIOD), 1200, 10.0, tokens=(1000.0, 200.0))
    lighter = steady(tracker, 120, 10.0, tokens=(500.0, 100.0), at=1200)
    heavier = steady(tracker, 120, 10.0, tokens=(4000.0, 200.0), at=1200)
    assert lighter.load == pytest.approx(10.0)
    assert heavier.mix > 2
    assert heavier.load == pytest.approx(10.0 * heavier.mix)


def test_mix_is_unknown_without_tokens() -> None:
    assert steady(LoadTracker(PERIOD), 60, 3.0, tokens=(0.0, 0.0)).mix == 1.0


def test_projection_adds_the_usual_rise_of_ten_minutes() -> None:
    tracker, at = LoadTracker(PERIOD), 0
    for level in [8.0, 12.0, 16.0] * 10:
        tracker = steady(tracker, 30, level, at=at)
        at += 30
    assert tracker.projected > 1.05 * tracker.load
    calm = steady(tracker, RISE_WINDOW // SECOND + 60, 16.0, at=at)
    assert calm.projected == pytest.approx(calm.load, rel=0.02)


def test_projection_ignores_times_without_load() -> None:
    tracker = steady(LoadTracker(PERIOD), 120, 0.0)
    assert tracker.projected == 0.0
    assert steady(tracker, 10, 4.0, at=120).projected >= 4.0


def test_queue_grows_if_arrivals_exceed_ends_in_two_periods() -> None:
    tracker = steady(LoadTracker(PERIOD), 20, 5.0)
    assert not steady(tracker, 6, 6.0, rate=10, ended=5, at=20).growing
    assert steady(tracker, 16, 9.0, rate=10, ended=4, at=20).growing


def test_chance_is_no_growth() -> None:
    tracker = steady(LoadTracker(PERIOD), 20, 5.0)
    assert not steady(tracker, 16, 5.0, rate=6, ended=5, at=20).growing


def test_silence_needs_requests_in_flight() -> None:
    busy = steady(LoadTracker(PERIOD), 60, 4.0)
    assert not busy.silent(61 * SECOND)
    assert busy.silent(80 * SECOND)
    idle = steady(steady(LoadTracker(PERIOD), 60, 4.0), 400, 0.0, rate=0, at=60)
    assert not idle.silent(500 * SECOND)


def test_long_requests_are_no_silence() -> None:
    tracker = LoadTracker(PERIOD)
    for minute in range(10):
        start = minute * 60
        sample = LoadSample(start * SECOND, (start + 60) * SECOND, 2.0, 1, 1)
        tracker = tracker.add(sample)  # requests of two minutes
    assert not tracker.silent((600 + 300) * SECOND)
    assert tracker.silent((600 + 400) * SECOND)
