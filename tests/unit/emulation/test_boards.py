"""Cap and clock to power and speed."""

from __future__ import annotations

import csv
from itertools import pairwise

import pytest
from testbed.gpu_boards import BOARDS, V100
from testbed.requirements import ROOT

from wattspan.emulation.boards import H100, Demand, Kernel, operate
from wattspan.emulation.workloads import DECODE

FULL = Demand(1.0, Kernel())


def test_h100_has_the_captured_burn_power() -> None:
    point = operate(H100.silicon, [FULL], H100.limits[2])
    assert (point.mhz, point.power, point.capped) == (1980, 629_000, False)


def test_unused_gpu_idles_at_its_lowest_clock() -> None:
    point = operate(H100.silicon, [Demand(0.0, Kernel())], H100.limits[2])
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
    silicon = board.silicon
    clocks = range(silicon.min_mhz, silicon.max_mhz + 1, silicon.step_mhz)
    powers = [silicon.busy_power(mhz) for mhz in clocks]
    assert all(low < high for low, high in pairwise(powers))
    assert board.silicon.idle < powers[0]


def published_sweep(gpu: str, workload: str) -> list[tuple[int, float, float]]:
    """Limit and mean power in milliwatts, and relative duration, of a measured sweep."""
    text = (ROOT / "tests" / "fixtures" / "power_limit.csv").read_text()
    return [
        (
            round(float(row["limit_w"]) * 1000),
            float(row["mean_power_w"]) * 1000,
            float(row["time_ratio"]),
        )
        for row in csv.DictReader(text.splitlines())
        if (row["gpu"], row["workload"]) == (gpu, workload)
    ]


def test_model_follows_the_published_v100_sweep() -> None:
    """Power as published within a few percent: the parameters were fitted to such sweeps."""
    kernel = Kernel(compute=0.75, activity=0.93)
    sweep = published_sweep("V100", "bert")
    assert len(sweep) > 3
    for limit, power, duration in sweep:
        modelled = operate(V100.silicon, [Demand(1.0, kernel)], limit)
        assert modelled.power == pytest.approx(power, rel=0.08)
        assert 1 / modelled.grants[0].speed == pytest.approx(duration, rel=0.25)
