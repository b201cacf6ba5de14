"""GPU boards that can be emulated: the law of their power, their limits, sensors and counters.

Two laws. A *model*: busy power is ``P(f) = static + switching * activity * (f/fmax) * v(f)**2``
with the voltage ``v`` flat up to a knee and linear above it; duration is
``T(f) = memory + compute * fmax/f``; a cap picks the highest clock whose power fits, else the
lowest clock, and overdraws. And *published curves*: measured power and duration at each limit,
interpolated between the limits; their origin is in ``curves/README.md``.

Power is piecewise constant: a *segment* has a beginning and a power in milliwatts, so energy is
an exact sum of milliwatts times nanoseconds, which are picojoules.

Limits, idle and burn powers of the H100 and H200 are from captures of real boards; sensor
windows are those measured by Yang et al. (SC '24, arXiv 2312.02741). The shape of P(f) is a
model everywhere: fitted to published sweeps for V100 and A40, assumed for the rest.
"""

from __future__ import annotations

import csv
from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from itertools import pairwise
from operator import itemgetter
from typing import Generic, NamedTuple, TypeVar


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
    """Work with the power and the duration that were measured under each power limit.

    There are no measurements under locked clocks, so a lock acts as the limit at which the model
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
    """The allocation of one process.

    Its dynamic power in milliwatts, its share of the GPU's time in millionths, and its speed
    relative to the whole of its demand at the highest clock.
    """

    power: int
    share: int
    speed: float


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """The operating point of a GPU. ``power == idle + sum(grant.power)``, in milliwatts, exactly.

    ``capped``: the limit holds the clock below the demand. ``at_floor``: even the lowest point
    draws more than the limit, which is therefore exceeded.
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
    """The operating point of ``silicon`` under ``limit`` milliwatts and, if given, a clock ceiling.

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


PICOJOULES = 1_000_000  # in a microjoule


class PowerSegment(NamedTuple):
    """``power`` milliwatts from ``start`` to ``end``, nanoseconds of the monotonic clock."""

    start: int
    end: int
    power: int


PowerHistory = tuple[PowerSegment, ...]


def extended(history: PowerHistory, segment: PowerSegment, keep: int) -> PowerHistory:
    """``history`` with ``segment`` at its end, without what ended ``keep`` ns before that end."""
    if segment.end <= segment.start:
        return history
    if history and history[-1].power == segment.power and history[-1].end == segment.start:
        history, segment = history[:-1], PowerSegment(history[-1].start, segment.end, segment.power)
    cut = 0
    while cut < len(history) and history[cut].end <= segment.end - keep:
        cut += 1
    return (*history[cut:], segment)


def mean_power(history: PowerHistory, start: int, end: int) -> int | None:
    """The mean power between two times in milliwatts; None where nothing is remembered.

    Before the history begins the board is taken to have drawn what it first drew.
    """
    if not history or end <= start:
        return None
    energy = sum(
        max(0, min(end, part.end) - max(start, part.start)) * part.power for part in history
    )
    missing = max(0, min(end, history[0].start) - start)
    return (energy + missing * history[0].power) // (end - start)


def last_edge(born: int, period: int, now: int) -> int:
    """The latest time up to ``now`` that is a whole number of periods after ``born``."""
    return born + (now - born) // period * period


def picojoules(power: int, duration: int) -> int:
    """The exact energy of ``power`` milliwatts over ``duration`` nanoseconds."""
    return power * duration


K = TypeVar("K", bound=Hashable)


class EnergyLog(Generic[K]):
    """Cumulative energies by key at recent times; linear between two recorded times.

    Power is constant between two steps of an emulated board or package, so the energies at a time
    in between are exact.
    """

    def __init__(self, most: int) -> None:
        self._entries: deque[tuple[int, Mapping[K, int]]] = deque(maxlen=most)

    def record(self, time: int, energies: Mapping[K, int]) -> None:
        """Times must not decrease; the newest entry of a time counts."""
        if self._entries and self._entries[-1][0] == time:
            self._entries.pop()
        self._entries.append((time, energies))

    def at(self, time: int) -> dict[K, int]:
        """The energies at ``time``; LookupError outside the recorded times."""
        entries = self._entries
        if not entries or not entries[0][0] <= time <= entries[-1][0]:
            known = f"{entries[0][0]} to {entries[-1][0]}" if entries else "nothing"
            raise LookupError(f"the truth about {time} is not remembered, only {known}")
        place = bisect_left(entries, time, key=itemgetter(0))
        (end, after), (start, before) = entries[place], entries[max(0, place - 1)]
        part, whole = time - start, max(1, end - start)
        return {
            key: early + (late - early) * part // whole
            for key, late in after.items()
            for early in (before.get(key, 0),)
        }


_ORIGIN = "published measurement, ml-energy/zeus (NSDI '23), Apache-2.0"


@cache
def published_curves() -> dict[tuple[str, str], PublishedCurve]:
    """Every published curve by GPU ("A40", "V100") and workload ("bert", "resnet50", ...)."""
    points: dict[tuple[str, str], list[CurvePoint]] = {}
    text = files("wattspan.emulation").joinpath("curves", "power_limit.csv").read_text("utf-8")
    for row in csv.DictReader(text.splitlines()):
        point = CurvePoint(
            round(float(row["limit_w"]) * 1000),
            round(float(row["mean_power_w"]) * 1000),
            float(row["time_ratio"]),
        )
        points.setdefault((row["gpu"], row["workload"]), []).append(point)
    return {key: PublishedCurve(tuple(sorted(found)), _ORIGIN) for key, found in points.items()}


def published_curve(gpu: str, workload: str) -> PublishedCurve:
    """The curve of one workload on one GPU; KeyError names those there are."""
    curves = published_curves()
    if (gpu, workload) not in curves:
        known = ", ".join(f"{a} {b}" for a, b in sorted(curves))
        raise KeyError(f"no published curve for {gpu} {workload}; there are: {known}")
    return curves[gpu, workload]


_GIB = 1 << 30
_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class PowerSensor:
    """The power sensor of a board. Times in nanoseconds; ``None``: it has no such reading.

    Every ``period`` it publishes the mean of the last ``window``; ``gain_ppm`` is its error.
    """

    period: int
    instant_window: int
    average_window: int | None
    usage_is_average: bool  # which of the two nvmlDeviceGetPowerUsage returns
    gain_ppm: int = 0


@dataclass(frozen=True, slots=True)
class EmulatedBoard:
    """One kind of GPU board. Power in milliwatts, memory in bytes, time in nanoseconds."""

    key: str
    name: str  # as in NVML; third-party clients parse it
    architecture: int  # NVML_DEVICE_ARCH_*
    compute: tuple[int, int]
    brand: int  # NVML_BRAND_*
    pci_device: int
    multiprocessors: int
    memory: int
    reserved_memory: int
    limits: tuple[int, int, int]  # minimum, default, maximum
    silicon: Silicon
    memory_mhz: int
    sensor: PowerSensor
    counter_step: int | None = 100 * _MS  # None: there is no energy counter
    sample_period: int = 166_666_667  # utilisation samples
    cap_latency: int = 50 * _MS  # no authoritative figure exists: a parameter
    basis: str = "model"  # where P(f) comes from


_HOPPER = PowerSensor(100 * _MS, 25 * _MS, 1000 * _MS, usage_is_average=True)
_AMPERE = PowerSensor(100 * _MS, 100 * _MS, 1000 * _MS, usage_is_average=True)
_VOLTA = PowerSensor(20 * _MS, 10 * _MS, None, usage_is_average=False)
_FITTED = "model fitted to published power-limit sweeps (ml-energy/zeus)"
_ASSUMED = "model: limits, idle and burn power captured on real boards, shape assumed"

H100 = EmulatedBoard(
    key="h100",
    name="NVIDIA H100 80GB HBM3",
    architecture=9,
    compute=(9, 0),
    brand=14,
    pci_device=0x2330_10DE,
    multiprocessors=132,
    memory=80 * _GIB,
    reserved_memory=_GIB // 2,
    limits=(200_000, 700_000, 700_000),
    silicon=Silicon(70_000, 110_000, 519_000, 345, 1980, knee=0.6, flat_voltage=0.8),
    memory_mhz=2619,
    sensor=_HOPPER,
    basis=_ASSUMED,
)
H200 = replace(
    H100,
    key="h200",
    name="NVIDIA H200",
    pci_device=0x2335_10DE,
    memory=141 * _GIB,
    silicon=Silicon(78_000, 120_000, 507_000, 345, 1980, knee=0.6, flat_voltage=0.8),
    memory_mhz=3201,
)
A40 = EmulatedBoard(
    key="a40",
    name="NVIDIA A40",
    architecture=7,
    compute=(8, 6),
    brand=14,
    pci_device=0x2235_10DE,
    multiprocessors=84,
    memory=48 * _GIB,
    reserved_memory=_GIB // 2,
    limits=(100_000, 300_000, 300_000),
    silicon=Silicon(30_000, 64_000, 240_000, 210, 1740, knee=0.87, flat_voltage=0.90),
    memory_mhz=7251,
    sensor=_AMPERE,
    counter_step=20 * _MS,
    basis=_FITTED,
)
V100 = EmulatedBoard(
    key="v100",
    name="Tesla V100-PCIE-16GB",
    architecture=5,
    compute=(7, 0),
    brand=2,
    pci_device=0x1DB4_10DE,
    multiprocessors=80,
    memory=16 * _GIB,
    reserved_memory=_GIB // 4,
    limits=(100_000, 250_000, 250_000),
    silicon=Silicon(26_000, 47_000, 195_000, 135, 1380, knee=0.75, flat_voltage=0.86),
    memory_mhz=877,
    sensor=_VOLTA,
    counter_step=20 * _MS,
    basis=_FITTED,
)
P100 = replace(  # Pascal: power, but no energy counter
    V100,
    key="p100",
    name="Tesla P100-PCIE-16GB",
    architecture=4,
    compute=(6, 0),
    pci_device=0x15F8_10DE,
    multiprocessors=56,
    limits=(125_000, 250_000, 250_000),
    silicon=Silicon(28_000, 50_000, 190_000, 544, 1324, knee=0.75, flat_voltage=0.86),
    memory_mhz=715,
    counter_step=None,
    basis="model: limits captured, shape assumed",
)

BOARDS = {board.key: board for board in (H100, H200, A40, V100, P100)}
