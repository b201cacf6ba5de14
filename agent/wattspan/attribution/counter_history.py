"""The cumulative energy of one counter over time, from its readings, in bounded memory.

Readings are the *knots* of a function that rises evenly in between, so the energies of neighbouring
periods add up to the microjoule. Energy is known as soon as a reading is: nothing waits for the
usage by which it is charged to processes. Old knots are thinned, ever more with their age, so a
period may begin hours ago: its edge is then located to within a 256th of its age.

The uncertainty of an edge has three parts. The counter's last step may lie on its wrong side. The
power inside an interval may have changed from that of the interval before to that of the one
after: at the fraction ``f`` of an interval this moves at most ``min(f, 1 - f)`` times the
difference of power. And the power may vary faster than the readings show, by ``RIPPLE``.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from math import ceil, hypot
from typing import NamedTuple

from wattspan.attribution.counter_deltas import CounterMeter
from wattspan.model import Domain, Gap, Instant, Interval, Microjoules, Reading

MAX_KNOTS = 4096
RESOLVED_FRACTION = 256
"""Knots are at least a 256th of their age apart."""

RIPPLE = 0.5
"""The assumed variation of power inside an interval, as a fraction of its mean power.

Training steps of exactly one counter step, at full and at a quarter of the power, need this much.
"""


class CounterEnergy(NamedTuple):
    """The energy of a period; ``covered`` are its measured nanoseconds."""

    energy: Microjoules
    uncertainty: Microjoules
    covered: int


class CounterHistory:
    """The energy of one domain, from its first reading to its newest.

    ``patience``: nanoseconds without a reading after which the time is a gap.
    """

    def __init__(self, domain: Domain, patience: int, limit: int = MAX_KNOTS) -> None:
        if limit < 8:
            raise ValueError(f"a counter history needs room for 8 knots, not {limit}")
        self._domain = domain
        self._meter = CounterMeter(domain, patience)
        self._limit = limit
        self._times = array("q")
        self._energies = array("q")  # up to each knot
        self._covered = array("q")  # measured nanoseconds up to each knot

    def __len__(self) -> int:
        return len(self._times)

    def redefine(self, domain: Domain) -> None:
        """Replace the properties of the domain, such as its resolution."""
        self._domain = domain
        self._meter.redefine(domain)

    @property
    def known(self) -> int | None:
        """The monotonic time of the newest reading; None before the first."""
        return self._times[-1] if self._times else None

    # ----------------------------------------------------------------------------------- input

    def add(self, reading: Reading) -> None:
        """Add a reading. One that is not newer than the last is ignored."""
        period = self._meter.advance(reading)
        if not self._times:
            self._append(reading.at.mono, 0, 0)
        elif period is not None:
            self._extend(period)

    def absent(self, now: Instant) -> None:
        """Record a gap up to ``now`` if readings have been absent for longer than the patience."""
        gap = self._meter.absent(now)
        if gap is not None:
            self._extend(gap)

    def _extend(self, period: Interval | Gap) -> None:
        end = period.end.mono
        if isinstance(period, Interval):
            length = end - self._times[-1]  # shorter, if readings came late and a gap reaches in
            if length > 0:
                self._append(end, self._energies[-1] + period.energy, length)
            else:
                self._energies[-1] += period.energy
        elif self._in_gap:
            self._times[-1] = end
        else:
            self._append(end, self._energies[-1], 0)

    @property
    def _in_gap(self) -> bool:
        return len(self._times) > 1 and self._covered[-1] == self._covered[-2]

    def _append(self, time: int, energy: int, covered: int) -> None:
        before = self._covered[-1] if self._covered else 0
        self._times.append(time)
        self._energies.append(energy)
        self._covered.append(before + covered)
        if len(self._times) > self._limit:
            self._thin()

    def _thin(self) -> None:
        """Remove old knots until a quarter of the limit is free."""
        times, scale = self._times, 1
        while len(kept := _kept(times, scale)) > self._limit * 3 // 4:
            scale *= 2
        self._times, self._energies, self._covered = (
            array("q", [column[i] for i in kept])
            for column in (times, self._energies, self._covered)
        )

    # ----------------------------------------------------------------------------------- answers

    def between(self, start: int, end: int) -> CounterEnergy:
        """The energy from ``start`` to ``end``; unmeasured time adds nothing to it."""
        if not self._times:
            return CounterEnergy(Microjoules(0), Microjoules(0), 0)
        first, last = self._times[0], self._times[-1]
        start = min(max(start, first), last)
        end = min(max(end, start), last)
        energy = _at(self._times, self._energies, end) - _at(self._times, self._energies, start)
        covered = _at(self._times, self._covered, end) - _at(self._times, self._covered, start)
        error = hypot(self._edge_error(start), self._edge_error(end)) if end > start else 0.0
        return CounterEnergy(Microjoules(energy), Microjoules(ceil(error)), covered)

    def knots(self, start: int, end: int) -> list[tuple[int, Microjoules, int]]:
        """The knots around a period: time, energy up to it, and measured nanoseconds up to it.

        The first is the last one at or before ``start``, the last is the first at or after ``end``.
        """
        first = max(0, bisect_right(self._times, start) - 1)
        last = bisect_left(self._times, end) + 1
        return [
            (time, Microjoules(energy), covered)
            for time, energy, covered in zip(
                self._times[first:last],
                self._energies[first:last],
                self._covered[first:last],
                strict=True,
            )
        ]

    def _edge_error(self, time: int) -> float:
        """The uncertainty of the energy up to ``time``, in microjoules. Needs two knots."""
        i = min(max(1, bisect_left(self._times, time)), len(self._times) - 1)
        length = self._times[i] - self._times[i - 1]
        energy = self._energies[i] - self._energies[i - 1]
        domain = self._domain
        stale = domain.resolution if domain.staleness is None else domain.staleness
        step = energy * min(1.0, stale / length)
        power = energy / length
        spread = max(abs(self._power(j, power) - power) for j in (i - 1, i + 1))
        if len(self._times) == 2:
            spread = power
        inside = min(time - self._times[i - 1], self._times[i] - time)
        return step + inside * (spread + RIPPLE * power)

    def _power(self, i: int, otherwise: float) -> float:
        """The power of the interval that ends at knot ``i``, in microjoules a nanosecond."""
        if not 0 < i < len(self._times):
            return otherwise
        energy = self._energies[i] - self._energies[i - 1]
        return energy / (self._times[i] - self._times[i - 1])


def _at(times: array[int], values: array[int], time: int) -> int:
    """The value at ``time``, between two knots in proportion, rounded down."""
    i = bisect_left(times, time)
    if times[i] == time:
        return values[i]
    length = times[i] - times[i - 1]
    return values[i - 1] + (values[i] - values[i - 1]) * (time - times[i - 1]) // length


def _kept(times: array[int], scale: int) -> list[int]:
    """The knots that remain; their distances grow with their age."""
    last = len(times) - 1
    kept = [last]
    for i in range(last - 1, 0, -1):
        apart = (times[last] - times[i]) * scale // RESOLVED_FRACTION
        if times[kept[-1]] - times[i - 1] > apart:
            kept.append(i)
    kept.append(0)
    return kept[::-1]
