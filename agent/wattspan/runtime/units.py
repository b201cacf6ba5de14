"""From spans to units of work: which spans are whose job's, and how much work each one was.

The joiner's thread hands over what it received, in one append; everything else is done in the
tuner's.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from wattspan.config import TunedJobSettings
from wattspan.model import Consumer
from wattspan.spanfeed.delivery import Told
from wattspan.spans import Span

MOST = 200_000
"""Spans that wait for the tuner; beyond, the oldest go: it has not turned for minutes then."""

_TRUST = 200
"""Units over which it is judged whether a job tells its work."""

_BAD = 20
"""So many of those without a positive count are no accident."""

_MOST_WORK = 1e15
"""What nobody does in one unit: such a count is as good as none."""


class Handed(NamedTuple):
    """Spans of one process as they were received, in two shapes of the same order."""

    consumer: Consumer
    service: str
    spans: Sequence[Span]
    told: Sequence[Told]


class UnitTap:
    """Between the joiner and the tuner. ``lost`` counts spans for which there was no room."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Handed] = deque()
        self._spans = 0
        self.lost = 0

    def hand(self, consumer: Consumer, service: str, spans: list[Span], told: list[Told]) -> None:
        """Take what was received; returns at once."""
        with self._lock:
            self._waiting.append(Handed(consumer, service, spans, told))
            self._spans += len(spans)
            while self._spans > MOST and len(self._waiting) > 1:
                gone = len(self._waiting.popleft().spans)
                self._spans -= gone
                self.lost += gone

    def drain(self) -> Sequence[Handed]:
        """What came since the last time, in the order in which it came."""
        with self._lock:
            taken, self._waiting, self._spans = self._waiting, deque(), 0
        return taken


@dataclass(slots=True)
class WorkCount:
    """How much work a unit was, by the configuration; and whether its spans say so at all."""

    attribute: str
    _bad: deque[bool] = field(default_factory=lambda: deque(maxlen=_TRUST))

    def of(self, span: Span, told: Told) -> int | None:
        """The work of one unit, at least 1; None if its span does not say.

        What an attribute says is counted in millionths: it may well be a fraction, and only
        ratios matter.
        """
        if not self.attribute:
            return 1
        work = self._tokens(span) if self.attribute == "tokens" else told.work
        # In this order: no comparison holds for what is not a number.
        counts = work is not None and 0 < work < _MOST_WORK
        millionths = round(work * 1_000_000) if work is not None and counts else 0
        self._bad.append(not millionths)
        return millionths or None

    @property
    def bad(self) -> bool:
        """Whether so many units lack it that their time means nothing."""
        return sum(self._bad) >= min(_BAD, max(5, len(self._bad) // 10))

    @staticmethod
    def _tokens(span: Span) -> int:
        # Tokens put out take by far the most time each; without any, those read are the work.
        return span.tokens_out or span.tokens_in


def matching(jobs: Sequence[TunedJobSettings], service: str, span: str) -> TunedJobSettings | None:
    """The first job whose units of work such spans are."""
    for job in jobs:
        if job.service in ("", service) and job.span in ("", span):
            return job
    return None
