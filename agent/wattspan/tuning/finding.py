"""Which span is the unit of work, where nobody said.

A training loop opens the same span over and over, one after the other, about equally long, and
hardly anything happens outside of it; a server has many of one name open at once. Inside of
either are smaller spans, outside of it a few long ones that come once. All that is kept of a
name are sums, and of so many names only: what is looked at is one process for a few minutes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from wattspan.model import MILLISECOND, SECOND, Word
from wattspan.tuning.values import Kind

NAMES = 32
"""Names of one process that are looked at; in what else comes nothing is found."""

LEAST = 20
"""Spans of a name that must have been seen before it can be told what they are."""

ENOUGH = 10 * SECOND
"""A process must have been seen for so long: what is outermost ends last."""

PATIENCE = 120 * SECOND
"""A rare name is waited for, before a layer of it is chosen, if it would do by then."""

SHORTEST = 1 * MILLISECOND
LONGEST = 60 * SECOND
"""Units beyond either are of no use: their edges are unsure, or too few would come."""

_COVER = 0.5  # steps fill at least this part of the time
_REGULAR = 0.5  # coefficient of variation of the durations of steps, at most
_SIDE_BY_SIDE = 0.05  # so many that begin before another ended are no accident
_INSIDE = 0.9  # so many within spans of another name make it a layer of that one
_NOTICED = 64  # of so many spans each one's surroundings are looked at, then
_SELDOM = 31  # only of those whose number has none of these bits


class Why(Word):
    """Why a name is not the unit of work."""

    RARE = "rare"  # it was not seen often or long enough, or a name around it was not
    SHORT = "short"  # its spans are too short
    LONG = "long"  # its spans are too long
    NESTED = "nested"  # it is a layer of another name that is looked at
    SPARSE = "sparse"  # one after the other and regular, but most of the time is spent outside
    LESSER = "lesser"  # it could be, and another one fills more of the time


class Found(NamedTuple):
    """A span that is a unit of work. Times are in nanoseconds, ``cover`` is a part of 1."""

    name: str
    kind: Kind
    spans: int
    mean: float
    variation: float
    cover: float


class Findings(NamedTuple):
    """What was found in one process, and why not what was passed over, by name."""

    found: Found | None
    passed: dict[str, Why]
    crowded_out: int = 0  # spans of names for which there was no room


class _Name:
    """All spans of one name, in sums."""

    __slots__ = (
        "end",
        "first",
        "inside",
        "overlapped",
        "overlaps",
        "spans",
        "squares",
        "start",
        "time",
    )

    def __init__(self, start: int) -> None:
        self.first = start
        self.start = self.end = start  # of the span that ended last
        self.spans = 0
        self.time = 0
        self.squares = 0.0  # of durations in seconds: integers so large are slow
        self.overlaps = 0
        self.overlapped = 0
        self.inside: dict[str, list[int]] = {}  # by outer name: how often it was not, and was

    @property
    def mean(self) -> float:
        return self.time / self.spans

    @property
    def variation(self) -> float:
        mean = self.mean / SECOND
        return math.sqrt(max(self.squares / self.spans - mean * mean, 0.0)) / mean

    @property
    def covered(self) -> int:
        """The time in which at least one was open."""
        return self.time - self.overlapped

    @property
    def side_by_side(self) -> float:
        return self.overlaps / self.spans

    def within(self, outer: str) -> bool:
        """Whether nearly all of its spans of late lay within spans of the name ``outer``."""
        out, in_ = self.inside.get(outer, (0, 0))
        return in_ >= _INSIDE * (out + in_) > 0


class Finder:
    """Looks at the spans of one service in one process.

    Start a new one every few minutes: what a process did long ago says little.
    """

    __slots__ = ("_names", "crowded_out")

    def __init__(self) -> None:
        self._names: dict[str, _Name] = {}
        self.crowded_out = 0

    def add(self, name: str, start: int, end: int) -> None:
        """One ended span; those of a name come in the order of their ends, or nearly so."""
        seen = self._names.get(name)
        if seen is None:
            if len(self._names) >= NAMES:
                self.crowded_out += 1
                return
            seen = self._names[name] = _Name(start)
        spans = seen.spans
        if spans < _NOTICED or not spans & _SELDOM:
            self._look_around(name, seen, start, end)
        time = end - start
        seconds = time * 1e-9
        seen.spans = spans + 1
        seen.time += time
        seen.squares += seconds * seconds
        last = seen.end
        if start < last:
            seen.overlaps += 1
            seen.overlapped += min(end, last) - start
        if end > last:
            seen.end = end
        seen.start = start

    def _look_around(self, outer: str, seen: _Name, start: int, end: int) -> None:
        """Whether the last span of each other name was within this one.

        An outer span ends after what is in it. One that lies wholly before this span, and after
        the one before this, was outside of both; one that is older says nothing.
        """
        for other in self._names.values():
            if other is seen or not other.spans or other.end <= seen.end:
                continue
            tally = other.inside.get(outer)
            if tally is None:
                tally = other.inside[outer] = [0, 0]
            tally[start <= other.start and other.end <= end] += 1

    def findings(self) -> Findings:
        """The unit of work, if there is one."""
        names = self._names
        begin = min((seen.first for seen in names.values()), default=0)
        elapsed = max((seen.end for seen in names.values()), default=0) - begin
        passed = {name: why for name, seen in names.items() if (why := _unfit(seen, elapsed))}
        outer = _outermost({k: v for k, v in names.items() if k not in passed}, passed)
        coming = [name for name, seen in names.items() if _coming(seen)]
        best: Found | None = None
        for name in outer:
            if any(names[name].within(rare) for rare in coming):
                passed[name] = Why.RARE
                continue
            found = _judge(name, names[name], elapsed)
            if found is None:
                passed[name] = Why.SPARSE
                continue
            if best is not None:
                passed[min(best, found, key=_time).name] = Why.LESSER
            best = found if best is None else max(best, found, key=_time)
        return Findings(best, passed, self.crowded_out)


def _time(found: Found) -> tuple[float, str]:
    return found.spans * found.mean, found.name


def _unfit(seen: _Name, elapsed: int) -> Why | None:
    if seen.spans < LEAST or elapsed < ENOUGH:
        return Why.RARE
    if seen.mean < SHORTEST:
        return Why.SHORT
    return Why.LONG if seen.mean > LONGEST else None


def _coming(seen: _Name) -> bool:
    """Whether a name that is rare as yet came more than once, and will have come often soon."""
    return 1 < seen.spans < LEAST and seen.mean * LEAST <= PATIENCE


def _outermost(candidates: dict[str, _Name], passed: dict[str, Why]) -> list[str]:
    """The candidates that are in no other, longest first; the rest are passed over."""
    outer: list[str] = []
    for name in sorted(candidates, key=lambda one: (-candidates[one].mean, one)):
        seen = candidates[name]
        if any(seen.within(other) and _fits(seen, candidates[other]) for other in outer):
            passed[name] = Why.NESTED
        else:
            outer.append(name)
    return outer


def _fits(inner: _Name, outer: _Name) -> bool:
    """Whether all of a name has room in the other: it may also come where the other does not."""
    return outer.time >= _INSIDE * inner.time or outer.covered >= _INSIDE * inner.covered


def _judge(name: str, seen: _Name, elapsed: int) -> Found | None:
    """What sort of unit it is; None for what comes like clockwork but fills little time."""
    cover = min(1.0, seen.covered / elapsed)
    variation = seen.variation
    if seen.side_by_side > _SIDE_BY_SIDE or variation > _REGULAR:
        kind = Kind.REQUESTS
    elif cover >= _COVER:
        kind = Kind.STEPS
    else:
        return None
    return Found(name, kind, seen.spans, seen.mean, variation, cover)


def agreed(findings: Iterable[Findings]) -> Found | None:
    """What most processes of a service were found to do, where there is such a majority."""
    found = [one.found for one in findings]
    votes = Counter((one.name, one.kind) for one in found if one is not None)
    if not votes:
        return None
    (most, count), *_ = votes.most_common(1)
    if 2 * count <= len(found):
        return None
    agreeing = [one for one in found if one is not None and (one.name, one.kind) == most]
    return max(agreeing, key=_time)
