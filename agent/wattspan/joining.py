"""A process's energy divided among its spans, exactly.

At every instant the power of a process belongs to its active *leaf* spans: those that are open
and have no open child in the same process. They divide it by weight. Energy is thus divided as
a fair queue divides a line: while energy flows, a *virtual* account grows by energy divided by
the weight of all leaves, and what a span gets is its weight times the growth of that account
while it was a leaf. So a span costs a few steps when it begins and ends, however many others
there are.

A plain OTLP span is told when it is over, in batches, parents after their children. Time whose
energy was divided is *covered* and never divided again: a span that comes later shares only what
is not covered yet. What no span ever claims is the process's own, *outside*.

A process that announces its spans when they open (:class:`Started`, :class:`Ended`) gets more:
an open span takes part from its start, and its energy is held for it until it comes.

Every division rounds down, in units of 2**-104 microjoules; what is lost so is far less than a
microjoule a span, and falls to *outside*.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import repeat
from operator import itemgetter, le, lt, mul
from typing import Generic, NamedTuple, TypeVar

from wattspan.model import HwType, Microjoules
from wattspan.profiles import (
    CLOCK_MASK,
    GPU_MASK,
    NOTHING,
    SHARE,
    SHARE_WHOLE,
    WHOLE,
    EnergyProfile,
    Lanes,
    Rows,
)
from wattspan.spans import Ended, Outcome, Span, SpanEnergy, Spent, Started

T = TypeVar("T")

# Fields of a span, read by C functions: there are many spans.
_ID, _PARENT, _START, _END, _CPU, _WEIGHT = map(
    itemgetter, map(Span._fields.index, ("id", "parent", "start", "end", "cpu", "weight"))
)
_new_result = functools.partial(tuple.__new__, SpanEnergy)  # as in `profiles`

ONE = 1 << SHARE
MILLION = 1_000_000  # parts of a core: the weight of a thread that computes all the time
HEAVIEST = 1 << 24
_NEVER = 1 << 80
_BLOCK = 1 << 60  # codes of events: covered time begins,
_UNBLOCK = _BLOCK + 1  # or ends,
_TICK = _BLOCK + 2  # or nothing happens but that time passes
_SPARE = 1024  # so much may be kept that is nobody's, before it is looked through
_CHAIN = 64  # ancestors that began at the same nanosecond: more are not followed


# ------------------------------------------------------------------------------- covered time


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


# ---------------------------------------------------------------------------------- division


class _Division:
    """Energy divided among numbered spans as time goes on.

    ``gained`` of a number is its part of the virtual account so far: what the account stood at
    whenever it ceased to be a leaf, less what it stood at whenever it became one. The lowest lane
    of the account is a clock that runs only in covered time, where nothing is left to divide.
    """

    def __init__(self) -> None:
        self.gained: list[int] = []
        self.children: list[int] = []  # how many are open now
        self.open: list[bool] = []
        self.parent: list[int] = []  # -1: none
        self.cpu: list[int] = []  # weights: of CPU and memory energy
        self.gpu: list[int] = []  # and of GPU energy
        self.at = -_NEVER
        self.energy = 0
        self.passed = 0  # energy of covered time, in lanes, since the beginning
        self._virtual = 0
        self._cpu_weight = self._gpu_weight = 0

    def join(self, count: int) -> int:
        """Make room for ``count`` more spans; the number of the first of them."""
        first = len(self.gained)
        self.gained += [0] * count
        self.children += [0] * count
        self.open += [False] * count
        self.parent += [-1] * count
        self.cpu += [1] * count
        self.gpu += [1] * count
        return first

    def run(
        self,
        profile: EnergyProfile,
        times: Sequence[int],
        codes: Sequence[int],
        order: Sequence[int],
        covered: Sequence[Stretch],
        beyond: int | None,
    ) -> tuple[list[Stretch], list[tuple[int, int]]]:
        """Let time pass over events: ``codes`` is a span that begins, or ``~`` one that ends.

        ``order`` sorts ``times``. ``beyond``: the energy up to the next covered stretch after them.
        Returns the stretches in which there was a leaf, and for each
        event where the profile has it.
        """
        rows, thinned = profile.rows, profile.thinned
        located: list[tuple[int, int]] = [(0, 0)] * len(times)
        stretches: list[Stretch] = []
        gained, children, opened = self.gained, self.children, self.open
        parents, cpu, gpu = self.parent, self.cpu, self.gpu
        virtual, passed = self._virtual, self.passed
        cpu_weight, gpu_weight = self._cpu_weight, self._gpu_weight
        at, energy = self.at, self.energy
        row, base, slope, begin, edge = -1, 0, 0, 0, -_NEVER
        since: tuple[int, int] | None = None
        blocked, caps = False, iter(covered)
        cap = next(caps, None)
        ceiling = cap.before if cap else beyond
        place = (energy, 0)
        for event in order:
            time, code = times[event], codes[event]
            if time > at:
                if time >= edge:
                    row, base, slope, begin, edge = _row(rows, time, row)
                now = base + slope * (time - begin)
                place = now, row
                if time < thinned:
                    now = profile.lanes.clamp(now, energy, now if ceiling is None else ceiling)
                if cpu_weight:
                    if blocked:
                        virtual += time - at
                        passed += now - energy
                    else:
                        flow = now - energy
                        if cpu_weight == gpu_weight:
                            virtual += flow * (ONE // cpu_weight)
                        else:
                            gpu_flow = flow & GPU_MASK
                            virtual += (flow - gpu_flow) * (ONE // cpu_weight)
                            virtual += gpu_flow * (ONE // gpu_weight)
                    if since is None:
                        since = at, energy
                elif since is not None:
                    stretches.append(Stretch(since[0], at, since[1], energy))
                    since = None
                at, energy = time, now
            located[event] = place
            if code < 0:
                span = ~code
                opened[span] = False
                if not children[span]:
                    gained[span] += virtual
                    cpu_weight -= cpu[span]
                    gpu_weight -= gpu[span]
                parent = parents[span]
                if parent >= 0:
                    children[parent] -= 1
                    if not children[parent] and opened[parent]:
                        gained[parent] -= virtual
                        cpu_weight += cpu[parent]
                        gpu_weight += gpu[parent]
            elif code < _BLOCK:
                parent = parents[code]
                if parent >= 0:
                    if not children[parent] and opened[parent]:
                        gained[parent] += virtual
                        cpu_weight -= cpu[parent]
                        gpu_weight -= gpu[parent]
                    children[parent] += 1
                opened[code] = True
                if not children[code]:
                    gained[code] -= virtual
                    cpu_weight += cpu[code]
                    gpu_weight += gpu[code]
            elif code == _BLOCK and cap is not None:
                blocked, ceiling = True, cap.after
            elif code == _UNBLOCK and cap is not None:
                blocked, energy = False, cap.after
                cap = next(caps, None)
                ceiling = cap.before if cap else beyond
        if since is not None:
            stretches.append(Stretch(since[0], at, since[1], energy))
        self._virtual, self.passed = virtual, passed
        self._cpu_weight, self._gpu_weight = cpu_weight, gpu_weight
        self.at, self.energy = at, energy
        return stretches, located

    def leave(self, span: int) -> None:
        """End a span where time stands now."""
        self.open[span] = False
        if not self.children[span]:
            self.gained[span] += self._virtual
            self._cpu_weight -= self.cpu[span]
            self._gpu_weight -= self.gpu[span]
        parent = self.parent[span]
        if parent >= 0:
            self.children[parent] -= 1
            if not self.children[parent] and self.open[parent]:
                self.gained[parent] -= self._virtual
                self._cpu_weight += self.cpu[parent]
                self._gpu_weight += self.gpu[parent]

    def keep(self, spans: Sequence[int]) -> None:
        """Forget all but ``spans``, which are numbered anew in their order."""
        number = {old: new for new, old in enumerate(spans)}
        self.parent = [number.get(self.parent[span], -1) for span in spans]
        for values in (self.gained, self.children, self.cpu, self.gpu):
            values[:] = [values[span] for span in spans]
        self.open = [self.open[span] for span in spans]

    def share(self, span: int) -> int:
        """What a closed span got, in lanes: microjoules times 2**104."""
        gained, cpu, gpu = self.gained[span], self.cpu[span], self.gpu[span]
        if cpu == gpu:
            return gained * cpu
        of_gpu = gained & GPU_MASK
        return (gained - of_gpu) * cpu + of_gpu * gpu


def _row(rows: Rows, time: int, row: int) -> tuple[int, int, int, int, int]:
    """The row ``time`` lies in, as ``run`` needs it, at or after ``row``."""
    times = rows.times
    row = bisect_right(times, time, max(0, row)) - 1
    edge = times[row + 1] if row + 1 < len(times) else _NEVER
    return row, rows.energy[row], rows.slope[row], times[row], edge


# ---------------------------------------------------------------------------------- announced


_GONE = -2  # the number of one that was dropped before its time came


class _Announced:
    """A span whose opening was told. ``number`` is its place in the running division."""

    __slots__ = (
        "began",
        "child_cpu",
        "child_time",
        "child_until",
        "cpu",
        "end",
        "id",
        "number",
        "parent",
        "since",
        "start",
        "thread",
    )

    def __init__(self, started: Started) -> None:
        self.id, self.parent = started.id, started.parent
        self.start, self.thread, self.began = started.at, started.thread, started.cpu
        self.end: int | None = None
        self.cpu: int | None = None
        self.number = -1
        self.since = 0  # it takes part from here on
        self.child_time = self.child_cpu = 0
        self.child_until = self.start


class _Children:
    """What is known of the children of a span that has not come yet."""

    __slots__ = ("cpu", "first", "last", "time")

    def __init__(self, start: int) -> None:
        self.first = self.last = start
        self.time = 0
        self.cpu: dict[int, int] = {}  # by thread

    def add(self, start: int, end: int, thread: int, cpu: int | None) -> None:
        self.time += max(0, end - max(start, self.last)) + max(0, min(end, self.first) - start)
        self.first, self.last = min(self.first, start), max(self.last, end)
        if cpu is not None:
            self.cpu[thread] = self.cpu.get(thread, 0) + cpu


class Recent(Generic[T]):
    """A dictionary of bounded size that forgets the oldest half when it is full."""

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._young: dict[bytes, T] = {}
        self._old: dict[bytes, T] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._young or key in self._old

    def __setitem__(self, key: bytes, value: T) -> None:
        self._young[key] = value
        self._turn()

    def isdisjoint(self, keys: Collection[bytes]) -> bool:
        """Whether none of ``keys`` is remembered."""
        return self._young.keys().isdisjoint(keys) and self._old.keys().isdisjoint(keys)

    def update(self, keys: Iterable[bytes], value: T) -> None:
        """Remember ``value`` under each of ``keys``."""
        self._young.update(dict.fromkeys(keys, value))
        self._turn()

    def _turn(self) -> None:
        if len(self._young) >= self._half:
            self._old, self._young = self._young, {}

    def get(self, key: bytes) -> T | None:
        """What is remembered under ``key``, if anything is."""
        found = self._young.get(key)
        return self._old.get(key) if found is None else found


# ------------------------------------------------------------------------------------- batches


class _Batch:
    """The spans of one call that can have energy, and their time as far as it is known."""

    def __init__(self, spans: Sequence[Span], horizon: int, watermark: int) -> None:
        self.spans = spans
        self.ids = list(map(_ID, spans))
        self.starts = list(map(_START, spans))
        self.ends = list(map(_END, spans))
        if spans and (min(self.starts) < horizon or max(self.ends) > watermark):
            self.starts = [max(horizon, min(start, watermark)) for start in self.starts]
            self.ends = [max(horizon, min(end, watermark)) for end in self.ends]

    def parents(self) -> list[int]:
        """The place of each span's parent in the batch, -1 for none.

        A parent begins no later than its child; one that claims to is not believed, so that
        there are no circles.
        """
        spans = self.spans
        place = dict(zip(self.ids, range(len(spans)), strict=True))
        parents = list(map(place.get, map(_PARENT, spans), repeat(-1)))
        for i, parent in enumerate(parents):
            if parent >= 0 and self.starts[parent] >= self.starts[i]:
                above, below = spans[parent].start, spans[i].start
                if above > below or (above == below and _circular(i, parents, spans)):
                    parents[i] = -1
        return parents


def _only(exclusive: dict[HwType, Microjoules], inclusive: Spent) -> dict[HwType, Microjoules]:
    """``exclusive`` without the kinds of which nothing was told."""
    return {kind: exclusive[kind] for kind in inclusive.energy}


def _circular(i: int, parents: Sequence[int], spans: Sequence[Span]) -> bool:
    """Whether following parents that began at the same time leads back, or too far."""
    at = parents[i]
    for _ in range(_CHAIN):
        if at < 0 or spans[at].start != spans[i].start:
            return False
        if at == i:
            return True
        at = parents[at]
    return True


def _bar(
    times: list[int], codes: list[int], covered: Sequence[Stretch], first: int, last: int
) -> None:
    """Add to events those at which covered time begins and ends."""
    for stretch in covered:
        times.append(max(first, stretch.start))
        codes.append(_BLOCK)
        if stretch.end <= last:
            times.append(stretch.end)
            codes.append(_UNBLOCK)


# ---------------------------------------------------------------------------------- the process


class ProcessSpans:
    """The spans of one process; the energy of its profile is divided among them.

    ``by_cpu``: spans are weighed by their thread's CPU time where that is known, as far as CPU
    and memory are concerned. ``stretches``, ``ids`` and ``announced`` bound what is kept: covered
    stretches of time, span ids to know duplicates by, and announced spans.
    """

    def __init__(
        self,
        *,
        by_cpu: bool = True,
        stretches: int = 4096,
        ids: int = 32_768,
        announced: int = 100_000,
    ) -> None:
        self._by_cpu = by_cpu
        self._covered = Covered(stretches)
        self._seen: Recent[bool] = Recent(ids)
        self._orphans: Recent[_Children] = Recent(ids)
        self._limit = announced
        self._announced: dict[bytes, _Announced] = {}
        self._events: list[tuple[int, int, int, _Announced]] = []  # a heap
        self._sequence = 0
        self._numbered = 0  # announced spans that take part in the running division
        self._running = _Division()
        self._front: int | None = None
        self._usual = MILLION  # the weight of a span of which none is known
        self._by_weight = False
        self._given = 0  # in lanes, microjoules times 2**104
        self._held = 0
        self._returned: dict[HwType, int] = {}

    @property
    def announced(self) -> int:
        """How many spans have been announced and not come yet."""
        return len(self._announced)

    # ---------------------------------------------------------------------------- side channel

    def open(self, started: Started) -> bool:
        """A span was opened. False if it cannot be kept: it will be a span like any other."""
        if (
            len(self._announced) >= self._limit
            or started.id in self._announced
            or started.id in self._seen
        ):
            return False
        record = self._announced[started.id] = _Announced(started)
        self._push(record.start, 0, record)
        return True

    def close(self, ended: Ended) -> bool:
        """A span was closed. False if it was never opened, or closed before."""
        record = self._announced.get(ended.id)
        if record is None or record.end is not None:
            return False
        # Zero is a thread that was not asked: it was alone, and then it was not.
        known = record.began and ended.cpu and ended.thread == record.thread
        cpu = max(0, ended.cpu - record.began) if known else None
        self._end(record, ended.at, cpu)
        return True

    def _end(self, record: _Announced, at: int, cpu: int | None) -> None:
        record.end = end = max(record.start, at)
        record.cpu = cpu
        self._push(end, 1, record)
        parent = self._announced.get(record.parent)
        if parent is not None:
            parent.child_time += max(0, end - max(record.start, parent.child_until))
            parent.child_until = max(parent.child_until, end)
            if cpu is not None and parent.thread == record.thread:
                parent.child_cpu += cpu

    def _push(self, at: int, closes: int, record: _Announced) -> None:
        self._sequence += 1
        heappush(self._events, (at, self._sequence, closes, record))

    # -------------------------------------------------------------------------------- settling

    def settle(self, spans: Sequence[Span], profile: EnergyProfile, now: int) -> list[SpanEnergy]:
        """What each of ``spans`` spent, in their order.

        Ask when the profile's watermark has passed their ends: what lies beyond it is not known
        and never will be theirs. ``now`` is the present; a span that ends later is FUTURE.
        """
        refused = self._refused(spans, now)
        accepted = [s for i, s in enumerate(spans) if i not in refused] if refused else spans
        if not accepted or profile.watermark <= profile.horizon:
            joined = [SpanEnergy(span, {}, NOTHING, Outcome.NO_ENERGY) for span in accepted]
        elif self._announced or self._front is not None:
            joined = self._join_announced(accepted, profile)
        else:
            joined = self._join(accepted, profile)
        if not refused:
            return joined
        rest = iter(joined)
        return [
            SpanEnergy(span, {}, NOTHING, refused[i]) if i in refused else next(rest)
            for i, span in enumerate(spans)
        ]

    def _refused(self, spans: Sequence[Span], now: int) -> dict[int, Outcome]:
        """The positions of spans that cannot have energy, and why; the others' ids are kept."""
        seen, ids = self._seen, list(map(_ID, spans))
        starts, ends = list(map(_START, spans)), list(map(_END, spans))
        if (
            all(map(le, starts, ends))
            and max(ends, default=now) <= now
            and len(set(ids)) == len(ids)
            and seen.isdisjoint(ids)
        ):
            seen.update(ids, value=True)
            return {}
        refused: dict[int, Outcome] = {}
        for i, (ident, start, end) in enumerate(zip(ids, starts, ends, strict=True)):
            if end < start:
                refused[i] = Outcome.INVERTED
            elif end > now:
                refused[i] = Outcome.FUTURE
            elif ident in seen:
                refused[i] = Outcome.DUPLICATE
            else:
                seen[ident] = True
        return refused

    def _join(self, spans: Sequence[Span], profile: EnergyProfile) -> list[SpanEnergy]:
        """Settle a batch of a process that announces nothing."""
        batch = _Batch(spans, profile.horizon, profile.watermark)
        self._by_weight = self._by_weight or any(map(_WEIGHT, spans))
        division, located = self._divide(batch, batch.starts, batch.ends, profile)
        count = len(spans)
        starts, ends = list(map(_START, spans)), list(map(_END, spans))
        inclusives = profile.spent(starts, located[:count], ends, located[count : 2 * count])
        shares = list(map(mul, division.gained, division.cpu))
        if division.cpu != division.gpu:
            shares = [division.share(i) for i in range(count)]
        taken = [gained & CLOCK_MASK for gained in division.gained]
        return self._results(spans, shares, taken, inclusives, profile.lanes)

    def _results(
        self,
        spans: Sequence[Span],
        shares: Sequence[int],
        taken: Sequence[int],
        inclusives: Sequence[Spent],
        lanes: Lanes,
    ) -> list[SpanEnergy]:
        """``taken``: how long each was a leaf while others had been given the energy."""
        self._given += sum([share & SHARE_WHOLE for share in shares])
        exclusives = lanes.each_share(shares)
        kinds = len(lanes.kinds)
        if any(len(energy) < kinds for energy, _, _ in inclusives):
            exclusives = map(_only, exclusives, inclusives)
        joined = Outcome.JOINED
        outcomes = [
            joined
            if not gone and inclusive[2] >= span.end - span.start
            else self._outcome(span, gone, inclusive)
            for span, gone, inclusive in zip(spans, taken, inclusives, strict=True)
        ]
        return list(map(_new_result, zip(spans, exclusives, inclusives, outcomes, strict=True)))

    def _outcome(self, span: Span, taken: int, inclusive: Spent) -> Outcome:
        """What became of a span that is not simply JOINED."""
        covered, length = inclusive.covered, span.end - span.start
        if not covered and length:
            return Outcome.NO_ENERGY
        if taken:
            children = self._orphans.get(span.id)
            if taken > (0 if children is None else children.time):
                return Outcome.LATE
        return Outcome.PARTIAL if covered < length else Outcome.JOINED

    def _divide(
        self, batch: _Batch, starts: Sequence[int], ends: Sequence[int], profile: EnergyProfile
    ) -> tuple[_Division, list[tuple[int, int]]]:
        """Divide what is not covered of the time of spans that nobody announced."""
        count = len(starts)
        division = _Division()
        division.join(count)
        division.parent[:] = parents = batch.parents()
        times = [*starts, *ends]
        order = sorted(range(2 * count), key=times.__getitem__)
        codes = [*range(count), *range(-1, -count - 1, -1)]
        self._weigh(batch, division, order)
        first, last = times[order[0]], times[order[-1]]
        covered = self._covered.inside(first, last)
        division.energy, beyond = self._covered.around(first, last)
        if covered:
            _bar(times, codes, covered, first, last)
            order = sorted(range(len(times)), key=times.__getitem__)
        stretches, located = division.run(profile, times, codes, order, covered, beyond)
        for stretch in stretches:
            self._covered.add(stretch)
        for i in [i for i, parent in enumerate(parents) if parent < 0]:
            if batch.spans[i].parent and ends[i] > starts[i]:
                self._orphan(batch.spans[i], starts[i], ends[i])
        return division, located

    def _orphan(self, span: Span, start: int, end: int) -> None:
        """Remember a child for the parent that has not come yet."""
        children = self._orphans.get(span.parent)
        if children is None:
            children = self._orphans[span.parent] = _Children(start)
        children.add(start, end, span.thread, span.cpu)

    # --------------------------------------------------------------------------------- weights

    def _weigh(self, batch: _Batch, division: _Division, order: Sequence[int]) -> None:
        """Give the spans of a batch their weights: by attribute, by CPU time, or alike."""
        if self._by_weight:
            weights = list(map(_WEIGHT, batch.spans))
            division.gpu[:] = division.cpu[:] = self._completed(weights, HEAVIEST)
        elif self._by_cpu and any(map(_CPU, batch.spans)):
            rates = self._cpu_rates(batch, division.parent, order)
            division.cpu[:] = self._completed(rates, MILLION)

    def _completed(self, weights: Sequence[int | None], most: int) -> list[int]:
        """Weights within bounds; the usual one where none is known."""
        known = [max(1, min(weight, most)) for weight in weights if weight is not None]
        if known:
            self._usual = max(1, sum(known) // len(known))
        usual = min(self._usual, most)
        return [usual if w is None else max(1, min(w, most)) for w in weights]

    def _cpu_rates(
        self, batch: _Batch, parents: Sequence[int], order: Sequence[int]
    ) -> list[int | None]:
        """The CPU time of each span's thread, in millionths of a core, while it was a leaf.

        What its children used on the same thread, and the time they were open, is theirs.
        """
        spans, starts, ends = batch.spans, batch.starts, batch.ends
        time, cpu, until = [0] * len(spans), [0] * len(spans), list(starts)
        for i in order:
            if i >= len(spans) or parents[i] < 0:
                continue
            parent = parents[i]
            time[parent] += max(0, ends[i] - max(starts[i], until[parent]))
            until[parent] = max(until[parent], ends[i])
            used = spans[i].cpu
            if used is not None and spans[i].thread == spans[parent].thread:
                cpu[parent] += used
        rates: list[int | None] = []
        for i, span in enumerate(spans):
            children = self._orphans.get(span.id)
            if children is not None:
                time[i] += children.time
                cpu[i] += children.cpu.get(span.thread, 0)
            alone = max(1, span.end - span.start - time[i])
            rates.append(None if span.cpu is None else (span.cpu - cpu[i]) * MILLION // alone)
        return rates

    # ------------------------------------------------------------------------ announced spans

    def _join_announced(self, spans: Sequence[Span], profile: EnergyProfile) -> list[SpanEnergy]:
        """Settle a batch of a process that announces its spans.

        Time passes once, for all its open spans together, up to the latest end in the batch; what
        is left before that is divided as if nothing had been announced.
        """
        batch = _Batch(spans, profile.horizon, profile.watermark)
        records = list(map(self._announced.get, batch.ids))
        for span, record in zip(spans, records, strict=True):
            if record is not None and record.end is None:
                self._end(record, span.end, None)
        began = [
            span.start if record is None else record.start
            for span, record in zip(spans, records, strict=True)
        ]
        ended = [
            span.end if record is None or record.end is None else record.end
            for span, record in zip(spans, records, strict=True)
        ]
        until = min(max(ended), profile.watermark)
        front = self._begin(profile, until)
        starts, ends = list(batch.starts), list(batch.ends)
        for i, record in enumerate(records):
            if record is not None:
                since = record.since if record.number >= 0 else max(record.start, front)
                starts[i] = max(profile.horizon, min(record.start, since, profile.watermark))
                ends[i] = max(starts[i], min(since, profile.watermark))
            elif front < ends[i]:
                ends[i] = max(starts[i], front)
        if any(map(_WEIGHT, spans)):
            self._by_weight = True
            self._completed(list(map(_WEIGHT, spans)), HEAVIEST)  # so that the usual is known
        before = _Division()
        before.join(len(spans))
        if any(map(lt, starts, ends)):
            before, _ = self._divide(batch, starts, ends, profile)
        self._advance(profile, max(front, until), batch, records, numbers := [-1] * len(spans))
        shares, taken = [], []
        for i, record in enumerate(records):
            share, gained, number = before.share(i), before.gained[i], numbers[i]
            if record is not None:
                number = record.number
                self._drop(record)
            if number >= 0:
                part = self._running.share(number)
                self._held -= part
                share, gained = share + part, gained + self._running.gained[number]
            shares.append(share)
            taken.append(gained & CLOCK_MASK)
        self._tidy()
        locate = profile.locate
        inclusives = profile.spent(began, list(map(locate, began)), ended, list(map(locate, ended)))
        return self._results(spans, shares, taken, inclusives, profile.lanes)

    def _begin(self, profile: EnergyProfile, until: int) -> int:
        """The time up to which announced spans have been settled; at first, their beginning."""
        if self._front is None and self._events and self._events[0][0] < until:
            self._front = max(self._events[0][0], profile.horizon)
        if self._front is None:
            return until
        if self._running.at < self._front:
            self._running.at = self._front
            self._running.energy = profile.locate(self._front)[0]
        return self._front

    def _advance(
        self,
        profile: EnergyProfile,
        until: int,
        batch: _Batch,
        records: Sequence[_Announced | None],
        numbers: list[int],
    ) -> None:
        """Let time pass for announced spans, and those of a batch that were not announced.

        Their numbers in the running division are put into ``numbers``.
        """
        front, running = self._front, self._running
        if front is None:
            return
        weights = {span.id: span.weight for span in batch.spans} if self._by_weight else {}
        times, codes = self._due(front, until, weights)
        for i, (span, record) in enumerate(zip(batch.spans, records, strict=True)):
            if record is None and batch.ends[i] > front:
                numbers[i] = running.join(1)
                times += [max(front, batch.starts[i]), min(batch.ends[i], until)]
                codes += [numbers[i], ~numbers[i]]
                self._weigh_alone(numbers[i], span.weight, None)
                self._adopt(numbers[i], span.parent, span.start)
            elif record is not None and record.number >= 0 and (record.end or 0) > until:
                times.append(until)  # more is not known of its end; this is all it gets
                codes.append(~record.number)
        times.append(until)
        codes.append(_TICK)
        covered = self._covered.inside(front, until)
        _, beyond = self._covered.around(front, until)
        _bar(times, codes, covered, front, until)
        before = running.passed
        order = sorted(range(len(times)), key=times.__getitem__)
        stretches, _ = running.run(profile, times, codes, order, covered, beyond)
        divided = before - running.passed
        for stretch in stretches:
            divided += stretch.after - stretch.before
            self._covered.add(stretch)
        self._held += divided << SHARE
        self._front = until

    def _due(
        self, front: int, until: int, weights: Mapping[bytes, int | None]
    ) -> tuple[list[int], list[int]]:
        """The events of announced spans up to ``until``, and their codes."""
        times: list[int] = []
        codes: list[int] = []
        opened: list[_Announced] = []
        events, next_number = self._events, len(self._running.gained)
        while events and events[0][0] <= until:
            at, _, closes, record = heappop(events)
            if record.number == _GONE:
                continue
            if at < front:
                at = front
            times.append(at)
            if closes:
                codes.append(~record.number)
                continue
            record.number = next_number + len(opened)
            codes.append(record.number)
            record.since = at
            opened.append(record)
        self._running.join(len(opened))
        self._numbered += len(opened)
        for record in opened:
            self._adopt(record.number, record.parent, record.start)
            self._weigh_alone(record.number, weights.get(record.id), record)
        return times, codes

    def _adopt(self, number: int, parent: bytes, start: int) -> None:
        """Let an announced span be the parent, if it can be."""
        above = self._announced.get(parent)
        if above is None or not 0 <= above.number != number or above.start > start:
            return
        if above.start == start:
            at: _Announced | None = above
            for _ in range(_CHAIN):
                if at is None or at.start != start:
                    break
                if at.number == number:
                    return
                at = self._announced.get(at.parent)
            else:
                return
        self._running.parent[number] = above.number

    def _weigh_alone(self, number: int, weight: int | None, record: _Announced | None) -> None:
        """The weight of one span in the running division, which knows only some of them."""
        running = self._running
        if self._by_weight:
            running.cpu[number] = running.gpu[number] = min(
                HEAVIEST, self._usual if weight is None else max(1, weight)
            )
        elif self._by_cpu:
            running.cpu[number] = min(self._usual, MILLION)
            if record is not None and record.end is not None and record.cpu is not None:
                alone = max(1, record.end - record.start - record.child_time)
                rate = (record.cpu - record.child_cpu) * MILLION // alone
                running.cpu[number] = rate = max(1, min(rate, MILLION))
                self._usual = max(1, self._usual + (rate - self._usual) // 16)

    def _drop(self, record: _Announced) -> None:
        del self._announced[record.id]
        self._numbered -= record.number >= 0
        record.number = _GONE

    def _tidy(self) -> None:
        """Forget numbers and events that are nobody's any more."""
        if not self._numbered:
            self._held = 0
        if len(self._running.gained) > 2 * self._numbered + _SPARE:
            live = [record for record in self._announced.values() if record.number >= 0]
            self._running.keep([record.number for record in live])
            for number, record in enumerate(live):
                record.number = number
        if len(self._events) > 2 * len(self._announced) + _SPARE:
            self._events = [event for event in self._events if event[3].number != _GONE]
            heapify(self._events)

    def expire(self, opened: int, ended: int) -> int:
        """Give up announced spans; how many they were.

        Given up are those opened before ``opened`` that have not ended, and those that ended
        before ``ended`` and never came. What was held for them falls to *outside*.
        """
        given_up = [
            record
            for record in self._announced.values()
            if (record.start < opened if record.end is None else record.end < ended)
        ]
        for record in given_up:
            number = record.number
            if number >= 0:
                if self._running.open[number]:
                    self._running.leave(number)
                self._held -= self._running.share(number)
            self._drop(record)
        self._tidy()
        return len(given_up)

    # --------------------------------------------------------------------------------- outside

    @property
    def since(self) -> int | None:
        """The time of the first energy that was divided; None before there was any."""
        return next((stretch.start for stretch in self._covered), None)

    def outside(self, profile: EnergyProfile, before: int) -> dict[HwType, Microjoules]:
        """What the process spent before ``before`` that no span has claimed, since last asked.

        From then on nobody can: a span that comes later and was open then is LATE. It begins with
        the first span. Once everything is settled and asked for, all exclusive energies and
        this add up to what the profile says of the time in between, to the microjoule.
        """
        before = min(before, profile.watermark)
        if self._announced or self._front is not None:
            front = self._begin(profile, before)
            self._advance(profile, max(front, before), _Batch([], 0, 0), [], [])
            self._tidy()
        self._covered.close(profile, before)
        lanes = profile.lanes
        divided = sum(each.after - each.before for each in self._covered)
        for first in self._covered:
            divided += first.before - (first.before & WHOLE)
            break
        unclaimed = (divided << SHARE) - self._given - self._held
        totals = dict(zip(lanes.kinds, lanes.shares(unclaimed), strict=True))
        # A span that extends the account backwards may take back a fraction of a microjoule.
        returned = self._returned
        new = {kind: max(0, total - returned.get(kind, 0)) for kind, total in totals.items()}
        self._returned = {kind: returned.get(kind, 0) + energy for kind, energy in new.items()}
        return {kind: Microjoules(energy) for kind, energy in new.items()}
