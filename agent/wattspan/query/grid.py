"""What devices spend, told to anybody: in whole cells of time and no finer.

Power that is read finely enough tells what is computed, so whoever may not read the counters
themselves is told their energy only up to the cells' borders. These are the same for every
question: no two windows can be subtracted to get something finer. Within a cell power is taken
to be constant, so that the figures of neighbouring windows still add up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from wattspan.model import Domain, HwType, Microjoules
from wattspan.ports import EnergyQueries
from wattspan.spans.values import IntervalEnergy


class Grid(NamedTuple):
    """Cells of ``size`` nanoseconds, from the monotonic clock's zero; 0: none are needed."""

    size: int

    def down(self, at: int) -> int:
        return at - at % self.size if self.size else at

    def up(self, at: int) -> int:
        return -self.down(-at)

    def hides(self, domain: Domain) -> bool:
        """Whether it keeps a device's energy back: a GPU's driver tells it to every user."""
        return self.size > 0 and domain.hw_type is not HwType.GPU

    def device(self, past: EnergyQueries, domain: Domain, start: int, end: int) -> IntervalEnergy:
        """What ``domain`` spent; nothing of a cell that is not settled or was forgotten in part."""
        end = min(end, self.down(past.settled()))
        energy: Counter[HwType] = Counter()
        doubt: Counter[HwType] = Counter()
        covered = 0
        for first, last, inside in self._parts(start, end):
            for spent in _whole(past, domain.id, first, last, self.size):
                span = last - first
                covered += spent.covered * inside // span
                for kind, amount in spent.energy.items():
                    energy[kind] += amount * inside // span
                    beside = max(inside, span - inside) if inside < span else 0
                    doubt[kind] += amount * beside // span
                for kind, amount in spent.uncertainty.items():
                    doubt[kind] += amount * inside // span
        return IntervalEnergy(
            {kind: Microjoules(amount) for kind, amount in energy.items()},
            {kind: Microjoules(amount) for kind, amount in doubt.items()},
            covered,
        )

    def idle(self, past: EnergyQueries, domain: Domain, start: int, end: int) -> Microjoules | None:
        total, end = 0, min(end, self.down(past.settled()))
        for first, last, inside in self._parts(start, end):
            idle = past.idle(domain.id, first, last)
            if idle is None:
                return None
            total += idle * inside // (last - first)
        return Microjoules(total)

    def _parts(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Whole cells, from and to, and how much of them is asked for."""
        if end <= start:
            return
        first, last = self.up(start), self.down(end)
        if first > last:  # all of it lies in one cell
            yield last, first, end - start
            return
        if start < first:
            yield first - self.size, first, first - start
        if first < last:
            yield first, last, last - first
        if last < end:
            yield last, last + self.size, end - last


def _whole(
    past: EnergyQueries, domain_id: str, start: int, end: int, size: int
) -> Iterator[IntervalEnergy]:
    """What is known of whole cells; a cell of which a part is not known is left out."""
    spent = past.device(domain_id, start, end)
    if spent.covered >= end - start:
        yield spent
    elif spent.covered > 0 and end - start > size:
        middle = start + (end - start) // size // 2 * size
        yield from _whole(past, domain_id, start, middle, size)
        yield from _whole(past, domain_id, middle, end, size)
