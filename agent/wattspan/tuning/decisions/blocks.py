"""Blocks: settled periods of work under one setting, with their energy; and how long caps settle.

A unit counts if it began after the setting had settled and ended before it changed. Energy
arrives later than units. A block waits for it, but the plan of the next setting does not:
``completed`` counts the blocks of the present period with and without energy.

**Latency of caps.** Power passes from its old to its new value in an unknown way. The energy that
is spent above the new power after a change, divided by the difference of the two powers, is the
mean delay: dead time plus half of a ramp. Work counts as settled after twice this delay.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from wattspan.model import MILLISECOND, SECOND
from wattspan.tuning.decisions.values import EnergyPoint

ENERGY_TIMEOUT = 30 * SECOND
"""Maximum time for which a block waits for its energy."""

_METER_ERROR = 50e6
"""Nanoseconds of a block's edges in which its energy is uncertain: GPUs update counters each 0.1 s.

It is about the standard deviation of two edges within such periods, rounded up."""

_MAX_PERIODS = 63
"""Periods that wait for their units, besides the present one."""


class Block(NamedTuple):
    """Work at one level, from the start of its first unit to the end of its last.

    ``busy`` is the sum of the units' durations, ``span`` also includes the gaps between them.
    Longer pauses are in neither; the energy is unknown then. A block of requests is a period of
    time: ``units`` are the requests that ended in it, and ``busy`` and ``span`` their latencies.
    """

    level: int
    start: int
    end: int
    units: int
    work: float
    busy: int
    span: int
    squares: float  # of each unit's time per work
    energy: float | None
    period: int  # number of its period
    arrived: int = 0  # requests that began in it
    late: int = 0  # requests that exceeded the latency limit

    @property
    def rate(self) -> float:
        """Arrived requests per second."""
        return self.arrived / (self.end - self.start) * SECOND

    @property
    def concurrency(self) -> float:
        """Mean number of requests in flight (Little's law)."""
        return self.busy / (self.end - self.start)


def meter_error(duration: float) -> float:
    """Relative standard deviation of the mean power over ``duration`` nanoseconds."""
    return _METER_ERROR / duration


class LevelPeriod(NamedTuple):
    """A level, and the time since which it is in force."""

    level: int | None  # None: not the requested one
    since: int
    number: int


class LevelTime(NamedTuple):
    """Time at a level, settled or not, for the slowdown account."""

    level: int | None
    span: int
    units: int


class SampleBuffer(NamedTuple):
    """Units and energy that are not in finished blocks yet."""

    periods: tuple[LevelPeriod, ...]
    incomplete: Block | None = None  # of the first period
    skipped: int = 0
    last_end: int = 0  # of the latest unit
    elapsed: int = 0  # in the first period, since the last LevelTime
    elapsed_units: int = 0
    completed: int = 0  # blocks of the first period
    waiting: tuple[Block, ...] = ()
    points: tuple[EnergyPoint, ...] = ()
    windows: tuple[Block, ...] = ()  # incomplete blocks of requests
    served_to: int = 0
    served_number: int = 0

    @property
    def level(self) -> int | None:
        """The level in force."""
        return self.periods[-1].level

    @property
    def full_blocks(self) -> int:
        """Completed blocks of the level in force, with or without energy."""
        return self.completed if len(self.periods) == 1 else 0


def empty_buffer(level: int, now: int) -> SampleBuffer:
    return SampleBuffer((LevelPeriod(level, now, 0),))


def set_level(samples: SampleBuffer, level: int | None, since: int) -> SampleBuffer:
    last = samples.periods[-1]
    if last.level == level and since <= last.since:
        return samples
    stretch = LevelPeriod(level, max(since, last.since), last.number + 1)
    return samples._replace(periods=(*samples.periods[-_MAX_PERIODS:], stretch))


def energy_at(points: tuple[EnergyPoint, ...], at: int) -> float:
    """Cumulative energy by linear interpolation; ``at`` is at most the last point's time."""
    right = bisect_left(points, (at, -1))
    if points[right].at == at or right == 0:
        return points[right].energy
    (before, low), (after, high) = points[right - 1], points[right]
    return low + (high - low) * (at - before) / (after - before)


# --------------------------------------------------------------------------- latency of caps

CHANGES = 8
"""Changes whose delays are measured: the latency is the device's and does not vary."""

_BEFORE = 3 * SECOND
_WINDOW = 8 * SECOND
_MIN_WINDOW = 2 * SECOND
"""Times before and after a change in which powers are observed, and the shortest useful one."""

_RAMP = 0.625
"""The part of the time after a change in which the energy shows the delay; then power is new."""

_SPACING = SECOND // 4
_MAX_LATENCY_POINTS = 64
_MIN_DIFFERENCE = 0.04
"""Relative difference of powers below which the delay is not measured."""

_STEP = 250 * MILLISECOND
MAX_LATENCY = 30 * SECOND


class _Change(NamedTuple):
    """A request at ``at``, ``before`` nanoseconds after the previous one; ``until`` the next."""

    at: int
    before: int
    until: int | None = None


@dataclass(frozen=True, slots=True)
class CapLatency:
    """Delays of the first changes. ``points`` are recent, ``pending`` changes wait for more."""

    points: tuple[EnergyPoint, ...] = ()
    pending: tuple[_Change, ...] = ()
    delays: tuple[float, ...] = ()
    last_change: int = 0

    @property
    def measured(self) -> bool:
        """True if no further change is measured."""
        return len(self.delays) >= CHANGES

    @property
    def settled_after(self) -> int:
        """Nanoseconds after a request until work counts as settled; 0 if unknown."""
        if not self.measured:
            return 0
        mean = math.fsum(self.delays) / len(self.delays)
        return min(max(round(2 * mean / _STEP) * _STEP, 0), MAX_LATENCY)

    def change(self, at: int) -> CapLatency:
        """Note that another setting was requested at ``at``."""
        if self.measured:
            return self
        pending = tuple(one._replace(until=one.until or at) for one in self.pending)
        pending = (*pending[-CHANGES:], _Change(at, at - self.last_change))
        return replace(self, pending=pending, last_change=at)

    def add(self, points: Sequence[EnergyPoint]) -> CapLatency:
        """Add readings, and measure the changes whose effect they cover."""
        if self.measured:
            return self
        kept = list(self.points)
        for point in points:
            if not kept or point.at - kept[-1].at >= _SPACING:
                kept.append(point)
        known = tuple(kept[-_MAX_LATENCY_POINTS:])
        pending, delays = self.pending, self.delays
        while pending and known and known[-1].at >= _end(pending[0]):
            delay = _delay(known, pending[0])
            if delay is not None:
                delays = (*delays, delay)
            pending = pending[1:]
        if len(delays) >= CHANGES:
            return CapLatency(delays=delays)
        return replace(self, points=known, pending=pending, delays=delays)


def _end(change: _Change) -> int:
    """The end of the time after a change that shows its delay."""
    latest = change.at + _WINDOW
    return latest if change.until is None else min(change.until, latest)


def _delay(points: tuple[EnergyPoint, ...], change: _Change) -> float | None:
    """The mean delay of a change in nanoseconds; None if it is not known."""
    at, end = change.at, _end(change)
    before = min(_BEFORE, change.before // 2)
    ramp = round(_RAMP * (end - at))
    if end - at < _MIN_WINDOW or before < _MIN_WINDOW // 4:
        return None
    start, settled = at - before, at + ramp
    around = [point.at for point in points if start <= point.at <= end]
    if points[0].at > start or len(around) < (end - start) // SECOND:
        return None  # readings are too rare
    old = (energy_at(points, at) - energy_at(points, start)) / before
    new = (energy_at(points, end) - energy_at(points, settled)) / (end - settled)
    if min(old, new) <= 0 or abs(new - old) < _MIN_DIFFERENCE * old:
        return None
    spent = energy_at(points, settled) - energy_at(points, at)
    return min(max((spent - new * ramp) / (old - new), 0.0), float(ramp))
