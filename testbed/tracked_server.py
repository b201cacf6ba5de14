"""A server on the host of numbers that announces its requests and reports their latencies."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from testbed.latency_pages import LatencyPages
from testbed.tuned_host import Host, Job, quick
from wattspan.config import AutotuneSettings, TunedJobSettings
from wattspan.model import SECOND, Consumer
from wattspan.model.settings import Duration
from wattspan.spans.values import RequestLatency, Span, SpanEnd, SpanStart

SERVICE, REQUEST = "llm", "chat"
JOB = f"{SERVICE}/{REQUEST}"
ENGINE = "vllm"


def tracking(limit: float = 0.4, **more: object) -> AutotuneSettings:
    """Settings that track such a server; ``limit`` of the time to the first token in seconds."""
    job = TunedJobSettings(
        service=SERVICE,
        span=REQUEST,
        kind="requests",
        control="track",
        slo={"ttft_p90": Duration(round(limit * SECOND))},
        ttft="ttft",
        period=Duration(2 * SECOND),
    )
    return quick(**({"job": (job,), "dwell": 5 * SECOND} | more))


def tracking_by_page(limit: float = 0.5, **more: object) -> AutotuneSettings:
    """As ``tracking``, by the page of an engine; a ``span`` in ``job`` permits announced spans."""
    job = {"engine": ENGINE, **(more.pop("job", None) or {})}
    settings = TunedJobSettings(
        kind="requests",
        control="track",
        slo={"ttft_p90": Duration(round(limit * SECOND))},
        period=Duration(2 * SECOND),
        **job,
    )
    return quick(**({"job": (settings,), "dwell": 5 * SECOND} | more))


@dataclass
class TrackedServer(Job):
    """``rate`` requests a second; ``first`` seconds to the first token, without a cap.

    ``announces`` False leaves the starts out, ``reports`` False the latencies. While it ``hangs``,
    no request begins or ends. Its page, read each ``interval`` seconds, counts the tokens of a
    request at its end; 0: it has none.
    """

    host: Host | None = None
    rate: float = 20.0
    first: float = 0.2
    lasting: float = 0.5
    announces: bool = True
    reports: bool = True
    hangs: bool = False
    interval: float = 0.0
    sends: bool = True  # spans
    workers: tuple[Consumer, ...] = ()  # others of its page
    hidden: bool = False  # the kernel does not show which of them listens
    page: LatencyPages = field(default_factory=LatencyPages)
    ended: int = 0
    due: float = 0.0
    active: list[tuple[float, float, float, bytes]] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)

    def advance(self, start: int, end: int) -> list[Span]:
        assert self.host is not None
        if self.interval and self.alive:
            self._publish(start)
        if self.hangs:
            return []
        records: list[SpanStart | SpanEnd] = []
        now, until = start / 1e9, end / 1e9
        while self.alive and not self.paused and now + self.due < until:
            now += self.due
            self.due = self.random.expovariate(self.rate)
            slower = self.gpu.slowdown * math.exp(self.random.gauss(0.0, 0.1))
            first = self.first * slower
            self.steps += 1
            ident = self.steps.to_bytes(8, "big")
            self.active.append((now, now + self.lasting * slower, first, ident))
            records.append(SpanStart(ident, b"", round(now * 1e9), 1, 0))
        self.due -= until - now
        ended = [one for one in self.active if one[1] < until]
        self.active = [one for one in self.active if one[1] >= until]
        records += [SpanEnd(ident, round(at * 1e9), 1, 0) for _, at, _, ident in ended]
        if self.announces:
            self.host.tap.announce(self.consumer, records)
        for came, _, first, _ in self.active + ended:
            if start / 1e9 <= came + first < until:
                self.page.first.add(first)
        self.ended += len(ended)
        told = [self._told(*one) for one in ended]
        return told if self.sends else []

    def _publish(self, now: int) -> None:
        host, step = self.host, round(self.interval * 1e9)
        assert host is not None
        last = host.pages.get(ENGINE)
        if last is not None and now - last.at < step:
            return
        counts = {
            "running": len(self.active),
            "finished": self.ended,
            "prompt": 200 * self.ended,
            "generated": 50 * self.ended,
        }
        page = self.page.read(now, step, (self.consumer, *self.workers), **counts)
        host.pages[ENGINE] = page._replace(listener=None if self.hidden else self.consumer)

    def _told(self, came: float, until: float, first: float, ident: bytes) -> Span:
        self.latencies.append(first)
        times = round(came * 1e9), round(until * 1e9)
        tokens = 200, 50
        latency = RequestLatency(round(first * 1e9) if self.reports else None)
        own = b"r" * 16, ident, b"", self.service, self.span
        return Span(*own, *times, None, *tokens, latency=latency)


def serve(host: Host, **more: object) -> TrackedServer:
    """A tracked server on the host's first GPU."""
    consumer = Consumer(300 + len(host.jobs), 1)
    server = TrackedServer(  # type: ignore[arg-type]
        SERVICE, host.gpus[0], consumer, span=REQUEST, host=host, **more
    )
    host.jobs.append(server)
    host.page_intervals[ENGINE] = round(server.interval * SECOND)
    return server
