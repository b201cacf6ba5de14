"""The payer's CPU time, as far as it was sampled: the course of its energy.

One domain's intervals, pooled until their edges can be trusted.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import hypot
from operator import itemgetter
from typing import NamedTuple

from wattspan.model import SECOND, HwType

_MAX_SAMPLES = 2048  # of the CPU clock, at least the newest so many


class CpuTimeCurve:
    """The payer's CPU time, sampled: a function that only rises, linear between samples."""

    def __init__(self) -> None:
        self._mono: list[int] = []
        self._cpu: list[int] = []

    def add(self, mono: int, cpu: int) -> None:
        if self._mono and mono <= self._mono[-1]:
            return
        self._mono.append(mono)
        self._cpu.append(max(cpu, self._cpu[-1]) if self._cpu else cpu)
        if len(self._mono) > 2 * _MAX_SAMPLES:
            del self._mono[:_MAX_SAMPLES], self._cpu[:_MAX_SAMPLES]

    def reaches(self, time: int) -> bool:
        """Whether anything is known of the time after ``time``."""
        return bool(self._mono) and self._mono[-1] > time

    def course(self, start: int, end: int) -> tuple[list[int], list[int]] | None:
        """Times from ``start`` to ``end`` and the clock at each.

        Where samples end inside the stretch, the rest is taken to go on at their mean rate. None
        where nothing is known, or the clock stood still.
        """
        mono, cpu = self._mono, self._cpu
        first, beyond = bisect_right(mono, start), bisect_left(mono, end)
        low, high = max(0, first - 1), min(beyond, len(mono) - 1)
        if first == len(mono) or beyond == 0 or cpu[high] == cpu[low]:
            return None
        elapsed, spent = mono[high] - mono[low], cpu[high] - cpu[low]

        def at(time: int, left: int) -> int:
            if 0 <= left < len(mono) - 1:
                part, whole = time - mono[left], mono[left + 1] - mono[left]
                return cpu[left] + (cpu[left + 1] - cpu[left]) * part // whole
            known = max(left, 0)
            return cpu[known] + spent * (time - mono[known]) // elapsed

        begin, stop = at(start, first - 1), at(end, beyond - 1)
        if stop == begin:
            return None
        return [start, *mono[first:beyond], end], [begin, *cpu[first:beyond], stop]


POOL_NOISE = 50  # pool where the noise exceeds one part in so many
_EVEN = (HwType.GPU,)

# A counter's step puts the error of an edge anywhere between none and the whole noise; the
# difference of two such errors stays within 0.78 of the noise in 95 % of cases, and what it
# moves between two intervals has a variance of a twelfth: 0.32 for two standard deviations.
_EDGE = 0.6
_EDGE_WITHIN = 0.85
_RANDOM_WALK_ERROR = 0.32
# Where the power inside a slice is unknown it is taken to differ from the mean about as much as
# that of the slice's neighbours does, times a factor, and by no less than a least part: more
# where energy was spread evenly than where it followed the CPU clock.
_CURVE_ERROR = 0.35
_FOLLOWED = 0.03, 1.0
_SPREAD = 0.1, 2.0
# Of a GPU nothing but its intervals is known. Where its load begins or ends a part of an interval
# before that interval's end, spreading evenly is wrong by that part of what the interval differs
# from the one before.
_SUDDEN = 1.0


class EnergySlice(NamedTuple):
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


def _flat_slice(last: EnergySlice, end: int) -> EnergySlice:
    """Nothing is told from ``last`` to ``end``."""
    return EnergySlice(end, last.energy, walk=last.walk)


class IntervalPool:
    """One domain: intervals that wait to be pooled, and slices that wait to be merged."""

    def __init__(self, kind: HwType, start: int, *, silent: bool) -> None:
        self.kind = kind
        self.silent = silent  # expected, not heard of yet
        self.known = start  # intervals are known up to here
        self.gone = False  # the rows went on without it, and it is not waited for
        self.gone_since: int | None = None  # nothing has been told of it from here
        self.slices = [EnergySlice(start, 0)]  # the first one is where the merged rows end
        self.pool_start = start
        self._pool: list[tuple[int, int, int]] = []  # (end, energy, noise)
        self._power: float | None = None  # of the last slice
        self._noise: int | None = None  # of the last interval

    @property
    def front(self) -> int:
        """Slices are released up to here."""
        return self.slices[-1].end

    def add(self, start: int, end: int, energy: int, noise: int, clock: CpuTimeCurve) -> None:
        """Take the next interval; what lies between it and the one before is a hole."""
        if start > self.known:
            self.release(clock)
            self.slices.append(_flat_slice(self.slices[-1], start))
            self.pool_start, self._power, self._noise = start, None, None
        self.known, self.silent = end, False
        self._pool.append((end, energy, noise))
        if self._complete(clock):
            self.release(clock)

    def course(self, knots: Sequence[int]) -> Iterator[EnergySlice]:
        """For each knot the energy there, and the doubts about the slice it ends or lies in."""
        slices, at = self.slices, 0
        for knot in knots:
            while at < len(slices) and slices[at].end < knot:
                at += 1
            if at == len(slices):
                yield _flat_slice(slices[-1], knot)
                continue
            right = slices[at]
            if right.end == knot:
                yield right
                continue
            if at == 0:  # the domain had not told anything by then
                yield _flat_slice(right, knot)
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

    def _complete(self, clock: CpuTimeCurve) -> bool:
        noise = max(noise for _, _, noise in self._pool)
        energy = sum(energy for _, energy, _ in self._pool)
        return (
            self.kind in _EVEN
            or noise * POOL_NOISE <= energy
            or self.known - self.pool_start >= SECOND
            or not clock.reaches(self.pool_start)
        )

    def release(self, clock: CpuTimeCurve) -> None:
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
                walk += _RANDOM_WALK_ERROR * (noise - self._noise) ** 2
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
            course = _CURVE_ERROR * unknown
            if self.kind in _EVEN:
                course = max(_CURVE_ERROR * least * power, _SUDDEN * abs(power - before))
                unknown = max(unknown, abs(power - before))
            self.slices.append(
                EnergySlice(
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
