"""Latencies from histograms: properties of every pair of pages, also of invalid ones."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from wattspan.inference.latency_histograms import LatencyBucket, observed, spread
from wattspan.model import SECOND

LIMITS = (250_000_000, 400_000_000)
BOUNDS = (0.1, 0.25, 0.5, 2.5, math.inf)
counts = st.lists(st.integers(0, 50), min_size=len(BOUNDS), max_size=len(BOUNDS))
values = st.one_of(st.integers(0, 100).map(float), st.floats(0, 1e14))
series = st.dictionaries(st.sampled_from(BOUNDS), values)
pages = st.dictionaries(st.sampled_from([(("model", "a"),), (("model", "b"),)]), series)


def cumulative(each: list[int], base: list[int]) -> dict[float, float]:
    return {
        bound: float(sum(each[: place + 1]) + sum(base[: place + 1]))
        for place, bound in enumerate(BOUNDS)
    }


@given(counts, counts, counts)
def test_requests_within_a_bound_are_those_of_the_page(
    base: list[int], new: list[int], others: list[int]
) -> None:
    """No request is within a limit by the entries that is not by a bound up to the limit."""
    nothing = [0] * len(BOUNDS)
    keys = (("model", "a"),), (("model", "b"),)
    before = {keys[0]: cumulative(nothing, base), keys[1]: cumulative(nothing, others)}
    after = {keys[0]: cumulative(new, base), keys[1]: cumulative(new, others)}
    buckets = observed(before, after)
    assert buckets is not None
    total = sum(one.number for one in buckets)
    assert total == 2 * sum(new)
    found = spread(buckets, total, LIMITS)
    assert sum(number for _, number in found) == total
    for limit in LIMITS:
        kept = sum(
            count for bound, count in zip(BOUNDS, new, strict=True) if bound * SECOND <= limit
        )
        assert sum(number for one, number in found if one <= limit) == 2 * kept


@given(pages, pages)
def test_observations_of_any_two_pages_are_unknown_or_not_negative(
    before: dict, after: dict
) -> None:
    buckets = observed(before, after)
    for one in buckets or ():
        assert one.number > 0
        assert one.high is None or one.low < one.high


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 30), st.integers(1, 40)), max_size=6),
    st.integers(0, 3000),
    st.floats(0, 1),
)
def test_latencies_are_ascending_and_within_the_buckets(
    each: list[tuple[int, int, int]], count: int, offset: float
) -> None:
    buckets = [LatencyBucket(low, low + wide, many) for low, wide, many in each]
    found = spread(buckets, count, (25,), offset)
    assert found == sorted(found)
    assert sum(number for _, number in found) == (count if buckets else 0)
    for one, _ in found:
        assert any(bucket.low < one <= (bucket.high or 0) for bucket in buckets)
