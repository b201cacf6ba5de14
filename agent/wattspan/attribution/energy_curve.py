"""The cumulative energy of one device over time, in bounded memory.

The edges of intervals are the *knots* of a function that rises evenly in between, so the energies
of neighbouring periods add up to the microjoule. Intervals may have any length. Old knots are
thinned, ever more with their age, so a period may begin hours ago: its edge is then located to
within a 256th of its age. An interval with an edge of a window that may still be read is kept.

The uncertainty of an edge has four parts. The counter's last step may lie on its wrong side. The
power inside an interval may have changed from that of the interval before to that of the one
after: at the fraction ``f`` of an interval this moves at most ``min(f, 1 - f)`` times the
difference of power. The power may vary faster than the readings show, by ``RIPPLE``. And where
knots were thinned, the energy deviates from the straight line by a known amount at most.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from math import ceil, hypot
from operator import itemgetter
from typing import NamedTuple

from wattspan.model import Domain, Microjoules

MAX_KNOTS = 4096
RESOLVED_FRACTION = 256
"""Knots are at least a 256th of their age apart."""

MAX_STALE_CHANGES = 256
"""Older readings count as old as a step of the counter."""

RIPPLE = 0.5
"""The assumed variation of power inside an interval, as a fraction of its mean power.

Training steps of exactly one counter step, at full and at a quarter of the power, need this much.
"""


class CurveEnergy(NamedTuple):
    """The energy of a period; ``covered`` are its measured nanoseconds.

    ``blur`` is the part of the uncertainty that comes from thinning.
    """

    energy: Microjoules
    uncertainty: Microjoules
    covered: int
    blur: Microjoules = Microjoules(0)


Edges = Callable[[], Sequence[int]]
"""Returns the times around which knots are kept."""


def around(times: Sequence[int], edges: Iterable[int]) -> set[int]:
    """The indices of the ends of the intervals in ``times`` that contain an edge."""
    ends = set(map(partial(bisect_left, list(times)), edges)) - {0, len(times)}  # lists are faster
    return ends | {end - 1 for end in ends}


class EnergyKnots:
    """Cumulative energy and measured time at some instants, at most ``limit`` of them.

    Two knots around each of ``edges`` are kept besides.
    """

    def __init__(self, limit: int, edges: Edges = tuple) -> None:
        if limit < 8:
            raise ValueError(f"an energy curve needs room for 8 knots, not {limit}")
        self._limit = self._thin_at = limit
        self._edges = edges
        self.times = array("q")
        self.energies = array("q")  # up to each knot
        self.covered = array("q")  # measured nanoseconds up to each knot
        self.deviations = array("q")  # largest one of the energy before each knot, from a line

    def __len__(self) -> int:
        return len(self.times)

    def append(self, time: int, energy: int, covered: int) -> None:
        """Add a knot after all others."""
        self.times.append(time)
        self.energies.append(energy)
        self.covered.append(covered)
        self.deviations.append(0)
        if len(self.times) > self._thin_at:
            self._thin()

    def _thin(self) -> None:
        """Remove old knots until a quarter of the limit is free, besides those around edges."""
        times, scale = self.times, 1
        while len(spaced := _kept(times, scale)) > self._limit * 3 // 4:
            scale *= 2
        kept = sorted(around(times, self._edges()).union(spaced))
        for left, right in pairwise(kept):
            if right - left > 1:
                self.deviations[right] = self._deviation(left, right)
        columns, chosen = (times, self.energies, self.covered, self.deviations), itemgetter(*kept)
        self.times, self.energies, self.covered, self.deviations = (
            array("q", chosen(column)) for column in columns
        )
        self._thin_at = self._limit + len(kept) - len(spaced)

    def _deviation(self, left: int, right: int) -> int:
        """The largest deviation of the energy from a line between two knots."""
        begin, base = self.times[left], self.energies[left]
        power = (self.energies[right] - base) / (self.times[right] - begin)
        apart = [
            abs(self.energies[i] - base - power * (self.times[i] - begin))
            for i in range(left, right + 1)
        ]
        inside = zip(pairwise(apart), self.deviations[left + 1 : right + 1], strict=True)
        return ceil(max(max(ends) + within for ends, within in inside))

    def blur(self, time: int) -> int:
        """The largest error of the energy up to ``time`` by thinning."""
        i = bisect_left(self.times, time)
        return 0 if self.times[i] == time else self.deviations[i]

    def at(self, time: int) -> tuple[int, int]:
        """Energy and measured time up to ``time``, rounded down between two knots."""
        i = bisect_left(self.times, time)
        end, energy, covered = self.times[i], self.energies[i], self.covered[i]
        if end == time:
            return energy, covered
        start, before, already = self.times[i - 1], self.energies[i - 1], self.covered[i - 1]
        inside, length = time - start, end - start
        return (
            before + (energy - before) * inside // length,
            already + (covered - already) * inside // length,
        )

    def clipped(self, start: int, end: int) -> tuple[int, int]:
        """The part of a period within the knots."""
        first, last = self.times[0], self.times[-1]
        start = min(max(start, first), last)
        return start, min(max(end, start), last)


class EnergyCurve:
    """The energy of one domain, from its first reading to its newest.

    ``cell``: length of the cells of ``cells_between``, 0 for none. The energies up to ``edges``
    stay as they are, once these are known.
    """

    def __init__(
        self, domain: Domain, cell: int = 0, limit: int = MAX_KNOTS, edges: Edges = tuple
    ) -> None:
        self.domain = domain
        self._cell = cell
        self._fine, self._coarse = EnergyKnots(limit, edges), EnergyKnots(limit, edges)
        self._stale: deque[tuple[int, int | None]] = deque(maxlen=MAX_STALE_CHANGES)

    def __len__(self) -> int:
        return len(self._fine)

    @property
    def known(self) -> int | None:
        """The monotonic time up to which energy or a gap is known; None before the first."""
        return self._fine.times[-1] if self._fine.times else None

    # ----------------------------------------------------------------------------------- input

    def begin(self, at: int) -> None:
        """Begin at a first reading. Without effect on a curve that has begun."""
        if not self._fine.times:
            self._fine.append(at, 0, 0)

    def add(self, start: int, end: int, energy: int, stale: int | None = None) -> None:
        """Add the next interval; the time since the last one is a gap.

        Only a part of its time is new, if readings came late and a gap reaches in. ``stale`` as in
        `Interval`.
        """
        if stale != (self._stale[-1][1] if self._stale else None):
            self._stale.append((start, stale))
        self.begin(start)
        self.skip(start)
        fine = self._fine
        since, before, covered = fine.times[-1], fine.energies[-1], fine.covered[-1]
        if end > since:
            fine.append(end, before + energy, covered + end - since)
        else:
            fine.energies[-1] += energy
        self._complete_cells(since, end)

    def skip(self, until: int) -> None:
        """Add a gap; without effect before the first reading."""
        fine = self._fine
        if not fine.times or until <= fine.times[-1]:
            return
        since, energy, covered = fine.times[-1], fine.energies[-1], fine.covered[-1]
        if len(fine) > 1 and covered == fine.covered[-2]:
            fine.times[-1] = until
        else:
            fine.append(until, energy, covered)
        self._complete_cells(since, until)

    def _complete_cells(self, since: int, end: int) -> None:
        """Add the cells that end between two times: all of one interval need their edges only."""
        if not self._cell:
            return
        first, last = -(-since // self._cell) * self._cell, end - end % self._cell
        known = self._coarse.times[-1] if self._coarse.times else -1
        for edge in dict.fromkeys((first, last)):
            if edge > known and since <= edge <= end:
                self._coarse.append(edge, *self._fine.at(edge))

    # ----------------------------------------------------------------------------------- answers

    def between(self, start: int, end: int) -> CurveEnergy:
        """The energy from ``start`` to ``end``; unmeasured time adds nothing to it."""
        if not self._fine.times:
            return CurveEnergy(Microjoules(0), Microjoules(0), 0)
        start, end = self._fine.clipped(start, end)
        before, after = self._fine.at(start), self._fine.at(end)
        error = hypot(self._edge_error(start), self._edge_error(end)) if end > start else 0.0
        blur = self._fine.blur(start) + self._fine.blur(end) if end > start else 0
        energy = Microjoules(after[0] - before[0])
        uncertainty = Microjoules(ceil(error) + blur)
        return CurveEnergy(energy, uncertainty, after[1] - before[1], Microjoules(blur))

    def up_to(self, time: int) -> tuple[int, int] | None:
        """Cumulative energy and measured time at ``time``; None outside of the history."""
        times = self._fine.times
        return self._fine.at(time) if times and times[0] <= time <= times[-1] else None

    def cells_between(self, start: int, end: int) -> CurveEnergy:
        """The energy of whole cells, from and to the edge of one; uncertain by thinning alone.

        Old cells are thinned to the edges of cells, so no answer contains more of the readings
        inside a cell than its energy.
        """
        if not self._coarse.times:
            return CurveEnergy(Microjoules(0), Microjoules(0), 0)
        edges = self._coarse.clipped(start, end)
        before, after = map(self._coarse.at, edges)
        blur = Microjoules(sum(map(self._coarse.blur, edges)))
        return CurveEnergy(Microjoules(after[0] - before[0]), blur, after[1] - before[1], blur)

    def knots(self, start: int, end: int) -> list[tuple[int, Microjoules, int]]:
        """The knots around a period: time, energy up to it, and measured nanoseconds up to it.

        The first is the last one at or before ``start``, the last is the first at or after ``end``.
        """
        fine = self._fine
        part = slice(max(0, bisect_right(fine.times, start) - 1), bisect_left(fine.times, end) + 1)
        columns = fine.times[part], fine.energies[part], fine.covered[part]
        return [
            (time, Microjoules(energy), done) for time, energy, done in zip(*columns, strict=True)
        ]

    def _edge_error(self, time: int) -> float:
        """The uncertainty of the energy up to ``time``, in microjoules. Needs two knots."""
        times, energies, domain = self._fine.times, self._fine.energies, self.domain
        i = min(max(1, bisect_left(times, time)), len(times) - 1)
        length, energy = times[i] - times[i - 1], energies[i] - energies[i - 1]
        stale = self._staleness(times[i - 1], times[i])
        step = energy * min(1.0, (domain.resolution if stale is None else stale) / length)
        power = energy / length
        spread = max(abs(self._power(j, power) - power) for j in (i - 1, i + 1))
        if len(times) == 2:
            spread = power
        inside = min(time - times[i - 1], times[i] - time)
        return step + inside * (spread + RIPPLE * power)

    def _staleness(self, start: int, end: int) -> int | None:
        """The largest age of the readings of the intervals between two knots."""
        ages: list[int | None] = []
        for since, stale in reversed(self._stale):
            if since < end:
                ages.append(stale)
            if since <= start:
                break
        else:
            ages.append(None)  # before the first change that is remembered
        known = [one for one in ages if one is not None]
        return max(known) if len(known) == len(ages) else None

    def _power(self, i: int, otherwise: float) -> float:
        """The power of the interval that ends at knot ``i``, in microjoules a nanosecond."""
        times, energies = self._fine.times, self._fine.energies
        if not 0 < i < len(times):
            return otherwise
        return (energies[i] - energies[i - 1]) / (times[i] - times[i - 1])


def _kept(times: array[int], scale: int) -> list[int]:
    """The knots that remain; their distances grow with their age."""
    i = len(times) - 1
    kept, last = [i], times[i]
    while i > 0:
        time = times[i]
        i = min(i - 1, bisect_left(times, time - (last - time) * scale // RESOLVED_FRACTION))
        kept.append(i)
    return kept[::-1]
