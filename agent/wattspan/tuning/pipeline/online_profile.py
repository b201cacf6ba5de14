"""The profile of a running pipeline, from iterations at different clocks.

Durations come from spans. A device's counter is updated less often than instructions change, so
that energy has no span: power is fitted by least squares to periods with different parts of
forwards, backwards and waiting. The power while waiting is common to all ranks and clocks. The
powers of each rank are then scaled to its whole energy at a clock: the counter's delay falsifies
single periods, and consecutive ones together only at their ends.

The next clocks to measure are those of ranks with slack, at no loss, before those of all ranks.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from wattspan.tuning.pipeline.costs import ClockPoint, PipelineProfile
from wattspan.tuning.pipeline.dag import CostKey, InstructionKind, PipelineDag
from wattspan.tuning.pipeline.frontier import PipelineModel
from wattspan.tuning.pipeline.iterations import InstructionSpan, PipelineIteration, RankEnergy
from wattspan.util.linear_systems import solved

_EQUAL_POWER = 1e-3
"""Weight of equal powers of forwards and backwards, for periods that cannot tell them apart."""

_PARTS = 4
"""Parts into which a plan may divide the distance between two measured clocks."""

_LEAST_DISTANCE = 15  # MHz

_PROBE_EXECUTIONS = 32
"""Executions of each instruction that a probe measures at least."""

_MORE_ELASTIC = 1.25
"""Factor of an instruction's slowdown per clock below the lowest measured clock."""

_LEAST_ELASTICITY = 0.3


class _Durations(NamedTuple):
    executions: int = 0
    seconds: float = 0.0


class _PowerSums(NamedTuple):
    """Sums over periods of the seconds of forwards, backwards and waiting, and of the joules.

    ``products`` has those of each two of these figures, by row and column.
    """

    totals: tuple[float, ...] = (0.0,) * 4
    products: tuple[tuple[float, ...], ...] = ((0.0,) * 4,) * 4

    def add(self, *period: float) -> _PowerSums:
        """Add the seconds and the joules of a period."""
        return _PowerSums(
            tuple(map(float.__add__, self.totals, period)),
            tuple(
                tuple(known + one * other for known, other in zip(row, period, strict=True))
                for row, one in zip(self.products, period, strict=True)
            ),
        )

    def scaled(
        self, forward: float, backward: float, waiting: float
    ) -> Mapping[InstructionKind, float]:
        """Powers in the same ratio that with the power of waiting give the whole energy."""
        in_forward, in_backward, waited, joules = self.totals
        fitted = forward * in_forward + backward * in_backward
        scale = max((joules - waiting * waited) / fitted, 0.0) if fitted > 0 else 1.0
        return {
            InstructionKind.FORWARD: scale * forward,
            InstructionKind.BACKWARD: scale * backward,
        }

    def eliminated(self) -> _SolvedPowers:
        """The powers of instructions as functions of the power of waiting."""
        (ff, fb, fw, fe), (_, bb, bw, be), (_, _, ww, we), _ = self.products
        alike = _EQUAL_POWER * (ff + bb)
        (forward, backward), (by_forward, by_backward) = solved(
            [[ff + alike, fb - alike], [fb - alike, bb + alike]], [[fe, be], [-fw, -bw]]
        )
        slope = ww + fw * by_forward + bw * by_backward
        rest = we - fw * forward - bw * backward
        return _SolvedPowers(forward, by_forward, backward, by_backward, slope, rest)


class _SolvedPowers(NamedTuple):
    """Watts of a forward are ``forward + by_forward * waiting``, those of a backward likewise.

    The power of waiting solves ``slope * waiting = rest``, summed over ranks and clocks.
    """

    forward: float
    by_forward: float
    backward: float
    by_backward: float
    slope: float
    rest: float


class _Measured(NamedTuple):
    mhz: int
    seconds: float
    watts: float


@dataclass(frozen=True, slots=True)
class OnlineProfile:
    """Durations by instruction and clock, and sums of the regression by rank and clock.

    ``latest`` are the spans of the iteration ``number``, the latest one, by rank: a period may have
    begun in it.
    """

    durations: Mapping[tuple[CostKey, int], _Durations] = field(default_factory=dict)
    sums: Mapping[tuple[int, int], _PowerSums] = field(default_factory=dict)
    latest: Mapping[int, tuple[InstructionSpan, ...]] = field(default_factory=dict)
    number: int = -1

    def add(self, iteration: PipelineIteration) -> OnlineProfile:
        """Add an iteration; one whose clocks are unknown is ignored."""
        clocks = iteration.clocks
        if clocks is None:
            return self
        durations, sums = dict(self.durations), dict(self.sums)
        of_rank: dict[int, list[InstructionSpan]] = defaultdict(list)
        for span in iteration.spans:
            of_rank[span.rank].append(span)
            key = span.instruction.cost_key, clocks[span.rank]
            known = durations.get(key, _Durations())
            durations[key] = _Durations(known.executions + 1, known.seconds + span.end - span.start)
        latest = {
            rank: tuple(sorted(spans, key=lambda one: one.start)) for rank, spans in of_rank.items()
        }
        near = {rank: (*self.latest.get(rank, ()), *spans) for rank, spans in latest.items()}
        begun = min(span.start for span in iteration.spans)
        follows = iteration.number == self.number + 1
        for period in iteration.energy:
            if not follows and period.start < begun:
                continue  # its first instructions are not known
            place = period.rank, clocks[period.rank]
            parts = _parts(period, near[period.rank])
            sums[place] = sums.get(place, _PowerSums()).add(*parts, period.joules)
        return replace(self, durations=durations, sums=sums, latest=latest, number=iteration.number)

    def executions(self, key: CostKey, mhz: int) -> int:
        """The measured executions of an instruction at a clock."""
        return self.durations.get((key, mhz), _Durations()).executions

    def mean(self, key: CostKey, mhz: int) -> float:
        """The mean seconds of an instruction at a clock; LookupError if it was not measured."""
        known = self.durations[key, mhz]
        return known.seconds / known.executions

    def model(
        self,
        dag: PipelineDag,
        step: int,
        blocking_watts: float | None = None,
        wanted: Sequence[int] = (),
    ) -> PipelineModel | None:
        """The pipeline with its costs at the measured clocks, and at some between them.

        Between measured clocks, time and power are linear. ``step`` is the least difference of
        clocks in MHz, ``wanted`` are further clocks between them. ``blocking_watts`` replaces the
        fitted power of waiting. None before the duration and the power of every instruction are
        known. Below the lowest measured clock of an instruction, its time rises in inverse
        proportion to the clock, and its energy does not fall.
        """
        waiting, powers = self.powers(blocking_watts)
        ranks = dag.stage_ranks()
        measured: dict[CostKey, list[_Measured]] = defaultdict(list)
        for key, mhz in sorted(self.durations, key=lambda one: one[1]):
            power = powers.get((ranks[key.stage], mhz))
            if power is not None:
                measured[key].append(_Measured(mhz, self.mean(key, mhz), power[key.kind]))
        if len(measured) < len(ranks) * len(InstructionKind):
            return None
        highest = min(of_key[-1].mhz for of_key in measured.values())
        every = {one.mhz for of_key in measured.values() for one in of_key}
        lowest = min(every)
        clocks = _with_parts([mhz for mhz in sorted(every) if mhz <= highest], step)
        clocks = sorted({*clocks, *(mhz for mhz in wanted if lowest <= mhz <= highest)})
        points = {key: _interpolated(of_key, clocks) for key, of_key in measured.items()}
        return PipelineModel(dag, PipelineProfile(points), waiting)

    def powers(
        self, blocking_watts: float | None
    ) -> tuple[float, Mapping[tuple[int, int], Mapping[InstructionKind, float]]]:
        """The power of waiting in watts, and that of instructions by rank and clock."""
        fitted = {
            place: sums.eliminated() for place, sums in self.sums.items() if any(sums.totals[:2])
        }
        slope = sum(one.slope for one in fitted.values())
        waiting = blocking_watts
        if waiting is None:
            # Without periods of waiting nothing waits, and its power does not matter.
            waiting = (
                max(0.0, sum(one.rest for one in fitted.values()) / slope) if slope > 0 else 0.0
            )
        powers = {
            place: self.sums[place].scaled(
                max(one.forward + one.by_forward * waiting, waiting),
                max(one.backward + one.by_backward * waiting, waiting),
                waiting,
            )
            for place, one in fitted.items()
        }
        return waiting, powers


def _parts(period: RankEnergy, spans: Sequence[InstructionSpan]) -> tuple[float, float, float]:
    """Seconds of forwards, backwards and waiting in a period; ``spans`` are sorted."""
    seconds = dict.fromkeys(InstructionKind, 0.0)
    first = max(bisect_right(spans, period.start, key=_start) - 1, 0)
    for span in spans[first : bisect_left(spans, period.end, key=_start)]:
        inside = min(span.end, period.end) - max(span.start, period.start)
        seconds[span.instruction.kind] += max(inside, 0.0)
    forward, backward = seconds[InstructionKind.FORWARD], seconds[InstructionKind.BACKWARD]
    return forward, backward, max(period.end - period.start - forward - backward, 0.0)


def _start(span: InstructionSpan) -> float:
    return span.start


def _with_parts(clocks: Sequence[int], step: int) -> list[int]:
    """The clocks and up to three between each pair of neighbours, at least ``step`` apart."""
    added = list(clocks)
    for low, high in pairwise(clocks):
        parts = min(_PARTS, (high - low) // max(step, _LEAST_DISTANCE))
        added += [
            low + round((high - low) * part / parts / step) * step for part in range(1, parts)
        ]
    return sorted(set(added))


def _interpolated(measured: Sequence[_Measured], clocks: Iterable[int]) -> list[ClockPoint]:
    """Points at ``clocks``, none above the highest of the measured ones, which are sorted."""
    points = []
    lowest = measured[0]
    for mhz in clocks:
        place = bisect_left(measured, mhz, key=lambda one: one.mhz)
        if place == 0:
            # At worst in proportion to the clock, and without a saving.
            seconds = lowest.seconds * lowest.mhz / mhz
            points.append(ClockPoint(mhz, seconds, lowest.seconds * lowest.watts))
            continue
        low, high = measured[place - 1 : place + 1]
        part = (mhz - low.mhz) / (high.mhz - low.mhz)
        seconds = low.seconds + part * (high.seconds - low.seconds)
        watts = low.watts + part * (high.watts - low.watts)
        points.append(ClockPoint(mhz, seconds, seconds * watts))
    return points


# ------------------------------------------------------------------------------------------ probes


class PipelineProbe(NamedTuple):
    """The clock of each rank in MHz, and the slowdown that is expected at most."""

    clocks: tuple[int, ...]
    slowdown: float


def probe_iterations(dag: PipelineDag) -> int:
    """The iterations of a probe, that in which the clocks change included."""
    return 1 + math.ceil(_PROBE_EXECUTIONS / dag.microbatch_count)


def probe_completed(profile: OnlineProfile, dag: PipelineDag, clocks: Sequence[int]) -> bool:
    """True if these clocks of all ranks were measured often enough."""
    return all(
        profile.executions(one.cost_key, clocks[rank]) >= _PROBE_EXECUTIONS
        for one, rank in zip(dag.instructions, dag.ranks, strict=True)
    )


class PipelineProbes:
    """The measured clocks of each rank, and the iterations that are expected at lower ones.

    ``clocks`` are those that may be measured, from the original one downwards.
    """

    def __init__(self, profile: OnlineProfile, dag: PipelineDag, clocks: Sequence[int]) -> None:
        self._dag, self._profile, self._original = dag, profile, clocks[0]
        self._keys = {
            rank: {one.cost_key for one in order} for rank, order in enumerate(dag.orders)
        }
        self._deepest = {rank: min(self._measured(rank)) for rank in self._keys}
        self._lower: Mapping[int, int] = {
            rank: lower
            for rank, deepest in self._deepest.items()
            if (lower := next((mhz for mhz in clocks if mhz < deepest), None))
        }
        self._usual = self._makespan({})

    def next(self, limit: float, free: float) -> PipelineProbe | None:
        """The next lower clocks of ranks for which an iteration longer by ``limit`` has a use.

        Those of the ranks with the most slack come first, as many as together make the iteration
        longer by ``free`` at most; only then those of all remaining ranks. None if no rank has any.
        """
        now = {rank: {rank: (self._deepest[rank], 1.0)} for rank in self._lower}
        useful = [rank for rank, of in now.items() if self._makespan(of) / self._usual - 1 < limit]
        useful.sort(key=lambda rank: (self._slowdown([rank]), rank))
        cheap: list[int] = []
        for rank in useful:
            if self._slowdown([*cheap, rank]) <= free:
                cheap.append(rank)
        chosen = cheap or useful
        if not chosen:
            return None
        clocks = tuple(
            self._lower[rank] if rank in chosen else self._original for rank in self._keys
        )
        return PipelineProbe(clocks, self._slowdown(chosen))

    def _slowdown(self, ranks: list[int]) -> float:
        """The expected slowdown with the next lower clocks of these ranks."""
        lowered = {rank: (self._deepest[rank], self._factor(rank)) for rank in ranks}
        return self._makespan(lowered) / self._usual - 1

    def _factor(self, rank: int) -> float:
        """The time at the next lower clock relative to the lowest measured one, at most.

        No instruction is slower than in proportion to the clock.
        """
        deepest, elasticity = self._deepest[rank], 1.0
        before = min((mhz for mhz in self._measured(rank) if mhz > deepest), default=None)
        if before is not None:
            slower = self._seconds(rank, deepest) / self._seconds(rank, before)
            elasticity = _MORE_ELASTIC * math.log(slower) / math.log(before / deepest)
        elasticity = min(max(elasticity, _LEAST_ELASTICITY), 1.0)
        return math.exp(elasticity * math.log(deepest / self._lower[rank]))

    def _measured(self, rank: int) -> set[int]:
        """The clocks at which all instructions of a rank were measured often enough."""
        executions, keys = self._profile.executions, self._keys[rank]
        return {
            mhz
            for _, mhz in self._profile.durations
            if all(executions(key, mhz) >= _PROBE_EXECUTIONS for key in keys)
        }

    def _seconds(self, rank: int, mhz: int) -> float:
        return sum(self._profile.mean(key, mhz) for key in self._keys[rank])

    def _makespan(self, lowered: Mapping[int, tuple[int, float]]) -> float:
        """The iteration time, for the clock and a factor of the durations of some ranks."""
        seconds = {
            key: factor * self._profile.mean(key, mhz)
            for rank, keys in self._keys.items()
            for mhz, factor in (lowered.get(rank, (self._original, 1.0)),)
            for key in keys
        }
        return self._dag.makespan([seconds[one.cost_key] for one in self._dag.instructions])
