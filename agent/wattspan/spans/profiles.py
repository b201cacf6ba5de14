"""The profile of one payer: cumulative energy over time, in bounded memory.

Each domain reports a payer's energy in intervals of about 100 ms. Their edges are the *knots* of a
monotonic function: energy since the beginning. Inside an interval the energy of a CPU or of memory
follows the payer's sampled CPU clock and is spread evenly without samples; the energy of a GPU is
spread evenly until the names of spans show its times (:mod:`wattspan.spans.step_division`).

A counter that moves in steps misplaces up to a step's energy at each edge. Where that is more than
a fiftieth of the payer's energy, neighbouring intervals are *pooled* until it is less, for at most
a second, and the whole pool follows the CPU clock: only the edges of pools are exact. The domains
of one type are pooled together, because the CPU clock is that on all sockets. A pool is
released when it is complete, so the newest energy may be late by a second, and answers never
change, except inside an interval of a GPU by ``reshape``. (An immediate release with a later
correction would move energy that spans have already received.)

The functions of all domains are merged, up to the *watermark*, into rows with the energies of all
hardware types, each row packed into one integer (:mod:`wattspan.spans.packed_energy`). Recent rows
stay; older ones are thinned progressively, and the deviation is added to the uncertainty.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from itertools import pairwise
from math import hypot
from operator import itemgetter, sub

from wattspan.attribution.energy_curve import around
from wattspan.model import SECOND, HwType, Interval, Microjoules, StaticBasis, StaticSplit
from wattspan.spans.interval_pool import (
    CounterStep,
    CpuTimeCurve,
    EnergySlice,
    IntervalPool,
    Periods,
    add_period,
    complete_pools,
    forked,
)
from wattspan.spans.packed_energy import (
    GPU_MASK,
    LANE_OF,
    LANES,
    UNCERTAINTY_CACHE_SIZE,
    WHOLE,
    ProfileRows,
    RowUncertainties,
    Uncertainty,
    empty_uncertainties,
    lanes_of,
    merge_rows,
    shift_of,
    short_period_uncertainty,
    thinned_indices,
    uncertainty_between,
)
from wattspan.spans.values import IntervalEnergy, IntervalEnergyColumns

NO_ENERGY = IntervalEnergy({}, {}, 0)
_STEP = 128  # rows that one step of thinning examines, in a millisecond or two
_MAX_BASES = 64  # changes of the basis of the static power that are kept

Edges = Callable[[], Sequence[int]]  # returns the sorted times around which rows are kept


class EnergyProfile:
    """The energy of one payer over time.

    ``limit`` is the largest number of rows. A domain more than ``patience`` nanoseconds behind the
    others is not waited for; its energy before the watermark is counted in ``lost``, because
    answers never change. The rows around ``edges`` are kept besides.
    """

    def __init__(
        self, limit: int = 4096, *, patience: int = 5 * SECOND, edges: Edges = tuple
    ) -> None:
        if limit < 16:
            raise ValueError(f"a profile needs room for 16 rows, not {limit}")
        self._limit, self._edges = limit, edges
        self._patience = patience
        self._clock = CpuTimeCurve()
        self._tracks: dict[str, IntervalPool] = {}
        self._known: dict[HwType, Periods] = {}  # in which a domain of the type was measured
        self._all_from = self._all_until = 0  # period with energy of all types
        self._whole_from = self._whole_until = 0  # period without gaps
        self._gaps: Periods = []  # of any domain
        self._gaps_of: dict[HwType, Periods] = {}  # of the domains of the type
        self._errors = empty_uncertainties()
        self._cached: dict[tuple[int, int], Uncertainty] = {}
        self._thin_at, self._scale = limit // 4, 1
        self._thin_until: int | None = None  # the time of the oldest row that a pass has examined
        self._spaced = self._pinned = 0  # rows that a pass has kept by age, or for edges
        self._board_bases: dict[str, StaticBasis | None] = {}
        self._bases: list[tuple[int, StaticBasis | None]] = []  # that of all boards, from a time on
        self.lanes = lanes_of(frozenset())
        self.rows = ProfileRows([], [], [])
        self.thinned = -1
        """Before this time rows have been thinned, so energies may differ from earlier answers."""
        self.lost = 0
        """Microjoules that arrived too late."""
        self.newest = 0
        """The end of the last interval, which may be later than the watermark."""

    # ----------------------------------------------------------------------------------- input

    def expect(self, domain_id: str, kind: HwType, since: int) -> None:
        """Wait for a domain whose intervals arrive later than those of others."""
        if domain_id not in self._tracks:
            self._tracks[domain_id] = IntervalPool(kind, since)

    def sample(self, mono: int, cpu: int) -> None:
        """Add a sample of the payer's CPU clock: ``cpu`` nanoseconds at the time ``mono``."""
        self._clock.add(mono, cpu)

    def add(
        self,
        domain_id: str,
        kind: HwType,
        interval: Interval,
        energy: int,
        noise: int,
        static: tuple[int, StaticBasis] | None = None,
        baseline: float = 0.0,
    ) -> None:
        """``append`` the payer's energy in an interval, and ``merge``."""
        start, end = interval.start.mono, interval.end.mono
        self.append(domain_id, kind, start, end, energy, noise, static, baseline)
        self.merge()

    def append(
        self,
        domain_id: str,
        kind: HwType,
        start: int,
        end: int,
        energy: int,
        noise: int,
        static: tuple[int, StaticBasis] | None = None,
        baseline: float = 0.0,
    ) -> None:
        """Add the payer's ``energy`` (also 0) in the next settled interval of a domain.

        ``noise`` is the error at the interval's edges in microjoules. Intervals of one domain come
        in order of time; energy of a time that is already known counts as ``lost``. ``static`` is
        the static part of a GPU's energy, with its basis; None if it is unknown. ``baseline`` is
        the error of the energy by that of the idle power, in microjoules. Answers include the
        energy after ``merge``, which costs as much for one interval as for several.
        """
        track = self._tracks.get(domain_id)
        if track is None:
            track = self._join(domain_id, kind, start)
        track.gone, self.newest = False, max(self.newest, end)
        if end <= max(start, track.known):
            self.lost += energy
            return
        if start < track.known:
            rest = energy * (end - track.known) // (end - start)
            self.lost += energy - rest
            if static is not None:
                static = static[0] * (end - track.known) // (end - start), static[1]
            baseline *= (end - track.known) / (end - start)
            start, energy = track.known, rest
        if start > track.known or track.gone_since is not None:
            since = track.known if track.gone_since is None else track.gone_since
            for gaps in (self._gaps, self._gaps_of.setdefault(kind, [])):
                add_period(gaps, since, start)
            track.gone_since = None
        self._extend(kind, start, end)
        if energy and kind is HwType.GPU:
            self._update_basis(domain_id, None if static is None else static[1], start)
        part = static[0] if static is not None else 0
        track.add(start, end, energy, noise, self._clock, part, baseline)
        together = [one for one in self._tracks.values() if one.kind is kind and not one.gone]
        for complete in complete_pools(together, self._clock, start, end):
            complete.release(self._clock)

    def merge(self) -> None:
        """Include the appended intervals in the answers."""
        if self._known:
            self._merge(self._patience)

    def finish(self) -> None:
        """Release all pools: no more intervals will come."""
        if self._known:
            self._merge(patience=-1)

    def is_even(self, domain_id: str) -> bool:
        """True if consecutive intervals without energy equal one: none of its type is pooled.

        Those of a GPU with energy are separate: its power model learns from each of them.
        """
        track = self._tracks.get(domain_id)
        if track is None:
            return True
        same = (one for one in self._tracks.values() if one.kind is track.kind)
        return not track.steps and not any(one.pooling for one in same)

    def _join(self, domain_id: str, kind: HwType, start: int) -> IntervalPool:
        """Begin an unexpected domain.

        If it appears soon after the first one, it existed before; a later one was plugged in.
        """
        track = self._tracks[domain_id] = IntervalPool(kind, start)
        if self.rows.times:
            begin, front = self.horizon, self.watermark
            if start - begin <= self._patience:
                track.gone_since = begin
            if start < front:
                track.known = track.pool_start = front
                track.slices = [EnergySlice(front, 0)]
        return track

    def _extend(self, kind: HwType, start: int, end: int) -> None:
        known = self._known.get(kind)
        if known is None:
            known = self._known[kind] = [(start, end)]
            self.lanes = lanes_of(frozenset(self._known), self.lanes.static)
        first, last = known[-1]
        if first <= start <= last:
            known[-1] = first, max(last, end)
        else:
            add_period(known, start, end)

    def _update_basis(self, board: str, basis: StaticBasis | None, start: int) -> None:
        """Note a changed basis of one board: the payer's is the least certain of its boards."""
        bases = self._board_bases
        if board in bases and bases[board] is basis:
            return
        bases[board] = basis
        if basis is not None and not self.lanes.static:
            self.lanes = lanes_of(frozenset(self._known), True)
        whole: StaticBasis | None = basis
        for one in bases.values():
            whole = None if whole is None or one is None else whole.worse(one)
        if not self._bases or self._bases[-1][1] is not whole:
            # Before the first energy of a GPU there was none to divide.
            since = start if self._bases else self._known[HwType.GPU][0][0]
            self._bases.append((since, whole))
            del self._bases[:-_MAX_BASES]

    # ----------------------------------------------------------------------------------- merge

    def _merge(self, patience: int) -> None:
        """Append rows up to the earliest end of the released slices of all active domains."""
        self._all_from = max(known[-1][0] for known in self._known.values())
        self._all_until = min(known[-1][1] for known in self._known.values())
        tracks = list(self._tracks.values())
        newest = max(track.known for track in tracks)
        for track in tracks:
            if newest - track.front > patience:
                track.release(self._clock)
        newest = max(track.front for track in tracks)
        active = [t.front for t in tracks if not t.gone and newest - t.front <= patience]
        until = min(active, default=newest)
        for track in tracks:
            until = track.whole_step(until)
        times = self.rows.times
        if not times:
            self._begin(min(track.slices[0].end for track in tracks))
        since = times[-1]
        if until <= since:
            return
        knots = sorted({s.end for t in tracks for s in t.slices[1 : t.released(until)]} | {until})
        sums = [[0] * len(knots) for _ in range(LANES)]
        errors = [[[0.0] * len(knots) for _ in RowUncertainties._fields] for _ in range(LANES)]
        static_sums = sums[-1]
        for track in tracks:
            lane = LANE_OF[track.kind]
            steps, curves, rates, walks, baselines = errors[lane]
            for i, one in enumerate(track.cut(knots)):
                _, energy, step, curve, rate, walk, static, baseline = one
                sums[lane][i] += energy
                static_sums[i] += static
                # Errors of different counters are independent.
                steps[i] = hypot(steps[i], step)
                curves[i] = hypot(curves[i], curve)
                rates[i] = hypot(rates[i], rate)
                walks[i] += walk
                baselines[i] += baseline  # the load of one host shows in all of its domains
            track.trim(until)
        for i, knot in enumerate(knots):
            energy = self.lanes.pack(sums[lane][i] for lane in self.lanes.numbers)
            error = [tuple(values[i] for values in errors[lane]) for lane in self.lanes.numbers]
            length = knot - times[-1]
            slope = self.lanes.slope(self.rows.energy[-1], energy, length)
            self._row(knot, energy, slope, error)
        self._cached.clear()
        self._whole_from = self._gaps[-1][1] if self._gaps else times[0]
        self._whole_until = until
        if self.crowded:
            self.thin()

    def _begin(self, at: int) -> None:
        self.rows.times.append(at)
        self.rows.energy.append(0)
        self.rows.slope.append(0)
        for lane in self._errors:
            for values in lane:
                values.append(0.0)

    def _row(self, knot: int, energy: int, slope: int, errors: Sequence[tuple[float, ...]]) -> None:
        """End the last row, of this slope, at ``knot``; the next one begins with ``energy``."""
        self.rows.slope[-1] = slope
        for lane, error in zip(self.lanes.numbers, errors, strict=True):
            for values, value in zip(self._errors[lane], error, strict=True):
                values[-1] = value
        self._begin(knot)
        self.rows.energy[-1] = energy

    # ------------------------------------------------------------------------------------ thin

    @property
    def crowded(self) -> bool:
        """True if rows are to be merged."""
        return self._thin_until is not None or len(self.rows.times) > self._thin_at

    def thin(self) -> None:
        """Merge old ones of ``_STEP`` rows: no lock is held long. Each ``merge`` does so once.

        A pass goes from the newest to the oldest. All other rows keep their energies, fractions
        included: spans were divided up to their times, and less there would be less than none.
        """
        rows, times = self.rows, self.rows.times
        if self._thin_until is None:
            self._thin_until, self._spaced, self._pinned = times[-1], 1, 0
        right = min(bisect_left(times, self._thin_until), len(times) - 1)
        left = max(0, right - _STEP)
        spaced = thinned_indices(times, self._scale, left, right)
        kept = sorted(around(times, self._edges(), left, right).union(spaced) - {right})
        self._spaced += len(spaced)
        self._pinned += len(kept) - len(spaced)
        if len(kept) < right - left:
            merged = merge_rows(self.lanes, rows, self._errors, [*kept, right])
            self.thinned = max(self.thinned, merged)
            self._cached.clear()
        self._thin_until = times[left]
        if not left:
            self._end_pass()

    def _end_pass(self) -> None:
        self._thin_until, room = None, self._limit * 3 // 4
        if self._spaced > room:
            self._scale, self._thin_at = 2 * self._scale, 0  # another pass
            if len(self.rows.times) <= _STEP:
                self.thin()
            return
        if self._spaced <= room // 2:
            self._scale = max(1, self._scale // 2)
        self._thin_at = min(self._limit, self._spaced + self._limit // 8) + self._pinned

    # ----------------------------------------------------------------------------------- reshape

    @property
    def counter_steps(self) -> dict[str, list[CounterStep]]:
        """The recent counter steps of GPUs with energy, by domain, in order of time.

        They end before the watermark: later energy must not be read yet.
        """
        found = {}
        for key, track in self._tracks.items():
            if track.steps:
                known = bisect_right(track.steps, self.watermark, key=itemgetter(1))
                found[key] = track.steps[:known]
        return found

    def row_times(self, start: int, end: int) -> list[int]:
        """The begins of rows inside a period."""
        times = self.rows.times
        return times[bisect_right(times, start) : bisect_left(times, end)]

    def gpu_energies(self, times: Sequence[int]) -> list[int]:
        """The GPU energy up to each time, in microjoules times 2**32."""
        return [(self.locate(time)[0] & GPU_MASK) >> shift_of(HwType.GPU) for time in times]

    def reshape(
        self,
        times: Sequence[int],
        energies: Sequence[int],
        errors: Sequence[tuple[float, float]] = (),
    ) -> None:
        """Change the times of GPU energy inside a period before the watermark.

        ``energies`` are the GPU energies from ``times[0]`` to each of ``times``, in microjoules
        times 2**32; the last one is the present energy of the period, so that all energies outside
        of it stay as they are. ``times`` contain the rows of the period. ``errors`` are the fields
        ``curve`` and ``rate`` of a slice from each time to the next; without them the present ones
        remain.
        """
        rows, shift, gpu = self.rows, shift_of(HwType.GPU), LANE_OF[HwType.GPU]
        located = [self.locate(time) for time in times]
        first = located[0][0] & GPU_MASK
        bases, slopes = [], []
        for i, (begin, end) in enumerate(pairwise(times)):
            packed, row = located[i]
            slope = (energies[i + 1] - energies[i]) // (end - begin)
            bases.append((packed & ~GPU_MASK) + first + (energies[i] << shift))
            slopes.append((rows.slope[row] & ~GPU_MASK) + (slope << shift))
        (packed, until), kept = located[-1], located[0][1]
        kept += rows.times[kept] < times[0]
        begins, sources = list(times[:-1]), [row for _, row in located[:-1]]
        if rows.times[until] < times[-1]:  # the rest of the last row remains
            begins.append(times[-1])
            bases.append(packed)
            slopes.append(rows.slope[until])
            sources.append(until)
            until += 1
        for lane in self._errors:
            for values in lane:
                values[kept:until] = array(values.typecode, [values[row] for row in sources])
        _, curves, rates, *_ = self._errors[gpu]
        for i, (curve, rate) in enumerate(errors, kept):
            curves[i], rates[i] = curve, rate
        rows.times[kept:until] = begins
        rows.energy[kept:until] = bases
        rows.slope[kept:until] = slopes
        self._cached.clear()
        if len(rows.times) > max(self._limit, self._thin_at):
            self.thin()

    # ----------------------------------------------------------------------------------- answers

    @property
    def watermark(self) -> int:
        """The time up to which energy is known and final; 0 without any."""
        return self.rows.times[-1] if self.rows.times else 0

    @property
    def horizon(self) -> int:
        """The time from which energy is known; 0 without any."""
        return self.rows.times[0] if self.rows.times else 0

    def locate(self, time: int) -> tuple[int, int]:
        """The energy up to ``time``, packed, and its row."""
        times, energy, slope = self.rows
        row = bisect_right(times, time) - 1
        if row < 0:
            return energy[0], 0
        if row == len(times) - 1:
            return energy[row], row
        return energy[row] + slope[row] * (time - times[row]), row

    def snapshot(self) -> EnergyProfile:
        """The present answers, which later input does not change."""
        found = EnergyProfile()
        vars(found).update(vars(self))
        found.rows = ProfileRows(*map(list, self.rows))
        found._errors = tuple(RowUncertainties(*map(copy, lane)) for lane in self._errors)
        found._known = {kind: list(periods) for kind, periods in self._known.items()}
        found._gaps_of = {kind: list(periods) for kind, periods in self._gaps_of.items()}
        found._gaps = list(self._gaps)
        found._bases, found._cached = list(self._bases), {}
        return found

    def fork(self) -> EnergyProfile:
        """A profile of the same energy, to which other energy can be added."""
        found = self.snapshot()
        vars(found).update(_clock=forked(self._clock), _board_bases=dict(self._board_bases))
        vars(found).update(_tracks={key: forked(track) for key, track in self._tracks.items()})
        return found

    def between(self, start: int, end: int) -> IntervalEnergy:
        """The known energy of the payer from ``start`` to ``end``.

        Answers for neighbouring periods add up to the answer for both, to the microjoule. Hardware
        types without a known energy in the period are left out.
        """
        if not self.rows.times:
            return NO_ENERGY
        end = max(start, end)
        (energy,) = self.energies([start], [self.locate(start)], [end], [self.locate(end)])
        if energy.covered == end - start:
            return energy
        gaps, length = self._gaps_of, end - start
        whole = (k for k in energy.energy if self.covered(start, end, gaps.get(k, ())) == length)
        return energy._replace(whole=tuple(whole))

    def energies(
        self,
        starts: Sequence[int],
        begins: Sequence[tuple[int, int]],
        ends: Sequence[int],
        stops: Sequence[tuple[int, int]],
    ) -> IntervalEnergyColumns:
        """``between`` for many periods with located edges."""
        lengths = list(map(sub, ends, starts))
        columns = self.lanes.energy_columns(
            [(s[0] & WHOLE) - (b[0] & WHOLE) for b, s in zip(begins, stops, strict=True)]
        )
        energies = list(map(self.lanes.named, *columns[: len(self.lanes.kinds)]))
        between_rows = [
            self._cached.get((b[1], s[1])) or self._uncertainty(b[1], s[1])
            for b, s in zip(begins, stops, strict=True)
        ]
        uncertainties = [
            one.edges
            if length >= one.far
            else one.near.get(-length >> (n := (length | 7).bit_length() - 3) << n)
            or short_period_uncertainty(self.lanes, one, length)
            for one, length in zip(between_rows, lengths, strict=True)
        ]
        covered = self._coverage(starts, ends)
        known = self.known_types(starts, ends)
        if known is not None:
            energies = [{kind: e[kind] for kind in k} for e, k in zip(energies, known, strict=True)]
            uncertainties = [
                {kind: u[kind] for kind in k} for u, k in zip(uncertainties, known, strict=True)
            ]
        splits: Sequence[tuple[StaticSplit, StaticBasis] | None] = [None] * len(covered)
        if self.lanes.static:
            gpu = columns[self.lanes.kinds.index(HwType.GPU)]
            bases: Iterable[StaticBasis | None] = self.bases(starts, ends)
            if known is not None:
                bases = (b if HwType.GPU in k else None for b, k in zip(bases, known, strict=True))
            splits = list(map(_split, gpu, columns[-1], bases))
        return IntervalEnergyColumns(energies, uncertainties, covered, splits)

    def coverages(self, starts: Sequence[int], ends: Sequence[int]) -> IntervalEnergyColumns:
        """``energies`` with the covered times only, which is much faster."""
        covered = self._coverage(starts, ends)
        none: list[dict[HwType, Microjoules]] = [{}] * len(covered)
        return IntervalEnergyColumns(none, none, covered, [None] * len(covered))

    def bases(self, starts: Sequence[int], ends: Sequence[int]) -> list[StaticBasis | None]:
        """The basis of the static power in each period: the least certain one in it.

        None for periods with an unknown static power. Only for profiles with ``lanes.static``.
        """
        since, newest = self._bases[-1]
        if min(starts) >= since:
            return [newest] * len(starts)
        return list(map(self._basis, starts, ends))

    def _basis(self, start: int, end: int) -> StaticBasis | None:
        found: StaticBasis | None = None
        for since, basis in reversed(self._bases):
            if since < max(end, start + 1):
                if basis is None:
                    return None
                found = basis if found is None else found.worse(basis)
                if since <= start:
                    return found
        return None

    def _coverage(self, starts: Sequence[int], ends: Sequence[int]) -> list[int]:
        if min(starts) < self._whole_from or max(ends) > self._whole_until:
            return list(map(self.covered, starts, ends))
        return list(map(sub, ends, starts))

    def known_types(self, starts: Sequence[int], ends: Sequence[int]) -> list[list[HwType]] | None:
        """The hardware types with known energy in each period; None: all types in all periods.

        No energy of a type is known in a period in which none of its domains was measured.
        """
        until = self.watermark
        if min(starts) >= self._all_from and max(ends) <= min(self._all_until, until):
            return None
        return [
            [
                kind
                for kind in self.lanes.kinds
                if any(
                    max(first, start) < min(last, end, until) or first <= start == end <= last
                    for first, last in self._known[kind]
                )
            ]
            for start, end in zip(starts, ends, strict=True)
        ]

    def covered(self, start: int, end: int, gaps: Sequence[tuple[int, int]] | None = None) -> int:
        """The nanoseconds of a period in which all domains were measured, or those of ``gaps``."""
        start, end = max(start, self.horizon), min(end, self.watermark)
        if end <= start:
            return 0
        missing = 0
        for begin, stop in reversed(self._gaps if gaps is None else gaps):
            if stop <= start:
                break
            missing += max(0, min(end, stop) - max(start, begin))
        return end - start - missing

    def _uncertainty(self, first: int, last: int) -> Uncertainty:
        """The uncertainty of periods between two rows; cached."""
        if len(self._cached) >= UNCERTAINTY_CACHE_SIZE:
            self._cached.clear()
        newest = len(self.rows.times) - 1
        found = uncertainty_between(self.lanes, self._errors, first, last, newest)
        self._cached[first, last] = found
        return found


def _split(
    gpu: Microjoules, static: Microjoules, basis: StaticBasis | None
) -> tuple[StaticSplit, StaticBasis] | None:
    if basis is None:
        return None
    static = min(gpu, static)
    return StaticSplit(static, Microjoules(gpu - static)), basis
