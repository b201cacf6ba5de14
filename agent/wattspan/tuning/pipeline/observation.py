"""The order of a pipeline's instructions, from the spans of several iterations.

The order is believed only if it was the same in every one of them, on the same ranks, and if no
instruction began before those that it waits for had ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from wattspan.tuning.pipeline.costs import WARM_UP_ITERATIONS
from wattspan.tuning.pipeline.dag import BadPipelineError, PipelineDag, PipelineInstruction

VERIFIED_ITERATIONS = 20
"""Iterations without the first ones that must agree."""

MAX_SKEW = 0.005
"""Seconds by which the clocks of two ranks may differ."""


class InstructionSpan(NamedTuple):
    """One execution of an instruction on a rank; times in seconds of any common clock."""

    iteration: int
    rank: int
    instruction: PipelineInstruction
    start: float
    end: float


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
