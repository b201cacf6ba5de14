"""The thread that renders a scrape."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from testbed.scrapes import full_host

from wattspan.http.messages import HttpRequest
from wattspan.http.sockets import Peer
from wattspan.model import MILLISECOND, Snapshot
from wattspan.testing import ManualClock
from wattspan_exporters.catalogue.definition import Instrument, Metric, Sample
from wattspan_exporters.prometheus.exporter import QUICK, MetricsPages, SelfMetrics


@dataclass
class Scraped:
    """Pages with one metric that takes ``duration`` nanoseconds and records its thread."""

    duration: int = 0
    threads: list[threading.Thread] = field(default_factory=list)
    clock: ManualClock = field(default_factory=ManualClock)
    snapshot: Snapshot = field(default_factory=full_host)

    def __post_init__(self) -> None:
        metric = Metric("x", Instrument.GAUGE, "", "Help.", (), self._draw)
        self.pages = MetricsPages(
            lambda: self.snapshot, self.clock, "1", SelfMetrics("1"), aliases=[metric]
        )

    def _draw(self, _: Snapshot) -> Iterator[Sample]:
        self.threads.append(threading.current_thread())
        self.clock.advance(ns=self.duration)
        yield (), 1

    def scrape(self, duration: int = 0) -> bool:
        """Render a new snapshot for ``duration``; True if that was in the server's thread."""
        self.duration, self.snapshot = duration, full_host()
        return asyncio.run(self._scrape())

    async def _scrape(self) -> bool:
        await self.pages(HttpRequest("GET", "/metrics", {}, {}, b"", Peer()))
        return self.threads[-1] is threading.current_thread()


def test_scrape_after_a_quick_one_is_rendered_in_the_servers_thread() -> None:
    scraped = Scraped()
    assert not scraped.scrape(QUICK)  # nothing is known yet
    assert scraped.scrape(QUICK)


def test_scrape_after_a_slow_one_is_rendered_in_a_worker_thread() -> None:
    scraped = Scraped()
    scraped.scrape(QUICK + MILLISECOND)
    assert not scraped.scrape(0)
    assert scraped.scrape(0)


def test_scrape_during_another_rendering_does_not_block_the_servers_thread() -> None:
    scraped = Scraped()
    scraped.scrape(0)
    with scraped.pages._lock:
        assert not scraped.pages._is_quick()
    assert scraped.pages._is_quick()
