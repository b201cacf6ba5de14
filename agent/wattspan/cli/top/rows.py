"""Snapshots as rows to show: sorted, filtered, and with their sums.

A snapshot as plain facts for JSON: joules and watts as numbers, unknown as null.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from wattspan.cli.top.controls import SortKey, ViewOptions
from wattspan.model import (
    Consumer,
    DomainAccount,
    GroupRow,
    HwType,
    Milliwatts,
    ProcessRow,
    RatedEnergy,
    Snapshot,
    SpanAccounts,
    SpanRow,
)
from wattspan.tuning.serialization import accounts_to_json


class ConsumerRow(NamedTuple):
    """One line of a table of spenders. ``power`` lacks a type whose power is not known now."""

    name: str
    detail: str  # of a process its group, of a group its kind
    pid: str
    power: Mapping[HwType, int]
    energy: Mapping[HwType, int]
    alive: bool = True

    @property
    def watts(self) -> Milliwatts | None:
        return Milliwatts(sum(self.power.values())) if self.power else None

    @property
    def joules(self) -> int:
        return sum(self.energy.values())


def process_rows(snapshot: Snapshot, options: ViewOptions) -> list[ConsumerRow]:
    return _select_rows(map(_process_row, snapshot.processes), options)


def group_rows(snapshot: Snapshot, options: ViewOptions) -> list[ConsumerRow]:
    return _select_rows(map(_group_row, snapshot.groups), options)


def span_rows(snapshot: Snapshot, options: ViewOptions) -> list[SpanRow]:
    """Without watts: a span's joules are known when it has ended, so they come in lumps."""
    wanted = options.filter.casefold()
    kept = [
        row
        for row in snapshot.spans.rows
        if wanted in row.name.casefold() or wanted in row.service.casefold()
    ]
    kept.sort(key=lambda row: (row.name.casefold(), row.service.casefold()))
    if options.sort is not SortKey.NAME:
        kept.sort(key=lambda row: sum(row.energy.values()), reverse=True)
    return kept


def _process_row(row: ProcessRow) -> ConsumerRow:
    payer = row.info.payer
    pid = str(payer.pid) if isinstance(payer, Consumer) else ""
    return ConsumerRow(row.info.command, row.info.group, pid, row.power, row.energy, row.alive)


def _group_row(row: GroupRow) -> ConsumerRow:
    return ConsumerRow(row.group.name, row.group.kind, "", row.power, row.energy)


T = TypeVar("T")

_ORDERS: Mapping[SortKey, Callable[[ConsumerRow], tuple[object, ...]]] = {
    SortKey.WATTS: lambda row: (-1 if row.watts is None else row.watts, row.joules),
    SortKey.JOULES: lambda row: (row.joules,),
    SortKey.NAME: lambda row: (row.name.casefold(),),
}


def _select_rows(rows: Iterable[ConsumerRow], options: ViewOptions) -> list[ConsumerRow]:
    wanted = options.filter.casefold()
    kept = [row for row in rows if any(wanted in text.casefold() for text in row[:3])]
    # a stable order among equals, so that lines do not dance
    kept.sort(key=lambda row: (row.name, row.pid))
    kept.sort(key=_ORDERS[options.sort], reverse=options.sort is not SortKey.NAME)
    return kept


def hw_types(snapshot: Snapshot) -> list[HwType]:
    """The hardware types that anybody can be charged for."""
    found = {account.domain.hw_type for account in snapshot.domains if account.attributed}
    return [kind for kind in HwType if kind in found]


class NestedDomain(NamedTuple):
    """A domain's account, and how deep it lies within others."""

    account: DomainAccount
    depth: int


def device_tree(snapshot: Snapshot, options: ViewOptions) -> list[NestedDomain]:
    """Domains with those they contain below them; sorted within each level by name only."""
    wanted = options.filter.casefold()
    known = {account.domain.id for account in snapshot.domains}
    children: dict[str | None, list[DomainAccount]] = {}
    for account in snapshot.domains:
        parent = account.domain.parent
        children.setdefault(parent if parent in known else None, []).append(account)
    tree: list[NestedDomain] = []

    def descend(parent: str | None, depth: int) -> None:
        for account in sorted(children.pop(parent, ()), key=_device_order):
            tree.append(NestedDomain(account, depth))
            descend(account.domain.id, depth + 1)

    descend(None, 0)
    for stray in list(children):  # a circle of parents: shown, not followed
        tree += [NestedDomain(account, 0) for account in children[stray]]
    return [nested for nested in tree if wanted in _device_text(nested.account)]


def _device_order(account: DomainAccount) -> tuple[int, str, str]:
    domain = account.domain
    return list(HwType).index(domain.hw_type), domain.name, domain.id


def _device_text(account: DomainAccount) -> str:
    domain = account.domain
    return f"{domain.hw_type} {domain.name} {domain.id} {domain.provenance}".casefold()


class HostTotals(NamedTuple):
    """The cover's sum. ``power`` is None while that of any member is unknown."""

    power: Milliwatts | None
    energy: int
    consumers: int
    idle: int
    unattributed: int


def host_totals(snapshot: Snapshot) -> HostTotals:
    present = [account for account in snapshot.cover if account.present]
    powers = [account.power for account in present]
    known = [power for power in powers if power is not None]
    return HostTotals(
        power=Milliwatts(sum(known)) if powers and len(known) == len(powers) else None,
        energy=sum(account.energy for account in snapshot.cover),
        consumers=sum(account.consumers for account in snapshot.cover),
        idle=sum(account.idle for account in snapshot.cover),
        unattributed=sum(account.unattributed for account in snapshot.cover),
    )


def snapshot_facts(snapshot: Snapshot, options: ViewOptions | None = None) -> dict[str, Any]:
    """Everything the view shows; rows sorted and filtered as ``options`` says."""
    chosen = options or ViewOptions()
    total = host_totals(snapshot)
    return {
        "host": snapshot.host,
        "at_unix_seconds": snapshot.at.wall / 1e9,
        "emulated": snapshot.emulated,
        "power_watts": _watts(total.power),
        "energy_joules": _joules(total.energy),
        "idle_joules": _joules(total.idle),
        "unattributed_joules": _joules(total.unattributed),
        "cost": _footprint_facts(snapshot.footprint.cost),
        "carbon": _footprint_facts(snapshot.footprint.carbon),
        "domains": [_domain_facts(account) for account in snapshot.domains],
        "groups": [_row_facts(row, "kind") for row in group_rows(snapshot, chosen)],
        "processes": [_process_facts(row) for row in process_rows(snapshot, chosen)],
        "other_joules": _by_type(snapshot.other),
        "ended_joules": _by_type(snapshot.retired),
        "spans": [_span_facts(row) for row in span_rows(snapshot, chosen)],
        "outside_spans_joules": _outside_spans_facts(snapshot.spans),
        "tuning": accounts_to_json(snapshot.tuning),
        "failures": [str(failure) for health in snapshot.health for failure in health.failures],
    }


def _footprint_facts(weighed: RatedEnergy | None) -> dict[str, Any] | None:
    if weighed is None:
        return None
    return {
        "unit": weighed.unit,
        "origin": weighed.origin,
        "per_kilowatt_hour": None if weighed.rate is None else weighed.rate / 1e9,
        "total": weighed.total / 1e9,
        "unknown_joules": _joules(weighed.unknown),
    }


def _domain_facts(account: DomainAccount) -> dict[str, Any]:
    domain = account.domain
    split = {
        "consumers_joules": _joules(account.consumers),
        "idle_joules": _joules(account.idle),
        "unattributed_joules": _joules(account.unattributed),
    }
    return {
        "hw_id": domain.id,
        "hw_type": domain.hw_type,
        "hw_name": domain.name,
        "hw_parent": domain.parent,
        "source": domain.source,
        "provenance": domain.provenance,
        "in_cover": domain.in_cover,
        "present": account.present,
        "method": domain.method,
        "power_watts": _watts(account.power),
        "energy_joules": _joules(account.energy),
        **(split if account.attributed else dict.fromkeys(split)),
        "pending_joules": _joules(account.pending),
        "gap_seconds": {reason: time / 1e9 for reason, time in account.gaps.items()},
    }


def _process_facts(row: ConsumerRow) -> dict[str, Any]:
    pid = int(row.pid) if row.pid else None
    return {"pid": pid, "alive": row.alive, **_row_facts(row, "group")}


def _span_facts(row: SpanRow) -> dict[str, Any]:
    energy, made = sum(row.energy.values()), row.tokens.get("output", 0)
    return {
        "service": row.service,
        "name": row.name,
        "calls": row.count,
        "seconds": row.time / 1e9,
        "energy_joules": _joules(energy),
        "energy_joules_by_type": _by_type(row.energy),
        "joules_per_call": energy / 1e6 / row.count if row.count else None,
        "tokens": dict(row.tokens),
        "joules_per_output_token": energy / 1e6 / made if made else None,
    }


def _outside_spans_facts(spans: SpanAccounts) -> dict[str, dict[str, float]]:
    """What each service spent while none of its spans was open."""
    found: dict[str, dict[str, float]] = {}
    for (service, kind), energy in spans.outside.items():
        found.setdefault(service, {})[kind] = _joules(energy)
    return found


def _row_facts(row: ConsumerRow, detail: str) -> dict[str, Any]:
    return {
        "name": row.name,
        detail: row.detail,
        "power_watts": _watts(row.watts),
        "energy_joules": _joules(row.joules),
        "power_watts_by_type": {kind: power / 1e3 for kind, power in row.power.items()},
        "energy_joules_by_type": _by_type(row.energy),
    }


def _by_type(energy: Mapping[HwType, int]) -> dict[str, float]:
    return {kind: _joules(amount) for kind, amount in energy.items()}


def _joules(microjoules: int) -> float:
    return microjoules / 1e6


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1e3
