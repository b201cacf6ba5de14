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
"""

from __future__ import annotations

import functools
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from math import ceil, hypot, sqrt
from operator import itemgetter, sub
from struct import Struct
from typing import NamedTuple

from wattspan.model import MILLISECOND, SECOND, HwType, Interval, Microjoules
from wattspan.spans import Spent

# --------------------------------------------------------------------------------------- lanes

KINDS = (HwType.CPU, HwType.MEMORY, HwType.GPU, HwType.ENCLOSURE)
_LANE_OF = {kind: lane for lane, kind in enumerate(KINDS)}

# Sizes are whole bytes, so that lanes can be read by `struct`.
_CLOCK_BYTES = 12  # the lowest lane holds nanoseconds; the others begin above it
_LANE_BYTES = 24
_FRACTION_BYTES = 4  # energies are in microjoules times 2**32
_SHARE_BYTES = 13  # microjoules times 2**104: see `joining`
CLOCK_MASK = (1 << 8 * _CLOCK_BYTES) - 1
FRACTION = 8 * _FRACTION_BYTES
SHARE = 8 * (_SHARE_BYTES - _FRACTION_BYTES)


def shift_of(kind: HwType) -> int:
    """How far the lane of ``kind`` is shifted: its microjoules times 2**32 begin there."""
    return 8 * (_CLOCK_BYTES + _LANE_BYTES * _LANE_OF[kind])


_SHIFTS = tuple(shift_of(kind) + FRACTION for kind in KINDS)
WHOLE = sum(((1 << 8 * (_LANE_BYTES - _FRACTION_BYTES)) - 1) << shift for shift in _SHIFTS)
SHARE_WHOLE = sum(
    ((1 << 8 * (_LANE_BYTES - _SHARE_BYTES)) - 1) << shift + SHARE for shift in _SHIFTS
)
_LANE_MASK = (1 << 8 * _LANE_BYTES) - 1
GPU_MASK = ((1 << 8 * _LANE_BYTES) - 1) << shift_of(HwType.GPU)


def _naming(kinds: tuple[HwType, ...]) -> Callable[..., dict[HwType, Microjoules]]:
    """What turns values into a dictionary by kind. A display is five times faster than dict()."""
    match kinds:
        case (one,):
            return lambda x: {one: x}
        case (one, two):
            return lambda x, y: {one: x, two: y}
        case (one, two, three):
            return lambda x, y, z: {one: x, two: y, three: z}
    return lambda *values: dict(zip(kinds, values, strict=True))


class Lanes:
    """Reads the lanes of some kinds of energy out of an integer."""

    def __init__(self, kinds: frozenset[HwType]) -> None:
        self.kinds = tuple(kind for kind in KINDS if kind in kinds)
        self.numbers = tuple(_LANE_OF[kind] for kind in self.kinds)
        self.named = _naming(self.kinds)
        self._size = _CLOCK_BYTES + _LANE_BYTES * len(KINDS)
        self._energy = Struct(self._layout(_FRACTION_BYTES))
        self._share = Struct(self._layout(_SHARE_BYTES))

    def _layout(self, begin: int) -> str:
        layout, at = "<", 0
        for number in self.numbers:
            place = _CLOCK_BYTES + _LANE_BYTES * number + begin
            layout, at = f"{layout}{place - at}xQ", place + 8
        return f"{layout}{self._size - at}x"

    def energies(self, packed: int) -> tuple[Microjoules, ...]:
        """Whole microjoules of each kind, rounded down."""
        return self._energy.unpack(packed.to_bytes(self._size, "little"))

    def shares(self, packed: int) -> tuple[Microjoules, ...]:
        """Whole microjoules of each kind in a product of energy and a share times 2**72."""
        return self._share.unpack(packed.to_bytes(self._size, "little"))

    def each_energy(self, packed: Iterable[int]) -> Iterable[dict[HwType, Microjoules]]:
        """As ``energies``, of many at once and by kind."""
        return self._each(self._energy, packed)

    def each_share(self, packed: Iterable[int]) -> Iterable[dict[HwType, Microjoules]]:
        """As ``shares``, of many at once and by kind."""
        return self._each(self._share, packed)

    def _each(self, layout: Struct, packed: Iterable[int]) -> Iterable[dict[HwType, Microjoules]]:
        # Column by column, for speed: nearly all of it happens in C.
        size = self._size
        line = b"".join([each.to_bytes(size, "little") for each in packed])
        return map(self.named, *zip(*layout.iter_unpack(line), strict=True))

    def pack(self, energies: Iterable[int]) -> int:
        """Microjoules of each kind, put side by side."""
        pairs = zip(energies, self.numbers, strict=True)
        return sum(energy << _SHIFTS[number] for energy, number in pairs)

    def clamp(self, energy: int, least: int, most: int) -> int:
        """In each lane ``energy``, but not below ``least`` and not above ``most``."""
        clamped = 0
        for number in self.numbers:
            shift = _SHIFTS[number] - FRACTION
            low, here, high = (lane >> shift & _LANE_MASK for lane in (least, energy, most))
            clamped |= max(low, min(here, high)) << shift
        return clamped

    def pack_rates(self, rates: Iterable[int]) -> int:
        """Microjoules times 2**32 a nanosecond, likewise."""
        return self.pack(rates) >> FRACTION


lanes_of = functools.cache(Lanes)


NOTHING = Spent({}, {}, 0)

# -------------------------------------------------------------------------------------- tracks

POOL_NOISE = 50  # pool where the noise exceeds one part in so many
_HOLES = 256
_DOUBTS = 4096
_SAMPLES = 2048  # of the CPU clock, at least the newest so many
FINE = 20 * SECOND  # rows younger than this are never thinned while there is room
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


class _CpuClock:
    """The payer's CPU time, sampled: a function that only rises, linear between samples."""

    def __init__(self) -> None:
        self._mono: list[int] = []
        self._cpu: list[int] = []

    def add(self, mono: int, cpu: int) -> None:
        if self._mono and mono <= self._mono[-1]:
            return
        self._mono.append(mono)
        self._cpu.append(max(cpu, self._cpu[-1]) if self._cpu else cpu)
        if len(self._mono) > 2 * _SAMPLES:
            del self._mono[:_SAMPLES], self._cpu[:_SAMPLES]

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


class _Slice(NamedTuple):
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


def _standing(last: _Slice, end: int) -> _Slice:
    """Nothing is told from ``last`` to ``end``."""
    return _Slice(end, last.energy, walk=last.walk)


class _Track:
    """One domain: intervals that wait to be pooled, and slices that wait to be merged."""

    def __init__(self, kind: HwType, start: int, *, silent: bool) -> None:
        self.kind = kind
        self.silent = silent  # expected, not heard of yet
        self.known = start  # intervals are known up to here
        self.gone = False  # the rows went on without it, and it is not waited for
        self.gone_since: int | None = None  # nothing has been told of it from here
        self.slices = [_Slice(start, 0)]  # the first one is where the merged rows end
        self.pool_start = start
        self._pool: list[tuple[int, int, int]] = []  # (end, energy, noise)
        self._power: float | None = None  # of the last slice
        self._noise: int | None = None  # of the last interval

    @property
    def front(self) -> int:
        """Slices are released up to here."""
        return self.slices[-1].end

    def add(self, start: int, end: int, energy: int, noise: int, clock: _CpuClock) -> None:
        """Take the next interval; what lies between it and the one before is a hole."""
        if start > self.known:
            self.release(clock)
            self.slices.append(_standing(self.slices[-1], start))
            self.pool_start, self._power, self._noise = start, None, None
        self.known, self.silent = end, False
        self._pool.append((end, energy, noise))
        if self._complete(clock):
            self.release(clock)

    def course(self, knots: Sequence[int]) -> Iterator[_Slice]:
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

    def _complete(self, clock: _CpuClock) -> bool:
        noise = max(noise for _, _, noise in self._pool)
        energy = sum(energy for _, energy, _ in self._pool)
        return (
            self.kind in _EVEN
            or noise * POOL_NOISE <= energy
            or self.known - self.pool_start >= SECOND
            or not clock.reaches(self.pool_start)
        )

    def release(self, clock: _CpuClock) -> None:
        """Turn the pool into slices."""
        if not self._pool:
            return
        times, sums, walk = [self.pool_start], [0], 0.0
        for end, energy, noise in self._pool:
            times.append(end)
            sums.append(sums[-1] + energy)
            if self._noise is not None:
                walk += _WALK * (noise - self._noise) ** 2
            self._noise = noise
        noise = max(noise for _, _, noise in self._pool)
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
            self.slices.append(
                _Slice(
                    times[i + 1],
                    base + sums[i + 1],
                    _EDGE * noise,
                    _COURSE * unknown * length,
                    hypot(within, unknown),
                    walked + walk * (i + 1) / len(powers),
                )
            )
            before = power
        self._power = before


# -------------------------------------------------------------------------------------- profile


class Rows(NamedTuple):
    """The merged function, all in lanes; the last row is the watermark.

    From ``times[i]`` on the energy is ``energy[i]`` and rises by ``slope[i]`` a nanosecond.
    """

    times: list[int]
    energy: list[int]
    slope: list[int]


class _Doubt(NamedTuple):
    """By how many microjoules stretches between two rows may be wrong.

    What counters misplace at far edges is independent. What is unknown of the course is not:
    who works from one edge to the other is blurred alike at both. Together they make ``edges``.
    Within one slice the error grows with the length, by ``rates`` (times 2**32) a nanosecond.
    From the length ``far`` on the former holds for all kinds.
    """

    far: int
    edges: dict[HwType, Microjoules]
    rates: list[int]
    near: dict[int, dict[HwType, Microjoules]]  # by minus the length, as far as asked for


class _Blurs(NamedTuple):
    """The doubts of one lane, as in a slice, for each row."""

    step: array[float]
    course: array[float]
    rate: array[float]
    walk: array[float]


def _no_blurs() -> tuple[_Blurs, ...]:
    return tuple(_Blurs(array("f"), array("f"), array("f"), array("d")) for _ in KINDS)


_new_spent = functools.partial(tuple.__new__, Spent)  # its own constructor takes twice as long


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
        self._clock = _CpuClock()
        self._tracks: dict[str, _Track] = {}
        self._lives: dict[HwType, tuple[int, int]] = {}  # kind -> told of from, up to
        self._all_from = self._all_until = 0  # every kind is told of from, up to
        self._whole_from = self._whole_until = 0  # without a hole from, up to
        self._holes: list[tuple[int, int]] = []
        self._blurs = _no_blurs()
        self._doubts: dict[tuple[int, int], _Doubt] = {}
        self._thin_at = limit // 4
        self.lanes = lanes_of(frozenset())
        self.rows = Rows([], [], [])
        self.thinned = -1
        """Before this time energies are not what they once were: rows have been thinned."""
        self.lost = 0
        """Microjoules that came too late to be told."""

    # ----------------------------------------------------------------------------------- input

    def expect(self, domain_id: str, kind: HwType, since: int) -> None:
        """Wait for a domain that has told nothing yet: its intervals come later than others'."""
        if domain_id not in self._tracks:
            self._tracks[domain_id] = _Track(kind, since, silent=True)

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

    def _join(self, domain_id: str, kind: HwType, start: int) -> _Track:
        """Begin with a domain that nobody expected.

        One that appears soon after the first was there before; a later one was plugged in.
        """
        track = self._tracks[domain_id] = _Track(kind, start, silent=False)
        if self.rows.times:
            begin, front = self.horizon, self.watermark
            if start - begin <= self._patience:
                track.gone_since = begin
            if start < front:
                track.known = track.pool_start = front
                track.slices = [_Slice(front, 0)]
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
        if len(holes) > _HOLES:
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
        blurs = [[[0.0] * len(knots) for _ in _Blurs._fields] for _ in KINDS]
        for track in tracks:
            lane = _LANE_OF[track.kind]
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
        while len(kept := self._spaced(scale)) > room:
            scale *= 2
        old, blurs = self.rows, self._blurs
        self.rows, self._blurs = Rows([], [], []), _no_blurs()
        self._begin(old.times[0])
        self.rows.energy[0] = old.energy[0]
        for left, right in pairwise(kept):
            if right - left > 1:
                self.thinned = max(self.thinned, old.times[right])
            self._row(
                old.times[right],
                self.lanes.energies(old.energy[right]),
                self._blurred(old, blurs, left, right),
            )
        self._thin_at = min(self._limit, len(kept) + self._limit // 8)

    def _spaced(self, scale: int) -> list[int]:
        """The rows that stay: those of one age lie about as far apart."""
        times = self.rows.times
        last = len(times) - 1
        kept = [last]
        for i in range(last - 1, 0, -1):
            age = times[last] - times[i]
            if age < FINE:
                apart = (scale - 1) * 10 * MILLISECOND
            else:
                apart = max(100 * MILLISECOND, age // 128) * scale
            if times[kept[-1]] - times[i - 1] > apart:
                kept.append(i)
        kept.append(0)
        return kept[::-1]

    def _blurred(
        self, old: Rows, blurs: Sequence[_Blurs], left: int, right: int
    ) -> list[tuple[float, ...]]:
        """The doubts about rows ``left`` to ``right`` once they are one straight line.

        What the line misses of the course that was known adds to what was not known before.
        """
        begin, length = old.times[left], old.times[right] - old.times[left]
        known = [self.lanes.energies(energy) for energy in old.energy[left : right + 1]]
        blurred: list[tuple[float, ...]] = []
        for number, lane in enumerate(self.lanes.numbers):
            energies = [each[number] for each in known]
            power = (energies[-1] - energies[0]) / length
            off = slant = 0.0
            for i in range(left, right):
                line = energies[0] + power * (old.times[i] - begin)
                off = max(off, abs(energies[i - left] - line))
                risen = energies[i - left + 1] - energies[i - left]
                slant = max(slant, abs(risen / (old.times[i + 1] - old.times[i]) - power))
            step, course, rate, walk = (max(values[left:right]) for values in blurs[lane])
            blurred.append((step, off + course, slant + rate, walk))
        return blurred

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

    def between(self, start: int, end: int) -> Spent:
        """What the payer spent from ``start`` to ``end``, as far as it is known.

        Answers for neighbouring stretches add up to the answer for both, to the microjoule. A
        kind of energy that nobody told of in the stretch is not in the answer.
        """
        if not self.rows.times:
            return NOTHING
        end = max(start, end)
        (spent,) = self.spent([start], [self.locate(start)], [end], [self.locate(end)])
        return spent

    def spent(
        self,
        starts: Sequence[int],
        begins: Sequence[tuple[int, int]],
        ends: Sequence[int],
        stops: Sequence[tuple[int, int]],
    ) -> list[Spent]:
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
            or self._near(doubt, length)
            for doubt, length in zip(doubts, lengths, strict=True)
        ]
        first, last = min(starts), max(ends)
        covered = lengths
        if first < self._whole_from or last > self._whole_until:
            covered = list(map(self.covered, starts, ends))
        if first < self._all_from or last > self._all_until:
            told = list(map(self._told, starts, ends))
            energies = [{kind: e[kind] for kind in t} for e, t in zip(energies, told, strict=True)]
            uncertainties = [
                {kind: u[kind] for kind in t} for u, t in zip(uncertainties, told, strict=True)
            ]
        return list(map(_new_spent, zip(energies, uncertainties, covered, strict=True)))

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

    def _doubt(self, first: int, last: int) -> _Doubt:
        """What is doubtful of stretches from one row to another."""
        if len(self._doubts) >= _DOUBTS:
            self._doubts.clear()
        newest = len(self.rows.times) - 1
        # The newest row is empty: it only ends the one before.
        until = last - 1 if last == newest > first else last
        edges, rates = [], []
        for lane in self.lanes.numbers:
            steps, courses, slants, walks = self._blurs[lane]
            walked = sqrt(max(0.0, walks[until] - walks[first]))
            step = hypot(steps[first], steps[until], walked)
            # One microjoule more, for what is rounded.
            edges.append(ceil(hypot(step, courses[first] + courses[until])) + 1)
            rates.append(ceil(max(slants[first], slants[until]) * 2**32) + 1)
        far = max((e << 32) // r + 1 for e, r in zip(edges, rates, strict=True))
        doubt = self._doubts[first, last] = _Doubt(far, self.lanes.named(*edges), rates, {})
        return doubt

    def _near(self, doubt: _Doubt, length: int) -> dict[HwType, Microjoules]:
        """The uncertainty of a stretch shorter than ``far``, its length rounded to three bits."""
        size = (length | 7).bit_length() - 3
        rounded = -length >> size << size  # away from zero, whichever sign
        edges = zip(doubt.edges.values(), doubt.rates, strict=True)
        near = self.lanes.named(*(min(e, (r * -rounded >> 32) + 1) for e, r in edges))
        doubt.near[rounded] = near
        return near
