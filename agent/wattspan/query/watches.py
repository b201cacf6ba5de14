"""The processes that somebody asked to be kept, within bounds.

Keeping a process takes up to some megabytes and time at every poll, a busy one that is looked at
finely the most, and any user may ask for it; so only a few are kept, and none for long after its
end.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from wattspan.model import SECOND, Consumer
from wattspan.ports import Clock, Past, ProcessDirectory

MOST = 8
"""Processes that are kept. Beyond, one that has ended makes way, or the longest unasked for."""

FINE = 4
"""Those of them that are looked at finely: the last that were asked for."""

MOURNED = 60 * SECOND
"""How long one that has ended is kept, for those who read its last figures."""

HOLDER = "questions"


class FineTimes(Protocol):
    """The CPU clocks of a few processes, finer than the agent's ticks."""

    def watch(self, consumer: Consumer) -> None: ...

    def unwatch(self, consumer: Consumer) -> None: ...

    def take(self, consumer: Consumer) -> Sequence[tuple[int, int]]: ...


class Watches:
    """Keeps processes in the past, and lets go of them.

    ``fine``, which must be nobody else's, tells when within an interval they worked, so that
    short windows beside idle time are not charged with its average.
    """

    def __init__(
        self,
        past: Past,
        directory: ProcessDirectory,
        clock: Clock,
        fine: FineTimes | None = None,
    ) -> None:
        self._past, self._directory, self._clock = past, directory, clock
        self._fine = fine
        self._ended: dict[Consumer, int | None] = {}  # in order of asking; when the end was seen

    def __len__(self) -> int:
        return len(self._ended)

    def __contains__(self, consumer: Consumer) -> bool:
        return consumer in self._ended

    def keep(self, consumer: Consumer, *, family: bool) -> None:
        """Keep ``consumer`` from now on."""
        samples = None
        if self._fine is not None:
            self._fine.watch(consumer)
            samples = partial(self._fine.take, consumer)
        self._past.watch(consumer, family=family, samples=samples, holder=HOLDER)
        self._ended.pop(consumer, None)
        self._ended[consumer] = None
        self._coarsen()
        self._bury()
        while len(self._ended) > MOST:
            ended = (one for one, at in self._ended.items() if at is not None and one != consumer)
            self._forget(next(ended, next(iter(self._ended))))

    def _coarsen(self) -> None:
        for consumer in list(self._ended)[:-FINE]:
            if self._fine is not None:
                self._fine.unwatch(consumer)

    def _bury(self) -> None:
        now = self._clock.monotonic()
        for consumer, ended in list(self._ended.items()):
            if ended is not None and now - ended > MOURNED:
                self._forget(consumer)
            elif ended is None and self._directory.identify(consumer.pid) != consumer:
                self._ended[consumer] = now

    def _forget(self, consumer: Consumer) -> None:
        del self._ended[consumer]
        self._past.forget(consumer, holder=HOLDER)
        if self._fine is not None:
            self._fine.unwatch(consumer)
