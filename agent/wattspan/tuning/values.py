"""What the tuner is told of a job, and how it is to decide.

One *tuner* is one knob of the devices of one job. Times are monotonic nanoseconds, settings are
in the knob's unit, energy is in microjoules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from wattspan.model import SECOND, Knob, Reason, Tried, Word

_NONE: Mapping[str, int] = MappingProxyType({})


class Objective(Word):
    """What is made small among the settings that keep the budget."""

    ENERGY = "energy"
    COST = "cost"  # eta * energy + (1 - eta) * max power * time, as Zeus weighs (NSDI '23)
    TIME = "time"  # the fastest: only a setting that is no slower is held


class Kind(Word):
    """What sort of work a job does, and so what must not become slower."""

    STEPS = "steps"  # one after the other, as in training: the time of a unit of work
    REQUESTS = "requests"  # side by side, as in serving: throughput, and the tail of latency


class Unit(NamedTuple):
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
class Range:
    """How far one device's knob may be turned: from ``original`` down to ``floor``, in steps.

    ``floor`` is the highest of hardware's, operator's and what is prudent.
    """

    device: str
    original: int
    floor: int
    step: int = 1_000
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Policy:
    """What the operator asked for, and how carefully it is to be found out."""

    knob: Knob = Knob.GPU_POWER
    kind: Kind = Kind.STEPS
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
class Remembered:
    """What was certified for a fingerprint once, by ``levels`` in the knob's unit."""

    knob: Knob
    level: int  # of every device; ``levels`` may be lower for some
    original: int
    slowdown: float
    saving: float
    pairs: int
    noise: float = 0.0
    levels: Mapping[str, int] = field(default_factory=lambda: _NONE)


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
    units: tuple[Unit, ...] = ()
    energy: tuple[EnergyPoint, ...] = ()
    in_force: Mapping[str, int] = field(default_factory=lambda: _NONE)
    since: int = 0
    draw: Mapping[str, int] = field(default_factory=lambda: _NONE)
    binding: float | None = None
    vetoes: frozenset[Reason] = frozenset()
    turn: bool = True
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Report:
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
    noise: float | None = None  # coefficient of variation of the time per unit of work
    tried: tuple[Tried, ...] = ()
    lost: int | None = None
    allowance: int | None = None
