"""Conversion of Unix time to monotonic time, by the offset of the clocks at that time.

Spans have Unix times, energy has monotonic times. The offset between the clocks changes when the
wall clock is set or slewed, and when the host is suspended, because the monotonic clock stops: a
suspend is a step forward.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from wattspan.model import MILLISECOND, Instant
from wattspan.spans.values import SpanColumns

CLOCK_STEP = MILLISECOND
"""A larger change of the offset is a step."""

IMMEDIATE_STEP = 100 * MILLISECOND
"""A larger change is accepted at once; a smaller one has to last.

A reader that is interrupted between the two clocks observes the wall clock too far ahead: by
milliseconds on a busy host, hardly ever by this much.
"""

DRIFT = MILLISECOND // 4
"""The step by which a slew is followed."""

OBSERVATIONS = 3
"""The consecutive observations of a small change forward before it is followed."""

_MAX_OFFSETS = 512
_FOREVER = 2**63


class _OffsetPeriod(NamedTuple):
    """One offset with its possible wall times (``first`` to ``last``) and monotonic times."""

    first: int
    last: int
    offset: int  # wall less monotonic
    since: int
    until: int


class WallClockConverter:
    """Converts Unix nanoseconds to monotonic ones; observes the clocks at every tick.

    A change occurs at an unknown time between two observations, so a time between them may be
    wrong by the change, but not by more than the time between the two. After a step back some wall
    times occur twice: the later one applies once it has been observed. Wall times that a step
    forward skips are converted to the moment of the change. The first and the last offset also
    apply before the first and after the last observation.
    """

    def __init__(self) -> None:
        self._past: deque[_OffsetPeriod] = deque(maxlen=_MAX_OFFSETS)  # oldest first
        self._highest = -_FOREVER  # the latest wall time of all past periods
        self._offset = self._since = 0  # of the present period
        self._from, self._to = 1, 0  # the wall times that need no search: none yet
        self._steady = 0  # monotonic time of the newest observation without a step
        self._ahead: list[int] = []  # recent leads of the wall clock over the present offset

    def observe(self, now: Instant) -> None:
        """Record the clocks of one moment; moments come in order."""
        ahead = now.wall - now.mono - self._offset
        if self._from > self._to:
            self._offset, self._since, self._from = ahead, now.mono, -_FOREVER
        elif change := self._confirmed(ahead):
            since, until, offset = self._since, now.mono, self._offset
            self._past.append(_OffsetPeriod(since + offset, until + offset, offset, since, until))
            self._highest = max(self._highest, until + offset)
            self._offset += change
            self._since = self._steady
            self._from = self._since + self._offset
            self._ahead.clear()
        if now.wall - now.mono - self._offset <= CLOCK_STEP:
            self._steady = now.mono
        self._to = now.mono + self._offset + CLOCK_STEP

    def monotonic(self, unix: int) -> int:
        """The monotonic time at Unix time ``unix``; ValueError before any observation."""
        if self._from <= unix <= self._to:
            return unix - self._offset
        return self._search(unix)

    def offset(self, first: int, last: int) -> int | None:
        """Unix time less monotonic time in a whole period; None if a search is needed."""
        return self._offset if self._from <= first and last <= self._to else None

    def spans(self, received: SpanColumns) -> SpanColumns:
        """Received spans on the monotonic clock."""
        offset = self.offset(min(received.start), max(received.end))
        if offset is None:
            starts = list(map(self.monotonic, received.start))
            ends = list(map(self.monotonic, received.end))
        else:
            starts = [start - offset for start in received.start]
            ends = [end - offset for end in received.end]
        return received.replaced(start=starts, end=ends)

    def _confirmed(self, ahead: int) -> int:
        """The confirmed change of the offset.

        An interrupted reader observes the wall clock too far ahead, never behind: a change back
        is confirmed at once, a change forward only if it lasts.
        """
        if ahead < -DRIFT or ahead > IMMEDIATE_STEP:
            return ahead
        self._ahead.append(ahead)
        del self._ahead[:-OBSERVATIONS]
        *_, before, _ = (0, *self._ahead)
        if min(before, ahead) > CLOCK_STEP and abs(before - ahead) <= CLOCK_STEP:
            return min(before, ahead)
        least = min(self._ahead)
        return least if least > DRIFT and len(self._ahead) == OBSERVATIONS else 0

    def _search(self, unix: int) -> int:
        """Conversion of times before the present period, or possibly of an earlier one."""
        if self._from > self._to:
            raise ValueError("the clocks have not been observed yet")
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
