"""The newest pages of engines, from the scrapers' threads to the tuner's."""

from __future__ import annotations

from testbed.latency_pages import LatencyPages

from wattspan.config import ServingEngineSettings, TunedJobSettings
from wattspan.inference.latency_histograms import read_tracked_page
from wattspan.model import SECOND, Consumer
from wattspan.model.settings import Duration
from wattspan.tuning.engine_pages import EnginePages, EngineRequests

PROCESS = Consumer(7, 1)


def offered(body: bytes) -> EnginePages:
    pages = EnginePages({"llm"})
    settings = ServingEngineSettings(url="http://127.0.0.1:8000", name="llm")
    pages.offer(settings, SECOND, *read_tracked_page(body), PROCESS, [PROCESS])
    return pages


def test_newest_page_of_a_tracked_engine_is_kept() -> None:
    (page,) = offered(LatencyPages().body(running=2)).newest()
    assert (page.engine, page.interval, page.at) == ("llm", 5 * SECOND, SECOND)
    assert page.processes == (page.listener,) == (PROCESS,)
    assert page.latencies.first
    assert page.latencies.waiting == 0


def test_engines_of_tracked_jobs_are_known() -> None:
    pages = EnginePages({"llm"})
    assert "llm" in pages
    assert "other" not in pages
    assert pages.newest() == []


def read_at(seconds: int, work: EngineRequests, finished: int) -> str:
    """The cause after a page that is read each 5 s."""
    at = seconds * SECOND
    work.add(LatencyPages().read(at, 5 * SECOND, (PROCESS,), finished=finished))
    return work.read(at).cause


def requests() -> EngineRequests:
    limit = {"ttft_p90": Duration(SECOND)}
    job = TunedJobSettings(engine="llm", kind="requests", control="track", slo=limit)
    return EngineRequests(job)


def test_fresh_pages_that_do_not_continue_one_another_are_a_cause() -> None:
    """As of two replicas behind one port: each second page has less requests."""
    work = requests()
    causes = [read_at(5 * number, work, 900 - number) for number in range(1, 6)]
    assert causes[:3] == ["", "", ""]
    assert "do not continue one another" in causes[4]
    assert read_at(30, work, 900) == ""


def test_page_that_is_read_seldom_is_soon_late() -> None:
    work = requests()
    work.add(LatencyPages().read(SECOND, 60 * SECOND))
    assert work.read(70 * SECOND).cause == ""
    assert "was not read for 71 s" in work.read(72 * SECOND).cause


def test_declined_page_is_a_cause_until_the_next_one() -> None:
    work = requests()
    assert read_at(5, work, 1) == ""
    work.decline("too good to be true")
    assert work.read(6 * SECOND).cause == "too good to be true"
    assert read_at(10, work, 2) == ""
    assert work.read(11 * SECOND).sample is None
