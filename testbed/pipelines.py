"""Small pipelines with simple costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from wattspan.model import SECOND
from wattspan.tuning.decisions.values import EnergyPoint, WorkUnit
from wattspan.tuning.pipeline.control import PipelineObservation
from wattspan.tuning.pipeline.costs import ClockPoint, PipelineProfile
from wattspan.tuning.pipeline.dag import (
    CostKey,
    InstructionKind,
    PipelineDag,
    PipelineInstruction,
    PipelineSchedule,
    scheduled,
)
from wattspan.tuning.pipeline.frontier import PipelineModel
from wattspan.tuning.pipeline.iterations import (
    InstructionSpan,
    PipelineIteration,
    RankEnergy,
    RankInstruction,
)
from wattspan.tuning.pipeline.plan import ClockPlan, RankClocks
from wattspan.tuning.pipeline.replicas import PipelineGroup
from wattspan.tuning.pipeline.session import add_iteration, use_plan
from wattspan.tuning.pipeline.session_state import PipelinePolicy, PipelineState, begin_session

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


def uniform_plan(search: RankClocks, model: PipelineModel, limit: float) -> ClockPlan:
    """The best plan with one clock for all ranks within ``limit`` seconds."""
    plans = [search.evaluated([mhz] * model.dag.rank_count) for mhz in model.clocks]
    return min((one for one in plans if one.seconds <= limit), key=lambda one: one.joules)


class RunningPipeline:
    """Iterations without noise; every rank draws 200 W more while it computes at 1600 MHz."""

    def __init__(self, bases: Sequence[float] = (0.1, 0.08, 0.1), microbatches: int = 4) -> None:
        self.dag = scheduled(PipelineSchedule.ONE_F_ONE_B, len(bases), microbatches)
        self.original = (1600,) * len(bases)
        self._bases = bases
        self._number = 0
        self._now = 1000.0

    def iteration(
        self,
        clocks: Sequence[int] | None = None,
        *,
        reported: bool = True,
        longer: float = 1.0,
        until: float = 0.0,
        watts: float | None = None,
        metered: bool = True,
    ) -> PipelineIteration:
        """The next iteration at these clocks, by default the original ones.

        ``reported`` clocks are known, ``longer`` is a factor of all durations, ``until`` the
        iteration time of another pipeline, ``watts`` a power that no clock changes.
        """
        clocks = tuple(clocks or self.original)
        starts: list[float] = []
        ends: list[float] = []
        joules = [0.0] * len(clocks)
        for one, rank, before in zip(
            self.dag.instructions, self.dag.ranks, self.dag.predecessors, strict=True
        ):
            base = self._bases[one.stage] * (1 if one.kind is FORWARD else 2)
            point = _point(clocks[rank], base)
            starts.append(max((ends[number] for number in before), default=self._now))
            ends.append(starts[-1] + longer * point.seconds)
            joules[rank] += longer * (point.joules - WATTS * point.seconds)
        begun, ended = self._now, max(ends)
        seconds = ended - begun
        waited = max(0.0, until - seconds)
        self._now = ended + waited + 0.01
        self._number += 1
        energy = [
            RankEnergy(
                rank, begun, ended, WATTS * seconds + own if watts is None else watts * seconds
            )
            for rank, own in enumerate(joules)
        ]
        return PipelineIteration(
            tuple(
                InstructionSpan(self._number, rank, one, start, end)
                for one, rank, start, end in zip(
                    self.dag.instructions, self.dag.ranks, starts, ends, strict=True
                )
            ),
            clocks if reported else None,
            tuple(energy) if metered else (),
            waited,
        )

    def drive(
        self,
        state: PipelineState,
        iterations: int,
        *,
        longer: float = 1.0,
        until: float = 0.0,
        watts: float | None = None,
    ) -> Iterator[PipelineState]:
        """The states after each iteration at the clocks that the state before has requested."""
        for _ in range(iterations):
            clocks = state.decision.clocks
            one = self.iteration(clocks, longer=longer, until=until, watts=watts)
            state = add_iteration(state, one)
            if state.task is not None:
                state = use_plan(state, state.task.solved())
            yield state


def nanoseconds(seconds: float) -> int:
    return round(seconds * SECOND)


def observation(
    executed: PipelineIteration,
    clocks: Sequence[int | None],
    *,
    end: float | None = None,
    late: float = 0.0,
) -> PipelineObservation:
    """The iteration without energies, reported ``late`` seconds after its end.

    Clocks that are read at its very end may have changed in it. Its units end with the last
    instruction, or at ``end`` with those of other pipelines.
    """
    instructions = tuple(
        RankInstruction(span.rank, span.instruction, nanoseconds(span.start), nanoseconds(span.end))
        for span in executed.spans
    )
    start = min(one.start for one in instructions)
    last = max(one.end for one in instructions) if end is None else nanoseconds(end)
    units = tuple(WorkUnit(start, last, rank=rank) for rank in range(len(clocks)))
    return PipelineObservation(
        last + nanoseconds(late), units, instructions, dict(enumerate(clocks))
    )


class EnergyCounters:
    """Cumulative energy of each rank's device at the end of each iteration."""

    def __init__(self, ranks: int) -> None:
        self.points = {rank: EnergyPoint(0, 0) for rank in range(ranks)}

    def add(self, executed: PipelineIteration) -> dict[int, EnergyPoint]:
        for one in executed.energy:
            joules = self.points[one.rank].energy + round(one.joules * 1e6)
            self.points[one.rank] = EnergyPoint(nanoseconds(one.end), joules)
        return dict(self.points)


class RunningReplicas:
    """Data-parallel pipelines that wait for each other at the end of each iteration.

    ``lost`` are the seconds that their clocks have cost the job, ``usual`` those without that.
    """

    def __init__(self, policy: PipelinePolicy, bases: Sequence[float], replicas: int = 2) -> None:
        self._bases = bases
        self._names = [str(number) for number in range(replicas)]
        self._pipelines = {name: RunningPipeline(bases, 3) for name in self._names}
        self._counters = {name: EnergyCounters(len(bases)) for name in self._names}
        session = begin_session(policy)
        self.group = PipelineGroup.begin(dict.fromkeys(self._names, session), None)
        self.lost = self.usual = 0.0

    def session(self, number: int) -> PipelineState:
        return self.group.controls[self._names[number]].session

    def iterate(self, longer: Sequence[float]) -> None:
        """An iteration of the job; ``longer`` is a factor of each pipeline's durations."""
        factors = dict(zip(self._names, longer, strict=True))
        clocks = {
            name: one.session.decision.clocks or one.session.original
            for name, one in self.group.controls.items()
        }
        whole = max(self._seconds(clocks[name], factors[name]) for name in self._names)
        usual = max(self._seconds((), factor) for factor in longer)
        self.lost, self.usual = self.lost + whole - usual, self.usual + usual
        observations = {}
        for name, pipeline in self._pipelines.items():
            executed = pipeline.iteration(clocks[name] or None, longer=factors[name], until=whole)
            end, clocks_in_force = executed.spans[0].start + whole, executed.clocks or ()
            found = observation(executed, clocks_in_force, end=end, late=1e-9)
            observations[name] = found._replace(energy=self._counters[name].add(executed))
        self.group = self.group.step(observations)
        self.group = self.group.with_sessions(
            {
                name: one.session
                if one.session.task is None
                else use_plan(one.session, one.session.task.solved())
                for name, one in self.group.controls.items()
            }
        )

    def _seconds(self, clocks: Sequence[int], longer: float) -> float:
        return RunningPipeline(self._bases, 3).iteration(clocks, longer=longer).seconds
