"""Bodies of OTLP requests that cost a receiver much and their sender little.

Every builder takes the size of the body in bytes, before compression, and makes one of nearly that
size. Each body attacks one part of the decoder; the names of the bodies name that part.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from wattspan.util.protobuf import encode_message, length_delimited

PROTOBUF, JSON = "application/x-protobuf", "application/json"

Build = Callable[[int], bytes]

_TIMES = b"\x39" + b"\1" * 8 + b"\x41" + b"\1" * 8  # fixed64 start and end
_IDS = length_delimited(1, bytes(range(1, 17))) + length_delimited(2, b"\1" * 8) + _TIMES
_ROOM = 512  # bytes of the flood's envelope


class Body(NamedTuple):
    """A request to be sent."""

    name: str
    content_type: str
    encoding: str
    data: bytes


def repeated(tiny: bytes, size: int) -> bytes:
    return tiny * ((size - _ROOM) // len(tiny))


def in_span(flood: bytes) -> bytes:
    """A request of one span that holds ``flood`` besides its ids."""
    return in_scope(length_delimited(2, _IDS + flood))


def in_scope(flood: bytes) -> bytes:
    return length_delimited(1, length_delimited(2, flood))


def in_resource(flood: bytes) -> bytes:
    return length_delimited(
        1, length_delimited(1, flood) + length_delimited(2, length_delimited(2, _IDS))
    )


def flood_of(number: int, payload: bytes = b"") -> Build:
    """One span with as many fields of this number as there is room for."""
    return lambda size: in_span(repeated(length_delimited(number, payload), size))


def _value(inner: bytes) -> bytes:
    """A span whose only attribute has this AnyValue."""
    return in_span(length_delimited(9, length_delimited(1, b"a") + length_delimited(2, inner)))


def _nested_values(size: int) -> bytes:
    inner = b""
    for _ in range(64):
        inner = length_delimited(5, length_delimited(1, inner))
    return _value(length_delimited(5, repeated(length_delimited(1, inner), size)))


def _nested_groups(size: int) -> bytes:
    return in_span(repeated(b"\x9b\x01" * 60 + b"\x9c\x01" * 60, size))


def _overlong_after(number: int) -> Build:
    """A field flood behind a varint that is too long for 64 bits, which the parser accepts."""
    return lambda size: in_span(b"\x40" + b"\xff" * 9 + b"\x7f" + repeated(b"\x4a\0", size))


def _many_spans(span: bytes) -> Build:
    return lambda size: in_scope(repeated(length_delimited(2, span), size))


def _hidden(name: bytes) -> bytes:
    """An attribute that holds the bytes of another one in its text."""
    return length_delimited(
        9,
        length_delimited(1, b"t")
        + length_delimited(2, length_delimited(1, length_delimited(1, name))),
    )


def _searched(names: int, fill: int) -> bytes:
    """A span in whose attributes the decoder searches for names that are not there."""
    names_of = (b"gen_ai.usage.input_tokens", b"gen_ai.usage.prompt_tokens",
                b"gen_ai.usage.output_tokens", b"gen_ai.usage.completion_tokens")  # fmt: skip
    return (
        _IDS
        + encode_message((9, b"") for _ in range(fill))
        + b"".join(map(_hidden, names_of[:names]))
    )


def _unlike_spans(size: int) -> bytes:
    """Spans with names of their own, a control character in each."""
    one = len(length_delimited(2, _IDS + length_delimited(5, b"\x01" * 8)))
    return in_scope(
        b"".join(
            length_delimited(2, _IDS + length_delimited(5, b"\1" + number.to_bytes(7, "big")))
            for number in range((size - _ROOM) // one)
        )
    )


PROTOBUFS: Mapping[str, Build] = {
    "varint": lambda size: b"\x08" + b"\xff" * (size - 1),
    "varint in a span": lambda size: in_span(b"\x40" + b"\xff" * (size - _ROOM)),
    "varints of ten bytes": lambda size: in_span(repeated(b"\x40" + b"\xff" * 9 + b"\1", size)),
    "field behind an overlong varint": _overlong_after(9),
    "resources": lambda size: repeated(b"\n\0", size),
    "resources of one scope": lambda size: repeated(
        length_delimited(1, length_delimited(2, b"")), size
    ),
    "scopes": lambda size: length_delimited(1, repeated(b"\x12\0", size)),
    "spans": lambda size: in_scope(repeated(b"\x12\0", size)),
    "spans with ids": _many_spans(_IDS),
    "spans of half a kilobyte": _many_spans(
        _IDS + length_delimited(5, bytes(230)) + length_delimited(9, bytes(200))
    ),
    "unlike spans": _unlike_spans,
    "attributes": flood_of(9),
    "events": flood_of(11),
    "links": flood_of(13),
    "unknown fields": flood_of(99),
    "unknown varints": lambda size: in_span(repeated(b"\x40\0", size)),
    "groups": lambda size: in_span(repeated(b"\x9b\x01\x9c\x01", size)),
    "nested groups": _nested_groups,
    "attributes of events": lambda size: in_span(length_delimited(11, repeated(b"\x1a\0", size))),
    "attributes of links": lambda size: in_span(length_delimited(13, repeated(b"\x22\0", size))),
    "values of an array": lambda size: _value(length_delimited(5, repeated(b"\n\0", size))),
    "values of a list": lambda size: _value(length_delimited(6, repeated(b"\n\0", size))),
    "nested values": _nested_values,
    "attributes of a resource": lambda size: in_resource(repeated(b"\n\0", size)),
    "attributes of a scope": lambda size: length_delimited(
        1,
        length_delimited(
            2, length_delimited(1, repeated(b"\x1a\0", size)) + length_delimited(2, _IDS)
        ),
    ),
    "spans below the count": _many_spans(_IDS + b"\x4a\0" * (1 << 16)),
    "searched spans": _many_spans(_searched(4, 1000)),
    "searched small spans": _many_spans(_searched(4, 8)),
    "search of nearly a name": lambda size: _value(
        length_delimited(
            1,
            repeated(b"\n\x19gen_ai.usage.input_token", size)
            + length_delimited(1, b"gen_ai.usage.input_tokens"),
        )
    ),
    "text": lambda size: _value(length_delimited(1, b"x" * (size - _ROOM))),
    "garbage": lambda size: b"\xff" * size,
    "cut short": lambda size: in_span(b"x" * (size - _ROOM))[:-9],
}


def _json_in(place: str, flood: bytes) -> bytes:
    ids = b'"traceId":"0102030405060708090a0b0c0d0e0f10","spanId":"0101010101010101"'
    wrapped = {
        "request": b'{"resourceSpans":[%b]}',
        "resource": b'{"resourceSpans":[{"resource":{"attributes":[%b]}}]}',
        "scopes": b'{"resourceSpans":[{"scopeSpans":[%b]}]}',
        "spans": b'{"resourceSpans":[{"scopeSpans":[{"spans":[%b]}]}]}',
        "span": b'{"resourceSpans":[{"scopeSpans":[{"spans":[{' + ids + b',"x":[%b]}]}]}]}',
        "attributes": b'{"resourceSpans":[{"scopeSpans":[{"spans":[{' + ids
        + b',"attributes":[%b]}]}]}]}',
        "value": b'{"resourceSpans":[{"scopeSpans":[{"spans":[{' + ids
        + b',"attributes":[{"key":"a","value":{"arrayValue":{"values":[%b]}}}]}]}]}]}',
        "unknown": b'{"x":[%b]}',
    }  # fmt: skip
    return wrapped[place] % flood


def _json_flood(place: str, tiny: bytes) -> Build:
    return lambda size: _json_in(place, repeated(tiny, size).rstrip(b","))


def _json_pairs(size: int) -> bytes:
    """An object of as many different names as there is room for."""
    pairs = b",".join(b'"%06x":{}' % number for number in range((size - 200) // 12))
    return _json_in("span", b"{" + pairs + b"}")


_SPAN = (
    b'{"traceId":"0102030405060708090a0b0c0d0e0f10","spanId":"0101010101010101","name":"n",'
    b'"startTimeUnixNano":"1","endTimeUnixNano":"2","attributes":[%b]},'
)
_ATTRIBUTE = b'{"key":"a","value":{"intValue":"1"}}'

_VALUES = b",".join([b'{"key":"a"}'] * 9_000)
_LISTS = b",".join([b'{"key":"a","value":{"kvlistValue":{}}}'] * 7_000)

JSONS: Mapping[str, Build] = {
    "zeros as resources": _json_flood("request", b"0,"),
    "objects as resources": _json_flood("request", b"{},"),
    "arrays as scopes": _json_flood("scopes", b"[],"),
    "objects as spans": _json_flood("spans", b"{},"),
    "spans in JSON": _json_flood("spans", _SPAN % b""),
    "spans with attributes in JSON": _json_flood("spans", _SPAN % b",".join([_ATTRIBUTE] * 9)),
    "numbers": _json_flood("span", b"1000,"),
    "strings": _json_flood("span", b'"ab",'),
    "objects": _json_flood("span", b'{"a":{}},'),
    "names": _json_pairs,
    "attributes in JSON": _json_flood("attributes", b'{"key":"a"},'),
    "empty attributes in JSON": _json_flood("attributes", b"{},"),
    "values in JSON": _json_flood("value", b"{},"),
    "attributes of a resource in JSON": _json_flood("resource", b"{},"),
    "unknown in JSON": _json_flood("unknown", b"[],"),
    "spans of many values in JSON": _json_flood(
        "spans", _SPAN % b",".join([b'{"key":"a"}'] * 10_000)
    ),
    "nested arrays": lambda size: _json_in("span", b"[" * (size - _ROOM)),
    "long number": lambda size: _json_in("span", b"1" * (size - _ROOM)),
    "long fraction": lambda size: _json_in("span", b"0." + b"1" * (size - _ROOM)),
    "long exponent": lambda size: _json_in("span", b"1e" + b"1" * (size - _ROOM)),
    "long count": lambda size: _json_in(
        "attributes", b'{"key":"a","value":{"intValue":%b}}' % (b"9" * (size - _ROOM))
    ),
    "escapes": lambda size: _json_in("span", b'"' + repeated(b"\\u0041", size) + b'"'),
    "quotes in a text": lambda size: _json_in("span", b'"' + repeated(b'\\",[', size) + b'"'),
    "open string": lambda size: b'{"x":"' + b"a" * (size - _ROOM),
    "bad UTF-8": lambda size: _json_in("span", b'"' + b"\xff" * (size - _ROOM) + b'"'),
}


def _fixed(body: bytes) -> Build:
    """The largest body within the bounds, for any requested size."""
    return lambda _: body


PERMITTED: Mapping[str, Build] = {
    "spans of the permitted number": _fixed(in_scope(length_delimited(2, _IDS) * 65_000)),
    "searched spans of the permitted number": _fixed(
        in_scope(length_delimited(2, _searched(4, 8)) * 30_000)
    ),
    "permitted searches": _fixed(in_scope(length_delimited(2, _searched(4, 1000)) * 500)),
    "permitted fields": _fixed(
        in_scope(
            length_delimited(
                2, _IDS + length_delimited(9, b"") * 100_000 + length_delimited(5, bytes(80_000))
            )
            * 10
        )
    ),
    "small spans of many fields": _many_spans(_IDS + b"\x4a\0" * (1 << 16)),
    "one value": lambda size: _value(length_delimited(1, b"x" * (size - _ROOM))),
}
PERMITTED_JSON: Mapping[str, Build] = {
    "permitted values": _fixed(_json_in("spans", (_SPAN % _VALUES * 38).rstrip(b","))),
    "permitted lists": _fixed(_json_in("spans", (_SPAN % _LISTS * 16).rstrip(b","))),
    "permitted spans": _json_flood("spans", _SPAN % b""),
    "permitted unknown objects": _fixed(
        _json_in(
            "spans",
            ((_SPAN[:-2] + b',"x":[%b]},') % (b"", b'{"a":{}},' * 16_000 + b"0") * 16).rstrip(b","),
        )
    ),
}


def bodies(size: int, *, json_size: int | None = None) -> Iterator[Body]:
    """Every body, of nearly ``size`` bytes, plain and compressed; bombs behind them."""
    for content_type, builders, each in (
        (PROTOBUF, {**PROTOBUFS, **PERMITTED}, size),
        (JSON, {**JSONS, **PERMITTED_JSON}, min(size, json_size or size)),
    ):
        for name, build in builders.items():
            data = build(each)
            yield Body(name, content_type, "", data)
            yield Body(name, content_type, "gzip", gzip.compress(data, 6))
    for name, bomb in bombs(4 * size).items():
        yield Body(name, PROTOBUF, "gzip", bomb)
        yield Body(name, JSON, "gzip", bomb)


def bombs(size: int) -> Mapping[str, bytes]:
    """Compressed bodies with misleading sizes; ``size`` is the decompressed size of the first."""
    zeros = gzip.compress(bytes(size))
    return {
        "bomb": zeros,
        "bomb of members": gzip.compress(bytes(size // 16)) * 16,
        "empty members": gzip.compress(b"") * 10_000,
        "bomb in a bomb": gzip.compress(zeros),
        "bomb cut short": zeros[: len(zeros) // 2],
        "not gzip": zlib.compress(bytes(size)),
        "not compressed": b"\xff" * 1000,
    }
