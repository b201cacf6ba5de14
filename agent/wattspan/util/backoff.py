"""Exponential delays between the attempts of an operation that fails."""

from __future__ import annotations

from collections.abc import Callable


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
