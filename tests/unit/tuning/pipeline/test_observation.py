"""The order of a pipeline from spans: verified iterations, and spans that are refused."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from testbed.pipelines import executed

from wattspan.tuning.pipeline.dag import BadPipelineError, PipelineSchedule, recognised, scheduled
from wattspan.tuning.pipeline.iterations import InstructionSpan, observed

DAG = scheduled(PipelineSchedule.ONE_F_ONE_B, 3, 4)
SPANS = executed(DAG)


def refused(message: str, spans: list[InstructionSpan]) -> None:
    with pytest.raises(BadPipelineError, match=message):
        observed(spans)


def altered(
    chosen: Callable[[InstructionSpan], bool], change: Callable[[InstructionSpan], InstructionSpan]
) -> list[InstructionSpan]:
    return [change(span) if chosen(span) else span for span in SPANS]


def later(span: InstructionSpan, seconds: float) -> InstructionSpan:
    return span._replace(start=span.start + seconds, end=span.end + seconds)


@pytest.mark.parametrize("schedule", PipelineSchedule)
def test_order_of_spans_in_any_sequence_is_that_of_the_pipeline(schedule: PipelineSchedule) -> None:
    ranks = 2 if schedule is PipelineSchedule.INTERLEAVED else 4
    dag = scheduled(schedule, 4, 8, ranks)
    spans = executed(dag)
    random.Random(0).shuffle(spans)
    found = observed(spans)
    assert found.orders == dag.orders
    assert recognised(found.orders) is schedule


def test_first_iterations_need_not_agree() -> None:
    spans = altered(lambda span: span.iteration < 2, lambda span: later(span, span.rank * 7.0))
    assert observed(spans).orders == DAG.orders


def test_too_few_iterations_are_refused_by_their_number() -> None:
    refused("19 iterations after the first 2", executed(DAG, 21))


def test_skew_of_5_ms_is_accepted_and_more_is_refused_with_the_ranks() -> None:
    skewed = altered(lambda span: span.rank == 1, lambda span: later(span, 0.0049))
    assert observed(skewed).orders == DAG.orders
    skewed = altered(lambda span: span.rank == 1, lambda span: later(span, -0.008))
    refused("clocks of ranks 0 and 1 differ by 8 ms at least in iteration 2", skewed)


def test_instructions_that_overlap_on_a_rank_are_refused() -> None:
    overlapping = altered(
        lambda span: span.rank == 2, lambda span: span._replace(end=span.end + 0.05)
    )
    refused("overlap on rank 2 in iteration 2", overlapping)


def test_changed_ranks_are_refused_with_both_sets() -> None:
    changed = [span for span in SPANS if (span.iteration, span.rank) != (9, 1)]
    refused("ranks changed: 0, 1, 2 in iteration 2, 0, 2 in iteration 9", changed)


def test_missing_rank_is_refused() -> None:
    refused("The ranks are 0, 2, and not 0 to 1", [span for span in SPANS if span.rank != 1])


def test_other_order_in_one_iteration_is_refused() -> None:
    moved = altered(
        lambda span: span.iteration == 7 and span.rank == 0 and span.instruction.microbatch == 3,
        lambda span: later(span, -50.0),
    )
    refused("order on rank 0 in iteration 7 is not that of iteration 2", moved)


def test_missing_instruction_is_refused_by_its_name() -> None:
    missing = [span for span in SPANS if span.instruction != DAG.instructions[5]]
    refused(f"The {DAG.instructions[5]} is missing", missing)
