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

from wattspan.model import MILLISECOND, SECOND, ModelEnum
from wattspan.tuning.decisions.values import WorkloadKind

MAX_NAMES = 32
"""Names of one process that are looked at; in what else comes nothing is found."""

MIN_SPANS = 20
"""Spans of a name that must have been seen before it can be told what they are."""

MIN_OBSERVATION = 10 * SECOND
"""A process must have been seen for so long: what is outermost ends last."""

RARE_NAME_TIMEOUT = 120 * SECOND
"""A rare name is waited for, before a layer of it is chosen, if it would do by then."""

MIN_DURATION = 1 * MILLISECOND
MAX_DURATION = 60 * SECOND
"""Units beyond either are of no use: their edges are unsure, or too few would come."""

_MIN_COVERAGE = 0.5  # steps fill at least this part of the time
_MAX_VARIATION = 0.5  # coefficient of variation of the durations of steps, at most
_MAX_OVERLAP = 0.05  # so many that begin before another ended are no accident
_MIN_CONTAINED = 0.9  # so many within spans of another name make it a layer of that one
_NOTICED = 64  # of so many spans each one's surroundings are looked at, then
_SELDOM = 31  # only of those whose number has none of these bits


class UnitRejection(ModelEnum):
    """Why a name is not the unit of work."""

    RARE = "rare"  # it was not seen often or long enough, or a name around it was not
    SHORT = "short"  # its spans are too short
    LONG = "long"  # its spans are too long
    NESTED = "nested"  # it is a layer of another name that is looked at
    SPARSE = "sparse"  # one after the other and regular, but most of the time is spent outside
    LESSER = "lesser"  # it could be, and another one fills more of the time


class DetectedUnit(NamedTuple):
    """A span that is a unit of work. Times are in nanoseconds, ``cover`` is a part of 1."""

    name: str
    kind: WorkloadKind
    spans: int
    mean: float
    variation: float
    cover: float


class DetectionResult(NamedTuple):
    """What was found in one process, and why not what was passed over, by name."""

    found: DetectedUnit | None
    passed: dict[str, UnitRejection]
    crowded_out: int = 0  # spans of names for which there was no room


class _NameStatistics:
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
        return in_ >= _MIN_CONTAINED * (out + in_) > 0


class UnitDetector:
    """Looks at the spans of one service in one process.

    Start a new one every few minutes: what a process did long ago says little.
    """

    __slots__ = ("_names", "crowded_out")

    def __init__(self) -> None:
        self._names: dict[str, _NameStatistics] = {}
        self.crowded_out = 0

    def add(self, name: str, start: int, end: int) -> None:
        """One ended span; those of a name come in the order of their ends, or nearly so."""
        seen = self._names.get(name)
        if seen is None:
            if len(self._names) >= MAX_NAMES:
                self.crowded_out += 1
                return
            seen = self._names[name] = _NameStatistics(start)
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

    def _look_around(self, outer: str, seen: _NameStatistics, start: int, end: int) -> None:
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

    def findings(self) -> DetectionResult:
        """The unit of work, if there is one."""
        names = self._names
        begin = min((seen.first for seen in names.values()), default=0)
        elapsed = max((seen.end for seen in names.values()), default=0) - begin
        passed = {name: why for name, seen in names.items() if (why := _rejection(seen, elapsed))}
        outer = _outermost({k: v for k, v in names.items() if k not in passed}, passed)
        coming = [name for name, seen in names.items() if _becoming_frequent(seen)]
        best: DetectedUnit | None = None
        for name in outer:
            if any(names[name].within(rare) for rare in coming):
                passed[name] = UnitRejection.RARE
                continue
            found = _workload_kind(name, names[name], elapsed)
            if found is None:
                passed[name] = UnitRejection.SPARSE
                continue
            if best is not None:
                passed[min(best, found, key=_time).name] = UnitRejection.LESSER
            best = found if best is None else max(best, found, key=_time)
        return DetectionResult(best, passed, self.crowded_out)


def _time(found: DetectedUnit) -> tuple[float, str]:
    return found.spans * found.mean, found.name


def _rejection(seen: _NameStatistics, elapsed: int) -> UnitRejection | None:
    if seen.spans < MIN_SPANS or elapsed < MIN_OBSERVATION:
        return UnitRejection.RARE
    if seen.mean < MIN_DURATION:
        return UnitRejection.SHORT
    return UnitRejection.LONG if seen.mean > MAX_DURATION else None


def _becoming_frequent(seen: _NameStatistics) -> bool:
    """Whether a name that is rare as yet came more than once, and will have come often soon."""
    return 1 < seen.spans < MIN_SPANS and seen.mean * MIN_SPANS <= RARE_NAME_TIMEOUT


def _outermost(
    candidates: dict[str, _NameStatistics], passed: dict[str, UnitRejection]
) -> list[str]:
    """The candidates that are in no other, longest first; the rest are passed over."""
    outer: list[str] = []
    for name in sorted(candidates, key=lambda one: (-candidates[one].mean, one)):
        seen = candidates[name]
        if any(seen.within(other) and _contained_in(seen, candidates[other]) for other in outer):
            passed[name] = UnitRejection.NESTED
        else:
            outer.append(name)
    return outer


def _contained_in(inner: _NameStatistics, outer: _NameStatistics) -> bool:
    """Whether all of a name has room in the other: it may also come where the other does not."""
    return (
        outer.time >= _MIN_CONTAINED * inner.time or outer.covered >= _MIN_CONTAINED * inner.covered
    )


def _workload_kind(name: str, seen: _NameStatistics, elapsed: int) -> DetectedUnit | None:
    """What sort of unit it is; None for what comes like clockwork but fills little time."""
    cover = min(1.0, seen.covered / elapsed)
    variation = seen.variation
    if seen.side_by_side > _MAX_OVERLAP or variation > _MAX_VARIATION:
        kind = WorkloadKind.REQUESTS
    elif cover >= _MIN_COVERAGE:
        kind = WorkloadKind.STEPS
    else:
        return None
    return DetectedUnit(name, kind, seen.spans, seen.mean, variation, cover)


def majority_result(findings: Iterable[DetectionResult]) -> DetectedUnit | None:
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
