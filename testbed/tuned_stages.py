"""A training whose one pipeline has its stages on several hosts of numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from testbed.hosts_in_step import ExchangingHost, HostsInStep
from testbed.memory_cluster import MemoryCluster
from testbed.tuned_host import Host
from testbed.tuned_pipeline import (
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
from wattspan.model import TuningRow
from wattspan.testing import ManualClock

STARTS = 1000.0, 250_000.0, 77.0
"""Seconds of the hosts' monotonic clocks at the beginning."""


def staged(hosts: int, **more: object) -> AutotuneSettings:
    """Settings of a pipeline on so many hosts."""
    job = TunedJobSettings(service=SERVICE, span=ITERATION, pipeline=ATTRIBUTES, hosts=hosts)
    return pipelined(**({"job": (job,)} | more))


class StageHost(ExchangingHost):
    """One of the hosts; ``start`` are the seconds of its monotonic clock at the beginning."""

    def __init__(
        self, name: str, cluster: MemoryCluster, settings: AutotuneSettings, start: float, gpus: int
    ) -> None:
        super().__init__(name, cluster)
        self.clock_start = start
        clock = ManualClock(mono=round(start * 1e9))
        self.host = Host(gpus, settings=settings, records=self.new_exchange, clock=clock, seed=gpus)
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
        return self.host.capper.clocked


class StagedHosts(HostsInStep[StageHost]):
    """Hosts with some stages each; ``stages`` are the seconds of a forward of each one's."""

    def __init__(
        self,
        stages: Sequence[Sequence[float]] = ((0.05, 0.03), (0.05,)),
        settings: AutotuneSettings | None = None,
        noise: float = 0.002,
    ) -> None:
        super().__init__()
        settings = settings or staged(len(stages))
        self.members = [
            StageHost(f"host-{number}", self.cluster, settings, start, len(own))
            for number, (own, start) in enumerate(zip(stages, STARTS, strict=False), start=1)
        ]
        bases = [one for own in stages for one in own]
        self.training = PipelineTraining(self.members[0].host, bases, noise=noise)
        for member in self.members:
            for gpu in member.host.gpus:
                rank, ahead = len(self.training.ranks), member.clock_start - STARTS[0]
                one = add_rank(member.host, self.training, gpu, rank, ahead)
                self.training.ranks.append(one)
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
