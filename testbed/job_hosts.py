"""A data-parallel job on several simulated hosts, each with a clock and a pipeline of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from testbed.memory_cluster import MemoryCluster
from testbed.pipelines import EnergyCounters, RunningPipeline, observation
from wattspan.fleet.job_exchange import JobExchange
from wattspan.model import SECOND
from wattspan.testing import ManualClock
from wattspan.tuning.pipeline.control import PipelineObservation
from wattspan.tuning.pipeline.replicas import NO_PARTNERS, PipelineGroup, judged, summarized
from wattspan.tuning.pipeline.session import use_plan
from wattspan.tuning.pipeline.session_state import PipelinePolicy, PipelineState, begin_session

JOB = "gpt/iteration"
TAIL = 0.05
"""Seconds of the exchange of gradients and the optimizer's step, after all pipelines."""


class JobHost:
    """One host: its agent runs from ``joins`` on; ``start`` is the monotonic time of its clock."""

    def __init__(
        self, name: str, policy: PipelinePolicy, bases: Sequence[float], cluster: MemoryCluster,
        *, start: float, joins: int = 0,
    ) -> None:  # fmt: skip
        self.name, self.joins = name, joins
        self.clock = ManualClock(mono=round(start * SECOND))
        self.pipeline, self._bases = RunningPipeline(bases, 3), bases
        self.pipeline._now = start
        self.client = cluster.client()
        self.exchange = JobExchange("/fleet/", name, self.client, self.clock, lambda line: None)
        self.group = PipelineGroup.begin({name: begin_session(policy)}, None)
        self.partners = NO_PARTNERS
        self._counters = EnergyCounters(len(bases))

    @property
    def session(self) -> PipelineState:
        return self.group.controls[self.name].session

    @property
    def clocks(self) -> tuple[int, ...]:
        return self.session.decision.clocks

    def seconds(self, clocks: Sequence[int], longer: float) -> float:
        return RunningPipeline(self._bases, 3).iteration(clocks, longer=longer).seconds

    def iterate(self, longer: float, whole: float, *, runs: bool) -> None:
        """An iteration that ends for all hosts after ``whole`` seconds; the agent ``runs``."""
        clocks = self.clocks or self.pipeline.original
        observed = self.observed(clocks, longer, whole)
        self.clock.advance(self.pipeline._now - self.clock.monotonic() / SECOND)
        if not runs:
            return
        self.exchange.round()
        now, own = self.clock.monotonic(), summarized(self.group.controls)
        self.partners = judged(self.exchange.view(JOB), own, now)
        self.group = self.group.step({self.name: observed}, self.partners)
        session = self.session
        if session.task is not None:
            session = use_plan(session, session.task.solved())
        self.group = self.group.with_sessions({self.name: session})
        record = self.group.record(self.name, now)
        self.exchange.publish(JOB, record, explores=self.group.explores)

    def observed(self, clocks: Sequence[int], longer: float, whole: float) -> PipelineObservation:
        """The next iteration at these clocks, which ends for all hosts after ``whole`` seconds."""
        executed = self.pipeline.iteration(clocks, longer=longer, until=whole)
        end = executed.spans[0].start + whole
        found = observation(executed, clocks, end=end, late=1e-9)
        return found._replace(energy=self._counters.add(executed))


class RunningJob:
    """The hosts of one job, which wait for each other at the end of each iteration.

    ``lost`` are the seconds that their clocks have cost the job, ``usual`` those without that.
    """

    def __init__(
        self, policy: PipelinePolicy, bases: Sequence[float], starts: Sequence[float],
        joins: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.clock = ManualClock()
        self.cluster = MemoryCluster(self.clock)
        self.hosts = [
            JobHost(
                f"host-{number}", policy, bases, self.cluster,
                start=start, joins=joins[number] if joins else 0,
            )
            for number, start in enumerate(starts)
        ]  # fmt: skip
        self.number = 0
        self.lost = self.usual = self.latest_loss = 0.0

    def iterate(self, longer: Mapping[int, float] | None = None, noise: float = 1.0) -> None:
        """One iteration; ``longer`` has the factors of hosts whose pipelines are slower."""
        factors = [noise * (longer or {}).get(number, 1.0) for number in range(len(self.hosts))]
        pairs = list(zip(self.hosts, factors, strict=True))
        whole = TAIL + max(host.seconds(host.clocks, factor) for host, factor in pairs)
        usual = TAIL + max(host.seconds((), factor) for host, factor in pairs)
        self.latest_loss = whole - usual
        self.lost, self.usual = self.lost + whole - usual, self.usual + usual
        before = self.clock.monotonic()
        for host, factor in pairs:
            host.iterate(factor, whole, runs=self.number >= host.joins)
        self.clock.advance(whole + 0.01)
        assert self.clock.monotonic() > before
        self.number += 1

    def run(self, iterations: int, longer: Mapping[int, float] | None = None) -> None:
        for _ in range(iterations):
            self.iterate(longer)
