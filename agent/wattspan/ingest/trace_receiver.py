"""From the bytes of an ExportTraceServiceRequest to a delivery.

The protocol's own part, whatever it came by. What is wrong with a whole request is an error that
the transports put into their own words; what is wrong with a single span costs that span.

Requests on their way from bytes to the sink: small ones at once, large ones elsewhere.

All listeners share one thread. A request of some mebibytes takes it seconds to read, in which
nobody else would be answered, so such a request is read in another, one at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from wattspan.http.connection_limiter import FairQuota
from wattspan.http.limits import FairLock
from wattspan.http.messages import Peer
from wattspan.ingest import wire
from wattspan.ingest.attributes import (
    AttributeFinder,
    AttributeKey,
    as_count,
    as_decimal,
    as_text,
    attribute_key,
    attributes_of,
    pairs,
    printable,
)
from wattspan.ingest.export_request import (
    ExportRequest,
    MalformedRequestError,
    ReceiverBusyError,
    RequestTooLargeError,
    ResourceClaim,
    ResourceSpanRecords,
    SpanRecord,
    SpanSink,
    WorkAttribute,
    too_many_fields,
    too_many_spans,
)
from wattspan.ports import Clock
from wattspan.util.encoding import BodyTooLongError, gzip_decompress

MAX_NAME = 200
"""Characters of a service's or a span's name that are kept."""

_MAX_ID = 128  # characters of a container's id or of a time
_LARGEST_PID = 1 << 22
_NO_TRACE, _NO_SPAN = bytes(16), bytes(8)
_BYTES_PER_SPAN = 256
_BYTES_PER_FIELD = 16
_MANY, _MANY_FIELDS = 8192, 1 << 17
_MAKE_TUPLE: Any = tuple.__new__  # takes a quarter of Told()'s own time

_THREAD, _WEIGHT, _TOKENS_IN, _TOKENS_OUT = range(_PLACES := 4)
_KEYS = (
    attribute_key(_THREAD, "thread.id"),
    attribute_key(_TOKENS_IN, "gen_ai.usage.input_tokens"),
    attribute_key(_TOKENS_IN, "gen_ai.usage.prompt_tokens"),  # as it was called until 2024
    attribute_key(_TOKENS_OUT, "gen_ai.usage.output_tokens"),
    attribute_key(_TOKENS_OUT, "gen_ai.usage.completion_tokens"),
)


class RejectedSpans(NamedTuple):
    """What of an accepted request was not taken, and why, in words; "" for nothing."""

    spans: int = 0
    why: str = ""


class TraceReceiver:
    """Decodes requests and hands them to a sink. Used in the receivers' thread only.

    ``weight`` names the span attribute that is a span's claim beside others, "" for none.
    ``work`` says which spans count their work, and in which attribute; the first that matches
    a span is asked. ``keep`` has the request handed on as well, to be forwarded.
    """

    def __init__(
        self,
        sink: SpanSink,
        clock: Clock,
        *,
        max_request: int,
        weight: str = "",
        work: Collection[WorkAttribute] = (),
        keep: bool = False,
    ) -> None:
        self.sink, self._clock, self._keep = sink, clock, keep
        self.max_request = int(max_request)
        self._most = max(_MANY, max_request // _BYTES_PER_SPAN)
        self._fields = max(_MANY_FIELDS, max_request // _BYTES_PER_FIELD)
        self._weight, self._work = weight, work
        self._decoder = self.decoder()
        self.turn = FairLock()  # of large requests, one of which is decoded at a time

    def decoder(self) -> TraceDecoder:
        """One more, for another thread."""
        return TraceDecoder(self._weight, self._most, self._work, fields=self._fields)

    def take_json(self, body: bytes, peer: Peer) -> RejectedSpans:
        """Take a request in OTLP's JSON, as ``take`` does."""
        return self.deliver(self.read(body, json=True), peer)

    def take(self, body: bytes, peer: Peer) -> RejectedSpans:
        """Take a request. MalformedError, TooLargeError, or the sink's BusyError."""
        return self.deliver(self.read(body), peer)

    def read(
        self, body: bytes, *, json: bool = False, decoder: TraceDecoder | None = None
    ) -> DecodedRequest:
        """What is in a request; with a ``decoder`` of its own, in any thread."""
        if json:
            from wattspan.ingest.otlp_json import to_protobuf

            body = to_protobuf(body, self._most, self._fields)
        try:
            return DecodedRequest(body, (decoder or self._decoder).decode(body))
        except DecodeError as error:
            raise MalformedRequestError(
                f"the body is no ExportTraceServiceRequest: {error}"
            ) from None

    def deliver(self, read: DecodedRequest, peer: Peer) -> RejectedSpans:
        """Hand on what was read. The sink's BusyError."""
        body, decoded = read
        if decoded.parts:
            self.sink.accept(
                ExportRequest(
                    peer=peer,
                    received=self._clock.monotonic(),
                    size=len(body),
                    parts=tuple(decoded.parts),
                    message=body if self._keep else None,
                    skipped=frozenset(decoded.skipped),
                )
            )
        if not decoded.skipped:
            return RejectedSpans()
        count = len(decoded.skipped)
        self.sink.refuse("invalid_id", count)
        return RejectedSpans(
            count,
            f"{count} spans were refused: a trace id has 16 bytes and a span id has 8, "
            "and neither is all zeros.",
        )


class _WorkKeys(NamedTuple):
    counted: WorkAttribute
    key: AttributeKey


class DecodedSpans(NamedTuple):
    parts: list[ResourceSpanRecords]
    skipped: list[int]  # flat positions of spans with unusable ids


class DecodedRequest(NamedTuple):
    """A request in protobuf, and what is in it."""

    message: bytes
    decoded: DecodedSpans


class TraceDecoder:
    """Reads requests of at most ``most`` spans and ``fields`` fields; the rest is Intake's.

    ``fields`` bounds what the decoder itself looks at, and so the CPU time of a request.
    """

    def __init__(
        self, weight: str, most: int, work: Collection[WorkAttribute] = (), *, fields: int
    ) -> None:
        self._keys = (*_KEYS, attribute_key(_WEIGHT, weight)) if weight else _KEYS
        self._work = tuple(_WorkKeys(each, attribute_key(0, each.attribute)) for each in work)
        self._most, self._fields = most, fields
        self._finder, self._amounts = AttributeFinder(as_count), AttributeFinder(as_decimal)

    def decode(self, body: bytes) -> DecodedSpans:
        """The spans of a request. DecodeError or TooLargeError."""
        decoded = DecodedSpans([], [])
        budget = wire.FieldBudget(self._fields)
        keys = [each for each in self._keys if each.begin in body]
        # Slices: the parser's own copy of a message is released as soon as its parts are read.
        resources = self._of(body, wire.Request, budget).resource_spans[:]
        seen, at = self._counted(0, resources), 0
        for each in resources:
            outer = self._of(each, wire.ResourceSpans, budget)
            resource, scopes = outer.resource, outer.scope_spans[:]
            del outer
            seen = self._counted(seen, scopes)
            if not scopes:
                continue
            _check_fields(resource, wire.RESOURCE, "a resource", budget)
            claim = _resource_claim(resource)
            own = [each for each in self._work if each.counted.service in ("", claim.service)]
            told: list[SpanRecord] = []
            for raw in scopes:
                inner = self._of(raw, wire.ScopeSpans, budget)
                scope, spans = inner.scope, inner.spans[:]
                del inner
                _check_fields(scope, wire.SCOPE, "a scope", budget)
                seen = self._counted(seen, spans)
                told += self._told(spans, keys, own, at, decoded.skipped, budget)
                at += len(spans)
            if told:
                decoded.parts.append(ResourceSpanRecords(claim, told))
        return decoded

    def _of(self, raw: bytes, kind: Any, budget: wire.FieldBudget) -> Any:
        """A message of some kind."""
        if wire.count_fields(raw, wire.FLAT, self._most, budget) > self._most:
            raise too_many_spans(self._most)
        return kind.FromString(raw)

    def _counted(self, seen: int, more: Sequence[bytes]) -> int:
        """How much there is to go through by now: of spans, and of what they are wrapped in."""
        seen += len(more)
        if seen > self._most:
            raise too_many_spans(self._most)
        return seen

    def _told(
        self,
        spans: Sequence[bytes],
        keys: Sequence[AttributeKey],
        work: Sequence[_WorkKeys],
        at: int,
        skipped: list[int],
        budget: wire.FieldBudget,
    ) -> list[SpanRecord]:
        """The spans of one scope, the first of which has the flat position ``at``."""
        parse = wire.Span.FromString
        usable: list[bytes] = []
        read: list[tuple[bytes, bytes, bytes, str, int, int]] = []
        names: dict[bytes, str] = {}
        for position, raw in enumerate(spans, at):
            if len(raw) > wire.MAX_FIELDS:
                _check_fields(raw, wire.SPAN, "a span", budget)
            span = parse(raw)
            trace, own, parent = span.trace_id, span.span_id, span.parent_span_id
            if len(trace) != 16 or len(own) != 8 or trace == _NO_TRACE or own == _NO_SPAN:
                skipped.append(position)
                continue
            usable.append(raw)
            name = span.name
            if name not in names:
                names[name] = printable(name, MAX_NAME)
            if len(parent) != 8 or parent == _NO_SPAN:
                parent = b""
            read.append((trace, own, parent, names[name], span.start, span.end))
        counts = self._finder.numbers(usable, keys, _PLACES, budget)
        shown = [each[3] for each in read]
        done = self._done(usable, shown, work, budget) if work else [None] * len(read)
        return [
            _MAKE_TUPLE(
                SpanRecord, (*each, thread or 0, weight, tokens_in or 0, tokens_out or 0, amount)
            )
            for each, thread, weight, tokens_in, tokens_out, amount in zip(
                read, *counts, done, strict=True
            )
        ]

    def _done(
        self,
        spans: Sequence[bytes],
        names: Sequence[str],
        work: Sequence[_WorkKeys],
        budget: wire.FieldBudget,
    ) -> list[float | None]:
        """How much work each of some spans says it did."""
        done: list[float | None] = [None] * len(spans)
        left: Sequence[int] = range(len(spans))
        for counted, its in work:
            asked = [i for i in left if counted.span in ("", names[i])]
            left = [i for i in left if counted.span not in ("", names[i])]
            (amounts,) = self._amounts.numbers([spans[i] for i in asked], [its], 1, budget)
            for i, amount in zip(asked, amounts, strict=True):
                done[i] = amount
        return done


def _check_fields(raw: bytes, layer: Any, what: str, budget: wire.FieldBudget) -> None:
    """TooLargeError for a message of too many fields, whatever their nesting."""
    if wire.count_fields(raw, layer, wire.MAX_FIELDS, budget) > wire.MAX_FIELDS:
        raise too_many_fields(what, wire.MAX_FIELDS)


def _resource_claim(raw: bytes) -> ResourceClaim:
    """What a resource says of its process."""
    told = dict(pairs(attributes_of(raw, wire.Resource)))
    pid = as_count(told.get(b"process.pid", b""))
    return ResourceClaim(
        service=as_text(told.get(b"service.name", b""), MAX_NAME),
        pid=pid if pid is not None and 0 < pid <= _LARGEST_PID else None,
        created=as_text(told.get(b"process.creation.time", b""), _MAX_ID),
        container=as_text(told.get(b"container.id", b""), _MAX_ID),
    )


LARGE_REQUEST = 256 * 1024
"""Bytes that take the listeners' thread a few hundredths of a second."""

MAX_JSON = 8 << 20
"""Bytes of JSON in a request: it takes ten times as long as the same spans in protobuf."""

MAX_LARGE_REQUESTS = 8
"""Large requests that are held at a time, half of them of one owner at most.

The senders of more are asked to come again.
"""

_ReadOutcome = DecodedRequest | Exception
_ReadJob = Callable[[], _ReadOutcome]


class RequestReader:
    """Reads for one intake. Used in the receivers' thread only.

    A traceback holds the local variables of every function that an error has passed through. So
    errors are returned without their tracebacks, and raised where no body is left.
    """

    def __init__(self, intake: TraceReceiver) -> None:
        self.intake = intake
        self._apart = intake.decoder()
        self._places = FairQuota(MAX_LARGE_REQUESTS)

    async def take(
        self, body: bytes, peer: Peer, *, json: bool = False, zipped: bool = False
    ) -> RejectedSpans:
        """As ``Intake.take``; BadEncodingError and TooLongError of what is compressed as well."""
        most = min(self.intake.max_request, MAX_JSON) if json else self.intake.max_request
        work = partial(self._attempt, body, json=json, zipped=zipped)
        large = len(body) > LARGE_REQUEST
        del body
        outcome = None if large else work(min(LARGE_REQUEST, most))
        if outcome is None or (isinstance(outcome, BodyTooLongError) and most > LARGE_REQUEST):
            outcome = await self._read(partial(work, most, self._apart), peer.whose)
        del work
        if isinstance(outcome, DecodedRequest):
            return self.intake.deliver(outcome, peer)
        try:
            raise outcome
        finally:
            del outcome  # its traceback refers to this function

    async def _read(self, work: _ReadJob, owner: Hashable) -> _ReadOutcome:
        if not self._places.take(owner):
            return ReceiverBusyError()
        # A task of its own: what is being read goes on being read when its sender has gone.
        job = asyncio.ensure_future(self._in_turn(work, owner))
        job.add_done_callback(partial(self._over, owner))
        return await asyncio.shield(job)

    async def _in_turn(self, work: _ReadJob, owner: Hashable) -> _ReadOutcome:
        async with self.intake.turn.of(owner):
            return await asyncio.get_running_loop().run_in_executor(None, work)

    def _over(self, owner: Hashable, job: asyncio.Future[_ReadOutcome]) -> None:
        self._places.give_back(owner)
        if not job.cancelled():
            job.exception()  # its sender hears of it, if it is still there

    def _attempt(
        self,
        body: bytes,
        most: int,
        decoder: TraceDecoder | None = None,
        *,
        json: bool,
        zipped: bool,
    ) -> _ReadOutcome:
        """Decode a body; with a ``decoder`` of its own, in any thread."""
        try:
            if zipped:
                body = gzip_decompress(body, most)
            if len(body) <= most:
                return self.intake.read(body, json=json, decoder=decoder)
            kind = "JSON" if json else "protobuf"
            return RequestTooLargeError(f"a request in {kind} has at most {most} bytes")
        except Exception as error:  # noqa: BLE001 - `take` raises it again
            error.__traceback__ = error.__context__ = error.__cause__ = None
            return error
