"""The usual orders of instructions on the ranks of a pipeline: GPipe, 1F1B and interleaved 1F1B."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from wattspan.tuning.pipeline.dag import (
    MAX_INSTRUCTIONS,
    BadPipelineError,
    InstructionKind,
    PipelineDag,
    PipelineInstruction,
)

_FORWARD, _BACKWARD = InstructionKind.FORWARD, InstructionKind.BACKWARD


class PipelineSchedule(Enum):
    """The order in which every rank executes its instructions.

    GPIPE: all forwards, then all backwards (Huang et al. 2019). ONE_F_ONE_B: after some forwards,
    a forward and a backward in turn (PipeDream-Flush, Narayanan et al. 2021). INTERLEAVED: the same
    with several stages on each rank, stage ``s`` on rank ``s % ranks`` (Megatron-LM).
    """

    ONE_F_ONE_B = "1f1b"
    GPIPE = "gpipe"
    INTERLEAVED = "interleaved"


def scheduled(
    schedule: PipelineSchedule, stages: int, microbatches: int, ranks: int | None = None
) -> PipelineDag:
    """The pipeline of a schedule; ``ranks`` differs from ``stages`` if it is interleaved.

    BadPipelineError for numbers that the schedule does not allow.
    """
    ranks = stages if ranks is None else ranks
    if min(stages, microbatches, ranks) < 1:
        raise BadPipelineError("A pipeline needs a stage, a micro-batch and a rank at least.")
    if 2 * stages * microbatches > MAX_INSTRUCTIONS:
        raise BadPipelineError(
            f"{stages} stages and {microbatches} micro-batches are too many: {MAX_INSTRUCTIONS}"
            " instructions are the most."
        )
    if schedule is not PipelineSchedule.INTERLEAVED:
        if ranks != stages:
            raise BadPipelineError(
                f"Each rank has one stage in the schedule {schedule.value}, and there are {stages}"
                f" stages and {ranks} ranks. The schedule interleaved has several."
            )
        return PipelineDag(
            [
                _gpipe(stage, microbatches)
                if schedule is PipelineSchedule.GPIPE
                else _one_f_one_b(stage, stages, microbatches)
                for stage in range(stages)
            ]
        )
    if stages % ranks or microbatches % ranks:
        raise BadPipelineError(
            f"The schedule interleaved needs multiples of its {ranks} ranks, and there are {stages}"
            f" stages and {microbatches} micro-batches."
        )
    return PipelineDag([_interleaved(rank, ranks, stages, microbatches) for rank in range(ranks)])


def recognised(orders: Sequence[Sequence[PipelineInstruction]]) -> PipelineSchedule | None:
    """The schedule with exactly these orders, the first one of several; None for another order."""
    dag = PipelineDag(orders)
    for schedule in PipelineSchedule:
        try:
            known = scheduled(schedule, dag.stage_count, dag.microbatch_count, dag.rank_count)
        except BadPipelineError:
            continue
        if known.orders == dag.orders:
            return schedule
    return None


def _gpipe(stage: int, microbatches: int) -> list[PipelineInstruction]:
    return [
        PipelineInstruction(stage, kind, number)
        for kind in (_FORWARD, _BACKWARD)
        for number in range(microbatches)
    ]


def _one_f_one_b(stage: int, stages: int, microbatches: int) -> list[PipelineInstruction]:
    forwards = [PipelineInstruction(stage, _FORWARD, number) for number in range(microbatches)]
    backwards = [PipelineInstruction(stage, _BACKWARD, number) for number in range(microbatches)]
    return _alternating(forwards, backwards, stages - stage - 1)


def _interleaved(
    rank: int, ranks: int, stages: int, microbatches: int
) -> list[PipelineInstruction]:
    chunks = stages // ranks
    forwards, backwards = [], []
    for number in range(microbatches * chunks):
        # Groups of so many micro-batches as ranks pass through one stage of the rank after another.
        group, place = divmod(number, ranks * chunks)
        chunk, offset = divmod(place, ranks)
        microbatch = group * ranks + offset
        forwards.append(PipelineInstruction(chunk * ranks + rank, _FORWARD, microbatch))
        backward_chunk = chunks - 1 - chunk
        backwards.append(PipelineInstruction(backward_chunk * ranks + rank, _BACKWARD, microbatch))
    return _alternating(forwards, backwards, (ranks - rank - 1) * 2 + (chunks - 1) * ranks)


def _alternating(
    forwards: list[PipelineInstruction], backwards: list[PipelineInstruction], ahead: int
) -> list[PipelineInstruction]:
    """``ahead`` forwards, a forward and a backward in turn, and the remaining backwards."""
    ahead = min(ahead, len(forwards))
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += forward, backward
    return order + backwards[len(forwards) - ahead :]
