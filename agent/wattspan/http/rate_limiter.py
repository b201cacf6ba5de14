"""How often somebody may ask: a token bucket for each peer, in exact integers."""

from __future__ import annotations

from collections.abc import Hashable

from wattspan.model import SECOND

BURST_SECONDS = 4
"""Seconds' worth of requests that a listener takes at once from whoever was silent before."""

MAX_PEERS = 1024
"""Peers that are known at a time; whoever is not known has asked for nothing."""

_EVICTION_DIVISOR = (
    4  # one in so many is forgotten at a time, lest every newcomer cost a look at all
)


class RateLimiter:
    """Lets ``rate`` requests a second of each peer through, and ``burst`` at once.

    Of one peer no more than ``burst + rate * t`` come through in any time ``t``, and who never
    asks sooner than ``1 / rate`` after the last time is never refused. For one thread, or under a
    lock; times are monotonic nanoseconds.
    """

    def __init__(self, rate: int, burst: int, remembered: int = MAX_PEERS) -> None:
        self.rate, self._burst, self._remembered = rate, burst * SECOND, remembered
        # When a peer's bucket is full again, in units of which there are ``rate`` in a
        # nanosecond, and so SECOND in a request: nothing is ever rounded.
        self._full: dict[Hashable, int] = {}

    def __len__(self) -> int:
        """How many peers are remembered."""
        return len(self._full)

    def admits(self, peer: Hashable, now: int) -> bool:
        """Whether a request of ``peer`` is let through now; only then does it count."""
        at = now * self.rate
        full = max(self._full.get(peer, at), at) + SECOND
        if full - at > self._burst:
            return False
        if peer not in self._full and len(self._full) >= self._remembered:
            self._forget(at)
        self._full[peer] = full
        return True

    def _forget(self, at: int) -> None:
        """Make room: of those whose bucket is full, or else of those who have taken the least.

        Who is forgotten may have a whole burst anew, so it is whoever gains the least by it.
        """
        owing = sorted(self._full.items(), key=lambda one: one[1], reverse=True)
        kept = self._remembered - max(1, self._remembered // _EVICTION_DIVISOR)
        self._full = {peer: full for peer, full in owing[:kept] if full > at}
