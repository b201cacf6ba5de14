"""Requests of a server whose load is tracked: latencies of ended ones, and the number in flight.

The load must be known at once, so it is counted from the starts and ends that the server's
processes announce. An announcement names no span: a *root* here is an announced span without a
parent in its own process, and stands for one request. Latencies and tokens are those of ended
spans, which an exporter sends seconds later.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Sequence

from wattspan.config import LatencySource, TunedJobSettings
from wattspan.ingest.export_request import LatencyReport
from wattspan.model import MILLISECOND, SECOND, Consumer
from wattspan.spans.values import Span, SpanEnd, SpanStart
from wattspan.tuning.decisions.load import LoadSample
from wattspan.tuning.decisions.load_cells import RequestTimes
from wattspan.tuning.work_units import ReceivedSpans, RepeatedSpans, has_ended

MAX_OPEN = 65_536
"""Requests in flight that are counted; the oldest are dropped."""

MAX_AGE = 3600 * SECOND
"""Age at which a request without an end is dropped: its end was lost."""

_MAX_ENDED = 16_384
_MAX_CHILDREN = 8192
_RECENT = 50  # requests by which announcements and latencies are judged
_MIN_RECENT = 20
_ENOUGH = 0.5  # share of them with a latency
_ENOUGH_ANNOUNCED = 0.8  # the load is too small by the share of the others
_LATEST_START = 200 * MILLISECOND
"""Largest delay of an announced start behind the start of its span."""

_LATEST_SHARE = 0.1  # the same, relative to the duration of the request


def latency_reports(jobs: Sequence[TunedJobSettings]) -> tuple[LatencyReport, ...]:
    """The spans of tracked jobs that report latencies in attributes or events."""
    found = []
    for job in jobs:
        first, between = LatencySource.parse(job.ttft), LatencySource.parse(job.tbt)
        names = first.attribute, first.event, between.attribute, between.event
        if job.tracked and any(names):
            found.append(LatencyReport(job.service, job.span, *names))
    return tuple(found)


class InFlightRequests:
    """Counts the requests in flight, from announced roots of the job's processes."""

    def __init__(self, now: int) -> None:
        self._since = now  # end of the last sample
        self._open: OrderedDict[tuple[Consumer, bytes], int] = OrderedDict()
        self._ended: OrderedDict[tuple[Consumer, bytes], int] = OrderedDict()
        self._known: dict[Consumer, int] = {}  # processes, and since when
        self._announced: deque[bool] = deque(maxlen=_RECENT)
        self._correction = 0  # request nanoseconds, of starts and ends since the last sample
        self._arrivals = self._completions = 0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def announced(self) -> bool | None:
        """True if the requests are announced as they begin; None if too few have ended."""
        if len(self._announced) < _MIN_RECENT:
            return None
        return sum(self._announced) >= _ENOUGH_ANNOUNCED * len(self._announced)

    def watch(self, consumer: Consumer, now: int) -> None:
        """Count the requests of a process from now on."""
        self._known.setdefault(consumer, now)

    def keep(self, living: Collection[Consumer]) -> None:
        """Forget the other processes, and their requests."""
        gone = self._known.keys() - set(living)
        if gone:
            for consumer in gone:
                del self._known[consumer]
            for key in [key for key in self._open if key[0] in gone]:
                self._close(key, self._since)

    def add(self, consumer: Consumer, records: Sequence[SpanStart | SpanEnd], now: int) -> None:
        """Add announced starts and ends of a process; others than the watched are ignored."""
        if consumer not in self._known:
            return
        for record in records:
            key = consumer, record.id
            if isinstance(record, SpanEnd):
                if key in self._open:
                    self._close(key, min(record.at, now))
            elif not record.parent and key not in self._open:
                self._start(key, min(record.at, now))

    def received(self, consumer: Consumer, span: Span) -> None:
        """Judge if an ended request was announced as it began; its lost end is added."""
        key = consumer, span.id
        if key in self._open:
            self._close(key, span.end)
        if span.start <= self._known.get(consumer, span.end) + _LATEST_START:
            return  # it may have begun before its process was watched
        at = self._ended.pop(key, None)
        latest = max(_LATEST_START, _LATEST_SHARE * (span.end - span.start))
        self._announced.append(at is not None and at - span.start <= latest)

    def sample(self, now: int, requests: Sequence[RequestTimes]) -> LoadSample:
        """The requests in flight since the last sample; ``requests`` became known since then."""
        for key, at in list(self._open.items()):
            if now - at < MAX_AGE:
                break
            self._close(key, self._since)
        start, span = self._since, max(1, now - self._since)
        mean = len(self._open) + self._correction / span
        sample = LoadSample(
            start,
            max(start, now),
            max(0.0, mean),
            self._arrivals,
            self._completions,
            sum(one.input_tokens or 0 for one in requests),
            sum(one.output_tokens or 0 for one in requests),
        )
        self._since = sample.end
        self._correction = self._arrivals = self._completions = 0
        return sample

    def _start(self, key: tuple[Consumer, bytes], at: int) -> None:
        self._open[key] = at
        self._correction -= max(0, at - self._since)
        self._arrivals += 1
        if len(self._open) > MAX_OPEN:
            self._close(next(iter(self._open)), self._since)

    def _close(self, key: tuple[Consumer, bytes], at: int) -> None:
        self._ended[key] = self._open.pop(key)
        self._correction += max(0, at - self._since)
        self._completions += 1
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)


class JobRequests:
    """The ended requests of one job with their latencies, from the spans of its processes."""

    def __init__(self, span: str, settings: TunedJobSettings) -> None:
        self._span = span
        self._first = LatencySource.parse(settings.ttft)
        self._between = LatencySource.parse(settings.tbt)
        self._sources = {True: settings.ttft, False: settings.tbt}
        self._limited = {one.first for one in settings.objectives}
        self._requests: list[RequestTimes] = []
        self._repeated = RepeatedSpans()
        # of child spans, by process and id of the request: first end, and sum of durations
        self._children: OrderedDict[tuple[Consumer, bytes, str], tuple[int, int]] = OrderedDict()
        self._known: dict[bool, deque[bool]] = {
            first: deque(maxlen=_RECENT) for first in (True, False)
        }

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, received: ReceivedSpans, now: int) -> list[Span]:
        """Add the requests among received spans; returns their spans."""
        children = {one.child for one in (self._first, self._between)} - {""}
        for span in received.spans if children else ():
            if span.name in children and has_ended(span, now):
                self._add_child(received.consumer, span)
        found = []
        for span in received.spans:
            if span.name != self._span or not has_ended(span, now):
                continue
            if not self._repeated.add(received.consumer, span):
                found.append(span)
                self._add(self._times(received.consumer, span))
        return found

    def drain(self) -> list[RequestTimes]:
        """Remove and return the requests in the order of their ends."""
        requests, self._requests = self._requests, []
        return sorted(requests, key=lambda one: one.end)

    @property
    def missing(self) -> str:
        """The latency that the requests should report and do not, as a clause; "" for none."""
        for first, key, title in (
            (True, "ttft", "time to the first token"),
            (False, "tbt", "time between tokens"),
        ):
            known = self._known[first]
            few = len(known) >= _MIN_RECENT and sum(known) < _ENOUGH * len(known)
            if first in self._limited and few:
                source = self._sources[first]
                place = f'in "{source}"' if source else "as an engine does"
                return f"its requests do not report the {title} {place}; set `{key}` of the job"
        return ""

    def _add(self, times: RequestTimes) -> None:
        self._requests.append(times)
        self._known[True].append(times.first_token is not None)
        if times.output_tokens is None or times.output_tokens > 1 or times.between is not None:
            self._known[False].append(times.between is not None)

    def _times(self, consumer: Consumer, span: Span) -> RequestTimes:
        reported, engine = span.latency, span.inference
        gaps = span.tokens_out - 1
        first = reported.first if reported is not None else None
        if self._first.child:
            child = self._children.get((consumer, span.id, self._first.child))
            first = child[0] - span.start if child is not None else None
        elif first is None and not any(self._first) and engine is not None:
            first = engine.first_token
        between = reported.between if reported is not None else None
        if self._between.child:
            child = self._children.get((consumer, span.id, self._between.child))
            between = child[1] // gaps if child is not None and gaps > 0 else None
        elif between is None and not any(self._between) and first is not None and gaps > 0:
            between = max(0, span.end - span.start - first) // gaps
        return RequestTimes(
            span.start,
            span.end,
            first,
            between,
            span.tokens_in or None,
            span.tokens_out or None,
        )

    def _add_child(self, consumer: Consumer, span: Span) -> None:
        children, key = self._children, (consumer, span.parent, span.name)
        end, lasting = children.pop(key, (span.end, 0))
        children[key] = min(end, span.end), lasting + span.end - span.start
        if len(children) > _MAX_CHILDREN:
            children.popitem(last=False)
