"""The protobuf fields of OTLP metrics as bytes.

Field numbers are those of opentelemetry-proto's ``metrics.proto``, ``common.proto`` and
``resource.proto``, which never change. The fields of a message may be in any order, so those that
stay the same from push to push come first and are cached.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from functools import lru_cache

from wattspan.model import Exemplar
from wattspan.util.protobuf import length_delimited, varint

Value = str | bool

START, TIME = b"\x11", b"\x19"  # of a data point: 2 and 3, fixed64
AS_DOUBLE, AS_INT = 0x21, 0x31  # of a data point: 4, double, and 6, sfixed64

_FIXED = struct.Struct("<Q")
_DOUBLE, _INT = struct.Struct("<Bd"), struct.Struct("<Bq")

CUMULATIVE = b"\x10\x02"  # of a sum: its aggregation temporality
MONOTONIC = b"\x18\x01"  # of a sum

STAMP = 18
"""Bytes of the time and the value of a data point, with their tags."""


@lru_cache(maxsize=1024)
def point_head(size: int) -> bytes:
    """The tag and length of a data point of ``size`` bytes."""
    return b"\x0a" + varint(size)


def fixed(tag: bytes, number: int) -> bytes:
    """A time with its tag."""
    return tag + _FIXED.pack(number)


def double(value: float) -> bytes:
    """The value of a data point."""
    return _DOUBLE.pack(AS_DOUBLE, value)


def integer(value: int) -> bytes:
    """The value of a data point; a double if it exceeds 64 bits."""
    try:
        return _INT.pack(AS_INT, value)
    except struct.error:
        return double(float(value))


def attribute(number: int, key: str, value: Value) -> bytes:
    """An attribute as the field ``number`` of its message."""
    if isinstance(value, bool):
        content = b"\x10\x01" if value else b"\x10\x00"
    else:
        # Values from the environment and host names may be no valid Unicode.
        content = length_delimited(1, value.encode(errors="replace"))
    return length_delimited(
        number, length_delimited(1, key.encode()) + length_delimited(2, content)
    )


def exemplar(shown: Exemplar, one: int) -> bytes:
    """An exemplar with ``one`` microjoules in the unit of the metric; b"" for invalid ids."""
    try:
        trace, span = bytes.fromhex(shown.trace), bytes.fromhex(shown.span)
    except ValueError:
        return b""
    if len(trace) != 16 or len(span) != 8:
        return b""
    value = b"\x19" + struct.pack("<d", shown.energy / one)
    return length_delimited(
        5, fixed(START, shown.wall) + value + length_delimited(4, span) + length_delimited(5, trace)
    )


def resource(pairs: Mapping[str, Value]) -> bytes:
    return b"".join([attribute(1, *pair) for pair in pairs.items()])


def scope(name: str, version: str) -> bytes:
    return length_delimited(1, name.encode()) + length_delimited(2, version.encode())


def request(resource_: bytes, scope_: bytes, metrics: Iterable[bytes]) -> bytes:
    """An ExportMetricsServiceRequest of one resource and one scope."""
    scoped = length_delimited(1, scope_) + b"".join(
        [length_delimited(2, metric) for metric in metrics]
    )
    return length_delimited(1, length_delimited(1, resource_) + length_delimited(2, scoped))
