"""The accumulator of AMD boards: steps, wraps, resets, and values that do not fit the power."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from testbed.simulated_host import PACKAGE

from wattspan.attribution.metering import CounterMeter
from wattspan.model import SECOND, Instant, Interval, Milliwatts, Reading
from wattspan.sources.energy_meter import EnergyAccumulator

STEP = 15.300000190734863  # as a C float
POWER = 1_500_000  # mW
BOARD = replace(PACKAGE, modulus=None, max_power=Milliwatts(POWER))


def at(seconds: float) -> Instant:
    return Instant(round(seconds * SECOND), 0)


def joules(count: int) -> int:
    """Steps in ``count`` joules."""
    return round(count * 1_000_000 / 15.3)


def test_energy_is_exact_although_the_step_is_a_float() -> None:
    accumulator = EnergyAccumulator()
    assert accumulator.advance(at(0), 1_000_000, STEP, POWER) == 15_300_000
    assert accumulator.advance(at(1), 1 << 60, STEP, POWER) == (1 << 60) * 15_300_000 // 1_000_000


@pytest.mark.parametrize("width", [32, 64])
def test_wrap_continues_the_energy(width: int) -> None:
    accumulator = EnergyAccumulator()
    before = accumulator.advance(at(0), (1 << width) - joules(300), STEP, POWER)
    after = accumulator.advance(at(1), joules(200), STEP, POWER)
    assert (after - before) == pytest.approx(500_000_000, abs=32)
    assert accumulator.epoch == 0


def test_smaller_value_of_a_moment_is_no_energy() -> None:
    """43 W; some values are smaller by up to what the board could use since the one before."""
    accumulator, meter = EnergyAccumulator(), CounterMeter(BOARD, 10 * SECOND)
    booked = 0
    for second in range(31):
        value = joules(72_000 + 43 * second - (990 if second % 7 == 3 else 0))
        energy = accumulator.advance(at(second), value, STEP, POWER)
        assert energy is not None
        found = meter.advance(Reading(BOARD.id, at(second), energy, accumulator.epoch))
        booked += found.energy if isinstance(found, Interval) else 0
    assert booked == pytest.approx(30 * 43_000_000, abs=32)


def test_pause_in_which_a_short_accumulator_may_wrap_twice_is_a_new_epoch() -> None:
    accumulator = EnergyAccumulator()
    accumulator.advance(at(0), (1 << 32) - joules(300), STEP, POWER)
    accumulator.advance(at(1), joules(200), STEP, POWER)
    accumulator.advance(at(30), joules(20_000), STEP, POWER)
    assert accumulator.epoch == 0
    accumulator.advance(at(90), joules(30_000), STEP, POWER)  # 66 kJ are 44 s of 1.5 kW
    assert accumulator.epoch == 1


def test_other_resolution_is_a_new_epoch() -> None:
    accumulator = EnergyAccumulator()
    accumulator.advance(at(0), 1_000_000, STEP, POWER)
    assert accumulator.advance(at(1), 1_000_001, 61.0, POWER) == 61_000_061
    assert accumulator.epoch == 1


@pytest.mark.parametrize("step", [0.0, -15.3, math.nan, math.inf, 1e-9, 2e6])
def test_invalid_resolution_has_no_energy(step: float) -> None:
    assert EnergyAccumulator().advance(at(0), 1, step, POWER) is None


def test_negative_value_has_no_energy() -> None:
    assert EnergyAccumulator().advance(at(0), -1, STEP, POWER) is None
