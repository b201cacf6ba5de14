"""What a GPU draws and how fast it works, from its clock, its cap and its load.

Two laws. A *model*: busy power is ``P(f) = static + switching * activity * (f/fmax) * v(f)**2``
with the voltage ``v`` flat up to a knee and linear above it; duration is
``T(f) = memory + compute * fmax/f``; a cap picks the highest clock whose power fits, else the
lowest clock, and overdraws. And *published curves*: measured power and duration at each limit,
interpolated between the limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Silicon:
    """The power law of one kind of GPU. Power in milliwatts, clocks in MHz.

    ``knee`` and ``flat_voltage`` are ratios to the highest clock and to its voltage.
    """

    idle: int
    static: int
    switching: int
    min_mhz: int
    max_mhz: int
    step_mhz: int = 15
    knee: float = 0.6
    flat_voltage: float = 0.8

    def voltage(self, ratio: float) -> float:
        """The voltage at ``ratio`` of the highest clock, relative to the highest voltage."""
        if ratio <= self.knee:
            return self.flat_voltage
        rise = (ratio - self.knee) / (1.0 - self.knee)
        return self.flat_voltage + (1.0 - self.flat_voltage) * rise

    def busy_power(self, mhz: int, activity: float = 1.0) -> float:
        """The power at full load; ``activity`` is how hard the work switches the circuits."""
        ratio = mhz / self.max_mhz
        return self.static + self.switching * activity * ratio * self.voltage(ratio) ** 2

    def clocks(self) -> range:
        """Every clock the GPU can run at, ascending."""
        return range(self.min_mhz, self.max_mhz + 1, self.step_mhz)

    def clock_for(self, power: float) -> int:
        """The highest clock that draws no more than ``power`` at full load, or the lowest."""
        fitting = [mhz for mhz in self.clocks() if self.busy_power(mhz) <= power]
        return fitting[-1] if fitting else self.min_mhz

    def nearest(self, mhz: int) -> int:
        """The highest clock not above ``mhz``, or the lowest there is."""
        steps = max(0, min(mhz, self.max_mhz) - self.min_mhz) // self.step_mhz
        return self.min_mhz + steps * self.step_mhz


@dataclass(frozen=True, slots=True)
class ModelKernel:
    """Work that follows the model: ``memory`` and ``compute`` are shares of its time at fmax."""

    compute: float = 0.7
    activity: float = 1.0

    @property
    def memory(self) -> float:
        return 1.0 - self.compute

    def busy_power(self, silicon: Silicon, mhz: int, limit: int) -> float:
        del limit  # the cap acts through the clock
        return silicon.busy_power(mhz, self.activity)

    def speed(self, silicon: Silicon, mhz: int, limit: int) -> float:
        del limit
        return 1.0 / (self.memory + self.compute * silicon.max_mhz / mhz)


class CurvePoint(NamedTuple):
    """Mean power (mW) and relative duration measured under a power limit (mW)."""

    limit: int
    power: int
    duration: float


@dataclass(frozen=True, slots=True)
class PublishedCurve:
    """Work that behaves as somebody measured it under each power limit.

    Nobody published it under locked clocks too, so a lock acts as the limit at which the model
    would choose that clock. Outside the measured limits the nearest measured one holds.
    """

    points: tuple[CurvePoint, ...]  # ascending by limit
    origin: str

    def busy_power(self, silicon: Silicon, mhz: int, limit: int) -> float:
        return self._at(self._limit(silicon, mhz, limit))[0]

    def speed(self, silicon: Silicon, mhz: int, limit: int) -> float:
        return 1.0 / self._at(self._limit(silicon, mhz, limit))[1]

    def _limit(self, silicon: Silicon, mhz: int, limit: int) -> float:
        return limit if mhz >= silicon.max_mhz else min(limit, silicon.busy_power(mhz))

    def _at(self, limit: float) -> tuple[float, float]:
        points = self.points
        if limit <= points[0].limit:
            return points[0].power, points[0].duration
        for low, high in pairwise(points):
            if limit <= high.limit:
                part = (limit - low.limit) / (high.limit - low.limit)
                return (
                    low.power + part * (high.power - low.power),
                    low.duration + part * (high.duration - low.duration),
                )
        return points[-1].power, points[-1].duration


Kernel = ModelKernel | PublishedCurve


class Demand(NamedTuple):
    """One process's wish: a share of the GPU from 0 to 1, for work of one kind."""

    share: float
    kernel: Kernel


class Allocation(NamedTuple):
    """What one process gets.

    Its dynamic power in milliwatts, its share of the GPU's time in millionths, and how fast it
    works relative to having its wish at the highest clock.
    """

    power: int
    share: int
    speed: float


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """Where a GPU runs. ``power == idle + sum(grant.power)``, in milliwatts, exactly.

    ``capped``: the limit holds the clock below what was asked for. ``at_floor``: even the
    lowest point draws more than the limit, which is therefore not obeyed.
    """

    mhz: int
    power: int
    idle: int
    grants: tuple[Allocation, ...]
    capped: bool
    at_floor: bool


def operate(
    silicon: Silicon, demands: Sequence[Demand], limit: int, ceiling_mhz: int | None = None
) -> OperatingPoint:
    """Where ``silicon`` settles under ``limit`` milliwatts and, if given, a clock ceiling.

    Demands beyond the whole GPU are scaled down in proportion, as time slicing does.
    """
    total = sum(demand.share for demand in demands)
    if total <= 0.0:
        grants = tuple(Allocation(0, 0, 1.0) for _ in demands)
        return OperatingPoint(silicon.min_mhz, silicon.idle, silicon.idle, grants, False, False)
    load = _Load(silicon, demands, min(1.0, 1.0 / total), _ceiling(silicon, ceiling_mhz))
    mhz = load.highest_within(limit)
    powers = load.powers(mhz, limit)
    power = silicon.idle + sum(powers)
    return OperatingPoint(
        mhz=load.apparent_clock(mhz, power - silicon.idle),
        power=power,
        idle=silicon.idle,
        grants=load.grants(powers, mhz, limit),
        capped=power < load.power(load.ceiling, _UNLIMITED),
        at_floor=power > limit,
    )


_UNLIMITED = 1 << 40


def _ceiling(silicon: Silicon, mhz: int | None) -> int:
    return silicon.max_mhz if mhz is None else silicon.nearest(mhz)


@dataclass(frozen=True, slots=True)
class _Load:
    """Demands on one GPU, with the factor that fits them into it and the highest clock allowed."""

    silicon: Silicon
    demands: Sequence[Demand]
    scale: float
    ceiling: int

    def clock_of(self, kernel: Kernel, mhz: int) -> int:
        # A published curve already holds what its limit does to the clock.
        return mhz if isinstance(kernel, ModelKernel) else self.ceiling

    def powers(self, mhz: int, limit: int) -> tuple[int, ...]:
        """Each demand's dynamic power, in whole milliwatts."""
        idle = self.silicon.idle
        busy = (
            demand.kernel.busy_power(self.silicon, self.clock_of(demand.kernel, mhz), limit)
            for demand in self.demands
        )
        return tuple(
            max(0, int(demand.share * self.scale * (power - idle)))
            for demand, power in zip(self.demands, busy, strict=True)
        )

    def power(self, mhz: int, limit: int) -> int:
        return self.silicon.idle + sum(self.powers(mhz, limit))

    def highest_within(self, limit: int) -> int:
        """The highest clock that keeps ``limit``, or the lowest; power rises with the clock."""
        clocks = range(self.silicon.min_mhz, self.ceiling + 1, self.silicon.step_mhz)
        low, high = 0, len(clocks) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self.power(clocks[middle], limit) <= limit:
                low = middle
            else:
                high = middle - 1
        return clocks[low]

    def grants(self, powers: Sequence[int], mhz: int, limit: int) -> tuple[Allocation, ...]:
        return tuple(
            Allocation(
                power,
                round(demand.share * self.scale * 1_000_000),
                self.scale
                * demand.kernel.speed(self.silicon, self.clock_of(demand.kernel, mhz), limit),
            )
            for demand, power in zip(self.demands, powers, strict=True)
        )

    def apparent_clock(self, mhz: int, dynamic: int) -> int:
        """The clock a client sees: with published work, the one the model needs for its power."""
        if all(isinstance(demand.kernel, ModelKernel) for demand in self.demands if demand.share):
            return mhz
        used = min(1.0, sum(demand.share for demand in self.demands) * self.scale)
        return min(mhz, self.silicon.clock_for(self.silicon.idle + dynamic / used))
