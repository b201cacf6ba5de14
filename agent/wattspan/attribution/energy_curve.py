"""The cumulative energy of one device over time, in bounded memory.

The edges of intervals are the *knots* of a function that rises evenly in between, so the energies
of neighbouring periods add up to the microjoule. Intervals may have any length. Old knots are
thinned, ever more with their age, so a period may begin hours ago: its edge is then located to
within a 256th of its age. An interval with an edge of a window that may still be read is kept, for
those who may know the edge.

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
from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import pairwise
from math import ceil, hypot
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


STEP = 512
"""Knots that one step of thinning examines: less than a millisecond, whatever the length."""


def around(times: Sequence[int], edges: Sequence[int], left: int, right: int) -> set[int]:
    """The indices of the ends of the intervals between two knots that contain one of the edges.

    ``times`` and ``edges`` are sorted. The cost is that of these intervals, however many edges.
    """
    ends, at = set[int](), bisect_right(edges, times[left] - (not left))  # the first interval whole
    while at < len(edges) and edges[at] <= times[right]:
        end = max(left + 1, bisect_left(times, edges[at], left, right + 1))
        ends |= {end - 1, end}
        at = bisect_right(edges, times[end], at)
    return ends


class EnergyKnots:
    """Cumulative energy and measured time at some instants, about ``limit`` of them.

    ``thin`` removes old ones, except those around edges.
    """

    def __init__(self, limit: int) -> None:
        if limit < 8:
            raise ValueError(f"an energy curve needs room for 8 knots, not {limit}")
        self._limit = self._thin_at = limit
        self._scale = 1
        self._until: int | None = None  # the time of the oldest knot that this pass has examined
        self._spaced = self.pinned = 0  # knots that the last pass has kept by age, or for edges
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

    def add(self, end: int, energy: int) -> None:
        """Add energy up to ``end``; that of a time which is known already counts there."""
        since, before, covered = self.times[-1], self.energies[-1], self.covered[-1]
        if end > since:
            self.append(end, before + energy, covered + end - since)
        else:
            self.energies[-1] += energy

    def skip(self, until: int) -> None:
        """Add a gap."""
        if len(self) > 1 and self.covered[-1] == self.covered[-2]:
            self.times[-1] = until
        else:
            self.append(until, self.energies[-1], self.covered[-1])

    @property
    def crowded(self) -> bool:
        """True if knots are to be thinned."""
        return self._until is not None or len(self.times) > self._thin_at

    def thin(self, edges: Sequence[int] = ()) -> None:
        """Remove some of ``STEP`` knots, but none around sorted ``edges``.

        So no lock is held long. A pass goes from the newest to the oldest, and a quarter of the
        limit is free after it.
        """
        times = self.times
        if self._until is None:
            self._until, self._spaced, self.pinned = times[-1], 1, 0
        right = min(bisect_left(times, self._until), len(times) - 1)
        left = max(0, right - STEP)
        spaced = _spaced(times, left, right, self._scale)
        kept = sorted(around(times, edges, left, right).union(spaced) - {right})
        self._spaced += len(spaced)
        self.pinned += len(kept) - len(spaced)
        for before, after in pairwise([*kept, right]):
            if after - before > 1:
                self.deviations[after] = self._deviation(before, after)
        for column in (times, self.energies, self.covered, self.deviations):
            column[left:right] = array("q", [column[i] for i in kept])
        self._until = times[left]
        if not left:
            self._until, self._thin_at = None, self._limit + self.pinned
            if self._spaced > self._limit * 3 // 4:
                self._scale, self._thin_at = 2 * self._scale, 0  # another pass

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

    def columns(self, start: int, end: int) -> tuple[array[int], array[int], array[int]]:
        """The knots around a period: times, energies up to them, measured nanoseconds."""
        first = max(0, bisect_right(self.times, start) - 1)
        part = slice(first, bisect_left(self.times, end) + 1)
        return self.times[part], self.energies[part], self.covered[part]

    def power(self, i: int, otherwise: float) -> float:
        """The power of the interval that ends at knot ``i``, in microjoules a nanosecond."""
        times, energies = self.times, self.energies
        if not 0 < i < len(times):
            return otherwise
        return (energies[i] - energies[i - 1]) / (times[i] - times[i - 1])

    def clipped(self, start: int, end: int) -> tuple[int, int]:
        """The part of a period within the knots."""
        first, last = self.times[0], self.times[-1]
        start = min(max(start, first), last)
        return start, min(max(end, start), last)


class _Layers:
    """One energy with the knots around edges of windows, ``kept``, and without, ``common``.

    Both are one object while there are no such knots.
    """

    def __init__(self, limit: int) -> None:
        self.kept = self.common = EnergyKnots(limit)

    def each(self) -> tuple[EnergyKnots, ...]:
        return (self.kept,) if self.common is self.kept else (self.kept, self.common)

    def thin(self, edges: Sequence[int]) -> bool:
        """One step; False if nothing is to be thinned."""
        if not (edges or self.kept.pinned):
            self.kept = self.common  # whose answers do not tell that edges existed
        elif self.kept.crowded and self.common is self.kept:
            self.common = deepcopy(self.kept)
        for one, pins in ((self.common, ()), (self.kept, edges)):
            if one.crowded:
                one.thin(pins)
                return True
        return False

    def at(self, time: int, own: Sequence[int] | None, apart: int) -> EnergyKnots:
        """The knots for a reader who knows the edges ``own``, or all of them with None.

        An edge counts if it is less than ``apart`` from ``time``.
        """
        if own is None:
            return self.kept
        i = bisect_right(own, time - apart)
        return self.kept if i < len(own) and own[i] < time + apart else self.common


class EnergyCurve:
    """The energy of one domain, from its first reading to its newest.

    ``cell``: length of the cells of ``cells_between``, 0 for none. ``own`` are the edges of windows
    that a reader may know, sorted, or None for all of them: no answer tells of others. The energies
    up to them stay as they are, if ``thin`` knows them.
    """

    def __init__(self, domain: Domain, cell: int = 0, limit: int = MAX_KNOTS) -> None:
        self.domain = domain
        self._cell = cell
        self._fine, self._coarse = _Layers(limit), _Layers(limit)
        self._stale: deque[tuple[int, int | None]] = deque(maxlen=MAX_STALE_CHANGES)

    def __len__(self) -> int:
        return len(self._fine.kept)

    @property
    def known(self) -> int | None:
        """The monotonic time up to which energy or a gap is known; None before the first."""
        times = self._fine.kept.times
        return times[-1] if times else None

    # ----------------------------------------------------------------------------------- input

    def begin(self, at: int) -> None:
        """Begin at a first reading. Without effect on a curve that has begun."""
        if not self._fine.kept.times:
            self._fine.kept.append(at, 0, 0)

    def add(self, start: int, end: int, energy: int, stale: int | None = None) -> None:
        """Add the next interval; the time since the last one is a gap.

        Only a part of its time is new, if readings came late and a gap reaches in. ``stale`` as in
        `Interval`.
        """
        if stale != (self._stale[-1][1] if self._stale else None):
            self._stale.append((start, stale))
        self.begin(start)
        self.skip(start)
        since = self._fine.kept.times[-1]
        for knots in self._fine.each():
            knots.add(end, energy)
        self._complete_cells(since, end)

    def skip(self, until: int) -> None:
        """Add a gap; without effect before the first reading."""
        since = self.known
        if since is None or until <= since:
            return
        for knots in self._fine.each():
            knots.skip(until)
        self._complete_cells(since, until)

    def _complete_cells(self, since: int, end: int) -> None:
        """Add the cells that end between two times: all of one interval need their edges only."""
        if not self._cell:
            return
        first, last = -(-since // self._cell) * self._cell, end - end % self._cell
        known = self._coarse.kept.times[-1] if self._coarse.kept.times else -1
        for edge in dict.fromkeys((first, last)):
            if edge > known and since <= edge <= end:
                for knots in self._coarse.each():
                    knots.append(edge, *self._fine.kept.at(edge))

    @property
    def crowded(self) -> bool:
        """True if knots are to be thinned."""
        return any(one.crowded for both in (self._fine, self._coarse) for one in both.each())

    def thin(self, edges: Sequence[int] = ()) -> bool:
        """One step of thinning, which keeps the knots around sorted ``edges``; False: none left."""
        return self._fine.thin(edges) or self._coarse.thin(edges)

    # ----------------------------------------------------------------------------------- answers

    def between(self, start: int, end: int, own: Sequence[int] | None = None) -> CurveEnergy:
        """The energy from ``start`` to ``end``; unmeasured time adds nothing to it."""
        if not self._fine.kept.times:
            return CurveEnergy(Microjoules(0), Microjoules(0), 0)
        start, end = self._fine.kept.clipped(start, end)
        first, last = self._fine.at(start, own, 1), self._fine.at(end, own, 1)
        before, after = first.at(start), last.at(end)
        error, blur = 0.0, 0
        if end > start:
            error = hypot(self._edge_error(first, start), self._edge_error(last, end))
            blur = first.blur(start) + last.blur(end)
        energy = Microjoules(after[0] - before[0])
        uncertainty = Microjoules(ceil(error) + blur)
        return CurveEnergy(energy, uncertainty, after[1] - before[1], Microjoules(blur))

    def up_to(self, time: int) -> tuple[int, int] | None:
        """Cumulative energy and measured time at ``time``; None outside of the history."""
        knots = self._fine.common
        return knots.at(time) if knots.times and knots.times[0] <= time <= knots.times[-1] else None

    def cells_between(self, start: int, end: int, own: Sequence[int] | None = None) -> CurveEnergy:
        """The energy of whole cells, from and to the edge of one; uncertain by thinning alone.

        Old cells are thinned to the edges of cells, so no answer contains more of the readings
        inside a cell than its energy.
        """
        if not self._coarse.kept.times:
            return CurveEnergy(Microjoules(0), Microjoules(0), 0)
        edges = self._coarse.kept.clipped(start, end)
        knots = [self._coarse.at(edge, own, self._cell) for edge in edges]
        before, after = (one.at(edge) for one, edge in zip(knots, edges, strict=True))
        blur = Microjoules(sum(one.blur(edge) for one, edge in zip(knots, edges, strict=True)))
        return CurveEnergy(Microjoules(after[0] - before[0]), blur, after[1] - before[1], blur)

    def knots(
        self, start: int, end: int, *, common: bool = False
    ) -> Iterator[tuple[int, int, int]]:
        """The knots around a period: time, energy up to it, and measured nanoseconds up to it.

        The first is the last one at or before ``start``, the last is the first at or after ``end``.
        With ``common``, none is there for the edge of a window. Later input changes none of them.
        """
        knots = self._fine.common if common else self._fine.kept
        return zip(*knots.columns(start, end), strict=True)

    def _edge_error(self, knots: EnergyKnots, time: int) -> float:
        """The uncertainty of the energy up to ``time``, in microjoules. Needs two knots.

        The powers beside the interval are those that every reader may know.
        """
        times, domain = knots.times, self.domain
        i = min(max(1, bisect_left(times, time)), len(times) - 1)
        length, energy = times[i] - times[i - 1], knots.energies[i] - knots.energies[i - 1]
        stale = self._staleness(times[i - 1], times[i])
        power = energy / length
        common = self._fine.common
        j = min(max(1, bisect_left(common.times, time)), len(common) - 1)
        beside = [common.power(k, power) for k in (j - 1, j, j + 1)]
        # An interval without a step of the counter has no energy: its step is in one beside it.
        step = max(power, *beside) * min(length, domain.resolution if stale is None else stale)
        spread = max(abs(one - power) for one in beside)
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


def _spaced(times: array[int], left: int, right: int, scale: int) -> list[int]:
    """The knots from ``left`` to before ``right`` that remain; distances grow with their age."""
    i, spaced, last = right, list[int](), times[-1]
    while i > left:
        time = times[i]
        gap = (last - time) * scale // RESOLVED_FRACTION
        i = min(i - 1, bisect_left(times, time - gap, left, i))
        spaced.append(i)
    return spaced
