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

The spans of one process.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from operator import le, lt, mul

from wattspan.model import HwType, Microjoules
from wattspan.spans.fair_division import (
    CoveredStretch,
    CoveredTime,
    FairDivision,
    exclude_covered_time,
)
from wattspan.spans.open_spans import OpenSpans
from wattspan.spans.profiles import (
    CLOCK_MASK,
    NO_ENERGY,
    SHARE,
    SHARE_WHOLE,
    WHOLE,
    EnergyProfile,
    Lanes,
)
from wattspan.spans.values import IntervalEnergy, Outcome, Span, SpanEnd, SpanEnergy, SpanStart
from wattspan.spans.weights import (
    END,
    ID,
    MAX_WEIGHT,
    START,
    WEIGHT,
    GenerationalCache,
    OrphanSpans,
    SpanBatch,
    SpanWeights,
)

__all__ = ["MAX_WEIGHT", "CoveredStretch", "CoveredTime", "GenerationalCache", "ProcessSpans"]

_new_result = functools.partial(tuple.__new__, SpanEnergy)  # as in `profiles`


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
        self._covered = CoveredTime(stretches)
        self._seen: GenerationalCache[bool] = GenerationalCache(ids)
        self._orphans = OrphanSpans(ids)
        self._weights = SpanWeights(self._orphans, by_cpu=by_cpu)
        self._announced = OpenSpans(self._covered, self._weights, announced)
        self._given = 0  # in lanes, microjoules times 2**104
        self._returned: dict[HwType, int] = {}

    @property
    def announced(self) -> int:
        """How many spans have been announced and not come yet."""
        return len(self._announced)

    def awaits(self, span: bytes) -> bool:
        """Whether the span of this id was announced and has not come yet."""
        return span in self._announced.records

    @property
    def remembered(self) -> int:
        """How many ids are kept of spans that came, and of parents that did not."""
        return len(self._seen) + len(self._orphans)

    def age(self, now: int, memory: int) -> None:
        """Forget the ids that came longer ago than ``memory``; asked often, by twice that.

        A span that comes twice gets nothing the second time in any case, for its time is taken:
        with its id forgotten it is LATE, or had NO_ENERGY, and no more a DUPLICATE.
        """
        self._seen.age(now, memory)
        self._orphans.age(now, memory)

    def forget_half(self) -> None:
        """Forget the older half of the remembered ids."""
        self._seen.turn()
        self._orphans.turn()

    # ---------------------------------------------------------------------------- side channel

    def open(self, started: SpanStart) -> bool:
        """A span was opened. False if it cannot be kept: it will be a span like any other."""
        return started.id not in self._seen and self._announced.open(started)

    def close(self, ended: SpanEnd) -> bool:
        """A span was closed. False if it was never opened, or closed before."""
        return self._announced.close(ended)

    def expire(self, opened: int, ended: int) -> int:
        """Give up announced spans; how many they were.

        Given up are those opened before ``opened`` that have not ended, and those that ended
        before ``ended`` and never came. What was held for them falls to *outside*.
        """
        return self._announced.expire(opened, ended)

    # -------------------------------------------------------------------------------- settling

    def settle(
        self, spans: Sequence[Span], profile: EnergyProfile, now: int, *, inclusive: bool = True
    ) -> list[SpanEnergy]:
        """What each of ``spans`` spent, in their order.

        Ask when the profile's watermark has passed their ends: what lies beyond it is not known
        and never will be theirs. ``now`` is the present; a span that ends later is FUTURE. Without
        ``inclusive`` no inclusive energy is told, only how much was covered: that is quicker.
        """
        # Who asks may have looked at the clock a while ago: what has settled is no future.
        refused = self._refused(spans, max(now, profile.watermark))
        accepted = [s for i, s in enumerate(spans) if i not in refused] if refused else spans
        if not accepted or profile.watermark <= profile.horizon:
            joined = [SpanEnergy(span, {}, NO_ENERGY, Outcome.NO_ENERGY) for span in accepted]
        elif self._announced.active:
            joined = self._join_announced(accepted, profile, inclusive=inclusive)
        else:
            joined = self._join(accepted, profile, inclusive=inclusive)
        if not refused:
            return joined
        rest = iter(joined)
        return [
            SpanEnergy(span, {}, NO_ENERGY, refused[i]) if i in refused else next(rest)
            for i, span in enumerate(spans)
        ]

    def _refused(self, spans: Sequence[Span], now: int) -> dict[int, Outcome]:
        """The positions of spans that cannot have energy, and why; the others' ids are kept."""
        seen, ids = self._seen, list(map(ID, spans))
        starts, ends = list(map(START, spans)), list(map(END, spans))
        if (
            all(map(le, starts, ends))
            and max(ends, default=now) <= now
            and len(fresh := dict.fromkeys(ids, True)) == len(ids)
            and seen.isdisjoint(fresh)
        ):
            seen.update(fresh)
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

    def _join(
        self, spans: Sequence[Span], profile: EnergyProfile, *, inclusive: bool
    ) -> list[SpanEnergy]:
        """Settle a batch of a process that announces nothing."""
        batch = SpanBatch(spans, profile.horizon, profile.watermark)
        self._weights.notice(spans)
        division, located = self._divide(batch, batch.starts, batch.ends, profile)
        count = len(spans)
        starts, ends = list(map(START, spans)), list(map(END, spans))
        if inclusive:
            inclusives = profile.spent(starts, located[:count], ends, located[count : 2 * count])
        else:
            inclusives = profile.measured(starts, ends)
        shares = list(map(mul, division.gained, division.cpu))
        if division.cpu != division.gpu:
            shares = [division.share(i) for i in range(count)]
        taken = [gained & CLOCK_MASK for gained in division.gained]
        told = profile.told(starts, ends)
        return self._results(spans, shares, taken, inclusives, told, profile.lanes)

    def _results(
        self,
        spans: Sequence[Span],
        shares: Sequence[int],
        taken: Sequence[int],
        inclusives: Sequence[IntervalEnergy],
        told: Sequence[Sequence[HwType]] | None,
        lanes: Lanes,
    ) -> list[SpanEnergy]:
        """``taken``: how long each was a leaf while others had been given the energy."""
        self._given += sum([share & SHARE_WHOLE for share in shares])
        exclusives = lanes.each_share(shares)
        if told is not None:
            exclusives = [
                {kind: energy[kind] for kind in kinds}
                for energy, kinds in zip(exclusives, told, strict=True)
            ]
        joined = Outcome.JOINED
        outcomes = [
            joined
            if not gone and inclusive[2] >= span.end - span.start
            else self._outcome(span, gone, inclusive)
            for span, gone, inclusive in zip(spans, taken, inclusives, strict=True)
        ]
        return list(map(_new_result, zip(spans, exclusives, inclusives, outcomes, strict=True)))

    def _outcome(self, span: Span, taken: int, inclusive: IntervalEnergy) -> Outcome:
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
        self, batch: SpanBatch, starts: Sequence[int], ends: Sequence[int], profile: EnergyProfile
    ) -> tuple[FairDivision, list[tuple[int, int]]]:
        """Divide what is not covered of the time of spans that nobody announced."""
        count = len(starts)
        division = FairDivision()
        division.join(count)
        division.parent[:] = parents = batch.parents()
        times = [*starts, *ends]
        order = sorted(range(2 * count), key=times.__getitem__)
        codes = [*range(count), *range(-1, -count - 1, -1)]
        self._weights.of(batch, division, order)
        first, last = times[order[0]], times[order[-1]]
        covered = self._covered.inside(first, last)
        division.energy, beyond = self._covered.around(first, last)
        if covered:
            exclude_covered_time(times, codes, covered, first, last)
            order = sorted(range(len(times)), key=times.__getitem__)
        stretches, located = division.run(profile, times, codes, order, covered, beyond)
        for stretch in stretches:
            self._covered.add(stretch)
        for i in [i for i, parent in enumerate(parents) if parent < 0]:
            if batch.spans[i].parent and ends[i] > starts[i]:
                self._orphans.remember(batch.spans[i], starts[i], ends[i])
        return division, located

    def _join_announced(
        self, spans: Sequence[Span], profile: EnergyProfile, *, inclusive: bool
    ) -> list[SpanEnergy]:
        """Settle a batch of a process that announces its spans.

        Time passes once, for all its open spans together, up to the latest end in the batch; what
        is left before that is divided as if nothing had been announced.
        """
        announced = self._announced
        batch = SpanBatch(spans, profile.horizon, profile.watermark)
        records = list(map(announced.records.get, batch.ids))
        for span, record in zip(spans, records, strict=True):
            if record is not None and record.end is None:
                announced.end(record, span.end, None)
        began = [
            span.start if record is None else record.start
            for span, record in zip(spans, records, strict=True)
        ]
        ended = [
            span.end if record is None or record.end is None else record.end
            for span, record in zip(spans, records, strict=True)
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
        if self._weights.notice(spans):
            # So that the usual one is known.
            self._weights.completed(list(map(WEIGHT, spans)), MAX_WEIGHT)
        before = FairDivision()
        before.join(len(spans))
        if any(map(lt, starts, ends)):
            before, _ = self._divide(batch, starts, ends, profile)
        announced.advance(profile, max(front, until), batch, records, numbers := [-1] * len(spans))
        shares, taken = [], []
        for i, record in enumerate(records):
            share, gained, number = before.share(i), before.gained[i], numbers[i]
            if record is not None:
                number = record.number
                announced.drop(record)
            if number >= 0:
                part = announced.division.share(number)
                announced.held -= part
                share, gained = share + part, gained + announced.division.gained[number]
            shares.append(share)
            taken.append(gained & CLOCK_MASK)
        announced.tidy()
        if inclusive:
            begins, stops = map(profile.locate, began), map(profile.locate, ended)
            inclusives = profile.spent(began, list(begins), ended, list(stops))
        else:
            inclusives = profile.measured(began, ended)
        told = profile.told(began, ended)
        return self._results(spans, shares, taken, inclusives, told, profile.lanes)

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
        if self._announced.active:
            front = self._announced.begin(profile, before)
            self._announced.advance(profile, max(front, before), SpanBatch([], 0, 0), [], [])
            self._announced.tidy()
        self._covered.close(profile, before)
        lanes = profile.lanes
        divided = sum(each.after - each.before for each in self._covered)
        for first in self._covered:
            divided += first.before - (first.before & WHOLE)
            break
        unclaimed = (divided << SHARE) - self._given - self._announced.held
        totals = dict(zip(lanes.kinds, lanes.shares(unclaimed), strict=True))
        # A span that extends the account backwards may take back a fraction of a microjoule.
        returned = self._returned
        new = {kind: max(0, total - returned.get(kind, 0)) for kind, total in totals.items()}
        self._returned = {kind: returned.get(kind, 0) + energy for kind, energy in new.items()}
        return {kind: Microjoules(energy) for kind, energy in new.items()}
