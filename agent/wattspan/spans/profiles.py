"""What one payer spent, and when: cumulative energy over time, in bounded memory.

A domain tells a payer's energy in intervals of 100 ms or so. Their edges are the *knots* of a
function that only rises: energy since the beginning. Inside an interval the energy of a CPU or
of memory follows the payer's CPU clock, where that was sampled, and is spread evenly where not;
a GPU's is always spread evenly.

A counter that moves in steps misplaces up to a step's energy at each edge. Where that is more
than a fiftieth of what the payer spent, neighbouring intervals are *pooled*, the fewest that
bring it below and at most a second of them, and the whole pool follows the CPU clock: the edges
of pools are trusted, those inside are not. A pool is released when it is complete, so the newest
energy may wait up to a second, and what was answered once is never answered differently. (To
release at once and correct afterwards would be quicker, and would move energy that spans have
already been given.)

The domains' functions are merged, up to the *watermark*, into rows that hold every kind of
energy at one time. Rows of the recent past stay as they are; older ones are thinned, ever more
coarsely, and what that changes is added to the uncertainty.

The energies of a row stand side by side in one integer, each in a *lane* of its own, wide enough
that sums, differences and products by one number never touch the neighbour. One operation
then counts for all kinds: that is what lets spans be joined in microseconds.

The energy of one payer: domains merged into rows, and answers from them.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise, repeat
from math import hypot
from operator import itemgetter, sub

from wattspan.model import SECOND, HwType, Interval
from wattspan.spans.interval_pool import CpuTimeCurve, EnergySlice, IntervalPool
from wattspan.spans.packed_energy import (
    CLOCK_MASK,
    FRACTION,
    GPU_MASK,
    KINDS,
    LANE_OF,
    SHARE,
    SHARE_WHOLE,
    UNCERTAINTY_CACHE_SIZE,
    WHOLE,
    Lanes,
    ProfileRows,
    RowUncertainties,
    Uncertainty,
    empty_uncertainties,
    lanes_of,
    merged_uncertainties,
    short_stretch_uncertainty,
    thinned_indices,
    uncertainty_between,
)
from wattspan.spans.values import IntervalEnergy

__all__ = [
    "CLOCK_MASK",
    "GPU_MASK",
    "NO_ENERGY",
    "SHARE",
    "SHARE_WHOLE",
    "WHOLE",
    "EnergyProfile",
    "Lanes",
    "ProfileRows",
    "lanes_of",
]

NO_ENERGY = IntervalEnergy({}, {}, 0)
_MAX_GAPS = 256
_new_spent = functools.partial(
    tuple.__new__, IntervalEnergy
)  # its own constructor takes twice as long


class EnergyProfile:
    """The energy of one payer over time.

    ``limit`` bounds the rows. A domain that lags behind the others by more than ``patience``
    nanoseconds is not waited for; what it tells afterwards of times already passed is lost to the
    profile (and counted, in ``lost``), for answers never change.
    """

    def __init__(self, limit: int = 4096, *, patience: int = 5 * SECOND) -> None:
        if limit < 16:
            raise ValueError(f"a profile needs room for 16 rows, not {limit}")
        self._limit = limit
        self._patience = patience
        self._clock = CpuTimeCurve()
        self._tracks: dict[str, IntervalPool] = {}
        self._lives: dict[HwType, tuple[int, int]] = {}  # kind -> told of from, up to
        self._all_from = self._all_until = 0  # every kind is told of from, up to
        self._whole_from = self._whole_until = 0  # without a hole from, up to
        self._holes: list[tuple[int, int]] = []
        self._blurs = empty_uncertainties()
        self._doubts: dict[tuple[int, int], Uncertainty] = {}
        self._thin_at = limit // 4
        self.lanes = lanes_of(frozenset())
        self.rows = ProfileRows([], [], [])
        self.thinned = -1
        """Before this time energies are not what they once were: rows have been thinned."""
        self.lost = 0
        """Microjoules that came too late to be told."""

    # ----------------------------------------------------------------------------------- input

    def expect(self, domain_id: str, kind: HwType, since: int) -> None:
        """Wait for a domain that has told nothing yet: its intervals come later than others'."""
        if domain_id not in self._tracks:
            self._tracks[domain_id] = IntervalPool(kind, since, silent=True)

    def sample(self, mono: int, cpu: int) -> None:
        """The payer's CPU clock stood at ``cpu`` nanoseconds at the time ``mono``."""
        self._clock.add(mono, cpu)

    def add(
        self, domain_id: str, kind: HwType, interval: Interval, energy: int, noise: int
    ) -> None:
        """Take the payer's ``energy`` in a domain's next settled interval; 0 is a figure too.

        ``noise``: the microjoules by which the counter's step may misplace energy, for this
        payer, at the interval's edges. Intervals of one domain come in order of time; what one
        tells of times already told is not taken, and counts as ``lost``.
        """
        start, end = interval.start.mono, interval.end.mono
        track = self._tracks.get(domain_id)
        if track is None:
            track = self._join(domain_id, kind, start)
        track.gone = False
        if end <= max(start, track.known):
            self.lost += energy
            return
        if start < track.known:
            kept = energy * (end - track.known) // (end - start)
            self.lost += energy - kept
            start, energy = track.known, kept
        if start > track.known or track.gone_since is not None:
            since = track.known if track.gone_since is None else track.gone_since
            self._hole(since, start)
            track.gone_since = None
        self._tell(kind, start, end)
        track.add(start, end, energy, noise, self._clock)
        self._merge(self._patience)

    def finish(self) -> None:
        """Release what waits for more: nothing more will come."""
        if self._lives:
            self._merge(patience=-1)

    def _join(self, domain_id: str, kind: HwType, start: int) -> IntervalPool:
        """Begin with a domain that nobody expected.

        One that appears soon after the first was there before; a later one was plugged in.
        """
        track = self._tracks[domain_id] = IntervalPool(kind, start, silent=False)
        if self.rows.times:
            begin, front = self.horizon, self.watermark
            if start - begin <= self._patience:
                track.gone_since = begin
            if start < front:
                track.known = track.pool_start = front
                track.slices = [EnergySlice(front, 0)]
        return track

    def _tell(self, kind: HwType, start: int, end: int) -> None:
        first, last = self._lives.get(kind, (start, end))
        if kind not in self._lives:
            self.lanes = lanes_of(frozenset([*self._lives, kind]))
        self._lives[kind] = min(first, start), max(last, end)
        self._all_from = max(first for first, _ in self._lives.values())
        self._all_until = min(last for _, last in self._lives.values())

    def _hole(self, start: int, end: int) -> None:
        """Remember that ``start`` to ``end`` was not measured; too many holes become fewer."""
        holes = self._holes
        first = bisect_left(holes, start, key=itemgetter(1))
        last = bisect_right(holes, end, key=itemgetter(0))
        if first < last:
            start, end = min(start, holes[first][0]), max(end, holes[last - 1][1])
        holes[first:last] = [(start, end)]
        if len(holes) > _MAX_GAPS:
            i = min(range(1, len(holes)), key=lambda i: holes[i][0] - holes[i - 1][1])
            holes[i - 1 : i + 1] = [(holes[i - 1][0], holes[i][1])]

    # ----------------------------------------------------------------------------------- merge

    def _merge(self, patience: int) -> None:
        """Append rows up to where every domain that still moves has been released."""
        tracks = list(self._tracks.values())
        newest = max(track.known for track in tracks)
        for track in tracks:
            if newest - track.front > patience:
                track.release(self._clock)
        newest = max(track.front for track in tracks)
        moving = [t.front for t in tracks if not t.gone and newest - t.front <= patience]
        until = min(moving, default=newest)
        times = self.rows.times
        if not times:
            self._begin(min(track.slices[0].end for track in tracks))
        since = times[-1]
        if until <= since:
            return
        knots = sorted({s.end for t in tracks for s in t.slices[1 : t.released(until)]} | {until})
        sums = [[0] * len(knots) for _ in KINDS]
        blurs = [[[0.0] * len(knots) for _ in RowUncertainties._fields] for _ in KINDS]
        for track in tracks:
            lane = LANE_OF[track.kind]
            steps, courses, rates, walks = blurs[lane]
            for i, (_, energy, step, course, rate, walk) in enumerate(track.course(knots)):
                sums[lane][i] += energy
                # Errors of different counters are independent.
                steps[i] = hypot(steps[i], step)
                courses[i] = hypot(courses[i], course)
                rates[i] = hypot(rates[i], rate)
                walks[i] += walk
            track.trim(until)
        for i, knot in enumerate(knots):
            self._row(
                knot,
                [sums[lane][i] for lane in self.lanes.numbers],
                [tuple(values[i] for values in blurs[lane]) for lane in self.lanes.numbers],
            )
        self._doubts.clear()
        self._whole_from = self._holes[-1][1] if self._holes else times[0]
        self._whole_until = until
        if len(times) > self._thin_at:
            self._thin()

    def _begin(self, at: int) -> None:
        self.rows.times.append(at)
        self.rows.energy.append(0)
        self.rows.slope.append(0)
        for blurs in self._blurs:
            for values in blurs:
                values.append(0.0)

    def _row(self, knot: int, energies: Sequence[int], blurs: Sequence[tuple[float, ...]]) -> None:
        """End the last row at ``knot`` and open the next one there."""
        times, bases, slopes = self.rows
        length = knot - times[-1]
        before = self.lanes.energies(bases[-1])
        slopes[-1] = self.lanes.pack_rates(
            ((b - a << FRACTION) // length for a, b in zip(before, energies, strict=True))
        )
        for lane, blur in zip(self.lanes.numbers, blurs, strict=True):
            for values, value in zip(self._blurs[lane], blur, strict=True):
                values[-1] = value
        self._begin(knot)
        bases[-1] = self.lanes.pack(energies)

    # ------------------------------------------------------------------------------------ thin

    def _thin(self) -> None:
        """Merge old rows until there is room again."""
        room, scale = self._limit * 3 // 4, 1
        while len(kept := thinned_indices(self.rows.times, scale)) > room:
            scale *= 2
        old, blurs = self.rows, self._blurs
        self.rows, self._blurs = ProfileRows([], [], []), empty_uncertainties()
        self._begin(old.times[0])
        self.rows.energy[0] = old.energy[0]
        for left, right in pairwise(kept):
            if right - left > 1:
                self.thinned = max(self.thinned, old.times[right])
            self._row(
                old.times[right],
                self.lanes.energies(old.energy[right]),
                merged_uncertainties(self.lanes, old, blurs, left, right),
            )
        self._thin_at = min(self._limit, len(kept) + self._limit // 8)

    # ----------------------------------------------------------------------------------- answers

    @property
    def watermark(self) -> int:
        """Energy is told up to here, and what was told stays; 0 while nothing is."""
        return self.rows.times[-1] if self.rows.times else 0

    @property
    def horizon(self) -> int:
        """Nothing is known of the time before; 0 while nothing is known at all."""
        return self.rows.times[0] if self.rows.times else 0

    def locate(self, time: int) -> tuple[int, int]:
        """The energy up to ``time``, in lanes, and the row it lies in."""
        times, energy, slope = self.rows
        row = bisect_right(times, time) - 1
        if row < 0:
            return energy[0], 0
        if row == len(times) - 1:
            return energy[row], row
        return energy[row] + slope[row] * (time - times[row]), row

    def between(self, start: int, end: int) -> IntervalEnergy:
        """What the payer spent from ``start`` to ``end``, as far as it is known.

        Answers for neighbouring stretches add up to the answer for both, to the microjoule. A
        kind of energy that nobody told of in the stretch is not in the answer.
        """
        if not self.rows.times:
            return NO_ENERGY
        end = max(start, end)
        (spent,) = self.spent([start], [self.locate(start)], [end], [self.locate(end)])
        return spent

    def spent(
        self,
        starts: Sequence[int],
        begins: Sequence[tuple[int, int]],
        ends: Sequence[int],
        stops: Sequence[tuple[int, int]],
    ) -> list[IntervalEnergy]:
        """What ``between`` says of many stretches, whose edges have been located."""
        lengths = list(map(sub, ends, starts))
        energies = self.lanes.each_energy(
            [(s[0] & WHOLE) - (b[0] & WHOLE) for b, s in zip(begins, stops, strict=True)]
        )
        doubts = [
            self._doubts.get((b[1], s[1])) or self._doubt(b[1], s[1])
            for b, s in zip(begins, stops, strict=True)
        ]
        uncertainties = [
            doubt.edges
            if length >= doubt.far
            else doubt.near.get(-length >> (n := (length | 7).bit_length() - 3) << n)
            or short_stretch_uncertainty(self.lanes, doubt, length)
            for doubt, length in zip(doubts, lengths, strict=True)
        ]
        covered = self._coverage(starts, ends)
        told = self.told(starts, ends)
        if told is not None:
            energies = [{kind: e[kind] for kind in t} for e, t in zip(energies, told, strict=True)]
            uncertainties = [
                {kind: u[kind] for kind in t} for u, t in zip(uncertainties, told, strict=True)
            ]
        return list(map(_new_spent, zip(energies, uncertainties, covered, strict=True)))

    def measured(self, starts: Sequence[int], ends: Sequence[int]) -> list[IntervalEnergy]:
        """What ``spent`` says of how much was covered, without energies: much quicker."""
        covered = self._coverage(starts, ends)
        return list(map(_new_spent, zip(repeat({}), repeat({}), covered)))

    def _coverage(self, starts: Sequence[int], ends: Sequence[int]) -> list[int]:
        if min(starts) < self._whole_from or max(ends) > self._whole_until:
            return list(map(self.covered, starts, ends))
        return list(map(sub, ends, starts))

    def told(self, starts: Sequence[int], ends: Sequence[int]) -> list[list[HwType]] | None:
        """The kinds of energy of which anything was told in stretches; None: all, in all."""
        if min(starts) < self._all_from or max(ends) > self._all_until:
            return list(map(self._told, starts, ends))
        return None

    def _told(self, start: int, end: int) -> list[HwType]:
        """The kinds of energy of which anything was told in a stretch."""
        return [
            kind
            for kind in self.lanes.kinds
            if (self._lives[kind][0] < end and self._lives[kind][1] > start)
            or self._lives[kind][0] <= start == end <= self._lives[kind][1]
        ]

    def covered(self, start: int, end: int) -> int:
        """For how many nanoseconds of a stretch every domain was measured."""
        start, end = max(start, self.horizon), min(end, self.watermark)
        if end <= start:
            return 0
        missing = 0
        for begin, stop in reversed(self._holes):
            if stop <= start:
                break
            missing += max(0, min(end, stop) - max(start, begin))
        return end - start - missing

    def _doubt(self, first: int, last: int) -> Uncertainty:
        """What is doubtful of stretches from one row to another, kept for the next one."""
        if len(self._doubts) >= UNCERTAINTY_CACHE_SIZE:
            self._doubts.clear()
        newest = len(self.rows.times) - 1
        doubt = uncertainty_between(self.lanes, self._blurs, first, last, newest)
        self._doubts[first, last] = doubt
        return doubt
