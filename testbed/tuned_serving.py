"""A server of requests on the host of numbers: so many side by side, the others wait.

Requests come by chance. A served one takes its time, the longer the slower its GPU is, and one
that waits takes longer for that too, so a cap shows the more the fuller the server is.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from testbed.tuned_host import Host, Job, quick
from wattspan.config import AutotuneSettings, TunedJobSettings
from wattspan.model import Consumer
from wattspan.spans.values import Span

SERVICE, REQUEST = "llm", "chat"
JOB = f"{SERVICE}/{REQUEST}"
_DUST = 1e-9  # seconds of work that are none


def serving(latency: float = 0.0, percentile: float = 0.99, **more: object) -> AutotuneSettings:
    """Settings for such a server; ``latency`` in seconds, 0 derives it from the original."""
    job = TunedJobSettings(
        service=SERVICE,
        span=REQUEST,
        kind="requests",
        latency=round(latency * 1e9),
        percentile=percentile,
    )
    return quick(**({"job": (job,)} | more))


@dataclass
class Server(Job):
    """``rate`` requests a second; ``cost`` seconds each alone, give or take ``spread``."""

    rate: float = 8.0
    cost: float = 0.4
    spread: float = 0.1
    slots: int = 8
    due: float = 0.0  # seconds until the next comes
    active: list[list[float]] = field(default_factory=list)  # when it came, seconds left
    waiting: deque[list[float]] = field(default_factory=deque)
    latencies: list[float] = field(default_factory=list)

    def advance(self, start: int, end: int) -> list[Span]:
        done: list[Span] = []
        now, until = start / 1e9, end / 1e9
        while now < until and self.alive and not self.paused:
            slower = self.gpu.slowdown
            least = min((left for _, left in self.active), default=float("inf")) * slower
            stretch = min(until - now, self.due, least)
            now, self.due = now + stretch, self.due - stretch
            for one in self.active:
                one[1] -= stretch / slower
            ended = [one for one in self.active if one[1] <= _DUST]
            self.active = [one for one in self.active if one[1] > _DUST]
            done += [self._told(came, now) for came, _ in ended]
            if self.due <= _DUST:
                took = self.cost * self.random.lognormvariate(0.0, self.spread)
                self.waiting.append([now, took])
                self.due = self.random.expovariate(self.rate)
            while self.waiting and len(self.active) < self.slots:
                self.active.append(self.waiting.popleft())
        return done

    def _told(self, came: float, now: float) -> Span:
        self.steps += 1
        self.latencies.append(now - came)
        ident, trace = self.steps.to_bytes(8, "big"), b"r" * 16
        start, end = round(came * 1e9), round(now * 1e9)
        return Span(trace, ident, b"", self.service, self.span, start, end)


def serve(host: Host, **more: object) -> Server:
    """A server on the host's first GPU."""
    consumer = Consumer(300 + len(host.jobs), 1)
    server = Server(SERVICE, host.gpus[0], consumer, span=REQUEST, **more)  # type: ignore[arg-type]
    host.jobs.append(server)
    return server
