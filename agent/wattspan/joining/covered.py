"""Time whose energy has been divided, and is never divided again."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from wattspan.profiles import EnergyProfile


class Stretch(NamedTuple):
    """A stretch of time, and the process's energy up to its edges, in lanes."""

    start: int
    end: int
    before: int
    after: int


class Covered:
    """The time whose energy has been divided: disjoint stretches, in order, bounded in number."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._starts: list[int] = []
        self._stretches: list[Stretch] = []

    def __iter__(self) -> Iterator[Stretch]:
        return iter(self._stretches)

    def inside(self, start: int, end: int) -> list[Stretch]:
        """What is covered of a stretch; the first and the last may reach beyond it."""
        first = max(0, bisect_right(self._starts, start) - 1)
        if first < len(self._stretches) and self._stretches[first].end <= start:
            first += 1
        return self._stretches[first : bisect_left(self._starts, end, first)]

    def around(self, start: int, end: int) -> tuple[int, int | None]:
        """The energy, in lanes, that has been divided before ``start`` and from ``end`` on.

        A thinned profile may say otherwise of these times: what was divided stays so.
        """
        first, last = bisect_right(self._starts, start), bisect_left(self._starts, end)
        before = self._stretches[first - 1].after if first else 0
        return before, self._stretches[last].before if last < len(self._starts) else None

    def add(self, new: Stretch) -> None:
        """Cover a stretch; where it touches others they become one.

        Beyond the limit the shortest time between two stretches is covered too: nobody gets its
        energy, which is the safe side.
        """
        starts, stretches = self._starts, self._stretches
        first = max(0, bisect_left(starts, new.start) - 1)
        if first < len(stretches) and stretches[first].end < new.start:
            first += 1
        last = bisect_right(starts, new.end, first)
        if first < last:
            left, right = stretches[first], stretches[last - 1]
            if left.start <= new.start:
                new = new._replace(start=left.start, before=left.before)
            if right.end >= new.end:
                new = new._replace(end=right.end, after=right.after)
        starts[first:last] = [new.start]
        stretches[first:last] = [new]
        if len(stretches) > self._limit:
            i = min(
                range(1, len(stretches)),
                key=lambda i: stretches[i].start - stretches[i - 1].end,
            )
            self._bridge(i)

    def _bridge(self, i: int) -> None:
        left, right = self._stretches[i - 1 : i + 1]
        self._stretches[i - 1 : i + 1] = [Stretch(left.start, right.end, left.before, right.after)]
        del self._starts[i]

    def close(self, profile: EnergyProfile, until: int) -> None:
        """Cover all that is left open between the first stretch and ``until``."""
        keep: list[Stretch] = []
        for stretch in self._stretches:
            if keep and keep[-1].end < until:
                last = keep[-1]
                if stretch.start <= until:
                    keep[-1] = Stretch(last.start, stretch.end, last.before, stretch.after)
                    continue
                energy = profile.locate(until)[0]
                if until < profile.thinned:
                    energy = profile.lanes.clamp(energy, last.after, stretch.before)
                keep[-1] = Stretch(last.start, until, last.before, energy)
            keep.append(stretch)
        if keep and keep[-1].end < until:
            energy, last = profile.locate(until)[0], keep[-1]
            if until < profile.thinned:
                energy = profile.lanes.clamp(energy, last.after, energy)
            keep[-1] = Stretch(last.start, until, last.before, energy)
        self._stretches = keep
        self._starts = [stretch.start for stretch in keep]
