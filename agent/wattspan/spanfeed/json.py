"""OTLP/JSON to the same request in protobuf.

protobuf's own json_format takes ten times as long, and ids for base64. Here the mapping is made
once of the message types themselves, so it knows every field they have. A request is gone through
span by span, so that what is decoded at a time is one span.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from wattspan.spanfeed import wire
from wattspan.spanfeed.errors import MalformedError, too_many, too_many_fields
from wattspan.spanfeed.json_values import WrongError, arguments
from wattspan.util.encoding import encode_message

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
        _look_over(body, most, fields)
        return _Transcript(most).request(body)
    except WrongError as error:
        raise MalformedError(f"{error.where or 'the request'} {error}") from None


class _Any(msgspec.Struct, gc=False):
    """An object of which nothing is kept."""


class _ScopeOutline(msgspec.Struct, gc=False):
    spans: Sequence[_Any] | None = None


class _ResourceOutline(msgspec.Struct, gc=False):
    scopeSpans: Sequence[_ScopeOutline] | None = None  # noqa: N815
    scope_spans: Sequence[_ScopeOutline] | None = None


class _Outline(msgspec.Struct, gc=False):
    resourceSpans: Sequence[_ResourceOutline] | None = None  # noqa: N815
    resource_spans: Sequence[_ResourceOutline] | None = None


_LARGE = 1 << 20
_PIECE = 1 << 16
_MARKS = (b",", b":", b"[", b"{")


def _look_over(body: bytes, most: int, fields: int) -> None:
    """Refuse a request that would take many times its size to read, before it is read."""
    wire.Budget(fields).spend(_values(body, fields))
    if len(body) < _LARGE:
        return
    outline = _read(body, _Outline)  # no item takes more memory in it than in the body
    spans = 0
    for resource in outline.resourceSpans or outline.resource_spans or ():
        for scope in resource.scopeSpans or resource.scope_spans or ():
            spans += 1 + len(scope.spans or ())
    if spans > most:
        raise too_many(most)


def _values(raw: bytes, most: int) -> int:
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


class _Transcript:
    """Of one request, layer by layer."""

    def __init__(self, most: int) -> None:
        self._most, self._left = most, most

    def request(self, raw: bytes) -> bytes:
        told = _read(raw, _Request)
        outer = told.resourceSpans or told.resource_spans
        return encode_message(self._each(1, "resourceSpans", outer, self._resource))

    def _resource(self, raw: msgspec.Raw) -> bytes:
        told = _read(raw, _ResourceSpans)
        return encode_message(
            [
                *_message(1, Resource, told.resource, "resource"),
                *self._each(2, "scopeSpans", told.scopeSpans or told.scope_spans, self._scope),
                *_text(3, told.schemaUrl or told.schema_url),
            ]
        )

    def _scope(self, raw: msgspec.Raw) -> bytes:
        told = _read(raw, _ScopeSpans)
        return encode_message(
            [
                *_message(1, InstrumentationScope, told.scope, "scope"),
                *self._each(2, "spans", told.spans, _span),
                *_text(3, told.schemaUrl or told.schema_url),
            ]
        )

    def _each(
        self, number: int, name: str, raws: _Raws, convert: Callable[[msgspec.Raw], bytes]
    ) -> list[_Field]:
        raws = raws or ()
        self._left -= len(raws)
        if self._left < 0:
            raise too_many(self._most)
        made: list[_Field] = []
        try:
            made.extend((number, convert(raw)) for raw in raws)
        except WrongError as error:
            raise error.inside(f"{name}[{len(made)}]") from None
        return made


def _span(raw: msgspec.Raw) -> bytes:
    return _encoded(Span, raw)


def _text(number: int, text: str | None) -> list[_Field]:
    return [(number, text.encode())] if text is not None else []


def _message(number: int, kind: Any, raw: msgspec.Raw, name: str) -> list[_Field]:
    if bytes(raw) in (b"", b"null"):
        return []
    try:
        return [(number, _encoded(kind, raw))]
    except WrongError as error:
        raise error.inside(name) from None


def _encoded(kind: Any, raw: msgspec.Raw) -> bytes:
    if _values(bytes(raw), wire.MOST_FIELDS) > wire.MOST_FIELDS:
        raise too_many_fields(f"a {kind.DESCRIPTOR.name}", wire.MOST_FIELDS)
    told = arguments(kind.DESCRIPTOR, _read(raw, Any))
    try:
        return wire.encoded(kind(**told))
    except (TypeError, ValueError) as error:
        raise WrongError(f"cannot be encoded: {error}") from None


def _read(raw: bytes | msgspec.Raw, kind: Any) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except RecursionError:
        raise WrongError("is nested too deeply") from None
    except ValueError as error:  # of JSON, of UTF-8, or of types
        raise WrongError(f"cannot be read: {error}") from None
