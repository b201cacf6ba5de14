"""The work of one job in received spans: units, instructions, and requests of a tracked server.

**Tracked requests.** The load must be known at once, so it is counted from the starts and ends that
the server's processes announce. An announcement names no span: a *root* here is an announced span
without a parent in its own process, and stands for one request. Latencies and tokens are those of
ended spans, which an exporter sends seconds later.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Sequence

from wattspan.config import LatencySource, TunedJobSettings
from wattspan.config.tuning_settings import PIPELINE_KEYS, REPLICA_KEY, TOKENS
from wattspan.ingest.export_request import InstructionReport, LatencyReport
from wattspan.model import MILLISECOND, SECOND, Consumer
from wattspan.ports import ProcessDirectory
from wattspan.spans.values import Span, SpanEnd, SpanStart
from wattspan.tuning.decisions.engine_load import EnginePageRead
from wattspan.tuning.decisions.load import LoadSample
from wattspan.tuning.decisions.load_cells import RequestTimes
from wattspan.tuning.decisions.values import WorkUnit
from wattspan.tuning.engine_pages import EngineRequests, TrackedWork
from wattspan.tuning.pipeline.dag import InstructionKind, PipelineInstruction
from wattspan.tuning.pipeline.iterations import RankInstruction
from wattspan.tuning.work_units import ReceivedSpans, RepeatedSpans, has_ended

_MAX_COMPUTE_SPANS = 4096
"""Compute spans of ranks that wait for their unit of work."""

_WORK_COUNT_UNITS = 200
"""Units over which invalid work counts are counted."""

_MAX_INVALID_COUNTS = 20
"""Invalid counts among these that are no coincidence."""

_MAX_WORK = 1e15
"""Work of one unit that no job does; larger counts are invalid."""

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
_SURELY_ANNOUNCED = 0.9  # the share from which spans win again over the page of an engine
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
        self._announced: deque[tuple[Consumer, bool]] = deque(maxlen=_RECENT)
        self._correction = 0  # request nanoseconds, of starts and ends since the last sample
        self._arrivals = self._completions = 0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def announced(self) -> bool | None:
        """True if the requests are announced as they begin; None if too few have ended."""
        return self._are_announced(_ENOUGH_ANNOUNCED)

    @property
    def surely_announced(self) -> bool:
        """True if so many are that a few do not change this."""
        return self._are_announced(_SURELY_ANNOUNCED) or False

    def _are_announced(self, share: float) -> bool | None:
        if len(self._announced) < _MIN_RECENT:
            return None
        return sum(known for _, known in self._announced) >= share * len(self._announced)

    def watch(self, consumer: Consumer, now: int) -> None:
        """Count the requests of a process from now on."""
        self._known.setdefault(consumer, now)

    def keep(self, living: Collection[Consumer]) -> None:
        """Forget the other processes, and their requests."""
        gone = self._known.keys() - set(living)
        if gone:
            recent = [one for one in self._announced if one[0] not in gone]
            self._announced = deque(recent, maxlen=_RECENT)
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
        self._announced.append((consumer, at is not None and at - span.start <= latest))

    def sample(self, now: int) -> LoadSample:
        """The requests in flight since the last sample, without their tokens."""
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


def _with_tokens(sample: LoadSample, requests: Sequence[RequestTimes]) -> LoadSample:
    """A sample with the tokens of ``requests``, which became known in it."""
    return sample._replace(
        input_tokens=sum(one.input_tokens or 0 for one in requests),
        output_tokens=sum(one.output_tokens or 0 for one in requests),
    )


class SpansAndPage:
    """Compares the announced requests with those of the engine's page.

    The page has those of all spans; it has more if the spans of some processes do not arrive.
    """

    def __init__(self) -> None:
        self.agree: bool | None = None  # None: not known yet
        self._announced = self._shown = 0  # recent requests that have ended
        self._alone = 0  # how long only the page shows requests in flight

    def add(self, announced: LoadSample, shown: LoadSample | None, in_flight: float) -> None:
        """Add announced requests, those that the page shows, and its present ones in flight."""
        self._announced += announced.completions
        if in_flight >= 1 and not announced.in_flight:
            self._alone += announced.end - announced.start
        else:
            self._alone = 0
        if shown is None:
            return
        self._shown += shown.completions
        if self._shown >= _MIN_RECENT:
            share = _ENOUGH_ANNOUNCED if self.agree else _SURELY_ANNOUNCED
            self.agree = self._announced >= share * self._shown
        if self._shown >= _RECENT:
            self._announced = min(self._announced, self._shown) // 2
            self._shown //= 2

    def alone(self, limit: int) -> bool:
        """True if only the page has shown requests in flight for longer than ``limit``."""
        return self._alone > limit


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
            span.start, span.end, first, between, span.tokens_in or None, span.tokens_out or None
        )

    def _add_child(self, consumer: Consumer, span: Span) -> None:
        children, key = self._children, (consumer, span.parent, span.name)
        end, lasting = children.pop(key, (span.end, 0))
        children[key] = min(end, span.end), lasting + span.end - span.start
        if len(children) > _MAX_CHILDREN:
            children.popitem(last=False)


# --------------------------------------------------------------------- units and instructions


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

    def keep(self, living: Collection[Consumer]) -> None:
        """Forget what other processes have sent."""
        self._repeated = {one: self._repeated[one] for one in living if one in self._repeated}

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


class JobWork:
    """The work of one job, from the spans of its processes: what its strategy reads.

    A tracked job has ``requests`` and those ``in_flight``, and its ``engine`` if it names one;
    other jobs have ``units``; a job with ``pipeline`` has ``instructions`` as well. ``ranks``
    numbers the living processes, ``latest`` is the last time at which one lived or had work.
    """

    units: JobUnits
    requests: JobRequests
    instructions: RankInstructions
    engine: EngineRequests | None

    def __init__(self, span: str, settings: TunedJobSettings, now: int) -> None:
        self._span = span
        self.in_flight = InFlightRequests(now)
        self.ranks: dict[Consumer, int] = {}
        self.latest = now
        self.use(settings)

    def use(self, settings: TunedJobSettings) -> None:
        """Continue by other settings, without the work that was not read yet."""
        self._period = settings.period
        self._tracked, self._has_instructions = settings.tracked, bool(settings.pipeline)
        self.units = JobUnits(self._span, settings)
        self.requests = JobRequests(self._span, settings)
        self.instructions = RankInstructions()
        self.engine = EngineRequests(settings) if settings.engine else None
        self._by_spans, self._compared = False, SpansAndPage()
        self._until = 0  # the end of the work that counts by the page
        self._spans_until = 0  # the last time at which spans counted
        self._later: list[RequestTimes] = []  # of spans, ended after that

    def add(self, received: ReceivedSpans, now: int) -> None:
        """Add the work among the spans of one of the job's processes."""
        rank = self._rank_of(received.consumer)
        if self._tracked:
            self.in_flight.watch(received.consumer, now)
            for span in self.requests.add(received, now):
                self.in_flight.received(received.consumer, span)
        else:
            self.units.add(received, rank, now)
        if self._has_instructions:
            self.instructions.add(received, rank, now)
        if self.units or self.requests:
            self.latest = now

    def add_page(self, page: EnginePageRead, now: int) -> None:
        """Add a new page of the job's engine, and its processes."""
        if self.engine is None:
            return
        for one in page.processes:
            self._rank_of(one)
        self.engine.add(page)
        self.latest = now

    def _rank_of(self, consumer: Consumer) -> int:
        return self.ranks.setdefault(consumer, 1 + max(self.ranks.values(), default=-1))

    @property
    def load(self) -> float:
        """The requests in flight now."""
        engine = self.engine
        return len(self.in_flight) or (0.0 if engine is None else engine.in_flight)

    def read_requests(self, now: int) -> TrackedWork:
        """The load and the requests since the last time.

        From announced spans, which are known sooner and in full, or else from the engine's page.
        Spans are believed while the page, if it is read, does not show more requests. No request
        counts twice: what the page shows of a time that begins before the last reading of spans is
        ignored, at most one interval of the page at each change; and so are spans that ended before
        its last end.
        """
        requests = self.requests.drain()
        sample = self.in_flight.sample(now)
        if self.engine is None:
            return TrackedWork(_with_tokens(sample, requests), requests)
        page, compared, announces = self.engine.read(now), self._compared, self.in_flight
        compared.add(sample, page.sample, self.engine.in_flight)
        announced = announces.announced if self._by_spans else announces.surely_announced
        agree = compared.agree is not False  # also while the page is not read any more
        hidden = compared.alone(2 * max(self.engine.interval, self._period))
        self._by_spans = bool(announced) and agree and not hidden and not self.requests.missing
        shown = page.sample
        repeated = shown is not None and shown.start < self._spans_until
        if shown is not None and not (self._by_spans or repeated):
            self._until = shown.end
        later = [one for one in self._later if one.end > self._until]
        new = [one for one in requests if one.end > self._until]
        if self._by_spans:
            self._later, self._spans_until = [], now
            return TrackedWork(_with_tokens(sample, new), [*later, *new])
        self._later = [*later, *new][-_MAX_ENDED:]
        return page._replace(sample=None, requests=[], generated=()) if repeated else page

    def update_living(self, directory: ProcessDirectory, now: int) -> None:
        """Remove the ranks of ended processes; the others keep their numbers."""
        living = [one for one in self.ranks if not directory.has_ended(one)]
        self.ranks = {one: self.ranks[one] for one in living}
        if living:
            self.latest = now
        self.in_flight.keep(living)
        self.instructions.keep(living)

    def discard(self) -> None:
        self.units.drain()
        self.requests.drain()
        self.instructions.drain()
        self._later = []
        if self.engine is not None:
            self.engine.discard()
