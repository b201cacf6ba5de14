"""Received spans for the tuner: their queue, and the search for the spans that are units of work.

The joiner's thread appends received spans to the queue; the tuner's thread does everything else.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from wattspan.config import TunedJobSettings
from wattspan.config.tuning_settings import matching_job
from wattspan.model import SECOND, Consumer
from wattspan.spans.values import Span, SpanColumns, SpanEnd, SpanStart
from wattspan.tuning.decisions.unit_detection import DetectionResult, UnitDetector, majority_result
from wattspan.tuning.decisions.values import WorkloadKind

T = TypeVar("T")

_MAX_RECENT_UNITS = 2048
"""Units that are recognised when a sender repeats them: several batches."""

_MAX_FUTURE = SECOND
"""Permitted distance of a unit's end ahead of the clock, for clocks that are corrected."""

MAX_WAITING_SPANS = 200_000
"""Spans in the queue; the oldest are dropped. The tuner has not run for minutes then."""


class ReceivedSpans(NamedTuple):
    """Spans of one process."""

    consumer: Consumer
    service: str
    spans: SpanColumns


class AnnouncedSpans(NamedTuple):
    """Starts and ends of spans that one process has announced, in order."""

    consumer: Consumer
    records: Sequence[SpanStart | SpanEnd]


class _BoundedBatches(Generic[T]):
    """Batches of spans in order: the oldest are dropped beyond MAX_WAITING_SPANS spans."""

    def __init__(self) -> None:
        self._batches: deque[tuple[T, int]] = deque()
        self._count = 0

    def append(self, batch: T, spans: int) -> int:
        """Append a batch of so many spans; returns the number of dropped ones."""
        self._batches.append((batch, spans))
        self._count += spans
        lost = 0
        while self._count > MAX_WAITING_SPANS and len(self._batches) > 1:
            dropped = self._batches.popleft()[1]
            self._count -= dropped
            lost += dropped
        return lost

    def drain(self) -> list[T]:
        """Remove and return all batches."""
        drained, self._batches, self._count = self._batches, deque(), 0
        return [batch for batch, _ in drained]


class ReceivedSpanQueue:
    """From the joiner's thread to the tuner's; ``lost`` counts dropped spans.

    ``announced``: the tuner needs announced starts and ends, too.
    """

    def __init__(self, *, announced: bool = False) -> None:
        self._lock = threading.Lock()
        self._received = _BoundedBatches[ReceivedSpans]()
        self._announced = _BoundedBatches[AnnouncedSpans]()
        self._needs_announced = announced
        self.lost = 0

    def append(self, consumer: Consumer, service: str, spans: SpanColumns) -> None:
        """Append the spans of one process."""
        received = ReceivedSpans(consumer, service, spans)
        with self._lock:
            self.lost += self._received.append(received, len(spans))

    def announce(self, consumer: Consumer, records: Sequence[SpanStart | SpanEnd]) -> None:
        """Append the announced starts and ends of one process, if the tuner needs them."""
        if not (self._needs_announced and records):
            return
        with self._lock:
            self.lost += self._announced.append(AnnouncedSpans(consumer, records), len(records))

    def drain(self) -> Sequence[ReceivedSpans]:
        """Remove and return all spans in the queue, in order."""
        with self._lock:
            return self._received.drain()

    def drain_announced(self) -> Sequence[AnnouncedSpans]:
        """Remove and return all announcements in the queue, in order.

        Those of spans that were drained before are among them, or were drained earlier.
        """
        with self._lock:
            return self._announced.drain()


class RepeatedSpans:
    """Recognises spans that were received before: senders repeat requests without an answer."""

    def __init__(self) -> None:
        self._recent: OrderedDict[int, None] = OrderedDict()

    def add(self, consumer: Consumer, span: Span) -> bool:
        """True if the span was received before.

        Ranks, and runs of a program, that seed their random numbers alike have equal ids.
        """
        key = hash((consumer, span.trace, span.id))
        if key in self._recent:
            return True
        self._recent[key] = None
        if len(self._recent) > _MAX_RECENT_UNITS:
            self._recent.popitem(last=False)
        return False


def has_ended(span: Span, now: int) -> bool:
    """True if the times of a span are possible."""
    return span.start < span.end <= now + _MAX_FUTURE


DETECTOR_LIFETIME = 300 * SECOND
"""Age after which the observations of a process are discarded."""

MAX_DETECTED_JOBS = 256
"""Known jobs; the oldest are removed."""

DETECTION_INTERVAL = SECOND

MAX_DETECTORS = 256
"""Observed processes; those without spans for the longest time are removed."""

_DetectorKey = tuple[str, str, Consumer]  # service, span ("" for any), process


class UnitSearch:
    """Determines the spans that are units of work, by configuration and by detection.

    ``jobs`` are those known so far, by service and span.
    """

    def __init__(self) -> None:
        # with the time of the latest result
        self._detectors: OrderedDict[_DetectorKey, tuple[UnitDetector, int]] = OrderedDict()
        self._cleared_at = 0
        self.jobs: OrderedDict[tuple[str, str], WorkloadKind] = OrderedDict()

    def of(self, service: str) -> list[tuple[str, WorkloadKind]]:
        """The spans that are units of a service's jobs, and their kinds."""
        return [(span, kind) for (known, span), kind in self.jobs.items() if known == service]

    def add(
        self, received: ReceivedSpans, configured: Sequence[TunedJobSettings], now: int
    ) -> None:
        """Observe spans of one process, unless the service's job is known.

        ``configured`` are the jobs whose spans are named.
        """
        if now - self._cleared_at > DETECTOR_LIFETIME:
            self._detectors.clear()
            self._cleared_at = now
        service = received.service
        for name in set(received.spans.name):
            job = matching_job(configured, service, name)
            if job is not None and job.span and (service, name) not in self.jobs:
                self._add_configured(received, job, name, now)
        if any(known == service for known, _ in self.jobs):
            return
        if any(job.span and job.service in ("", service) for job in configured):
            return  # the configuration names the units of this service
        if self._detect((service, "", received.consumer), received.spans, now) is not None:
            found = majority_result(
                one.result().found
                for (known, name, _), (one, _) in self._detectors.items()
                if known == service and not name
            )
            if found is not None:
                self._set_kind(service, found.name, found.kind)

    def _add_configured(
        self, received: ReceivedSpans, job: TunedJobSettings, name: str, now: int
    ) -> None:
        """Determine the kind of units whose span is configured."""
        service, consumer = received.service, received.consumer
        if job.kind != "auto" or job.pipeline:
            kind = WorkloadKind.STEPS if job.pipeline else WorkloadKind(job.kind)
            self._set_kind(service, name, kind)
            return
        spans = [span for span in received.spans if span.name == name]
        result = self._detect((service, name, consumer), spans, now)
        if result is not None and result.found is not None:
            self._set_kind(service, name, result.found.kind)
        elif result is not None and name not in result.rare:
            self._set_kind(service, name, WorkloadKind.STEPS)

    def _detect(self, key: _DetectorKey, spans: Sequence[Span], now: int) -> DetectionResult | None:
        """Observe spans; returns a result once in an interval, because it takes a while."""
        new = UnitDetector(), -DETECTION_INTERVAL
        detector, detected_at = self._detectors.pop(key, new)
        is_due = now - detected_at >= DETECTION_INTERVAL
        self._detectors[key] = detector, now if is_due else detected_at
        if len(self._detectors) > MAX_DETECTORS:
            self._detectors.popitem(last=False)
        for span in spans:
            detector.add(span.name, span.start, span.end)
        return detector.result() if is_due else None

    def _set_kind(self, service: str, span: str, kind: WorkloadKind) -> None:
        self.jobs[service, span] = kind
        while len(self.jobs) > MAX_DETECTED_JOBS:
            self.jobs.popitem(last=False)
