"""The attributes of spans: found by the bytes of their names, and read no deeper than needed.

Decoding the eight attributes of a typical span takes three times as long as all else of it, and
nearly none of them is needed. An encoder writes an attribute as tag and length of its field, then
the key with tag and length, then the value. The decoder therefore searches a span for the bytes
of a key with its length, and decodes only the attributes of spans that contain them. A match
counts only where it begins an attribute of the span itself, because a text value, such as a
prompt to a model, may contain the same bytes. Other encodings, which protobuf permits, are
decoded completely.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

from google.protobuf.message import DecodeError

from wattspan.ingest.export_request import MAX_NAME, ResourceClaim
from wattspan.ingest.request_limits import FieldBudget
from wattspan.spans.values import ReportedInstruction
from wattspan.util.protobuf import length_delimited, message_class

Scalar = bytes | int | float | None
"""The value of an attribute; None for booleans, arrays and other values that are not needed."""

MAX_ATTRIBUTES = 1 << 14
"""Attributes of one span that are searched.

Instrumentations write several for each message of a conversation, and the counts of tokens behind
them: Phoenix sets the limit to 10,000.
"""

MAX_RESOURCE_ATTRIBUTES = 1 << 10
"""Attributes of one resource that are searched; no budget of fields bounds their search."""

_MAX_ID = 128  # characters of a container id or of a time
_LARGEST_PID = 1 << 22
_LARGEST = (1 << 63) - 1
_DECIMAL = re.compile(rb"-?[0-9]{1,18}(?:\.[0-9]{1,18})?")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")
_SpanAttributes = message_class("SpanAttributes")
_KeyValue, _AnyValue = message_class("KeyValue"), message_class("AnyValue")
_INSTRUCTION_KINDS = {
    **dict.fromkeys(("forward", "fwd", "f"), "forward"),
    **dict.fromkeys(("backward", "bwd", "b"), "backward"),
}


def scalar(value: bytes) -> Scalar:
    """An AnyValue message as a scalar; None if it is malformed."""
    try:
        decoded = _AnyValue.FromString(value)
    except DecodeError:
        return None
    for field in ("text", "real", "whole"):
        if decoded.HasField(field):
            found: Scalar = getattr(decoded, field)
            return found
    return None


def as_count(value: Scalar) -> int | None:
    """A value as a non-negative number; text counts if it is digits."""
    if isinstance(value, bytes):
        value = int(value) if value.isdigit() and len(value) < 20 else None
    if value is None:
        return None
    return round(value) if 0 <= value <= _LARGEST else None  # None for NaN


def as_decimal(value: Scalar) -> float | None:
    """A value as a number of any sign, to nine decimals; integers stay exact integers."""
    if isinstance(value, bytes):
        if not _DECIMAL.fullmatch(value):
            return None
        value = float(value) if b"." in value else int(value)
    if value is None or isinstance(value, int):
        return value
    return round(value, 9) if -_LARGEST <= value <= _LARGEST else None  # None for NaN


def reported_instruction(values: Sequence[Scalar]) -> ReportedInstruction | None:
    """The instruction in stage, micro-batch, kind and, if asked for, the replica.

    None if one is missing or invalid.
    """
    stage, microbatch, kind, *replicas = values
    if not isinstance(kind, bytes):
        return None
    found = _INSTRUCTION_KINDS.get(printable(kind, MAX_NAME).lower())
    numbers = as_count(stage), as_count(microbatch)
    if found is None or numbers[0] is None or numbers[1] is None:
        return None
    replica = _replica_name(replicas[0]) if replicas else ""
    return None if replica is None else ReportedInstruction(numbers[0], numbers[1], found, replica)


def _replica_name(value: Scalar) -> str | None:
    """The name in a text or an integer; None for other values and for an empty name."""
    if isinstance(value, bytes):
        return printable(value, MAX_NAME) or None
    return str(value) if isinstance(value, int) else None


def printable(raw: bytes, limit: int) -> str:
    """UTF-8 as text without control characters, of at most ``limit`` characters."""
    return _printable(raw[: 4 * limit], limit)  # truncated first: the cache is bounded in bytes


@lru_cache(maxsize=2048)
def _printable(raw: bytes, limit: int) -> str:
    text = raw.decode("utf-8", "replace")[:limit]
    return text if text.isprintable() else _CONTROL.sub("", text)


def resource_claim(attributes: Mapping[bytes, Scalar]) -> ResourceClaim:
    """The claims about a process in the attributes of its resource."""
    pid = as_count(attributes.get(b"process.pid"))

    def text(name: bytes, limit: int) -> str:
        value = attributes.get(name)
        return printable(value, limit) if isinstance(value, bytes) else ""

    return ResourceClaim(
        service=text(b"service.name", MAX_NAME),
        pid=pid if pid is not None and 0 < pid <= _LARGEST_PID else None,
        created=text(b"process.creation.time", _MAX_ID),
        container=text(b"container.id", _MAX_ID),
        model=text(b"gen_ai.request.model", MAX_NAME),
        host=text(b"host.id", _MAX_ID),
    )


# ---------------------------------------------------------------------------------- search

Number = TypeVar("Number")
_MANY_KEYS = 32  # real requests have names of one or two conventions
_CACHE_ENTRIES, _CACHEABLE_SIZE = 4096, 128  # attributes with known numbers, and their bytes


class AttributeKey(NamedTuple):
    """A searched attribute: its name, and the bytes with which it begins on the wire.

    The attributes of one ``column`` are alternatives, of which the first present one counts.
    """

    column: int
    name: bytes
    prefix: bytes

    @classmethod
    def of(cls, column: int, name: str) -> AttributeKey:
        raw = name.encode()
        return cls(column, raw, length_delimited(1, raw))


def pairs(attributes: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Name and value of each attribute."""
    for raw in attributes:
        pair = _KeyValue.FromString(raw)
        yield pair.key, pair.value


def attributes_of(raw: bytes, kind: Any, limit: int = MAX_ATTRIBUTES) -> Sequence[bytes]:
    """The searched attributes of a span or a resource."""
    attributes: Sequence[bytes] = kind.FromString(raw).attributes
    return attributes if len(attributes) <= limit else attributes[:limit]


class AttributeFinder(Generic[Number]):
    """Finds numbers among the attributes of spans; remembers those of recent attributes.

    ``read`` has the number of a column and a value. A name belongs to one column of a finder.
    """

    def __init__(self, read: Callable[[int, Scalar], Number | None]) -> None:
        self._read = read
        self._numbers: dict[bytes, Number | None] = {}  # by attribute

    def columns(
        self,
        spans: Sequence[bytes],
        keys: Sequence[AttributeKey],
        count: int,
        budget: FieldBudget,
    ) -> list[list[Number | None]]:
        """``count`` columns with the number of each span, None where it has none."""
        columns: list[list[Number | None]] = [[None] * len(spans) for _ in range(count)]
        numbers = self._numbers
        if not keys:
            return columns
        if len(keys) > _MANY_KEYS:
            self._read_all(spans, keys, columns, budget)
            return columns
        for i, span in enumerate(spans):
            attributes: Sequence[bytes] | None = None  # decoded at most once a span
            values: dict[bytes, bytes] = {}
            for column_number, name, prefix in keys:
                at, column = span.find(prefix), columns[column_number]
                if at < 1 or column[i] is not None:
                    continue
                if attributes is None:
                    attributes = attributes_of(span, _SpanAttributes)
                    budget.spend(len(attributes))
                attribute = span[at : at + span[at - 1]]
                if attribute not in attributes:
                    attribute = b""
                try:
                    column[i] = numbers[attribute]
                except KeyError:
                    pair = _short_pair(attribute)
                    if pair is None or pair[0] != name:
                        column[i] = self._search(attributes, name, values, budget, column_number)
                    else:
                        column[i] = self._remember(attribute, pair[1], column_number)
        return columns

    def _read_all(
        self,
        spans: Sequence[bytes],
        keys: Sequence[AttributeKey],
        columns: Sequence[list[Number | None]],
        budget: FieldBudget,
    ) -> None:
        """Read every attribute: so many searches of each span would take longer."""
        order = {key.name: at for at, key in enumerate(keys)}
        for i, span in enumerate(spans):
            attributes = attributes_of(span, _SpanAttributes)
            budget.spend(len(attributes))
            values = dict(reversed([*pairs(attributes)]))
            for at in sorted(order[name] for name in values.keys() & order.keys()):
                column = keys[at].column
                if columns[column][i] is None:
                    columns[column][i] = self._read(column, scalar(values[keys[at].name]))

    def _search(
        self,
        attributes: Sequence[bytes],
        name: bytes,
        values: dict[bytes, bytes],
        budget: FieldBudget,
        column: int,
    ) -> Number | None:
        """The number of the first attribute ``name``; ``values`` are filled once a span."""
        if not values:
            budget.spend(len(attributes))
            values.update(reversed([*pairs(attributes)]))
        value = values.get(name)
        return None if value is None else self._read(column, scalar(value))

    def _remember(self, attribute: bytes, value: bytes, column: int) -> Number | None:
        number = self._read(column, scalar(value))
        if len(self._numbers) >= _CACHE_ENTRIES:
            self._numbers.clear()
        self._numbers[attribute] = number
        return number


def _short_pair(attribute: bytes) -> tuple[bytes, bytes] | None:
    """Name and value of an attribute; None if it is malformed or long."""
    if not 0 < len(attribute) <= _CACHEABLE_SIZE:
        return None
    try:
        return next(pairs([attribute]))
    except DecodeError:
        return None
