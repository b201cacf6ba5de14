"""What should never happen, told: where it happened, and not again for a while."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

from wattspan.model import SECOND
from wattspan.ports import Clock

LOG_INTERVAL = 60 * SECOND
"""It is told no more often than this."""


class RateLimitedLog:
    """For the one thread that finds fault."""

    def __init__(self, clock: Clock, log: Callable[[str], None]) -> None:
        self._clock = clock
        self._log = log
        self._told: int | None = None

    def about(self, what: str, error: Exception) -> None:
        """``what`` failed, and the rest goes on."""
        now = self._clock.monotonic()
        if self._told is None or now - self._told >= LOG_INTERVAL:
            self._told = now
            where = traceback.extract_tb(error.__traceback__)[-1]
            self._log(
                f"{what} failed: {type(error).__name__}: {error} "
                f"({Path(where.filename).name}:{where.lineno}). Please report this; "
                "energy goes on being measured."
            )
