"""Span data sent by applications: OTLP in its encodings, gzip, the ring and its hello."""

from __future__ import annotations

import contextlib
import gzip
import os
import zlib
from collections.abc import Iterator

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from testbed.otlp import Receiver, request, span
from testbed.otlp_reference import expected, json_of

from fuzz.registry import target
from fuzz.supply import Supply, told
from wattspan.http.sockets import Peer
from wattspan.ingest.export_request import WorkAttribute
from wattspan.ingest.request_limits import (
    SPAN,
    FieldBudget,
    MalformedRequestError,
    RequestTooLargeError,
    count_fields,
)
from wattspan.ingest.side_channel import MAX_RING_RECORDS, RingError, RingReader, receive_ring
from wattspan.ingest.trace_decoder import TraceDecoder
from wattspan.sdk.ring import HELLO, MAGIC, RECORD_SIZE, STARTED, VERSION, WRITE_FORMAT
from wattspan.spans.values import Span
from wattspan.util.encoding import BodyEncodingError, BodyTooLongError, gzip_decompress
from wattspan.util.protobuf import message_class

_NOBODY = Peer()
_MOST, _MOST_FIELDS = 1000, 1 << 16
_WORK = (WorkAttribute("nothing", span="idle"), WorkAttribute("w"))

WHOLE = request(
    span(1, gen_ai__usage__output_tokens=5, gen_ai__usage__input_tokens=7, w=2.5),
    span(2, text="x" * 40, w="12"),
    resource={"service.name": "s", "process.pid": 9, "container.id": "ab" * 32},
)
_SMALL = request(span(3))
_NAMES = (
    b"gen_ai.usage.output_tokens",
    b"gen_ai.usage.input_tokens",
    b"w",
    b"service.name",
    b"process.pid",
)
_FIELDS = (
    *(b"resourceSpans", b"scopeSpans", b"spans", b"resource", b"attributes", b"key", b"value"),
    *(b"traceId", b"spanId", b"parentSpanId", b"name", b"kind", b"flags", b"startTimeUnixNano"),
    *(b"stringValue", b"intValue", b"doubleValue", b"arrayValue", b"values", b"kvlistValue"),
)


def _taken(body: bytes, *, as_json: bool = False) -> list[Span] | None:
    """Spans accepted from a request; None for a permitted refusal."""
    try:
        return _take(body, as_json=as_json)
    except (MalformedRequestError, RequestTooLargeError) as error:
        told(error)
        return None


def _take(body: bytes, *, as_json: bool = False) -> list[Span]:
    """The same; MalformedError or TooLargeError."""
    receiver = Receiver(weight="w", work=_WORK)
    refused = receiver.take(body, _NOBODY, json=as_json)
    parts = [part for delivery in receiver.sink.deliveries for part in delivery.parts]
    spans = [one for part in parts for one in part.spans]
    assert refused.spans == receiver.sink.refused.total()
    for part in parts:
        assert max(len(part.claim.service), len(part.claim.container)) <= 200
        assert part.claim.pid is None or part.claim.pid > 0
    for one in spans:
        assert (len(one.trace), len(one.id), len(one.parent) in (0, 8)) == (16, 8, True)
        assert len(one.name) <= 200
    return spans


def _transcoded(body: bytes) -> bytes:
    """A request in JSON as it is forwarded; MalformedRequestError or RequestTooLargeError."""
    decoder = TraceDecoder(max_spans=_MOST, max_fields=_MOST_FIELDS, keep_message=True)
    message = decoder.decode(body, json=True).message
    assert message is not None
    return message


def _parsed(body: bytes) -> ExportTraceServiceRequest | None:
    try:
        return ExportTraceServiceRequest.FromString(body)
    except DecodeError:
        return None


@target(
    "otlp-protobuf",
    whose="any application",
    holds="refused as malformed or too large, or the spans of the whole schema",
    watched=("wattspan.ingest",),
    samples=(WHOLE.SerializeToString(), _SMALL.SerializeToString()),
    words=_NAMES,
)
def otlp_protobuf(data: bytes) -> None:
    whole = _parsed(data)
    try:
        taken = _take(data)
    except RequestTooLargeError as error:  # the bounds hold for requests that the schema reads, too
        told(error)
        return
    except MalformedRequestError as error:
        told(error)
        assert whole is None, "the whole schema reads what was refused"
        return
    if whole is None:
        return
    assert [one[:6] for one in taken] == [one[:6] for one in expected(whole)[0]]
    assert _taken(whole.SerializeToString()) == expected(whole)[0]


@target(
    "otlp-fields",
    whose="any application",
    holds="every attribute that the parser inspects is counted",
    watched=("wattspan.ingest.trace_decoder",),
    samples=(
        WHOLE.resource_spans[0].scope_spans[0].spans[0].SerializeToString(),
        b"\x40" + b"\xff" * 9 + b"\x7f" + b"\x4a\0" * 20,
        b"\x9b\x01\x4a\0\x9c\x01",
    ),
)
def otlp_fields(data: bytes) -> None:
    most = len(data) // 2 - 1
    if most < 0:
        return
    counted = count_fields(data, SPAN, most, FieldBudget(1 << 20))
    try:
        seen = len(message_class("SpanAttributes").FromString(data).attributes)
    except DecodeError:
        return
    assert counted >= min(seen, most + 1)


@target(
    "otlp-json",
    whose="any application",
    holds="refused with a position, or protobuf that the whole schema reads",
    watched=("wattspan.ingest",),
    samples=(json_of(WHOLE), json_of(_SMALL), b'{"resourceSpans":[{"scopeSpans":[{"spans":[]}]}]}'),
    words=(*_FIELDS, b"\\ud800", b"1e400", b"null", b"[[[["),
)
def otlp_json(data: bytes) -> None:
    try:
        body = _transcoded(data)
    except (MalformedRequestError, RequestTooLargeError) as error:
        told(error)
        return
    assert ExportTraceServiceRequest.FromString(body) is not None
    _taken(data, as_json=True)


@target(
    "otlp-both",
    whose="any application",
    holds="the same request in JSON and in protobuf decodes identically",
    watched=("wattspan.ingest",),
    samples=(WHOLE.SerializeToString(), _SMALL.SerializeToString()),
    words=_NAMES,
)
def otlp_both(data: bytes) -> None:
    whole = _parsed(data)
    if whole is None or len(data) > 4096:
        return
    whole.DiscardUnknownFields()
    try:
        body = _transcoded(json_of(whole))
    except MalformedRequestError as error:
        assert "nested" in str(error), error  # noqa: PT017 - deeper than we follow, no more
        return
    assert _taken(body) == expected(whole)[0] == _taken(json_of(whole), as_json=True)


@target(
    "gzip",
    whose="any application",
    holds="the same result as the standard library, or refused; never more than the limit",
    watched=("wattspan.util.encoding",),
    samples=(
        gzip.compress(b"spans", mtime=0),
        gzip.compress(b"\0" * 100_000, mtime=0),
        gzip.compress(b"a", mtime=0) + gzip.compress(b"b", mtime=0) + b"\0\0",
    ),
    words=(b"\x1f\x8b\x08",),
)
def gzip_bodies(data: bytes) -> None:
    most = 4096
    try:
        body = gzip_decompress(data, most)
    except (BodyEncodingError, BodyTooLongError) as error:
        told(error)
        return
    assert len(body) <= most
    with contextlib.suppress(OSError, EOFError, zlib.error):
        assert gzip.decompress(data) == body


def _record(number: int, kind: int = STARTED) -> bytes:
    return WRITE_FORMAT.pack(number * 7, 0, 10**9 + number, 10**6, 42, kind, number)


@contextlib.contextmanager
def _memfd(content: bytes, seals: int) -> Iterator[int]:
    import fcntl

    ring = os.memfd_create("fuzz", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(ring, content)
        fcntl.fcntl(ring, fcntl.F_ADD_SEALS, seals)
        yield ring
    finally:
        os.close(ring)


@target(
    "ring",
    whose="any local process",
    holds="refused, or read in bounded steps; every reported record is in the ring",
    watched=("wattspan.ingest.side_channel",),
    samples=(
        b"\2" + HELLO.pack(MAGIC, VERSION, RECORD_SIZE, 4) + bytes(48) + _record(1) + _record(2),
        b"\2" + HELLO.pack(MAGIC, VERSION, RECORD_SIZE, 2) + _record(6) + _record(5),
        b"\0" + HELLO.pack(MAGIC, VERSION, RECORD_SIZE, 1) + _record(1),
    ),
    words=(MAGIC, (1 << 40).to_bytes(8, "big")),
)
def ring(data: bytes) -> None:
    supply = Supply(data)
    seals, hello, content = supply.byte() & 0x0F, supply.take(HELLO.size), supply.rest()
    with _memfd(content, seals) as memory:
        try:
            made = receive_ring(hello, [memory], truncated=False)
        except RingError:
            return
        assert isinstance(made, RingReader)
        assert len(content) // RECORD_SIZE <= MAX_RING_RECORDS
        with contextlib.suppress(RingError):
            for last in (False, False, True):
                records, lost = made.drain(last=last)
                assert len(records) <= 2 * len(content) // RECORD_SIZE + MAX_RING_RECORDS
                assert lost >= 0
