"""Processes whose energy is kept on request, within bounds.

A watched process takes up to some megabytes of memory and time at every poll, most of it if its
CPU time is sampled finely. Any user may request it, so few are kept, and none long after its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Protocol

from wattspan.model import SECOND, Consumer
from wattspan.ports import Clock, EnergyQueries, ProcessDirectory

MAX_WATCHED = 8
"""Watched processes. Ended ones are replaced first, then the least recently requested."""

MAX_SAMPLED = 4
"""Watched processes with fine CPU samples: the most recently requested."""

KEEP_ENDED = 60 * SECOND
"""Time that an ended process is kept, so that its last energy can be read."""

HISTORY_HOLDER = "questions"


class ProcessCpuSampler(Protocol):
    """Samples the CPU time of a few processes more often than the poller."""

    def watch(self, consumer: Consumer) -> None: ...

    def unwatch(self, consumer: Consumer) -> None: ...

    def take(self, consumer: Consumer) -> Sequence[tuple[int, int]]: ...


class WatchList:
    """Watches processes in the energy history, and ends the watches.

    ``fine``, which must be nobody else's, tells when within an interval they worked, so that
    short windows beside idle time are not charged with its average.
    """

    def __init__(
        self,
        past: EnergyQueries,
        directory: ProcessDirectory,
        clock: Clock,
        fine: ProcessCpuSampler | None = None,
    ) -> None:
        self._past, self._directory, self._clock = past, directory, clock
        self._fine = fine
        self._ended: dict[
            Consumer, int | None
        ] = {}  # in order of requests; time at which the end was seen
        self._owners: dict[Consumer, Hashable] = {}

    def __len__(self) -> int:
        return len(self._ended)

    def __contains__(self, consumer: Consumer) -> bool:
        return consumer in self._ended

    def add(self, consumer: Consumer, *, family: bool, owner: Hashable = None) -> None:
        """Watch ``consumer`` from now on, on behalf of ``owner``."""
        samples = None
        if self._fine is not None:
            self._fine.watch(consumer)
            samples = partial(self._fine.take, consumer)
        self._past.watch(consumer, family=family, samples=samples, holder=HISTORY_HOLDER)
        self._ended.pop(consumer, None)
        self._ended[consumer], self._owners[consumer] = None, owner
        self._expire()
        ranked = self._ranked()
        for one in ranked[MAX_SAMPLED:]:
            if self._fine is not None:
                self._fine.unwatch(one)
        for one in ranked[MAX_WATCHED:]:
            self._remove(one)

    def _ranked(self) -> list[Consumer]:
        """By priority: the newest of each user, the next of each user, ended ones last."""
        seen: Counter[Hashable] = Counter()
        ranks: dict[Consumer, tuple[bool, int]] = {}
        for one in reversed(self._ended):
            whose = self._owners[one]
            ranks[one] = self._ended[one] is not None, seen[whose]
            seen[whose] += 1
        return sorted(ranks, key=ranks.__getitem__)

    def _expire(self) -> None:
        now = self._clock.monotonic()
        for consumer, ended in list(self._ended.items()):
            if ended is not None and now - ended > KEEP_ENDED:
                self._remove(consumer)
            elif ended is None and self._directory.identify(consumer.pid) != consumer:
                self._ended[consumer] = now

    def _remove(self, consumer: Consumer) -> None:
        del self._ended[consumer], self._owners[consumer]
        self._past.forget(consumer, holder=HISTORY_HOLDER)
        if self._fine is not None:
            self._fine.unwatch(consumer)
