"""A training whose one pipeline has its stages on several hosts of numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from support.tuned_host import LEASE, TICK, Host
from support.tuned_pipeline import (
    ATTRIBUTES,
    ITERATION,
    JOB,
    SERVICE,
    TAIL,
    TOP,
    PipelineTraining,
    add_rank,
    pipelined,
)
from wattspan.config import AutotuneSettings, TunedJobSettings
from wattspan.fleet.job_exchange import JobExchange
from wattspan.model import TuningRow
from wattspan.ports import Clock
from wattspan.testing import ManualClock, MemoryCluster, MemoryCoordination

STARTS = 1000.0, 250_000.0, 77.0
"""Seconds of the hosts' monotonic clocks at the beginning."""


def staged(hosts: int, **more: object) -> AutotuneSettings:
    """Settings of a pipeline on so many hosts."""
    job = TunedJobSettings(service=SERVICE, span=ITERATION, pipeline=ATTRIBUTES, hosts=hosts)
    return pipelined(**({"job": (job,)} | more))


@dataclass
class StageHost:
    """One of the hosts: its agent runs, or was killed at the time ``killed`` of its clock."""

    name: str
    cluster: MemoryCluster
    settings: AutotuneSettings
    start: float
    gpus: int
    runs: bool = True
    killed: int | None = None
    client: MemoryCoordination = field(init=False)
    exchange: JobExchange = field(init=False)
    host: Host = field(init=False)

    def __post_init__(self) -> None:
        clock = ManualClock(mono=round(self.start * 1e9))
        self.host = Host(
            self.gpus, settings=self.settings, records=self._made, clock=clock, seed=self.gpus
        )
        assert self.host.capper is not None
        self.host.capper.clocks = True

    @property
    def row(self) -> TuningRow:
        found = self.host.row(JOB)
        assert found is not None
        return found

    @property
    def plans(self) -> bool:
        """True if its running agent plans the clocks of all hosts."""
        found = self.host.row(JOB)
        return self.runs and found is not None and bool(found.pipelines)

    @property
    def clocked(self) -> dict[str, int]:
        """The lower clocks in force."""
        assert self.host.capper is not None
        return self.host.capper.clocked

    def turn(self, tick: int) -> None:
        host = self.host
        if self.runs:
            host.turn(tick)
            self.exchange.round()
            return
        host._pass()
        host.tap.drain()
        if self.killed is not None and host.clock.monotonic() - self.killed > LEASE:
            assert host.capper is not None
            host.capper.lapse()
            self.killed = None

    def kill(self) -> None:
        """The agent ends without a word: its leases expire."""
        self.runs, self.killed = False, self.host.clock.monotonic()

    def begin(self) -> None:
        """Another agent begins, with an exchange of its own."""
        assert self.host.capper is not None
        self.host.capper.lapse()
        self.host._job_records = self._made(self.host.clock)
        self.host.restart()
        self.runs, self.killed = True, None

    def _made(self, clock: Clock) -> JobExchange:
        self.client = self.cluster.client()
        self.exchange = JobExchange("/fleet/", self.name, self.client, clock, lambda line: None)
        return self.exchange


class StagedHosts:
    """Hosts with some stages each; ``stages`` are the seconds of a forward of each one's."""

    def __init__(
        self,
        stages: Sequence[Sequence[float]] = ((0.05, 0.03), (0.05,)),
        settings: AutotuneSettings | None = None,
        noise: float = 0.002,
    ) -> None:
        self.clock = ManualClock()
        self.cluster = MemoryCluster(self.clock)
        settings = settings or staged(len(stages))
        self.members = [
            StageHost(f"host-{number}", self.cluster, settings, start, len(own))
            for number, (own, start) in enumerate(zip(stages, STARTS, strict=False), start=1)
        ]
        bases = [one for own in stages for one in own]
        self.training = PipelineTraining(self.members[0].host, bases, noise=noise)
        for member in self.members:
            for gpu in member.host.gpus:
                rank, ahead = len(self.training.ranks), member.start - STARTS[0]
                one = add_rank(member.host, self.training, gpu, rank, ahead)
                self.training.ranks.append(one)
        self.ticks = 0
        self._known: dict[tuple[int, ...], float] = {}

    @property
    def usual(self) -> float:
        """The seconds of the iterations so far at the original clocks."""
        return len(self.training.used) * self._seconds((TOP,) * len(self.training.ranks))

    @property
    def lost(self) -> float:
        """The seconds by which lower clocks have made the iterations so far longer."""
        used = Counter(self.training.used)
        return sum(count * self._seconds(clocks) for clocks, count in used.items()) - self.usual

    def _seconds(self, clocks: tuple[int, ...]) -> float:
        """True seconds of an iteration without noise."""
        if clocks not in self._known:
            self._known[clocks] = self.training.seconds(clocks) + TAIL
        return self._known[clocks]

    @property
    def planner(self) -> StageHost | None:
        """The host that plans, once it knows the ranks of all."""
        return next((one for one in self.members if one.plans), None)

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Let time pass on all hosts."""
        for _ in range(round(seconds * 1e9 / TICK)):
            for one in self.members:
                one.turn(self.ticks)
            self.clock.advance(ns=TICK)
            self.ticks += 1
            if self.ticks % 2 and until():
                return
