"""One domain's intervals, pooled until their edges can be trusted."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import hypot
from operator import itemgetter
from typing import NamedTuple

from wattspan.model import SECOND, HwType
from wattspan.profiles.clock import CpuClock

POOL_NOISE = 50  # pool where the noise exceeds one part in so many
_EVEN = (HwType.GPU,)

# A counter's step puts the error of an edge anywhere between none and the whole noise; the
# difference of two such errors stays within 0.78 of the noise in 95 % of cases, and what it
# moves between two intervals has a variance of a twelfth: 0.32 for two standard deviations.
_EDGE = 0.6
_EDGE_WITHIN = 0.85
_WALK = 0.32
# Where the power inside a slice is unknown it is taken to differ from the mean about as much as
# that of the slice's neighbours does, times a factor, and by no less than a least part: more
# where energy was spread evenly than where it followed the CPU clock.
_COURSE = 0.35
_FOLLOWED = 0.03, 1.0
_SPREAD = 0.1, 2.0
# Of a GPU nothing but its intervals is known. Where its load begins or ends a part of an interval
# before that interval's end, spreading evenly is wrong by that part of what the interval differs
# from the one before.
_SUDDEN = 1.0


class Slice(NamedTuple):
    """From the slice before it to ``end`` the energy rises to ``energy``, in a straight line.

    A stretch that begins or ends in the slice may be wrong by ``step`` microjoules for what the
    counter's step misplaced, and by ``course`` for what is unknown of the course inside; one that
    lies wholly inside by ``rate`` microjoules a nanosecond. ``walk`` is the variance of what the
    steps have misplaced since the beginning: what one interval takes from the next costs the
    payer nothing only if its shares of both are the same.
    """

    end: int
    energy: int
    step: float = 0.0
    course: float = 0.0
    rate: float = 0.0
    walk: float = 0.0


def _standing(last: Slice, end: int) -> Slice:
    """Nothing is told from ``last`` to ``end``."""
    return Slice(end, last.energy, walk=last.walk)


class Track:
    """One domain: intervals that wait to be pooled, and slices that wait to be merged."""

    def __init__(self, kind: HwType, start: int, *, silent: bool) -> None:
        self.kind = kind
        self.silent = silent  # expected, not heard of yet
        self.known = start  # intervals are known up to here
        self.gone = False  # the rows went on without it, and it is not waited for
        self.gone_since: int | None = None  # nothing has been told of it from here
        self.slices = [Slice(start, 0)]  # the first one is where the merged rows end
        self.pool_start = start
        self._pool: list[tuple[int, int, int]] = []  # (end, energy, noise)
        self._power: float | None = None  # of the last slice
        self._noise: int | None = None  # of the last interval

    @property
    def front(self) -> int:
        """Slices are released up to here."""
        return self.slices[-1].end

    def add(self, start: int, end: int, energy: int, noise: int, clock: CpuClock) -> None:
        """Take the next interval; what lies between it and the one before is a hole."""
        if start > self.known:
            self.release(clock)
            self.slices.append(_standing(self.slices[-1], start))
            self.pool_start, self._power, self._noise = start, None, None
        self.known, self.silent = end, False
        self._pool.append((end, energy, noise))
        if self._complete(clock):
            self.release(clock)

    def course(self, knots: Sequence[int]) -> Iterator[Slice]:
        """For each knot the energy there, and the doubts about the slice it ends or lies in."""
        slices, at = self.slices, 0
        for knot in knots:
            while at < len(slices) and slices[at].end < knot:
                at += 1
            if at == len(slices):
                yield _standing(slices[-1], knot)
                continue
            right = slices[at]
            if right.end == knot:
                yield right
                continue
            if at == 0:  # the domain had not told anything by then
                yield _standing(right, knot)
                continue
            left = slices[at - 1]
            risen = (right.energy - left.energy) * (knot - left.end) // (right.end - left.end)
            yield right._replace(end=knot, energy=left.energy + risen)

    def trim(self, until: int) -> None:
        """The rows end at ``until`` now."""
        (here,) = self.course([until])
        if self.front < until:  # nothing before `until` can be told any more
            if self.gone_since is None:
                self.gone_since = self.front
            self.gone = True
            self.known = self.pool_start = until
            self._power = self._noise = None
        self.slices[: self.released(until)] = [here]

    def released(self, until: int) -> int:
        """How many slices end by ``until``."""
        return bisect_right(self.slices, until, key=itemgetter(0))

    def _complete(self, clock: CpuClock) -> bool:
        noise = max(noise for _, _, noise in self._pool)
        energy = sum(energy for _, energy, _ in self._pool)
        return (
            self.kind in _EVEN
            or noise * POOL_NOISE <= energy
            or self.known - self.pool_start >= SECOND
            or not clock.reaches(self.pool_start)
        )

    def release(self, clock: CpuClock) -> None:
        """Turn the pool into slices."""
        if not self._pool:
            return
        times, sums, walk = [self.pool_start], [0], 0.0
        # Who shares a GPU is mistaken for its neighbours before its load shows, and after.
        noisy = (self._noise or 0) if self.kind in _EVEN else 0
        for end, energy, noise in self._pool:
            times.append(end)
            sums.append(sums[-1] + energy)
            if self._noise is not None:
                walk += _WALK * (noise - self._noise) ** 2
            self._noise = noise
        noise = max(noisy, *(noise for _, _, noise in self._pool))
        course = None if self.kind in _EVEN else clock.course(self.pool_start, self.known)
        if course is not None:
            times, spent = course
            sums = [sums[-1] * (each - spent[0]) // (spent[-1] - spent[0]) for each in spent]
        changes = _FOLLOWED if course is not None else _SPREAD
        self._append(times, sums, noise, walk, changes)
        self._pool.clear()
        self.pool_start = self.known

    def _append(
        self,
        times: Sequence[int],
        sums: Sequence[int],
        noise: int,
        walk: float,
        changes: tuple[float, float],
    ) -> None:
        least, factor = changes
        base, walked = self.slices[-1].energy, self.slices[-1].walk
        within = _EDGE_WITHIN * noise / (times[-1] - times[0])
        powers = [(e - d) / (t - s) for (s, d), (t, e) in pairwise(zip(times, sums, strict=True))]
        before = powers[0] if self._power is None else self._power
        for i, power in enumerate(powers):
            length, after = times[i + 1] - times[i], powers[min(i + 1, len(powers) - 1)]
            most = max(before, power, after)
            change = factor * (1 - min(before, power, after) / most) if most > 0 else 0.0
            unknown = max(least, min(change, 1.0)) * power
            course = _COURSE * unknown
            if self.kind in _EVEN:
                course = max(_COURSE * least * power, _SUDDEN * abs(power - before))
                unknown = max(unknown, abs(power - before))
            self.slices.append(
                Slice(
                    times[i + 1],
                    base + sums[i + 1],
                    _EDGE * noise,
                    course * length,
                    hypot(within, unknown),
                    walked + walk * (i + 1) / len(powers),
                )
            )
            before = power
        self._power = before
