"""Iterations of a pipeline: put together from the spans of its ranks, in a verified order. Pure.

Each rank reports its units of work, and the instructions in them. The spans of a rank arrive in
batches, seconds apart from those of other ranks, but a unit never before its instructions: a span
is sent after its end. An iteration is a unit of every rank at the same time. Times of units are
monotonic nanoseconds of one host.

The order of instructions is believed only if it was the same in every one of them, on the same
ranks, and if no instruction began before those that it waits for had ended.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean
from types import MappingProxyType
from typing import NamedTuple

from wattspan.fleet.job_records import PipelineSummary
from wattspan.model import SECOND
from wattspan.tuning.decisions.ranks import concurrent_units
from wattspan.tuning.decisions.values import EnergyPoint, WorkUnit
from wattspan.tuning.pipeline.costs import WARM_UP_ITERATIONS
from wattspan.tuning.pipeline.dag import (
    MAX_INSTRUCTIONS,
    BadPipelineError,
    PipelineDag,
    PipelineInstruction,
)

VERIFIED_ITERATIONS = 20
"""Iterations without the first ones that must agree."""

MAX_SKEW = 0.005
"""Seconds by which the clocks of two ranks may differ."""

STRAGGLER_ITERATIONS = 20
"""Iterations in a row that wait for another pipeline, after which it counts as a straggler."""

STRAGGLER_MARGIN = 0.01
"""The part of a straggler's iteration by which a plan for it ends earlier.

The rest of the waiting shows in each iteration whether the straggler is still as slow.
"""

_LEAST_WAIT = 2 * STRAGGLER_MARGIN
_RECOVERED_WAIT = STRAGGLER_MARGIN / 4

PARTNER_GROWTH = 1.02
"""Relative growth of iterations by which clocks for a pipeline of another host were wrong."""

PARTNER_CHECKED = 5
"""Iterations at new clocks, and before them, whose means are compared for that."""


class InstructionSpan(NamedTuple):
    """One execution of an instruction on a rank; times in seconds of any common clock."""

    iteration: int
    rank: int
    instruction: PipelineInstruction
    start: float
    end: float


class RankEnergy(NamedTuple):
    """Energy of one rank's device in joules between two instants in seconds."""

    rank: int
    start: float
    end: float
    joules: float


class PipelineIteration(NamedTuple):
    """One finished iteration.

    ``spans`` are its instructions, ``clocks`` the SM clock of each rank in MHz, None unless they
    are known and did not change in the iteration. ``energy`` has consecutive periods of each rank
    in which the clocks did not change; the first ones may be in the iteration before. ``waited``
    are the seconds after the last instruction for which all ranks waited for other data-parallel
    pipelines, ``partner`` is the last one of these if it is on another host. ``lasted`` are the
    seconds of the units of all ranks, which end when all pipelines have exchanged their gradients.
    """

    spans: tuple[InstructionSpan, ...]
    clocks: tuple[int, ...] | None
    energy: tuple[RankEnergy, ...] = ()
    waited: float = 0.0
    partner: str = ""
    lasted: float = 0.0

    @property
    def number(self) -> int:
        return self.spans[0].iteration

    @property
    def seconds(self) -> float:
        """From the start of the first instruction to the end of the last one."""
        return max(one.end for one in self.spans) - min(one.start for one in self.spans)

    @property
    def whole(self) -> float:
        """The seconds with the waiting for other pipelines."""
        return self.seconds + self.waited

    def watts(self, ranks: int) -> float | None:
        """The mean power of ``ranks`` devices together; None unless that of each is known."""
        each = self.rank_watts(ranks)
        return None if each is None else sum(each)

    def rank_watts(self, ranks: int) -> tuple[float, ...] | None:
        """The mean power of each of ``ranks`` devices; None unless all are known."""
        joules, seconds = [0.0] * ranks, [0.0] * ranks
        for one in self.energy:
            joules[one.rank] += one.joules
            seconds[one.rank] += one.end - one.start
        if min(seconds) <= 0:
            return None
        return tuple(energy / lasted for energy, lasted in zip(joules, seconds, strict=True))


@dataclass(frozen=True, slots=True)
class StragglerWatch:
    """The iteration times of the slowest other pipeline, in the latest iterations that waited.

    ``lasted`` are the seconds of the units in these. ``partner`` is the slowest pipeline of the
    latest one, if it is on another host.
    """

    times: tuple[float, ...] = ()
    lasted: tuple[float, ...] = ()
    partner: str = ""

    def add(self, iteration: PipelineIteration, *, planned: bool = False) -> StragglerWatch:
        """Add an iteration; ``planned`` if it had the clocks of a plan for the straggler."""
        seconds, waited = iteration.seconds, iteration.waited
        if waited <= (_RECOVERED_WAIT if planned else _LEAST_WAIT) * seconds:
            return StragglerWatch()
        return StragglerWatch(
            (*self.times[1 - STRAGGLER_ITERATIONS :], seconds + waited),
            (*self.lasted[1 - STRAGGLER_ITERATIONS :], iteration.lasted),
            iteration.partner,
        )

    @property
    def usual(self) -> float:
        """The mean seconds of the latest units; at least one iteration has waited."""
        return fmean(self.lasted[-PARTNER_CHECKED:])

    @property
    def waits(self) -> bool:
        """True if the latest iteration waited for another pipeline."""
        return bool(self.times)

    @property
    def straggler(self) -> float | None:
        """The least of the straggler's iteration times in seconds; None without a straggler."""
        return min(self.times) if len(self.times) == STRAGGLER_ITERATIONS else None


# --------------------------------------------------------------------------- order of instructions


def observed(spans: Iterable[InstructionSpan]) -> PipelineDag:
    """The pipeline whose iterations the spans are; BadPipelineError if they disagree.

    Iterations 0 and 1 are left out. Instructions are in the order of their starts on each rank.
    """
    iterations: dict[int, list[InstructionSpan]] = defaultdict(list)
    for span in spans:
        if span.iteration >= WARM_UP_ITERATIONS:
            iterations[span.iteration].append(span)
    if len(iterations) < VERIFIED_ITERATIONS:
        raise BadPipelineError(
            f"{len(iterations)} iterations after the first {WARM_UP_ITERATIONS} are known, and"
            f" {VERIFIED_ITERATIONS} are needed."
        )
    first = min(iterations)
    ranks = _by_rank(iterations[first])
    if sorted(ranks) != list(range(len(ranks))):
        raise BadPipelineError(f"The ranks are {_listed(ranks)}, and not 0 to {len(ranks) - 1}.")
    dag = PipelineDag(_orders(ranks))
    for number, of_iteration in sorted(iterations.items()):
        require_same(dag, of_iteration, number, first)
    return dag


def require_same(
    dag: PipelineDag, spans: Iterable[InstructionSpan], iteration: int, first: int
) -> None:
    """BadPipelineError unless the spans of one iteration are those of ``dag``, in its order.

    ``first`` is the number of the iteration that ``dag`` is from, for the message.
    """
    own = _by_rank(spans)
    ranks = range(dag.rank_count)
    if own.keys() != set(ranks):
        raise BadPipelineError(
            f"The ranks changed: {_listed(ranks)} in iteration {first}, {_listed(own)} in"
            f" iteration {iteration}."
        )
    for rank, (known, order) in enumerate(zip(dag.orders, _orders(own), strict=True)):
        if list(known) != order:
            raise BadPipelineError(
                f"The order on rank {rank} in iteration {iteration} is not that of iteration"
                f" {first}."
            )
    _require_causal(dag, [one for of_rank in own.values() for one in of_rank], iteration)


def _by_rank(spans: Iterable[InstructionSpan]) -> Mapping[int, list[InstructionSpan]]:
    ranks: dict[int, list[InstructionSpan]] = defaultdict(list)
    for span in spans:
        ranks[span.rank].append(span)
    return ranks


def _orders(ranks: Mapping[int, Sequence[InstructionSpan]]) -> list[list[PipelineInstruction]]:
    return [
        [span.instruction for span in sorted(ranks[rank], key=lambda one: (one.start, one.end))]
        for rank in sorted(ranks)
    ]


def _require_causal(dag: PipelineDag, spans: Iterable[InstructionSpan], iteration: int) -> None:
    """BadPipelineError if an instruction began before one that it waits for had ended."""
    known = {span.instruction: span for span in spans}
    for number, instruction in enumerate(dag.instructions):
        span = known[instruction]
        for before in dag.predecessors[number]:
            sent = known[dag.instructions[before]]
            early = sent.end - span.start
            if early <= MAX_SKEW:
                continue
            if sent.rank == span.rank:
                raise BadPipelineError(
                    f"Two instructions overlap on rank {span.rank} in iteration {iteration}: the"
                    f" {sent.instruction} and the {instruction}."
                )
            raise BadPipelineError(
                f"The clocks of ranks {sent.rank} and {span.rank} differ by"
                f" {early * 1e3:.0f} ms at least in iteration {iteration}, more than"
                f" {MAX_SKEW * 1e3:.0f} ms: the {instruction} begins before the"
                f" {sent.instruction} has ended."
            )


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)[:16]))


# ------------------------------------------------------------------------------------ assembly

MOST_AHEAD = 8
"""Units of lead of one rank after which a rank without any counts as ended."""


class RankInstruction(NamedTuple):
    """One executed instruction of a rank."""

    rank: int
    instruction: PipelineInstruction
    start: int
    end: int

    def span(self, iteration: int, rank: int) -> InstructionSpan:
        """The same in seconds, with the numbers of its iteration and of its rank in that."""
        start, end = self.start / SECOND, self.end / SECOND
        return InstructionSpan(iteration, rank, self.instruction, start, end)


class AssembledIteration(NamedTuple):
    """The units of one iteration, in the order of their ranks, and their instructions.

    ``start`` is that of the first unit and ``end`` that of the last one.
    """

    number: int
    units: tuple[WorkUnit, ...]
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

    units: Mapping[int, tuple[WorkUnit, ...]] = field(default_factory=dict)
    instructions: Mapping[int, tuple[RankInstruction, ...]] = field(default_factory=dict)
    number: int = 0

    def add(
        self, units: Iterable[WorkUnit], instructions: Iterable[RankInstruction]
    ) -> tuple[IterationAssembly, tuple[AssembledIteration, ...]]:
        """Add spans in any order; returns the iterations that they complete too."""
        known = {rank: list(of) for rank, of in self.units.items()}
        pending = {rank: list(of) for rank, of in self.instructions.items()}
        for unit in units:
            known.setdefault(unit.rank, []).append(unit)
        for one in instructions:
            if one.start < one.end:
                pending.setdefault(one.rank, []).append(one)
        waiting = {
            rank: deque(sorted(of, key=lambda unit: unit.start))
            for rank, of in sorted(known.items())
        }
        found: list[AssembledIteration] = []
        for heads in concurrent_units(waiting, MOST_AHEAD, _are_concurrent):
            inside = tuple(one for unit in heads for one in take_inside(unit, pending))
            if inside:
                found.append(AssembledIteration(self.number + len(found), tuple(heads), inside))
        return replace(
            self,
            units={rank: tuple(of) for rank, of in waiting.items()},
            instructions={rank: tuple(of[-MAX_INSTRUCTIONS:]) for rank, of in pending.items()},
            number=self.number + len(found),
        ), tuple(found)


def _are_concurrent(units: Sequence[WorkUnit]) -> bool:
    return max(unit.start for unit in units) < min(unit.end for unit in units)


def take_inside(unit: WorkUnit, pending: dict[int, list[RankInstruction]]) -> list[RankInstruction]:
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
    spans = (one.span(iteration.number, numbers[one.rank]) for one in iteration.instructions)
    steady = [_steady(clocks.get(rank, ()), iteration) for rank in ranks]
    known = _complete(steady)
    periods: list[RankEnergy] = []
    for number, (rank, change) in enumerate(zip(ranks, steady, strict=True)):
        if known is not None and change is not None:
            since, until = after.get(rank, iteration.start), iteration.end
            periods += _periods(number, energy.get(rank, ()), change.since, since, until)
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
    waited, lasted = max(latest - computed, 0), iteration.end - iteration.start
    figures = waited / SECOND, slowest, lasted / SECOND
    return PipelineIteration(tuple(spans), known, tuple(periods), *figures)


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
