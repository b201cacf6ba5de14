"""Eviction of the token buckets of peers."""

from wattspan.model import SECOND
from wattspan.sharing.rate_limiter import RateLimiter


def test_full_buckets_are_evicted_first() -> None:
    pace = RateLimiter(1, 10, 3)
    for peer, asked in (("once", 1), ("thrice", 3), ("often", 10)):
        for _ in range(asked):
            pace.admits(peer, 0)
    assert pace.admits("new", 4 * SECOND)
    assert len(pace) == 2, "who owes nothing any more is not remembered"
    assert [pace.admits("often", 4 * SECOND) for _ in range(5)] == [True] * 4 + [False]
