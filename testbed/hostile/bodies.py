"""Bodies of requests that cost their receiver much more than their sender.

A body is a recipe, so that the sender builds a hundred megabytes from a line of JSON.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

MIB = 1 << 20
Parts = tuple[tuple[bytes, int], ...]

# field numbers of ExportTraceServiceRequest and its messages
RESOURCE_SPANS, RESOURCE, SCOPE_SPANS, SPANS = 1, 1, 2, 2
SPAN = (RESOURCE_SPANS, SCOPE_SPANS, SPANS)
NAME, ATTRIBUTES, EVENTS, LINKS = 5, 9, 11, 13
KEY_VALUE_LIST, ARRAY, VALUE, VALUES = 6, 5, 2, 1


@dataclass(frozen=True)
class Body:
    """Bytes with repetitions, compressed by ``encodings`` one after the other."""

    name: str
    parts: Parts
    content_type: str = "application/x-protobuf"
    encodings: tuple[str, ...] = ()
    encoding_header: str = ""  # the request's declaration, if it differs from the encodings

    def build(self) -> bytes:
        body = b"".join(piece * times for piece, times in self.parts)
        for encoding in self.encodings:
            body = compress(body, encoding)
        return body

    @property
    def header(self) -> str:
        """The content-encoding."""
        return self.encoding_header or ", ".join(self.encodings)

    def told(self) -> dict[str, Any]:
        """As JSON."""
        parts = [[piece.decode("latin-1"), times] for piece, times in self.parts]
        return {**asdict(self), "parts": parts, "encodings": list(self.encodings)}


def understood(told: dict[str, Any]) -> Body:
    """The body described by ``Body.told``."""
    parts = tuple((str(piece).encode("latin-1"), int(times)) for piece, times in told["parts"])
    return Body(**{**told, "parts": parts, "encodings": tuple(told["encodings"])})


def compress(body: bytes, encoding: str) -> bytes:
    window = {"gzip": 31, "deflate": 15}[encoding]
    press = zlib.compressobj(9, zlib.DEFLATED, window)
    return press.compress(body) + press.flush()


def varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def tag(number: int, wire: int = 2) -> bytes:
    return varint(number << 3 | wire)


def inside(parts: Parts, *numbers: int) -> Parts:
    """``parts`` as a message in fields with these numbers, the outermost first."""
    for number in reversed(numbers):
        size = sum(len(piece) * times for piece, times in parts)
        parts = ((tag(number) + varint(size), 1), *parts)
    return parts


def flood(unit: bytes, size: int, *numbers: int) -> Parts:
    """``size`` bytes of one field again and again, in fields with these numbers."""
    return inside(((unit, size // len(unit)),), *numbers)


def gzipped(body: Body) -> Body:
    return Body(f"{body.name}, gzip", body.parts, body.content_type, ("gzip",))


# ------------------------------------------------------------------------------------- varints


def varints(size: int) -> list[Body]:
    """Varints that do not end: as a tag, a value, a length, and in a span."""
    endless = ((b"\xff", size),)
    return [
        Body("value of a field", ((b"\x08", 1), *endless)),
        Body("tag of a field", endless),
        Body("length of a field", ((b"\x0a", 1), *endless)),
        Body("value in a span", inside(((tag(6, 0), 1), *endless, (b"\x01", 1)), *SPAN)),
    ]


# ------------------------------------------------------------------------------- floods of fields


def protobuf_floods(size: int) -> list[Body]:
    empty = b"\x00"
    value = (ATTRIBUTES, VALUE)
    return [
        Body("attributes of a span", flood(tag(ATTRIBUTES) + empty, size, *SPAN)),
        Body("events of a span", flood(tag(EVENTS) + empty, size, *SPAN)),
        Body("links of a span", flood(tag(LINKS) + empty, size, *SPAN)),
        Body("names of a span", flood(tag(NAME) + empty, size, *SPAN)),
        Body("unknown fields of a span", flood(tag(15, 0) + empty, size, *SPAN)),
        Body("attributes of an event", flood(tag(3) + empty, size, *SPAN, EVENTS)),
        Body("attributes of a link", flood(tag(4) + empty, size, *SPAN, LINKS)),
        Body("values of an array", flood(tag(VALUES) + empty, size, *SPAN, *value, ARRAY)),
        Body("values of a list", flood(tag(VALUES) + empty, size, *SPAN, *value, KEY_VALUE_LIST)),
        Body("nested values", _nested(size)),
        Body("empty spans", flood(tag(SPANS) + empty, size, RESOURCE_SPANS, SCOPE_SPANS)),
        Body("empty scopes", flood(tag(SCOPE_SPANS) + empty, size, RESOURCE_SPANS)),
        Body("empty resources", flood(tag(RESOURCE_SPANS) + empty, size)),
        Body(
            "attributes of a resource",
            flood(tag(1) + empty, size, RESOURCE_SPANS, RESOURCE),
        ),
    ]


def _nested(size: int) -> Parts:
    """Arrays in arrays, as deep as 64 KiB allow, again and again."""
    deep: Parts = ()
    for _ in range(5_000):
        deep = ((b"".join(piece * times for piece, times in inside(deep, ARRAY, VALUES)), 1),)
    one = b"".join(piece * times for piece, times in inside(deep, ATTRIBUTES, VALUE))
    return inside(((one, max(1, size // len(one))),), *SPAN)


def json_floods(size: int) -> list[Body]:
    def of(name: str, before: str, unit: str, after: str) -> Body:
        most = (size - len(before) - len(after)) // len(unit)
        parts = ((before.encode(), 1), (unit.encode(), most - 1), (unit[:-1].encode(), 1))
        return Body(f"JSON, {name}", (*parts, (after.encode(), 1)), "application/json")

    begin, end = '{"resourceSpans":[{"scopeSpans":[{"spans":[', "]}]}]}"
    deep = 200_000
    nested = "[" * deep + "]" * deep
    return [
        of("attributes of a span", begin + '{"attributes":[', "{},", "]}" + end),
        of("events of a span", begin + '{"events":[', "{},", "]}" + end),
        of("links of a span", begin + '{"links":[', "{},", "]}" + end),
        of("empty spans", begin, "{},", end),
        of("fields of a span", begin + "{", '"":0,', "}" + end),
        of(
            "values of an array",
            begin + '{"attributes":[{"key":"a","value":{"arrayValue":{"values":[',
            "{},",
            "]}}}]}" + end,
        ),
        Body("JSON, nested", ((nested.encode(), 1),), "application/json"),
    ]


# ------------------------------------------------------------------------------------------ bombs


def bombs(size: int) -> list[Body]:
    zeros: Parts = ((b"\x00" * MIB, max(1, size // MIB)),)
    spaces: Parts = ((b" " * MIB, max(1, size // MIB)),)
    return [
        Body("gzip", zeros, encodings=("gzip",)),
        Body("deflate", zeros, encodings=("deflate",)),
        Body("gzip in gzip", zeros, encodings=("gzip", "gzip")),
        Body("gzip in gzip, one told", zeros, encodings=("gzip", "gzip"), encoding_header="gzip"),
        Body("JSON, gzip", spaces, "application/json", ("gzip",)),
        Body("told as gzip", ((b"\x1f\x8b\x08", 20_000),), encoding_header="gzip"),
    ]


# --------------------------------------------------------------------------------- refused bodies


def refused(size: int) -> list[Body]:
    """Bodies that no receiver takes, each for a reason of its own."""
    large = ((b"\x00" * MIB, max(1, size // MIB)),)
    return [
        Body("too large once decompressed", large, encodings=("gzip",)),
        Body("too large", ((b"\x4a\x00", 9 * MIB),)),
        Body("no protobuf", ((b"\xff" * 64, 1024),)),
        Body("cut off", inside(((b"\x0a\x10", 1),), *SPAN)[:2]),
        Body("no JSON", ((b"[" * 64, 1024),), "application/json"),
        Body("JSON of another kind", ((b'{"resourceSpans":7}', 1),), "application/json"),
        Body("no gzip", ((b"nothing of that kind", 3_000),), encoding_header="gzip"),
        Body("unknown encoding", ((b"x", 60_000),), encoding_header="br"),
        Body("unknown type", ((b"x", 60_000),), "text/plain"),
    ]


def span_template(count: int, text: int = 0) -> bytes:
    """A request with so many spans; the times are ``STARTED_`` and ``FINISHED``.

    ``text`` is the length of one attribute of each, as of a URL or a query.
    """
    value = b"\x0a" + varint(text) + b"x" * text
    attribute = b"\x0a\x03url" + b"\x12" + varint(len(value)) + value
    extra = tag(ATTRIBUTES) + varint(len(attribute)) + attribute if text else b""
    spans: list[tuple[bytes, int]] = []
    for number in range(count):
        name = f"step {number % 20}".encode()
        fields: Sequence[bytes] = (
            tag(1) + varint(16) + number.to_bytes(16, "big"),
            tag(2) + varint(8) + (number + 1).to_bytes(8, "big"),
            tag(NAME) + varint(len(name)) + name,
            tag(7, 1) + b"STARTED_",
            tag(8, 1) + b"FINISHED",
            extra,
        )
        one = b"".join(fields)
        spans.append((tag(SPANS) + varint(len(one)) + one, 1))
    return b"".join(piece for piece, _ in inside(tuple(spans), RESOURCE_SPANS, SCOPE_SPANS))
