"""The times of ticks: when the next is due, and how many of the last minute were missed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from wattspan.model import SECOND, TickCounts
from wattspan.ports import Clock

MAX_SLEEP = SECOND
"""The longest sleep, after which a watchdog is told that the poller lives."""


class Ticker:
    """Wakes at absolute deadlines; missed ticks are counted and never replayed.

    ``interval`` returns the time between two ticks at a monotonic time. A change to a shorter one
    counts at once: the next tick is due that long after the last one, and now if that has passed.
    A longer one counts from the next tick on. ``sleep`` returns at a monotonic time, or earlier
    when the interval may have changed.
    """

    def __init__(
        self,
        clock: Clock,
        interval: Callable[[int], int],
        sleep: Callable[[int], None] | None = None,
    ) -> None:
        self._clock = clock
        self._interval_at = interval
        self._sleep = sleep or clock.sleep_until
        self._next = clock.monotonic()
        self.interval = interval(self._next)
        self.ticks = 0
        self.missed = 0

    def wait(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Return at the next deadline, at once if it has just passed, or soon after ``stopped``."""
        now, last, before = self._clock.monotonic(), self._next, self.interval
        self.interval = self._interval_at(now)
        # A poll that began at a longer interval has skipped ticks of that one only.
        longer = max(before, self.interval)
        skipped = max(0, (now - last) // longer - 1)
        self.missed += skipped
        self._next += self.interval + skipped * longer
        if self.interval < before:
            self._next = max(now, self._next)
        while (now := self._clock.monotonic()) < self._next and not stopped():
            self._sleep(min(self._next, now + MAX_SLEEP))
            now = self._clock.monotonic()
            if (interval := self._interval_at(now)) < self.interval:
                self.interval = interval
                self._next = min(self._next, max(now, last + interval))
        self.ticks += 1


RECENT = 60 * SECOND


@dataclass(slots=True)
class _Cell:
    """The ticks of one second."""

    second: int
    done: int = 0
    missed: int = 0
    longest: int = 0


class RecentTicks:
    """Counts ticks by seconds of monotonic time. For one thread."""

    def __init__(self) -> None:
        self._cells: deque[_Cell] = deque()

    def add(self, now: int, missed: int, duration: int) -> None:
        """Add a poll of ``duration`` nanoseconds and the ticks that were missed after it."""
        second = now // SECOND
        if not self._cells or self._cells[-1].second != second:
            self._cells.append(_Cell(second))
        cell = self._cells[-1]
        cell.done += 1
        cell.missed += missed
        cell.longest = max(cell.longest, duration)

    def counts(self, now: int) -> TickCounts:
        """The ticks of the minute before ``now``."""
        while self._cells and self._cells[0].second < (now - RECENT) // SECOND:
            self._cells.popleft()
        missed = sum(cell.missed for cell in self._cells)
        due = sum(cell.done for cell in self._cells) + missed
        return TickCounts(due, missed, max((cell.longest for cell in self._cells), default=0))
