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
from typing import Any

import msgspec
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.resource.v1 import resource_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from wattspan.ingest.export_request import (
    MAX_NAME,
    LatencyReport,
    MalformedRequestError,
    RefusedSpans,
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
from wattspan.ingest.json_text import count_values, repaired
from wattspan.ingest.token_attributes import InferenceFigure
from wattspan.ingest.trace_decoder import (
    CAUSES,
    MAX_ATTRIBUTES,
    MAX_EVENTS,
    MAX_FIELDS,
    DecodedRequest,
    DecoderSettings,
    FieldBudget,
    InstructionKeys,
    as_count,
    as_decimal,
    printable,
    reported,
    reported_instruction,
    resource_claim,
    unusable,
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


class _LongBits(msgspec.Struct, gc=False):
    """The halves of a 64-bit integer, as opentelemetry-js up to 0.44 wrote times."""

    low: int
    high: int


_Whole = int | float | _LongBits
"""A whole number; clients whose only numbers are doubles write 1.7e18."""


class _Message(msgspec.Struct, rename="camel", gc=False):
    """Fields have their protobuf names, in JSON lowerCamelCase. A null field is absent."""


class _AnyValue(_Message):
    string_value: str | None = None
    bool_value: bool | None = None
    int_value: _Whole | None = None
    double_value: float | None = None
    array_value: _ArrayValue | None = None
    kvlist_value: _KeyValueList | None = None
    bytes_value: _Base64 | None = None


class _ArrayValue(_Message):
    values: list[_AnyValue | None] | None = None


class _KeyValue(_Message):
    key: str | None = None
    value: _AnyValue | None = None


class _KeyValueList(_Message):
    values: list[_KeyValue] | None = None


class _Resource(_Message):
    attributes: list[_KeyValue] | None = None
    dropped_attributes_count: _Whole | None = None


class _Scope(_Resource):
    name: str | None = None
    version: str | None = None


class _Event(_Resource):
    time_unix_nano: _Whole | None = None
    name: str | None = None


class _Link(_Resource):
    trace_id: _Id | None = None
    span_id: _Id | None = None
    trace_state: str | None = None
    flags: _Whole | None = None


class _Status(_Message):
    message: str | None = None
    code: int | str | None = None  # the number or the name of an enum value


class _Span(_Resource):
    trace_id: _Id | None = None
    span_id: _Id | None = None
    trace_state: str | None = None
    parent_span_id: _Id | None = None
    flags: _Whole | None = None
    name: str | None = None
    kind: int | str | None = None
    start_time_unix_nano: _Whole | None = None
    end_time_unix_nano: _Whole | None = None
    events: list[_Event] | None = None
    dropped_events_count: _Whole | None = None
    links: list[_Link] | None = None
    dropped_links_count: _Whole | None = None
    status: _Status | None = None


class _ScopeSpans(_Message):
    scope: msgspec.Raw = msgspec.Raw()
    spans: list[msgspec.Raw] | None = None
    schema_url: str | None = None


class _ResourceSpans(_Message):
    resource: msgspec.Raw = msgspec.Raw()
    scope_spans: list[msgspec.Raw] | None = None
    schema_url: str | None = None


class _Request(_Message):
    resource_spans: list[msgspec.Raw] | None = None


_CAMEL_CASE = {
    field.name.encode(): field.encode_name.encode()
    for kind in (_AnyValue, _Scope, _Event, _Link, _Span, _ScopeSpans, _ResourceSpans, _Request)
    for field in msgspec.structs.fields(kind)
    if field.name != field.encode_name
} | {
    # the names until OTLP 0.14
    b"instrumentationLibrarySpans": b"scopeSpans",
    b"instrumentation_library_spans": b"scopeSpans",
    b"instrumentationLibrary": b"scope",
    b"instrumentation_library": b"scope",
}
# A match is always a key: the quotes within a JSON string are escaped.
_PROTOBUF_NAME = re.compile(rb'"(%s)"(?=\s*:)' % b"|".join(_CAMEL_CASE))

_Decoder = msgspec.json.Decoder
_RESOURCE_SPANS = _Decoder(_ResourceSpans, strict=False)
_SCOPE_SPANS = _Decoder(_ScopeSpans, strict=False)
_REQUEST = _Decoder(_Request, strict=False, dec_hook=_decode_bytes)
_SPAN = _Decoder(_Span, strict=False, dec_hook=_decode_bytes)
_RESOURCE = _Decoder(_Resource, strict=False, dec_hook=_decode_bytes)
_SCOPE = _Decoder(_Scope, strict=False, dec_hook=_decode_bytes)
_LEAVES = (_SPAN, _RESOURCE, _SCOPE)  # messages of bounded fields


class JsonTraceDecoder:
    """Decodes trace requests in OTLP/JSON. For one thread."""

    def __init__(self, settings: DecoderSettings) -> None:
        self._settings = settings
        self._weight = next((key.name for key in settings.weight), None)
        self._reports = [(key.column, key.name) for key in settings.inference]
        self._place = ""  # of the message that is decoded

    def decode(self, body: bytes) -> DecodedRequest:
        """The spans of a request; RequestTooLargeError, or MalformedRequestError with the place.

        An invalid message inside the request costs its own spans only; without any readable span
        the request is malformed. With ``keep_message`` the result contains the same request in
        protobuf.
        """
        budget = FieldBudget(self._settings.max_fields)
        budget.spend(count_values(body, self._settings.max_fields))
        self._place = ""
        self._position = self._seen = self._spans = 0
        body = _PROTOBUF_NAME.sub(lambda key: b'"%s"' % _CAMEL_CASE[key[1]], body)
        resources = self._parse(_REQUEST, body).resource_spans or []
        self._check(resources)
        decoded = DecodedRequest([], [], RefusedSpans())
        messages: list[tuple[int, bytes]] = []
        for number, raw in enumerate(resources):
            place = self._place = f"resourceSpans[{number}]"
            try:
                outer = self._parse(_RESOURCE_SPANS, raw, "a ResourceSpans")
                messages.append((1, self._resource_spans(place, outer, decoded)))
            except MalformedRequestError as error:
                decoded.refused.add(error.reason, str(error))
        if decoded.refused.cause and not self._spans:
            raise MalformedRequestError(decoded.refused.cause)
        if not self._settings.keep_message:
            return decoded
        return decoded._replace(message=encode_message(messages))

    def _resource_spans(self, place: str, outer: _ResourceSpans, decoded: DecodedRequest) -> bytes:
        """Add the spans of a resource to ``decoded``; returns the message in protobuf."""
        raw_scopes = outer.scope_spans or []
        self._check(raw_scopes)
        scopes: list[tuple[str, _ScopeSpans]] = []
        count = 0
        for number, raw in enumerate(raw_scopes):
            inner_place = self._place = f"{place}.scopeSpans[{number}]"
            try:
                scope = self._parse(_SCOPE_SPANS, raw, "a ScopeSpans")
            except MalformedRequestError as error:
                decoded.refused.add(error.reason, str(error))
                continue
            self._check(scope.spans or ())
            count += len(scope.spans or ())
            scopes.append((inner_place, scope))
        self._spans += count
        self._place = f"{place}.resource"
        try:
            resource = self._parse(_RESOURCE, outer.resource, "a Resource")
            payload = self._protobuf(resource_pb2.Resource, resource)
        except MalformedRequestError as error:
            decoded.refused.add(error.reason, str(error), count)
            return b""
        fields = [(1, payload)] if payload else []
        claim = resource_claim(_scalars((resource.attributes or [])[:MAX_ATTRIBUTES]))
        work = [(key.name, spans.span) for spans, key in self._settings.work_of(claim.service)]
        latencies = [one.report for one in self._settings.latencies_of(claim.service)]
        instructions = self._settings.instructions_of(claim.service)
        records: list[SpanRecord] = []
        for inner_place, scope in scopes:
            self._place = f"{inner_place}.scope"
            raw_spans = scope.spans or []
            try:
                parsed = self._parse(_SCOPE, scope.scope, "an InstrumentationScope")
                payload = self._protobuf(common_pb2.InstrumentationScope, parsed)
            except MalformedRequestError as error:
                decoded.refused.add(error.reason, str(error), len(raw_spans))
                continue
            inner = [(1, payload)] if payload else []
            for number, raw in enumerate(raw_spans):
                self._place = f"{inner_place}.spans[{number}]"
                try:
                    span = self._parse(_SPAN, raw, "a Span")
                    found = self._record(span, work, latencies, instructions)
                    payload = self._protobuf(trace_pb2.Span, span)
                except MalformedRequestError as error:
                    decoded.refused.add(error.reason, str(error))
                    continue
                inner.append((2, payload))
                if isinstance(found, str):
                    decoded.skipped.append(self._position)
                    decoded.refused.add(found, CAUSES[found])
                else:
                    records.append(found)
                self._position += 1
            fields.append((2, self._joined(inner, scope.schema_url)))
        if records:
            decoded.parts.append(ResourceSpanRecords(claim, SpanRecordColumns.of(records)))
        return self._joined(fields, outer.schema_url)

    def _parse(self, decoder: Any, raw: Any, what: str = "") -> Any:
        """The message in ``raw``; an empty one for none and null."""
        if what:
            if (raw := bytes(raw)) in (b"", b"null"):
                raw = b"{}"
            if decoder in _LEAVES and count_values(raw, MAX_FIELDS) > MAX_FIELDS:
                raise too_many_fields(what, MAX_FIELDS)
        try:
            try:
                return decoder.decode(raw)
            except ValueError:  # of JSON, of UTF-8, or of types
                if (again := repaired(raw)) is raw:
                    raise
                return decoder.decode(again)
        except RecursionError:
            raise self._malformed("nested too deeply") from None
        except ValueError as error:
            raise self._malformed(str(error)) from None

    def _check(self, more: Sequence[object]) -> None:
        """Count resources, scopes and spans; RequestTooLargeError for too many."""
        self._seen += len(more)
        if self._seen > self._settings.max_spans:
            raise too_many_spans(self._settings.max_spans)

    def _record(
        self,
        span: _Span,
        work: Sequence[tuple[bytes, str]],
        latencies: Sequence[LatencyReport],
        instructions: InstructionKeys | None,
    ) -> SpanRecord | str:
        """The record of a span, or the reason why it is refused: one of CAUSES."""
        trace, own, above = (
            bytes(each or b"") for each in (span.trace_id, span.span_id, span.parent_span_id)
        )
        start = self._time(span.start_time_unix_nano, "startTimeUnixNano")
        end = self._time(span.end_time_unix_nano, "endTimeUnixNano")
        for reason in unusable([trace], [own], [start], [end]).values():
            return reason
        values = _scalars(reversed((span.attributes or [])[:MAX_ATTRIBUTES]))
        figures: list[Scalar] = [None] * len(InferenceFigure)
        for column, key in self._reports:
            if figures[column] is None and key in values:
                figures[column] = read_figure(column, values[key])
                self._settings.note_seen(key)
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

    def _time(self, value: _Whole | None, name: str) -> int:
        """A time in Unix nanoseconds, 0 for none; MalformedRequestError for an impossible one."""
        time = _whole(value)
        if time is None or not 0 <= time < 1 << 64:
            raise self._malformed(f"Expected a whole number from 0 to 2^64 - 1 - at `$.{name}`")
        return time

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
        (_whole(one.time_unix_nano) or 0, printable((one.name or "").encode(), MAX_NAME))
        for one in (events or ())[:MAX_EVENTS]
    ]
    return report.latency(RequestLatency(first, between), start, named)


def _whole(value: _Whole | None) -> int | None:
    """A number as an integer, 0 for none; None if it has a fraction or is not finite."""
    if isinstance(value, _LongBits):
        return (value.high << 32) + (value.low & 0xFFFFFFFF)
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    return value or 0


def _scalars(attributes: Any) -> Mapping[bytes, Scalar]:
    return {(each.key or "").encode(): _scalar(each.value) for each in attributes}


def _scalar(value: _AnyValue | None) -> Scalar:
    if value is None:
        return None
    if value.string_value is not None:
        return value.string_value.encode()
    if value.double_value is not None or value.int_value is None:
        return value.double_value
    return _whole(value.int_value)


_INT64 = 1 << 63
_MAX_UINT32 = (1 << 32) - 1
_MESSAGE_FIELDS = frozenset(
    ("attributes", "events", "links", "status", "value", "values", "array_value", "kvlist_value")
)


_WHOLE_FIELDS = frozenset(
    field.name
    for kind in (_AnyValue, _Scope, _Event, _Link, _Span)
    for field in msgspec.structs.fields(kind)
    if field.type == _Whole | None
)
_ENUMS = {
    "kind": trace_pb2.Span.SpanKind,
    "code": trace_pb2.Status.StatusCode,
}


def _checked(name: str, value: Any) -> Any:
    """A field as protobuf takes it; ValueError if it is no whole number.

    The name of an enum value that this version of OTLP does not have is unspecified, 0.
    """
    if name in _WHOLE_FIELDS:
        if (number := _whole(value)) is None:
            raise ValueError(f"Expected a whole number as {name}, got {value}")
        return min(max(number, 0), _MAX_UINT32) if name.startswith("dropped_") else number
    if name in _ENUMS and isinstance(value, str):
        return int(value) if value.isdecimal() else dict(_ENUMS[name].items()).get(value, 0)
    return value


@functools.cache
def _message_fields(kind: type[_Message]) -> tuple[str, ...]:
    """The fields of a struct that are structs, or lists of them."""
    return tuple(name for name in kind.__struct_fields__ if name in _MESSAGE_FIELDS)


@functools.cache
def _checked_fields(kind: type[_Message]) -> tuple[str, ...]:
    """The fields of a struct that are whole numbers or enum values."""
    names = _WHOLE_FIELDS | _ENUMS.keys()
    return tuple(name for name in kind.__struct_fields__ if name in names)


def _arguments(message: _Message, depth: int = 0) -> dict[str, Any]:
    """The arguments of the constructor of the protobuf message; ValueError beyond MAX_DEPTH."""
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    if type(message) is _AnyValue:
        if message.string_value is not None:
            return {"string_value": message.string_value}  # the most frequent value
        if (number := _whole(message.int_value)) is not None and not -_INT64 <= number < _INT64:
            return {"string_value": str(number)}
    arguments = msgspec.structs.asdict(message)  # None is an absent field
    for name in _checked_fields(type(message)):
        if arguments[name] is not None:
            arguments[name] = _checked(name, arguments[name])
    for name in _message_fields(type(message)):
        value = arguments[name]
        if isinstance(value, list):
            # A null element of an array is a value without a type.
            arguments[name] = [_arguments(each, depth + 1) if each else {} for each in value]
        elif value is not None:
            arguments[name] = _arguments(value, depth + 1)
    return arguments
