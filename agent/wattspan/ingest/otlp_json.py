"""OTLP/JSON trace requests to span records, and to protobuf bytes where they are forwarded.

The structs are the messages of OTLP. OTLP's JSON differs from protobuf's in its ids, which are
hexadecimal. A request is decoded span by span, which bounds the memory of decoding.
"""

from __future__ import annotations

import base64
import binascii
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.resource.v1 import resource_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from wattspan.ingest.export_request import (
    MAX_NAME,
    LatencyReport,
    MalformedRequestError,
    RequestLatency,
    ResourceSpanRecords,
    SpanRecord,
    SpanRecordColumns,
    too_many_fields,
    too_many_spans,
)
from wattspan.ingest.inference_attributes import (
    CLIENT_KIND,
    SERVER_KIND,
    Scalar,
    as_nanoseconds,
    read_figure,
)
from wattspan.ingest.token_attributes import InferenceFigure
from wattspan.ingest.trace_decoder import (
    MAX_ATTRIBUTES,
    MAX_EVENTS,
    MAX_FIELDS,
    DecodedRequest,
    DecoderSettings,
    FieldBudget,
    InstructionKeys,
    as_count,
    as_decimal,
    invalid_ids,
    printable,
    reported,
    reported_instruction,
    resource_claim,
    valid_parents,
)
from wattspan.util.protobuf import encode_message, serialize

MAX_DEPTH = 48
"""Nested messages of a forwarded span; protobuf's readers accept 100."""


class _Id(bytes):
    """A trace or span id, hexadecimal in JSON."""

    __slots__ = ()


class _Base64(bytes):
    """Bytes in either alphabet of base64, with or without padding."""

    __slots__ = ()


def _decode_bytes(kind: type, value: Any) -> bytes:
    """The hook of msgspec for the two classes above; ValueError."""
    if type(value) is not str:
        raise ValueError("Expected `str`")
    if kind is _Id:
        try:
            return _Id(binascii.unhexlify(value))
        except ValueError:
            raise ValueError("Expected hexadecimal digits, as OTLP/JSON has ids") from None
    alphabet = b"-_" if "-" in value or "_" in value else None
    try:
        return _Base64(base64.b64decode(value + "=" * (-len(value) % 4), alphabet, validate=True))
    except ValueError:
        raise ValueError("Expected base64") from None


_Unsigned = Annotated[int, msgspec.Meta(ge=0)]
_Signed = Annotated[int, msgspec.Meta(ge=-1 << 63, le=(1 << 63) - 1)]


class _Message(msgspec.Struct, rename="camel", gc=False):
    """Fields have their protobuf names, in JSON lowerCamelCase. A null field is absent."""


class _AnyValue(_Message):
    string_value: str | None = None
    bool_value: bool | None = None
    int_value: _Signed | None = None
    double_value: float | None = None
    array_value: _ArrayValue | None = None
    kvlist_value: _KeyValueList | None = None
    bytes_value: _Base64 | None = None


class _ArrayValue(_Message):
    values: list[_AnyValue] | None = None


class _KeyValue(_Message):
    key: str | None = None
    value: _AnyValue | None = None


class _KeyValueList(_Message):
    values: list[_KeyValue] | None = None


class _Resource(_Message):
    attributes: list[_KeyValue] | None = None
    dropped_attributes_count: _Unsigned | None = None


class _Scope(_Resource):
    name: str | None = None
    version: str | None = None


class _Event(_Resource):
    time_unix_nano: _Unsigned | None = None
    name: str | None = None


class _Link(_Resource):
    trace_id: _Id | None = None
    span_id: _Id | None = None
    trace_state: str | None = None
    flags: _Unsigned | None = None


class _Status(_Message):
    message: str | None = None
    code: int | str | None = None  # the number or the name of an enum value


class _Span(_Resource):
    trace_id: _Id | None = None
    span_id: _Id | None = None
    trace_state: str | None = None
    parent_span_id: _Id | None = None
    flags: _Unsigned | None = None
    name: str | None = None
    kind: int | str | None = None
    start_time_unix_nano: _Unsigned | None = None
    end_time_unix_nano: _Unsigned | None = None
    events: list[_Event] | None = None
    dropped_events_count: _Unsigned | None = None
    links: list[_Link] | None = None
    dropped_links_count: _Unsigned | None = None
    status: _Status | None = None


class _ScopeSpans(_Message):
    scope: msgspec.Raw = msgspec.Raw()
    spans: list[msgspec.Raw] | None = None
    schema_url: str | None = None


class _ResourceSpans(_Message):
    resource: msgspec.Raw = msgspec.Raw()
    scope_spans: list[_ScopeSpans] | None = None
    schema_url: str | None = None


class _Request(_Message):
    resource_spans: list[_ResourceSpans] | None = None


_CAMEL_CASE = {
    field.name.encode(): field.encode_name.encode()
    for kind in (_AnyValue, _Scope, _Event, _Link, _Span, _ScopeSpans, _ResourceSpans, _Request)
    for field in msgspec.structs.fields(kind)
    if field.name != field.encode_name
}
# A match is always a key: the quotes within a JSON string are escaped.
_PROTOBUF_NAME = re.compile(rb'"(%s)"(?=\s*:)' % b"|".join(_CAMEL_CASE))

_Decoder = msgspec.json.Decoder
_REQUEST = _Decoder(_Request, strict=False, dec_hook=_decode_bytes)
_SPAN = _Decoder(_Span, strict=False, dec_hook=_decode_bytes)
_RESOURCE = _Decoder(_Resource, strict=False, dec_hook=_decode_bytes)
_SCOPE = _Decoder(_Scope, strict=False, dec_hook=_decode_bytes)

_PIECE = 1 << 16
_MARKS = (b",", b":", b"[", b"{")


class JsonTraceDecoder:
    """Decodes trace requests in OTLP/JSON. For one thread."""

    def __init__(self, settings: DecoderSettings) -> None:
        self._settings = settings
        self._weight = next((key.name for key in settings.weight), None)
        self._reports = [(key.column, key.name) for key in settings.inference]
        self._place = ""  # of the message that is decoded

    def decode(self, body: bytes) -> DecodedRequest:
        """The spans of a request; RequestTooLargeError, or MalformedRequestError with the place.

        With ``keep_message`` the result contains the same request in protobuf.
        """
        budget = FieldBudget(self._settings.max_fields)
        budget.spend(count_values(body, self._settings.max_fields))
        self._place = ""
        body = _PROTOBUF_NAME.sub(lambda key: b'"%s"' % _CAMEL_CASE[key[1]], body)
        resources = self._parse(_REQUEST, body).resource_spans or []
        self._check_count(resources)
        decoded = DecodedRequest([], [])
        messages: list[tuple[int, bytes]] = []
        position = 0
        for number, each in enumerate(resources):
            place = f"resourceSpans[{number}]"
            self._place = f"{place}.resource"
            resource = self._parse(_RESOURCE, each.resource, "a Resource")
            payload = self._protobuf(resource_pb2.Resource, resource)
            fields = [(1, payload)] if payload else []
            attributes = (resource.attributes or [])[:MAX_ATTRIBUTES]
            claim = resource_claim(_scalars(attributes))
            work = [(key.name, spans.span) for spans, key in self._settings.work_of(claim.service)]
            latencies = [one.report for one in self._settings.latencies_of(claim.service)]
            instructions = self._settings.instructions_of(claim.service)
            records: list[SpanRecord] = []
            for scope_number, scope in enumerate(each.scope_spans or ()):
                scope_place = f"{place}.scopeSpans[{scope_number}]"
                self._place = f"{scope_place}.scope"
                parsed = self._parse(_SCOPE, scope.scope, "an InstrumentationScope")
                payload = self._protobuf(common_pb2.InstrumentationScope, parsed)
                inner = [(1, payload)] if payload else []
                for span_number, raw in enumerate(scope.spans or ()):
                    self._place = f"{scope_place}.spans[{span_number}]"
                    span = self._parse(_SPAN, raw, "a Span")
                    inner.append((2, self._protobuf(trace_pb2.Span, span)))
                    record = self._record(span, work, latencies, instructions)
                    if record is None:
                        decoded.skipped.append(position)
                    else:
                        records.append(record)
                    position += 1
                fields.append((2, self._joined(inner, scope.schema_url)))
            if records:
                decoded.parts.append(ResourceSpanRecords(claim, SpanRecordColumns.of(records)))
            messages.append((1, self._joined(fields, each.schema_url)))
        if not self._settings.keep_message:
            return decoded
        return decoded._replace(message=encode_message(messages))

    def _parse(self, decoder: Any, raw: Any, what: str = "") -> Any:
        """The message in ``raw``; an empty one for none and null."""
        if what:
            if (raw := bytes(raw)) in (b"", b"null"):
                raw = b"{}"
            if count_values(raw, MAX_FIELDS) > MAX_FIELDS:
                raise too_many_fields(what, MAX_FIELDS)
        try:
            return decoder.decode(raw)
        except RecursionError:
            raise self._malformed("nested too deeply") from None
        except ValueError as error:  # of JSON, of UTF-8, or of types
            raise self._malformed(str(error)) from None

    def _check_count(self, resources: Sequence[_ResourceSpans]) -> None:
        scopes = [scope for each in resources for scope in each.scope_spans or ()]
        spans = sum(len(scope.spans or ()) for scope in scopes)
        if len(resources) + len(scopes) + spans > self._settings.max_spans:
            raise too_many_spans(self._settings.max_spans)

    def _record(
        self,
        span: _Span,
        work: Sequence[tuple[bytes, str]],
        latencies: Sequence[LatencyReport],
        instructions: InstructionKeys | None,
    ) -> SpanRecord | None:
        """The record of a span; None if its ids are invalid."""
        trace, own, above = (
            bytes(each or b"") for each in (span.trace_id, span.span_id, span.parent_span_id)
        )
        start, end = span.start_time_unix_nano or 0, span.end_time_unix_nano or 0
        if (start | end) >> 64:
            raise self._malformed("a time has more than 64 bits")
        if invalid_ids([trace], [own]):
            return None
        values = _scalars(reversed((span.attributes or [])[:MAX_ATTRIBUTES]))
        figures: list[Scalar] = [None] * len(InferenceFigure)
        for column, key in self._reports:
            if figures[column] is None and key in values:
                figures[column] = read_figure(column, values[key])
        report = reported(figures, _kind(span.kind))
        (parent,) = valid_parents([above])
        name = printable((span.name or "").encode(), MAX_NAME)
        amount = next((values.get(key) for key, matching in work if matching in ("", name)), None)
        return SpanRecord(
            trace,
            own,
            parent,
            name,
            start,
            end,
            None if self._weight is None else as_count(values.get(self._weight)),
            report.tokens_in,
            report.tokens_out,
            as_decimal(amount),
            report.details,
            _latency(latencies, name, start, values, span.events),
            None
            if instructions is None
            else reported_instruction([values.get(key.name) for key in instructions.keys]),
            report.role,
        )

    def _protobuf(self, kind: Any, message: _Message) -> bytes:
        """``message`` in protobuf; b"" where requests are not forwarded."""
        if not self._settings.keep_message:
            return b""
        try:
            return serialize(kind(**_arguments(message)))
        except (TypeError, ValueError) as error:
            raise self._malformed(str(error)) from None

    def _joined(self, fields: list[tuple[int, bytes]], schema_url: str | None) -> bytes:
        """A message of these fields; b"" where requests are not forwarded."""
        if not self._settings.keep_message:
            return b""
        if schema_url:
            fields.append((3, schema_url.encode()))
        return encode_message(fields)

    def _malformed(self, error: str) -> MalformedRequestError:
        """``error`` with the place; msgspec's errors end with the path within the message."""
        cause, _, path = error.partition(" - at `$")
        place = f"{self._place}{path.rstrip('`')}".lstrip(".")
        return MalformedRequestError(f"{place or 'the request'} is invalid: {cause}")


_KINDS = {"SPAN_KIND_SERVER": SERVER_KIND, "SPAN_KIND_CLIENT": CLIENT_KIND}


def _kind(kind: int | str | None) -> int:
    """The number of a kind that is evidence of a role; any other number for the others."""
    return _KINDS.get(kind, 0) if isinstance(kind, str) else kind or 0


def _latency(
    reports: Sequence[LatencyReport],
    name: str,
    start: int,
    values: Mapping[bytes, Scalar],
    events: Sequence[_Event] | None,
) -> RequestLatency | None:
    """The latencies that a span of this name reports; None where no setting asks for them."""
    report = next((one for one in reports if one.span == name), None)
    if report is None:
        return None
    first, between = (
        as_nanoseconds(values.get(attribute.encode())) if attribute else None
        for attribute in (report.first_attribute, report.between_attribute)
    )
    named = [
        (one.time_unix_nano or 0, printable((one.name or "").encode(), MAX_NAME))
        for one in (events or ())[:MAX_EVENTS]
    ]
    return report.latency(RequestLatency(first, between), start, named)


def count_values(raw: bytes, limit: int) -> int:
    """The commas, colons and opening brackets outside of strings: at least the number of values.

    JSON too short for more than ``limit`` of them is not read and counts 0.
    """
    if len(raw) <= limit:
        return 0
    raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")  # escaped backslashes and quotes
    count, inside = 0, 0
    for at in range(0, len(raw), _PIECE):
        parts = raw[at : at + _PIECE].split(b'"')
        outside = b"".join(parts[inside::2])
        count += sum(map(outside.count, _MARKS))
        inside ^= (len(parts) - 1) & 1
    return count


def _scalars(attributes: Any) -> Mapping[bytes, Scalar]:
    return {(each.key or "").encode(): _scalar(each.value) for each in attributes}


def _scalar(value: _AnyValue | None) -> Scalar:
    if value is None:
        return None
    if value.string_value is not None:
        return value.string_value.encode()
    return value.int_value if value.double_value is None else value.double_value


_MESSAGE_FIELDS = frozenset(
    ("attributes", "events", "links", "status", "value", "values", "array_value", "kvlist_value")
)


@functools.cache
def _message_fields(kind: type[_Message]) -> tuple[str, ...]:
    """The fields of a struct that are structs, or lists of them."""
    return tuple(name for name in kind.__struct_fields__ if name in _MESSAGE_FIELDS)


def _arguments(message: _Message, depth: int = 0) -> dict[str, Any]:
    """The arguments of the constructor of the protobuf message; ValueError beyond MAX_DEPTH."""
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    if type(message) is _AnyValue and message.string_value is not None:
        return {"string_value": message.string_value}  # the most frequent value
    arguments = msgspec.structs.asdict(message)  # None is an absent field
    for name in _message_fields(type(message)):
        value = arguments[name]
        if isinstance(value, list):
            arguments[name] = [_arguments(each, depth + 1) for each in value]
        elif value is not None:
            arguments[name] = _arguments(value, depth + 1)
    return arguments
