"""Lines of a report from sums of the history; each breakdown has the same total. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from wattspan.model import Certainty, GroupKind, HwType, Provenance, service_label
from wattspan.storage.deltas import (
    MODEL,
    PROCESS,
    REST_OF_MODELS,
    REST_OF_SPANS,
    SPAN,
    EnergyOwner,
    SpanName,
    SpanUsage,
    UsageRole,
    total_usage,
)
from wattspan.storage.query import DomainTotal, HistoryExtract


class LineRole(StrEnum):
    """Role of a line."""

    NAMED = "named"  # a command, a group or a kind of groups
    OTHER = "other"  # names beyond the limit of a bucket or of the report
    OUTSIDE = "outside"  # consumers in no group of the kind, or outside of spans
    EARLIER = "earlier"  # negative: earlier energy of spans or requests of this time
    IDLE = "idle"
    UNATTRIBUTED = "unattributed"
    COUNTED = "counted"  # domains with counted, unattributed energy
    TOTAL = "total"


@dataclass(frozen=True, slots=True)
class BreakdownLine:
    """Energy of one name, by hardware type in microjoules."""

    role: LineRole
    kind: str  # of its section; "" for idle, unattributed, counted, total
    name: str
    energy: Mapping[HwType, int]
    group: str = ""  # of a span or a model: its service
    usage: SpanUsage | None = None  # of a span or a model: calls, time and tokens
    certainty: Mapping[HwType, Certainty] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.energy.values())

    @property
    def total_certainty(self) -> Certainty:
        """The certainty of ``total``; a type without known energy makes it a lower bound."""
        return Certainty.of_sum(self.certainty.values()) if self.certainty else Certainty.KNOWN


@dataclass(frozen=True, slots=True)
class BreakdownSection:
    """One breakdown of the consumers' energy: the lines sum to it."""

    kind: str
    lines: tuple[BreakdownLine, ...]


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Each section plus ``unattributed`` sums to ``total``, the energy of the cover."""

    sections: tuple[BreakdownSection, ...]
    unattributed: tuple[BreakdownLine, ...]
    total: BreakdownLine
    provenance: Mapping[HwType, Provenance]


def break_down(extract: HistoryExtract, kinds: Iterable[str], *, limit: int = 0) -> Breakdown:
    """Return a section for each of ``kinds``, with at most ``limit`` lines, largest first.

    With a limit of 0 every stored name has a line.
    """
    cover = [domain for domain in extract.domains if domain.in_cover]
    consumers = _sum((d.hw_type, d.consumers) for d in cover)
    sections = (
        _span_section(extract.spans, _SPAN_KINDS[kind], consumers, limit)
        if kind in _SPAN_KINDS
        else _section(extract.owners, kind, consumers, limit)
        for kind in kinds
    )
    certainty = _certainty((d.hw_type, d.consumers_certainty) for d in cover if d.attributed)
    return Breakdown(
        sections=tuple(
            BreakdownSection(
                section.kind,
                tuple(
                    line if line.role is LineRole.EARLIER else replace(line, certainty=certainty)
                    for line in section.lines
                ),
            )
            for section in sections
            if section is not None
        ),
        unattributed=tuple(line for line in _unattributed_lines(cover) if line.energy),
        total=BreakdownLine(
            LineRole.TOTAL,
            "",
            "total",
            _sum((d.hw_type, d.energy) for d in cover),
            certainty=_certainty((d.hw_type, d.certainty) for d in cover),
        ),
        provenance=worst_provenance(cover),
    )


def worst_provenance(domains: Iterable[DomainTotal]) -> dict[HwType, Provenance]:
    """Return the provenance of a sum over each hardware type: the worst of its parts."""
    worst: dict[HwType, Provenance] = {}
    for domain in domains:
        known = worst.setdefault(domain.hw_type, domain.provenance)
        worst[domain.hw_type] = known.worse(domain.provenance)
    return worst


def _certainty(parts: Iterable[tuple[HwType, Certainty]]) -> dict[HwType, Certainty]:
    """The certainty of sums by hardware type."""
    found: dict[HwType, list[Certainty]] = {}
    for hw_type, certainty in parts:
        found.setdefault(hw_type, []).append(certainty)
    return {hw_type: Certainty.of_sum(each) for hw_type, each in found.items()}


def kind_totals(breakdown: Breakdown) -> Breakdown:
    """Return each section reduced to the sum of its names and the energy outside of them."""
    return Breakdown(
        tuple(
            BreakdownSection(
                section.kind,
                (
                    BreakdownLine(
                        LineRole.NAMED,
                        section.kind,
                        f"in a {section.kind}",
                        _sum(_pairs(x for x in section.lines if x.role is not LineRole.OUTSIDE)),
                        certainty=section.lines[0].certainty if section.lines else {},
                    ),
                    *(line for line in section.lines if line.role is LineRole.OUTSIDE),
                ),
            )
            for section in breakdown.sections
        ),
        breakdown.unattributed,
        breakdown.total,
        breakdown.provenance,
    )


def _section(
    owners: Mapping[EnergyOwner, int], kind: str, consumers: Mapping[HwType, int], limit: int
) -> BreakdownSection | None:
    named: dict[tuple[str, str], dict[HwType, int]] = {}
    rest: dict[HwType, int] = {}
    for owner, energy in owners.items():
        if owner.kind == kind:
            row = rest if owner.rest else named.setdefault((owner.name, owner.group), {})
            row[owner.hw_type] = row.get(owner.hw_type, 0) + energy
    if not named and not rest:
        return None
    lines, beyond = _largest_lines(
        (
            BreakdownLine(LineRole.NAMED, kind, name, row, group)
            for (name, group), row in named.items()
        ),
        limit,
    )
    if other := _sum([*rest.items(), *_pairs(beyond)]):
        lines.append(BreakdownLine(LineRole.OTHER, kind, f"other {PLURAL[kind]}", other))
    if outside := _remaining(consumers, lines):
        lines.append(BreakdownLine(LineRole.OUTSIDE, kind, f"in no {kind}", outside))
    return BreakdownSection(kind, tuple(lines))


class _SpanKind(NamedTuple):
    """The rows of span energy that divide the energy of consumers in one section."""

    kind: str
    named: UsageRole
    rest: SpanName
    without: str  # the name of the energy in none of its rows


_SPAN_KINDS = {
    SPAN: _SpanKind(SPAN, UsageRole.NAMED, REST_OF_SPANS, "without spans"),
    MODEL: _SpanKind(MODEL, UsageRole.MODEL, REST_OF_MODELS, "without requests"),
}


def _span_section(
    spans: Mapping[SpanName, SpanUsage],
    of: _SpanKind,
    consumers: Mapping[HwType, int],
    limit: int,
) -> BreakdownSection | None:
    spans = {
        n: use for n, use in spans.items() if (n.role is UsageRole.MODEL) == (of.kind == MODEL)
    }
    if not spans:
        return None
    service = _service_of(spans)
    lines, beyond = _largest_lines(
        (
            BreakdownLine(LineRole.NAMED, of.kind, name.name, use.energy, service(name), use)
            for name, use in spans.items()
            if name.role is of.named and name != of.rest
        ),
        limit,
    )
    if rest := total_usage(
        [spans.get(of.rest, SpanUsage()), *(line.usage or SpanUsage() for line in beyond)]
    ):
        other = f"other {PLURAL[of.kind]}"
        lines.append(BreakdownLine(LineRole.OTHER, of.kind, other, rest.energy, usage=rest))
    if of.kind == SPAN:
        lines += _outside_lines(spans, limit)
    left = _remaining(consumers, lines)
    if without := {hw_type: energy for hw_type, energy in left.items() if energy > 0}:
        lines.append(BreakdownLine(LineRole.OUTSIDE, of.kind, of.without, without))
    if earlier := {hw_type: energy for hw_type, energy in left.items() if energy < 0}:
        lines.append(BreakdownLine(LineRole.EARLIER, of.kind, "of these, spent before", earlier))
    return BreakdownSection(of.kind, tuple(lines))


def _service_of(spans: Iterable[SpanName]) -> Callable[[SpanName], str]:
    """The label of the service of a span: with its owner where services have several owners."""
    if len({name.owner for name in spans if name.owner}) > 1:
        return lambda name: service_label(name.service, name.owner)
    return lambda name: name.service


def _outside_lines(spans: Mapping[SpanName, SpanUsage], limit: int) -> Iterable[BreakdownLine]:
    """The energy of services outside of their spans."""
    service = _service_of(spans)
    lines, others = _largest_lines(
        (
            BreakdownLine(LineRole.OUTSIDE, SPAN, "outside spans", use.energy, service(name))
            for name, use in spans.items()
            if name.role is UsageRole.OUTSIDE
        ),
        limit,
    )
    if others:
        energy = _sum(_pairs(others))
        lines.append(BreakdownLine(LineRole.OUTSIDE, SPAN, "outside spans", energy, "other"))
    return lines


def _largest_lines(
    lines: Iterable[BreakdownLine], limit: int
) -> tuple[list[BreakdownLine], list[BreakdownLine]]:
    """Return the largest lines, at most ``limit`` unless that is 0, and the other lines."""
    found = sorted(lines, key=lambda line: (-line.total, line.name, line.group))
    return found[: limit or None], found[limit:] if limit else []


PLURAL: Mapping[str, str] = {PROCESS: "processes"} | {
    kind: f"{kind}s" for kind in (*GroupKind, SPAN, MODEL)
}


def _unattributed_lines(cover: Sequence[DomainTotal]) -> Iterable[BreakdownLine]:
    attributed = [domain for domain in cover if domain.attributed]
    counted = [domain for domain in cover if not domain.attributed]
    yield BreakdownLine(
        LineRole.IDLE,
        "",
        "idle",
        _sum((d.hw_type, d.idle) for d in attributed),
        certainty=_certainty((d.hw_type, d.idle_certainty) for d in attributed),
    )
    yield BreakdownLine(
        LineRole.UNATTRIBUTED,
        "",
        "unattributed",
        _sum((d.hw_type, d.unattributed) for d in attributed),
        certainty=_certainty((d.hw_type, d.certainty) for d in attributed),
    )
    yield BreakdownLine(
        LineRole.COUNTED,
        "",
        "counted only",
        _sum((d.hw_type, d.energy) for d in counted),
        certainty=_certainty((d.hw_type, d.certainty) for d in counted),
    )


def _pairs(lines: Iterable[BreakdownLine]) -> Iterable[tuple[HwType, int]]:
    return (pair for line in lines for pair in line.energy.items())


def _remaining(
    consumers: Mapping[HwType, int], lines: Iterable[BreakdownLine]
) -> dict[HwType, int]:
    """Return the consumers' energy less that of ``lines``."""
    return _sum([*consumers.items(), *((kind, -energy) for kind, energy in _pairs(lines))])


def _sum(pairs: Iterable[tuple[HwType, int]]) -> dict[HwType, int]:
    """Return sums by hardware type, without zeros."""
    sums: dict[HwType, int] = {}
    for hw_type, energy in pairs:
        sums[hw_type] = sums.get(hw_type, 0) + energy
    return {hw_type: energy for hw_type, energy in sums.items() if energy}
