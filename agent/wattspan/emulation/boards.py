"""GPU boards that can be emulated: the law of their power, their limits, sensors and counters.

Busy power is ``P(f) = static + switching * activity * (f/fmax) * v(f)**2`` with the voltage ``v``
flat up to a knee and linear above it; duration is ``T(f) = 1 - compute + compute * fmax/f``. A cap
picks the highest clock whose power fits, else the lowest clock, which exceeds the cap.

Power is piecewise constant: a *segment* has a beginning and a power in milliwatts, so energy is
an exact sum of milliwatts times nanoseconds, which are picojoules.

Limits, idle and burn power of the H100 are from captures of real boards; sensor windows are those
measured by Yang et al. (SC '24, arXiv 2312.02741). The shape of P(f) is assumed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
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
        """The power at full load; ``activity`` is the relative switching rate of the circuits."""
        ratio = mhz / self.max_mhz
        return self.static + self.switching * activity * ratio * self.voltage(ratio) ** 2

    def nearest(self, mhz: int) -> int:
        """The highest clock not above ``mhz``, or the lowest there is."""
        steps = max(0, min(mhz, self.max_mhz) - self.min_mhz) // self.step_mhz
        return self.min_mhz + steps * self.step_mhz


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kind of work: ``compute`` is the part of its time at fmax that depends on the clock."""

    compute: float = 0.7
    activity: float = 1.0

    def speed(self, silicon: Silicon, mhz: int) -> float:
        return 1.0 / (1.0 - self.compute + self.compute * silicon.max_mhz / mhz)


class Demand(NamedTuple):
    """The demand of one process: a share of the GPU from 0 to 1, for work of one kind."""

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

    Demands beyond the whole GPU are scaled down in proportion, as time slicing does. The clock is
    the highest that keeps the limit, or the lowest.
    """
    total = sum(demand.share for demand in demands)
    if total <= 0.0:
        grants = tuple(Allocation(0, 0, 1.0) for _ in demands)
        return OperatingPoint(silicon.min_mhz, silicon.idle, silicon.idle, grants, False, False)
    scale = min(1.0, 1.0 / total)

    def powers(mhz: int) -> tuple[int, ...]:
        """The dynamic power of each demand in whole milliwatts; it rises with the clock."""
        return tuple(
            max(0, int(share * scale * (silicon.busy_power(mhz, kernel.activity) - silicon.idle)))
            for share, kernel in demands
        )

    highest = silicon.max_mhz if ceiling_mhz is None else silicon.nearest(ceiling_mhz)
    clocks = range(silicon.min_mhz, highest + 1, silicon.step_mhz)
    within = bisect_right(clocks, limit, key=lambda mhz: silicon.idle + sum(powers(mhz)))
    mhz = clocks[max(0, within - 1)]
    granted = powers(mhz)
    power = silicon.idle + sum(granted)
    return OperatingPoint(
        mhz=mhz,
        power=power,
        idle=silicon.idle,
        grants=tuple(
            Allocation(own, round(share * scale * 1_000_000), scale * kernel.speed(silicon, mhz))
            for own, (share, kernel) in zip(granted, demands, strict=True)
        ),
        capped=power < silicon.idle + sum(powers(highest)),
        at_floor=power > limit,
    )


PICOJOULES = 1_000_000  # in a microjoule


class PowerSegment(NamedTuple):
    """``power`` milliwatts from ``start`` to ``end``, nanoseconds of the monotonic clock."""

    start: int
    end: int
    power: int


PowerHistory = tuple[PowerSegment, ...]


def extended(history: PowerHistory, segment: PowerSegment, keep: int) -> PowerHistory:
    """``history`` and ``segment``, without segments that ended ``keep`` ns before the new end."""
    if segment.end <= segment.start:
        return history
    if history and history[-1].power == segment.power and history[-1].end == segment.start:
        history, segment = history[:-1], PowerSegment(history[-1].start, segment.end, segment.power)
    cut = 0
    while cut < len(history) and history[cut].end <= segment.end - keep:
        cut += 1
    return (*history[cut:], segment)


def mean_power(history: PowerHistory, start: int, end: int) -> int | None:
    """The mean power between two times in milliwatts; None without a history.

    The power before the history begins is taken to be its first power.
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


_GIB = 1 << 30
_MS = 1_000_000

AMD_VENDOR = 0x1002
"""AMD's number as a vendor of PCI devices."""

MIG_SLICES = 7
"""Compute slices of a board that can be divided into MIG instances."""
_MEMORY_SLICES = {1: 1, 2: 2, 3: 4, 4: 4, 7: 8}  # of 8, by compute slices


class EmulatedInstance(NamedTuple):
    """A GPU instance of a board in MIG mode, with one compute instance of the same size."""

    id: int
    slices: int
    multiprocessors: int
    memory: int  # bytes


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
    phase: int = 0  # time from an edge of its periods to the load of the driver
    sample_period: int = 166_666_667  # utilisation samples
    cap_latency: int = 50 * _MS  # no authoritative figure exists: a parameter
    mig_multiprocessors: Mapping[int, int] = field(default_factory=dict)
    """Multiprocessors of a MIG instance, by its compute slices; empty: no MIG."""

    def instances(self, slices: Sequence[int]) -> tuple[EmulatedInstance, ...]:
        """MIG instances of the given sizes, numbered from 1; ValueError if they do not fit."""
        unknown = [size for size in slices if size not in self.mig_multiprocessors]
        memory = sum(_MEMORY_SLICES.get(size, 0) for size in slices)
        if unknown or sum(slices) > MIG_SLICES or memory > max(_MEMORY_SLICES.values()):
            raise ValueError(f"{self.name} has no MIG instances of {list(slices)} slices")
        return tuple(
            EmulatedInstance(
                number,
                size,
                self.mig_multiprocessors[size],
                self.memory * _MEMORY_SLICES[size] // max(_MEMORY_SLICES.values()),
            )
            for number, size in enumerate(slices, start=1)
        )

    @property
    def is_amd(self) -> bool:
        """True for a board that AMD SMI reads; NVML reads the others."""
        return self.pci_device & 0xFFFF == AMD_VENDOR


H100 = EmulatedBoard(
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
    sensor=PowerSensor(100 * _MS, 25 * _MS, 1000 * _MS, usage_is_average=True),
    mig_multiprocessors={1: 16, 2: 32, 3: 60, 4: 64, 7: 132},
)

MI300X = EmulatedBoard(  # clocks, compute units, memory and highest limit as specified by AMD
    name="AMD Instinct MI300X",
    architecture=0,
    compute=(9, 4),  # of gfx942
    brand=0,
    pci_device=0x74A1_0000 | AMD_VENDOR,
    multiprocessors=304,
    memory=192 * _GIB,
    reserved_memory=_GIB // 2,
    limits=(300_000, 750_000, 750_000),  # the lowest limit is assumed, as idle and burn power are
    silicon=Silicon(140_000, 190_000, 540_000, 500, 2100, 50, knee=0.6, flat_voltage=0.8),
    memory_mhz=1300,
    sensor=PowerSensor(20 * _MS, 20 * _MS, None, usage_is_average=False),
    counter_step=_MS,
)
