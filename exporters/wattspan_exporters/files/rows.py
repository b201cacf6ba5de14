"""The columns of every file, and the rows of a snapshot as JSON Lines, CSV or Parquet.

A file has one row for each series of each snapshot.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from itertools import islice
from typing import Any, BinaryIO, NamedTuple

import msgspec

from wattspan.model import Snapshot
from wattspan.util.text import escape_formula
from wattspan_exporters.catalogue.definition import (
    Labels,
    Metric,
    counters,
    sanitize,
)
from wattspan_exporters.catalogue.series import SeriesCache
from wattspan_exporters.prometheus.renderer import format_number

FORMAT_VERSION = 1
"""Increased when a column changes its meaning; new columns are added at the end without."""


class ColumnType(StrEnum):
    """The type of a column in Parquet."""

    TIME = "timestamp[us, UTC]"
    INTEGER = "int64"
    NUMBER = "double"
    TEXT = "string"


class Column(NamedTuple):
    """A column; docs/reference/files.md has its meaning."""

    name: str
    kind: ColumnType = ColumnType.TEXT


_SERIES = (
    Column("timestamp", ColumnType.TIME),
    Column("monotonic_ns", ColumnType.INTEGER),
    *map(Column, ("host", "metric", "instrument", "unit")),
    Column("value", ColumnType.NUMBER),
    Column("whole", ColumnType.INTEGER),
)

_ATTRIBUTES = (
    *map(Column, ("provenance", "hw_id", "hw_type", "hw_name", "hw_parent")),
    Column("pid", ColumnType.INTEGER),
    *map(Column, ("command", "group_kind", "group", "service_name", "span_name", "direction")),
    *map(Column, ("job", "knob", "limit", "reason")),
)
"""The attributes with a column of their own."""

OTHER_ATTRIBUTES = "attributes"
"""The column of all other attributes, a JSON object as text."""

COLUMNS = (*_SERIES, *_ATTRIBUTES, Column(OTHER_ATTRIBUTES))

# --------------------------------------------------------------------------------------- rows

_LARGEST = 2**63

_NUMERIC = frozenset(
    column.name for column in COLUMNS if column.kind in (ColumnType.INTEGER, ColumnType.NUMBER)
)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _csv(text: str) -> str:
    cell = escape_formula(text)
    return f'"{cell.replace(chr(34), chr(34) * 2)}"' if set(cell) & set(',"\r\n') else cell


class RowFormat(NamedTuple):
    """A text format of rows; ``key`` is the text before a cell, ``text`` encodes a text cell."""

    header: bytes
    opening: str
    closing: str
    null: str
    key: Callable[[str], str]
    text: Callable[[str], str]


JSON_LINES = RowFormat(b"", "{", "}\n", "null", '"{}":'.format, _json)
"""One JSON object a line, with every column."""

CSV = RowFormat(
    (",".join(column.name for column in COLUMNS) + "\n").encode(),
    *("", "\n", ""),
    lambda _: "",
    _csv,
)
"""RFC 4180 with a header; null is an empty cell, and no cell is a formula."""


class EncodedRows(NamedTuple):
    """The lines of one snapshot."""

    data: bytes
    lines: int


class RowEncoder:
    """Encodes the series of snapshots; caches the text around the value of each series.

    A histogram is written as three counters, as Prometheus does. For one thread.
    """

    def __init__(self, metrics: Sequence[Metric], form: RowFormat) -> None:
        self._form = form
        self._series = [
            (one, SeriesCache(partial(self._around, one)))
            for metric in metrics
            for one in counters(metric)
        ]

    @property
    def kept(self) -> int:
        return sum(len(cache) for _, cache in self._series)

    def encode(self, snapshot: Snapshot) -> EncodedRows:
        """The rows of a snapshot, with the values that a scrape shows."""
        at = snapshot.at
        cells = self._cells(
            timestamp=format_time(at.wall),
            monotonic_ns=str(at.mono),
            host=sanitize(snapshot.host),
        )
        lines: list[str] = []
        stamp, between = f"{self._form.opening}{cells},", f",{self._form.key('whole')}"
        for metric, cache in self._series:
            for (before, after), value in cache.drawn(metric.draw(snapshot)):
                shown, whole = self._figures(value, metric.decimals)
                lines.append(f"{stamp}{before}{shown}{between}{whole}{after}")
            cache.shrink()
        return EncodedRows("".join(lines).encode(), len(lines))

    def _figures(self, value: int | float, decimals: int) -> tuple[str, str]:
        null = self._form.null
        if isinstance(value, int):  # bool is one
            whole = int(value)
            exact = str(whole) if -_LARGEST <= whole < _LARGEST else null
            return format_number(whole, decimals), exact
        # JSON has no NaN and no infinity
        return (format_number(value, decimals) if math.isfinite(value) else null), null

    def _around(self, metric: Metric, labels: Labels) -> tuple[str, str]:
        """The text from ``metric`` up to the value, and the text after ``whole``."""
        series = self._cells(metric=metric.name, instrument=metric.instrument, unit=metric.unit)
        after = self._cells(**attributes(metric, labels))
        return f"{series},{self._form.key('value')}", f",{after}{self._form.closing}"

    def _cells(self, **cells: str) -> str:
        """Consecutive cells; "" is null."""
        form = self._form
        return ",".join(
            [
                form.key(name)
                + (form.null if not text else text if name in _NUMERIC else form.text(text))
                for name, text in cells.items()
            ]
        )


def attributes(metric: Metric, labels: Labels) -> Mapping[str, str]:
    """The columns of attributes and ``attributes``, "" for null."""
    given = {name: sanitize(text) for name, text in zip(metric.labels, labels, strict=True) if text}
    cells = {name: given.pop(name, "") for name, _ in _ATTRIBUTES}
    cells["pid"] = _number(cells["pid"])
    return {**cells, OTHER_ATTRIBUTES: _json(given) if given else ""}


def _number(text: str) -> str:
    return str(int(text)) if text.isascii() and text.isdecimal() and len(text) < 19 else ""


def format_time(wall: int) -> str:
    """Unix nanoseconds as RFC 3339 in UTC, to the microsecond, rounded down."""
    seconds, nanoseconds = divmod(wall, 10**9)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{nanoseconds // 1000:06d}Z"


# ------------------------------------------------------------------------------------- Parquet

ROW_GROUP_SIZE = 20_000
"""Rows converted at a time; bounds the memory."""


def convert(part: BinaryIO, out: BinaryIO) -> int:
    """Write the rows of ``part``, JSON Lines, to ``out`` as Parquet; returns their number.

    Only here pyarrow is imported, in a process of its own: its memory is freed with its end.
    """
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    types = {
        ColumnType.TIME: (datetime, pa.timestamp("us", tz="UTC")),
        ColumnType.INTEGER: (int, pa.int64()),
        ColumnType.NUMBER: (float, pa.float64()),
        ColumnType.TEXT: (str, pa.string()),
    }
    fields = [(c.name, types[c.kind][0] | None, None) for c in COLUMNS]
    row_type = msgspec.defstruct("Row", fields, gc=False)
    rows: Iterator[Any] = map(msgspec.json.Decoder(row_type).decode, part)
    group = list(islice(rows, ROW_GROUP_SIZE))
    schema = pa.schema([(c.name, types[c.kind][1]) for c in COLUMNS], metadata(group))
    written = 0
    with pq.ParquetWriter(out, schema, compression="zstd") as writer:
        while group:
            table = [[getattr(row, column.name) for row in group] for column in COLUMNS]
            writer.write_table(pa.table(table, schema=schema))
            written += len(group)
            group = list(islice(rows, ROW_GROUP_SIZE))
    return written


def metadata(rows: Sequence[Any]) -> dict[str, str]:
    """The metadata of the file."""
    host = (rows[0].host or "") if rows else ""
    # The chosen metrics may be without provenance.
    emulated = host.startswith("emulated-") or any(row.provenance == "emulated" for row in rows)
    return {
        "wattspan.schema": str(FORMAT_VERSION),
        "wattspan.host": host,
        "wattspan.emulated": "true" if emulated else "false",
    }


def main() -> None:
    """``python -m wattspan_exporters.files.rows FD <PART`` writes the Parquet file ``FD``."""
    os.nice(10)  # not urgent
    with (
        os.fdopen(os.dup(0), "rb") as part,
        os.fdopen(int(sys.argv[1]), "wb") as out,
    ):
        convert(part, out)


if __name__ == "__main__":
    main()
