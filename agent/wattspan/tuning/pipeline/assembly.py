"""Iterations of a running pipeline, put together from the spans of its ranks.

Each rank reports its units of work, and the instructions in them. The spans of a rank arrive in
batches, seconds apart from those of other ranks, but a unit never before its instructions: a span
is sent after its end. An iteration is a unit of every rank at the same time. Times are monotonic
nanoseconds of one host.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from wattspan.fleet.job_records import PipelineSummary
from wattspan.model import SECOND
from wattspan.tuning.decisions.values import EnergyPoint
from wattspan.tuning.pipeline.dag import MAX_INSTRUCTIONS, PipelineInstruction
from wattspan.tuning.pipeline.iterations import InstructionSpan, PipelineIteration, RankEnergy

MOST_AHEAD = 8
"""Units of lead of one rank after which a rank without any counts as ended."""


class RankUnit(NamedTuple):
    """One unit of work of a rank."""

    rank: int
    start: int
    end: int


class RankInstruction(NamedTuple):
    """One executed instruction of a rank."""

    rank: int
    instruction: PipelineInstruction
    start: int
    end: int


class AssembledIteration(NamedTuple):
    """The units of one iteration, in the order of their ranks, and their instructions.

    ``start`` is that of the first unit and ``end`` that of the last one.
    """

    number: int
    units: tuple[RankUnit, ...]
    instructions: tuple[RankInstruction, ...]

    @property
    def start(self) -> int:
        return min(unit.start for unit in self.units)

    @property
    def end(self) -> int:
        return max(unit.end for unit in self.units)

    @property
    def computed(self) -> int:
        """The end of the last instruction."""
        return max(one.end for one in self.instructions)


class IterationTimes(NamedTuple):
    """An iteration of another data-parallel pipeline.

    ``computed`` is the end of its last instruction if all ranks had their original clocks.
    """

    start: int
    end: int
    computed: int

    def coincides(self, start: int, end: int) -> bool:
        """True if an iteration from ``start`` to ``end`` is the same one of the job.

        They overlap for half of the shorter one at least: their pipelines wait for each other at
        the end of each iteration, and begin the next one within a moment.
        """
        shared = min(self.end, end) - max(self.start, start)
        return 2 * shared >= min(self.end - self.start, end - start)


@dataclass(frozen=True, slots=True)
class IterationAssembly:
    """The spans of iterations that are not complete yet.

    ``units`` are those of each rank in the order of their starts, ``instructions`` are later than
    the latest iteration. A rank whose units are missing for MOST_AHEAD iterations is dropped: the
    following iterations have other ranks.
    """

    units: Mapping[int, tuple[RankUnit, ...]] = field(default_factory=dict)
    instructions: Mapping[int, tuple[RankInstruction, ...]] = field(default_factory=dict)
    number: int = 0

    def add(
        self, units: Iterable[RankUnit], instructions: Iterable[RankInstruction]
    ) -> tuple[IterationAssembly, tuple[AssembledIteration, ...]]:
        """Add spans in any order; returns the iterations that they complete too."""
        waiting = {rank: list(of) for rank, of in self.units.items()}
        pending = {rank: list(of) for rank, of in self.instructions.items()}
        for unit in units:
            waiting.setdefault(unit.rank, []).append(unit)
        for one in instructions:
            if one.start < one.end:
                pending.setdefault(one.rank, []).append(one)
        for of_rank in waiting.values():
            of_rank.sort(key=lambda unit: unit.start)
        found: list[AssembledIteration] = []
        while waiting:
            behind = [rank for rank, of in waiting.items() if not of]
            if behind:
                if max(map(len, waiting.values())) <= MOST_AHEAD:
                    break
                for rank in behind:
                    del waiting[rank]
                continue
            heads = [waiting[rank][0] for rank in sorted(waiting)]
            first = min(heads, key=lambda unit: unit.end)
            if max(unit.start for unit in heads) >= first.end:
                del waiting[first.rank][0]  # no other rank worked at the time
                continue
            inside = tuple(one for unit in heads for one in take_inside(unit, pending))
            for unit in heads:
                del waiting[unit.rank][0]
            if inside:
                found.append(AssembledIteration(self.number + len(found), tuple(heads), inside))
        return replace(
            self,
            units={rank: tuple(of) for rank, of in waiting.items()},
            instructions={rank: tuple(of[-MAX_INSTRUCTIONS:]) for rank, of in pending.items()},
            number=self.number + len(found),
        ), tuple(found)


def take_inside(unit: RankUnit, pending: dict[int, list[RankInstruction]]) -> list[RankInstruction]:
    """Take the instructions of a unit; earlier ones are dropped, since they have no unit."""
    known = pending.get(unit.rank, [])
    inside = [one for one in known if unit.start <= one.start and one.end <= unit.end]
    pending[unit.rank] = [one for one in known if one.start >= unit.end]
    return inside


class ClockChange(NamedTuple):
    """A clock in MHz that a rank has from ``since``; None: not known."""

    since: int
    mhz: int | None


def finished(
    iteration: AssembledIteration,
    clocks: Mapping[int, Sequence[ClockChange]],
    energy: Mapping[int, Sequence[EnergyPoint]],
    others: Iterable[IterationTimes] = (),
    after: Mapping[int, int] = MappingProxyType({}),
    partners: Mapping[str, PipelineSummary] = MappingProxyType({}),
) -> PipelineIteration:
    """The iteration as a session uses it; its ranks are numbered from 0 in their order.

    ``clocks`` and ``energy`` are those of each rank's device, sorted by time; ``energy`` are
    cumulative microjoules; points before the iteration are used if they are later than that of the
    rank in ``after``. ``others`` are iterations of other data-parallel pipelines of the job: all
    wait for the last one at the same time. ``partners`` are those of other hosts by name.
    """
    ranks = [unit.rank for unit in iteration.units]
    numbers = {rank: number for number, rank in enumerate(ranks)}
    spans = tuple(
        InstructionSpan(
            iteration.number,
            numbers[one.rank],
            one.instruction,
            one.start / SECOND,
            one.end / SECOND,
        )
        for one in iteration.instructions
    )
    steady = [_steady(clocks.get(rank, ()), iteration) for rank in ranks]
    known = _complete(steady)
    computed = iteration.computed
    latest = max(
        (other.computed for other in others if other.coincides(iteration.start, iteration.end)),
        default=computed,
    )
    slowest = ""
    for name, partner in partners.items():
        last = partner.finishes(iteration.start, iteration.end)
        if last > max(latest, computed):
            latest, slowest = last, name
    return PipelineIteration(
        spans,
        known,
        tuple(
            period
            for number, (rank, change) in enumerate(zip(ranks, steady, strict=True))
            if known is not None and change is not None
            for period in _periods(
                number,
                energy.get(rank, ()),
                change.since,
                after.get(rank, iteration.start),
                iteration.end,
            )
        ),
        max(latest - computed, 0) / SECOND,
        slowest,
        (iteration.end - iteration.start) / SECOND,
    )


def steady_clocks(
    iteration: AssembledIteration, clocks: Mapping[int, Sequence[ClockChange]]
) -> tuple[int, ...] | None:
    """The clock of each rank in MHz; None unless all are known and did not change."""
    return _complete([_steady(clocks.get(unit.rank, ()), iteration) for unit in iteration.units])


def _complete(steady: Sequence[ClockChange | None]) -> tuple[int, ...] | None:
    known = tuple(one.mhz for one in steady if one is not None and one.mhz is not None)
    return known if len(known) == len(steady) else None


def _steady(changes: Sequence[ClockChange], iteration: AssembledIteration) -> ClockChange | None:
    """The clock during the whole iteration; None if it changed or is not known."""
    before = bisect_right(changes, iteration.start, key=lambda one: one.since)
    if not before or before < bisect_right(changes, iteration.end, key=lambda one: one.since):
        return None
    return changes[before - 1]


def _periods(
    number: int, points: Sequence[EnergyPoint], since: int, after: int, end: int
) -> list[RankEnergy]:
    """Periods between points that end within ``after`` and ``end``, and begin from ``since``."""
    return [
        RankEnergy(
            number, one.at / SECOND, other.at / SECOND, (other.energy - one.energy) / 1_000_000
        )
        for one, other in pairwise(points)
        if after < other.at <= end and one.at >= since
    ]
