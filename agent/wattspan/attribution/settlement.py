"""Settlement of intervals: each waits until its usage is known.

Energy is known at once, GPU utilisation up to a second later. An interval is *due* when the usage
of its domain's resource reaches past its end, or when its wait has timed out. Usage that arrives
after that is counted as late and charged to nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import NamedTuple

from wattspan.attribution.parts import merge_parts
from wattspan.model import Counts, Instant, Interval, Payer, Usage


class SettledInterval(NamedTuple):
    """An interval, the usage in it, and the nanoseconds of it that the usage covers."""

    interval: Interval
    usage: Usage | None
    covered: int


class Settlement:
    """The queues of intervals of all domains and of usages of all resources."""

    def __init__(self, patience: int, keep: int) -> None:
        """Both in nanoseconds: an interval waits ``patience`` for usage after its end.

        Usage is kept for ``keep`` after its end, for intervals that took long to measure.
        """
        self._patience = patience
        self._keep = keep
        self._waiting: dict[str, deque[Interval]] = {}
        self._resource: dict[str, str] = {}
        self._usages: dict[str, deque[Usage]] = {}
        self._settled: dict[str, int] = {}  # resource -> latest end settled without full usage
        self.late = 0

    def pending(self, domain_id: str) -> int:
        """The microjoules of ``domain_id`` that are not settled."""
        return sum(interval.energy for interval in self._waiting.get(domain_id, ()))

    def add(self, interval: Interval, resource: str) -> None:
        """Append an interval; those of one domain come in order of time."""
        self._waiting.setdefault(interval.domain_id, deque()).append(interval)
        self._resource[interval.domain_id] = resource

    def add_usage(self, usage: Usage) -> None:
        """Append a usage; those of one resource come in order of time."""
        if usage.end.mono <= usage.start.mono:
            return
        if usage.end.mono <= self._settled.get(usage.resource, -1):
            self.late += 1
            return
        self._usages.setdefault(usage.resource, deque()).append(usage)

    def due(self, now: Instant) -> list[SettledInterval]:
        """Remove and return all intervals that are due, in the order of their ends."""
        ready: list[SettledInterval] = []
        for domain_id, queue in self._waiting.items():
            resource = self._resource[domain_id]
            usages = self._usages.get(resource, ())
            known_to = usages[-1].end.mono if usages else -1
            while queue:
                end = queue[0].end.mono
                if known_to < end:
                    if now.mono - end < self._patience:
                        break
                    self._settled[resource] = max(end, self._settled.get(resource, -1))
                ready.append(_with_usage(queue.popleft(), usages))
        for kept in self._usages.values():
            while kept and kept[0].end.mono < now.mono - self._keep:
                kept.popleft()
        ready.sort(key=lambda settled: settled.interval.end.mono)
        return ready


def _with_usage(interval: Interval, usages: deque[Usage] | tuple[()]) -> SettledInterval:
    """The interval with its usage: each record counts by its overlap with the interval."""
    start, end = interval.start.mono, interval.end.mono
    inside: list[tuple[Usage, int]] = []
    for usage in reversed(usages):
        if usage.end.mono <= start:
            break
        overlap = min(end, usage.end.mono) - max(start, usage.start.mono)
        if overlap > 0:
            inside.append((usage, overlap))
    if not inside:
        return SettledInterval(interval, None, 0)
    if len(inside) == 1:
        return SettledInterval(interval, *inside[0])
    inside.reverse()
    return SettledInterval(interval, _merge(inside), sum(overlap for _, overlap in inside))


def _merge(inside: list[tuple[Usage, int]]) -> Usage:
    spent: dict[Payer, int] = {}
    for usage, overlap in inside:
        whole = usage.end.mono - usage.start.mono
        for payer, amount in usage.spent.items():
            spent[payer] = spent.get(payer, 0) + amount * overlap // whole
    first, last = inside[0][0], inside[-1][0]
    # The merged record stands for the overlaps alone: its length is theirs.
    length = sum(overlap for _, overlap in inside)
    start = first.start._replace(mono=last.end.mono - length)
    return Usage(
        first.resource,
        start,
        last.end,
        spent,
        _total(inside, attrgetter("unclaimed")) or 0,
        _total(inside, attrgetter("capacity")),
        frozenset[Payer]().union(*(usage.present for usage, _ in inside)),
        _total(inside, attrgetter("metered")),
        merge_parts(inside),
        _merged_counts(inside),
    )


def _total(inside: list[tuple[Usage, int]], amount: Callable[[Usage], int | None]) -> int | None:
    """The sum of the parts of an amount; None if it is unknown of one usage."""
    total = 0
    for usage, overlap in inside:
        if (whole := amount(usage)) is None:
            return None
        total += whole * overlap // (usage.end.mono - usage.start.mono)
    return total


def _merged_counts(inside: list[tuple[Usage, int]]) -> dict[Payer, Counts] | None:
    """The counts of several usages; None unless all have counters, since sums would lack some."""
    parts: dict[Payer, list[Iterable[int]]] = {}
    for usage, overlap in inside:
        if usage.counts is None:
            return None
        whole = usage.end.mono - usage.start.mono
        for payer, counts in usage.counts.items():
            parts.setdefault(payer, []).append([one * overlap // whole for one in counts])
    return {payer: Counts(*map(sum, zip(*each, strict=True))) for payer, each in parts.items()}
