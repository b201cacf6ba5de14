"""Resident memory over a day at compressed time.

The poller, ledger, energy history, span joiner, store and metrics pages of the agent run in this
process on a manual clock: every tick of a day is simulated as fast as the CPU permits. The host is
emulated: domains, processes and containers that start and end, applications that send spans, and
scrapes. The memory therefore includes the emulation and excludes the sockets and other exporters.

    .venv/bin/python -m benchmarks.memory_day [--hours 24] [--interval 1s] [--minutes 15]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from math import nan, sqrt
from pathlib import Path

from testbed.machine import describe
from testbed.process_costs import PAGE

from wattspan.attribution.ledger import Ledger, LedgerSettings
from wattspan.config import AgentSettings, SpansSettings, StoreSettings
from wattspan.http.messages import HttpRequest
from wattspan.http.sockets import Peer
from wattspan.ingest.export_request import ResourceClaim
from wattspan.ingest.identity_verification import IdentityResolver, SpanIdentity
from wattspan.ingest.trace_receiver import TraceReceiver
from wattspan.model import (
    SECOND,
    Consumer,
    Domain,
    Group,
    GroupKind,
    HwType,
    Microjoules,
    PayerInfo,
    Principal,
    Provenance,
    Reading,
    Usage,
)
from wattspan.model.settings import Duration
from wattspan.ports import Batch, UsageBatch
from wattspan.service.daemon import RELEASE_EVERY, configure_garbage_collector
from wattspan.service.energy_history import EnergyHistory
from wattspan.service.poller import LatestSnapshot, Poller, SnapshotProviders
from wattspan.service.sampling_demand import fixed
from wattspan.service.span_joiner import SpanJoiner
from wattspan.storage.store import Store
from wattspan.testing import FakeDirectory, ManualClock
from wattspan.util.process import configure_memory, release_memory
from wattspan_exporters.page import LIVE_JSON_PATH, LivePage
from wattspan_exporters.prometheus.exporter import METRICS_PATH, MetricsPages, SelfMetrics

HOUR = 3600 * SECOND
SAMPLE_EVERY = 300 * SECOND
SCRAPE_EVERY, WRITE_EVERY = 15 * SECOND, 5 * SECOND
FILLING = 2 * HOUR
"""The page's history has an hour, and the store its first hour's roll-up after that."""

SOCKETS, RESIDENT, SENDERS = 2, 60, 4
CHURN = 4  # processes that start in a second, and end some seconds later
SPANS, NAMES = 4, 3000  # spans a second, and names in turn: more than have series of their own
SENDER_LIFETIME, CONTAINER_LIFETIME = 600 * SECOND, 60 * SECOND


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--hours", type=float, default=24.0, help="of simulated time")
    options.add_argument("--interval", type=Duration.parse, default=Duration.parse("5s"))
    options.add_argument("--minutes", type=float, default=40.0, help="of real time, at most")
    chosen = options.parse_args()
    configure_memory()
    with tempfile.TemporaryDirectory() as folder:
        samples = list(
            simulate(Path(folder), round(chosen.hours * HOUR), chosen.interval, chosen.minutes * 60)
        )
    print(describe())
    print(report(samples, chosen.interval))


# ------------------------------------------------------------------------------- the emulated host


def domains() -> tuple[Domain, ...]:
    return tuple(
        Domain(
            f"emulated:{kind}-{socket}",
            kind,
            f"{kind} {socket}",
            "emulated",
            Provenance.EMULATED,
            resource=f"cpu:{socket}",
            method="cpu-time",
        )
        for socket in range(SOCKETS)
        for kind in (HwType.CPU, HwType.MEMORY)
    )


class DayHost:
    """Counters, processes and senders of spans; implements the ports of sources and of usage."""

    name = "emulated"

    def __init__(self, clock: ManualClock) -> None:
        self._clock, self._random = clock, random.Random(1)
        self._domains = domains()
        self._counters = dict.fromkeys((one.id for one in self._domains), 0)
        self._last = clock.now()
        self._next_pid = 1000
        self._new: list[PayerInfo] = []
        self._resident = [self._start(f"service-{n}") for n in range(RESIDENT)]
        self._short: deque[tuple[int, Consumer]] = deque()  # with the time of the end
        self.senders: dict[int, Consumer] = {}
        self._renewed = -SENDER_LIFETIME

    def _start(self, command: str) -> Consumer:
        self._next_pid += 1
        consumer = Consumer(self._next_pid, self._clock.monotonic() // 10_000_000)
        container = self._clock.monotonic() // CONTAINER_LIFETIME
        groups = (
            Group(GroupKind.CONTAINER, f"container-{container}-{consumer.pid % 4}"),
            Group(GroupKind.USER, f"user-{consumer.pid % 5}"),
        )
        self._new.append(PayerInfo(consumer, command, groups, f"user-{consumer.pid % 5}", 1))
        return consumer

    def read(self) -> Batch:
        now = self._clock.now()
        elapsed = now.mono - self._last.mono
        for number, domain in enumerate(self._domains):
            watts = 40 + 10 * number + self._random.randrange(30)
            self._counters[domain.id] += watts * elapsed // 1000
        readings = tuple(
            Reading(domain.id, now, Microjoules(self._counters[domain.id]))
            for domain in self._domains
        )
        return Batch(self._domains, readings)

    def poll(self, *, settle: bool = True, watched: object = None) -> UsageBatch:
        start, self._last = self._last, self._clock.now()
        now, elapsed = self._last.mono, self._last.mono - start.mono
        exited = self._renew(now)
        count = CHURN * max(1, elapsed // SECOND) if now // SECOND != start.mono // SECOND else 0
        for _ in range(count):
            ends = now + self._random.randrange(1, 8) * SECOND
            self._short.append((ends, self._start(f"command-{self._random.randrange(500)}")))
        for _ in range(len(self._short)):
            ends, consumer = self._short.popleft()
            if ends <= now:
                exited.append(consumer)
            else:
                self._short.append((ends, consumer))
        active = [consumer for _, consumer in self._short]
        active += self._random.sample(self._resident, RESIDENT // 5)
        active += self.senders.values()
        usages = tuple(
            Usage(
                f"cpu:{socket}",
                start,
                self._last,
                {one: self._random.randrange(elapsed // 50) for one in active[socket::SOCKETS]},
                capacity=8 * elapsed,
            )
            for socket in range(SOCKETS)
            if elapsed
        )
        new, self._new = tuple(self._new), []
        return UsageBatch(usages, new, tuple(exited), processes=RESIDENT + len(self._short))

    def _renew(self, now: int) -> list[Consumer]:
        """Replace the applications that send spans; returns those that end."""
        if now - self._renewed < SENDER_LIFETIME:
            return []
        self._renewed, ended = now, list(self.senders.values())
        started = [self._start(f"application-{n}") for n in range(SENDERS)]
        self.senders = {one.pid: one for one in started}
        return ended

    def request(self, second: int) -> bytes:
        """An OTLP/JSON request with the spans of one application in the last second."""
        pid = sorted(self.senders)[second % SENDERS]
        wall = self._clock.now().wall
        spans = [
            {
                "traceId": f"{self._random.getrandbits(128):032x}",
                "spanId": f"{self._random.getrandbits(64) or 1:016x}",
                "name": f"request {(second * SPANS + number) % NAMES}",
                "startTimeUnixNano": str(wall - 900_000_000),
                "endTimeUnixNano": str(wall - number * 10_000_000),
            }
            for number in range(SPANS)
        ]
        attributes = [
            {"key": "service.name", "value": {"stringValue": f"service-{second % SENDERS}"}},
            {"key": "process.pid", "value": {"intValue": str(pid)}},
        ]
        resource = {"resource": {"attributes": attributes}, "scopeSpans": [{"spans": spans}]}
        return json.dumps({"resourceSpans": [resource]}).encode()

    def close(self) -> None:
        """Nothing to close."""


class KnownSenders(IdentityResolver):
    """Resolves the claimed pid among the emulated applications."""

    def __init__(self, host: DayHost) -> None:
        self._host = host

    def resolve(self, peer: Peer, claims: Iterable[ResourceClaim]) -> tuple[SpanIdentity, ...]:
        senders = self._host.senders
        return tuple(SpanIdentity(senders[one.pid or 0], Principal(1000)) for one in claims)

    def principal(self, consumer: Consumer) -> Principal:
        return Principal(1000)


# ------------------------------------------------------------------------------------ the day

Sample = tuple[float, float]
"""Simulated hours and resident megabytes."""


def simulate(folder: Path, duration: int, interval: int, limit: float) -> Iterator[Sample]:
    """Samples of the memory at every SAMPLE_EVERY, until ``duration`` or ``limit`` real seconds."""
    began, clock = time.monotonic(), ManualClock()
    host = DayHost(clock)
    agent, store = AgentSettings(), Store(folder, StoreSettings(), clock, emulated=True)
    history = EnergyHistory(agent.history, agent.history_bytes)
    ledger = Ledger(LedgerSettings(), boot_id="day", now=clock.monotonic())
    joiner = SpanJoiner(clock, history, KnownSenders(host), SpansSettings(), keep=agent.history)
    receiver = TraceReceiver(joiner.inbox, clock, max_request=SpansSettings().max_request)
    poller = Poller(
        clock,
        ledger,
        history,
        [host],
        host,
        FakeDirectory(),
        LatestSnapshot(ledger.snapshot(clock.now(), "day")),
        demand=fixed(clock, interval),
        providers=SnapshotProviders(spans=joiner.accounts),
        save=store.write_latest,
    )
    site = LivePage(poller.view)
    pages = MetricsPages(poller.view, clock, "day", SelfMetrics("day"), site)
    configure_garbage_collector()
    start = clock.monotonic()
    with asyncio.Runner() as runner:
        while (elapsed := clock.monotonic() - start) < duration:
            if time.monotonic() - began > limit:
                break
            clock.advance(ns=interval)
            poller.turn()
            second = (elapsed + interval) // SECOND
            if second != elapsed // SECOND:
                site.remember()
                runner.run(receiver.receive(host.request(second), Peer(), json=True))
                joiner.turn()
            if _passes(elapsed, interval, SCRAPE_EVERY):
                for path in (METRICS_PATH, LIVE_JSON_PATH):
                    headers = {"accept-encoding": "gzip"}
                    runner.run(pages(HttpRequest("GET", path, {}, headers, b"", Peer())))
            if _passes(elapsed, interval, WRITE_EVERY) and (newest := poller.checkpoint()):
                store.write(newest)
            if _passes(elapsed, interval, RELEASE_EVERY):
                release_memory()
            if _passes(elapsed, interval, SAMPLE_EVERY):
                yield (elapsed + interval) / HOUR, rss_megabytes()
    spans = sum(row.count for row in poller.view().spans.rows)
    assert spans > 0, "no span was joined"
    assert poller.view().processes, "no process has energy"
    store.close()


def _passes(elapsed: int, interval: int, every: int) -> bool:
    return (elapsed + interval) // every != elapsed // every


def rss_megabytes() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / 1e6


# ----------------------------------------------------------------------------------- the result


def report(samples: Sequence[Sample], interval: int) -> str:
    settled = hourly_medians([one for one in samples if one[0] * HOUR > FILLING])
    values = [megabytes for hours, megabytes in samples if hours * HOUR > FILLING] or [nan]
    hours = samples[-1][0]
    lines = [
        f"\nRSS over {hours:.1f} simulated hours, a tick every {interval / SECOND:g} s: {RESIDENT} "
        f"processes, {CHURN} short-lived ones and {SPANS} spans a second (goal: flat)\n",
        "| first | after two hours: least | median | most | slope, MB/day (95 %) | result |",
        "|---|---|---|---|---|---|",
    ]
    least, median, most = min(values), statistics.median(values), max(values)
    figures = f"| {samples[0][1]:.1f} MB | {least:.1f} MB | {median:.1f} MB | {most:.1f} MB "
    if len(settled) < MIN_POINTS:
        return "\n".join((*lines, f"{figures}| too few hours | not judged |"))
    slope, low, high = sen_slope(settled)
    result = "rises" if low > 0 else "falls" if high < 0 else "flat"
    interval_text = f"{24 * slope:+.2f} ({24 * low:+.2f} to {24 * high:+.2f})"
    return "\n".join((*lines, f"{figures}| {interval_text} | {result} |"))


MIN_POINTS = 10
"""Points below which the normal approximation of Kendall's statistic does not hold."""


def hourly_medians(samples: Sequence[Sample]) -> list[Sample]:
    """The median of each whole hour: neighbouring samples of memory are not independent."""
    hours: dict[int, list[float]] = {}
    for at, value in samples:
        hours.setdefault(int(at), []).append(value)
    return [(float(at), statistics.median(values)) for at, values in hours.items()]


def sen_slope(points: Sequence[Sample]) -> tuple[float, float, float]:
    """Sen's slope per hour, and the bounds of its 95 % confidence interval.

    Source: Gilbert, Statistical Methods for Environmental Pollution Monitoring (1987), 16.5: of N
    sorted slopes of all pairs the bounds are number (N - C) / 2 and (N + C) / 2 + 1, with C the
    normal quantile times the standard deviation of Kendall's statistic without ties.
    """
    slopes = sorted((y - x) / (b - a) for (a, x), (b, y) in combinations(points, 2))
    count = len(points)
    spread = 1.96 * sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low = max(0, int((len(slopes) - spread) / 2) - 1)
    high = min(len(slopes) - 1, -int(-(len(slopes) + spread) // 2))
    return statistics.median(slopes), slopes[low], slopes[high]


if __name__ == "__main__":
    main()
