"""A report as bytes, in each of its formats, and where they go."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from wattspan.ports import WattspanError
from wattspan.util.tabular import NO_PYARROW, escape_formula, has_pyarrow

FORMATS = ("table", "json", "jsonl", "csv", "parquet")

Rows = Iterable[tuple[object, ...]]
"""A heading, and rows of cells; "" is a cell of nothing."""

_TEXTS = frozenset(
    [
        *("kind", "role", "name", "group", "hw_type", "provenance"),
        *("service", "span", "hw_id", "hw_name"),
    ]
)
_WHOLES = frozenset(("calls", "tokens_input", "tokens_output", "in_cover"))


def csv_bytes(rows: Rows) -> bytes:
    """RFC 4180; no cell is a formula (see tabular.guarded)."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for number, row in enumerate(rows):
        writer.writerow(_guarded(row) if number else row)
    return _utf8(text.getvalue())


def _guarded(row: tuple[object, ...]) -> Iterator[object]:
    # A figure may begin with a minus sign.
    for cell in row:
        yield escape_formula(cell) if isinstance(cell, str) and not _is_figure(cell) else cell


def _is_figure(text: str) -> bool:
    return text.removeprefix("-").replace(".", "", 1).isdecimal() and text.isascii()


def jsonl_bytes(rows: Rows) -> bytes:
    """A JSON object for each row, with every column in it: null is a cell of nothing."""
    lines = (
        "{" + ",".join(f"{_json(name)}:{cell}" for name, cell in row.items()) + "}\n"
        for row in _objects(rows, _json_cell)
    )
    return _utf8("".join(lines))


def _json_cell(name: str, cell: object) -> str:
    if cell == "" or cell is None:
        return "null"
    return _json(str(cell)) if name in _TEXTS else str(cell)


def parquet_bytes(rows: Rows, metadata: Mapping[str, str]) -> bytes:
    """The same rows; energies are whole microjoules. WattspanError without pyarrow."""
    if not has_pyarrow():
        raise WattspanError(NO_PYARROW)
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    rows = iter(rows)
    heading = [str(name) for name in next(rows)]
    types = {"text": pa.string(), "whole": pa.int64(), "number": pa.float64()}
    schema = pa.schema([(name, types[_kind(name)]) for name in heading], metadata)
    table = list(_objects([tuple(heading), *rows], _cell))
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(table, schema=schema), out, compression="zstd")
    return out.getvalue()


def _kind(name: str) -> str:
    if name in _TEXTS:
        return "text"
    return "whole" if name in _WHOLES or name.endswith("_uj") else "number"


def _cell(name: str, cell: object) -> object:
    if cell == "" or cell is None:
        return None
    kind = _kind(name)
    return str(cell) if kind == "text" else cell if kind == "whole" else float(str(cell))


def _objects(rows: Rows, cell: Any) -> Iterator[dict[str, Any]]:
    rows = iter(rows)
    heading = [str(name) for name in next(rows)]
    for row in rows:
        named = zip(heading, row, strict=True)
        yield {name: cell(name, value) for name, value in named}


def _json(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _utf8(text: str) -> bytes:
    return text.encode(errors="replace")


def deliver(report: bytes, output: Path | None) -> None:
    """To the standard output, or to a file that is replaced once all of it is on the disk."""
    if output is None:
        click.echo(report, nl=False)
        return
    try:
        _write(report, output)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise WattspanError(
            f"Cannot write {output}: {why}. Choose another place with --output."
        ) from None


def _write(report: bytes, output: Path) -> None:
    target = output.resolve()
    if target.exists() and not target.is_file():  # a pipe, a terminal
        target.write_bytes(report)
        return
    draft = target.with_name(f".{target.name[:200]}.{os.getpid()}.draft")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(report)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def chosen(form: str | None, output: Path | None, *, as_json: bool, as_csv: bool) -> str:
    """The format asked for; by the file's name if by nothing else. UsageError if by too much."""
    asked = {"--json": as_json, "--csv": as_csv, f"--format {form}": form is not None}
    named = [option for option, given in asked.items() if given]
    if len(named) > 1:
        raise click.UsageError(f"{' and '.join(named)}: choose one.")
    short = "json" if as_json else "csv" if as_csv else ""
    found = short or form or _by_name(output)
    if found == "parquet" and output is None:
        raise click.UsageError("--format parquet is no text: say where it goes with --output FILE.")
    return found


def _by_name(output: Path | None) -> str:
    """The format that a file's name ends in; UsageError for an ending that names none."""
    ending = output.suffix.removeprefix(".").lower() if output is not None else ""
    if ending in ("", "txt"):
        return "table"
    if ending not in FORMATS:
        raise click.UsageError(
            f"--output {output}: .{ending} is no format; say which it is with --format "
            f"({', '.join(FORMATS)}), or choose a name that ends in one, or in .txt for a table."
        )
    return ending
