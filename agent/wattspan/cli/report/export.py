"""A report as JSON, or as rows in CSV, JSON Lines and Parquet; its rates and its output file."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from wattspan.cli.options import echo_error
from wattspan.config import Config
from wattspan.config.tables import RateSettings
from wattspan.footprint.cost import BILLION, billionths
from wattspan.inference.division import DivisionMethod
from wattspan.model import EQUAL_PARTS, IDLE_PART, Certainty, HwType, Provenance
from wattspan.ports import ConfigError, WattspanError
from wattspan.storage.breakdown import Breakdown, BreakdownLine, LineRole
from wattspan.storage.deltas import MODEL, SPAN, SpanUsage, total_split
from wattspan.storage.query import DomainTotal, HistoryExtract
from wattspan.storage.rates import CARBON, COST, PeriodsBetween, RatedTotal, Weighting, rated_totals
from wattspan.util.files import replace_file
from wattspan.util.text import NO_PYARROW, escape_formula, has_pyarrow

if TYPE_CHECKING:
    from wattspan.footprint.cost import RatePeriod

# ------------------------------------------------------------------------------ cost and carbon


def configured_valuations(config: Config) -> tuple[Weighting, ...]:
    """The rates of the present configuration, which apply to all times.

    Rates of a server or a file apply as the agent recorded them in the store.
    """
    found = (_valuation(COST, config.cost), _valuation(CARBON, config.carbon))
    return tuple(each for each in found if each is not None)


def _valuation(kind: str, table: RateSettings) -> Weighting | None:
    unit = table.unit
    if table.constant is not None:
        return Weighting(kind, unit, _constant_rate(billionths(table.constant)), steady=True)
    if table.schedule:
        from wattspan.footprint.tariff_file import read_schedule

        try:
            return Weighting(kind, unit, read_schedule(Path(table.schedule)).periods_between)
        except ConfigError as error:
            echo_error(str(error))
            return Weighting(kind, unit, _constant_rate(None), steady=True)
    return Weighting(kind, unit) if table.url or table.file else None


def _constant_rate(rate: int | None) -> PeriodsBetween:
    def pieces(start: int, end: int) -> Iterator[RatePeriod]:
        yield end - start, rate

    return pieces


def _footprint_cells(
    energy: int, certainty: Certainty, asked: Sequence[Weighting]
) -> dict[str, object]:
    """The amount, None if it is unknown, and the energy whose rate was unknown."""
    cells: dict[str, object] = {}
    for each, weight in zip(asked, rated_parts(energy, asked), strict=True):
        known = is_known(energy, certainty, weight)
        cells[f"{each.kind}_{each.unit}"] = Decimal(weight.billionths).scaleb(-9) if known else None
        cells[f"{each.kind}_unknown_uj"] = weight.unknown
    return cells


def _footprint_facts(
    energy: int, certainty: Certainty, asked: Sequence[Weighting]
) -> dict[str, Any]:
    """Cost and carbon for JSON."""
    return {
        each.kind: {
            "unit": each.unit,
            "amount": weight.billionths / BILLION if is_known(energy, certainty, weight) else None,
            "unknown_microjoules": weight.unknown,
        }
        for weight, each in zip(rated_parts(energy, asked), asked, strict=True)
    }


def rated_parts(energy: int, asked: Sequence[Weighting]) -> tuple[RatedTotal, ...]:
    """The rated totals; zeros of a sum without energies."""
    return rated_totals(energy) or (RatedTotal(0, 0),) * len(asked)


def is_known(energy: int, certainty: Certainty, weight: RatedTotal) -> bool:
    """True if the rate of any part of the energy was known, and the energy is."""
    return weight.unknown != energy if energy else certainty is not Certainty.UNKNOWN


def _known(energy: int, certainty: Certainty) -> int | None:
    """The energy; None if it is unknown, which is not 0."""
    return None if certainty is Certainty.UNKNOWN and not energy else energy


# ------------------------------------------------------------------------------------------ JSON


def report_facts(
    path: Path, by: str, extract: HistoryExtract, breakdown: Breakdown
) -> dict[str, Any]:
    """The whole report. For each kind its lines and those without a kind sum to the total."""
    footprint = partial(_footprint_facts, asked=extract.weightings)
    lines = [*_lines(breakdown), breakdown.total]
    *facts, total = [
        _line(line, breakdown) | footprint(line.total, line.total_certainty) for line in lines
    ]
    domains = extract.domains
    return {
        "store": str(path),
        "emulated": Provenance.EMULATED in breakdown.provenance.values(),
        "from": _iso(extract.start),
        "to": _iso(extract.end),
        "from_unix_seconds": extract.start,
        "to_unix_seconds": extract.end,
        "bucket_seconds": list(extract.steps),
        "by": by,
        "provenance": dict(breakdown.provenance),
        "total": total,
        "lines": facts,
        "domains": [_domain(one) | footprint(one.energy, one.certainty) for one in domains],
    }


def _line(line: BreakdownLine, breakdown: Breakdown) -> dict[str, Any]:
    whole = breakdown.total.total
    energy = _known(line.total, line.total_certainty)
    return {
        "kind": line.kind or None,
        "role": line.role,
        "name": line.name,
        "group": line.group or None,
        "energy_microjoules": energy,
        "energy_joules": None if energy is None else energy / 1e6,
        "energy_microjoules_by_type": dict(line.energy),
        "certainty": line.total_certainty,
        "certainty_by_type": dict(line.certainty),
        "share": energy / whole if whole and energy is not None else None,
        **(_spans(line.usage, energy) if line.usage is not None else {}),
        **(
            _division(line.usage) | _host(line.usage)
            if line.usage is not None and line.kind == MODEL
            else {}
        ),
    }


def _spans(use: SpanUsage, energy: int | None) -> dict[str, Any]:
    def joules_per(parts: int) -> float | None:
        return energy / 1e6 / parts if parts and energy is not None else None

    return {
        "calls": use.calls,
        "seconds": use.nanoseconds / 1e9,
        "tokens": {"input": use.tokens_in, "output": use.tokens_out},
        "joules_per_call": joules_per(use.calls),
        "joules_per_token": joules_per(use.tokens_in + use.tokens_out),
        "joules_per_output_token": joules_per(use.tokens_out),
        "gpu_split": {
            basis: {"static_microjoules": split.static, "dynamic_microjoules": split.dynamic}
            for basis, split in use.splits.items()
        },
    }


def _division(use: SpanUsage) -> dict[str, Any]:
    """The requests by the division of their energy; ``unknown`` if it was not recorded."""
    known = {method: use.divisions.get(method, 0) for method in DivisionMethod}
    return {"requests_by_division": {**known, "unknown": use.calls - sum(use.divisions.values())}}


HOST_PARTS: Sequence[str] = (HwType.GPU, HwType.CPU, HwType.MEMORY, IDLE_PART)
"""The parts of the energy of requests on the whole host, each joule in one."""


def _host(use: SpanUsage) -> dict[str, Any]:
    """The energy on the whole host by part, each with its requests; None without any."""
    if not use.host:
        return {"host": None}
    return {
        "host": {
            "requests_by_part": {part: one.requests for part, one in use.host.items()},
            "output_tokens_by_part": {part: one.tokens_out for part, one in use.host.items()},
            "microjoules_by_part": {part: one.energy for part, one in use.host.items()},
            "method": EQUAL_PARTS,
            "uncertainty_microjoules": None,
        }
    }


def _domain(domain: DomainTotal) -> dict[str, Any]:
    energy = _known(domain.energy, domain.certainty)
    return {
        **_names(domain),
        "method": domain.method,
        "in_cover": domain.in_cover,
        "energy_microjoules": energy,
        "energy_joules": None if energy is None else energy / 1e6,
        **{f"{name}_microjoules": part for name, part in _parts(domain).items()},
        "certainty": domain.certainty,
        "consumers_certainty": domain.consumers_certainty if domain.attributed else None,
        "gap_seconds": {reason: time / 1e9 for reason, time in domain.gaps.items()},
    }


def _names(domain: DomainTotal) -> dict[str, str]:
    return {
        "hw_id": domain.id,
        "hw_type": domain.hw_type,
        "hw_name": domain.name,
        "provenance": domain.provenance,
    }


def _parts(domain: DomainTotal) -> dict[str, int | None]:
    """The parts of its energy; without known energy or attribution, a domain has none."""
    parts = {
        "consumers": domain.consumers,
        "idle": domain.idle,
        "unattributed": domain.unattributed,
        "baseline_unknown": domain.withheld,
    }
    known = domain.attributed and domain.certainty is not Certainty.UNKNOWN
    return {**parts} if known else dict.fromkeys(parts)


def _lines(breakdown: Breakdown) -> tuple[BreakdownLine, ...]:
    named = tuple(line for section in breakdown.sections for line in section.lines)
    return named + breakdown.unattributed


def _iso(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


# ------------------------------------------------------------------------------------------ rows


ReportRow = dict[str, object]
"""Texts, integers, floats and decimals by column; None is an empty cell. All rows are alike."""


def report_rows(
    by: str, extract: HistoryExtract, breakdown: Breakdown, *, split: bool = False
) -> list[ReportRow]:
    """With ``split``, rows of spans have the static and the dynamic part of the GPU energy."""
    if by == "domain":
        return [_domain_row(domain, extract.weightings) for domain in extract.domains]
    lines = (*_lines(breakdown), breakdown.total)
    if by in (SPAN, MODEL):
        rows = [_span_row(by, line, breakdown, extract.weightings) for line in lines]
        if split:
            return [row | _split_row(line) for row, line in zip(rows, lines, strict=True)]
        return rows
    return [
        _type_row(line, hw_type, breakdown.provenance[hw_type], extract.weightings)
        for line in lines
        for hw_type in dict.fromkeys((*line.energy, *_unknown_types(line)))
    ]


def _unknown_types(line: BreakdownLine) -> Iterable[HwType]:
    """The types of which the total has no known energy; other lines have no rows of them."""
    of_total = line.role is LineRole.TOTAL
    return (t for t, one in line.certainty.items() if of_total and one is Certainty.UNKNOWN)


def _type_row(
    line: BreakdownLine, hw_type: HwType, origin: Provenance, asked: Sequence[Weighting]
) -> ReportRow:
    energy, certainty = _of_type(line, hw_type)
    known = _known(energy, certainty)
    return {
        "kind": line.kind,
        "role": line.role,
        "name": line.name,
        "group": line.group,
        "hw_type": hw_type,
        "provenance": origin,
        "energy_uj": known,
        "energy_j": None if known is None else Decimal(known).scaleb(-6),
        "certainty": certainty,
        **_footprint_cells(energy, certainty, asked),
    }


def _of_type(line: BreakdownLine, hw_type: HwType) -> tuple[int, Certainty]:
    return line.energy.get(hw_type, 0), line.certainty.get(hw_type, Certainty.KNOWN)


def _span_row(
    by: str, line: BreakdownLine, breakdown: Breakdown, asked: Sequence[Weighting]
) -> ReportRow:
    """A line that is no span or model has no calls, seconds and tokens."""
    use = line.usage
    energy, certainty = line.total, line.total_certainty
    return {
        "role": line.role,
        "service": line.group,
        by: line.name,
        "requests" if by == MODEL else "calls": use and use.calls,
        "seconds": use and use.nanoseconds / 1e9,
        "tokens_input": use and use.tokens_in,
        "tokens_output": use and use.tokens_out,
        **(_division_cells(use) | _host_cells(use) if by == MODEL else {}),
        "provenance": max(breakdown.provenance.values(), key=lambda one: one.rank, default=None),
        "energy_uj": _known(energy, certainty),
        "certainty": certainty,
        **{f"{kind}_uj": _known(*_of_type(line, kind)) for kind in breakdown.provenance},
        **_footprint_cells(energy, certainty, asked),
    }


def _division_cells(use: SpanUsage | None) -> ReportRow:
    """Requests by the division of their energy; None where no division was recorded."""
    found = use.divisions if use is not None else {}
    return {
        f"divided_by_{method}": found.get(method, 0) if found else None for method in DivisionMethod
    }


def _host_cells(use: SpanUsage | None) -> ReportRow:
    """The energy on the whole host by part, with its requests and tokens; None if it is unknown."""
    cells: ReportRow = {}
    for part in HOST_PARTS:
        found = None if use is None else use.host.get(part)
        cells[f"host_{part}_uj"] = found and found.energy
        cells[f"host_{part}_requests"] = found and found.requests
        cells[f"host_{part}_tokens_output"] = found and found.tokens_out
    return cells


def _split_row(line: BreakdownLine) -> ReportRow:
    """None where the static power was unknown; the basis is the least certain one."""
    splits = line.usage.splits if line.usage is not None else {}
    static, dynamic, basis = total_split(splits) if splits else (None, None, None)
    return {"gpu_static_uj": static, "gpu_dynamic_uj": dynamic, "static_basis": basis}


def _domain_row(domain: DomainTotal, asked: Sequence[Weighting]) -> ReportRow:
    return {
        **_names(domain),
        "in_cover": int(domain.in_cover),
        "energy_uj": _known(domain.energy, domain.certainty),
        **{f"{name}_uj": energy for name, energy in _parts(domain).items()},
        "gap_seconds": sum(domain.gaps.values()) / 1e9,
        "certainty": domain.certainty,
        "consumers_certainty": domain.consumers_certainty if domain.attributed else None,
        **_footprint_cells(domain.energy, domain.certainty, asked),
    }


# --------------------------------------------------------------------------------------- formats


def csv_bytes(rows: Sequence[ReportRow]) -> bytes:
    """RFC 4180; no cell is a formula (see escape_formula)."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows(row.keys() for row in rows[:1])
    for row in rows:
        writer.writerow(
            escape_formula(str(cell)) if isinstance(cell, str) else cell for cell in row.values()
        )
    return text.getvalue().encode(errors="replace")


def jsonl_bytes(rows: Sequence[ReportRow]) -> bytes:
    """A JSON object with all columns for each row."""
    return msgspec.json.Encoder(decimal_format="number").encode_lines(rows)


def parquet_bytes(rows: Sequence[ReportRow]) -> bytes:
    """The rows with energies in whole microjoules. WattspanError without pyarrow."""
    if not has_pyarrow():
        raise WattspanError(NO_PYARROW)
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    types = {str: pa.string(), int: pa.int64(), float: pa.float64()}
    columns = rows[0] if rows else ()
    schema = pa.schema([(name, types[_cell_type(name)]) for name in columns])
    cells = [
        {name: None if cell is None else _cell_type(name)(cell) for name, cell in row.items()}
        for row in rows
    ]
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(cells, schema=schema), out, compression="zstd")
    return out.getvalue()


_COUNTS = "calls", "requests", "tokens_input", "tokens_output", "in_cover"


def _cell_type(name: str) -> Any:
    if name.startswith("divided_by_") or name.endswith(("_uj", *_COUNTS)):
        return int
    is_float = name.endswith(("seconds", "_j")) or name.startswith((f"{COST}_", f"{CARBON}_"))
    return float if is_float else str


WRITERS = {"parquet": parquet_bytes, "csv": csv_bytes, "jsonl": jsonl_bytes}

# ---------------------------------------------------------------------------------------- output


def write_output(report: bytes, output: Path | None) -> None:
    """Print the report, or replace the file ``output`` once all of it is on disk."""
    if output is None:
        click.echo(report, nl=False)
        return
    try:
        target = output.resolve()
        if target.exists() and not target.is_file():  # a pipe, a terminal
            target.write_bytes(report)
            return
        draft = target.with_name(f".{target.name[:200]}.{os.getpid()}.draft")
        replace_file(target, report, draft, 0o666)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise WattspanError(
            f"Cannot write {output}: {why}. Choose another file with --output."
        ) from None
