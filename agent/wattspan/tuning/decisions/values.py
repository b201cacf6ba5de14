"""What the tuner is told of a job, and how it is to decide.

One *tuner* is one knob of the devices of one job. Times are monotonic nanoseconds, settings are
in the knob's unit, energy is in microjoules.

The settings that may be tried: one level for all of a job's devices, or less for some.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from wattspan.model import SECOND, DecisionReason, Knob, ModelEnum, SettingResult

_NO_LEVELS: Mapping[str, int] = MappingProxyType({})


class Objective(ModelEnum):
    """What is made small among the settings that keep the budget."""

    ENERGY = "energy"
    COST = "cost"  # eta * energy + (1 - eta) * max power * time, as Zeus weighs (NSDI '23)
    TIME = "time"  # the fastest: only a setting that is no slower is held


class WorkloadKind(ModelEnum):
    """What sort of work a job does, and so what must not become slower."""

    STEPS = "steps"  # one after the other, as in training: the time of a unit of work
    REQUESTS = "requests"  # side by side, as in serving: throughput, and the tail of latency


class WorkUnit(NamedTuple):
    """One finished unit of work.

    ``work`` is how much of it there was, more than 0 (tokens, samples; 1 where it does not
    vary). ``rank`` tells the processes of a synchronous job apart; ``compute`` is how long the
    rank computed itself, None if it does not tell.
    """

    start: int
    end: int
    work: float = 1
    rank: int = 0
    compute: int | None = None


class EnergyPoint(NamedTuple):
    """What all the job's devices together had spent by ``at``, since any moment that stays."""

    at: int
    energy: int


@dataclass(frozen=True, slots=True)
class KnobRange:
    """How far one device's knob may be turned: from ``original`` down to ``floor``, in steps.

    ``floor`` is the highest of hardware's, operator's and what is prudent.
    """

    device: str
    original: int
    floor: int
    step: int = 1_000
    rank: int = 0


@dataclass(frozen=True, slots=True)
class TunerPolicy:
    """What the operator asked for, and how carefully it is to be found out."""

    knob: Knob = Knob.GPU_POWER
    kind: WorkloadKind = WorkloadKind.STEPS
    max_slowdown: float = 0.05
    confidence: float = 0.95
    objective: Objective = Objective.ENERGY
    eta: float = 0.5
    max_power: int = 0  # milliwatts of all the job's devices, for COST
    latency: int | None = None  # REQUESTS: that ``percentile`` of them must be within
    percentile: float = 0.99
    apply: bool = True  # False: nothing is turned; decisions are advice
    slack: bool = False  # lower caps on ranks that wait for others, once one cap is certified
    block_units: int = 20
    block_time: int = 5 * SECOND
    settle_units: int = 8
    settle_time: int = 2 * SECOND
    least_pairs: int = 12
    least_units: int = 1_000  # a job that is known to be shorter is not explored
    dwell: int = 600 * SECOND  # between two searches
    seed: int = 0  # of the order of blocks: another one on each host, so that none move in step


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What must be the same for a certified setting to be worth trying first."""

    command: str  # a digest of the command line or the container image
    model: str
    driver: str
    devices: int
    service: str = ""
    span: str = ""


@dataclass(frozen=True, slots=True)
class CertifiedLevels:
    """What was certified for a fingerprint once, by ``levels`` in the knob's unit."""

    knob: Knob
    level: int  # of every device; ``levels`` may be lower for some
    original: int
    slowdown: float
    saving: float
    pairs: int
    noise: float = 0.0
    levels: Mapping[str, int] = field(default_factory=lambda: _NO_LEVELS)


@dataclass(frozen=True, slots=True)
class Observation:
    """What was seen since the last one. Units and points ascend and are told once.

    Energy may lag behind units by seconds: a stretch is judged when both have come.
    ``in_force`` is what each device was read back to obey, by device, and ``since`` from when
    that has been so without a break; a device that is not named has its original setting.
    ``draw`` is the power of each device just now; ``binding`` the part of the time since the
    last observation in which a power cap held a device's clock down, None if unknown.
    ``vetoes`` are reasons from outside, in force now, not to tune: each ends every cap at once.
    ``turn``: whether this job may explore now. ``ended``: no unit will come any more.
    """

    now: int
    units: tuple[WorkUnit, ...] = ()
    energy: tuple[EnergyPoint, ...] = ()
    in_force: Mapping[str, int] = field(default_factory=lambda: _NO_LEVELS)
    since: int = 0
    draw: Mapping[str, int] = field(default_factory=lambda: _NO_LEVELS)
    binding: float | None = None
    vetoes: frozenset[DecisionReason] = frozenset()
    may_explore: bool = True
    ended: bool = False


@dataclass(frozen=True, slots=True)
class TunerReport:
    """Where a tuner stands, in figures; see model.TuningRow for what each one is."""

    exploring: bool  # whether it needs the host's turn now
    slowdown: float | None = None
    slowdown_bound: float | None = None
    held_slowdown: float | None = None
    held_bound: float | None = None
    saving: float | None = None
    saved: int | None = None
    saved_low: int | None = None
    saved_high: int | None = None
    exploration: int = 0
    pairs: int = 0
    units: int = 0
    committed: int | None = None
    tried: tuple[SettingResult, ...] = ()
    lost: int | None = None
    allowance: int | None = None


class LoweredLevels(NamedTuple):
    """Settings by device that are those of level ``base``, but lower for some."""

    base: int
    settings: Mapping[str, int]


_NO_SETTINGS: Mapping[int, LoweredLevels] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class LevelLadder:
    """From ``top``, where every device has its original setting, down to ``bottom``.

    Settings that are not the same for all stand between two rungs, just below that which they
    were made of: a whole job is as slow there, as long as only those have less that wait.
    """

    ranges: tuple[KnobRange, ...]
    top: int
    bottom: int
    step: int
    lowered: Mapping[int, LoweredLevels] = field(default_factory=lambda: _NO_SETTINGS)

    @classmethod
    def over(cls, ranges: Sequence[KnobRange]) -> LevelLadder:
        """The ladder of these devices, none of which leaves its own range."""
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
        """How many levels there are below the top."""
        return (self.top - self.bottom) // self.step

    def level(self, wanted: float) -> int:
        """The level nearest to ``wanted``, or the end of the ladder."""
        if wanted >= self.top:
            return self.top
        steps = round((max(wanted, self.bottom) - self.bottom) / self.step)
        return min(self.bottom + steps * self.step, self.top)

    def caps(self, level: int) -> dict[str, int]:
        """The setting of each device that does not have its original one at ``level``."""
        if level in self.lowered:
            return dict(self.lowered[level].settings)
        return {
            one.device: max(level, one.floor)
            for one in self.ranges
            if max(level, one.floor) < one.original
        }

    def base(self, level: int) -> int:
        """The rung of which ``level`` was made: itself, if it is one."""
        return self.lowered[level].base if level in self.lowered else level

    def with_lowered(self, base: int, settings: Mapping[str, int]) -> tuple[LevelLadder, int]:
        """The ladder with one more level, at which each device has its setting; and that level.

        LookupError: there is no room for it between ``base`` and the rung below.
        """
        level = base - 1 - len(self.lowered)
        if level <= base - self.step:
            raise LookupError(f"no room below {base} for settings that differ by device")
        lowered = {**self.lowered, level: LoweredLevels(base, MappingProxyType(dict(settings)))}
        return replace(self, lowered=MappingProxyType(lowered)), level

    def plain(self) -> LevelLadder:
        """The ladder with its rungs alone."""
        return replace(self, lowered=_NO_SETTINGS)

    def is_in_force(self, level: int, in_force: Mapping[str, int]) -> bool:
        """Whether what was read back is ``level``, but for rounding by the device."""
        asked = self.caps(level)
        for one in self.ranges:
            seen = in_force.get(one.device, one.original)
            if abs(seen - asked.get(one.device, one.original)) > one.step:
                return False
        return True
