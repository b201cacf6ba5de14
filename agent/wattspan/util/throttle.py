"""Delays between the attempts of a failing operation, and a log that does not repeat itself."""

from __future__ import annotations

import traceback
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
