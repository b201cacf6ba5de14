"""Instructions of a pipeline's ranks, from the spans of their processes."""

from __future__ import annotations

from collections import deque

from wattspan.model import Consumer
from wattspan.tuning.pipeline.assembly import RankInstruction
from wattspan.tuning.pipeline.dag import InstructionKind, PipelineInstruction
from wattspan.tuning.work_units import ReceivedSpans, RepeatedSpans, has_ended

_MAX_WAITING = 1 << 17
"""Instructions between two steps of the tuner; the oldest are dropped."""


class RankInstructions:
    """The instructions of one job, from the spans of its processes.

    ``replicas`` names the pipeline of each rank that has reported an instruction.
    """

    def __init__(self) -> None:
        self._waiting: deque[RankInstruction] = deque(maxlen=_MAX_WAITING)
        self._repeated: dict[Consumer, RepeatedSpans] = {}
        self.replicas: dict[int, str] = {}

    def add(self, received: ReceivedSpans, rank: int, now: int) -> None:
        """Add the instructions of one rank; those received before are ignored."""
        if not any(received.spans.instruction):
            return
        repeated = self._repeated.setdefault(received.consumer, RepeatedSpans())
        for span, one in zip(received.spans, received.spans.instruction, strict=True):
            if one is None or not has_ended(span, now) or repeated.add(received.consumer, span):
                continue
            instruction = PipelineInstruction(one.stage, InstructionKind(one.kind), one.microbatch)
            self.replicas[rank] = one.replica
            self._waiting.append(RankInstruction(rank, instruction, span.start, span.end))

    def drain(self) -> tuple[RankInstruction, ...]:
        """Remove and return the instructions that have arrived since the last call."""
        found = tuple(self._waiting)
        self._waiting.clear()
        return found
