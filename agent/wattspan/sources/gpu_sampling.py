"""Parts of a GPU's sampler that do not depend on its driver: findings, limits, time stamps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from wattspan.model import (
    SECOND,
    Domain,
    Failure,
    GpuStatus,
    Instant,
    Milliwatts,
    Reading,
    Usage,
)
from wattspan.ports import Clock

T = TypeVar("T")

_TRANSIENT_FACTOR = 2  # boards overshoot their limit for milliseconds
_DEFAULT_MAX_POWER = Milliwatts(5_000_000)  # above any board, where the limit is not known

MAX_USAGE_INTERVAL = 3 * SECOND // 2
"""Intervals wait three seconds for usage, and a utilisation reading holds for two: usage that is
read less often is worth nothing.
"""

GAUGE_SAMPLES = 2
"""Samples between two reads of power and utilisation: sensors smooth power over a second,
utilisation over a sixth. Where power has to be integrated, it is read at every sample.
"""


FROZEN = "it does not change while the GPU is on"
SUSPENDED = "; it is suspended now, and is not read, which would wake it"


@dataclass(frozen=True, slots=True)
class PowerReading:
    """One reading of power. ``draw`` is the value to integrate."""

    average: Milliwatts | None = None
    instant: Milliwatts | None = None
    draw: Milliwatts | None = None


@dataclass(slots=True)
class GpuFindings:
    """The results of one sample of all GPUs."""

    readings: list[Reading] = field(default_factory=list)
    usages: list[Usage] = field(default_factory=list)
    gpus: list[GpuStatus] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


def largest_power(limit: Milliwatts | None) -> Milliwatts:
    """The largest plausible power of a board with the highest power limit ``limit``."""
    return _DEFAULT_MAX_POWER if limit is None else Milliwatts(limit * _TRANSIENT_FACTOR)


def stamped(clock: Clock, call: Callable[[], T]) -> tuple[T, Instant]:
    """The result of a call, and the time half-way through it."""
    began = clock.now()
    result = call()
    half = (clock.monotonic() - began.mono) // 2
    return result, Instant(began.mono + half, began.wall + half, began.asleep)


def unless_unchanged(domains: tuple[Domain, ...], last: tuple[Domain, ...]) -> tuple[Domain, ...]:
    """``domains``, or ``last`` itself if it has the same objects: callers compare by identity."""
    return last if [*map(id, domains)] == [*map(id, last)] else domains
