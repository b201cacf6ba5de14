"""A synchronous job on the host of numbers: ranks on a GPU each, that meet at every step's end.

A rank computes for as long as it has to do, the slower its GPU the longer, and then it waits for
the others. Waiting ranks spin, and their GPUs draw full power.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from testbed.tuned_host import Gpu, Host, Job, quick
from wattspan.config import AutotuneSettings, TunedJobSettings
from wattspan.model import Consumer
from wattspan.spans.values import Span

SERVICE, STEP, COMPUTE = "trainer", "train_step", "compute"
_Done = list[Span]


def synchronous(**more: object) -> AutotuneSettings:
    """Settings for such a job, whose ranks tell how long they computed."""
    job = TunedJobSettings(service=SERVICE, span=STEP, kind="steps", compute=COMPUTE)
    return quick(**({"job": (job,)} | more))


@dataclass
class Together:
    """The steps of all ranks. ``loads`` are the seconds that each computes in a step.

    ``usual`` are the seconds that the steps would have lasted without any cap.
    """

    gpus: Sequence[Gpu]
    loads: list[float]
    noise: float = 0.005
    common: float = 0.01  # seconds of the collective itself
    random: random.Random = field(default_factory=lambda: random.Random(3))
    steps: int = 0
    since: int = 0
    left: list[float] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    ahead: int = 0  # overlap of the last collective with the future
    usual: float = 0.0

    def advance(self, start: int, end: int) -> list[_Done]:
        """Units finished by each rank between two times."""
        done: list[_Done] = [[] for _ in self.gpus]
        at = start + self.ahead
        while at < end:
            if not self.left:
                self.since = at
                self.left = [
                    load * math.exp(self.random.gauss(0.0, self.noise)) for load in self.loads
                ]
                self.computed = [0 for _ in self.gpus]
                self.usual += max(self.left) + self.common
            rest = [left * gpu.slowdown for left, gpu in zip(self.left, self.gpus, strict=True)]
            most = max(rest)
            stretch = min(end - at, max(1, round(most * 1e9)))
            for rank, gpu in enumerate(self.gpus):
                worked = min(stretch, round(rest[rank] * 1e9))
                self.computed[rank] += worked
                self.left[rank] = max(0.0, self.left[rank] - worked / 1e9 / gpu.slowdown)
            at += stretch
            if max(self.left) > 1e-8:
                continue
            finish = at + round(self.common * 1e9)
            for rank in range(len(self.gpus)):
                done[rank] += self._spans(rank, finish)
            self.left, at = [], finish
            self.steps += 1
        self.ahead = max(0, at - end)
        return done

    def _spans(self, rank: int, end: int) -> _Done:
        step = (self.steps * 16 + rank + 1).to_bytes(8, "big")
        part = (self.steps * 16 + rank + 1 + (1 << 62)).to_bytes(8, "big")
        computed = self.since + self.computed[rank]
        trace = bytes([rank + 1]) * 16
        both = [
            Span(trace, part, step, SERVICE, COMPUTE, self.since, computed),
            Span(trace, step, b"", SERVICE, STEP, self.since, end),
        ]
        # senders differ in the order of inner and outer spans
        return both if rank % 2 else both[::-1]

    @property
    def slowdown(self) -> float:
        """True values: how much longer a step takes than without any cap."""
        capped = max(load * gpu.slowdown for load, gpu in zip(self.loads, self.gpus, strict=True))
        return (capped + self.common) / (max(self.loads) + self.common)

    @property
    def power(self) -> int:
        return sum(gpu.power for gpu in self.gpus)


@dataclass
class RankJob(Job):
    """One rank; the first of them lets all of them go on."""

    together: Together | None = None
    number: int = 0
    peers: list[RankJob] = field(default_factory=list)
    ready: _Done = field(default_factory=list)

    def advance(self, start: int, end: int) -> _Done:
        assert self.together is not None
        if self.number == 0:
            for peer, done in zip(self.peers, self.together.advance(start, end), strict=True):
                peer.ready = done
        done, self.ready = self.ready, []
        return done if self.alive else []


def train_together(host: Host, loads: Sequence[float], **more: object) -> Together:
    """One rank on each of the host's GPUs, with so many seconds of computing each."""
    together = Together(host.gpus, list(loads), **more)  # type: ignore[arg-type]
    ranks = [
        RankJob(SERVICE, gpu, Consumer(200 + number, 1), together=together, number=number)
        for number, gpu in enumerate(host.gpus)
    ]
    ranks[0].peers = ranks
    host.jobs += ranks
    return together
