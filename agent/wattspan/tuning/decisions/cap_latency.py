"""Measured time until a cap has its full effect, from the device's energy around changes.

Power passes from its old to its new value in an unknown way. The energy that is spent above the
new power after a change, divided by the difference of the two powers, is the mean delay: dead time
plus half of a ramp. Work counts as settled after twice this delay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from wattspan.model import MILLISECOND, SECOND
from wattspan.tuning.decisions.blocks import energy_at
from wattspan.tuning.decisions.values import EnergyPoint

CHANGES = 8
"""Changes whose delays are measured: the latency is the device's and does not vary."""

_BEFORE = 3 * SECOND
_WINDOW = 8 * SECOND
_MIN_WINDOW = 2 * SECOND
"""Times before and after a change in which powers are observed, and the shortest useful one."""

_RAMP = 0.625
"""The part of the time after a change in which the energy shows the delay; then power is new."""

_SPACING = SECOND // 4
_MAX_POINTS = 64
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
        known = tuple(kept[-_MAX_POINTS:])
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
