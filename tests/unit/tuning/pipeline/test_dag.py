"""Instructions of a pipeline: order, links, schedules, and pipelines that are refused."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from testbed.pipelines import backward, forward

from wattspan.tuning.pipeline.dag import (
    MAX_INSTRUCTIONS,
    BadPipelineError,
    PipelineDag,
    PipelineInstruction,
    PipelineSchedule,
    recognised,
    scheduled,
)

ALTERNATING, GPIPE, INTERLEAVED = PipelineSchedule


def refused(message: str, *orders: list[PipelineInstruction]) -> None:
    with pytest.raises(BadPipelineError, match=re.escape(message)):
        PipelineDag(orders)


def shown(dag: PipelineDag, rank: int) -> str:
    return " ".join(f"{one.kind.value[0]}{one.stage}.{one.microbatch}" for one in dag.orders[rank])


def test_one_f_one_b_orders_are_the_published_ones() -> None:
    dag = scheduled(ALTERNATING, 3, 4)
    assert shown(dag, 0) == "f0.0 f0.1 f0.2 b0.0 f0.3 b0.1 b0.2 b0.3"
    assert shown(dag, 2) == "f2.0 b2.0 f2.1 b2.1 f2.2 b2.2 f2.3 b2.3"


def test_one_f_one_b_with_few_microbatches_is_all_forwards_first() -> None:
    assert shown(scheduled(ALTERNATING, 4, 2), 0) == "f0.0 f0.1 b0.0 b0.1"


def test_gpipe_has_all_forwards_before_the_backwards() -> None:
    assert shown(scheduled(GPIPE, 2, 2), 1) == "f1.0 f1.1 b1.0 b1.1"


def test_interleaved_ranks_alternate_between_their_stages() -> None:
    dag = scheduled(INTERLEAVED, 4, 4, 2)
    assert dag.rank_count == 2
    assert dag.stage_ranks() == {0: 0, 1: 1, 2: 0, 3: 1}
    assert shown(dag, 0).startswith("f0.0 f0.1 f2.0 f2.1 f0.2 b2.0")


def test_makespan_of_equal_stages_is_the_closed_form() -> None:
    """1F1B and GPipe: (micro-batches + stages - 1) times forward and backward."""
    for schedule in (GPIPE, ALTERNATING):
        dag = scheduled(schedule, 4, 6)
        durations = [1.0 if one.kind.value == "forward" else 2.0 for one in dag.instructions]
        assert dag.makespan(durations) == pytest.approx((6 + 4 - 1) * 3.0)


def test_critical_path_is_as_long_as_the_makespan_and_linked() -> None:
    dag = scheduled(ALTERNATING, 3, 5)
    durations = [1.0 + 0.1 * (number % 7) for number in range(len(dag.instructions))]
    path = dag.critical_path(durations)
    assert sum(durations[one] for one in path) == pytest.approx(dag.makespan(durations))
    assert all(before in dag.predecessors[one] for one, before in pairwise(path))


@pytest.mark.parametrize("schedule", PipelineSchedule)
def test_schedule_is_recognised_from_its_orders(schedule: PipelineSchedule) -> None:
    ranks = 2 if schedule is INTERLEAVED else 4
    assert recognised(scheduled(schedule, 4, 8, ranks).orders) is schedule


def test_other_order_is_no_known_schedule() -> None:
    order = [forward(0, 1), forward(0, 0), backward(0, 0), backward(0, 1)]
    assert recognised([order]) is None


def test_cyclic_links_are_refused_with_the_cycle() -> None:
    first = [forward(0, 0), backward(0, 0), forward(0, 1), backward(0, 1)]
    second = [forward(1, 0), forward(1, 1), backward(1, 0), backward(1, 1)]
    refused("The links are cyclic: the backward of micro-batch 0 in stage", first, second)


def test_long_cycle_is_shortened_in_its_message() -> None:
    orders = [
        [one for m in range(2) for one in (forward(stage, m), backward(stage, m))]
        for stage in range(2)
    ]
    orders.append([forward(2, 0), forward(2, 1), backward(2, 0), backward(2, 1)])
    refused("others, of which the last", *orders)


def test_missing_stage_is_refused_by_its_number() -> None:
    refused(
        "Stage 1 of 3 is missing.",
        [forward(0, 0), backward(0, 0)],
        [forward(2, 0), backward(2, 0)],
    )


def test_missing_instruction_is_refused_by_its_name() -> None:
    refused(
        "The backward of micro-batch 1 in stage 0 is missing.",
        [forward(0, 0), backward(0, 0), forward(0, 1)],
    )


def test_incomplete_ranks_are_refused() -> None:
    refused("The pipeline has no instructions.")
    refused("Rank 1 has no instructions.", [forward(0, 0), backward(0, 0)], [])
    refused("is there twice", [forward(0, 0), forward(0, 0)])
    refused("Stage 0 is on rank 0 and on rank 1.", [forward(0, 0)], [backward(0, 0)])
    refused("negative number", [forward(0, 0), backward(0, 0), forward(0, -1)])


def test_too_large_pipelines_are_refused() -> None:
    refused("are the most", [forward(0, number) for number in range(MAX_INSTRUCTIONS + 1)])
    with pytest.raises(BadPipelineError, match="too many"):
        scheduled(GPIPE, 1_000_000_000, 1_000_000_000)


@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches", "ranks", "message"),
    [
        (GPIPE, 0, 1, None, "a stage, a micro-batch and a rank"),
        (ALTERNATING, 4, 4, 2, "Each rank has one stage"),
        (INTERLEAVED, 4, 3, 2, "multiples of its 2 ranks"),
        (INTERLEAVED, 3, 4, 2, "multiples of its 2 ranks"),
    ],
)
def test_impossible_schedules_are_refused(
    schedule: PipelineSchedule, stages: int, microbatches: int, ranks: int | None, message: str
) -> None:
    with pytest.raises(BadPipelineError, match=message):
        scheduled(schedule, stages, microbatches, ranks)
