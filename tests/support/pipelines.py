"""Small pipelines with simple costs."""

from __future__ import annotations

from collections.abc import Sequence

from wattspan.tuning.pipeline.costs import ClockPoint, PipelineProfile
from wattspan.tuning.pipeline.dag import (
    CostKey,
    InstructionKind,
    PipelineDag,
    PipelineInstruction,
)
from wattspan.tuning.pipeline.frontier import PipelineModel
from wattspan.tuning.pipeline.observation import InstructionSpan
from wattspan.tuning.pipeline.schedules import PipelineSchedule, scheduled

FORWARD, BACKWARD = InstructionKind.FORWARD, InstructionKind.BACKWARD
WATTS = 70.0


def forward(stage: int, microbatch: int) -> PipelineInstruction:
    return PipelineInstruction(stage, FORWARD, microbatch)


def backward(stage: int, microbatch: int) -> PipelineInstruction:
    return PipelineInstruction(stage, BACKWARD, microbatch)


def profile(
    bases: Sequence[float], clocks: Sequence[int] = (1000, 1200, 1400, 1600)
) -> PipelineProfile:
    """Stages whose forward takes so many seconds at 1600 MHz, and the backward twice as long."""
    return PipelineProfile(
        {
            CostKey(stage, kind): [_point(mhz, passes * base) for mhz in clocks]
            for stage, base in enumerate(bases)
            for kind, passes in ((FORWARD, 1), (BACKWARD, 2))
        }
    )


def _point(mhz: int, base: float) -> ClockPoint:
    seconds = base * 1600 / mhz
    return ClockPoint(mhz, seconds, seconds * (WATTS + 200 * (mhz / 1600) ** 3))


def executed(dag: PipelineDag, iterations: int = 22) -> list[InstructionSpan]:
    """Spans of a pipeline in which a forward takes 0.1 s and a backward 0.2 s."""
    starts: list[float] = []
    ends: list[float] = []
    for one, before in zip(dag.instructions, dag.predecessors, strict=True):
        starts.append(max((ends[number] for number in before), default=0.0))
        ends.append(starts[-1] + (0.1 if one.kind is FORWARD else 0.2))
    return [
        InstructionSpan(number, rank, one, start + 100 * number, end + 100 * number)
        for number in range(iterations)
        for one, rank, start, end in zip(dag.instructions, dag.ranks, starts, ends, strict=True)
    ]


def model(
    bases: Sequence[float] = (0.1, 0.08, 0.1),
    microbatches: int = 4,
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B,
) -> PipelineModel:
    dag = scheduled(schedule, len(bases), microbatches)
    return PipelineModel(dag, profile(bases), WATTS)
