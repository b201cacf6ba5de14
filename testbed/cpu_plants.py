"""Laws of CPU packages that the agent does not know, and the power that each process owes.

A :class:`CpuPlant` maps the :class:`Work` of processes in an instant to powers in watts. It has no
state and no chance: ``package()`` is the physics, ``owed()`` divides the same power by the stated
rule, and ``idle() + sum(owed())`` is ``package()``. All methods are judged by that rule:

- *Core*: each thread owes what it makes its core spend. Its cost in joules per CPU-second holds
  alone on a core at the base clock; two processes may differ in it.
- *SMT pair*: two busy siblings cost ``smt`` times the mean of their costs alone. Each owes its own
  part: its cost alone times ``smt / 2``, while the other one is busy.
- *Clock and turbo*: all cores have one clock, the lower the more of them are active. Dynamic power
  goes with f·V². Each thread owes its own power at the clock of the instant, whoever moved it.
- *Uncore*: the power by which the mesh and the caches are awake is owed in proportion to CPU time.
- *Memory traffic*: joules per gigabyte, owed by the process that moves the data.
- *Leakage*: a warm package leaks more, by ``leakage`` of its idle power at full warmth. No process
  owes it: it is idle power.

Performance counters see the same work: ``rates()`` are cycles of the clock of the instant,
instructions of which a thread retires fewer while its sibling is busy, and misses of the traffic.
The cost of a process is not in them: they have constants of their own.

The figures are typical and chosen here, not those of one product.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Work(NamedTuple):
    """The activity of one process in an instant.

    It runs on each of ``cpus`` for the part ``busy`` of the instant, 0 to 1, at a ``cost`` in
    joules per CPU-second, and moves ``traffic`` gigabytes a second, of which the part ``unmissed``
    without a miss: lines that are written back or fetched before. Alone on a core it retires
    ``ipc`` instructions in a cycle.
    """

    cpus: tuple[int, ...]
    busy: float
    cost: float
    traffic: float = 0.0
    ipc: float = 1.5
    unmissed: float = 0.0


class Rates(NamedTuple):
    """The counts of the hardware for a process in a second, on all of its CPUs."""

    cycles: float
    reference: float
    instructions: float
    misses: float


LINE = 64
"""Bytes of a cache line, of which a miss moves one."""


@dataclass(frozen=True)
class CpuPlant:
    """The law of one package of ``cores`` cores; the defaults are an additive straight line.

    Logical CPU ``c`` is on core ``c % cores``; with SMT there are ``2 * cores`` CPUs, else
    ``cores``. Siblings, and processes on one CPU, are busy independently of each other.
    """

    name: str
    cores: int = 16
    at_rest: float = 42.0  # watts of the cold package
    smt: float | None = None  # the cost of a busy pair in that of one thread; None: no siblings
    base_clock: float = 2.6  # GHz, all cores active
    turbo_clock: float = 2.6  # GHz, one core active
    base_volts: float = 0.9
    volts_per_ghz: float = 0.2
    uncore: float = 0.0  # watts with many active cores
    uncore_cores: float = 2.0  # active cores for 63 % of that
    joules_per_gigabyte: float = 0.0
    leakage: float = 0.0  # part of the idle power by which full warmth raises it
    retired: float = 0.62  # instructions of a thread whose sibling is busy, in those alone

    @property
    def cpus(self) -> int:
        """The number of logical CPUs."""
        return self.cores * (1 if self.smt is None else 2)

    def package(self, works: Mapping[int, Work], warmth: float = 0.0) -> float:
        """The power of the package, from what its cores, its uncore and its memory bus do."""
        busy, spent = [0.0] * self.cpus, [0.0] * self.cpus
        for work in works.values():
            for cpu in work.cpus:
                busy[cpu] += work.busy
                spent[cpu] += work.busy * work.cost
        power = 0.0
        for core in range(self.cores):
            power += spent[core]
            if self.smt is not None:
                sibling = core + self.cores
                power += spent[sibling]
                pairs = busy[sibling] * spent[core] + busy[core] * spent[sibling]
                power -= pairs * (1 - self.smt / 2)
        active = self._active(busy)
        traffic = sum(work.traffic for work in works.values())
        power = power * self._dynamic(active) + self._awake(active)
        return self.idle(warmth) + power + traffic * self.joules_per_gigabyte

    def owed(self, works: Mapping[int, Work]) -> dict[int, float]:
        """The power that each process owes."""
        busy = [0.0] * self.cpus
        for work in works.values():
            for cpu in work.cpus:
                busy[cpu] += work.busy
        active, total = self._active(busy), sum(busy)
        dynamic = self._dynamic(active)
        awake = self._awake(active) / total if total else 0.0
        found = {}
        for process, work in works.items():
            alone = float(len(work.cpus))
            if self.smt is not None:
                siblings = sum(busy[(cpu + self.cores) % self.cpus] for cpu in work.cpus)
                alone -= siblings * (1 - self.smt / 2)
            core = work.busy * (work.cost * alone * dynamic + len(work.cpus) * awake)
            found[process] = core + work.traffic * self.joules_per_gigabyte
        return found

    def rates(self, works: Mapping[int, Work]) -> dict[int, Rates]:
        """The rates of the counters of each process, without noise."""
        busy = [0.0] * self.cpus
        for work in works.values():
            for cpu in work.cpus:
                busy[cpu] += work.busy
        clock = self.clock(self._active(busy)) * 1e9
        found = {}
        for process, work in works.items():
            time = work.busy * len(work.cpus)
            alone = float(len(work.cpus))
            if self.smt is not None:
                siblings = sum(busy[(cpu + self.cores) % self.cpus] for cpu in work.cpus)
                alone -= siblings * (1 - self.retired)
            retired = work.busy * alone * work.ipc * clock
            misses = work.traffic * (1 - work.unmissed) * 1e9 / LINE
            found[process] = Rates(time * clock, time * self.base_clock * 1e9, retired, misses)
        return found

    def idle(self, warmth: float = 0.0) -> float:
        """The power that no process owes; ``warmth`` is 0 (cold) to 1."""
        return self.at_rest * (1 + self.leakage * warmth)

    def clock(self, active: float) -> float:
        """The clock in GHz with so many active cores."""
        rest = (active - 1) / max(1, self.cores - 1)
        return self.turbo_clock - (self.turbo_clock - self.base_clock) * min(1.0, max(0.0, rest))

    def _dynamic(self, active: float) -> float:
        """Dynamic power in relation to that at the base clock: f·V²."""
        clock = self.clock(active)
        volts = self.base_volts + self.volts_per_ghz * (clock - self.base_clock)
        return clock * volts**2 / (self.base_clock * self.base_volts**2)

    def _awake(self, active: float) -> float:
        return self.uncore * (1 - math.exp(-active / self.uncore_cores))

    def _active(self, busy: list[float]) -> float:
        """The mean number of cores of which a thread is busy."""
        if self.smt is None:
            return sum(busy)
        pairs = zip(busy[: self.cores], busy[self.cores :], strict=True)
        return sum(one + other - one * other for one, other in pairs)


ADDITIVE = CpuPlant("additive")
TURBO = CpuPlant("turbo", turbo_clock=3.4)
SMT = CpuPlant("SMT", cores=8, smt=1.3)
MEMORY = CpuPlant("uncore and memory", uncore=12.0, joules_per_gigabyte=0.2)
MODULES = CpuPlant("memory modules", at_rest=6.0, joules_per_gigabyte=0.3)
"""The memory of a socket, whose processes cost nothing but their traffic."""
LEAKING = CpuPlant("leakage", leakage=0.05)
SERVER = CpuPlant(
    "all of them",
    cores=8,
    smt=1.3,
    turbo_clock=3.4,
    uncore=12.0,
    joules_per_gigabyte=0.2,
    leakage=0.05,
)
PLANTS = (ADDITIVE, TURBO, SMT, MEMORY, LEAKING, SERVER)


@dataclass(frozen=True)
class EnergyCounter:
    """The updates and the noise of a RAPL energy counter; times in milliseconds.

    An update comes once in a ``period``, give or take the standard deviation ``jitter``. The part
    ``late`` of readings finds none for up to ``late_by``, so that power seems to fall and then to
    leap. A value is a multiple of ``unit`` microjoules, and ``noise`` its standard deviation in
    microjoules, which the next reading does not repeat.

    The unit of Sandy Bridge is that of the kernel's driver. Khan et al. ("RAPL in Action", 2018)
    report updates at unpredictable times. The period of 1 ms, and the noise that firmware adds to
    hide secrets, are general knowledge, and all sizes of errors are chosen here: these counters
    are no measurement of a product.
    """

    name: str
    unit: float = 2**-14 * 1e6
    period: float = 1.0
    jitter: float = 0.02
    late: float = 0.0
    late_by: float = 0.0
    noise: float = 0.0

    def age(self, phase: float, error: float, delay: float) -> float:
        """The age in milliseconds of the value that a reading finds.

        ``phase`` and ``delay`` are uniform from 0 to 1, ``error`` is standard normal.
        """
        age = max(0.0, phase * self.period + error * self.jitter)
        return age + (delay / self.late * self.late_by if delay < self.late else 0.0)

    def value(self, energy: float, error: float = 0.0) -> int:
        """The value of a reading whose last update was at ``energy``; ``error`` as for ``age``."""
        return int(math.floor((energy + error * self.noise) / self.unit) * self.unit)


SANDY_BRIDGE = EnergyCounter("Sandy Bridge", 2**-16 * 1e6, jitter=0.1, late=0.005, late_by=5.0)
SKYLAKE = EnergyCounter("Skylake")
SAPPHIRE_RAPIDS = EnergyCounter("Sapphire Rapids, filtered", jitter=0.05, noise=20_000.0)
COUNTERS = (SANDY_BRIDGE, SKYLAKE, SAPPHIRE_RAPIDS)
