"""The ticks of the last minute: how many were missed, and how long polls took."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from wattspan.model import SECOND, TickCounts

PERIOD = 60 * SECOND


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
        while self._cells and self._cells[0].second < (now - PERIOD) // SECOND:
            self._cells.popleft()
        missed = sum(cell.missed for cell in self._cells)
        due = sum(cell.done for cell in self._cells) + missed
        return TickCounts(due, missed, max((cell.longest for cell in self._cells), default=0))
