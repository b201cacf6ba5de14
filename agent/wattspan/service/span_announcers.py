"""The processes that announce spans on the side channel, by span id."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from wattspan.model import Consumer
from wattspan.spans.values import Outcome
from wattspan.spans.weights import GenerationalCache

if TYPE_CHECKING:
    from wattspan.ingest.side_channel import ProcessRecords

MAX_ANNOUNCERS = 64
"""Remembered processes that announce spans with one id, besides the first: ranks of a host."""


class SpanAnnouncers:
    """Remembers the announcers of spans. For one thread.

    ``awaits`` is true while a process waits for a span, whose announcer is not forgotten.
    """

    def __init__(
        self,
        limit: int,
        identify: Callable[[int], Consumer | None],
        awaits: Callable[[bytes, Consumer], bool],
    ) -> None:
        self._identify = identify
        self._connected: dict[int, Consumer] = {}  # by pid
        self._first: GenerationalCache[Consumer] = GenerationalCache(limit, keep=awaits)
        self._others: GenerationalCache[frozenset[Consumer]] = GenerationalCache(limit)

    def __len__(self) -> int:
        """The number of remembered spans."""
        return len(self._first)

    def process(self, report: ProcessRecords) -> Consumer | None:
        """The process of a report, which may have ended since."""
        known = self._connected.pop(report.pid, None)
        consumer = self._identify(report.pid) or known
        if consumer is not None and not report.gone:
            self._connected[report.pid] = consumer
        return consumer

    def add(self, span: bytes, consumer: Consumer) -> None:
        """Remember that a process has announced a span."""
        first = self._first.get(span)
        if first is None:
            self._first[span] = consumer
        elif first != consumer:
            others = self._others.get(span) or frozenset()
            if len(others) < MAX_ANNOUNCERS:
                self._others[span] = others | {consumer}

    def age(self, now: int, keep: int) -> None:
        """Forget spans that were announced longer than ``keep`` ago."""
        self._first.age(now, keep)
        self._others.age(now, keep)

    def sender(self, span: bytes, claimed: Consumer | Outcome) -> Consumer | Outcome | None:
        """The process that announced a span: better evidence than a claim; None without any.

        Ranks of a training job seed their random numbers alike and have spans with the same ids.
        The claim of a process that announced the span too is true; otherwise the first counts.
        """
        first = self._first.get(span)
        if first is None:
            return None
        return claimed if claimed in (self._others.get(span) or ()) else first
