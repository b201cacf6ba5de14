"""What was seen of late, in bounded memory.

Children whose parents have not come yet.

Spans that are settled together.

How much of a process each of its spans is, beside the others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import repeat
from operator import itemgetter
from typing import Generic, TypeVar

from wattspan.spans.fair_division import FairDivision
from wattspan.spans.values import Span

T = TypeVar("T")


class GenerationalCache(Generic[T]):
    """A dictionary of two generations: it forgets the older one when it is full, or with age.

    At most ``limit`` keys are kept, beside those of one ``update``.
    """

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._young: dict[bytes, T] = {}
        self._old: dict[bytes, T] = {}
        self._since: int | None = None  # the younger generation is not older than this

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def __contains__(self, key: bytes) -> bool:
        return key in self._young or key in self._old

    def __setitem__(self, key: bytes, value: T) -> None:
        self._young[key] = value
        self._bound()

    def isdisjoint(self, keys: Collection[bytes]) -> bool:
        """Whether none of ``keys`` is remembered."""
        return self._young.keys().isdisjoint(keys) and self._old.keys().isdisjoint(keys)

    def update(self, values: Mapping[bytes, T]) -> None:
        """Remember each of ``values`` under its key."""
        self._young.update(values)
        self._bound()

    def get(self, key: bytes) -> T | None:
        """What is remembered under ``key``, if anything is."""
        found = self._young.get(key)
        return self._old.get(key) if found is None else found

    def age(self, now: int, memory: int) -> None:
        """Forget by time what fullness has not: asked often, all that is twice ``memory`` old.

        Nothing that was remembered less than ``memory`` ago is forgotten so.
        """
        if self._since is None:
            self._since = now
        elif now - self._since >= memory:
            self.turn()
            self._since = now

    def turn(self) -> None:
        """Forget the older generation; what is young is the older one from now on."""
        self._old, self._young = self._young, {}
        self._since = None

    def _bound(self) -> None:
        if len(self._young) >= self._half:
            self.turn()


class OrphanChildren:
    """What is known of the children of a span that has not come yet."""

    __slots__ = ("cpu", "first", "last", "time")

    def __init__(self, start: int) -> None:
        self.first = self.last = start
        self.time = 0
        self.cpu: dict[int, int] = {}  # by thread

    def add(self, start: int, end: int, thread: int, cpu: int | None) -> None:
        self.time += max(0, end - max(start, self.last)) + max(0, min(end, self.first) - start)
        self.first, self.last = min(self.first, start), max(self.last, end)
        if cpu is not None:
            self.cpu[thread] = self.cpu.get(thread, 0) + cpu


class OrphanSpans(GenerationalCache[OrphanChildren]):
    """Children that came before their parents, by the parent's id."""

    def remember(self, span: Span, start: int, end: int) -> None:
        """Remember a child for the parent that has not come yet."""
        children = self.get(span.parent)
        if children is None:
            children = self[span.parent] = OrphanChildren(start)
        children.add(start, end, span.thread, span.cpu)


# Fields of a span, read by C functions: there are many spans.
ID, PARENT, START, END, CPU, WEIGHT = map(
    itemgetter, map(Span._fields.index, ("id", "parent", "start", "end", "cpu", "weight"))
)
MAX_PARENT_CHAIN = 64  # ancestors that began at the same nanosecond: more are not followed


class SpanBatch:
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
    for _ in range(MAX_PARENT_CHAIN):
        if at < 0 or spans[at].start != spans[i].start:
            return False
        if at == i:
            return True
        at = parents[at]
    return True


MILLION = 1_000_000  # parts of a core: the weight of a thread that computes all the time
MAX_WEIGHT = 1 << 24


class SpanWeights:
    """Weighs the spans of one process: by attribute, by CPU time, or alike."""

    def __init__(self, orphans: OrphanSpans, *, by_cpu: bool) -> None:
        self._orphans = orphans
        self._by_cpu = by_cpu
        self.by_weight = False  # from the first span on that has a weight
        self.usual = MILLION  # the weight of a span of which none is known

    def notice(self, spans: Sequence[Span]) -> bool:
        """Whether any of ``spans`` has a weight; from the first one on, weights are what counts."""
        weighed = any(map(WEIGHT, spans))
        self.by_weight = self.by_weight or weighed
        return weighed

    def of(self, batch: SpanBatch, division: FairDivision, order: Sequence[int]) -> None:
        """Give the spans of a batch their weights: by attribute, by CPU time, or alike."""
        if self.by_weight:
            weights = list(map(WEIGHT, batch.spans))
            division.gpu[:] = division.cpu[:] = self.completed(weights, MAX_WEIGHT)
        elif self._by_cpu and any(map(CPU, batch.spans)):
            rates = self._cpu_rates(batch, division.parent, order)
            division.cpu[:] = self.completed(rates, MILLION)

    def completed(self, weights: Sequence[int | None], most: int) -> list[int]:
        """Weights within bounds; the usual one where none is known."""
        known = [max(1, min(weight, most)) for weight in weights if weight is not None]
        if known:
            self.usual = max(1, sum(known) // len(known))
        usual = min(self.usual, most)
        return [usual if w is None else max(1, min(w, most)) for w in weights]

    def _cpu_rates(
        self, batch: SpanBatch, parents: Sequence[int], order: Sequence[int]
    ) -> list[int | None]:
        """The CPU time of each span's thread, in millionths of a core, while it was a leaf.

        What its children used on the same thread, and the time they were open, is theirs.
        """
        spans, starts, ends = batch.spans, batch.starts, batch.ends
        time, cpu, until = [0] * len(spans), [0] * len(spans), list(starts)
        for i in order:
            if i >= len(spans) or parents[i] < 0:
                continue
            parent = parents[i]
            time[parent] += max(0, ends[i] - max(starts[i], until[parent]))
            until[parent] = max(until[parent], ends[i])
            used = spans[i].cpu
            if used is not None and spans[i].thread == spans[parent].thread:
                cpu[parent] += used
        rates: list[int | None] = []
        for i, span in enumerate(spans):
            children = self._orphans.get(span.id)
            if children is not None:
                time[i] += children.time
                cpu[i] += children.cpu.get(span.thread, 0)
            alone = max(1, span.end - span.start - time[i])
            rates.append(None if span.cpu is None else (span.cpu - cpu[i]) * MILLION // alone)
        return rates

    def alone(
        self, division: FairDivision, number: int, weight: int | None, rate: int | None
    ) -> None:
        """The weight of one span in the running division, which knows only some of them."""
        if self.by_weight:
            division.cpu[number] = division.gpu[number] = min(
                MAX_WEIGHT, self.usual if weight is None else max(1, weight)
            )
        elif self._by_cpu:
            division.cpu[number] = min(self.usual, MILLION)
            if rate is not None:
                division.cpu[number] = rate = max(1, min(rate, MILLION))
                self.usual = max(1, self.usual + (rate - self.usual) // 16)
