"""A report as a table for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from wattspan.cli.formatting import (
    UNKNOWN,
    TableColumn,
    at_least,
    count,
    duration_text,
    energy_each,
    joules,
    local_time,
    share,
    table_lines,
)
from wattspan.cli.report import UNITS
from wattspan.cli.report.export import HOST_PARTS, rated_parts
from wattspan.footprint.cost import BILLION
from wattspan.inference.division import DivisionMethod
from wattspan.model import IDLE_PART, Certainty, HwType, Provenance, StaticBasis
from wattspan.storage.breakdown import Breakdown, BreakdownLine, BreakdownSection, worst_provenance
from wattspan.storage.database import DAY, HOUR, MINUTE
from wattspan.storage.deltas import MODEL, PROCESS, SPAN, SpanUsage, total_split
from wattspan.storage.query import DomainTotal, HistoryExtract
from wattspan.storage.rates import CARBON, COST, RatedTotal, Weighting
from wattspan.util.files import located_pages
from wattspan.util.text import printable

_WIDEST = 40


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
    steps = " and ".join(_STEPS[step] for step in extract.steps)
    interval = f"{local_time(extract.start)} to {local_time(extract.end)}"
    yield f"Energy from {interval}, by the {steps}, in {name}"
    yield f"from {path}"
    if Provenance.EMULATED in breakdown.provenance.values():
        yield "EMULATED: these are figures of an emulated host, not of real hardware."
    yield ""
    sections = breakdown.sections
    if by == "domain":
        yield from _domain_table(extract, total, name)
    elif by in _WITHOUT:
        lines = [line for section in sections for line in section.lines]
        yield from _table(by, lines, extract, breakdown, name, split=split)
        if split and sections:
            yield from _split_notes(lines)
        if by == MODEL:
            yield from _division_notes(lines)
            yield from _host_notes(lines)
        if not sections:
            yield ""
            yield located_pages(_WITHOUT[by])
    else:
        for place, section in enumerate(sections or [BreakdownSection(by, ())]):
            if place:
                yield ""
            yield from _table(section.kind, section.lines, extract, breakdown, name)
    yield from _withheld(extract.domains, name)
    if by != "domain":
        yield from _gaps(extract.domains)
    if notes := [*footprint_notes(extract.weightings, total, extract.steps)]:
        yield from ("", *notes)


def _table(
    kind: str,
    named: Sequence[BreakdownLine],
    extract: HistoryExtract,
    breakdown: Breakdown,
    unit: str,
    *,
    split: bool = False,
) -> list[str]:
    """One kind's lines and those without a kind; spans and models with calls and tokens."""
    lines = (*named, *breakdown.unattributed, breakdown.total)
    provenance, whole = breakdown.provenance, breakdown.total.total
    name = TableColumn(kind, attrgetter("name"), left=True)
    group = TableColumn("group" if kind == PROCESS else "", attrgetter("group"), left=True)
    columns = [name, group]
    usage: list[TableColumn] = []
    if kind in _WITHOUT:
        calls, *usage = _usage_columns(kind, [line.usage for line in lines])
        columns = [group._replace(title="service"), name, calls]
    for hw_type, origin in provenance.items():
        columns.append(TableColumn(hw_type, partial(_energy_of, hw_type, unit), note=origin))
    if len(provenance) > 1:
        worst = max(provenance.values(), key=lambda one: one.rank)
        columns.append(TableColumn("total", partial(_total_of, unit), note=worst))
    if split:
        columns += _split_columns(unit)
    columns.append(TableColumn("share", lambda line: _share(*_total(line), whole)))
    columns += _footprint_columns(extract.weightings, whole, _total)
    return table_lines([*columns, *usage], lines, max_width=_WIDEST)


def _energy_of(hw_type: HwType, unit: str, line: BreakdownLine) -> str:
    return _bounded(line.energy.get(hw_type, 0), line.certainty.get(hw_type, Certainty.KNOWN), unit)


def _total(line: BreakdownLine) -> tuple[int, Certainty]:
    return line.total, line.total_certainty


def _total_of(unit: str, line: BreakdownLine) -> str:
    return _bounded(*_total(line), unit)


def _bounded(energy: int, certainty: Certainty, unit: str) -> str:
    return _marked(_energy(energy, unit), energy, certainty)


def _marked(text: str, energy: int, certainty: Certainty) -> str:
    """``text``, marked if ``energy`` is a lower bound; a dash for a lower bound of 0."""
    known = certainty is Certainty.KNOWN
    return at_least(text, bounded=not known) if energy or known else UNKNOWN


def _share(energy: int, certainty: Certainty, whole: int) -> str:
    return share(energy, whole) if energy or certainty is Certainty.KNOWN else UNKNOWN


_BASES = {
    StaticBasis.CONFIGURED: "configured",
    StaticBasis.FITTED: "fitted",
    StaticBasis.LOWER_BOUND: "lower bound",
}


def _split_columns(unit: str) -> list[TableColumn]:
    """Static and dynamic GPU energy, and the least certain basis of the static power."""

    def cells(line: BreakdownLine) -> tuple[str, str, str]:
        if line.usage is None or not line.usage.splits:
            return ("", "", "" if line.usage is None else UNKNOWN)
        static, dynamic, basis = total_split(line.usage.splits)
        bounded = basis is StaticBasis.LOWER_BOUND
        most = f"{'≤ ' if bounded else ''}{_energy(dynamic, unit)}"
        return at_least(_energy(static, unit), bounded=bounded), most, _BASES[basis]

    return [
        TableColumn("static", lambda line: cells(line)[0]),
        TableColumn("dynamic", lambda line: cells(line)[1]),
        TableColumn("split", lambda line: cells(line)[2]),
    ]


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


_UsageCell = Callable[[BreakdownLine, SpanUsage], str]


def _usage_columns(kind: str, uses: Sequence[SpanUsage | None]) -> Iterator[TableColumn]:
    """Calls, energy of a call, its time or the part divided by learned energy; tokens if any."""
    call = "request" if kind == MODEL else "call"

    def used(title: str, cell: _UsageCell) -> TableColumn:
        return TableColumn(title, lambda line: cell(line, line.usage) if line.usage else "")

    def spent(title: str, cell: _UsageCell) -> TableColumn:
        return used(title, lambda line, use: cell(line, use) if _has_tokens(use) else "")

    yield used(f"{call}s", lambda _, use: str(use.calls))
    yield used(f"J/{call}", lambda line, use: _energy_each(line, use.calls))
    if kind == SPAN:
        yield used("time", lambda _, use: duration_text(use.nanoseconds))
    else:
        yield used("learned", lambda _, use: _learned(use))
    if any(map(_has_tokens, uses)):
        yield spent("tokens in", lambda _, use: count(use.tokens_in))
        yield spent("out", lambda _, use: count(use.tokens_out))
        yield spent("J/token", lambda line, use: _energy_each(line, use.tokens_out))
    if kind == MODEL:
        yield from _host_columns(uses)


def _host_columns(uses: Iterable[SpanUsage | None]) -> Iterator[TableColumn]:
    """Joules on the whole host: of a request by part and in all, and of a generated token."""
    known = {part for use in uses if use is not None for part in use.host}
    for part in (one for one in HOST_PARTS if one in known):
        yield TableColumn(f"{part} J/request", partial(_host_each, [part], "requests"))
    if known > {HwType.GPU}:  # not of one hardware type only
        yield TableColumn("host J/request", partial(_host_each, HOST_PARTS, "requests"))
        yield TableColumn("host J/token", partial(_host_each, HOST_PARTS, "tokens_out"))


def _host_each(parts: Sequence[str], of: str, line: BreakdownLine) -> str:
    """One part, or the sum of all: unknown for parts of different requests, or a lower bound."""
    if line.usage is None:
        return ""
    host = line.usage.host
    found = [host[part] for part in parts if part in host]
    if len({(one.requests, one.tokens_out) for one in found}) != 1:
        return UNKNOWN
    text = energy_each(sum(one.energy for one in found), getattr(found[0], of))
    return at_least(text, bounded=len(parts) > 1 and HwType.MEMORY not in host)


def _energy_each(line: BreakdownLine, parts: int) -> str:
    return _marked(energy_each(line.total, parts), *_total(line))


def _has_tokens(use: SpanUsage | None) -> bool:
    return use is not None and bool(use.tokens_in or use.tokens_out)


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
        yield located_pages("see docs/explanation/energy-of-a-request.md.")
    if unknown:
        yield ""
        yield f"The division of {_requests(unknown)} was not recorded by an earlier version."


def _host_notes(lines: Iterable[BreakdownLine]) -> Iterator[str]:
    """The requests of the energy on the whole host, its missing parts, method and uncertainty."""
    hosts = [line.usage.host for line in lines if line.usage is not None and line.usage.host]
    if not hosts:
        return
    known = sum(max(part.requests for part in host.values()) for host in hosts)
    yield ""
    yield f"Energy by part, and of the host, is that of {_requests(known)} of which the CPU and all"
    yield "parts that are counted are known. Requests of an instant have equal parts of CPU, memory"
    yield "and idle energy; its uncertainty is unknown."
    if missing := [p for p in (HwType.MEMORY, IDLE_PART) if any(p not in host for host in hosts)]:
        yield f"Not counted for some of them, and not in the host's energy: {', '.join(missing)}."


class _DomainRow(NamedTuple):
    """A domain, or all of them: ``energies`` are its own and its parts, with their certainty."""

    name: str
    hw_type: str
    provenance: str
    energies: Sequence[tuple[int, Certainty]]
    share: str
    gap: str = ""

    def energy(self, place: int, unit: str) -> str:
        """An energy; a dash for a part of a domain that is not attributed."""
        return _bounded(*self.energies[place], unit) if place < len(self.energies) else UNKNOWN


def _domain_table(extract: HistoryExtract, total: int, unit: str) -> list[str]:
    rows = [
        _DomainRow(
            domain.id,
            domain.hw_type,
            domain.provenance,
            [(domain.energy, domain.certainty), *_domain_parts(domain)],
            _share(domain.energy, domain.certainty, total) if domain.in_cover else "part",
            _gap(domain),
        )
        for domain in extract.domains
    ]
    cover = [domain for domain in extract.domains if domain.in_cover]
    worst = max(worst_provenance(cover).values(), key=lambda one: one.rank, default="")
    parts = [
        (sum(part for part, _ in column), Certainty.of_sum(one for _, one in column))
        for column in zip(*filter(None, map(_domain_parts, cover)), strict=True)
    ] or [(0, Certainty.KNOWN)] * 3
    whole = total, Certainty.of_sum(domain.certainty for domain in cover)
    rows.append(_DomainRow("total", "", worst, [whole, *parts], share(total, total)))
    columns = [
        TableColumn("domain", attrgetter("name"), left=True),
        TableColumn("type", attrgetter("hw_type"), left=True),
        TableColumn("provenance", attrgetter("provenance"), left=True),
        TableColumn("energy", lambda row: row.energy(0, unit)),
        TableColumn("consumers", lambda row: row.energy(1, unit)),
        TableColumn("idle", lambda row: row.energy(2, unit)),
        TableColumn("unattributed", lambda row: row.energy(3, unit)),
        TableColumn("share", attrgetter("share")),
        *_footprint_columns(extract.weightings, total, lambda row: row.energies[0]),
        TableColumn("gap", attrgetter("gap")),
    ]
    return table_lines(columns, rows, max_width=_WIDEST)


def _domain_parts(domain: DomainTotal) -> Sequence[tuple[int, Certainty]]:
    """Consumers, idle and unattributed energy with their certainty; none if not attributed."""
    if not domain.attributed:
        return ()
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


def _footprint_columns(
    asked: Sequence[Weighting], total: int, energy_of: Callable[[Any], tuple[int, Certainty]]
) -> Iterator[TableColumn]:
    """The cost of rows, with the digits that their total needs; none without rates."""

    def cell(place: int, size: int, digits: int, row: Any) -> str:
        """``"0.034"``; ``"≥ 0.034"`` if rate or energy of a part are unknown; a dash if of all."""
        energy, certainty = energy_of(row)
        weight = rated_parts(energy, asked)[place]
        certainty = Certainty.LOWER_BOUND if weight.unknown else certainty
        return _marked(f"{weight.billionths / size:.{digits}f}", energy - weight.unknown, certainty)

    for place, scale in enumerate(map(_scale, asked, rated_parts(total, asked))):
        title, size, digits = scale
        yield TableColumn(title, partial(cell, place, size, digits))


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
