"""Spans that are settled together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import itemgetter

from wattspan.spans import Span

# Fields of a span, read by C functions: there are many spans.
ID, PARENT, START, END, CPU, WEIGHT = map(
    itemgetter, map(Span._fields.index, ("id", "parent", "start", "end", "cpu", "weight"))
)
CHAIN = 64  # ancestors that began at the same nanosecond: more are not followed


class Batch:
    """The spans of one call that can have energy, and their time as far as it is known."""

    def __init__(self, spans: Sequence[Span], horizon: int, watermark: int) -> None:
        self.spans = spans
        self.ids = list(map(ID, spans))
        self.starts = list(map(START, spans))
        self.ends = list(map(END, spans))
        if spans and (min(self.starts) < horizon or max(self.ends) > watermark):
            self.starts = [max(horizon, min(start, watermark)) for start in self.starts]
            self.ends = [max(horizon, min(end, watermark)) for end in self.ends]

    def parents(self) -> list[int]:
        """The place of each span's parent in the batch, -1 for none.

        A parent begins no later than its child; one that claims to is not believed, so that
        there are no circles.
        """
        spans = self.spans
        place = dict(zip(self.ids, range(len(spans)), strict=True))
        parents = list(map(place.get, map(PARENT, spans), repeat(-1)))
        for i, parent in enumerate(parents):
            if parent >= 0 and self.starts[parent] >= self.starts[i]:
                above, below = spans[parent].start, spans[i].start
                if above > below or (above == below and _circular(i, parents, spans)):
                    parents[i] = -1
        return parents


def _circular(i: int, parents: Sequence[int], spans: Sequence[Span]) -> bool:
    """Whether following parents that began at the same time leads back, or too far."""
    at = parents[i]
    for _ in range(CHAIN):
        if at < 0 or spans[at].start != spans[i].start:
            return False
        if at == i:
            return True
        at = parents[at]
    return True
