"""Units of work and instructions in received spans: their queue, and the detection of their span.

The joiner's thread appends received spans to the queue; the tuner's thread does everything else.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from wattspan.config import TunedJobSettings
from wattspan.config.tuning_settings import PIPELINE_KEYS, REPLICA_KEY
from wattspan.ingest.export_request import InstructionReport
from wattspan.model import SECOND, Consumer
from wattspan.spans.values import Span, SpanColumns, SpanEnd, SpanStart
from wattspan.tuning.decisions.unit_detection import DetectionResult, UnitDetector, majority_result
from wattspan.tuning.decisions.values import WorkloadKind, WorkUnit
from wattspan.tuning.pipeline.assembly import RankInstruction
from wattspan.tuning.pipeline.dag import InstructionKind, PipelineInstruction

T = TypeVar("T")

_MAX_COMPUTE_SPANS = 4096
"""Compute spans of ranks that wait for their unit of work."""

_MAX_RECENT_UNITS = 2048
"""Units that are recognised when a sender repeats them: several batches."""

_MAX_FUTURE = SECOND
"""Permitted distance of a unit's end ahead of the clock, for clocks that are corrected."""

MAX_WAITING_SPANS = 200_000
"""Spans in the queue; the oldest are dropped. The tuner has not run for minutes then."""

_WORK_COUNT_UNITS = 200
"""Units over which invalid work counts are counted."""

_MAX_INVALID_COUNTS = 20
"""Invalid counts among these that are no coincidence."""

_MAX_WORK = 1e15
"""Work of one unit that no job does; larger counts are invalid."""

TOKENS = "tokens"
"""The work that is counted by the tokens of a span instead of an attribute of this name."""


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


class JobUnits:
    """The units of work of one job, from the spans of its processes."""

    def __init__(self, span: str, settings: TunedJobSettings) -> None:
        self._span, self._settings = span, settings
        self._units: list[WorkUnit] = []
        # by process and id of the unit's span
        self._compute_times: OrderedDict[tuple[Consumer, bytes], int] = OrderedDict()
        self._repeated = RepeatedSpans()
        self._invalid: deque[bool] = deque(maxlen=_WORK_COUNT_UNITS)

    def __len__(self) -> int:
        return len(self._units)

    def add(self, received: ReceivedSpans, rank: int, now: int) -> None:
        """Add the units of one rank.

        Units that end in the future, or were received before, are ignored.
        """
        compute_name = self._settings.compute
        if compute_name:  # first: in a batch, units may precede their parts
            for span in received.spans:
                if span.name == compute_name:
                    self._add_compute_time(received.consumer, span)
        for span in received.spans:
            if span.name != self._span or not has_ended(span, now):
                continue
            if self._repeated.add(received.consumer, span):
                continue
            work = self._work(span)
            if work is not None:
                key = received.consumer, span.id
                compute = self._compute_times.pop(key, None) if compute_name else None
                self._units.append(WorkUnit(span.start, span.end, work, rank, compute))

    def drain(self) -> list[WorkUnit]:
        """Remove and return the units in the order of their ends."""
        units, self._units = self._units, []
        return sorted(units, key=lambda unit: unit.end)

    @property
    def invalid(self) -> bool:
        """True if so many units have no valid work count that their durations mean nothing."""
        return sum(self._invalid) >= min(_MAX_INVALID_COUNTS, max(5, len(self._invalid) // 10))

    def _add_compute_time(self, consumer: Consumer, span: Span) -> None:
        times, key = self._compute_times, (consumer, span.parent)
        times[key] = times.pop(key, 0) + span.end - span.start
        if len(times) > _MAX_COMPUTE_SPANS:
            times.popitem(last=False)

    def _work(self, span: Span) -> int | None:
        """The work of one unit, at least 1; None if its span has no valid count.

        Attributes are counted in millionths: they may be fractions, and only ratios matter.
        """
        attribute = self._settings.work
        if not attribute:
            return 1
        # Generating tokens takes much longer than reading them; without any, those read count.
        work = (span.tokens_out or span.tokens_in) if attribute == TOKENS else span.work
        # In this order: every comparison with NaN is false.
        valid = work is not None and 0 < work < _MAX_WORK
        millionths = round(work * 1_000_000) if work is not None and valid else 0
        self._invalid.append(not millionths)
        return millionths or None


_MAX_WAITING_INSTRUCTIONS = 1 << 17
"""Instructions between two steps of the tuner; the oldest are dropped."""


class RankInstructions:
    """The instructions of one job, from the spans of its processes.

    ``replicas`` names the pipeline of each rank that has reported an instruction.
    """

    def __init__(self) -> None:
        self._waiting: deque[RankInstruction] = deque(maxlen=_MAX_WAITING_INSTRUCTIONS)
        self._repeated: dict[Consumer, RepeatedSpans] = {}
        self.replicas: dict[int, str] = {}

    def add(self, received: ReceivedSpans, rank: int, now: int) -> None:
        """Add the instructions of one rank; those received before are ignored."""
        if not any(received.spans.instruction):
            return
        repeated = self._repeated.setdefault(received.consumer, RepeatedSpans())
        for span, one in zip(received.spans, received.spans.instruction, strict=True):
            if one is None or not has_ended(span, now) or repeated.add(received.consumer, span):
                continue
            instruction = PipelineInstruction(one.stage, InstructionKind(one.kind), one.microbatch)
            self.replicas[rank] = one.replica
            self._waiting.append(RankInstruction(rank, instruction, span.start, span.end))

    def drain(self) -> tuple[RankInstruction, ...]:
        """Remove and return the instructions that have arrived since the last call."""
        found = tuple(self._waiting)
        self._waiting.clear()
        return found


def instruction_reports(jobs: Sequence[TunedJobSettings]) -> tuple[InstructionReport, ...]:
    """The attributes by which the spans of pipelines report instructions."""
    return tuple(
        InstructionReport(
            job.service,
            replica=job.pipeline.get(REPLICA_KEY, ""),
            **{key: job.pipeline[key] for key in PIPELINE_KEYS},
        )
        for job in jobs
        if job.pipeline
    )


def matching_job(
    jobs: Sequence[TunedJobSettings], service: str, span: str
) -> TunedJobSettings | None:
    """The first job whose units of work are such spans."""
    matching = (job for job in jobs if job.service in ("", service) and job.span in ("", span))
    return next(matching, None)


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
        self._detectors: OrderedDict[_DetectorKey, UnitDetector] = OrderedDict()
        self._detected_at: dict[_DetectorKey, int] = {}
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
            self._detected_at.clear()
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
                for (known, name, _), one in self._detectors.items()
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
        detector = self._detectors.setdefault(key, UnitDetector())
        self._detectors.move_to_end(key)
        if len(self._detectors) > MAX_DETECTORS:
            self._detectors.popitem(last=False)
        for span in spans:
            detector.add(span.name, span.start, span.end)
        if now - self._detected_at.get(key, -DETECTION_INTERVAL) < DETECTION_INTERVAL:
            return None
        self._detected_at[key] = now
        return detector.result()

    def _set_kind(self, service: str, span: str, kind: WorkloadKind) -> None:
        self.jobs[service, span] = kind
        while len(self.jobs) > MAX_DETECTED_JOBS:
            self.jobs.popitem(last=False)
