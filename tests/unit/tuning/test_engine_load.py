"""The load and the requests of a server, from the pages of its engine."""

from __future__ import annotations

import pytest
from testbed.latency_pages import LatencyPages

from wattspan.inference.engine_metrics import Figure, read_page
from wattspan.inference.latency_histograms import LatencyPage
from wattspan.model import MILLISECOND, SECOND, Consumer
from wattspan.tuning.decisions.engine_load import (
    MAX_REQUESTS,
    EngineLoad,
    EnginePageRead,
    EngineProgress,
)
from wattspan.tuning.decisions.load_cells import LatencyObjective
from wattspan.tuning.decisions.values import EnergyPoint

TTFT = LatencyObjective(True, 400 * MILLISECOND, 0.01)
TBT = LatencyObjective(False, 100 * MILLISECOND, 0.01)


class Engine:
    """An engine whose page is read each 5 s."""

    def __init__(self, *objectives: LatencyObjective, by_token: bool = False) -> None:
        self.load = EngineLoad(objectives or (TTFT, TBT))
        self.pages = LatencyPages(by_token=by_token)
        self.counts: dict[str, int] = {}
        self.now = 100 * SECOND
        self.page()

    def page(self, **more: int) -> EngineProgress | None:
        """The next page, with so much more of each counter and these gauges."""
        for key, value in more.items():
            gauge = key in ("running", "waiting")
            self.counts[key] = value + (0 if gauge else self.counts.get(key, 0))
        self.now += 5 * SECOND
        return self.load.add(self.pages.read(self.now, 5 * SECOND, **self.counts))


def test_load_is_the_mean_of_running_and_waiting_requests() -> None:
    engine = Engine()
    engine.page(running=4, waiting=2)
    found = engine.page(running=6, waiting=0, finished=10, prompt=5000, generated=900)
    assert found is not None
    sample = found.sample
    assert (sample.start, sample.end) == (110 * SECOND, 115 * SECOND)
    assert sample.in_flight == 6
    assert (sample.arrivals, sample.completions) == (10, 10)
    assert (sample.input_tokens, sample.output_tokens) == (5000, 900)
    assert engine.page(running=9, finished=2).sample.arrivals == 5
    assert engine.page(running=0).sample.arrivals == 0  # aborted ones


def test_first_page_is_the_base_of_the_next() -> None:
    load, pages = EngineLoad([TTFT]), LatencyPages()
    page = pages.read(SECOND, SECOND, finished=500)
    assert load.add(page) is None
    assert load.add(page) is None  # the same again
    assert load.add(pages.read(2 * SECOND, SECOND, finished=501)).sample.completions == 1


def test_requests_begin_before_their_pages_by_what_they_may_have_lasted() -> None:
    engine = Engine()
    for seconds in (0.2, 0.3, 0.45):
        engine.pages.first.add(seconds)
    engine.pages.between.add(0.02)
    engine.pages.between.add(0.2)
    found = engine.page(running=4, finished=10)
    assert found is not None
    first = [one for one in found.requests if one.first_token is not None]
    between = [one for one in found.requests if one.between is not None]
    assert {one.end for one in found.requests} == {engine.now}
    start = found.sample.start
    assert all(one.start == start - one.first_token for one in first)
    before = start - 2 * SECOND  # twice 2 requests for 5 s, of 10
    assert all(one.start == before - one.between for one in between)
    # 250 ms is the next lower bound of 400 ms.
    assert [one.number for one in first if one.first_token > TTFT.limit] == [2]
    assert [one.between > TBT.limit for one in between] == [False, True]
    assert not any(one.again for one in first)
    assert all(one.again for one in between)


def test_requests_with_one_limit_are_counted_once() -> None:
    engine = Engine(TBT)
    engine.pages.first.add(0.2)
    engine.pages.between.add(0.02)
    (one,) = engine.page(finished=1).requests
    assert one.first_token is None
    assert not one.again


def test_times_of_tokens_weigh_as_much_as_the_ended_requests() -> None:
    engine = Engine(TBT, by_token=True)
    requests = []
    for _ in range(20):
        engine.pages.tokens.add(0.02, 950)
        engine.pages.tokens.add(0.3, 50)
        found = engine.page(finished=10)
        assert found is not None
        assert all(one.start == found.sample.start - one.between for one in found.requests)
        requests += found.requests
    assert sum(one.number for one in requests) == 200
    assert sum(one.number for one in requests if one.between > TBT.limit) == pytest.approx(
        10, abs=1
    )


def test_names_that_change_between_pages_give_no_latency() -> None:
    engine = Engine(TBT)
    engine.pages.between.add(0.02)
    engine.pages.by_token = True
    engine.pages.tokens.add(0.02, 50)
    assert engine.page(finished=1).requests == []


def test_lying_page_makes_no_endless_list() -> None:
    engine = Engine(TTFT)
    engine.pages.first.add(0.2, 10**9)
    requests = engine.page(finished=1).requests
    assert sum(one.number for one in requests) == MAX_REQUESTS
    assert len(requests) < 100


def test_counters_that_fall_are_a_new_beginning() -> None:
    engine = Engine()
    engine.page(finished=10, generated=100)
    points = engine.page(finished=10, generated=100).generated
    assert points == (EnergyPoint(engine.now, 200),)
    engine.counts["finished"] = 3
    engine.pages = LatencyPages()
    assert engine.page() is None
    found = engine.page(finished=2, generated=50)
    assert found.sample.completions == 2
    assert found.generated == (EnergyPoint(engine.now - 5 * SECOND, 0), EnergyPoint(engine.now, 50))


def test_histogram_that_falls_alone_gives_no_latency() -> None:
    engine = Engine(TTFT)
    engine.pages.first.add(0.2, 10)
    engine.page(finished=10)
    engine.pages.first.counts = [0] * len(engine.pages.first.counts)
    found = engine.page(finished=10)
    assert found.sample.completions == 10
    assert found.requests == []


def test_forgotten_pages_are_no_base() -> None:
    engine = Engine()
    engine.load.forget()
    assert engine.page(finished=10) is None
    assert engine.page(finished=10).sample.completions == 10


# -------------------------------------------------------------------------------- what it lacks


def read(body: bytes, kind: str = "auto", latencies: LatencyPage | None = None) -> EnginePageRead:
    return EnginePageRead("e", SECOND, SECOND, read_page(body, kind), latencies or LatencyPage())


LLAMA = b"llamacpp:tokens_predicted_total 1\nllamacpp:requests_processing 1\n"
TGI = b"tgi_request_generated_tokens_sum 5\ntgi_request_success 1\ntgi_batch_current_size 1\n"


@pytest.mark.parametrize(
    ("body", "waiting", "objective", "missing"),
    [
        (LLAMA, 0.0, TTFT, "the page of its llama.cpp engine does not count its requests"),
        (TGI, None, TBT, "the page of its tgi engine does not count its requests"),
        (TGI, 0.0, TTFT, "the page of its tgi engine has no histogram of the time to the first"),
        (TGI, 0.0, TBT, "the page of its tgi engine has no histogram of the time between tokens"),
    ],
)
def test_missing_figure_is_named(
    body: bytes, waiting: float | None, objective: LatencyObjective, missing: str
) -> None:
    load = EngineLoad([objective])
    assert load.missing == ""
    load.add(read(body, latencies=LatencyPage(waiting=waiting)))
    assert load.missing.startswith(missing)
    later = read(body, latencies=LatencyPage(waiting=waiting))._replace(at=2 * SECOND)
    found = load.add(later)
    assert found is None or found.requests == []


def test_page_without_generated_tokens_has_no_points_of_them() -> None:
    load = EngineLoad([TBT])
    page = read(TGI, latencies=LatencyPage(waiting=0.0))
    bare = {
        figure: each
        for figure, each in page.counters.samples.items()
        if figure is not Figure.OUTPUT
    }
    page = page._replace(counters=page.counters._replace(samples=bare))
    load.add(page)
    assert load.add(page._replace(at=2 * SECOND)).generated == ()


def test_bound_stands_for_the_limit_of_each_objective() -> None:
    engine = Engine()
    assert engine.load.bounds == [250 * MILLISECOND, TBT.limit]
    assert engine.load.missing == ""
    assert EngineLoad([TTFT]).bounds == [None]


# -------------------------------------------------------------------------- pages that mislead

OTHERS = (Consumer(8, 1), Consumer(9, 1))


@pytest.mark.parametrize("processes", [OTHERS[1:], OTHERS])
def test_counters_of_another_process_are_no_continuation(processes: tuple[Consumer, ...]) -> None:
    """Neither of another engine's, nor of a second listener with the same workers."""
    load, pages = EngineLoad([TTFT]), LatencyPages()
    own = OTHERS[1:] if processes == OTHERS else (Consumer(7, 1),)
    load.add(pages.read(SECOND, SECOND, own, finished=5))
    pages.first.add(0.2, 900)
    assert load.add(pages.read(2 * SECOND, SECOND, processes, finished=905)) is None
    found = load.add(pages.read(3 * SECOND, SECOND, processes, finished=906))
    assert found.sample.completions == 1


def test_requests_without_latencies_are_a_fault_of_the_page() -> None:
    engine = Engine(TTFT)
    for _ in range(3):
        engine.pages.first.add(0.2, 20)
        engine.page(finished=20)
        assert engine.load.missing == ""
    for _ in range(5):
        assert engine.page(finished=20).requests == []
    assert "shows too few of the time to the first token" in engine.load.missing
    for _ in range(6):
        engine.pages.first.add(0.2, 20)
        engine.page(finished=20)
    assert engine.load.missing == ""


def test_first_tokens_of_a_burst_suffice_while_it_ends() -> None:
    engine = Engine(TTFT)
    engine.pages.first.add(0.2, 300)
    engine.page(running=300)
    for left in (200, 100, 0):
        engine.page(running=left, finished=100)
    assert engine.load.missing == ""


def test_new_series_counts_from_zero_after_a_whole_page() -> None:
    engine = Engine(TTFT)
    engine.page(finished=1)
    other = LatencyPages("other")
    other.first.add(0.6, 7)
    page = engine.pages.read(engine.now + SECOND, SECOND, **engine.counts)
    both = {**page.latencies.first, **other.read(SECOND, SECOND).latencies.first}
    page = page._replace(latencies=page.latencies._replace(first=both))
    assert sum(one.number for one in engine.load.add(page).requests) == 7


def test_duration_of_requests_is_averaged_and_bounded() -> None:
    engine = Engine(TBT)
    for _ in range(20):
        engine.pages.between.add(0.02, 10)
        engine.page(running=10, finished=10)
    engine.pages.between.add(0.2)
    found = engine.page(running=10, finished=1)
    back = found.sample.start - found.requests[0].start
    assert back < 15 * SECOND
    engine.load.forget()
    engine.page(running=900)
    engine.pages.between.add(0.2)
    found = engine.page(running=900, finished=1)
    assert found.sample.start - found.requests[0].start < 1201 * SECOND
