"""The newest pages of engines, from the scrapers' threads to the tuner's."""

from __future__ import annotations

from testbed.latency_pages import FIRST, LatencyPages

from wattspan.config import ServingEngineSettings
from wattspan.inference.engine_metrics import read_page
from wattspan.inference.latency_histograms import LatencyPage
from wattspan.model import SECOND, Consumer
from wattspan.tuning.engine_pages import EnginePages

PROCESS = Consumer(7, 1)


def offered(body: bytes, name: str = "llm") -> EnginePages:
    pages = EnginePages({"llm"})
    settings = ServingEngineSettings(url="http://127.0.0.1:8000", name=name)
    pages.offer(settings, SECOND, body, read_page(body), [PROCESS, PROCESS])
    return pages


def test_newest_page_of_a_tracked_engine_is_kept() -> None:
    (page,) = offered(LatencyPages().body(running=2)).newest()
    assert (page.engine, page.interval, page.at) == ("llm", 5 * SECOND, SECOND)
    assert page.processes == (PROCESS,)
    assert page.latencies.first
    assert page.latencies.waiting == 0


def test_page_of_another_engine_is_ignored() -> None:
    assert offered(LatencyPages().body(), "other").newest() == []


def test_page_with_too_many_buckets_has_no_latency() -> None:
    lines = "\n".join(f'{FIRST}_bucket{{le="1",n="{n}"}} 1' for n in range(3000))
    (page,) = offered(LatencyPages().body() + lines.encode()).newest()
    assert page.latencies == LatencyPage()
