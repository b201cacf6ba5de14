"""JSON Lines to Parquet: ``python -m wattspan_exporters.files.convert FD <PART``.

The only module that imports pyarrow; a program, so that its memory is freed with its end.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import islice
from typing import Any, BinaryIO

import msgspec

from wattspan_exporters.files.rows import COLUMNS, FORMAT_VERSION, ColumnType

ROW_GROUP_SIZE = 20_000
"""Rows converted at a time; bounds the memory."""

_PYTHON = {
    ColumnType.TIME: datetime,
    ColumnType.INTEGER: int,
    ColumnType.NUMBER: float,
    ColumnType.TEXT: str,
}

Row = msgspec.defstruct("Row", [(c.name, _PYTHON[c.kind] | None, None) for c in COLUMNS], gc=False)


def convert(part: BinaryIO, out: BinaryIO) -> int:
    """Write the rows of ``part`` to ``out`` as Parquet; returns their number."""
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    types = {
        ColumnType.TIME: pa.timestamp("us", tz="UTC"),
        ColumnType.INTEGER: pa.int64(),
        ColumnType.NUMBER: pa.float64(),
        ColumnType.TEXT: pa.string(),
    }
    rows: Iterator[Any] = map(msgspec.json.Decoder(Row).decode, part)
    group = list(islice(rows, ROW_GROUP_SIZE))
    schema = pa.schema([(c.name, types[c.kind]) for c in COLUMNS], metadata(group))
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
    os.nice(10)  # not urgent
    with (
        os.fdopen(os.dup(0), "rb") as part,
        os.fdopen(int(sys.argv[1]), "wb") as out,
    ):
        convert(part, out)


if __name__ == "__main__":
    main()
