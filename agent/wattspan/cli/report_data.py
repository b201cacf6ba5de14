"""A report for programs: facts and rows, in whole microjoules beside joules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from wattspan.cli import report_cost
from wattspan.model import Provenance
from wattspan.storage.breakdown import Breakdown, BreakdownLine
from wattspan.storage.deltas import SPAN, SpanUsage
from wattspan.storage.query import DomainTotal, HistoryExtract
from wattspan.storage.rates import Weighting


def facts(path: Path, by: str, extract: HistoryExtract, breakdown: Breakdown) -> dict[str, Any]:
    """The whole report. For each kind its lines and those without a kind sum to the total."""
    provenance = breakdown.provenance
    weighed = partial(report_cost.facts, asked=extract.reckonings)
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


def rows(by: str, extract: HistoryExtract, breakdown: Breakdown) -> Iterator[tuple[object, ...]]:
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
        *report_cost.headings(asked),
    )
    worst = max(breakdown.provenance.values(), key=lambda one: one.doubt, default="")
    for line in (*_lines(breakdown), breakdown.total):
        use = line.use
        did = (
            (use.calls, use.nanoseconds / 1e9, use.tokens_in, use.tokens_out) if use else ("",) * 4
        )
        by_type = (line.energy.get(hw_type, 0) for hw_type in types)
        weighed = report_cost.values(line.whole, asked)
        yield line.role, line.group, line.name, *did, worst, line.whole, *by_type, *weighed


def line_rows(
    breakdown: Breakdown, asked: Sequence[Weighting] = ()
) -> Iterator[tuple[object, ...]]:
    """A row for each line and hardware type; for each kind and type they sum to the total's."""
    yield (
        *("kind", "role", "name", "group", "hw_type", "provenance", "energy_uj", "energy_j"),
        *report_cost.headings(asked),
    )
    for line in (*_lines(breakdown), breakdown.total):
        for hw_type, energy in line.energy.items():
            label = breakdown.provenance[hw_type]
            yield (
                *(line.kind, line.role, line.name, line.group, hw_type, label),
                *(energy, f"{energy / 1e6:.6f}"),
                *report_cost.values(energy, asked),
            )


def domain_rows(extract: HistoryExtract) -> Iterator[tuple[object, ...]]:
    """A row for each domain; what is not attributed has empty parts, not zeros."""
    yield (
        *("hw_id", "hw_type", "hw_name", "provenance", "in_cover", "energy_uj", "consumers_uj"),
        *("idle_uj", "unattributed_uj", "gap_seconds", *report_cost.headings(extract.reckonings)),
    )
    for domain in extract.domains:
        parts = (domain.consumers, domain.idle, domain.unattributed)
        yield (
            *(domain.id, domain.hw_type, domain.name, domain.provenance, int(domain.in_cover)),
            domain.energy,
            *(parts if domain.attributed else ("", "", "")),
            sum(domain.gaps.values()) / 1e9,
            *report_cost.values(domain.energy, extract.reckonings),
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
        "joules_per_call": _each(energy, use.calls),
        "joules_per_token": _each(energy, tokens),
        "joules_per_output_token": _each(energy, use.tokens_out),
    }


def _each(microjoules: int, parts: int) -> float | None:
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
