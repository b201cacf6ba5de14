"""A log that does not repeat itself."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

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
            f"({Path(where.filename).name}:{where.lineno}). Please report this; "
            "energy measurement continues."
        )
