"""Whether processes that slept have woken, told without asking each of them.

Asking thousands of sleepers ten times a second is what would cost most, and nearly always for
nothing. The kernel's sum over all processes, exact to the nanosecond, tells whether anybody did
anything that those who are awake did not do: only then are the sleepers asked, and anyhow once a
second. Up to ``tolerance`` of a poll's work may thus be charged up to a second late; none is lost.
Without such a sum the sleepers are asked at every poll.
"""

from __future__ import annotations

from wattspan.model import MILLISECOND, SECOND
from wattspan.processes.cgroups import TotalClock

EVERY = SECOND
"""The sleepers are asked at least this often."""

PATIENCE = 10
"""Seconds without any work after which a process counts as a sleeper."""

SHARE = 1000
"""Work of one part in this of the host's capacity may go unnoticed for a moment."""


def tolerance(capacity: int) -> int:
    """The nanoseconds that may be charged late, given what could have been done in a poll."""
    return max(MILLISECOND // 2, capacity // SHARE)


class Vigil:
    """Holds what was charged against the kernel's sum since everybody was last asked."""

    def __init__(self, total: TotalClock | None) -> None:
        self._total = total
        self._now: int | None = None
        self._since: int | None = None
        self._explained = 0
        self._next = 0

    @property
    def total(self) -> TotalClock | None:
        return self._total

    def read(self) -> None:
        """To be called before any process is asked."""
        self._now = self._total.read() if self._total is not None else None

    def explained(self, amount: int) -> None:
        """So much of the sum has been charged."""
        self._explained += amount

    def due(self, mono: int, capacity: int) -> bool:
        """Whether the sleepers must be asked now."""
        if self._now is None or self._since is None or mono >= self._next:
            return True
        return self._now - self._since - self._explained > tolerance(capacity)

    def asked(self, mono: int) -> None:
        """Everybody has been asked: what is not explained by now is nobody's in the table."""
        self._next = mono + EVERY
        self._since, self._explained = self._now, 0
        if self._total is not None:
            self._total.refresh()
