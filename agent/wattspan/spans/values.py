"""Spans as energy sees them: what was told of one, and what it turns out to have spent.

Values only. :mod:`wattspan.spans.profiles` says what a process spent and when,
:mod:`wattspan.spans.joining` divides it among the process's spans.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from wattspan.model import HwType, Microjoules, ModelEnum


class Outcome(ModelEnum):
    """What became of a span; each is counted, none is silent."""

    JOINED = "joined"  # the whole span was measured
    PARTIAL = "partial"  # some of it fell into gaps, or before the history
    LATE = "late"  # its time had been settled among other spans: only what was left is its own
    NO_ENERGY = "no_energy"  # its process is known, its time is wholly outside the history
    UNKNOWN_PROCESS = "unknown_process"  # nothing says which process it belongs to
    NOT_BELIEVED = "not_believed"  # it claims a process that cannot be the sender's
    INVERTED = "inverted"  # it ends before it begins
    FUTURE = "future"  # it begins or ends later than now
    DUPLICATE = "duplicate"  # the same span id of the same process came before
    ABANDONED = "abandoned"  # announced, never ended: its process is gone or its time is up
    CROWDED_OUT = "crowded_out"  # there was no room to wait in


class Span(NamedTuple):
    """One ended span of one known process. Times are monotonic nanoseconds.

    ``thread`` is the native id of the thread it began on, 0 if unknown. ``cpu`` is the CPU time
    of that thread between its start and its end, None if unknown or if it ended on another.
    ``weight`` is its claim beside other spans, None for the usual one.
    """

    trace: bytes  # 16
    id: bytes  # 8
    parent: bytes  # 8, or b"" for none
    service: str
    name: str
    start: int
    end: int
    thread: int = 0
    cpu: int | None = None
    weight: int | None = None
    tokens_in: int = 0
    tokens_out: int = 0


class SpanStart(NamedTuple):
    """A span was opened: told by the process itself, at once."""

    id: bytes  # 8
    parent: bytes  # 8, or b"" for none or a parent in another process
    at: int  # monotonic nanoseconds
    thread: int
    cpu: int  # the thread's CPU time so far, nanoseconds; 0 if it was not asked for


class SpanEnd(NamedTuple):
    """A span was closed: told by the process itself, before its export."""

    id: bytes
    at: int
    thread: int
    cpu: int


class IntervalEnergy(NamedTuple):
    """The energy of a stretch of time, by kind.

    ``covered`` nanoseconds of it were measured, in every kind there is. ``uncertainty`` is how
    far off each figure may be, in microjoules: what the counter's steps and the unknown course
    of power inside an interval leave open at the edges.
    """

    energy: Mapping[HwType, Microjoules]
    uncertainty: Mapping[HwType, Microjoules]
    covered: int


class SpanEnergy(NamedTuple):
    """What one span spent. ``exclusive`` adds up over a process's spans, ``inclusive`` does not."""

    span: Span
    exclusive: Mapping[HwType, Microjoules]
    inclusive: IntervalEnergy
    outcome: Outcome

    @property
    def coverage(self) -> float:
        """The part of the span's time that was measured, 0 to 1."""
        length = self.span.end - self.span.start
        return self.inclusive.covered / length if length > 0 else 0.0
