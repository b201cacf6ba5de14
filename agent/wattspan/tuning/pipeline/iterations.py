"""Finished iterations of a pipeline: their spans, their order and the waiting at their ends.

The order of instructions is believed only if it was the same in every one of them, on the same
ranks, and if no instruction began before those that it waits for had ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from wattspan.tuning.pipeline.costs import WARM_UP_ITERATIONS
from wattspan.tuning.pipeline.dag import BadPipelineError, PipelineDag, PipelineInstruction

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


def _orders(
    ranks: Mapping[int, Sequence[InstructionSpan]],
) -> list[list[PipelineInstruction]]:
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
