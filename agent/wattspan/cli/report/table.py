"""A report as a table for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from wattspan.cli.formatting import (
    UNKNOWN,
    at_least,
    count,
    duration_text,
    energy_each,
    grid_lines,
    joules,
    local_time,
    share,
)
from wattspan.cli.report.export import is_known, rated_parts
from wattspan.footprint.cost import BILLION
from wattspan.inference.division import DivisionMethod
from wattspan.model import Certainty, HwType, Provenance, StaticBasis
from wattspan.storage.breakdown import (
    Breakdown,
    BreakdownLine,
    BreakdownSection,
    worst_provenance,
)
from wattspan.storage.database import DAY, HOUR, MINUTE
from wattspan.storage.deltas import MODEL, PROCESS, SPAN, SpanUsage, total_split
from wattspan.storage.query import DomainTotal, HistoryExtract
from wattspan.storage.rates import CARBON, COST, RatedTotal, Weighting
from wattspan.util.text import printable

_WIDEST = 40


class EnergyUnit(NamedTuple):
    microjoules: int
    digits: int
    from_total: int  # microjoules; `auto` selects it for totals from here on


UNITS: Mapping[str, EnergyUnit] = {
    "J": EnergyUnit(10**6, 2, 0),
    "kJ": EnergyUnit(10**9, 3, 10**9),
    "Wh": EnergyUnit(3600 * 10**6, 3, 10 * 3600 * 10**6),
    "kWh": EnergyUnit(3600 * 10**9, 4, 3600 * 10**9),
}
"""A table has one unit, so that its figures are comparable."""

_WITHOUT = {
    SPAN: "No span with known energy ended in this time: see docs/how-to/see-spans.md.",
    MODEL: "No request to a language model settled in this time: see "
    "docs/explanation/energy-of-a-request.md.",
}
"""Sentences for reports without any span or model."""

_STEPS = {MINUTE: "minute", HOUR: "hour", DAY: "day"}


def report_lines(
    path: Path,
    by: str,
    extract: HistoryExtract,
    breakdown: Breakdown,
    unit: str = "auto",
    *,
    split: bool = False,
) -> Iterator[str]:
    """The lines of the report: its subject and time, the tables, the gaps.

    With ``split``, spans have columns of static and dynamic energy.
    """
    total = breakdown.total.total
    name = _fitting_unit(total) if unit == "auto" else unit
    footprint = FootprintColumns(extract.weightings, total)
    steps = " and ".join(_STEPS[step] for step in extract.steps)
    interval = f"{local_time(extract.start)} to {local_time(extract.end)}"
    yield f"Energy from {interval}, by the {steps}, in {name}"
    yield f"from {path}"
    if Provenance.EMULATED in breakdown.provenance.values():
        yield "EMULATED: these are figures of an emulated host, not of real hardware."
    yield ""
    sections = breakdown.sections
    if by == "domain":
        yield from _domain_table(extract.domains, total, name, footprint)
    elif by in _WITHOUT:
        lines = [line for section in sections for line in section.lines]
        yield from _table(by, lines, breakdown, name, footprint, split=split)
        if split and sections:
            yield from _split_notes(lines)
        if by == MODEL:
            yield from _division_notes(lines)
        if not sections:
            yield ""
            yield _WITHOUT[by]
    else:
        for place, section in enumerate(sections or [BreakdownSection(by, ())]):
            if place:
                yield ""
            yield from _table(section.kind, section.lines, breakdown, name, footprint)
    yield from _withheld(extract.domains, name)
    if by != "domain":
        yield from _gaps(extract.domains)
    if notes := [*footprint_notes(extract.weightings, total, extract.steps)]:
        yield from ("", *notes)


def _table(
    kind: str,
    named: Sequence[BreakdownLine],
    breakdown: Breakdown,
    unit: str,
    footprint: FootprintColumns,
    *,
    split: bool = False,
) -> list[str]:
    """One kind's lines and those without a kind; spans and models with calls and tokens."""
    of_spans = kind in _WITHOUT
    types = list(breakdown.provenance)
    whole = breakdown.total.total
    several = len(types) > 1
    worst = max(breakdown.provenance.values(), key=lambda one: one.rank, default=None)
    timed, call = kind == SPAN, "request" if kind == MODEL else "call"
    names: tuple[str, ...] = kind, "group" if kind == PROCESS else ""
    usage: tuple[str, ...] = ()
    if of_spans:
        names = "service", kind, f"{call}s"
        usage = f"J/{call}", "time" if timed else "learned", "tokens in", "out", "J/token"
    total = ("total",) if several else ()
    parts = ("static", "dynamic", "split") if split else ()
    rows = [
        (*names, *types, *total, *parts, "share", *footprint.headings, *usage),
        (
            *("" for _ in names),
            *(breakdown.provenance[hw_type] for hw_type in types),
            *((worst or "",) if several else ()),
            *("" for _ in (*parts, "share", *footprint.headings, *usage)),
        ),
    ]
    for line in (*named, *breakdown.unattributed, breakdown.total):
        calls = str(line.usage.calls) if line.usage else ""
        rows.append(
            (
                *((line.group, line.name, calls) if of_spans else (line.name, line.group)),
                *(_cell_of(line, hw_type, unit) for hw_type in types),
                *((_bounded(line.total, line.total_certainty, unit),) if several else ()),
                *(_split_cells(line, unit) if split else ()),
                share(line.total, whole),
                *footprint.cells(line.total),
                *(_usage_cells(line, timed=timed) if of_spans else ()),
            )
        )
    # a column of tokens without any token is not shown
    if of_spans and all(not any(row[-3:]) for row in rows[1:]):
        rows = [row[:-3] for row in rows]
    return grid_lines(rows, left=(0, 1), max_width=_WIDEST)


def _cell_of(line: BreakdownLine, hw_type: HwType, unit: str) -> str:
    return _bounded(line.energy.get(hw_type, 0), line.certainty.get(hw_type, Certainty.KNOWN), unit)


def _bounded(energy: int, certainty: Certainty, unit: str) -> str:
    """The energy, marked if it is a lower bound; a dash for a lower bound of 0."""
    if certainty is not Certainty.KNOWN and not energy:
        return UNKNOWN
    return at_least(_energy(energy, unit), bounded=certainty is not Certainty.KNOWN)


_BASES = {
    StaticBasis.CONFIGURED: "configured",
    StaticBasis.FITTED: "fitted",
    StaticBasis.LOWER_BOUND: "lower bound",
}


def _split_cells(line: BreakdownLine, unit: str) -> tuple[str, ...]:
    """Static and dynamic GPU energy, and the least certain basis of the static power."""
    if line.usage is None or not line.usage.splits:
        return ("", "", "" if line.usage is None else UNKNOWN)
    static, dynamic, basis = total_split(line.usage.splits)
    bounded = basis is StaticBasis.LOWER_BOUND
    most = "≤ " if bounded else ""
    return (
        at_least(_energy(static, unit), bounded=bounded),
        f"{most}{_energy(dynamic, unit)}",
        _BASES[basis],
    )


def _split_notes(lines: Iterable[BreakdownLine]) -> Iterator[str]:
    """The meaning of the parts, and the GPU energy without a known static power."""
    used = [line for line in lines if line.usage is not None]
    gpu = sum(line.energy.get(HwType.GPU, 0) for line in used)
    parts = [sum(total_split(u.splits)[:2]) for line in used if (u := line.usage) and u.splits]
    yield ""
    yield "Static and dynamic energy add up to the GPU energy of spans while the static power was"
    yield "known. The idle energy of the boards is static too; it is in the line idle, if separate."
    if unknown := gpu - sum(parts):
        yield f"Not split, because the static power was not known: {joules(unknown)} of spans."


def _usage_cells(line: BreakdownLine, *, timed: bool) -> tuple[str, ...]:
    """Energy of a call; its time if ``timed``, else the part divided by learned energy; tokens."""
    use = line.usage
    if use is None:
        return ("",) * 5
    tokens = ("",) * 3
    bounded = line.total_certainty is not Certainty.KNOWN
    if use.tokens_in or use.tokens_out:
        each = at_least(energy_each(line.total, use.tokens_out), bounded=bounded)
        tokens = count(use.tokens_in), count(use.tokens_out), each
    second = duration_text(use.nanoseconds) if timed else _learned(use)
    return (at_least(energy_each(line.total, use.calls), bounded=bounded), second, *tokens)


def _learned(use: SpanUsage) -> str:
    """The part of the requests whose energy was divided by the learned energy of tokens.

    A lower bound if the division of a part was not recorded.
    """
    if not use.divisions:
        return UNKNOWN
    known = share(use.divisions.get(DivisionMethod.MODEL, 0), use.calls)
    return at_least(known, bounded=sum(use.divisions.values()) != use.calls)


def _requests(number: int) -> str:
    return "1 request" if number == 1 else f"{number} requests"


def _division_notes(lines: Iterable[BreakdownLine]) -> Iterator[str]:
    """The requests that were divided by tokens, and those without a record of it."""
    used = [line.usage for line in lines if line.usage is not None]
    by_tokens = sum(use.divisions.get(DivisionMethod.TOKENS, 0) for use in used)
    unknown = sum(use.calls - sum(use.divisions.values()) for use in used)
    if by_tokens:
        yield ""
        yield f"The energy of {_requests(by_tokens)} was divided by numbers of tokens, because"
        yield "the energy of the model's tokens was not learned yet. It may be far from the truth:"
        yield "see docs/explanation/energy-of-a-request.md."
    if unknown:
        yield ""
        yield f"The division of {_requests(unknown)} was not recorded by an earlier version."


def _domain_table(
    domains: Sequence[DomainTotal], total: int, unit: str, footprint: FootprintColumns
) -> list[str]:
    names = ("domain", "type", "provenance", "energy", "consumers", "idle", "unattributed", "share")
    rows = [(*names, *footprint.headings, "gap")]
    for domain in domains:
        parts = _domain_parts(domain)
        rows.append(
            (
                *(domain.id, domain.hw_type, domain.provenance),
                _bounded(domain.energy, domain.certainty, unit),
                *(_bounded(*part, unit) if domain.attributed else UNKNOWN for part in parts),
                share(domain.energy, total) if domain.in_cover else "part",
                *footprint.cells(domain.energy),
                _gap(domain),
            )
        )
    cover = [domain for domain in domains if domain.in_cover]
    worst = max(worst_provenance(cover).values(), key=lambda one: one.rank, default="")
    columns = zip(*(_domain_parts(domain) for domain in cover if domain.attributed), strict=True)
    sums = [
        (sum(part for part, _ in column), Certainty.of_sum(one for _, one in column))
        for column in columns
    ] or [(0, Certainty.KNOWN)] * 3
    whole = total, Certainty.of_sum(domain.certainty for domain in cover)
    rows.append(
        (
            *("total", "", worst, *(_bounded(*part, unit) for part in (whole, *sums))),
            *(share(total, total), *footprint.cells(total), ""),
        )
    )
    return grid_lines(rows, left=(0, 1, 2), max_width=_WIDEST)


def _domain_parts(domain: DomainTotal) -> tuple[tuple[int, Certainty], ...]:
    """Consumers, idle and unattributed energy with their certainty."""
    return (
        (domain.consumers, domain.consumers_certainty),
        (domain.idle, domain.idle_certainty),
        (domain.unattributed, domain.certainty),
    )


def _withheld(domains: Iterable[DomainTotal], unit: str) -> Iterator[str]:
    found = [domain for domain in domains if domain.in_cover and domain.withheld]
    if found:
        yield ""
        yield "Part of the unattributed energy, because the idle power was not known yet"
        yield "(baseline_unknown); the energy of consumers is too low by the active part of it:"
        for domain in found:
            yield f"  {printable(domain.id)}: {_energy(domain.withheld, unit)}"


def _gaps(domains: Iterable[DomainTotal]) -> Iterator[str]:
    missing = [domain for domain in domains if domain.in_cover and domain.gaps]
    if missing:
        yield ""
        yield "Not measured, and not included above:"
        for domain in missing:
            yield f"  {printable(domain.id)}: {_gap(domain)}"


def _gap(domain: DomainTotal) -> str:
    return ", ".join(
        f"{duration_text(time)} {reason}" for reason, time in sorted(domain.gaps.items())
    )


def _fitting_unit(total: int) -> str:
    return [name for name, unit in UNITS.items() if total >= unit.from_total][-1]


def _energy(microjoules: int, name: str) -> str:
    """With the unit's digits; ``"4.30 mJ"``, in its own unit, for less than they show."""
    unit = UNITS[name]
    text = f"{microjoules / unit.microjoules:.{unit.digits}f}"
    return joules(microjoules) if microjoules > 0 and float(text) == 0 else text


# ------------------------------------------------------------------------------ cost and carbon

MASS_UNITS = (("t", 10**6), ("kg", 1000), ("g", 1))
"""Units of carbon in grams; a table has one."""


class FootprintColumns:
    """The cost cells of a table, with the digits that its total needs; none without rates."""

    def __init__(self, asked: Sequence[Weighting], total: int) -> None:
        self._asked = asked
        self._scales = [*map(_scale, asked, rated_parts(total, asked))]
        self.headings = tuple(name for name, _, _ in self._scales)

    def cells(self, energy: int) -> tuple[str, ...]:
        """``"0.034"``; ``"≥ 0.034"`` if the rate of a part was unknown; a dash if of all."""
        return tuple(
            _cell(energy, weight, size, digits)
            for weight, (_, size, digits) in zip(
                rated_parts(energy, self._asked), self._scales, strict=True
            )
        )


def _scale(each: Weighting, total: RatedTotal) -> tuple[str, int, int]:
    """Heading, billionths of the unit, and digits."""
    name, size = each.unit, 1
    if each.kind == CARBON:
        whole = total.billionths / BILLION
        mass, size = next((m for m in MASS_UNITS if whole >= m[1]), MASS_UNITS[-1])
        name = f"{mass} CO2e"
    value, digits = total.billionths / BILLION / size, 2
    while digits < 9 and 0 < value < 10 ** (3 - digits):  # four significant digits
        digits += 1
    return name, size * BILLION, digits


def _cell(energy: int, weight: RatedTotal, size: int, digits: int) -> str:
    if not is_known(energy, weight):
        return UNKNOWN
    return at_least(f"{weight.billionths / size:.{digits}f}", bounded=bool(weight.unknown))


def footprint_notes(asked: Sequence[Weighting], total: int, steps: Sequence[int]) -> Iterator[str]:
    """The energy without a known rate, and the assumption about buckets."""
    words = {COST: ("price", "cost"), CARBON: ("carbon intensity", "carbon")}
    for each, weight in zip(asked, rated_parts(total, asked), strict=True):
        rate, figure = words[each.kind]
        if weight.unknown:
            yield (
                f"The {rate} was not known for {joules(weight.unknown)} "
                f"({share(weight.unknown, total)}), which is in no {figure}."
            )
    if max(steps) > MINUTE and not all(each.steady for each in asked):
        yield "Energy by the hour or day counts as spent evenly where a rate changed within it."
