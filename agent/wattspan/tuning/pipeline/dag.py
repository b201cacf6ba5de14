"""The instructions of one pipeline-parallel iteration, their links and usual orders.

An instruction is the forward or backward pass of one micro-batch through one stage. A rank executes
its instructions one after the other. A forward waits for the forward of the stage before, a
backward for the backward of the stage after, and the backward of the last stage for its forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

MAX_INSTRUCTIONS = 16_384
"""Instructions of one iteration; a larger pipeline is refused."""


class BadPipelineError(ValueError):
    """The pipeline cannot be planned; the message names the thing at fault."""


class InstructionKind(Enum):
    """The two passes that are planned; the value is the name in profiles and plans."""

    FORWARD = "forward"
    BACKWARD = "backward"


class PipelineInstruction(NamedTuple):
    """One pass of one micro-batch through one stage, both numbered from 0."""

    stage: int
    kind: InstructionKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value} of micro-batch {self.microbatch} in stage {self.stage}"

    @property
    def cost_key(self) -> CostKey:
        """Instructions with the same key have the same cost."""
        return CostKey(self.stage, self.kind)


class CostKey(NamedTuple):
    """The instructions of one stage and kind, for all micro-batches."""

    stage: int
    kind: InstructionKind

    def __str__(self) -> str:
        return f"{self.kind.value} of stage {self.stage}"


class PipelineDag:
    """The instructions of an iteration in an order in which every one follows its predecessors.

    ``ranks[i]`` executes ``instructions[i]``, which waits for the instructions of the numbers
    ``predecessors[i]``. Immutable.
    """

    def __init__(self, orders: Sequence[Sequence[PipelineInstruction]]) -> None:
        """``orders`` has the instructions of each rank in their order.

        BadPipelineError for missing or repeated instructions, and for links that form a cycle.
        """
        count = sum(map(len, orders))
        if not count:
            raise BadPipelineError("The pipeline has no instructions.")
        if count > MAX_INSTRUCTIONS:
            raise BadPipelineError(
                f"The pipeline has {count} instructions and {MAX_INSTRUCTIONS} are the most."
            )
        self.rank_count = len(orders)
        self.orders = tuple(tuple(order) for order in orders)
        ranks = _ranks(self.orders)
        self.stage_count, self.microbatch_count = _require_complete(ranks)
        before = _links(self.orders, self.stage_count)
        self.instructions = _sorted_by_links(before)
        numbers = {one: number for number, one in enumerate(self.instructions)}
        self.ranks = tuple(ranks[one] for one in self.instructions)
        self.predecessors = tuple(
            tuple(numbers[link] for link in before[one]) for one in self.instructions
        )

    def makespan(self, durations: Sequence[float]) -> float:
        """The end of the last instruction, if each begins as early as possible."""
        return max(self._ends(durations))

    def critical_path(self, durations: Sequence[float]) -> list[int]:
        """The numbers of the instructions of a longest path, from the last one."""
        ends = self._ends(durations)
        path = [max(range(len(ends)), key=ends.__getitem__)]
        while before := self.predecessors[path[-1]]:
            path.append(max(before, key=ends.__getitem__))
        return path

    def _ends(self, durations: Sequence[float]) -> list[float]:
        ends: list[float] = []
        for duration, before in zip(durations, self.predecessors, strict=True):
            start = 0.0
            for one in before:
                if ends[one] > start:
                    start = ends[one]
            ends.append(start + duration)
        return ends

    def stage_ranks(self) -> Mapping[int, int]:
        """The rank that executes each stage."""
        return {one.stage: rank for one, rank in zip(self.instructions, self.ranks, strict=True)}


def _ranks(orders: Sequence[Sequence[PipelineInstruction]]) -> dict[PipelineInstruction, int]:
    ranks: dict[PipelineInstruction, int] = {}
    stages: dict[int, int] = {}
    for rank, order in enumerate(orders):
        if not order:
            raise BadPipelineError(f"Rank {rank} has no instructions.")
        for one in order:
            if one in ranks:
                raise BadPipelineError(f"The {one} is there twice.")
            ranks[one] = rank
            if stages.setdefault(one.stage, rank) != rank:
                raise BadPipelineError(
                    f"Stage {one.stage} is on rank {stages[one.stage]} and on rank {rank}."
                )
    return ranks


def _require_complete(known: Iterable[PipelineInstruction]) -> tuple[int, int]:
    """The numbers of stages and micro-batches, if every stage has every micro-batch twice."""
    all_known = set(known)
    stages = 1 + max(one.stage for one in all_known)
    microbatches = 1 + max(one.microbatch for one in all_known)
    for stage in range(stages):
        if not any(one.stage == stage for one in all_known):
            raise BadPipelineError(f"Stage {stage} of {stages} is missing.")
    if len(all_known) == stages * microbatches * len(InstructionKind):
        return stages, microbatches
    for stage in range(stages):
        for kind in InstructionKind:
            for microbatch in range(microbatches):
                one = PipelineInstruction(stage, kind, microbatch)
                if one not in all_known:
                    raise BadPipelineError(f"The {one} is missing.")
    negative = next(one for one in all_known if min(one.stage, one.microbatch) < 0)
    raise BadPipelineError(f"The {negative} has a negative number.")


def _links(
    orders: Sequence[Sequence[PipelineInstruction]], stages: int
) -> dict[PipelineInstruction, list[PipelineInstruction]]:
    """The predecessors of each instruction: on its rank, and across stages."""
    before: dict[PipelineInstruction, list[PipelineInstruction]] = {}
    for order in orders:
        previous: PipelineInstruction | None = None
        for one in order:
            links = [] if previous is None else [previous]
            sent = _sender(one, stages)
            if sent is not None and sent != previous:
                links.append(sent)
            before[one] = links
            previous = one
    return before


def _sender(one: PipelineInstruction, stages: int) -> PipelineInstruction | None:
    """The instruction with the input of ``one``; None for the first stage's forward."""
    if one.kind is InstructionKind.FORWARD:
        return one._replace(stage=one.stage - 1) if one.stage else None
    if one.stage + 1 < stages:
        return one._replace(stage=one.stage + 1)
    return one._replace(kind=InstructionKind.FORWARD)


def _sorted_by_links(
    before: Mapping[PipelineInstruction, Sequence[PipelineInstruction]],
) -> tuple[PipelineInstruction, ...]:
    """A topological order (Kahn 1962)."""
    after: dict[PipelineInstruction, list[PipelineInstruction]] = {one: [] for one in before}
    waiting = {one: len(links) for one, links in before.items()}
    for one, links in before.items():
        for link in links:
            after[link].append(one)
    ready = [one for one, count in waiting.items() if not count]
    for one in ready:  # grows meanwhile
        for follower in after[one]:
            waiting[follower] -= 1
            if not waiting[follower]:
                ready.append(follower)
    if len(ready) < len(before):
        raise BadPipelineError(f"The links are cyclic: {_cycle(before, waiting)}.")
    return tuple(ready)


def _cycle(
    before: Mapping[PipelineInstruction, Sequence[PipelineInstruction]],
    waiting: Mapping[PipelineInstruction, int],
) -> str:
    """A cycle among the instructions that still wait: each waits for one that waits too."""
    one = next(one for one, count in waiting.items() if count)
    seen: dict[PipelineInstruction, None] = {}
    while one not in seen:
        seen[one] = None
        one = next(link for link in before[one] if waiting[link])
    path = list(seen)
    cycle = path[path.index(one) :]
    shown = " waits for the ".join(map(str, (*cycle[:3], *(["..."] if cycle[3:] else []))))
    return f"the {shown} waits for the {one}".replace("the ...", "others, of which the last")


# ------------------------------------------------------------------------------------ usual orders

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
