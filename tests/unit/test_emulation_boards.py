"""Cap and clock to power and speed: the model, and the published curves."""

from __future__ import annotations

from itertools import pairwise

import pytest

from wattspan.emulation.boards import (
    A40,
    BOARDS,
    H100,
    V100,
    Demand,
    ModelKernel,
    operate,
    published_curve,
    published_curves,
)
from wattspan.emulation.workloads import DECODE

FULL = Demand(1.0, ModelKernel())
UNLIMITED = 1 << 30


def test_h100_has_the_captured_burn_power() -> None:
    point = operate(H100.silicon, [FULL], H100.limits[2])
    assert (point.mhz, point.power, point.capped) == (1980, 629_000, False)


def test_unused_gpu_idles_at_its_lowest_clock() -> None:
    point = operate(H100.silicon, [Demand(0.0, ModelKernel())], H100.limits[2])
    assert (point.mhz, point.power) == (345, 70_000)


def test_cap_picks_the_highest_clock_that_fits() -> None:
    point = operate(H100.silicon, [FULL], 400_000)
    above = H100.silicon.busy_power(point.mhz + H100.silicon.step_mhz)
    assert point.power <= 400_000 < above
    assert point.capped
    assert not point.at_floor


def test_cap_below_the_floor_is_exceeded() -> None:
    point = operate(H100.silicon, [FULL], 100_000)
    assert point.mhz == H100.silicon.min_mhz
    assert point.power > 100_000
    assert point.at_floor


def test_locked_clock_is_not_reported_as_a_cap() -> None:
    point = operate(H100.silicon, [FULL], 700_000, ceiling_mhz=1200)
    assert (point.mhz, point.capped) == (1200, False)


def test_clock_lock_saves_energy_of_memory_bound_work_and_a_cap_does_not() -> None:
    decode = [Demand(1.0, DECODE)]
    free = operate(H100.silicon, decode, 700_000)
    capped = operate(H100.silicon, decode, 400_000)
    locked = operate(H100.silicon, decode, 700_000, ceiling_mhz=1200)
    assert capped == free
    assert locked.power < free.power * 0.8
    assert locked.grants[0].speed > 0.85


def test_two_full_loads_share_one_gpu() -> None:
    point = operate(H100.silicon, [FULL, FULL], 700_000)
    assert point.power == 629_000
    assert [grant.share for grant in point.grants] == [500_000, 500_000]
    assert [grant.speed for grant in point.grants] == [0.5, 0.5]


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_every_board_draws_more_at_every_higher_clock(board) -> None:
    powers = [board.silicon.busy_power(mhz) for mhz in board.silicon.clocks()]
    assert all(low < high for low, high in pairwise(powers))
    assert board.silicon.idle < powers[0]


@pytest.mark.parametrize("key", published_curves(), ids=" ".join)
def test_published_curve_passes_through_its_points(key) -> None:
    board = {"A40": A40, "V100": V100}[key[0]]
    curve = published_curve(*key)
    for measured in curve.points:
        point = operate(board.silicon, [Demand(1.0, curve)], measured.limit)
        assert point.power == pytest.approx(measured.power, abs=2)
        assert point.grants[0].speed == pytest.approx(1 / measured.duration)


def test_between_published_limits_is_between_published_powers() -> None:
    curve = published_curve("A40", "bert")
    power = operate(A40.silicon, [Demand(1.0, curve)], 187_500).power
    low, high = (operate(A40.silicon, [Demand(1.0, curve)], w).power for w in (175_000, 200_000))
    assert low < power < high


def test_limit_below_a_published_floor_is_exceeded() -> None:
    curve = published_curve("A40", "resnet50")
    point = operate(A40.silicon, [Demand(1.0, curve)], 100_000)
    assert point.power > 110_000
    assert point.at_floor


def test_published_curve_has_highest_energy_at_both_ends() -> None:
    """The published optimum of this job, found again through the physics."""
    curve = published_curve("A40", "bert")
    energy = {}
    for point in curve.points:
        found = operate(A40.silicon, [Demand(1.0, curve)], point.limit)
        energy[point.limit] = found.power / found.grants[0].speed
    best = min(energy, key=energy.__getitem__)
    assert best in {175_000, 200_000}
    assert energy[100_000] > energy[best] < energy[300_000]


def test_unknown_curve_error_lists_valid_names() -> None:
    with pytest.raises(KeyError, match="A40 bert"):
        published_curve("A40", "chess")


def test_model_follows_the_published_v100_sweep() -> None:
    """Power as published within a few percent: the parameters were fitted to such sweeps."""
    curve = published_curve("V100", "bert")
    kernel = ModelKernel(compute=0.75, activity=0.93)
    for measured in curve.points:
        modelled = operate(V100.silicon, [Demand(1.0, kernel)], measured.limit)
        assert modelled.power == pytest.approx(measured.power, rel=0.08)
        assert 1 / modelled.grants[0].speed == pytest.approx(measured.duration, rel=0.25)
