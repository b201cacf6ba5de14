"""A report as a table for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from wattspan.cli.formatting import UNKNOWN, count, duration_text, energy_each, share
from wattspan.cli.report.cost import FootprintColumns, footprint_notes
from wattspan.model import Provenance
from wattspan.storage.breakdown import Breakdown, BreakdownLine, worst_provenance
from wattspan.storage.deltas import PROCESS, SPAN
from wattspan.storage.query import DomainTotal, HistoryExtract
from wattspan.storage.schema import DAY, HOUR, MINUTE
from wattspan.util.text import printable

_WIDEST = 40


class EnergyUnit(NamedTuple):
    microjoules: int
    digits: int
    from_total: int  # the least total, in microjoules, that is shown in it


UNITS: Mapping[str, EnergyUnit] = {
    "J": EnergyUnit(10**6, 2, 0),
    "kJ": EnergyUnit(10**9, 3, 10**9),
    "Wh": EnergyUnit(3600 * 10**6, 3, 10 * 3600 * 10**6),
    "kWh": EnergyUnit(3600 * 10**9, 4, 3600 * 10**9),
}
"""One unit serves a whole table, so that its figures can be compared and added by eye."""

_STEPS = {MINUTE: "minute", HOUR: "hour", DAY: "day"}


def report_lines(
    path: Path, by: str, extract: HistoryExtract, breakdown: Breakdown, unit: str = "auto"
) -> Iterator[str]:
    """The lines of the report: what and when, the table, the gaps."""
    total = breakdown.total.whole
    name = _fitting_unit(total) if unit == "auto" else unit
    weighed = FootprintColumns(extract.reckonings, total)
    steps = " and ".join(_STEPS[step] for step in extract.steps)
    interval = f"{local_time(extract.start)} to {local_time(extract.end)}"
    yield f"Energy from {interval}, by the {steps}, in {name}"
    yield f"from {path}"
    if Provenance.EMULATED in breakdown.provenance.values():
        yield "EMULATED: these are figures of an emulated host and true of no machine."
    if by == "domain":
        yield ""
        yield from _align(_domain_table(extract.domains, total, name, weighed), left=(0, 1, 2))
    elif by == SPAN:
        lines = [*(line for section in breakdown.sections for line in section.lines)]
        lines += [*breakdown.besides, breakdown.total]
        yield ""
        yield from _align(_span_table(lines, breakdown, name, weighed), left=(0, 1))
        if not breakdown.sections:
            yield ""
            yield "No span ended in this time whose energy is known: see docs/how-to/see-spans.md."
        yield from _gaps(extract.domains)
    else:
        for section in breakdown.sections:
            lines = [*section.lines, *breakdown.besides, breakdown.total]
            yield ""
            yield from _align(_table(section.kind, lines, breakdown, name, weighed), left=(0, 1))
        if not breakdown.sections:
            lines = [*breakdown.besides, breakdown.total]
            yield ""
            yield from _align(_table(by, lines, breakdown, name, weighed), left=(0, 1))
        yield from _gaps(extract.domains)
    if found := [*footprint_notes(extract.reckonings, total, extract.steps)]:
        yield from ("", *found)


def local_time(seconds: int) -> str:
    """Unix seconds in local time, the offset said."""
    return f"{datetime.fromtimestamp(seconds, UTC).astimezone():%Y-%m-%d %H:%M %z}"


def _table(
    kind: str,
    lines: Iterable[BreakdownLine],
    breakdown: Breakdown,
    unit: str,
    weighed: FootprintColumns,
) -> Iterator[tuple[str, ...]]:
    types = list(breakdown.provenance)
    whole = breakdown.total.whole
    several = ("total",) if len(types) > 1 else ()
    detail = ("group",) if kind == PROCESS else ("",)
    yield (kind, *detail, *types, *several, "share", *weighed.headings)
    worst = max(breakdown.provenance.values(), key=lambda one: one.doubt, default=None)
    labels = [breakdown.provenance[hw_type].value for hw_type in types]
    yield ("", "", *labels, *((worst.value,) if several and worst else ()), "", *weighed.blank)
    for line in lines:
        figures = [_energy(line.energy.get(hw_type, 0), unit) for hw_type in types]
        sums = (_energy(line.whole, unit),) if several else ()
        parts = (*sums, share(line.whole, whole), *weighed.cells(line.whole))
        yield (_name(line.name), _name(line.group), *figures, *parts)


def _span_table(
    lines: Sequence[BreakdownLine], breakdown: Breakdown, unit: str, weighed: FootprintColumns
) -> Iterator[tuple[str, ...]]:
    """As ``_table``, with what spans did and what each call and each output token cost."""
    types = list(breakdown.provenance)
    whole = breakdown.total.whole
    several = ("total",) if len(types) > 1 else ()
    tokens = any(line.use and line.use.tokens_in + line.use.tokens_out for line in lines)
    told = ("tokens in", "out", "J/token") if tokens else ()
    yield (
        "service",
        "span",
        "calls",
        *types,
        *several,
        "share",
        *weighed.headings,
        "J/call",
        "time",
        *told,
    )
    worst = max(breakdown.provenance.values(), key=lambda one: one.doubt, default=None)
    labels = [breakdown.provenance[hw_type].value for hw_type in types]
    sums = (worst.value,) if several and worst else ()
    yield ("", "", "", *labels, *sums, "", *weighed.blank, "", "", *("" for _ in told))
    for line in lines:
        use, energy = line.use, line.whole
        did: tuple[str, ...] = ("",) * (2 + len(told))
        if use is not None:
            did = (energy_each(energy, use.calls), duration_text(use.nanoseconds))
            if use.tokens_in or use.tokens_out:
                did += (
                    count(use.tokens_in),
                    count(use.tokens_out),
                    energy_each(energy, use.tokens_out),
                )
            did += ("",) * (2 + len(told) - len(did))
        yield (
            *(_name(line.group), _name(line.name), str(use.calls) if use else ""),
            *(_energy(line.energy.get(hw_type, 0), unit) for hw_type in types),
            *((_energy(energy, unit),) if several else ()),
            *(share(energy, whole), *weighed.cells(energy), *did),
        )


def _domain_table(
    domains: Sequence[DomainTotal], total: int, unit: str, weighed: FootprintColumns
) -> Iterator[tuple[str, ...]]:
    yield (
        *("domain", "type", "provenance", "energy", "consumers", "idle", "unattributed"),
        *("share", *weighed.headings, "gap"),
    )
    for domain in domains:
        parts = (domain.consumers, domain.idle, domain.unattributed)
        yield (
            _name(domain.id),
            domain.hw_type,
            domain.provenance,
            _energy(domain.energy, unit),
            *(_energy(part, unit) if domain.attributed else UNKNOWN for part in parts),
            share(domain.energy, total) if domain.in_cover else "part",
            *weighed.cells(domain.energy),
            _gap(domain),
        )
    cover = [domain for domain in domains if domain.in_cover]
    worst = max(worst_provenance(cover).values(), key=lambda one: one.doubt, default=None)
    yield (
        *("total", "", worst.value if worst else "", _energy(total, unit)),
        *(_energy(sum(d.consumers for d in cover), unit),),
        *(_energy(sum(d.idle for d in cover), unit),),
        *(_energy(sum(d.unattributed for d in cover), unit),),
        *(share(total, total), *weighed.cells(total), ""),
    )


def _gaps(domains: Iterable[DomainTotal]) -> Iterator[str]:
    missing = [domain for domain in domains if domain.in_cover and domain.gaps]
    if missing:
        yield ""
        yield "Not measured, and in no figure above:"
        for domain in missing:
            yield f"  {printable(domain.id)}: {_gap(domain)}"


def _gap(domain: DomainTotal) -> str:
    return ", ".join(
        f"{duration_text(time)} {reason}" for reason, time in sorted(domain.gaps.items())
    )


def _fitting_unit(total: int) -> str:
    return [name for name, unit in UNITS.items() if total >= unit.from_total][-1]


def _energy(microjoules: int, name: str) -> str:
    """To the unit's digits; what is not nothing is not shown as nothing."""
    unit = UNITS[name]
    text = f"{microjoules / unit.microjoules:.{unit.digits}f}"
    least = f"{10**-unit.digits:.{unit.digits}f}"
    return f"<{least}" if microjoules and float(text) == 0 else text


def _name(text: str) -> str:
    shown = printable(text)
    return shown if len(shown) <= _WIDEST else f"{shown[: _WIDEST - 1]}…"


def _align(rows: Iterable[tuple[str, ...]], left: Sequence[int]) -> Iterator[str]:
    """Columns wide enough; those in ``left`` flush left, figures flush right; empty ones gone."""
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = (
            f"{cell:<{width}}" if place in left else f"{cell:>{width}}"
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
            if width
        )
        yield "  ".join(cells).rstrip()
