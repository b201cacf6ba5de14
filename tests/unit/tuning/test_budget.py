"""The slowdown account: which energy is saved by which comparisons."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from wattspan.model import SECOND
from wattspan.tuning.decisions.blocks import Block, LevelTime
from wattspan.tuning.decisions.budget import ComparedEnergy, SlowdownAccount
from wattspan.tuning.decisions.estimates import Pair
from wattspan.tuning.decisions.search import TunerState, closed_account, saved_energy
from wattspan.tuning.decisions.step import begin, with_pair
from wattspan.tuning.decisions.values import KnobRange, TunerPolicy

TOP, LEVEL = 400_000, 300_000
SAVES = math.log(0.8)  # log ratio of power that saves a quarter of the energy that is spent


def new() -> TunerState:
    return begin(TunerPolicy(), [KnobRange("gpu:0", TOP, 200_000)], now=0)


def worked(state: TunerState, joules: float, settling: int = 0) -> TunerState:
    """A second of work at the level, after others at it while it settles."""
    block = Block(LEVEL, 0, SECOND, 10, 10.0, SECOND, SECOND, 0.0, joules * 1e6, 0)
    time = LevelTime(LEVEL, (1 + settling) * SECOND, 10)
    account = state.account.add_time(time, LEVEL, TOP, held=False).add_energy(block, TOP)
    return state._replace(account=account)


def compared(state: TunerState, power: float, time: float = 0.0) -> TunerState:
    pair = Pair(LEVEL, 0, time, time, power, 0.1)
    account = state.account.add_comparison(LEVEL, time, power)
    return state._replace(account=account, estimates=with_pair(state.estimates, pair))


def joules(state: TunerState) -> tuple[float, float, float]:
    low, likely, high = saved_energy(state)
    return low / 1e6, likely / 1e6, high / 1e6


def test_comparison_counts_for_the_energy_around_it() -> None:
    found = ComparedEnergy().add(0.1, -1.0, 10).add(0.3, -3.0, 30).add(0.3, 0.0, 40)
    assert found.energy == 80
    assert found.power == pytest.approx((10 * -1 + 30 * -2 + 40 * -1.5) / 80)
    assert found.time == pytest.approx((10 * 0.1 + 30 * 0.2 + 40 * 0.3) / 80)


def test_equal_weights_have_the_standard_error_of_their_number() -> None:
    found = ComparedEnergy().add(0, 0, 5).add(0, 0, 10).add(0, 0, 10)
    assert found.comparisons == pytest.approx(25**2 / (10**2 + 10**2 + 5**2))
    assert ComparedEnergy().add(0, 0, 5).comparisons == 1


def test_lower_end_of_the_saving_has_compared_energy_only() -> None:
    state = new()
    for _ in range(50):
        state = compared(worked(state, 80), SAVES)
    low, likely, high = joules(state)
    assert likely == pytest.approx(50 * 20)
    assert 0.98 * likely < low < likely < high < 1.02 * likely
    later = joules(worked(state, 800))
    assert later[0] == low
    assert later[1] == pytest.approx(likely + 200)
    assert later[2] > high + 200


def test_energy_is_not_credited_with_a_saving_of_other_times() -> None:
    """The job stops to react to the cap while most of its energy is still to be spent."""
    state = new()
    for _ in range(50):
        state = compared(worked(state, 80), SAVES)
    for _ in range(50):
        state = compared(worked(state, 400), 0.0)
    low, likely, high = joules(state)
    assert low < 50 * 20
    assert likely == pytest.approx(50 * 20, rel=0.1)
    assert high > 50 * 20


def test_settling_time_adds_nothing_to_the_certain_saving() -> None:
    state = compared(worked(new(), 80, settling=1), SAVES)
    low, likely, high = joules(state)
    assert low < 20
    assert likely == pytest.approx(30)
    assert high > 40


def test_level_without_comparison_has_the_saving_of_the_curve() -> None:
    low, likely, high = joules(worked(new(), 80))
    assert low == 0
    assert 0 < likely < high


def test_closed_account_keeps_the_saving_and_begins_anew() -> None:
    state = compared(worked(new(), 80), SAVES)
    closed = closed_account(state)
    assert closed.closed_saved == saved_energy(state)
    assert closed.levels == {}
    assert saved_energy(state._replace(account=closed)) == (0, 0, 0)
    assert not replace(closed, closed_saved=(0.0, 0.0, 0.0)).metered
    assert closed.metered
    assert not SlowdownAccount().metered
