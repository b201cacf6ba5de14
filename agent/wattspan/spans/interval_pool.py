"""Intervals of one domain, pooled until the error at their edges is small.

The energy of a CPU or of memory inside a pool follows the payer's sampled CPU time; the energy of a
GPU is spread evenly. The CPU time is that on all sockets, so the energies of sockets follow it only
together: the pools of the domains of one type begin and end at the same time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from copy import copy
from itertools import pairwise
from math import hypot
from operator import itemgetter
from typing import NamedTuple, TypeVar

from wattspan.model import MILLISECOND, SECOND, HwType

T = TypeVar("T")

Periods = list[tuple[int, int]]

_MAX_PERIODS = 256  # gaps, and measured periods of one type, that are kept
_MAX_APART = 2 * SECOND  # samples of a working process; between others the work is not sampled
_MAX_UNSAMPLED = 64
_MAX_SAMPLES = 2048  # of the CPU clock; up to twice as many are kept


class CpuTimeCurve:
    """The sampled CPU time of a payer: monotonic, linear between samples."""

    def __init__(self) -> None:
        self._mono: list[int] = []
        self._cpu: list[int] = []
        self._unsampled: deque[tuple[int, int]] = deque(maxlen=_MAX_UNSAMPLED)

    def add(self, mono: int, cpu: int) -> None:
        if self._mono and mono <= self._mono[-1]:
            return
        if self._mono and mono - self._mono[-1] > _MAX_APART and cpu > self._cpu[-1]:
            self._unsampled.append((self._mono[-1], mono))
        self._mono.append(mono)
        self._cpu.append(max(cpu, self._cpu[-1]) if self._cpu else cpu)
        if len(self._mono) > 2 * _MAX_SAMPLES:
            del self._mono[:_MAX_SAMPLES], self._cpu[:_MAX_SAMPLES]

    def covers(self, time: int) -> bool:
        """True if there are samples before and after ``time``."""
        return bool(self._mono) and self._mono[0] <= time < self._mono[-1]

    def unsampled(self, start: int, end: int) -> int:
        """The nanoseconds of a period before the first sample or after the last one."""
        if not self._mono:
            return end - start
        return max(0, min(end, self._mono[0]) - start) + max(0, end - max(start, self._mono[-1]))

    def between(self, start: int, end: int) -> tuple[list[int], list[int]] | None:
        """Times from ``start`` to ``end`` and the CPU time at each.

        Beyond the samples the mean rate is extrapolated. None without samples in the period, if it
        has a part without them, and if no CPU time was used.
        """
        if any(first < end and last > start for first, last in self._unsampled):
            return None
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


POOL_NOISE = 50  # intervals with more noise than one part in so many are pooled
_BLURRED_NOISE = 5  # likewise for steps whose energy is not clearly that of their time
_MAX_STEPS = 256  # counter steps of a GPU that are kept; up to twice as many

# The error of an edge from a counter's step is uniform between zero and the noise; the difference
# of two such errors is within 0.78 of the noise in 95 % of cases, and the energy that it moves
# between two intervals has a variance of a twelfth: 0.32 for two standard deviations.
_EDGE = 0.6
_EDGE_WITHIN = 0.85
_RANDOM_WALK_ERROR = 0.32
# An unknown power inside a slice is assumed to differ from the mean as much as that of the
# neighbouring slices does, times a factor, and by at least a minimum: more for evenly spread energy
# than for energy that follows the CPU clock.
_CURVE_ERROR = 0.35
_FOLLOWED = 0.03, 1.0
_SPREAD = 0.1, 2.0
# Neighbours of a longer slice (of the agent at rest, or between late samples) show nothing about
# the times of its work: all of its energy may be that of one burst of this length.
_LONG = 150 * MILLISECOND
_BURST = 10 * MILLISECOND
_MAX_EXTRAPOLATED = 32  # such an interval has samples, except for one part in so many
# For a GPU only intervals are known. If its load begins or ends inside an interval, even spreading
# is wrong by that part of the difference to the previous interval.
_SUDDEN = 1.0
_PEAK_DECAY = 0.98  # an interval: a half in three seconds
_ELSEWHERE = 0.3  # intervals at the highest recent power


class EnergySlice(NamedTuple):
    """A line from the end of the previous slice to the cumulative ``energy`` at ``end``.

    A period that begins or ends in the slice has an error of ``step`` microjoules from the
    counter's step and of ``curve`` from the unknown power curve; a period inside the slice has one
    of ``rate`` microjoules per nanosecond. ``walk`` is the variance of all energy that steps have
    moved between intervals: moved energy is an error of the payer if its shares of the two
    intervals differ. ``static`` is the cumulative static part of a GPU's energy, ``baseline`` the
    cumulative error of the energy by that of the idle power, which is the same in all intervals.
    """

    end: int
    energy: int
    step: float = 0.0
    curve: float = 0.0
    rate: float = 0.0
    walk: float = 0.0
    static: int = 0
    baseline: float = 0.0


class CounterStep(NamedTuple):
    """An interval of a GPU, inside which the times of the energy are not known.

    ``blurred``: a part of the energy may be of the steps around it.
    """

    start: int
    end: int
    energy: int
    blurred: bool


def _is_blurred(noise: int, energy: int) -> bool:
    return noise * _BLURRED_NOISE > energy


def _flat_slice(last: EnergySlice, end: int) -> EnergySlice:
    """A slice without energy from ``last`` to ``end``."""
    return EnergySlice(end, last.energy, walk=last.walk, static=last.static, baseline=last.baseline)


class IntervalPool:
    """One domain: intervals that are pooled, and slices that wait to be merged into rows."""

    def __init__(self, kind: HwType, start: int) -> None:
        self.kind = kind
        self.known = start  # end of the last interval
        self.gone = False  # rows continue without the domain
        self.gone_since: int | None = None  # beginning of the time without intervals
        self.slices = [EnergySlice(start, 0)]  # the first one ends with the merged rows
        self.steps: list[CounterStep] = []  # of a GPU, from the first energy on
        self.pool_start = start
        self._pool: list[tuple[int, int, int]] = []  # (end, energy, noise)
        self._static, self._baseline = 0, 0.0  # in the pool
        self._power: float | None = None  # of the last slice
        self._peak = 0.0  # the highest recent power of a slice of a GPU
        self._noise: int | None = None  # of the last interval

    @property
    def front(self) -> int:
        """Slices are released up to here."""
        return self.slices[-1].end

    def add(
        self,
        start: int,
        end: int,
        energy: int,
        noise: int,
        clock: CpuTimeCurve,
        static: int = 0,
        baseline: float = 0.0,
    ) -> None:
        """Append an interval to the pool; time between it and its predecessor is a gap.

        ``static`` is the static part of the energy, ``baseline`` its error by that of the idle
        power.
        """
        if start > self.known:
            self.release(clock)
            self.slices.append(_flat_slice(self.slices[-1], start))
            self.pool_start, self._power, self._noise = start, None, None
        self.known = end
        self._pool.append((end, energy, noise))
        self._static += static
        self._baseline += baseline

    def cut(self, knots: Sequence[int]) -> Iterator[EnergySlice]:
        """For each knot the energy there, with the uncertainties of the slice around it."""
        slices, at = self.slices, 0
        for knot in knots:
            while at < len(slices) and slices[at].end < knot:
                at += 1
            right = slices[min(at, len(slices) - 1)]
            if right.end == knot:
                yield right
            elif at in (0, len(slices)):  # before the first or after the last interval
                yield _flat_slice(right, knot)
            else:
                left = slices[at - 1]
                part, whole = knot - left.end, right.end - left.end
                rise = (right.energy - left.energy) * part // whole
                static = left.static + (right.static - left.static) * part // whole
                baseline = left.baseline + (right.baseline - left.baseline) * part / whole
                _, _, step, curve, rate, walk, *_ = right  # `_replace` takes five times as long
                yield EnergySlice(
                    knot, left.energy + rise, step, curve, rate, walk, static, baseline
                )

    def trim(self, until: int) -> None:
        """Remove the slices before ``until``, the new end of the rows."""
        (last,) = self.cut([until])
        if self.front < until:  # rows before `until` are final
            if self.gone_since is None:
                self.gone_since = self.front
            self.gone = True
            self.known = self.pool_start = until
            self._power = self._noise = None
        self.slices[: self.released(until)] = [last]

    def whole_step(self, until: int) -> int:
        """``until``, or the begin of the counter step of a GPU that it is inside of.

        A span that ends in a step is settled with the whole of it. Before the first energy there
        are no steps to be divided.
        """
        number = self.released(until)
        if self.steps and 0 < number < len(self.slices):
            return self.slices[number - 1].end
        return until

    def released(self, until: int) -> int:
        """Number of slices that end by ``until``."""
        return bisect_right(self.slices, until, key=itemgetter(0))

    @property
    def pooling(self) -> bool:
        """True if intervals wait in the pool."""
        return bool(self._pool)

    @property
    def pooled(self) -> tuple[int, int]:
        """The energy in the pool, and the error at the edges of its intervals."""
        energy = sum(energy for _, energy, _ in self._pool)
        return energy, max((noise for _, _, noise in self._pool), default=0)

    @property
    def age(self) -> int:
        """The nanoseconds in the pool."""
        return self.known - self.pool_start

    def release(self, clock: CpuTimeCurve) -> None:
        """Convert the pool to slices."""
        if not self._pool:
            return
        times, sums, walk = [self.pool_start], [0], 0.0
        # Payers of a shared GPU are confused with each other before their load shows, and after.
        even = self.kind is HwType.GPU
        noisy = (self._noise or 0) if even else 0
        for end, energy, noise in self._pool:
            times.append(end)
            sums.append(sums[-1] + energy)
            if self._noise is not None:
                walk += _RANDOM_WALK_ERROR * (noise - self._noise) ** 2
            self._noise = noise
        noise = max(noisy, *(noise for _, _, noise in self._pool))
        if not (sums[-1] or noise or self.steps):
            self._append_empty(times[-1], walk)
            return
        start, end = self.pool_start, self.known
        longest = max(last - first for first, last in pairwise(times))
        missing = clock.unsampled(start, end) if longest > _LONG else 0
        followed = not even and missing * _MAX_EXTRAPOLATED <= end - start
        samples = clock.between(start, end) if followed else None
        if samples is not None:
            times, spent = samples
            sums = [sums[-1] * (each - spent[0]) // (spent[-1] - spent[0]) for each in spent]
        if even and (sums[-1] or self.steps):
            blurred = _is_blurred(noise, sums[-1])
            self.steps.append(CounterStep(times[0], times[-1], sums[-1], blurred))
            if len(self.steps) > 2 * _MAX_STEPS:
                del self.steps[:_MAX_STEPS]
        self._append(times, sums, noise, walk, _SPREAD if samples is None else _FOLLOWED)
        self._clear()

    def _clear(self) -> None:
        self._pool.clear()
        self._static, self._baseline = 0, 0.0
        self.pool_start = self.known

    def _append_empty(self, end: int, walk: float) -> None:
        """Append the slice of a pool without energy, which has no error."""
        last = self.slices[-1]
        self.slices.append(
            EnergySlice(
                end,
                last.energy,
                walk=last.walk + walk,
                static=last.static,
                baseline=last.baseline + self._baseline,
            )
        )
        self._power = 0.0
        self._clear()

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
        static, whole = self.slices[-1].static, times[-1] - times[0]
        baseline, drift = self.slices[-1].baseline, self._baseline / whole
        within = _EDGE_WITHIN * noise / whole
        powers = [(e - d) / (t - s) for (s, d), (t, e) in pairwise(zip(times, sums, strict=True))]
        before = powers[0] if self._power is None else self._power
        for i, power in enumerate(powers):
            length, after = times[i + 1] - times[i], powers[min(i + 1, len(powers) - 1)]
            most = max(before, power, after)
            change = factor * (1 - min(before, power, after) / most) if most > 0 else 0.0
            unknown = max(least, min(change, 1.0)) * power
            curve = _CURVE_ERROR * unknown
            if self.kind is HwType.GPU:
                # A load at the highest recent power for a part of the interval, at either side.
                self._peak = peak = max(power, self._peak * _PEAK_DECAY)
                part = power * (1 - power / peak) if peak > 0 else 0.0
                curve = max(_CURVE_ERROR * least * power, _SUDDEN * abs(power - before), part)
                unknown = max(unknown, abs(power - before), min(power, peak - power))
                if _is_blurred(noise, sums[-1]):
                    # The energy of a load may be in any of the intervals around it.
                    curve += _ELSEWHERE * peak
                    unknown += 2 * _ELSEWHERE * peak
            elif length > _LONG:
                curve, unknown = power, power * length / _BURST
            self.slices.append(
                EnergySlice(
                    times[i + 1],
                    base + sums[i + 1],
                    _EDGE * noise,
                    curve * length,
                    hypot(within, unknown) + drift,
                    walked + walk * (i + 1) / len(powers),
                    static + self._static * (times[i + 1] - times[0]) // whole,
                    baseline + drift * (times[i + 1] - times[0]),
                )
            )
            before = power
        self._power = before


def complete_pools(
    pools: Sequence[IntervalPool], clock: CpuTimeCurve, start: int, end: int
) -> Sequence[IntervalPool]:
    """Those of the pools of one type of domains that are complete now.

    They wait for each other up to the middle of the newest interval, from ``start`` to ``end``, but
    no longer than an interval.
    """
    if pools[0].kind is HwType.GPU:
        return pools
    if any(pool.known < (start + end) // 2 for pool in pools):
        return [pool for pool in pools if pool.age >= SECOND + end - start]
    if any(pool.age >= SECOND or not clock.covers(pool.pool_start) for pool in pools):
        return pools
    energies, noises = zip(*(pool.pooled for pool in pools), strict=True)
    return pools if hypot(*noises) * POOL_NOISE <= sum(energies) else ()


def forked(thing: T) -> T:
    """A copy of an object that has numbers, and containers of immutable values.

    A deep copy takes ten times as long, and a lock is held.
    """
    found = copy(thing)
    vars(found).update({name: copy(value) for name, value in vars(thing).items()})
    return found


def add_period(periods: Periods, start: int, end: int) -> None:
    """Add a period to those in order; beyond ``_MAX_PERIODS`` the closest two become one."""
    first = bisect_left(periods, start, key=itemgetter(1))
    last = bisect_right(periods, end, key=itemgetter(0))
    if first < last:
        start, end = min(start, periods[first][0]), max(end, periods[last - 1][1])
    periods[first:last] = [(start, end)]
    if len(periods) > _MAX_PERIODS:
        i = min(range(1, len(periods)), key=lambda i: periods[i][0] - periods[i - 1][1])
        periods[i - 1 : i + 1] = [(periods[i - 1][0], periods[i][1])]
