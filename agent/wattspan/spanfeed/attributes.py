"""Single attributes, found in the bytes of a span or a resource without decoding the others.

Eight attributes of a span take three times as long to decode as all else of it, and of most of
them nothing is wanted. An encoder writes an attribute as its field's tag and length, then the key
with its tag and length, then the value: so the key's bytes with their length are searched for,
and believed where they stand as the span's own attribute. Whatever is written otherwise, which
protobuf allows, is decoded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from google.protobuf.message import DecodeError

from wattspan.spanfeed import wire

_ATTRIBUTE = 9 << 3 | 2  # Span.attributes
_VALUE = 2 << 3 | 2  # KeyValue.value
_LOOKED_AT = 1024
"""Attributes of one span or resource that are decoded in search of one."""

_LARGEST = (1 << 63) - 1


class Key(NamedTuple):
    """An attribute that is looked for: its name, and how it begins on the wire.

    Those of one ``place`` are names of one thing; the first that is there counts.
    """

    place: int
    name: bytes
    begin: bytes
    length: int  # of ``begin``


def key(place: int, name: str) -> Key:
    raw = name.encode()
    begin = b"\n" + _varint(len(raw)) + raw
    return Key(place, raw, begin, len(begin))


def counts(span: bytes, keys: Sequence[Key], places: int) -> list[int | None]:
    """For each place the count that a span's attributes tell; None for none."""
    found: list[int | None] = [None] * places
    for place, name, begin, length in keys:
        at = span.find(begin)
        if at < 0 or found[place] is not None:
            continue
        value = at + length
        try:
            # Tags and lengths below 128 take one byte.
            if span[at - 2] == _ATTRIBUTE and span[value] == _VALUE and span[value + 1] < 128:
                value += 2
                found[place] = as_count(span[value : value + span[value - 1]])
                continue
        except IndexError:
            pass
        attributes = wire.SpanAttributes.FromString(span).attributes
        found[place] = next(
            (as_count(raw) for known, raw in pairs(attributes) if known == name), None
        )
    return found


def pairs(attributes: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Name and value of each attribute, in bytes, as many as are looked at."""
    for raw in attributes[:_LOOKED_AT]:
        pair = wire.KeyValue.FromString(raw)
        yield pair.key, pair.value


@lru_cache(maxsize=4096)
def as_count(value: bytes) -> int | None:
    """An AnyValue as a count: a number that is not negative, also one written as text."""
    try:
        decoded = wire.AnyValue.FromString(value)
    except DecodeError:
        return None
    number: float = decoded.whole or decoded.real
    if not number and (text := decoded.text):
        number = int(text) if text.isdigit() and len(text) < 20 else -1
    # A NaN is in no bounds.
    return round(number) if 0 <= number <= _LARGEST else None


def as_text(value: bytes, most: int) -> str:
    """An AnyValue's text, printable and of at most ``most`` characters; "" for anything else."""
    try:
        return printable(wire.AnyValue.FromString(value).text, most)
    except DecodeError:
        return ""


@lru_cache(maxsize=4096)
def printable(raw: bytes, most: int) -> str:
    """UTF-8 as text that may be shown: no control characters, at most ``most`` characters."""
    text = raw[: 4 * most].decode("utf-8", "replace")[:most]
    return text if text.isprintable() else _CONTROL.sub("", text)


_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128, value >> 7])
