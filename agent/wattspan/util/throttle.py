"""Limits in time: of attempts that fail, of requests of a peer, and of repeated lines of a log."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Hashable


class RetryBackoff:
    """Time of the next attempt after failures; times are monotonic nanoseconds.

    The delay doubles with each failure, from ``first`` to ``longest``. ``random`` yields numbers
    from 0 up to 1, by which a delay is shortened by up to a half, so that many agents do not
    retry at one moment; the default leaves delays as they are. For one thread.
    """

    def __init__(self, first: int, longest: int, random: Callable[[], float] = lambda: 0.0) -> None:
        self._first, self._longest, self._random = first, longest, random
        self.retry_at = 0
        self.failures = 0  # since the last ``reset``
        self._delay = first

    def is_due(self, now: int) -> bool:
        return now >= self.retry_at

    def failed(self, now: int, retry_after: int | None = None) -> int:
        """Record a failure; returns the time of the next attempt.

        The next attempt is not before ``retry_after``, a delay that the peer asked for; the delay
        does not grow after such an answer.
        """
        self.failures += 1
        if retry_after is None:
            delay = self._jittered(self._delay)
            self._delay = min(2 * self._delay, self._longest)
        else:
            delay = max(retry_after, self._jittered(self._first))
        self.retry_at = now + delay
        return self.retry_at

    def reset(self) -> None:
        """Record a success: the next attempt is due at once, the next delay is ``first``."""
        self.retry_at = self.failures = 0
        self._delay = self._first

    def _jittered(self, delay: int) -> int:
        return delay - round(delay / 2 * self._random())


# --------------------------------------------------------------------------- rates of requests

_SECOND = 10**9

BURST_SECONDS = 4
"""Burst size in seconds of the permitted rate."""

MAX_PEERS = 1024
"""Number of buckets; a peer without one has a full bucket."""

_EVICTION_DIVISOR = 4  # a fraction is evicted at once, so that not each new peer costs a sort


class RateLimiter:
    """Admits ``rate`` requests a second of each peer, and ``burst`` at once.

    It has a token bucket for each peer, in exact integers.

    At most ``burst + rate * t`` requests of a peer are admitted in any time ``t``; a peer whose
    requests are at least ``1 / rate`` apart is never refused. For one thread, or under a lock;
    times are monotonic nanoseconds.
    """

    def __init__(self, rate: int, burst: int, remembered: int = MAX_PEERS) -> None:
        self.rate, self._burst, self._remembered = rate, burst * _SECOND, remembered
        # The time at which a peer's bucket is full again, in units of 1/rate nanoseconds, so that
        # a request is _SECOND units and nothing is rounded.
        self._full: dict[Hashable, int] = {}

    def __len__(self) -> int:
        """Number of buckets."""
        return len(self._full)

    def admits(self, peer: Hashable, now: int) -> bool:
        """True if a request of ``peer`` is admitted now; only admitted requests count."""
        at = now * self.rate
        full = max(self._full.get(peer, at), at) + _SECOND
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


# ---------------------------------------------------------------------------- lines of a log

DEFAULT_INTERVAL = 60_000_000_000  # nanoseconds
MAX_KEYS = 50


class RateLimitedLog:
    """Passes messages to ``log``: of each key at most one per ``interval`` nanoseconds.

    Times of at most ``MAX_KEYS`` keys are remembered. For one thread.
    """

    def __init__(
        self,
        monotonic: Callable[[], int],
        log: Callable[[str], None],
        interval: int = DEFAULT_INTERVAL,
    ) -> None:
        self._monotonic, self._log, self._interval = monotonic, log, interval
        self._logged: dict[str, int] = {}

    def write(self, message: str, key: str = "") -> None:
        now = self._monotonic()
        if now - self._logged.get(key, now - self._interval) < self._interval:
            return
        if len(self._logged) >= MAX_KEYS:
            self._logged.clear()
        self._logged[key] = now
        self._log(message)

    def failure(self, task: str, error: Exception) -> None:
        """Log an unexpected exception with the line that raised it."""
        where = traceback.extract_tb(error.__traceback__)[-1]
        self.write(
            f"{task} failed: {type(error).__name__}: {error} "
            f"({where.filename.rpartition('/')[2]}:{where.lineno}). Please report this; "
            "energy measurement continues."
        )
