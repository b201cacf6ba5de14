"""Weights of the spans of a process, and the batches and caches that they are computed from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from itertools import repeat
from typing import Any, Generic, TypeVar

from wattspan.spans.fair_division import FairDivision
from wattspan.spans.values import SpanColumns

T = TypeVar("T")


class GenerationalCache(Generic[T]):
    """A dictionary of two generations, of which the older is dropped for want of room or by age.

    It holds at most ``limit`` keys, beside those of one ``update`` and those that ``keep`` selects.
    """

    def __init__(self, limit: int, keep: Callable[[Any, T], bool] | None = None) -> None:
        self._half = max(1, limit // 2)
        self._keep = keep
        self._kept = 0  # keys of the older generation in the younger one
        self._young: dict[Hashable, T] = {}
        self._old: dict[Hashable, T] = {}
        self._since: int | None = None  # beginning of the younger generation

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._young or key in self._old

    def __setitem__(self, key: Hashable, value: T) -> None:
        self._young[key] = value
        self._bound()

    def bound(self, limit: int) -> None:
        """Hold at most ``limit`` keys from now on."""
        self._half = max(1, limit // 2)
        self._bound()

    def isdisjoint(self, keys: Collection[Hashable]) -> bool:
        """True if it holds none of ``keys``."""
        return self._young.keys().isdisjoint(keys) and self._old.keys().isdisjoint(keys)

    def update(self, values: Mapping[Any, T]) -> None:
        self._young.update(values)
        self._bound()

    def get(self, key: Hashable) -> T | None:
        found = self._young.get(key)
        return self._old.get(key) if found is None else found

    def age(self, now: int, memory: int) -> None:
        """Drop keys by age: called often, all that are older than twice ``memory``.

        Keys younger than ``memory`` are kept.
        """
        if self._since is None:
            self._since = now
        elif now - self._since >= memory:
            self.turn()
            self._since = now

    def turn(self) -> None:
        """Drop the older generation except for kept keys; the younger becomes the older."""
        keep = self._keep
        kept = {key: each for key, each in self._old.items() if keep(key, each)} if keep else {}
        self._kept = len(kept)
        self._old, self._young = self._young, kept
        self._since = None

    def _bound(self) -> None:
        if len(self._young) - self._kept >= self._half:
            self.turn()


class OrphanChildren:
    """The time of the children of a span that has not been received yet."""

    __slots__ = ("first", "last", "time")

    def __init__(self, start: int) -> None:
        self.first = self.last = start
        self.time = 0

    def add(self, start: int, end: int) -> None:
        self.time += max(0, end - max(start, self.last)) + max(0, min(end, self.first) - start)
        self.first, self.last = min(self.first, start), max(self.last, end)


class OrphanSpans(GenerationalCache[OrphanChildren]):
    """Children that were received before their parents, by the parent's id."""

    def remember(self, parent: bytes, start: int, end: int) -> None:
        children = self.get(parent)
        if children is None:
            children = self[parent] = OrphanChildren(start)
        children.add(start, end)


MAX_PARENT_CHAIN = 64  # ancestors with the same start that are followed


class SpanBatch:
    """Spans that are settled together, with their times clipped to the profile."""

    def __init__(self, spans: SpanColumns, horizon: int, watermark: int) -> None:
        self.spans = spans
        self.starts = spans.start
        self.ends = spans.end
        if spans and (min(self.starts) < horizon or max(self.ends) > watermark):
            self.starts = [max(horizon, min(start, watermark)) for start in self.starts]
            self.ends = [max(horizon, min(end, watermark)) for end in self.ends]

    def parents(self) -> list[int]:
        """The position of each span's parent in the batch, -1 for none.

        A parent that begins later than its child is ignored, so that there are no cycles.
        """
        spans = self.spans
        count = len(spans)
        if not any(spans.parent):
            return [-1] * count
        positions = dict(zip(spans.id, range(count), strict=True))
        parents = list(map(positions.get, spans.parent, repeat(-1)))
        starts = spans.start
        for i, parent in enumerate(parents):
            if parent >= 0 and self.starts[parent] >= self.starts[i]:
                above, below = starts[parent], starts[i]
                if above > below or (above == below and _circular(i, parents, starts)):
                    parents[i] = -1
        return parents


def _circular(i: int, parents: Sequence[int], starts: Sequence[int]) -> bool:
    """True if the chain of parents with the same start is a cycle or too long."""
    at = parents[i]
    for _ in range(MAX_PARENT_CHAIN):
        if at < 0 or starts[at] != starts[i]:
            return False
        if at == i:
            return True
        at = parents[at]
    return True


MILLION = 1_000_000  # weights by CPU time are in millionths of a core
MAX_WEIGHT = 1 << 24


class SpanWeights:
    """The weights of one process's spans: by attribute, or equal; announced ones by CPU time."""

    def __init__(self, *, by_cpu: bool) -> None:
        self._by_cpu = by_cpu
        self.by_weight = False  # True from the first span with a weight on
        self._default = MILLION  # the weight of spans without a known weight

    def observe(self, spans: SpanColumns) -> bool:
        """True if any of ``spans`` has a weight; from the first one on weights are by attribute."""
        weighted = any(spans.weight)
        self.by_weight = self.by_weight or weighted
        return weighted

    def assign(self, batch: SpanBatch, division: FairDivision) -> None:
        """Set the weights of a batch in ``division``."""
        if self.by_weight:
            division.gpu[:] = division.cpu[:] = self.filled(batch.spans.full("weight"))

    def filled(self, weights: Sequence[int | None]) -> list[int]:
        """Weights from 1 to MAX_WEIGHT; unknown ones become the mean of the known ones."""
        known = [max(1, min(weight, MAX_WEIGHT)) for weight in weights if weight is not None]
        if known:
            self._default = max(1, sum(known) // len(known))
        default = min(self._default, MAX_WEIGHT)
        return [default if w is None else max(1, min(w, MAX_WEIGHT)) for w in weights]

    def assign_one(
        self, division: FairDivision, number: int, weight: int | None, rate: int | None
    ) -> None:
        """Set the weight of one span in a running division."""
        if self.by_weight:
            division.cpu[number] = division.gpu[number] = min(
                MAX_WEIGHT, self._default if weight is None else max(1, weight)
            )
        elif self._by_cpu:
            division.cpu[number] = min(self._default, MILLION)
            if rate is not None:
                division.cpu[number] = rate = max(1, min(rate, MILLION))
                self._default = max(1, self._default + (rate - self._default) // 16)
