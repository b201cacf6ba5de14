"""Deadlines that do not drift."""

from __future__ import annotations

from wattspan.ports import Clock


class Ticker:
    """Wakes at absolute multiples of an interval; what was missed is counted, never replayed."""

    def __init__(self, clock: Clock, interval: int) -> None:
        self._clock = clock
        self._interval = interval
        self._next = clock.monotonic()
        self.ticks = 0
        self.missed = 0

    def wait(self) -> None:
        """Return at the next deadline; at once if it has just passed."""
        self._next += self._interval
        late = self._clock.monotonic() - self._next
        if late >= self._interval:
            skipped = late // self._interval
            self.missed += skipped
            self._next += skipped * self._interval
        self._clock.sleep_until(self._next)
        self.ticks += 1
