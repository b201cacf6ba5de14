"""Rate limit of requests: a token bucket for each peer, in exact integers."""

from __future__ import annotations

from collections.abc import Hashable

from wattspan.model import SECOND

BURST_SECONDS = 4
"""Burst size in seconds of the permitted rate."""

MAX_PEERS = 1024
"""Number of buckets; a peer without one has a full bucket."""

_EVICTION_DIVISOR = 4  # a fraction is evicted at once, so that not each new peer costs a sort


class RateLimiter:
    """Admits ``rate`` requests a second of each peer, and ``burst`` at once.

    At most ``burst + rate * t`` requests of a peer are admitted in any time ``t``; a peer whose
    requests are at least ``1 / rate`` apart is never refused. For one thread, or under a lock;
    times are monotonic nanoseconds.
    """

    def __init__(self, rate: int, burst: int, remembered: int = MAX_PEERS) -> None:
        self.rate, self._burst, self._remembered = rate, burst * SECOND, remembered
        # The time at which a peer's bucket is full again, in units of 1/rate nanoseconds, so that
        # a request is SECOND units and nothing is rounded.
        self._full: dict[Hashable, int] = {}

    def __len__(self) -> int:
        """Number of buckets."""
        return len(self._full)

    def admits(self, peer: Hashable, now: int) -> bool:
        """True if a request of ``peer`` is admitted now; only admitted requests count."""
        at = now * self.rate
        full = max(self._full.get(peer, at), at) + SECOND
        if full - at > self._burst:
            return False
        if peer not in self._full and len(self._full) >= self._remembered:
            self._forget(at)
        self._full[peer] = full
        return True

    def _forget(self, at: int) -> None:
        """Evict full buckets, or else the fullest: an evicted peer gains a full bucket."""
        owing = sorted(self._full.items(), key=lambda one: one[1], reverse=True)
        kept = self._remembered - max(1, self._remembered // _EVICTION_DIVISOR)
        self._full = {peer: full for peer, full in owing[:kept] if full > at}
