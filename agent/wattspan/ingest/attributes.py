"""Single attributes, found in the bytes of a span or a resource without decoding the others.

Eight attributes of a span take three times as long to decode as all else of it, and of most of
them nothing is wanted. An encoder writes an attribute as its field's tag and length, then the key
with its tag and length, then the value. So the key's bytes with their length are searched for, and
only spans that have them are looked into. They are believed where they begin an attribute of the
span itself: a text among its attributes, such as what somebody has asked a model, may have the same
bytes in it. Whatever is written otherwise, which protobuf allows, is decoded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

from google.protobuf.message import DecodeError

from wattspan.ingest import wire
from wattspan.util.encoding import length_delimited

_MAX_ATTRIBUTES = 1024
"""Attributes of one span or resource that are decoded in search of one."""

_CACHE_ENTRIES, _CACHEABLE_SIZE = 4096, 128  # attributes whose numbers are known, and their bytes
_LARGEST = (1 << 63) - 1
_DECIMAL = re.compile(rb"-?[0-9]{1,18}(?:\.[0-9]{1,18})?")

Number = TypeVar("Number", bound=float)


class AttributeKey(NamedTuple):
    """An attribute that is looked for: its name, and how it begins on the wire.

    Those of one ``place`` are names of one thing; the first that is there counts.
    """

    place: int
    name: bytes
    begin: bytes


def attribute_key(place: int, name: str) -> AttributeKey:
    raw = name.encode()
    return AttributeKey(place, raw, length_delimited(1, raw))


class AttributeFinder(Generic[Number]):
    """Finds numbers among spans' attributes. What one said is remembered: it is said again.

    ``read`` makes an AnyValue a number, or None.
    """

    def __init__(self, read: Callable[[bytes], Number | None]) -> None:
        self._read = read
        self._known: dict[bytes, Number | None] = {}

    def numbers(
        self,
        spans: Sequence[bytes],
        keys: Sequence[AttributeKey],
        places: int,
        budget: wire.FieldBudget,
    ) -> list[list[Number | None]]:
        """For each place the numbers that spans' attributes tell, span by span; None for none."""
        columns: list[list[Number | None]] = [[None] * len(spans) for _ in range(places)]
        known = self._known
        for i, span in enumerate(spans):
            own: Sequence[bytes] | None = None  # of one span at a time: a request may hold many
            values: dict[bytes, bytes] = {}
            for place, name, begin in keys:
                at, column = span.find(begin), columns[place]
                if at < 1 or column[i] is not None:
                    continue
                if own is None:
                    own = attributes_of(span, wire.SpanAttributes)
                    budget.spend(len(own))
                attribute = span[at : at + span[at - 1]]
                if attribute not in own:
                    attribute = b""
                try:
                    column[i] = known[attribute]
                except KeyError:
                    first = _single_attribute(attribute)
                    if first is None or first[0] != name:
                        column[i] = self._search(own, name, values, budget)
                    else:
                        column[i] = self._remember(attribute, first[1])
        return columns

    def _search(
        self,
        attributes: Sequence[bytes],
        name: bytes,
        values: dict[bytes, bytes],
        budget: wire.FieldBudget,
    ) -> Number | None:
        """The number of the attribute ``name``, the first one of several.

        ``values`` are those of the span, decoded once for all names.
        """
        if not values:
            budget.spend(len(attributes))
            values.update(reversed([*pairs(attributes)]))
        value = values.get(name)
        return None if value is None else self._read(value)

    def _remember(self, attribute: bytes, value: bytes) -> Number | None:
        number = self._read(value)
        if len(self._known) >= _CACHE_ENTRIES:
            self._known.clear()
        self._known[attribute] = number
        return number


def _single_attribute(attribute: bytes) -> tuple[bytes, bytes] | None:
    """Name and value, if that is what these bytes are, and it is short."""
    if not 0 < len(attribute) <= _CACHEABLE_SIZE:
        return None
    try:
        return next(pairs([attribute]))
    except DecodeError:
        return None


def attributes_of(raw: bytes, kind: Any) -> Sequence[bytes]:
    """The attributes of a span or a resource, as many as are looked at."""
    attributes: Sequence[bytes] = kind.FromString(raw).attributes
    return attributes if len(attributes) <= _MAX_ATTRIBUTES else attributes[:_MAX_ATTRIBUTES]


def pairs(attributes: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Name and value of each attribute, in bytes."""
    for raw in attributes:
        pair = wire.KeyValue.FromString(raw)
        yield pair.key, pair.value


def as_count(value: bytes) -> int | None:
    """An AnyValue as a count: a number that is not negative, also one written as text."""
    try:
        decoded = wire.AnyValue.FromString(value)
    except DecodeError:
        return None
    if decoded.HasField("text"):
        text = decoded.text
        number: float = int(text) if text.isdigit() and len(text) < 20 else -1
    elif decoded.HasField("real"):
        number = decoded.real
    else:
        number = decoded.whole if decoded.HasField("whole") else -1
    return round(number) if 0 <= number <= _LARGEST else None  # a NaN is in no bounds


def as_decimal(value: bytes) -> float | None:
    """An AnyValue as a number of any sign, to nine decimals; None for what is none.

    A whole number stays one, exactly; so does a fraction of a sample, which no count could hold.
    """
    try:
        decoded = wire.AnyValue.FromString(value)
    except DecodeError:
        return None
    if decoded.HasField("whole"):
        whole: int = decoded.whole
        return whole
    if decoded.HasField("real"):
        number: float = decoded.real
    elif decoded.HasField("text") and _DECIMAL.fullmatch(decoded.text):
        number = float(decoded.text) if b"." in decoded.text else int(decoded.text)
    else:
        return None
    return round(number, 9) if -_LARGEST <= number <= _LARGEST else None  # nor is a NaN


def as_text(value: bytes, most: int) -> str:
    """An AnyValue's text, printable and of at most ``most`` characters; "" for anything else."""
    try:
        return printable(wire.AnyValue.FromString(value).text, most)
    except DecodeError:
        return ""


def printable(raw: bytes, most: int) -> str:
    """UTF-8 as text that may be shown: no control characters, at most ``most`` characters."""
    return _printable(raw[: 4 * most], most)  # shortened first: what is remembered is bounded


@lru_cache(maxsize=2048)
def _printable(raw: bytes, most: int) -> str:
    text = raw.decode("utf-8", "replace")[:most]
    return text if text.isprintable() else _CONTROL.sub("", text)


_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")
