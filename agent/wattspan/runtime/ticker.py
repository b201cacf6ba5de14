"""Deadlines that do not drift."""

from __future__ import annotations

from collections.abc import Callable

from wattspan.model import MILLISECOND
from wattspan.ports import Clock

NAP = 200 * MILLISECOND
"""Nobody who wants it to stop waits for longer than this."""


class Ticker:
    """Wakes at absolute multiples of an interval; what was missed is counted, never replayed."""

    def __init__(self, clock: Clock, interval: int) -> None:
        self._clock = clock
        self._interval = interval
        self._next = clock.monotonic()
        self.ticks = 0
        self.missed = 0

    def wait(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Return at the next deadline, at once if it has just passed, or soon if ``stopped``."""
        self._next += self._interval
        late = self._clock.monotonic() - self._next
        if late >= self._interval:
            skipped = late // self._interval
            self.missed += skipped
            self._next += skipped * self._interval
        while (now := self._clock.monotonic()) < self._next and not stopped():
            self._clock.sleep_until(min(self._next, now + NAP))
        self.ticks += 1
