"""The columns of every file, in every format: one row for each series of each snapshot."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

FORMAT_VERSION = 1
"""Raised when a column changes its meaning; new ones are added at the end without."""


class ColumnType(StrEnum):
    """What a column holds: its type in Parquet."""

    TIME = "timestamp[us, UTC]"
    INTEGER = "int64"
    NUMBER = "double"
    TEXT = "string"


class Column(NamedTuple):
    name: str
    kind: ColumnType
    meaning: str  # in Markdown


_STAMP = (
    Column(
        "timestamp", ColumnType.TIME,
        "when the figures were true, UTC to the microsecond, as `2026-01-31T08:00:00.123456Z`",
    ),
    Column(
        "monotonic_ns", ColumnType.INTEGER,
        "the same moment on the host's monotonic clock, nanoseconds since its boot: for durations, "
        "since nobody can set it",
    ),
    Column("host", ColumnType.TEXT, "the host's name; an emulated host's begins with `emulated-`"),
)  # fmt: skip

_SERIES = (
    Column("metric", ColumnType.TEXT, "the metric's OpenTelemetry name"),
    Column("instrument", ColumnType.TEXT, "`Counter`, `UpDownCounter`, `Gauge` or `Info`"),
    Column("unit", ColumnType.TEXT, "`J`, `W`, `s`, `1`, ...; null where there is none"),
)

_VALUE = (
    Column(
        "value", ColumnType.NUMBER,
        "the figure in `unit`: exact as text, the nearest double as such",
    ),
    Column(
        "whole", ColumnType.INTEGER,
        "the same figure as a whole number, exact everywhere: microjoules for `J`, milliwatts for "
        "`W`, nanoseconds for `s`, billionths of money, of grams and of rates, else in `unit`; "
        "null if it is a fraction",
    ),
)  # fmt: skip

_ATTRIBUTES = (
    Column("provenance", ColumnType.TEXT, "how the figure was obtained"),
    Column("hw_id", ColumnType.TEXT, ""),
    Column("hw_type", ColumnType.TEXT, ""),
    Column("hw_name", ColumnType.TEXT, ""),
    Column("hw_parent", ColumnType.TEXT, "null for the cover, which alone may be summed"),
    Column("pid", ColumnType.INTEGER, ""),
    Column("command", ColumnType.TEXT, ""),
    Column("group_kind", ColumnType.TEXT, ""),
    Column("group", ColumnType.TEXT, ""),
    Column("service_name", ColumnType.TEXT, ""),
    Column("span_name", ColumnType.TEXT, ""),
    Column("direction", ColumnType.TEXT, ""),
    Column("job", ColumnType.TEXT, "the tuned job's name"),
    Column("knob", ColumnType.TEXT, ""),
    Column("limit", ColumnType.TEXT, ""),
    Column("reason", ColumnType.TEXT, ""),
)

OTHER_ATTRIBUTES = Column(
    "attributes", ColumnType.TEXT, "all other attributes, a JSON object as text"
)

ATTRIBUTES = tuple(column.name for column in _ATTRIBUTES)
"""The attributes that have a column of their own."""

COLUMNS = (*_STAMP, *_SERIES, *_VALUE, *_ATTRIBUTES, OTHER_ATTRIBUTES)
