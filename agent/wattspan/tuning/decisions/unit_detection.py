"""Detection of the span that is the unit of work, where the configuration does not name it.

A training loop opens the same span again and again, one after the other and of about equal
duration, and spends little time outside of it; a server has many spans of one name open at once.
Both contain shorter spans, and may be contained in a few long spans. Each name is reduced to
sums, and the number of names is limited. One process is observed for a few minutes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from wattspan.model import MILLISECOND, SECOND
from wattspan.tuning.decisions.values import WorkloadKind

MAX_NAMES = 32
"""Observed names of one process; spans of other names are ignored."""

MIN_SPANS = 20
"""Spans of a name that are needed to classify it."""

MIN_OBSERVATION = 10 * SECOND
"""Minimum time of observation: the outermost span ends last."""

RARE_NAME_TIMEOUT = 120 * SECOND
"""A rare name delays the choice of a name inside of it if it would be frequent in this time."""

MIN_DURATION = 1 * MILLISECOND
MAX_DURATION = 60 * SECOND
"""Durations of usable units: below, their edges are inaccurate; above, they are too few."""

_MIN_COVERAGE = 0.5  # of the time, by steps
_MAX_VARIATION = 0.5  # coefficient of variation of the durations of steps
_MAX_OVERLAP = 0.05  # ratio of steps that begin before another one ended
_MIN_CONTAINED = 0.9  # ratio of spans inside spans of another name, of which they are a layer
_FULLY_OBSERVED = 64  # the surroundings of this many spans of a name are examined, then
_SAMPLING_MASK = 31  # only those of one span in 32


class DetectedUnit(NamedTuple):
    """A span that is a unit of work. ``mean`` is in nanoseconds, ``cover`` a ratio of the time."""

    name: str
    kind: WorkloadKind
    spans: int
    mean: float
    variation: float
    cover: float


class DetectionResult(NamedTuple):
    """The unit of one process, and the names that may be one but were not seen often enough."""

    found: DetectedUnit | None
    rare: frozenset[str] = frozenset()


@dataclass(slots=True)
class _NameStatistics:
    """Sums over all spans of one name."""

    first: int
    start: int = 0  # of the span that ended last
    end: int = 0
    spans: int = 0
    time: int = 0
    squares: float = 0.0  # of durations in seconds: large integers are slow
    overlaps: int = 0
    overlapped: int = 0
    inside: dict[str, list[int]] = field(default_factory=dict)
    """By outer name: spans outside of it, inside of it."""

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

    def within(self, outer: str) -> bool:
        """True if nearly all of its recent spans lay within spans of the name ``outer``."""
        outside, inside = self.inside.get(outer, (0, 0))
        return inside >= _MIN_CONTAINED * (outside + inside) > 0

    def is_rare(self, elapsed: int) -> bool:
        return self.spans < MIN_SPANS or elapsed < MIN_OBSERVATION

    @property
    def is_becoming_frequent(self) -> bool:
        return 1 < self.spans < MIN_SPANS and self.mean * MIN_SPANS <= RARE_NAME_TIMEOUT

    def fits_into(self, outer: _NameStatistics) -> bool:
        """True if the other name has room for all of it; else it also occurs elsewhere."""
        return (
            outer.time >= _MIN_CONTAINED * self.time
            or outer.covered >= _MIN_CONTAINED * self.covered
        )


class UnitDetector:
    """Observes the spans of one service in one process; replace it every few minutes."""

    __slots__ = ("_names",)

    def __init__(self) -> None:
        self._names: dict[str, _NameStatistics] = {}

    def add(self, name: str, start: int, end: int) -> None:
        """Add an ended span; spans of one name come about in the order of their ends."""
        stats = self._names.get(name)
        if stats is None:
            if len(self._names) >= MAX_NAMES:
                return
            stats = self._names[name] = _NameStatistics(start, start, start)
        spans = stats.spans
        if spans < _FULLY_OBSERVED or not spans & _SAMPLING_MASK:
            self._observe_nesting(name, stats, start, end)
        time = end - start
        seconds = time * 1e-9
        stats.spans = spans + 1
        stats.time += time
        stats.squares += seconds * seconds
        last = stats.end
        if start < last:
            stats.overlaps += 1
            stats.overlapped += min(end, last) - start
        if end > last:
            stats.end = end
        stats.start = start

    def _observe_nesting(self, outer: str, stats: _NameStatistics, start: int, end: int) -> None:
        """Record for each other name whether its last span was within this one.

        An outer span ends after the spans within it. A span between this one and the one before
        was outside of both; older spans are ignored.
        """
        for other in self._names.values():
            if other is stats or not other.spans or other.end <= stats.end:
                continue
            tally = other.inside.get(outer)
            if tally is None:
                tally = other.inside[outer] = [0, 0]
            tally[start <= other.start and other.end <= end] += 1

    def result(self) -> DetectionResult:
        names = self._names
        begin = min((one.first for one in names.values()), default=0)
        elapsed = max((one.end for one in names.values()), default=0) - begin
        rare = {name for name, one in names.items() if one.is_rare(elapsed)}
        usable = {
            name: one
            for name, one in names.items()
            if name not in rare and MIN_DURATION <= one.mean <= MAX_DURATION
        }
        coming = [name for name, one in names.items() if one.is_becoming_frequent]
        units = []
        for name in _outermost(usable):
            if any(names[name].within(other) for other in coming):
                rare.add(name)
            elif (unit := _classify(name, names[name], elapsed)) is not None:
                units.append(unit)
        return DetectionResult(max(units, key=_total_time, default=None), frozenset(rare))


def _total_time(unit: DetectedUnit) -> tuple[float, str]:
    return unit.spans * unit.mean, unit.name


def _outermost(names: dict[str, _NameStatistics]) -> list[str]:
    """The names that are in no other one, longest first."""
    outer: list[str] = []
    for name in sorted(names, key=lambda one: (-names[one].mean, one)):
        one = names[name]
        if not any(one.within(other) and one.fits_into(names[other]) for other in outer):
            outer.append(name)
    return outer


def _classify(name: str, stats: _NameStatistics, elapsed: int) -> DetectedUnit | None:
    """The unit with its kind; None for a regular span that covers little of the time."""
    cover = min(1.0, stats.covered / elapsed)
    variation = stats.variation
    if stats.overlaps > _MAX_OVERLAP * stats.spans or variation > _MAX_VARIATION:
        kind = WorkloadKind.REQUESTS
    elif cover >= _MIN_COVERAGE:
        kind = WorkloadKind.STEPS
    else:
        return None
    return DetectedUnit(name, kind, stats.spans, stats.mean, variation, cover)


def majority_result(units: Iterable[DetectedUnit | None]) -> DetectedUnit | None:
    """The unit that was detected in most processes of a service, if there is such a majority."""
    found = list(units)
    votes = Counter((one.name, one.kind) for one in found if one is not None)
    if not votes:
        return None
    (most, count), *_ = votes.most_common(1)
    if 2 * count <= len(found):
        return None
    agreeing = [one for one in found if one is not None and (one.name, one.kind) == most]
    return max(agreeing, key=_total_time)
