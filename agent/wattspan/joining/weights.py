"""How much of a process each of its spans is, beside the others."""

from __future__ import annotations

from collections.abc import Sequence

from wattspan.joining.batch import CPU, WEIGHT, Batch
from wattspan.joining.division import Division
from wattspan.joining.orphans import Orphans
from wattspan.spans import Span

MILLION = 1_000_000  # parts of a core: the weight of a thread that computes all the time
HEAVIEST = 1 << 24


class Weights:
    """Weighs the spans of one process: by attribute, by CPU time, or alike."""

    def __init__(self, orphans: Orphans, *, by_cpu: bool) -> None:
        self._orphans = orphans
        self._by_cpu = by_cpu
        self.by_weight = False  # from the first span on that has a weight
        self.usual = MILLION  # the weight of a span of which none is known

    def notice(self, spans: Sequence[Span]) -> bool:
        """Whether any of ``spans`` has a weight; from the first one on, weights are what counts."""
        weighed = any(map(WEIGHT, spans))
        self.by_weight = self.by_weight or weighed
        return weighed

    def of(self, batch: Batch, division: Division, order: Sequence[int]) -> None:
        """Give the spans of a batch their weights: by attribute, by CPU time, or alike."""
        if self.by_weight:
            weights = list(map(WEIGHT, batch.spans))
            division.gpu[:] = division.cpu[:] = self.completed(weights, HEAVIEST)
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
        self, batch: Batch, parents: Sequence[int], order: Sequence[int]
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

    def alone(self, division: Division, number: int, weight: int | None, rate: int | None) -> None:
        """The weight of one span in the running division, which knows only some of them."""
        if self.by_weight:
            division.cpu[number] = division.gpu[number] = min(
                HEAVIEST, self.usual if weight is None else max(1, weight)
            )
        elif self._by_cpu:
            division.cpu[number] = min(self.usual, MILLION)
            if rate is not None:
                division.cpu[number] = rate = max(1, min(rate, MILLION))
                self.usual = max(1, self.usual + (rate - self.usual) // 16)
