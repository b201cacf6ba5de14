"""From spans to units of work: which spans are whose job's, and how much work each one was.

The joiner's thread hands over what it received, in one append; everything else is done in the
tuner's.

Which spans are units of work: where the configuration says so, and where the spans do.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from wattspan.config import TunedJobSettings
from wattspan.ingest.export_request import SpanRecord
from wattspan.model import SECOND, Consumer
from wattspan.spans.values import Span
from wattspan.tuning import WorkloadKind
from wattspan.tuning.decisions.unit_detection import UnitDetector, UnitRejection, majority_result

MAX_WAITING_SPANS = 200_000
"""Spans that wait for the tuner; beyond, the oldest go: it has not turned for minutes then."""

_WORK_COUNT_UNITS = 200
"""Units over which it is judged whether a job tells its work."""

_MAX_BAD_COUNTS = 20
"""So many of those without a positive count are no accident."""

_MAX_WORK = 1e15
"""What nobody does in one unit: such a count is as good as none."""


class ReceivedSpans(NamedTuple):
    """Spans of one process as they were received, in two shapes of the same order."""

    consumer: Consumer
    service: str
    spans: Sequence[Span]
    told: Sequence[SpanRecord]


class ReceivedSpanQueue:
    """Between the joiner and the tuner. ``lost`` counts spans for which there was no room."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[ReceivedSpans] = deque()
        self._spans = 0
        self.lost = 0

    def hand(
        self, consumer: Consumer, service: str, spans: list[Span], told: list[SpanRecord]
    ) -> None:
        """Take what was received; returns at once."""
        with self._lock:
            self._waiting.append(ReceivedSpans(consumer, service, spans, told))
            self._spans += len(spans)
            while self._spans > MAX_WAITING_SPANS and len(self._waiting) > 1:
                gone = len(self._waiting.popleft().spans)
                self._spans -= gone
                self.lost += gone

    def drain(self) -> Sequence[ReceivedSpans]:
        """What came since the last time, in the order in which it came."""
        with self._lock:
            taken, self._waiting, self._spans = self._waiting, deque(), 0
        return taken


@dataclass(slots=True)
class WorkCounter:
    """How much work a unit was, by the configuration; and whether its spans say so at all."""

    attribute: str
    _bad: deque[bool] = field(default_factory=lambda: deque(maxlen=_WORK_COUNT_UNITS))

    def of(self, span: Span, told: SpanRecord) -> int | None:
        """The work of one unit, at least 1; None if its span does not say.

        What an attribute says is counted in millionths: it may well be a fraction, and only
        ratios matter.
        """
        if not self.attribute:
            return 1
        work = self._tokens(span) if self.attribute == "tokens" else told.work
        # In this order: no comparison holds for what is not a number.
        counts = work is not None and 0 < work < _MAX_WORK
        millionths = round(work * 1_000_000) if work is not None and counts else 0
        self._bad.append(not millionths)
        return millionths or None

    @property
    def bad(self) -> bool:
        """Whether so many units lack it that their time means nothing."""
        return sum(self._bad) >= min(_MAX_BAD_COUNTS, max(5, len(self._bad) // 10))

    @staticmethod
    def _tokens(span: Span) -> int:
        # Tokens put out take by far the most time each; without any, those read are the work.
        return span.tokens_out or span.tokens_in


def matching_job(
    jobs: Sequence[TunedJobSettings], service: str, span: str
) -> TunedJobSettings | None:
    """The first job whose units of work such spans are."""
    for job in jobs:
        if job.service in ("", service) and job.span in ("", span):
            return job
    return None


DETECTOR_LIFETIME = 300 * SECOND
"""What a process did longer ago says little about it."""

MAX_DETECTED_JOBS = 256
"""Jobs that are known; beyond, the longest unheard of are let go."""

DETECTION_INTERVAL = SECOND

MAX_DETECTORS = 256
"""Processes that are looked at; beyond, the longest unheard of are let go."""

_DetectorKey = tuple[
    str, str, Consumer
]  # service; the one span that is looked at, "" for any; process


class UnitSearch:
    """Belongs to the tuner's thread. ``jobs`` are those known by now, by service and span."""

    def __init__(self, jobs: Sequence[TunedJobSettings]) -> None:
        self._configured = jobs
        self._finders: OrderedDict[_DetectorKey, UnitDetector] = OrderedDict()
        self._judged: dict[_DetectorKey, int] = {}
        self._afresh = 0
        self.jobs: OrderedDict[tuple[str, str], WorkloadKind] = OrderedDict()

    def of(self, service: str) -> list[tuple[str, WorkloadKind]]:
        """The spans that are units of a service's jobs, and how they follow each other."""
        return [(span, kind) for (known, span), kind in self.jobs.items() if known == service]

    def look(self, handed: ReceivedSpans, now: int) -> None:
        """Learn from spans of one process; services whose job is known are not looked at again."""
        if now - self._afresh > DETECTOR_LIFETIME:
            self._finders.clear()
            self._judged.clear()
            self._afresh = now
        service = handed.service
        for name in {span.name for span in handed.spans}:
            job = matching_job(self._configured, service, name)
            if job is not None and job.span and (service, name) not in self.jobs:
                self._look_at(handed, job, name, now)
        if any(known == service for known, _ in self.jobs):
            return
        if any(job.span and job.service in ("", service) for job in self._configured):
            return  # the operator has said which spans of this service count
        finder = self._finder((service, "", handed.consumer))
        for span in handed.spans:
            finder.add(span.name, span.start, span.end)
        if not self._due((service, "", handed.consumer), now):
            return
        found = majority_result(
            one.findings()
            for (known, name, _), one in self._finders.items()
            if known == service and not name
        )
        if found is not None:
            self._know(service, found.name, found.kind)

    def _look_at(self, handed: ReceivedSpans, job: TunedJobSettings, name: str, now: int) -> None:
        """A span that was named: all that is asked is how its units follow each other."""
        place = handed.service, name
        if job.kind != "auto":
            self._know(*place, WorkloadKind(job.kind))
            return
        finder = self._finder((*place, handed.consumer))
        for span in handed.spans:
            if span.name == name:
                finder.add(name, span.start, span.end)
        if not self._due((*place, handed.consumer), now):
            return
        findings = finder.findings()
        if findings.found is not None:
            self._know(*place, findings.found.kind)
        elif findings.passed.get(name) is not UnitRejection.RARE:
            self._know(*place, WorkloadKind.STEPS)

    def _due(self, place: _DetectorKey, now: int) -> bool:
        """Whether it is time to judge; that takes half a millisecond."""
        if now - self._judged.get(place, -DETECTION_INTERVAL) < DETECTION_INTERVAL:
            return False
        self._judged[place] = now
        return True

    def _know(self, service: str, span: str, kind: WorkloadKind) -> None:
        self.jobs[service, span] = kind
        while len(self.jobs) > MAX_DETECTED_JOBS:
            self.jobs.popitem(last=False)

    def _finder(self, place: _DetectorKey) -> UnitDetector:
        finder = self._finders.setdefault(place, UnitDetector())
        self._finders.move_to_end(place)
        if len(self._finders) > MAX_DETECTORS:
            self._finders.popitem(last=False)
        return finder
