"""A report for programs: facts and rows, in whole microjoules beside joules.

A report as bytes, in each of its formats, and where they go.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import click

from wattspan.cli.report import cost
from wattspan.model import Provenance
from wattspan.ports import WattspanError
from wattspan.storage.breakdown import Breakdown, BreakdownLine
from wattspan.storage.deltas import SPAN, SpanUsage
from wattspan.storage.query import DomainTotal, HistoryExtract
from wattspan.storage.rates import Weighting
from wattspan.util.tabular import NO_PYARROW, escape_formula, has_pyarrow


def report_facts(
    path: Path, by: str, extract: HistoryExtract, breakdown: Breakdown
) -> dict[str, Any]:
    """The whole report. For each kind its lines and those without a kind sum to the total."""
    provenance = breakdown.provenance
    weighed = partial(cost.footprint_facts, asked=extract.reckonings)
    return {
        "store": str(path),
        "emulated": Provenance.EMULATED in provenance.values(),
        "from": _iso(extract.start),
        "to": _iso(extract.end),
        "from_unix_seconds": extract.start,
        "to_unix_seconds": extract.end,
        "bucket_seconds": list(extract.steps),
        "by": by,
        "provenance": dict(provenance),
        "total": _line(breakdown.total, breakdown) | weighed(breakdown.total.whole),
        "lines": [_line(line, breakdown) | weighed(line.whole) for line in _lines(breakdown)],
        "domains": [_domain(domain) | weighed(domain.energy) for domain in extract.domains],
    }


def report_rows(
    by: str, extract: HistoryExtract, breakdown: Breakdown
) -> Iterator[tuple[object, ...]]:
    """The report as a table with a heading."""
    if by == "domain":
        return domain_rows(extract)
    asked = extract.reckonings
    return span_rows(breakdown, asked) if by == SPAN else line_rows(breakdown, asked)


def span_rows(
    breakdown: Breakdown, asked: Sequence[Weighting] = ()
) -> Iterator[tuple[object, ...]]:
    """A row for each line; what is no span has no calls, seconds and tokens."""
    types = list(breakdown.provenance)
    yield (
        *("role", "service", "span", "calls", "seconds", "tokens_input", "tokens_output"),
        *("provenance", "energy_uj", *(f"{hw_type}_uj" for hw_type in types)),
        *cost.footprint_headings(asked),
    )
    worst = max(breakdown.provenance.values(), key=lambda one: one.doubt, default="")
    for line in (*_lines(breakdown), breakdown.total):
        use = line.use
        did = (
            (use.calls, use.nanoseconds / 1e9, use.tokens_in, use.tokens_out) if use else ("",) * 4
        )
        by_type = (line.energy.get(hw_type, 0) for hw_type in types)
        weighed = cost.footprint_values(line.whole, asked)
        yield line.role, line.group, line.name, *did, worst, line.whole, *by_type, *weighed


def line_rows(
    breakdown: Breakdown, asked: Sequence[Weighting] = ()
) -> Iterator[tuple[object, ...]]:
    """A row for each line and hardware type; for each kind and type they sum to the total's."""
    yield (
        *("kind", "role", "name", "group", "hw_type", "provenance", "energy_uj", "energy_j"),
        *cost.footprint_headings(asked),
    )
    for line in (*_lines(breakdown), breakdown.total):
        for hw_type, energy in line.energy.items():
            label = breakdown.provenance[hw_type]
            yield (
                *(line.kind, line.role, line.name, line.group, hw_type, label),
                *(energy, f"{energy / 1e6:.6f}"),
                *cost.footprint_values(energy, asked),
            )


def domain_rows(extract: HistoryExtract) -> Iterator[tuple[object, ...]]:
    """A row for each domain; what is not attributed has empty parts, not zeros."""
    yield (
        *("hw_id", "hw_type", "hw_name", "provenance", "in_cover", "energy_uj", "consumers_uj"),
        *(
            "idle_uj",
            "unattributed_uj",
            "gap_seconds",
            *cost.footprint_headings(extract.reckonings),
        ),
    )
    for domain in extract.domains:
        parts = (domain.consumers, domain.idle, domain.unattributed)
        yield (
            *(domain.id, domain.hw_type, domain.name, domain.provenance, int(domain.in_cover)),
            domain.energy,
            *(parts if domain.attributed else ("", "", "")),
            sum(domain.gaps.values()) / 1e9,
            *cost.footprint_values(domain.energy, extract.reckonings),
        )


def metadata(by: str, extract: HistoryExtract, breakdown: Breakdown) -> dict[str, str]:
    """What is true of the whole table, for a format that has room for it beside the rows."""
    emulated = Provenance.EMULATED in breakdown.provenance.values()
    return {
        "wattspan.by": by,
        "wattspan.from": _iso(extract.start),
        "wattspan.to": _iso(extract.end),
        "wattspan.emulated": "true" if emulated else "false",
    }


def _lines(breakdown: Breakdown) -> tuple[BreakdownLine, ...]:
    named = tuple(line for section in breakdown.sections for line in section.lines)
    return named + breakdown.besides


def _line(line: BreakdownLine, breakdown: Breakdown) -> dict[str, Any]:
    whole = breakdown.total.whole
    return {
        "kind": line.kind or None,
        "role": line.role,
        "name": line.name,
        "group": line.group or None,
        "energy_microjoules": line.whole,
        "energy_joules": line.whole / 1e6,
        "energy_microjoules_by_type": dict(line.energy),
        "share": line.whole / whole if whole else None,
        **(_spans(line.use, line.whole) if line.use is not None else {}),
    }


def _spans(use: SpanUsage, energy: int) -> dict[str, Any]:
    tokens = use.tokens_in + use.tokens_out
    return {
        "calls": use.calls,
        "seconds": use.nanoseconds / 1e9,
        "tokens": {"input": use.tokens_in, "output": use.tokens_out},
        "joules_per_call": _joules_each(energy, use.calls),
        "joules_per_token": _joules_each(energy, tokens),
        "joules_per_output_token": _joules_each(energy, use.tokens_out),
    }


def _joules_each(microjoules: int, parts: int) -> float | None:
    return microjoules / 1e6 / parts if parts else None


def _domain(domain: DomainTotal) -> dict[str, Any]:
    parts = {
        "consumers_microjoules": domain.consumers,
        "idle_microjoules": domain.idle,
        "unattributed_microjoules": domain.unattributed,
    }
    return {
        "hw_id": domain.id,
        "hw_type": domain.hw_type,
        "hw_name": domain.name,
        "provenance": domain.provenance,
        "method": domain.method,
        "in_cover": domain.in_cover,
        "energy_microjoules": domain.energy,
        "energy_joules": domain.energy / 1e6,
        **(parts if domain.attributed else dict.fromkeys(parts)),
        "gap_seconds": {reason: time / 1e9 for reason, time in domain.gaps.items()},
    }


def _iso(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


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
        writer.writerow(_escape_formulas(row) if number else row)
    return _utf8(text.getvalue())


def _escape_formulas(row: tuple[object, ...]) -> Iterator[object]:
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


def write_output(report: bytes, output: Path | None) -> None:
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


def choose_format(form: str | None, output: Path | None, *, as_json: bool, as_csv: bool) -> str:
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
