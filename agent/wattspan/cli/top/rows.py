"""The rows of the view: filtered, sorted, and as facts for JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from wattspan.api.snapshot import DomainEntry, Joules, SnapshotDocument, SpanEntry, Watts
from wattspan.cli.top.controls import SortKey, ViewOptions
from wattspan.model import HwType


class ConsumerRow(NamedTuple):
    """One process or group. ``watts_by_type`` lacks a type whose power is unknown."""

    name: str
    detail: str  # the group of a process, the kind of a group
    pid: str
    watts_by_type: Watts
    joules_by_type: Joules
    alive: bool = True

    @property
    def watts(self) -> float | None:
        return sum(self.watts_by_type.values()) if self.watts_by_type else None

    @property
    def joules(self) -> float:
        return sum(self.joules_by_type.values())


def process_rows(document: SnapshotDocument, options: ViewOptions) -> list[ConsumerRow]:
    rows = (
        ConsumerRow(
            one.name,
            one.group,
            "" if one.pid is None else str(one.pid),
            one.power_watts,
            one.energy_joules,
            one.alive,
        )
        for one in document.processes
    )
    return _select_rows(rows, options)


def group_rows(document: SnapshotDocument, options: ViewOptions) -> list[ConsumerRow]:
    rows = (
        ConsumerRow(one.name, one.kind, "", one.power_watts, one.energy_joules)
        for one in document.groups
    )
    return _select_rows(rows, options)


def span_rows(document: SnapshotDocument, options: ViewOptions) -> list[SpanEntry]:
    """Spans have no watts: the energy of a span is known when it has ended."""
    wanted = options.filter.casefold()
    rows = [
        row
        for row in document.spans.names
        if wanted in row.name.casefold() or wanted in row.service.casefold()
    ]
    rows.sort(key=lambda row: (row.name.casefold(), row.service.casefold()))
    if options.sort is not SortKey.NAME:
        rows.sort(key=lambda row: sum(row.energy_joules.values()), reverse=True)
    return rows


_ORDERS: Mapping[SortKey, Callable[[ConsumerRow], tuple[object, ...]]] = {
    SortKey.WATTS: lambda row: (-1 if row.watts is None else row.watts, row.joules),
    SortKey.JOULES: lambda row: (row.joules,),
    SortKey.NAME: lambda row: (row.name.casefold(),),
}


def _select_rows(rows: Iterable[ConsumerRow], options: ViewOptions) -> list[ConsumerRow]:
    wanted = options.filter.casefold()
    selected = [row for row in rows if any(wanted in text.casefold() for text in row[:3])]
    selected.sort(key=lambda row: (row.name, row.pid))  # a stable order among equals
    selected.sort(key=_ORDERS[options.sort], reverse=options.sort is not SortKey.NAME)
    return selected


def hw_types(document: SnapshotDocument) -> list[HwType]:
    """The hardware types whose energy is attributed."""
    found = {domain.hw_type for domain in document.domains if domain.attributed}
    return [kind for kind in HwType if kind in found]


class NestedDomain(NamedTuple):
    domain: DomainEntry
    depth: int


def device_tree(document: SnapshotDocument, options: ViewOptions) -> list[NestedDomain]:
    """Each domain, followed by the domains that it contains; siblings are sorted by name."""
    wanted = options.filter.casefold()
    known = {domain.hw_id for domain in document.domains}
    children: dict[str | None, list[DomainEntry]] = {}
    for domain in document.domains:
        parent = domain.hw_parent if domain.hw_parent in known else None
        children.setdefault(parent, []).append(domain)
    tree: list[NestedDomain] = []

    def descend(parent: str | None, depth: int) -> None:
        for domain in sorted(children.pop(parent, ()), key=_device_order):
            tree.append(NestedDomain(domain, depth))
            descend(domain.hw_id, depth + 1)

    descend(None, 0)
    for cyclic in children.values():  # domains that are each other's parents
        tree += [NestedDomain(domain, 0) for domain in cyclic]
    return [nested for nested in tree if wanted in _device_text(nested.domain)]


def _device_order(domain: DomainEntry) -> tuple[int, str, str]:
    return list(HwType).index(domain.hw_type), domain.hw_name, domain.hw_id


def _device_text(domain: DomainEntry) -> str:
    return f"{domain.hw_type} {domain.hw_name} {domain.hw_id} {domain.provenance}".casefold()


def snapshot_facts(
    document: SnapshotDocument, options: ViewOptions | None = None
) -> dict[str, Any]:
    """The JSON output of ``wattspan top``; ``options`` sort and filter the rows."""
    chosen = options or ViewOptions()
    return {
        "host": document.host_name,
        "at_unix_seconds": document.at_unix_ns / 1e9,
        "emulated": document.emulated,
        "power_watts": document.host.power_watts,
        "energy_joules": document.host.energy_joules,
        "idle_joules": document.host.idle_joules,
        "unattributed_joules": document.host.unattributed_joules,
        "cost": msgspec.to_builtins(document.cost),
        "carbon": msgspec.to_builtins(document.carbon),
        "domains": msgspec.to_builtins(document.domains),
        "groups": [_row_facts(row, "kind") for row in group_rows(document, chosen)],
        "processes": [
            {"pid": int(row.pid) if row.pid else None, "alive": row.alive}
            | _row_facts(row, "group")
            for row in process_rows(document, chosen)
        ],
        "other_joules": document.other_joules,
        "ended_joules": document.ended_joules,
        "spans": [_span_facts(row) for row in span_rows(document, chosen)],
        "outside_spans_joules": document.spans.outside_joules,
        "tuning": document.tuning,
        "failures": failures(document),
    }


def failures(document: SnapshotDocument) -> list[str]:
    """The failures of all sources, one sentence each."""
    return [failure for source in document.sources for failure in source.failures]


def _span_facts(row: SpanEntry) -> dict[str, Any]:
    joules, tokens = sum(row.energy_joules.values()), row.tokens.get("output", 0)
    return {
        "service": row.service,
        "name": row.name,
        "calls": row.calls,
        "seconds": row.seconds,
        "energy_joules": joules,
        "energy_joules_by_type": row.energy_joules,
        "joules_per_call": joules / row.calls if row.calls else None,
        "tokens": row.tokens,
        "joules_per_output_token": joules / tokens if tokens else None,
    }


def _row_facts(row: ConsumerRow, detail: str) -> dict[str, Any]:
    return {
        "name": row.name,
        detail: row.detail,
        "power_watts": row.watts,
        "energy_joules": row.joules,
        "power_watts_by_type": row.watts_by_type,
        "energy_joules_by_type": row.joules_by_type,
    }
