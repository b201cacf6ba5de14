"""OTLP/JSON trace requests as the same requests in protobuf, which the decoder reads.

The structs are the messages of OTLP. OTLP's JSON differs from protobuf's in its ids, which are
hexadecimal. A request is read span by span, which bounds the memory of it.

Texts of clients that violate RFC 8259 are repaired, so that one bad value does not cost all spans
of a request. A repair is made only where a parser has refused the text, and changes nothing valid.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import functools
import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.resource.v1 import resource_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from wattspan.ingest.request_limits import (
    MAX_FIELDS,
    FieldBudget,
    MalformedRequestError,
    RefusedSpans,
    RequestTooLargeError,
    too_many_fields,
    too_many_spans,
)
from wattspan.util.protobuf import encode_message, serialize

MAX_DEPTH = 48
"""Nested messages of a span; protobuf's readers accept 100."""


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

_EnumValue = int | float | str
"""The number or the name of an enum value."""


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
    code: _EnumValue | None = None


class _Span(_Resource):
    trace_id: _Id | None = None
    span_id: _Id | None = None
    trace_state: str | None = None
    parent_span_id: _Id | None = None
    flags: _Whole | None = None
    name: str | None = None
    kind: _EnumValue | None = None
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

_LEAVES = (_Span, _Resource, _Scope)  # messages of bounded fields
_ELEMENTS: Mapping[str, type] = {"attributes": _KeyValue, "events": _Event, "links": _Link}
_NEEDED: Mapping[type, Collection[str]] = {
    _Request: ("resource_spans",),
    _ResourceSpans: ("scope_spans",),
    _ScopeSpans: ("spans",),
    _Span: ("trace_id", "span_id", "name", "start_time_unix_nano", "end_time_unix_nano"),
    _Event: ("time_unix_nano", "name"),
    _Link: ("trace_id", "span_id"),
    _Resource: (),
    _Scope: (),
}
"""The fields that a message is refused for if they are invalid; other invalid ones are absent."""


@functools.cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind, strict=False, dec_hook=_decode_bytes)


_MAX_INVALID = 1 << 16  # elements that are left out of one request; each takes microseconds
_fields = functools.cache(msgspec.structs.fields)


class JsonRequests:
    """Transcodes requests of at most ``max_spans`` spans, scopes and resources. For one thread."""

    def __init__(self, max_spans: int) -> None:
        self._limit = max_spans
        self._place = ""  # of the message that is read

    def to_protobuf(self, body: bytes, budget: FieldBudget, refused: RefusedSpans) -> bytes:
        """The request in protobuf; RequestTooLargeError, or MalformedRequestError with the place.

        An invalid message inside the request is left out and costs its own spans only, which are
        added to ``refused``; without any readable span the request is malformed.
        """
        budget.spend(count_values(body, budget.limit))
        self._place, self._seen, self._spans, self._invalid = "", 0, 0, 0
        body = _PROTOBUF_NAME.sub(lambda key: b'"%s"' % _CAMEL_CASE[key[1]], body)
        resources = self._parse(_Request, body).resource_spans or []
        self._check(resources)
        messages: list[tuple[int, bytes]] = []
        for number, raw in enumerate(resources):
            place = self._place = f"resourceSpans[{number}]"
            try:
                outer = self._parse(_ResourceSpans, raw, "a ResourceSpans")
                messages.append((1, self._resource_spans(place, outer, refused)))
            except MalformedRequestError as error:
                refused.add(error.reason, str(error))
        refused.check(self._spans)
        return encode_message(messages)

    def _resource_spans(self, place: str, outer: _ResourceSpans, refused: RefusedSpans) -> bytes:
        """A ResourceSpans in protobuf, of the readable spans."""
        raw_scopes = outer.scope_spans or []
        self._check(raw_scopes)
        scopes: list[tuple[str, _ScopeSpans]] = []
        count = 0
        for number, raw in enumerate(raw_scopes):
            inner_place = self._place = f"{place}.scopeSpans[{number}]"
            try:
                scope = self._parse(_ScopeSpans, raw, "a ScopeSpans")
            except MalformedRequestError as error:
                refused.add(error.reason, str(error))
                continue
            self._check(scope.spans or ())
            count += len(scope.spans or ())
            scopes.append((inner_place, scope))
        self._spans += count
        self._place = f"{place}.resource"
        try:
            fields = self._fields(resource_pb2.Resource, _Resource, outer.resource, "a Resource")
        except MalformedRequestError as error:
            refused.add(error.reason, str(error), count)
            return b""
        for inner_place, scope in scopes:
            raw_spans = scope.spans or []
            self._place = f"{inner_place}.scope"
            kind = common_pb2.InstrumentationScope
            try:
                inner = self._fields(kind, _Scope, scope.scope, "an InstrumentationScope")
            except MalformedRequestError as error:
                refused.add(error.reason, str(error), len(raw_spans))
                continue
            for number, raw in enumerate(raw_spans):
                self._place = f"{inner_place}.spans[{number}]"
                try:
                    inner.append((2, self._message(trace_pb2.Span, _Span, raw, "a Span")))
                except (MalformedRequestError, RequestTooLargeError) as error:
                    refused.add(error.reason, str(error))
            fields.append((2, _joined(inner, scope.schema_url)))
        return _joined(fields, outer.schema_url)

    def _fields(self, kind: Any, struct: type, raw: Any, what: str) -> list[tuple[int, bytes]]:
        """The first field of a message, without an empty one."""
        payload = self._message(kind, struct, raw, what) if raw else b""
        return [(1, payload)] if payload else []

    def _message(self, kind: Any, struct: type, raw: Any, what: str) -> bytes:
        """A message of bounded fields in protobuf."""
        message = self._parse(struct, raw, what)
        try:
            return serialize(kind(**_arguments(message)))
        except (TypeError, ValueError) as error:
            raise self._malformed(str(error)) from None

    def _parse(self, kind: type, raw: Any, what: str = "") -> Any:
        """The message in ``raw``; an empty one for none and null."""
        if kind in _LEAVES:
            raw = bytes(raw)  # of others, the parts are copied
            if count_values(raw, MAX_FIELDS) > MAX_FIELDS:
                raise too_many_fields(what, MAX_FIELDS)
        if what and bytes(memoryview(raw)[:5]) in (b"", b"null"):
            raw = b"{}"
        try:
            try:
                return _decoder(kind).decode(raw)
            except ValueError:  # of JSON, of UTF-8, or of types
                return self._readable(kind, repaired(bytes(raw)))
        except RecursionError:
            raise self._malformed("nested too deeply") from None
        except ValueError as error:
            raise self._malformed(str(error)) from None

    def _readable(self, kind: type, raw: Any) -> Any:
        """The message in ``raw`` without invalid attributes, events, links and optional fields.

        ValueError for one without a valid field that it needs, or with another value for a list.
        """
        try:
            return _decoder(kind).decode(raw)
        except ValueError as error:
            if kind not in _NEEDED or self._invalid > _MAX_INVALID:
                raise
            parts, found = _decoder(dict[str, msgspec.Raw]).decode(raw), {}
            for field in _fields(kind):
                part, element = parts.get(field.encode_name, b"null"), _ELEMENTS.get(field.name)
                try:
                    if element is None:
                        found[field.name] = _decoder(field.type).decode(part)
                    else:
                        several = _decoder(list[msgspec.Raw] | None).decode(part) or ()
                        valid = map(partial(self._element, element), several)
                        found[field.name] = [*filter(None, valid)]
                except ValueError:
                    if element is not None or field.name in _NEEDED[kind]:
                        raise error from None
            return kind(**found)

    def _element(self, kind: type, raw: Any) -> Any:
        """The same of an element of a list; None for an invalid one."""
        try:
            return self._readable(kind, raw)
        except ValueError:
            self._invalid += 1
            return None

    def _check(self, more: Sequence[object]) -> None:
        """Count resources, scopes and spans; RequestTooLargeError for too many."""
        self._seen += len(more)
        if self._seen > self._limit:
            raise too_many_spans(self._limit)

    def _malformed(self, error: str) -> MalformedRequestError:
        """``error`` with the place; msgspec's errors end with the path within the message."""
        cause, _, path = error.partition(_PATH)
        place = f"{self._place}{path.rstrip('`')}".lstrip(".")
        return MalformedRequestError(f"{place or 'the request'} is invalid: {cause}")


def _joined(fields: list[tuple[int, bytes]], schema_url: str | None) -> bytes:
    if schema_url:
        fields.append((3, schema_url.encode()))
    return encode_message(fields)


def _whole(value: _Whole | None) -> int | None:
    """A number as an integer, 0 for none; None if it has a fraction or is not finite."""
    if isinstance(value, _LongBits):
        return (value.high << 32) + (value.low & 0xFFFFFFFF)
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    return value or 0


_MESSAGE_FIELDS = frozenset(
    ("attributes", "events", "links", "status", "value", "values", "array_value", "kvlist_value")
)
_TIMES = {"start_time_unix_nano": "startTimeUnixNano", "end_time_unix_nano": "endTimeUnixNano"}
_COUNTS = ("dropped_attributes_count", "dropped_events_count", "dropped_links_count")
_WIDTHS = {
    **dict.fromkeys((*_TIMES, "time_unix_nano"), range(1 << 64)),
    **dict.fromkeys((*_COUNTS, "flags"), range(1 << 32)),
    **dict.fromkeys(("kind", "code"), range(-(1 << 31), 1 << 31)),
    "int_value": range(-(1 << 63), 1 << 63),
}
"""The numbers that fit into each field of a number."""

_PATH = " - at `$"  # between cause and path in an error of msgspec
_ENUMS = {
    "kind": trace_pb2.Span.SpanKind,
    "code": trace_pb2.Status.StatusCode,
}


def _checked(name: str, value: Any) -> int | None:
    """A field as protobuf takes it; ValueError for a time of a span that is none.

    Energy needs no other number: one that is not whole or not within the width of its field is
    None, an absent field. The name of an enum value that this version of OTLP does not have is
    unspecified, 0.
    """
    if isinstance(value, str):
        # A double holds every value of an enum, and any number of digits becomes one.
        value = float(value) if value.isdecimal() else dict(_ENUMS[name].items()).get(value, 0)
    number, width = _whole(value), _WIDTHS[name]
    if number is not None:  # a range looks for anything but an integer in all of its numbers
        if name in _COUNTS:
            return min(max(number, 0), width[-1])
        if number in width:
            return number
    if name in _TIMES:
        path = f"{_PATH}.{_TIMES[name]}`"
        raise ValueError(f"Expected a whole number from 0 to 2^64 - 1{path}")
    return None


@functools.cache
def _message_fields(kind: type[_Message]) -> tuple[str, ...]:
    """The fields of a struct that are structs, or lists of them."""
    return tuple(name for name in kind.__struct_fields__ if name in _MESSAGE_FIELDS)


@functools.cache
def _checked_fields(kind: type[_Message]) -> tuple[str, ...]:
    """The fields of a struct that are whole numbers or enum values."""
    return tuple(name for name in kind.__struct_fields__ if name in _WIDTHS)


def _arguments(message: _Message, depth: int = 0) -> dict[str, Any]:
    """The arguments of the constructor of the protobuf message; ValueError beyond MAX_DEPTH."""
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    if type(message) is _AnyValue:
        if message.string_value is not None:
            return {"string_value": message.string_value}  # the most frequent value
        number = _whole(message.int_value)
        if number is not None and number not in _WIDTHS["int_value"]:
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


# ------------------------------------------------------------------------------ the text

_PIECE = 1 << 16
_MARKS = (b",", b":", b"[", b"{")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SPACES = bytes.maketrans(bytes(range(0x20)), b" " * 0x20)
_BACKSLASH = b"\xff"  # stands for an escaped backslash: no byte of UTF-8
_HIGH, _LOW = rb"[dD][89abAB][0-9a-fA-F]{2}", rb"[dD][c-fC-F][0-9a-fA-F]{2}"
_LONE_SURROGATE = re.compile(rb"\\u(?:%s(?!\\u%s)|(?<!\\u%s\\u)%s)" % (_HIGH, _LOW, _HIGH, _LOW))
_REPLACEMENT = rb"\\ufffd"
_PIECES = re.compile(  # which end within no escape and no pair of surrogates
    rb".{1,65536}(?:\Z|(?<!\\)(?<!\\u)(?<!\\u.)(?<!\\u..)(?<!\\u...)(?!(?<=\\u%s)\\u%s))"
    % (_HIGH, _LOW),
    re.DOTALL,
)
_WORDS = (b"NaN", b"Infinity")
# Possessive, so that no position is kept to go back to.
_UP_TO_NUMBER = re.compile(
    rb'(?>[^":,\[]++|"(?>[^"\\]++|\\.)*+"|[:,\[](?!\s*+-?(?:NaN|Infinity)\s*+[,\]}]))*+'
    rb"[:,\[]\s*+(-?(?:NaN|Infinity))",
    re.DOTALL,
)
_MAX_BARE_NUMBERS = 1 << 18  # each takes a microsecond


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


def repaired(raw: bytes) -> bytes | bytearray:
    """``raw`` without a byte order mark and with readable text and numbers.

    Bytes that are not UTF-8 and lone surrogates become U+FFFD, control characters become spaces,
    and the bare words NaN, Infinity and -Infinity become the text that OTLP/JSON has for them.

    The result has at most a quarter more bytes of text, and no step takes more than three times its
    memory.
    """
    text: bytes | bytearray = raw.removeprefix(_BYTE_ORDER_MARK)
    if not text.isascii():
        text = _as_utf8(text)
    text = text.translate(_SPACES)
    if b"\\ud" in text or b"\\uD" in text:
        pieces = _PIECES.finditer(text.replace(b"\\\\", _BACKSLASH))
        text = b"".join(_LONE_SURROGATE.sub(_REPLACEMENT, piece[0]) for piece in pieces)
        text = text.replace(_BACKSLASH, b"\\\\")
    if any(word in text for word in _WORDS):
        text = _with_text_for_numbers(text)
    return text


def _as_utf8(text: bytes | bytearray) -> bytearray:
    """``text`` with U+FFFD for bytes that are not UTF-8; beyond a quarter more bytes with `?`."""
    decoder, made = codecs.getincrementaldecoder("utf-8")("replace"), bytearray()
    for at in range(0, len(text), _PIECE):
        piece = decoder.decode(text[at : at + _PIECE], at + _PIECE >= len(text))
        has_room = len(made) - at <= max(_PIECE, len(text) // 4)
        made += (piece if has_room else piece.replace("\ufffd", "?")).encode()
    return made


def _with_text_for_numbers(text: bytes | bytearray) -> bytearray:
    """``text`` with quotes around the bare numbers that JSON does not have."""
    made, at = bytearray(), 0
    for _ in range(_MAX_BARE_NUMBERS):
        if (found := _UP_TO_NUMBER.match(text, at)) is None:
            break
        made += text[at : found.start(1)]
        made += b'"%b"' % found[1]
        at = found.end()
    made += text[at:]
    return made
