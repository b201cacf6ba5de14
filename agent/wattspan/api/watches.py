"""The processes that somebody asked to be kept, within bounds.

Keeping a process takes up to some megabytes and time at every poll, a busy one that is looked at
finely the most, and any user may ask for it; so only a few are kept, and none for long after its
end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Protocol

from wattspan.model import SECOND, Consumer
from wattspan.ports import Clock, EnergyQueries, ProcessDirectory

MAX_WATCHED = 8
"""Processes that are kept. Beyond, one that has ended makes way, or the longest unasked for."""

MAX_SAMPLED = 4
"""Those of them that are looked at finely: the last that were asked for."""

KEEP_ENDED = 60 * SECOND
"""How long one that has ended is kept, for those who read its last figures."""

HISTORY_HOLDER = "questions"


class CpuSampler(Protocol):
    """The CPU clocks of a few processes, finer than the agent's ticks."""

    def watch(self, consumer: Consumer) -> None: ...

    def unwatch(self, consumer: Consumer) -> None: ...

    def take(self, consumer: Consumer) -> Sequence[tuple[int, int]]: ...


class WatchList:
    """Keeps processes in the past, and lets go of them.

    ``fine``, which must be nobody else's, tells when within an interval they worked, so that
    short windows beside idle time are not charged with its average.
    """

    def __init__(
        self,
        past: EnergyQueries,
        directory: ProcessDirectory,
        clock: Clock,
        fine: CpuSampler | None = None,
    ) -> None:
        self._past, self._directory, self._clock = past, directory, clock
        self._fine = fine
        self._ended: dict[Consumer, int | None] = {}  # in order of asking; when the end was seen
        self._whose: dict[Consumer, Hashable] = {}

    def __len__(self) -> int:
        return len(self._ended)

    def __contains__(self, consumer: Consumer) -> bool:
        return consumer in self._ended

    def keep(self, consumer: Consumer, *, family: bool, whose: Hashable = None) -> None:
        """Keep ``consumer`` from now on, for ``whose`` who asks."""
        samples = None
        if self._fine is not None:
            self._fine.watch(consumer)
            samples = partial(self._fine.take, consumer)
        self._past.watch(consumer, family=family, samples=samples, holder=HISTORY_HOLDER)
        self._ended.pop(consumer, None)
        self._ended[consumer], self._whose[consumer] = None, whose
        self._bury()
        ranked = self._ranked()
        for one in ranked[MAX_SAMPLED:]:
            if self._fine is not None:
                self._fine.unwatch(one)
        for one in ranked[MAX_WATCHED:]:
            self._forget(one)

    def _ranked(self) -> list[Consumer]:
        """Those to be kept first stand first: each user's newest, each user's next, the ended."""
        seen: Counter[Hashable] = Counter()
        ranks: dict[Consumer, tuple[bool, int]] = {}
        for one in reversed(self._ended):
            whose = self._whose[one]
            ranks[one] = self._ended[one] is not None, seen[whose]
            seen[whose] += 1
        return sorted(ranks, key=ranks.__getitem__)

    def _bury(self) -> None:
        now = self._clock.monotonic()
        for consumer, ended in list(self._ended.items()):
            if ended is not None and now - ended > KEEP_ENDED:
                self._forget(consumer)
            elif ended is None and self._directory.identify(consumer.pid) != consumer:
                self._ended[consumer] = now

    def _forget(self, consumer: Consumer) -> None:
        del self._ended[consumer], self._whose[consumer]
        self._past.forget(consumer, holder=HISTORY_HOLDER)
        if self._fine is not None:
            self._fine.unwatch(consumer)
