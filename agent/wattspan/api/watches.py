"""The processes whose energy is kept because somebody asked for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Protocol

from wattspan.model import SECOND, Consumer
from wattspan.ports import Clock, EnergyQueries, ProcessDirectory
from wattspan.sharing.fair_pool import SharePath, share_path

MAX_WATCHED = 8
"""Watched processes. Ended ones are replaced first, then the least recently requested."""

MAX_SAMPLED = 4
"""Watched processes with frequent CPU samples: the most recently requested."""

KEEP_ENDED = 60 * SECOND
"""Time that an ended process is kept, so that its last energy can be read."""

HISTORY_HOLDER = "questions"


class ProcessCpuSampler(Protocol):
    """Samples the CPU time of a few processes more often than the poller.

    The samples of a process may end some time after the last ``watch`` of it.
    """

    def watch(self, consumer: Consumer) -> bool: ...

    def unwatch(self, consumer: Consumer) -> None: ...

    def take(self, consumer: Consumer) -> Sequence[tuple[int, int]]: ...


class WatchList:
    """Processes whose energy is kept on request, within bounds.

    A watched process takes up to some megabytes of memory and time at every poll, most of it for
    its CPU samples. Any user may request a watch, so the list is short and drops ended processes.
    ``sampler`` serves this list only. Its samples locate the work within an interval, so that a
    short window next to idle time is not charged with the average. They end some time after the
    last request or reading of a process. Its profile remains, with the edges of open windows.
    """

    def __init__(
        self,
        energy_history: EnergyQueries,
        directory: ProcessDirectory,
        clock: Clock,
        sampler: ProcessCpuSampler | None = None,
    ) -> None:
        self._energy_history, self._directory, self._clock = energy_history, directory, clock
        self._sampler = sampler
        # In the order of requests, with the time at which the end was seen.
        self._ended: dict[Consumer, int | None] = {}
        self._paths: dict[Consumer, SharePath] = {}  # of the owners

    def __len__(self) -> int:
        return len(self._ended)

    def __contains__(self, consumer: Consumer) -> bool:
        return consumer in self._ended

    def add(self, consumer: Consumer, *, family: bool, owner: Hashable = None) -> None:
        """Watch ``consumer`` from now on, on behalf of ``owner``."""
        samples = None
        if self._sampler is not None:
            self._sampler.watch(consumer)
            samples = partial(self._sampler.take, consumer)
        self._energy_history.watch(consumer, family=family, samples=samples, holder=HISTORY_HOLDER)
        self._ended.pop(consumer, None)
        self._ended[consumer], self._paths[consumer] = None, share_path(owner)
        self._expire()
        ranked = self._ranked()
        for one in ranked[MAX_SAMPLED:]:
            if self._sampler is not None:
                self._sampler.unwatch(one)
        for one in ranked[MAX_WATCHED:]:
            self._remove(one)

    def renew(self, consumer: Consumer) -> None:
        """Sample a watched process on, because its energy is read."""
        if (
            self._sampler is not None
            and consumer in self._ranked()[:MAX_SAMPLED]
            and not self._directory.has_ended(consumer)  # no reused pid
        ):
            self._sampler.watch(consumer)

    def _ranked(self) -> list[Consumer]:
        """By priority: the newest of each user, the next of each user, ended ones last.

        Those of a user are in the same order by container.
        """
        newest = list(reversed(self._ended))
        # From the innermost level of owners to the outermost, which decides.
        for level in range(max(map(len, self._paths.values()), default=0), 0, -1):
            seen: Counter[SharePath] = Counter()
            ranks: dict[Consumer, tuple[bool, int]] = {}
            for one in newest:
                path = self._paths[one][:level]
                ranks[one] = self._ended[one] is not None, seen[path]
                seen[path] += 1
            newest.sort(key=ranks.__getitem__)
        return newest

    def _expire(self) -> None:
        now = self._clock.monotonic()
        for consumer, ended in list(self._ended.items()):
            if ended is not None and now - ended > KEEP_ENDED:
                self._remove(consumer)
            elif ended is None and self._directory.has_ended(consumer):
                self._ended[consumer] = now

    def _remove(self, consumer: Consumer) -> None:
        del self._ended[consumer], self._paths[consumer]
        self._energy_history.forget(consumer, holder=HISTORY_HOLDER)
        if self._sampler is not None:
            self._sampler.unwatch(consumer)
