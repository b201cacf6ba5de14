"""Unix time to monotonic time, by the offset between the two that was in force at that time.

Spans are told in Unix time, energy is known in monotonic time. The offset between the clocks
changes when somebody sets the wall clock, when it is slewed towards a better one, and when the
host sleeps, for then the wall goes on and the monotonic clock does not: to this module a
suspend is a step forward.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from wattspan.model import MILLISECOND, Instant

CLOCK_STEP = MILLISECOND
"""A change of the offset beyond this is a step."""

IMMEDIATE_STEP = 100 * MILLISECOND
"""A change beyond this is believed at first sight.

Between the readings of two clocks the reader may have been interrupted, which makes the wall
look ahead: by milliseconds on a busy host, hardly ever by so much.
"""

DRIFT = MILLISECOND // 4
"""A slew is followed in steps of this."""

_PATIENCE = 3  # observations in a row that must show a slew forward
_MAX_OFFSETS = 512
_FOREVER = 2**63


class _OffsetPeriod(NamedTuple):
    """One offset, and the wall times and monotonic times in which it may have been in force."""

    first: int
    last: int
    offset: int  # wall less monotonic
    since: int
    until: int


class WallClockConverter:
    """Brings Unix nanoseconds to the monotonic clock; to be shown the clocks at every tick.

    A change happened somewhere between two observations, so there both offsets hold, and a time
    may be mistaken by the change, though by no more than the time between the two. A wall
    clock that was set back shows some times twice: the later one is meant, unless that was not
    observed yet. One that was set forward leaves some times out: they are the moment of the change.
    Before the first observation the first offset holds, after the last the last.
    """

    def __init__(self) -> None:
        self._past: deque[_OffsetPeriod] = deque(maxlen=_MAX_OFFSETS)  # oldest first
        self._highest = -_FOREVER  # the latest wall time of any past era
        self._offset = self._since = 0  # of the present era
        self._from, self._to = 1, 0  # the wall times that need no search: none yet
        self._seen = 0  # monotonic time of the newest observation
        self._calm = 0  # and of the newest that showed no step
        self._ahead: list[int] = []  # how far the wall was ahead of what is believed, lately

    def observe(self, now: Instant) -> None:
        """Note the clocks of one moment; moments come in order."""
        ahead = now.wall - now.mono - self._offset
        if self._from > self._to:
            self._offset, self._since, self._from = ahead, now.mono, -_FOREVER
        elif change := self._certain(ahead):
            since, until, offset = self._since, now.mono, self._offset
            self._past.append(_OffsetPeriod(since + offset, until + offset, offset, since, until))
            self._highest = max(self._highest, until + offset)
            self._offset += change
            self._since = self._calm
            self._from = self._since + self._offset
            self._ahead.clear()
        self._seen = now.mono
        if now.wall - now.mono - self._offset <= CLOCK_STEP:
            self._calm = now.mono
        self._to = now.mono + self._offset + CLOCK_STEP

    def monotonic(self, unix: int) -> int:
        """The monotonic time that was at Unix time ``unix``; ValueError before any observation."""
        if self._from <= unix <= self._to:
            return unix - self._offset
        return self._search(unix)

    def offset(self, first: int, last: int) -> int | None:
        """Unix time less monotonic time for all of a stretch; None if it needs a search."""
        return self._offset if self._from <= first and last <= self._to else None

    # ------------------------------------------------------------------------------- details

    def _certain(self, ahead: int) -> int:
        """By how much the offset has changed, as far as that is beyond doubt.

        Who is interrupted between two readings sees the wall too far ahead, never behind: so
        what is behind is true at once, and what is ahead only if it stays so.
        """
        if ahead < -DRIFT or ahead > IMMEDIATE_STEP:
            return ahead
        self._ahead.append(ahead)
        del self._ahead[:-_PATIENCE]
        *_, before, _ = (0, *self._ahead)
        if min(before, ahead) > CLOCK_STEP and abs(before - ahead) <= CLOCK_STEP:
            return min(before, ahead)
        least = min(self._ahead)
        return least if least > DRIFT and len(self._ahead) == _PATIENCE else 0

    def _search(self, unix: int) -> int:
        """For times before the present era, or so late that an earlier one may have had them."""
        if self._from > self._to:
            raise ValueError("no moment was observed yet")
        if unix > self._highest + CLOCK_STEP and unix >= self._from:
            return unix - self._offset
        after = self._since
        present = self._from
        for first, last, offset, since, _ in reversed(self._past):
            if first - CLOCK_STEP <= unix <= last + CLOCK_STEP:
                return unix - offset
            if last < unix < present:
                return after
            after = since
        if not self._past or (unix >= self._from and unix >= self._past[0].first):
            return unix - self._offset
        return min(unix - self._past[0].offset, self._past[0].until)
