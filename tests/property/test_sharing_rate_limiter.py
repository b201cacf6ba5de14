"""No peer asks more often than it may, and none that keeps to its rate is refused."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from wattspan.model import SECOND
from wattspan.sharing.pools import RateLimiter

rates, bursts = st.integers(1, 5000), st.integers(1, 50)
gaps = st.one_of(st.integers(0, 10), st.integers(0, SECOND), st.integers(0, 100 * SECOND))


@given(rates, bursts, st.integers(0, 2**62), st.lists(gaps, max_size=200))
def test_peer_rate_is_bounded_in_every_window(
    rate: int, burst: int, start: int, waits: list[int]
) -> None:
    pace, now, taken = RateLimiter(rate, burst), start, list[int]()
    for wait in waits:
        now += wait
        if pace.admits("peer", now):
            taken.append(now)
    for first, began in enumerate(taken):
        for last in range(first, len(taken)):
            window = taken[last] - began
            assert (last - first + 1) * SECOND <= burst * SECOND + rate * window


@given(rates, bursts, st.integers(0, 2**62), st.lists(st.integers(0, SECOND), max_size=100))
def test_peer_within_the_rate_is_never_refused(
    rate: int, burst: int, start: int, waits: list[int]
) -> None:
    pace, now = RateLimiter(rate, burst), start
    for wait in waits:
        assert pace.admits("patient", now)
        for _ in range(3):
            pace.admits("greedy", now)
        now += -(-SECOND // rate) + wait


@given(rates, bursts, st.integers(0, 2**62))
def test_burst_is_admitted_and_refilled(rate: int, burst: int, start: int) -> None:
    pace = RateLimiter(rate, burst)
    for now in (start, start - (-burst * SECOND // rate)):
        assert [pace.admits("peer", now) for _ in range(burst + 1)] == [True] * burst + [False]


@given(
    st.integers(1, 20),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, SECOND // 10)), max_size=300),
)
def test_number_of_buckets_is_bounded(most: int, asked: list[tuple[int, int]]) -> None:
    pace, now = RateLimiter(10, 3, most), 0
    for peer, wait in asked:
        now += wait
        pace.admits(peer, now)
        assert len(pace) <= most


@given(st.integers(2, 30), st.integers(2, 20))
def test_crowd_of_newcomers_does_not_make_the_greediest_forgotten(most: int, burst: int) -> None:
    pace = RateLimiter(1, burst, most)
    assert [pace.admits("greedy", 0) for _ in range(burst)] == [True] * burst
    for newcomer in range(5 * most):
        assert pace.admits(newcomer, 0)
    assert not pace.admits("greedy", 0)
