"""Values of protobuf's JSON, as OTLP changes it, made what message constructors take.

OTLP/JSON to the same request in protobuf.

protobuf's own json_format takes ten times as long, and ids for base64. Here the mapping is made
once of the message types themselves, so it knows every field they have. A request is gone through
span by span, so that what is decoded at a time is one span.
"""

from __future__ import annotations

import base64
import binascii
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from wattspan.ingest import wire
from wattspan.ingest.export_request import MalformedRequestError, too_many_fields, too_many_spans
from wattspan.util.encoding import encode_message

MAX_DEPTH = 48
"""Messages inside messages that are followed. protobuf's own readers follow 100."""

_HEX = ("trace_id", "span_id", "parent_span_id")
_REALS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

Convert = Callable[[Any, int], Any]
"""Converts a value that stands so many messages deep."""


class InvalidValueError(Exception):
    """A value cannot be what it should be; ``where`` grows on the way out."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.where = ""

    def inside(self, step: str) -> InvalidValueError:
        self.where = f"{step}{'' if self.where[:1] in ('', '[') else '.'}{self.where}"
        return self


def message_arguments(descriptor: Any, value: Any, depth: int = 0) -> dict[str, Any]:
    """What the constructor of a message of this type takes, of a JSON object. WrongError.

    Names are lowerCamelCase or as in the protobuf; unknown ones are passed over, null is nothing.
    """
    if type(value) is not dict:
        raise InvalidValueError("is not an object")
    if depth > MAX_DEPTH:
        raise InvalidValueError("is nested too deeply")
    fields = _fields(descriptor)
    made = {}
    for key, each in value.items():
        if each is not None and (field := fields.get(key)) is not None:
            try:
                made[field[0]] = field[1](each, depth)
            except InvalidValueError as error:
                raise error.inside(key) from None
    return made


@functools.cache
def _fields(descriptor: Any) -> Mapping[str, tuple[str, Convert]]:
    """For each name a field may have in JSON, its own name and how it is converted."""
    found = {}
    for field in descriptor.fields:
        convert = _converter(field)
        found[field.name] = found[field.json_name] = (
            field.name,
            _repeated(convert) if field.is_repeated else convert,
        )
    return found


def _converter(field: Any) -> Convert:
    match field.type:
        case field.TYPE_MESSAGE:
            inner = field.message_type
            return lambda value, depth: message_arguments(inner, value, depth + 1)
        case field.TYPE_STRING:
            return _text
        case field.TYPE_BYTES:
            return _hexadecimal if field.name in _HEX else _base64
        case field.TYPE_BOOL:
            return _bool
        case field.TYPE_DOUBLE | field.TYPE_FLOAT:
            return _float
        case field.TYPE_ENUM:
            return _enum(dict(field.enum_type.values_by_name))
        case field.TYPE_FIXED64 | field.TYPE_UINT64:
            return _integer(0, 1 << 64)
        case field.TYPE_FIXED32 | field.TYPE_UINT32:
            return _integer(0, 1 << 32)
        case field.TYPE_INT64:
            return _integer(-1 << 63, 1 << 63)
        case _:
            return _integer(-1 << 31, 1 << 31)


def _repeated(convert: Convert) -> Convert:
    def array(value: Any, depth: int) -> list[Any]:
        if type(value) is not list:
            raise InvalidValueError("is not an array")
        made: list[Any] = []
        try:
            made.extend(convert(each, depth) for each in value)
        except InvalidValueError as error:
            raise error.inside(f"[{len(made)}]") from None
        return made

    return array


def _text(value: Any, _: int) -> str:
    if type(value) is not str:
        raise InvalidValueError("is not a string")
    return value


def _bool(value: Any, _: int) -> bool:
    if type(value) is not bool:
        raise InvalidValueError("is neither true nor false")
    return value


def _hexadecimal(value: Any, _: int) -> bytes:
    try:
        return binascii.unhexlify(_text(value, 0))
    except ValueError:
        raise InvalidValueError("is not hexadecimal, as ids are in OTLP's JSON") from None


def _base64(value: Any, _: int) -> bytes:
    text = _text(value, 0)
    try:
        return base64.b64decode(
            text + "=" * (-len(text) % 4),
            altchars=b"-_" if "-" in text or "_" in text else None,
            validate=True,
        )
    except ValueError:
        raise InvalidValueError("is not base64") from None


def _float(value: Any, _: int) -> float:
    if type(value) is str:
        value = _REALS.get(value, value)
    if type(value) is bool:
        raise InvalidValueError("is not a number")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidValueError("is not a number") from None


def _integer(least: int, beyond: int) -> Convert:
    def convert(value: Any, _: int) -> Any:
        kind = type(value)
        if (kind is str and len(value) < 25) or (kind is float and value.is_integer()):
            try:
                value = int(value)
            except ValueError:
                raise InvalidValueError("is not a whole number") from None
        elif kind is not int:
            raise InvalidValueError("is not a whole number")
        if not least <= value < beyond:
            raise InvalidValueError("is out of bounds")
        return value

    return convert


def _enum(names: Mapping[str, Any]) -> Convert:
    numbers = {name: value.number for name, value in names.items()}
    whole = _integer(-1 << 31, 1 << 31)

    def convert(value: Any, depth: int) -> Any:
        if type(value) is str and value in numbers:
            return numbers[value]
        return whole(value, depth)

    return convert


_Raws = Sequence[msgspec.Raw] | None
_Field = tuple[int, bytes]  # of a message: its number and what it holds


class _Request(msgspec.Struct, gc=False):
    resourceSpans: _Raws = None  # noqa: N815 - as it is on the wire
    resource_spans: _Raws = None


class _ResourceSpans(msgspec.Struct, gc=False):
    resource: msgspec.Raw = msgspec.Raw()
    scopeSpans: _Raws = None  # noqa: N815
    scope_spans: _Raws = None
    schemaUrl: str | None = None  # noqa: N815
    schema_url: str | None = None


class _ScopeSpans(msgspec.Struct, gc=False):
    scope: msgspec.Raw = msgspec.Raw()
    spans: _Raws = None
    schemaUrl: str | None = None  # noqa: N815
    schema_url: str | None = None


def to_protobuf(body: bytes, most: int, fields: int) -> bytes:
    """An ExportTraceServiceRequest in JSON as protobuf.

    MalformedError names the place; TooLargeError for more than ``most`` spans, or more than
    ``fields`` names and values.
    """
    try:
        _check_size(body, most, fields)
        return _ProtobufTranscoder(most).request(body)
    except InvalidValueError as error:
        raise MalformedRequestError(f"{error.where or 'the request'} {error}") from None


class _IgnoredObject(msgspec.Struct, gc=False):
    """An object of which nothing is kept."""


class _ScopeOutline(msgspec.Struct, gc=False):
    spans: Sequence[_IgnoredObject] | None = None


class _ResourceOutline(msgspec.Struct, gc=False):
    scopeSpans: Sequence[_ScopeOutline] | None = None  # noqa: N815
    scope_spans: Sequence[_ScopeOutline] | None = None


class _Outline(msgspec.Struct, gc=False):
    resourceSpans: Sequence[_ResourceOutline] | None = None  # noqa: N815
    resource_spans: Sequence[_ResourceOutline] | None = None


_LARGE = 1 << 20
_PIECE = 1 << 16
_MARKS = (b",", b":", b"[", b"{")


def _check_size(body: bytes, most: int, fields: int) -> None:
    """Refuse a request that would take many times its size to read, before it is read."""
    wire.FieldBudget(fields).spend(_count_values(body, fields))
    if len(body) < _LARGE:
        return
    outline = _decode_json(body, _Outline)  # no item takes more memory in it than in the body
    spans = 0
    for resource in outline.resourceSpans or outline.resource_spans or ():
        for scope in resource.scopeSpans or resource.scope_spans or ():
            spans += 1 + len(scope.spans or ())
    if spans > most:
        raise too_many_spans(most)


def _count_values(raw: bytes, most: int) -> int:
    """The commas, colons and opening brackets outside of strings: no fewer than the values.

    JSON too short for more than ``most`` of them is not read and counts 0.
    """
    if len(raw) <= most:
        return 0
    raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")  # what escapes a quote, and such quotes
    count, inside = 0, 0
    for at in range(0, len(raw), _PIECE):
        parts = raw[at : at + _PIECE].split(b'"')
        outside = b"".join(parts[inside::2])
        count += sum(map(outside.count, _MARKS))
        inside ^= (len(parts) - 1) & 1
    return count


class _ProtobufTranscoder:
    """Of one request, layer by layer."""

    def __init__(self, most: int) -> None:
        self._most, self._left = most, most

    def request(self, raw: bytes) -> bytes:
        told = _decode_json(raw, _Request)
        outer = told.resourceSpans or told.resource_spans
        return encode_message(self._each(1, "resourceSpans", outer, self._resource))

    def _resource(self, raw: msgspec.Raw) -> bytes:
        told = _decode_json(raw, _ResourceSpans)
        return encode_message(
            [
                *_message(1, Resource, told.resource, "resource"),
                *self._each(2, "scopeSpans", told.scopeSpans or told.scope_spans, self._scope),
                *_text_bytes(3, told.schemaUrl or told.schema_url),
            ]
        )

    def _scope(self, raw: msgspec.Raw) -> bytes:
        told = _decode_json(raw, _ScopeSpans)
        return encode_message(
            [
                *_message(1, InstrumentationScope, told.scope, "scope"),
                *self._each(2, "spans", told.spans, _span),
                *_text_bytes(3, told.schemaUrl or told.schema_url),
            ]
        )

    def _each(
        self, number: int, name: str, raws: _Raws, convert: Callable[[msgspec.Raw], bytes]
    ) -> list[_Field]:
        raws = raws or ()
        self._left -= len(raws)
        if self._left < 0:
            raise too_many_spans(self._most)
        made: list[_Field] = []
        try:
            made.extend((number, convert(raw)) for raw in raws)
        except InvalidValueError as error:
            raise error.inside(f"{name}[{len(made)}]") from None
        return made


def _span(raw: msgspec.Raw) -> bytes:
    return _encoded(Span, raw)


def _text_bytes(number: int, text: str | None) -> list[_Field]:
    return [(number, text.encode())] if text is not None else []


def _message(number: int, kind: Any, raw: msgspec.Raw, name: str) -> list[_Field]:
    if bytes(raw) in (b"", b"null"):
        return []
    try:
        return [(number, _encoded(kind, raw))]
    except InvalidValueError as error:
        raise error.inside(name) from None


def _encoded(kind: Any, raw: msgspec.Raw) -> bytes:
    if _count_values(bytes(raw), wire.MAX_FIELDS) > wire.MAX_FIELDS:
        raise too_many_fields(f"a {kind.DESCRIPTOR.name}", wire.MAX_FIELDS)
    told = message_arguments(kind.DESCRIPTOR, _decode_json(raw, Any))
    try:
        return wire.encoded(kind(**told))
    except (TypeError, ValueError) as error:
        raise InvalidValueError(f"cannot be encoded: {error}") from None


def _decode_json(raw: bytes | msgspec.Raw, kind: Any) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except RecursionError:
        raise InvalidValueError("is nested too deeply") from None
    except ValueError as error:  # of JSON, of UTF-8, or of types
        raise InvalidValueError(f"cannot be read: {error}") from None
