"""Spans and their energy, as values.

:mod:`wattspan.spans.profiles` has the energy of a process over time;
:mod:`wattspan.spans.energy_division` divides it among the spans of the process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from wattspan.model import HwType, Microjoules, ModelEnum


class Outcome(ModelEnum):
    """The result of a span; each span is counted once."""

    JOINED = "joined"  # the whole span was measured
    PARTIAL = "partial"  # a part of it is in gaps or before the history
    LATE = "late"  # its energy had been divided among other spans, except for a rest
    NO_ENERGY = "no_energy"  # its process is known, its time is completely outside the history
    UNKNOWN_PROCESS = "unknown_process"  # no evidence of its process
    NOT_BELIEVED = "not_believed"  # it claims a process that cannot be the sender
    INVERTED = "inverted"  # it ends before it begins
    FUTURE = "future"  # it ends later than now
    DUPLICATE = "duplicate"  # the process has sent the same span id before
    ABANDONED = "abandoned"  # announced and not received: its process is gone or it timed out
    CROWDED_OUT = "crowded_out"  # no room to wait for its energy


class Span(NamedTuple):
    """One ended span of a known process. Times are monotonic nanoseconds.

    ``thread`` is the native id of its first thread, 0 if unknown. ``cpu`` is the CPU time of that
    thread between start and end, None if unknown or if the span ended on another thread.
    ``weight`` is None for the mean weight.
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
    """The start of a span, announced by its process."""

    id: bytes  # 8
    parent: bytes  # 8, or b"" for none or a parent in another process
    at: int  # monotonic nanoseconds
    thread: int
    cpu: int  # CPU time of the thread since its start, nanoseconds; 0 if not read


class SpanEnd(NamedTuple):
    """The end of a span, announced by its process before the export."""

    id: bytes
    at: int
    thread: int
    cpu: int


class IntervalEnergy(NamedTuple):
    """The energy of a period, by hardware type.

    ``covered`` nanoseconds of it were measured, for all hardware types. ``uncertainty`` is the
    half-width of the 95 % range of each energy, from the steps of counters and the unknown power
    curve inside intervals at the edges.
    """

    energy: Mapping[HwType, Microjoules]
    uncertainty: Mapping[HwType, Microjoules]
    covered: int


class SpanEnergy(NamedTuple):
    """The energy of one span. Exclusive energies of a process add up; inclusive ones overlap."""

    span: Span
    exclusive: Mapping[HwType, Microjoules]
    inclusive: IntervalEnergy
    outcome: Outcome

    @property
    def coverage(self) -> float:
        """The measured fraction of the span's time (0–1)."""
        length = self.span.end - self.span.start
        return self.inclusive.covered / length if length > 0 else 0.0
