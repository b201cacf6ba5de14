"""Latencies on engines' pages: names, buckets, and what may happen between two pages."""

from __future__ import annotations

import math

import pytest
from testbed.engine_pages import VLLM, page
from testbed.latency_pages import BETWEEN, FIRST, TOKENS, LatencyPages

from wattspan.inference.engine_metrics import PAGES, OtherPageError, PageError, read_page, scan
from wattspan.inference.latency_histograms import (
    LATENCIES,
    LatencyBucket,
    LatencyNames,
    LatencyPage,
    bound_of,
    latency_names,
    observed,
    read_latencies,
    read_tracked_page,
    spread,
)
from wattspan.model import MILLISECOND

OWN = (("engine", "0"), ("model_name", "m"))
INF = math.inf


def latencies(*lines: str, kind: str = "vllm") -> LatencyPage:
    """Those of a page with these lines, of the newest version of a kind."""
    page = next(one for one in PAGES if one.kind == kind)
    return read_latencies(scan("\n".join(lines).encode(), latency_names(kind)), page)


def test_histograms_of_a_page_are_read() -> None:
    pages = LatencyPages()
    for seconds in (0.05, 0.25, 0.3, 3000.0):
        pages.first.add(seconds)
    pages.between.add(0.02)
    body = pages.body(running=3, waiting=2)
    _, found = read_tracked_page(body)
    assert found.waiting == 2
    assert not found.by_token
    own = found.first[OWN]
    assert (own[0.04], own[0.06], own[0.25], own[0.5], own[INF]) == (0, 1, 2, 3, 4)
    assert found.of(first=False)[OWN][0.025] == 1
    assert found.of(first=True) == found.first


def test_times_of_tokens_stand_in_for_those_of_requests() -> None:
    pages = LatencyPages(by_token=True)
    pages.tokens.add(0.02, 50)
    body = pages.body()
    _, found = read_tracked_page(body)
    assert found.by_token
    assert found.between[OWN][0.025] == 50


def test_ranks_of_an_engine_report_the_same_requests() -> None:
    name = "sglang:time_to_first_token_seconds_bucket"
    lines = [
        f'{name}{{le="{bound}",model_name="m",tp_rank="{rank}"}} 7'
        for bound in ("0.1", "+Inf")
        for rank in (0, 1)
    ]
    queues = [f'sglang:num_queue_reqs{{model_name="m",tp_rank="{rank}"}} 5' for rank in (0, 1)]
    found = latencies(*lines, *queues, kind="sglang")
    assert found.first == {(("model_name", "m"),): {0.1: 7, INF: 7}}
    assert found.waiting == 5


def test_two_models_have_histograms_of_their_own_and_their_queues_are_summed() -> None:
    found = latencies(
        f'{FIRST}_bucket{{le="+Inf",model_name="a"}} 1',
        f'{FIRST}_bucket{{le="+Inf",model_name="b"}} 2',
        'vllm:num_requests_waiting{model_name="a"} 1',
        'vllm:num_requests_waiting{model_name="b"} 2',
    )
    assert {each[INF] for each in found.first.values()} == {1, 2}
    assert found.waiting == 3


@pytest.mark.parametrize(
    "line",
    [
        f'{FIRST}_bucket{{le="many"}} 1',
        f'{FIRST}_bucket{{le="NaN"}} 1',
        f'{FIRST}_bucket{{le="-1"}} 1',
        f'{FIRST}_bucket{{le="1e300"}} 1',
        f"{FIRST}_bucket 1",
        f'{FIRST}_bucket{{le="1"}} NaN',
        f"{FIRST}_count 1",
    ],
)
def test_line_that_is_no_bucket_is_ignored(line: str) -> None:
    assert latencies(line) == LatencyPage(by_token=True)


def test_engine_without_histograms_has_no_latency() -> None:
    assert latencies("x 1", kind="llama.cpp") == LatencyPage()
    assert not LatencyNames().has(first=True)
    assert LATENCIES["tgi"].has(first=False)
    assert not LATENCIES["tgi"].has(first=True)


def test_running_requests_of_dynamo_include_the_waiting_ones() -> None:
    assert latencies("x 1", kind="dynamo").waiting == 0
    assert latencies("x 1", kind="tensorrt-llm").waiting is None


def test_page_with_too_many_buckets_has_its_counters() -> None:
    lines = "\n".join(f'{TOKENS}_bucket{{le="1",n="{n}"}} 1' for n in range(3000))
    body = LatencyPages().body(running=3)
    assert read_tracked_page(body + lines.encode()) == (read_page(body), LatencyPage())


def test_page_of_no_engine_has_no_latencies_either() -> None:
    for body, error in ((b"[]", OtherPageError), (b"x 1", PageError)):
        with pytest.raises(error):
            read_tracked_page(body)


@pytest.mark.parametrize("kind", ["auto", "vllm"])
def test_one_scan_finds_counters_and_latencies(kind: str) -> None:
    pages = LatencyPages()
    pages.first.add(0.25, 7)
    reading, found = read_tracked_page(body := pages.body(running=3, finished=9), kind)
    assert reading == read_page(body)
    assert found.first[OWN][INF] == 7


def test_known_names_are_those_of_known_pages() -> None:
    assert set(LATENCIES) <= {one.kind for one in PAGES}
    assert (LATENCIES["vllm"].first[0], LATENCIES["vllm"].between[0]) == (FIRST, BETWEEN)
    assert b"num_requests_waiting" in page(VLLM, "m")


# --------------------------------------------------------------------------------- two pages

BEFORE = {OWN: {0.1: 5.0, 0.5: 8.0, INF: 9.0}}


def test_observations_between_two_pages_are_those_of_each_bucket() -> None:
    after = {OWN: {0.1: 7.0, 0.5: 10.0, INF: 12.0}}
    assert observed(BEFORE, after) == [
        LatencyBucket(0, 100 * MILLISECOND, 2),
        LatencyBucket(500 * MILLISECOND, None, 1),
    ]


@pytest.mark.parametrize(
    "after",
    [
        {0.1: 4.0, 0.5: 8.0, INF: 9.0},  # fell
        {0.1: 6.0, 0.5: 8.0, INF: 9.0},  # more up to a bound than up to the next
        {0.1: 5.0, 0.4: 8.0, INF: 9.0},  # another bound
        {0.1: 5.0, INF: 9.0},  # one less
        {0.1: 5.0, 0.2: 6.0, 0.5: 8.0, INF: 9.0},
        {},
    ],
)
def test_observations_are_unknown_after_a_restart_or_other_buckets(after: dict) -> None:
    assert observed(BEFORE, {OWN: after}) is None
    assert observed(BEFORE, {}) is None


def test_observations_without_the_last_bucket_are_unknown() -> None:
    assert observed({OWN: {0.1: 1.0}}, {OWN: {0.1: 2.0}}) is None


def test_series_of_a_new_model_begins_with_its_first_page() -> None:
    other = (("model_name", "b"),)
    assert observed(BEFORE, {**BEFORE, other: {INF: 1000.0}}) == []
    assert observed({}, BEFORE) == observed({}, BEFORE, whole=True) == []


def test_series_of_a_new_model_counts_from_zero_after_a_whole_page() -> None:
    other = (("model_name", "b"),)
    after = {**BEFORE, other: {INF: 3.0}}
    assert observed(BEFORE, after, whole=True) == [LatencyBucket(0, None, 3)]
    assert observed(after, BEFORE, whole=True) is None


# ------------------------------------------------------------------------------------ latencies


def test_latencies_are_as_many_as_observed_in_each_bucket() -> None:
    buckets = [LatencyBucket(0, 100, 3), LatencyBucket(100, 400, 2), LatencyBucket(400, None, 1)]
    found = spread(buckets, 6, [400])
    assert found[:3] == [(17, 1), (50, 1), (83, 1)]
    assert found[3:5] == [(141, 1), (283, 1)]  # by the logarithm
    assert found[5] == (401, 1)


def test_many_latencies_of_a_bucket_are_a_few_with_numbers() -> None:
    found = spread([LatencyBucket(0, 3200, 64_000), LatencyBucket(3200, 6400, 7)], 64_007, [])
    assert [number for _, number in found] == 32 * [2000] + 7 * [1]
    assert [one for one, _ in found[:3]] == [50, 150, 250]


def test_bucket_that_holds_the_limit_is_beyond_it() -> None:
    assert spread([LatencyBucket(100, 400, 2)], 2, [399]) == [(400, 2)]
    assert all(one <= 400 for one, _ in spread([LatencyBucket(100, 400, 9)], 9, [400, 100]))
    assert spread([LatencyBucket(400, None, 1)], 1, [900]) == [(901, 1)]


def test_latencies_of_tokens_are_spread_over_fewer_requests() -> None:
    buckets = [LatencyBucket(0, 10, 90), LatencyBucket(10, 20, 10)]
    found = [one for offset in (0.05, 0.35, 0.65, 0.95) for one in spread(buckets, 5, [10], offset)]
    assert sum(number for one, number in found if one > 10) == 2
    assert sum(number for _, number in found) == 20


def test_no_latency_comes_from_no_observation() -> None:
    assert spread([], 5, [1]) == []
    assert spread([LatencyBucket(0, 0, 1)], 1, [5]) == [(0, 1)]


def test_next_lower_bound_of_all_series_stands_for_a_limit() -> None:
    other = (("model_name", "b"),)
    pages = {OWN: {0.1: 0.0, 0.25: 0.0, INF: 0.0}, other: {0.1: 0.0, 0.2: 0.0, INF: 0.0}}
    assert bound_of(400 * MILLISECOND, {OWN: pages[OWN]}) == 250 * MILLISECOND
    assert bound_of(250 * MILLISECOND, {OWN: pages[OWN]}) == 250 * MILLISECOND
    assert bound_of(400 * MILLISECOND, pages) == 100 * MILLISECOND
    assert bound_of(10 * MILLISECOND, pages) is None
    assert bound_of(10 * MILLISECOND, {}) is None
