"""Joining: the exact division of a process's energy among its spans.

At every instant the power of a process is divided by weight among its *leaf* spans: open spans
without an open child in the same process. The method is weighted fair queueing: a virtual account
grows by the energy divided by the weight of all leaves, and a span's share is its weight times the
growth of the account while it was a leaf. The cost of a span is therefore a few steps at its start
and end, independent of the number of other spans.

Plain OTLP spans arrive after their end, in batches, parents after their children. Time whose energy
has been divided is *covered* and never divided again: a late span shares only the rest. Energy that
no span claims is the *outside* energy of the process.

An announced span (:class:`SpanStart`, :class:`SpanEnd`) shares energy from its start on; the energy
is held until the span is received.

Each division rounds down in units of 2**-104 microjoules. The loss is far less than a microjoule
per span and becomes outside energy.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import chain, repeat
from operator import le, lt, mul, sub

from wattspan.model import HwType, Microjoules, StaticBasis
from wattspan.spans.fair_division import (
    CoveredStretch,
    CoveredTime,
    FairDivision,
    exclude_covered_time,
)
from wattspan.spans.open_spans import OpenSpans
from wattspan.spans.packed_energy import CLOCK_MASK, SHARE, WHOLE
from wattspan.spans.profiles import NO_ENERGY, EnergyProfile
from wattspan.spans.step_division import StepDivider
from wattspan.spans.values import (
    MAX_DURATION,
    IntervalEnergyColumns,
    Outcome,
    Span,
    SpanColumns,
    SpanEnd,
    SpanEnergy,
    SpanEnergyColumns,
    SpanStart,
)
from wattspan.spans.waiting_spans import WaitingShares
from wattspan.spans.weights import (
    GenerationalCache,
    OrphanSpans,
    SpanBatch,
    SpanWeights,
)

MAX_LOCKED = 1024
"""Spans that are divided under the lock of the profile: 10 ms; for more, a copy of it is faster."""

_UNLOCKED = nullcontext()


class ProcessSpans:
    """The spans of one process, among which the energy of its profile is divided.

    With ``by_cpu``, CPU and memory energy is divided by the CPU time of the spans' threads where
    announcements tell it. ``stretches``, ``ids`` and ``announced`` limit the numbers of covered
    stretches, of span ids for the detection of duplicates, and of announced spans. ``steps``
    divides the GPU energy inside counter steps; without it, it is spread evenly. Energy before
    ``begin`` is not divided: an earlier account of the process has divided it.
    """

    def __init__(
        self,
        *,
        by_cpu: bool = True,
        stretches: int = 4096,
        ids: int = 32_768,
        announced: int = 100_000,
        steps: StepDivider | None = None,
        begin: int = 0,
    ) -> None:
        self._steps = steps
        self._begin = begin
        self._covered = CoveredTime(stretches)
        self._seen: GenerationalCache[bool] = GenerationalCache(ids)
        self._orphans = OrphanSpans(ids)
        self._weights = SpanWeights(by_cpu=by_cpu)
        self._announced = OpenSpans(self._covered, self._weights, announced)
        self._waiting = WaitingShares()
        self._assigned = 0  # packed microjoules times 2**104
        self._returned: dict[HwType, int] = {}

    @property
    def announced(self) -> int:
        """Number of announced spans that have not been received."""
        return len(self._announced)

    def awaits(self, span: bytes) -> bool:
        """True if the span of this id is announced and has not been received."""
        return span in self._announced.records

    @property
    def remembered(self) -> int:
        """Number of remembered ids of received spans and of missing parents."""
        return len(self._seen) + len(self._orphans)

    def age(self, now: int, memory: int) -> None:
        """Remove ids older than ``memory``; called often, at the latest at twice that age.

        The outcome of a repeated span whose id is removed is LATE or NO_ENERGY instead of
        DUPLICATE; its time is covered in any case.
        """
        self._seen.age(now, memory)
        self._orphans.age(now, memory)

    def forget_half(self) -> None:
        """Remove the older half of the remembered ids."""
        self._seen.turn()
        self._orphans.turn()

    def open(self, started: SpanStart) -> bool:
        """Add an announced start; False if it is ignored, for a known id or for want of room."""
        return started.id not in self._seen and self._announced.open(started)

    def close(self, ended: SpanEnd) -> bool:
        """Add an announced end; False without an open span of its id."""
        return self._announced.close(ended)

    def displace(self) -> None:
        """Remove the announced span that started last; energy held for it becomes outside."""
        self._announced.displace()

    def expire(self, opened: int, ended: int) -> int:
        """Remove announced spans that are overdue; returns their number.

        Overdue are spans that started before ``opened`` without an end, and those that ended
        before ``ended`` and were not received. Energy held for them becomes outside energy.
        """
        return self._announced.expire(opened, ended)

    def forget(self) -> None:
        """Remove the process from the power model; its spans are not settled any more."""
        if self._steps is not None:
            self._steps.forget()

    # -------------------------------------------------------------------------------- settling

    def _begun(self, profile: EnergyProfile) -> bool:
        """True if the profile has energy that may be divided; earlier energy is excluded."""
        start, end = profile.horizon, self._begin
        if profile.watermark <= max(start, end):
            return False
        if start < end:
            energy = profile.locate(end)[0]
            self._covered.add(CoveredStretch(start, end, 0, energy))
            self._assigned, self._begin = energy << SHARE, 0
        return True

    def settle(
        self,
        spans: Sequence[Span],
        profile: EnergyProfile,
        now: int,
        *,
        inclusive: bool = True,
        waiting: Sequence[SpanColumns] = (),
        lock: AbstractContextManager[object] = _UNLOCKED,
    ) -> SpanEnergyColumns:
        """The energies of ``spans``, in their order.

        To be called when the profile's watermark has passed their ends: energy beyond it is never
        theirs. A span that ends after ``now`` is FUTURE. Without ``inclusive``, results have the
        covered time but no inclusive energy, which is faster. ``waiting`` are received spans that
        are settled later: they share the energy up to the latest end in ``spans``. ``lock``
        protects the profile from other threads; the division of many spans is outside of it.
        """
        columns = SpanColumns.of(spans)
        with lock:
            known = profile.watermark
        # `now` may be older than the watermark; settled time is never in the future.
        refused = self._refused(columns, max(now, known))
        accepted = columns
        if refused:
            accepted = columns.chosen([i for i in range(len(columns)) if i not in refused])
        with ExitStack() as held:
            held.enter_context(lock)
            begun = bool(accepted) and self._begun(profile)
            if self._steps is not None and begun and profile.counter_steps:
                fronts = self._announced.front, self._waiting.front
                self._steps.shape(
                    accepted,
                    profile,
                    self._covered,
                    fixed=max(filter(None, fronts), default=None),
                    waiting=chain.from_iterable(waiting),
                )
            if len(accepted) + sum(map(len, waiting)) > MAX_LOCKED:
                profile = profile.snapshot()
                held.close()
            if not begun:
                joined = without_energy(accepted)
            elif self._announced.active:
                joined = self._join_announced(accepted, profile, inclusive=inclusive)
            else:
                until = min(max(accepted.end), profile.watermark)
                others = self._waiting.select(waiting, until, max(now, until), self._seen)
                joined = self._join(accepted, others, profile, inclusive=inclusive)
        if not refused:
            return joined
        rest = iter(joined)
        return SpanEnergyColumns.of(
            [
                SpanEnergy(span, {}, NO_ENERGY, refused[i]) if i in refused else next(rest)
                for i, span in enumerate(columns)
            ]
        )

    def _refused(self, spans: SpanColumns, now: int) -> dict[int, Outcome]:
        """The outcomes of invalid spans, by position; ids of valid ones are remembered."""
        seen, ids, starts, ends = self._seen, spans.id, spans.start, spans.end
        if (
            all(map(le, starts, ends))
            and max(ends, default=now) <= now
            and min(starts, default=now) >= now - MAX_DURATION
            and len(fresh := dict.fromkeys(ids, True)) == len(ids)
            and seen.isdisjoint(fresh)
        ):
            seen.update(fresh)
            return {}
        refused: dict[int, Outcome] = {}
        for i, (ident, start, end) in enumerate(zip(ids, starts, ends, strict=True)):
            if end < start or start + MAX_DURATION < end <= now:
                refused[i] = Outcome.INVERTED
            elif end > now:
                refused[i] = Outcome.FUTURE
            elif ident in seen:
                refused[i] = Outcome.DUPLICATE
            else:
                seen[ident] = True
        return refused

    def _join(
        self, spans: SpanColumns, others: SpanColumns, profile: EnergyProfile, *, inclusive: bool
    ) -> SpanEnergyColumns:
        """Settle a batch of a process without announced spans; ``others`` share its energy."""
        count, together = len(spans), SpanColumns.joined([spans, others]) if others else spans
        batch = SpanBatch(together, profile.horizon, profile.watermark)
        self._weights.observe(together)
        parted = bool(others or self._waiting)
        begins, stops, shared = list(batch.starts), list(batch.ends), list[int]()
        if parted:
            until = max(stops[:count])
            stops[count:] = [min(end, until) for end in stops[count:]]
            shared = self._waiting.positions(together.id)
            for i in shared:
                begins[i] = max(begins[i], self._waiting.until(together.id[i]))
                stops[i] = max(begins[i], stops[i])
        located: list[tuple[int, int]] | None = [] if inclusive else None
        division = self._divide(batch, begins, stops, profile, located)
        starts, ends = spans.start, spans.end
        if located is not None:
            last = located[len(together) : len(together) + count]
            first = [
                place if begin == start else profile.locate(start)
                for place, begin, start in zip(located[:count], begins, batch.starts, strict=False)
            ]
            inclusives = profile.energies(starts, first, ends, last)
        else:
            inclusives = profile.coverages(starts, ends)
        # Spans that were not announced have one weight for all hardware types.
        shares, taken = division.gained, [0] * len(together)
        if division.clocked:
            taken = [gained & CLOCK_MASK for gained in shares]
            shares = list(map(sub, shares, taken))
        if self._weights.by_weight:
            shares = list(map(mul, shares, division.cpu))
        if parted:
            for i in range(count, len(together)):
                self._waiting.add(together.id[i], shares[i], taken[i], stops[i])
            del shares[count:], taken[count:]
            for i in shared:
                if i < count:
                    share, time = self._waiting.pop(spans.id[i])
                    shares[i] += share
                    taken[i] += time
        return self._results(spans, shares, taken, inclusives, profile, starts, ends)

    def _results(
        self,
        spans: SpanColumns,
        shares: Sequence[int],
        taken: Sequence[int],
        inclusives: IntervalEnergyColumns,
        profile: EnergyProfile,
        starts: Sequence[int],
        ends: Sequence[int],
    ) -> SpanEnergyColumns:
        """``taken``: the covered time in which each span was a leaf."""
        lanes = profile.lanes
        known = profile.known_types(starts, ends)
        bases: Sequence[StaticBasis | None] = ()
        if lanes.static:
            bases = profile.bases(starts, ends)
        columns: Sequence[Sequence[Microjoules]] = lanes.share_columns(shares)
        static: Sequence[Microjoules | None] = ()
        parts: Sequence[Microjoules] = ()
        if lanes.static:
            *columns, parts = columns
        if known is not None:
            columns = [
                [e if kind in k else Microjoules(0) for e, k in zip(column, known, strict=True)]
                for kind, column in zip(lanes.kinds, columns, strict=True)
            ]
        self._assigned += lanes.pack(map(sum, (*columns, parts) if parts else columns)) << SHARE
        exclusive = dict(zip(lanes.kinds, columns, strict=True))
        if any(bases):
            static, bases = _static_parts(exclusive[HwType.GPU], parts, bases, known)
        lengths = list(map(sub, spans.end, spans.start))
        outcomes = [Outcome.JOINED] * len(spans)
        if any(taken) or inclusives.covered != lengths:
            kinds = repeat(lanes.kinds) if known is None else known
            covered = inclusives.covered
            outcomes = list(map(self._outcome, spans.id, lengths, taken, covered, kinds))
        return SpanEnergyColumns(
            spans, exclusive, known, inclusives, outcomes, static, bases if static else ()
        )

    def _outcome(
        self, span: bytes, length: int, taken: int, covered: int, known: Collection[HwType]
    ) -> Outcome:
        """The outcome of a span of this id and ``length``, with the energy of ``known`` types."""
        if not known and length:
            return Outcome.NO_ENERGY
        if taken:
            children = self._orphans.get(span)
            if taken > (0 if children is None else children.time):
                return Outcome.LATE
        return Outcome.PARTIAL if covered < length else Outcome.JOINED

    def _divide(
        self,
        batch: SpanBatch,
        starts: Sequence[int],
        ends: Sequence[int],
        profile: EnergyProfile,
        located: list[tuple[int, int]] | None = None,
    ) -> FairDivision:
        """Divide the energy of uncovered time among unannounced spans.

        ``located`` receives the locations in the profile of all starts, then of all ends.
        """
        count = len(starts)
        division = FairDivision()
        division.join(count)
        division.parent[:] = parents = batch.parents()
        times = [*starts, *ends]
        order = sorted(range(2 * count), key=times.__getitem__)
        codes = [*range(count), *range(-1, -count - 1, -1)]
        self._weights.assign(batch, division)
        first, last = times[order[0]], times[order[-1]]
        covered = self._covered.inside(first, last)
        division.energy, beyond = self._covered.around(first, last)
        if covered:
            exclude_covered_time(times, codes, covered, first, last)
            order = sorted(range(len(times)), key=times.__getitem__)
        if located is not None:
            located += [(0, 0)] * len(times)
        stretches = division.run(profile, times, codes, order, covered, beyond, located)
        for stretch in stretches:
            self._covered.add(stretch)
        missing = batch.spans.parent if any(batch.spans.parent) else ()
        for i, (above, parent) in enumerate(zip(parents, missing, strict=False)):
            if parent and above < 0 and ends[i] > starts[i]:
                self._orphans.remember(parent, starts[i], ends[i])
        return division

    def _join_announced(
        self, spans: SpanColumns, profile: EnergyProfile, *, inclusive: bool
    ) -> SpanEnergyColumns:
        """Settle a batch of a process with announced spans.

        All open spans are settled together up to the latest end in the batch; the uncovered rest
        before that is divided as without announcements.
        """
        announced = self._announced
        batch = SpanBatch(spans, profile.horizon, profile.watermark)
        records = list(map(announced.records.get, spans.id))
        for end, record in zip(spans.end, records, strict=True):
            if record is not None and record.end is None:
                announced.end(record, end, None)
        began = [
            start if record is None else record.start
            for start, record in zip(spans.start, records, strict=True)
        ]
        ended = [
            end if record is None or record.end is None else record.end
            for end, record in zip(spans.end, records, strict=True)
        ]
        until = min(max(ended), profile.watermark)
        front = announced.begin(profile, until)
        starts, ends = list(batch.starts), list(batch.ends)
        for i, record in enumerate(records):
            if record is not None:
                since = record.since if record.number >= 0 else max(record.start, front)
                starts[i] = max(profile.horizon, min(record.start, since, profile.watermark))
                ends[i] = max(starts[i], min(since, profile.watermark))
            elif front < ends[i]:
                ends[i] = max(starts[i], front)
        if self._weights.observe(spans):
            self._weights.filled(spans.weight)  # announced spans of the batch need the mean weight
        before = FairDivision()
        before.join(len(spans))
        if any(map(lt, starts, ends)):
            before = self._divide(batch, starts, ends, profile)
        announced.advance(profile, max(front, until), batch, records, numbers := [-1] * len(spans))
        shares, taken = [], []
        for i, record in enumerate(records):
            share, time, number = before.share(i), before.taken(i), numbers[i]
            if record is not None:
                number = record.number
                announced.drop(record)
            if number >= 0:
                part = announced.division.share(number)
                announced.held -= part
                share, time = share + part, time + announced.division.taken(number)
            shares.append(share)
            taken.append(time)
        announced.tidy()
        if inclusive:
            begins, stops = map(profile.locate, began), map(profile.locate, ended)
            inclusives = profile.energies(began, list(begins), ended, list(stops))
        else:
            inclusives = profile.coverages(began, ended)
        return self._results(spans, shares, taken, inclusives, profile, began, ended)

    # --------------------------------------------------------------------------------- outside

    @property
    def since(self) -> int | None:
        """The time of the first energy that was divided; None before there was any."""
        return next((stretch.start for stretch in self._covered), None)

    def outside(self, profile: EnergyProfile, before: int) -> dict[HwType, Microjoules]:
        """The energy before ``before`` that no span has claimed, since the last call.

        Afterwards no span can claim it: a later span of that time is LATE. Outside energy begins
        with the first span. Once all is settled, exclusive and outside energies add up to the
        energy of the profile, to the microjoule.
        """
        if not self._begun(profile):
            return {}
        self._waiting.expire(before)
        before = min(before, profile.watermark)
        if self._announced.active:
            front = self._announced.begin(profile, before)
            self._announced.advance(
                profile, max(front, before), SpanBatch(SpanColumns.of([]), 0, 0), [], []
            )
            self._announced.tidy()
        self._covered.close(profile, before)
        lanes = profile.lanes
        divided = sum(each.after - each.before for each in self._covered)
        for first in self._covered:
            divided += first.before - (first.before & WHOLE)
            break
        held = self._announced.held + self._waiting.held
        unclaimed = (divided << SHARE) - self._assigned - held
        totals = dict(zip(lanes.kinds, lanes.shares(unclaimed), strict=not lanes.static))
        # A span that extends covered time backwards may reclaim a fraction of a microjoule.
        returned = self._returned
        new = {kind: max(0, total - returned.get(kind, 0)) for kind, total in totals.items()}
        self._returned = {kind: returned.get(kind, 0) + energy for kind, energy in new.items()}
        return {kind: Microjoules(energy) for kind, energy in new.items()}


def _static_parts(
    gpu: Sequence[Microjoules],
    parts: Sequence[Microjoules],
    bases: Sequence[StaticBasis | None],
    known: Sequence[Sequence[HwType]] | None,
) -> tuple[Sequence[Microjoules | None], Sequence[StaticBasis | None]]:
    """The static part of each span's GPU energy and its basis; None where one is unknown."""
    if known is not None:
        bases = [
            basis if HwType.GPU in kinds else None
            for basis, kinds in zip(bases, known, strict=True)
        ]
    if None not in bases:
        return list(map(min, gpu, parts)), bases
    return [
        None if basis is None else min(energy, part)
        for energy, part, basis in zip(gpu, parts, bases, strict=True)
    ], bases


def without_energy(spans: SpanColumns) -> SpanEnergyColumns:
    """Results of spans whose energy is not known."""
    return SpanEnergyColumns.of(
        [SpanEnergy(span, {}, NO_ENERGY, Outcome.NO_ENERGY) for span in spans]
    )
