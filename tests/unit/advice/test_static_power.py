"""The static power of a board: the regression of windows, its refusals, and the division."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from wattspan.advice.static_power import (
    CLOCK_BIN_HZ,
    MAX_CLOCK_BINS,
    MIN_WINDOWS,
    REFIT_EVERY,
    BoardStaticPower,
    StaticPowerFit,
    StaticPowerRefusal,
    WaitingWindow,
    fit_static_power,
)
from wattspan.attribution.division import StaticDivider, StaticShare
from wattspan.model import MILLISECOND, Instant, Interval, Microjoules, Milliwatts

BLOCK, WORK = 85_000, 320_000
STEP = 100 * MILLISECOND


def windows(
    shares: Callable[[random.Random], float],
    *,
    noise: float = 0.01,
    count: int = 120,
    seed: int = 1,
    block: int = BLOCK,
) -> list[WaitingWindow]:
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        share = shares(chance)
        power = (block * share + WORK * (1 - share)) * (1 + chance.gauss(0, noise))
        found.append(WaitingWindow(share, power, 60 + round(10 * share)))
    return found


def varied(chance: random.Random) -> float:
    return chance.uniform(0.1, 0.7)


@pytest.mark.parametrize("seed", range(20))
def test_fit_is_within_five_percent_where_waiting_varies(seed: int) -> None:
    found = fit_static_power(windows(varied, seed=seed, count=400))
    assert isinstance(found, StaticPowerFit)
    assert found.power == pytest.approx(BLOCK, rel=0.05)
    assert abs(found.power - BLOCK) < 1.5 * found.half_width
    assert found.working == pytest.approx(WORK, rel=0.02)
    assert found.celsius is not None
    assert 60 <= found.celsius[0] < found.celsius[1] <= 67


def test_fit_ignores_windows_of_another_activity() -> None:
    known = windows(varied, count=200)
    others = [WaitingWindow(0.0, 95_000.0) for _ in range(15)]  # an evaluation on the CPU
    found = fit_static_power([*known, *others])
    assert isinstance(found, StaticPowerFit)
    assert found.power == pytest.approx(BLOCK, rel=0.05)


def test_fit_is_refused_without_enough_windows() -> None:
    found = fit_static_power(windows(varied, count=MIN_WINDOWS - 1))
    assert found is StaticPowerRefusal.FEW_WINDOWS


def test_fit_is_refused_where_waiting_is_constant() -> None:
    found = fit_static_power(windows(lambda chance: 0.3 + chance.gauss(0, 0.03), noise=0.001))
    assert found is StaticPowerRefusal.NO_SPREAD


def test_fit_is_refused_where_the_spread_is_that_of_other_activities() -> None:
    constant = [WaitingWindow(0.5 + 0.001 * (i % 2), 200_000.0 + i % 3) for i in range(40)]
    others = [WaitingWindow(0.9, 400_000.0 + 40_000 * (i % 2)) for i in range(8)]
    found = fit_static_power([*constant, *others])
    assert not isinstance(found, StaticPowerFit)


def test_fit_is_refused_if_its_interval_is_wide() -> None:
    found = fit_static_power(windows(lambda chance: chance.uniform(0.0, 0.3), noise=0.2))
    assert found is StaticPowerRefusal.UNCERTAIN


def test_fit_is_refused_if_waiting_draws_as_much_as_working() -> None:
    found = fit_static_power(windows(varied, block=WORK, noise=0.005))
    assert found is StaticPowerRefusal.NOT_LOWER


def test_fit_of_windows_without_noise_is_exact() -> None:
    exact = [WaitingWindow(i / 100, BLOCK * i / 100 + WORK * (1 - i / 100)) for i in range(60)]
    found = fit_static_power(exact)
    assert isinstance(found, StaticPowerFit)
    assert (found.power, found.celsius) == (BLOCK, None)


def test_correlated_residuals_widen_the_interval() -> None:
    chance, drift = random.Random(4), 0.0
    slow, fast = [], []
    for _ in range(100):
        share = varied(chance)
        drift = 0.9 * drift + chance.gauss(0, 500)
        mixture = BLOCK * share + WORK * (1 - share)
        slow.append(WaitingWindow(share, mixture + drift))
    fast = sorted(slow, key=lambda one: chance.random())
    both = fit_static_power(slow), fit_static_power(fast)
    assert isinstance(both[0], StaticPowerFit)
    assert isinstance(both[1], StaticPowerFit)
    assert both[0].power == pytest.approx(both[1].power, abs=2)
    assert both[0].half_width > 1.5 * both[1].half_width


def test_clock_bins_are_fitted_apart_and_apply_to_their_neighbours() -> None:
    board = BoardStaticPower()
    for window in windows(varied):
        board.add(10 * CLOCK_BIN_HZ, window)
    for window in windows(varied, block=120_000):
        board.add(15 * CLOCK_BIN_HZ, window)
    board.add(11 * CLOCK_BIN_HZ, WaitingWindow(0.1, 1.0))
    low, near, high = (board.fit(bin_ * CLOCK_BIN_HZ) for bin_ in (10, 11, 15))
    assert isinstance(low, StaticPowerFit)
    assert isinstance(high, StaticPowerFit)
    assert near == low
    assert high.power == pytest.approx(120_000, rel=0.05)
    assert board.fit(12 * CLOCK_BIN_HZ) is StaticPowerRefusal.FEW_WINDOWS
    assert board.fit(None) is StaticPowerRefusal.FEW_WINDOWS


def test_fit_is_renewed_after_new_windows() -> None:
    board = BoardStaticPower()
    for window in windows(varied, count=MIN_WINDOWS - 1, noise=0.001):
        board.add(None, window)
    before = board.fit(None)
    assert before is StaticPowerRefusal.FEW_WINDOWS
    for window in windows(varied, count=REFIT_EVERY - 1, seed=9, noise=0.001):
        board.add(None, window)
    assert board.fit(None) is before
    for window in windows(varied, count=MIN_WINDOWS, seed=10, noise=0.001):
        board.add(None, window)
    assert isinstance(board.fit(None), StaticPowerFit)


def test_least_recently_used_clock_bin_is_removed() -> None:
    board = BoardStaticPower()
    for window in windows(varied):
        board.add(0, window)
    for number in range(2, MAX_CLOCK_BINS + 2):
        board.add(number * CLOCK_BIN_HZ, WaitingWindow(0.1, 1.0))
    assert board.fit(0) is StaticPowerRefusal.FEW_WINDOWS


# -------------------------------------------------------------------------------------- division


def interval(energy: int, number: int = 0) -> Interval:
    start = number * STEP
    return Interval("gpu", Instant(start, 0), Instant(start + STEP, 0), Microjoules(energy))


def test_static_part_is_power_times_time_without_the_idle_account() -> None:
    share = StaticDivider().divide(interval(30_000_000), 7_000_000, Milliwatts(100_000), STEP)
    assert share == StaticShare(3_000_000, 23_000_000)
    assert share.of(23_000_000) == 3_000_000
    assert share.of(11_500_000) == 1_500_000


def test_static_part_is_at_most_the_energy() -> None:
    share = StaticDivider().divide(interval(6_000_000), 0, Milliwatts(100_000), STEP)
    assert share == StaticShare(6_000_000, 6_000_000)


def test_static_part_of_an_interval_without_active_energy_is_zero() -> None:
    share = StaticDivider().divide(interval(6_000_000), 6_000_000, Milliwatts(100_000), STEP)
    assert share.of(0) == 0


def test_counter_steps_do_not_lower_the_static_part() -> None:
    divider = StaticDivider()
    steps = [0, 40_000_000] * 5
    shares = [
        divider.divide(interval(energy, number), 0, Milliwatts(100_000), STEP)
        for number, energy in enumerate(steps)
    ]
    assert sum(share.static for share in shares) == 100_000_000


def test_deficit_is_bounded_by_two_steps() -> None:
    divider = StaticDivider()
    for number in range(50):
        divider.divide(interval(0, number), 0, Milliwatts(100_000), STEP)
    share = divider.divide(interval(10**9, 50), 0, Milliwatts(100_000), STEP)
    assert share.static == 30_000_000


def test_time_outside_of_spans_is_left_out_with_the_idle_power() -> None:
    power = 0.2 * 60_000 + 0.3 * BLOCK + 0.5 * WORK
    window = WaitingWindow.of(0.3, 0.2, power, Milliwatts(60_000), 61)
    assert window.waiting == pytest.approx(0.375)
    assert window.power == pytest.approx(0.375 * BLOCK + 0.625 * WORK)
    assert window.celsius == 61
    assert WaitingWindow.of(0.3, 0.2, power, None) == WaitingWindow(0.3, power)


def test_refusal_is_that_of_the_bin_of_the_clock() -> None:
    board = BoardStaticPower()
    for window in windows(lambda _: 0.3):
        board.add(10 * CLOCK_BIN_HZ, window)
    board.add(11 * CLOCK_BIN_HZ, WaitingWindow(0.1, 1.0))
    assert board.fit(10 * CLOCK_BIN_HZ) is StaticPowerRefusal.NO_SPREAD
    assert board.fit(11 * CLOCK_BIN_HZ) is StaticPowerRefusal.FEW_WINDOWS


def test_windows_that_alternate_are_fitted() -> None:
    alternating = windows(lambda chance: 0.1, count=100) + windows(lambda chance: 0.7, count=100)
    mixed = [one for pair in zip(alternating[:100], alternating[100:], strict=True) for one in pair]
    found = fit_static_power(mixed)
    assert isinstance(found, StaticPowerFit)
    assert found.power == pytest.approx(BLOCK, rel=0.05)
