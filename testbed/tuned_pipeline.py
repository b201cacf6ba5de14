"""A pipeline-parallel training on the host of numbers: a process and a GPU for each stage."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from testbed.memory_cluster import MemoryCluster, MemoryCoordination
from testbed.tuned_host import TICK, Gpu, Host, Job, quick
from wattspan.config import AutotuneSettings, TunedJobSettings
from wattspan.fleet.job_exchange import JobExchange
from wattspan.model import Consumer, Knob
from wattspan.ports import Clock
from wattspan.spans.values import ReportedInstruction, Span
from wattspan.testing import ManualClock
from wattspan.tuning.pipeline.costs import ClockPoint, PipelineProfile
from wattspan.tuning.pipeline.dag import (
    CostKey,
    InstructionKind,
    PipelineInstruction,
    PipelineSchedule,
    scheduled,
)
from wattspan.tuning.pipeline.frontier import PipelineModel

SERVICE, ITERATION = "gpt", "iteration"
JOB = f"{SERVICE}/{ITERATION}"
TOP = 1980  # MHz
WAITING, COMPUTING = 70.0, 400.0  # watts
TAIL = 0.02  # seconds of the optimizer's step
FIRST, SECOND = "a", "b"  # names of data-parallel pipelines
ATTRIBUTES = {"stage": "pp.stage", "microbatch": "pp.microbatch", "instruction": "pp.pass"}


def pipelined(*, replicas: bool = False, **more: object) -> AutotuneSettings:
    """Settings that tune such a pipeline, or several ones of the same service."""
    named = ATTRIBUTES | ({"replica": "dp.rank"} if replicas else {})
    job = TunedJobSettings(service=SERVICE, span=ITERATION, pipeline=named)
    return quick(**({"job": (job,), "knobs": (Knob.GPU_CLOCK,), "floor": 0.5} | more))


@dataclass
class PipelineTraining:
    """Iterations of 1F1B, each at the clocks of its start. ``bases`` are seconds of a forward.

    ``all`` are the data-parallel pipelines of the training, which wait for each other at the end of
    each iteration; all instructions take ``slower`` times as long.
    """

    host: Host
    bases: Sequence[float]
    microbatches: int = 4
    noise: float = 0.002
    wrong_stage: bool = False  # the last rank reports the stage of the first one
    replica: str | None = ""  # None: its ranks report no instruction
    slower: float = 1.0
    all: list[PipelineTraining] = field(default_factory=list)
    used: list[tuple[int, ...]] = field(default_factory=list)  # clocks of each iteration
    ranks: list[PipelineRank] = field(default_factory=list)
    _next: float = 0.0
    _random: random.Random = field(default_factory=lambda: random.Random(3))

    def __post_init__(self) -> None:
        self.dag = scheduled(PipelineSchedule.ONE_F_ONE_B, len(self.bases), self.microbatches)
        self._next = self.host.clock.monotonic() / 1e9
        self.all = self.all or [self]

    def cost(self, key: CostKey, mhz: int) -> tuple[float, float]:
        """True seconds and watts of an instruction."""
        passes = 1 if key.kind is InstructionKind.FORWARD else 2
        seconds = passes * self.bases[key.stage] * TOP / mhz
        return seconds, WAITING + (COMPUTING - WAITING) * (mhz / TOP) ** 3

    def seconds(self, clocks: Sequence[int]) -> float:
        """True seconds of an iteration without noise, until the end of its last instruction."""
        return self.dag.makespan(
            [
                self.slower * self.cost(one.cost_key, clocks[rank])[0]
                for one, rank in zip(self.dag.instructions, self.dag.ranks, strict=True)
            ]
        )

    def model(self) -> PipelineModel:
        """The pipeline with its true costs."""
        points = {
            CostKey(stage, kind): [
                ClockPoint(mhz, seconds, seconds * watts)
                for mhz in range(TOP // 2, TOP + 1, 15)
                for seconds, watts in (self.cost(CostKey(stage, kind), mhz),)
            ]
            for stage in range(len(self.bases))
            for kind in InstructionKind
        }
        return PipelineModel(self.dag, PipelineProfile(points), WAITING)

    def advance(self, until: float) -> None:
        """Begin the iterations before ``until``."""
        while self._next < until:
            end = max([one._execute() for one in self.all])
            for one in self.all:
                one._finish(end + TAIL)

    def _execute(self) -> float:
        """Execute the instructions of an iteration; returns the end of the last one."""
        clocks = [one.clock for one in self.ranks]
        starts: list[float] = []
        ends: list[float] = []
        self.used.append(tuple(clocks))
        for one, rank, before in zip(
            self.dag.instructions, self.dag.ranks, self.dag.predecessors, strict=True
        ):
            seconds, power = self.cost(one.cost_key, clocks[rank])
            starts.append(max((ends[number] for number in before), default=self._next))
            longer = self.slower * (1 + self.noise * self._random.gauss(0, 1))
            ends.append(starts[-1] + seconds * longer)
            self.ranks[rank].instructions.append((one, starts[-1], ends[-1], power))
        return max(ends)

    def _finish(self, end: float) -> None:
        for process in self.ranks:
            process.iterations.append((self._next, end))
        self._next = end


@dataclass
class PipelineRank(Job):
    """One process of the training; it reports what has ended.

    The monotonic clock of its ``host`` is ``ahead`` of the training's by so many seconds.
    """

    training: PipelineTraining | None = None
    host: Host | None = None
    ahead: float = 0.0
    instructions: list[tuple[PipelineInstruction, float, float, float]] = field(
        default_factory=list
    )
    iterations: list[tuple[float, float]] = field(default_factory=list)
    number: int = 0

    @property
    def clock(self) -> int:
        """The clock in force in MHz."""
        return self.host.capper.clocked.get(self.gpu.device, TOP)

    def advance(self, start: int, end: int) -> list[Span]:
        if not self.alive:
            return []
        since, until = start / 1e9 - self.ahead, end / 1e9 - self.ahead
        self.training.advance(until)
        self.gpu.draw = round(1000 * self._watts(since, until))
        ended = [one for one in self.instructions if one[2] < until]
        self.instructions = [one for one in self.instructions if one[2] >= until]
        done = [self._instruction(*one[:3]) for one in ended]
        finished = [one for one in self.iterations if one[1] < until]
        self.iterations = [one for one in self.iterations if one[1] >= until]
        return [*done, *(self._span(ITERATION, *one, None) for one in finished)]

    def _watts(self, since: float, until: float) -> float:
        above = sum(
            max(0.0, min(end, until) - max(start, since)) * (power - WAITING)
            for _, start, end, power in self.instructions
        )
        return WAITING + above / (TICK / 1e9)

    def _instruction(self, one: PipelineInstruction, start: float, end: float) -> Span:
        stage = 0 if self.training.wrong_stage and one.stage else one.stage
        replica = self.training.replica
        reported = None
        if replica is not None:
            reported = ReportedInstruction(stage, one.microbatch, one.kind.value, replica)
        return self._span("pass", start, end, reported)

    def _span(
        self, name: str, start: float, end: float, instruction: ReportedInstruction | None
    ) -> Span:
        self.steps += 1
        ident = self.steps.to_bytes(8, "big")
        times = round((start + self.ahead) * 1e9), round((end + self.ahead) * 1e9)
        own = b"t" * 16, ident, b"", self.service, name
        return Span(*own, *times, instruction=instruction)


def train_pipeline(
    settings: AutotuneSettings | None = None, bases: Sequence[float] = (0.05, 0.03, 0.05)
) -> tuple[Host, PipelineTraining]:
    """A host with a GPU for each of the training's stages."""
    host = Host(settings=settings or pipelined(), gpus=len(bases))
    host.capper.clocks = True
    training = PipelineTraining(host, bases)
    for rank, gpu in enumerate(host.gpus):
        training.ranks.append(add_rank(host, training, gpu, rank))
    return host, training


def train_replicas(
    bases: Sequence[float] = (0.05, 0.03), settings: AutotuneSettings | None = None
) -> tuple[Host, PipelineTraining, PipelineTraining]:
    """A host with two data-parallel pipelines of the same service."""
    host = Host(settings=settings or pipelined(replicas=True), gpus=2 * len(bases))
    host.capper.clocks = True
    one = PipelineTraining(host, bases, replica=FIRST)
    other = PipelineTraining(host, bases, replica=SECOND, all=one.all)
    one.all.append(other)
    for number, gpu in enumerate(host.gpus):
        training = one if number < len(bases) else other
        training.ranks.append(add_rank(host, training, gpu, number))
    return host, one, other


class TrainedHosts:
    """Hosts with one pipeline of the same training each, and the service of their records."""

    def __init__(self, hosts: int = 2, bases: Sequence[float] = (0.05, 0.03)) -> None:
        self.clock = ManualClock()
        self.cluster = MemoryCluster(self.clock)
        self.clients: list[MemoryCoordination] = []
        self.exchanges: list[JobExchange] = []
        self.trainings: list[PipelineTraining] = []
        for number in range(hosts):
            settings = pipelined(replicas=True)
            host = Host(settings=settings, gpus=len(bases), records=self._records)
            host.capper.clocks = True
            training = PipelineTraining(host, bases, replica=f"dp-{number}")
            self.trainings.append(training)
            for rank, gpu in enumerate(host.gpus):
                training.ranks.append(add_rank(host, training, gpu, rank))
        for training in self.trainings:
            training.all = self.trainings

    @property
    def hosts(self) -> list[Host]:
        return [training.host for training in self.trainings]

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Let time pass on all hosts."""
        for tick in range(round(seconds * 1e9 / TICK)):
            for host in self.hosts:
                host.turn(tick)
            self.clock.advance(ns=TICK)
            for exchange in self.exchanges:
                exchange.round()
            if tick % 2 and until():
                return

    def _records(self, clock: Clock) -> JobExchange:
        self.clients.append(self.cluster.client())
        name = f"host-{len(self.clients)}"
        logged: list[str] = []
        exchange = JobExchange("/fleet/", name, self.clients[-1], clock, logged.append)
        self.exchanges.append(exchange)
        return exchange


def add_rank(
    host: Host, training: PipelineTraining, gpu: Gpu, rank: int, ahead: float = 0.0
) -> PipelineRank:
    one = PipelineRank(
        SERVICE, gpu, Consumer(400 + rank, 1), span=ITERATION, training=training, number=rank,
        host=host, ahead=ahead,
    )  # fmt: skip
    host.jobs.append(one)
    return one
