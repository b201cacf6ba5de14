"""Received spans that wait for others of their process: for how long, and their shares meanwhile.

An exporter sends spans in batches, so a span may arrive long after others of the same time. The
energy of a period is divided once, when the usual delay of its sender has passed. Spans of later
batches that were open in the period take part, and their shares are kept until they are settled.
A sender that works on one thing at a time has no such spans, and is not waited for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

from wattspan.model import MILLISECOND, SECOND
from wattspan.spans.values import MAX_DURATION, SpanColumns
from wattspan.spans.weights import GenerationalCache

MAX_HOLD = 6 * SECOND
"""The longest wait for later batches: OpenTelemetry's exporters send every 5 s by default."""

MAX_HELD_DURATION = SECOND // 2
"""The part of a span's duration that counts as delay, so that long spans delay no short ones."""

_ONE_IN = 500  # spans that may arrive later than the learned delay
_SAMPLES = 16  # spans of a batch that are examined
_MAX_COUNT = 2048  # examined spans after which all counts are halved
_UNIT = 20  # a unit of delay is 2**20 nanoseconds

MAX_AWAITED_PARENTS = 64
"""Parents of received spans, themselves not received, that one sender's account remembers."""

CLOCK_ERROR = MILLISECOND
"""Spans of two batches that overlap by less may be one after the other, by another clock offset."""


class ReceiptDelay:
    """The delay of nearly all spans of one sender, up to ``longest``.

    A delay is the time from the start of a span, or from ``held`` before its end, to its receipt.
    Delays are counted in buckets of at most an eighth of their length; the counts of earlier spans
    fade. Longer delays than ``longest`` are ignored, because no hold bridges them.
    """

    def __init__(self, longest: int = MAX_HOLD, held: int = MAX_HELD_DURATION) -> None:
        self._longest, self._held = longest, held
        self._counts: Counter[int] = Counter()
        self.hold = 0
        """Nanoseconds to wait for spans of a moment; 0 before any span."""

    def add(self, starts: Sequence[int], ends: Sequence[int], received: int) -> None:
        """Add a batch in the order of its export; all times are monotonic nanoseconds."""
        step = -(-len(starts) // _SAMPLES)
        for start, end in zip(starts[::step], ends[::step], strict=True):
            delay = received - max(start, end - self._held)
            if 0 <= delay <= self._longest:
                units = delay >> _UNIT
                shift = max(0, units.bit_length() - 4)
                self._counts[8 * shift + (units >> shift)] += 1
        if self._counts.total() > _MAX_COUNT:
            self._counts = Counter({key: count // 2 for key, count in self._counts.items()})
            self._counts += Counter()  # without zeros
        self.hold = self._quantile()

    def _quantile(self) -> int:
        later, total = 0, self._counts.total()
        for bucket in sorted(self._counts, reverse=True):
            later += self._counts[bucket]
            if later * _ONE_IN > total:
                shift = max(0, bucket // 8 - 1)
                return min(self._longest, bucket - 8 * shift + 1 << shift + _UNIT)
        return 0


class SpanOverlaps:
    """Tells if spans of a sender were open beside others, which are no ancestors of theirs.

    Only such spans take energy from spans of other batches: the time of a child is its own, and its
    parent, which arrives later, takes part between its children only.
    """

    def __init__(self) -> None:
        self._until = 0  # the latest end
        self._parents: dict[bytes, None] = {}  # awaited parents of received spans, oldest first

    def add(self, spans: SpanColumns, received: int = 2**63) -> bool:
        """Add a batch in the order of its export; True if one of its spans was open beside others.

        Where a parent is unknown, its children count as open beside its own parent. A span that
        ends after its receipt, by mistake, is beside no span that begins later.
        """
        found = self._beside_earlier(spans) or _beside_each_other(spans)
        self._until = max(self._until, min(received, max(spans.end, default=0)))
        own = {b"", *spans.id}
        for parent in spans.parent if any(spans.parent) else ():
            if parent not in own:
                self._await(parent)
        return found

    def _beside_earlier(self, spans: SpanColumns) -> bool:
        """True if a span began before the end of an earlier batch's, and is no ancestor of it."""
        latest, found = self._until - CLOCK_ERROR, False
        if self._parents.keys().isdisjoint(spans.id):
            return min(spans.start, default=latest) < latest
        for span, parent, start in zip(spans.id, spans.parent, spans.start, strict=True):
            if span in self._parents:
                del self._parents[span]
                self._await(parent)
            elif start < latest:
                found = True
        return found

    def _await(self, parent: bytes) -> None:
        self._parents.pop(parent, None)
        self._parents[parent] = None
        if len(self._parents) > MAX_AWAITED_PARENTS:
            del self._parents[next(iter(self._parents))]


def _beside_each_other(spans: SpanColumns) -> bool:
    """True if two spans have common time, and one is not within the other as its descendant."""
    ids, parents, ends = spans.id, spans.parent, spans.end
    # Of equal spans the later one is the parent: spans are exported when they have ended.
    order = sorted(
        (start, -end, -at)
        for at, (start, end) in enumerate(zip(spans.start, ends, strict=True))
        if start < end
    )
    around: list[int] = []  # the spans around the present one, each within the one before
    for start, _, negative in order:
        at = -negative
        while around and ends[around[-1]] <= start:
            around.pop()
        if around and (parents[at] != ids[around[-1]] or ends[at] > ends[around[-1]]):
            return True
        around.append(at)
    return False


class _WaitingShare(NamedTuple):
    """The packed share of a span up to a time, and the covered time in which it was a leaf."""

    until: int
    share: int
    taken: int


class WaitingShares:
    """The shares of received spans that are not settled yet. ``held`` is their packed sum."""

    def __init__(self) -> None:
        self._parts: dict[bytes, _WaitingShare] = {}
        self.held = 0

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def front(self) -> int | None:
        """The time up to which energy has been divided among waiting spans; None without any."""
        return max((part.until for part in self._parts.values()), default=None)

    def select(
        self, waiting: Sequence[SpanColumns], until: int, now: int, seen: GenerationalCache[bool]
    ) -> SpanColumns:
        """The valid spans of ``waiting`` that begin before ``until``.

        Invalid are spans that end before they begin or after ``now``, last longer than
        ``MAX_DURATION``, or are repeated.
        """
        found: list[SpanColumns] = []
        ids: set[bytes] = set()
        for spans in waiting:
            chosen: list[bool] = []
            for span, start, end in zip(spans.id, spans.start, spans.end, strict=True):
                valid = start <= end <= min(now, start + MAX_DURATION)
                valid = valid and span not in seen and span not in ids
                chosen.append(valid and start < until)
                if valid:
                    ids.add(span)
            found.append(spans.chosen(list(compress(range(len(chosen)), chosen))))
        return SpanColumns.joined(found) if found else SpanColumns.of([])

    def positions(self, ids: Sequence[bytes]) -> list[int]:
        """The positions of the spans that have a share already."""
        known = self._parts.keys() & ids
        return [i for i, span in enumerate(ids) if span in known] if known else []

    def until(self, span: bytes) -> int:
        """The time up to which a span has its share."""
        return self._parts[span].until

    def add(self, span: bytes, share: int, taken: int, until: int) -> None:
        """Add the share of a waiting span up to a time."""
        _, before, taken_before = self._parts.get(span, _WaitingShare(0, 0, 0))
        self._parts[span] = _WaitingShare(until, before + share, taken_before + taken)
        self.held += share

    def pop(self, span: bytes) -> tuple[int, int]:
        """The share of a span that is settled now, and the covered time in which it was a leaf."""
        part = self._parts.pop(span, None)
        if part is None:
            return 0, 0
        self.held -= part.share
        return part.share, part.taken

    def expire(self, before: int) -> None:
        """Release the shares of spans that have not been settled long after ``before``."""
        for span in [span for span, part in self._parts.items() if part.until <= before]:
            self.pop(span)
