"""Inputs and outputs of the tuner: policy, observations, report, and the ladder of levels.

A *tuner* decides for one knob of the devices of one job. Times are monotonic nanoseconds, settings
are in the knob's unit, energies are microjoules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, NamedTuple

import msgspec

from wattspan.model import SECOND, DecisionReason, Knob, ModelEnum

# Limits of values in the file of certified settings.
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
_Ratio = Annotated[float, msgspec.Meta(gt=-1e9, lt=1e9)]


class Objective(ModelEnum):
    """Quantity to minimise among the settings that keep the budget."""

    ENERGY = "energy"
    COST = "cost"  # eta * energy + (1 - eta) * max power * time, as Zeus weighs (NSDI '23)
    TIME = "time"  # the fastest: only a setting that is no slower is held


class WorkloadKind(ModelEnum):
    """Kind of a job's work, which determines its measure of speed."""

    STEPS = "steps"  # sequential, as in training: time per unit of work
    REQUESTS = "requests"  # concurrent, as in serving: time per work, and latency


class WorkUnit(NamedTuple):
    """One finished unit of work.

    ``work`` is its positive amount (tokens, samples; 1 where it does not vary). ``rank``
    identifies a process of a synchronous job, ``compute`` is its own compute time, if known.
    """

    start: int
    end: int
    work: float = 1
    rank: int = 0
    compute: int | None = None


class EnergyPoint(NamedTuple):
    """Cumulative energy of all of the job's devices at ``at``."""

    at: int
    energy: int


@dataclass(frozen=True, slots=True)
class KnobRange:
    """Permitted settings of one device's knob: from ``original`` down to ``floor``, in steps."""

    device: str
    original: int
    floor: int
    step: int = 1_000
    rank: int = 0


@dataclass(frozen=True, slots=True)
class TunerPolicy:
    """Requirements of the operator, and parameters of the search."""

    knob: Knob = Knob.GPU_POWER
    kind: WorkloadKind = WorkloadKind.STEPS
    max_slowdown: float = 0.05
    confidence: float = 0.95
    objective: Objective = Objective.ENERGY
    eta: float = 0.5
    max_power: int = 0  # milliwatts of all the job's devices, for COST
    latency: int | None = None  # REQUESTS: limit for ``percentile`` of them
    percentile: float = 0.99
    apply: bool = True  # False: decisions are advice
    slack: bool = False  # permits lower caps on waiting ranks, after a certification
    block_units: int = 10
    block_time: int = SECOND // 2
    settle_units: int = 1
    settle_time: int = 3 * SECOND // 4
    least_pairs: int = 12
    least_units: int = 1_000  # of a job that is worth exploring
    dwell: int = 600 * SECOND  # pause between two searches
    seed: int = 0  # of the order of blocks; different on each host


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Identity of a job's program and hardware, for certified settings."""

    command: str  # digest of the command line or the container image
    model: str
    driver: str
    devices: int
    service: str = ""
    span: str = ""


@dataclass(frozen=True, slots=True)
class CertifiedLevels:
    """A certified setting; ``levels`` by device are in the knob's unit.

    ValueError: a level is above the original setting.
    """

    level: _Count  # of all devices; ``levels`` may be lower for some
    original: _Count
    slowdown: _Ratio
    saving: _Ratio
    pairs: _Count
    noise: _Ratio = 0.0
    levels: Annotated[Mapping[str, _Count], msgspec.Meta(max_length=1024)] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        if max(self.level, *self.levels.values(), 0) > self.original:
            raise ValueError("a level is above the original setting")


@dataclass(frozen=True, slots=True)
class Observation:
    """Input of one step. Units and energy points are in ascending order and occur once.

    Energy may arrive seconds after the units. ``in_force`` are the settings read back from
    devices, ``since`` when they are unchanged; other devices have their original setting.
    ``draw`` is the present power of each device. ``vetoes`` are external reasons not to tune:
    each ends every cap at once. ``ended``: no further unit will arrive. ``tenants`` are the units
    of each other job that shares the devices, in the order of the tuner's tenants.
    """

    now: int
    units: tuple[WorkUnit, ...] = ()
    energy: tuple[EnergyPoint, ...] = ()
    in_force: Mapping[str, int] = field(default_factory=dict)
    since: int = 0
    draw: Mapping[str, int] = field(default_factory=dict)
    vetoes: frozenset[DecisionReason] = frozenset()
    may_explore: bool = True
    ended: bool = False
    tenants: tuple[tuple[WorkUnit, ...], ...] = ()


class LoweredLevels(NamedTuple):
    """Settings by device: those of level ``base``, or lower ones."""

    base: int
    settings: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class LevelLadder:
    """Levels from ``top``, the original setting of every device, down to ``bottom``.

    Lowered levels, which differ by device, are between two rungs, just below their base: the
    job is as slow there, as long as only waiting ranks have lower settings.
    """

    ranges: tuple[KnobRange, ...]
    top: int
    bottom: int
    step: int
    lowered: Mapping[int, LoweredLevels] = field(default_factory=dict)

    @classmethod
    def over(cls, ranges: Sequence[KnobRange]) -> LevelLadder:
        if not ranges:
            return cls((), 0, 0, 1)
        return cls(
            tuple(ranges),
            max(one.original for one in ranges),
            min(min(one.floor, one.original) for one in ranges),
            max(max(one.step for one in ranges), 1),
        )

    @property
    def rungs(self) -> int:
        """Number of levels below the top."""
        return (self.top - self.bottom) // self.step

    def level(self, wanted: float) -> int:
        """The level nearest to ``wanted``."""
        if wanted >= self.top:
            return self.top
        steps = round((max(wanted, self.bottom) - self.bottom) / self.step)
        return min(self.bottom + steps * self.step, self.top)

    def caps(self, level: int) -> dict[str, int]:
        """The settings below the original at ``level``, by device; each within its own range."""
        if level in self.lowered:
            return dict(self.lowered[level].settings)
        return {
            one.device: max(level, one.floor)
            for one in self.ranges
            if max(level, one.floor) < one.original
        }

    def base(self, level: int) -> int:
        """The rung of ``level``: its base, if it is lowered."""
        return self.lowered[level].base if level in self.lowered else level

    def with_lowered(self, base: int, settings: Mapping[str, int]) -> tuple[LevelLadder, int]:
        """Add a lowered level; returns it too.

        LookupError: no room between ``base`` and the rung below.
        """
        level = base - 1 - len(self.lowered)
        if level <= base - self.step:
            raise LookupError(f"no room below {base} for settings that differ by device")
        lowered = {**self.lowered, level: LoweredLevels(base, settings)}
        return replace(self, lowered=lowered), level

    def plain(self) -> LevelLadder:
        """The ladder without lowered levels."""
        return replace(self, lowered={})

    def is_in_force(self, level: int, in_force: Mapping[str, int]) -> bool:
        """True if the settings read back are ``level``, except for rounding by the device."""
        wanted = self.caps(level)
        for one in self.ranges:
            setting = in_force.get(one.device, one.original)
            if abs(setting - wanted.get(one.device, one.original)) > one.step:
                return False
        return True
