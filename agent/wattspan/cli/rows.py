"""Snapshots as rows to show: sorted, filtered, and with their sums."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeVar

from wattspan.cli.controls import Options, Sort
from wattspan.model import (
    Consumer,
    DomainAccount,
    GroupRow,
    HwType,
    Milliwatts,
    ProcessRow,
    Snapshot,
    SpanRow,
)


class Row(NamedTuple):
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


def process_rows(snapshot: Snapshot, options: Options) -> list[Row]:
    return _chosen(map(_process, snapshot.processes), options)


def group_rows(snapshot: Snapshot, options: Options) -> list[Row]:
    return _chosen(map(_group, snapshot.groups), options)


def span_rows(snapshot: Snapshot, options: Options) -> list[SpanRow]:
    """Without watts: a span's joules are known when it has ended, so they come in lumps."""
    wanted = options.filter.casefold()
    kept = [
        row
        for row in snapshot.spans.rows
        if wanted in row.name.casefold() or wanted in row.service.casefold()
    ]
    kept.sort(key=lambda row: (row.name.casefold(), row.service.casefold()))
    if options.sort is not Sort.NAME:
        kept.sort(key=lambda row: sum(row.energy.values()), reverse=True)
    return kept


def _process(row: ProcessRow) -> Row:
    payer = row.info.payer
    pid = str(payer.pid) if isinstance(payer, Consumer) else ""
    return Row(row.info.command, row.info.group, pid, row.power, row.energy, row.alive)


def _group(row: GroupRow) -> Row:
    return Row(row.group.name, row.group.kind, "", row.power, row.energy)


T = TypeVar("T")

_ORDERS: Mapping[Sort, Callable[[Row], tuple[object, ...]]] = {
    Sort.WATTS: lambda row: (-1 if row.watts is None else row.watts, row.joules),
    Sort.JOULES: lambda row: (row.joules,),
    Sort.NAME: lambda row: (row.name.casefold(),),
}


def _chosen(rows: Iterable[Row], options: Options) -> list[Row]:
    wanted = options.filter.casefold()
    kept = [row for row in rows if any(wanted in text.casefold() for text in row[:3])]
    # a stable order among equals, so that lines do not dance
    kept.sort(key=lambda row: (row.name, row.pid))
    kept.sort(key=_ORDERS[options.sort], reverse=options.sort is not Sort.NAME)
    return kept


def hw_types(snapshot: Snapshot) -> list[HwType]:
    """The hardware types that anybody can be charged for."""
    found = {account.domain.hw_type for account in snapshot.domains if account.attributed}
    return [kind for kind in HwType if kind in found]


class Nested(NamedTuple):
    """A domain's account, and how deep it lies within others."""

    account: DomainAccount
    depth: int


def device_tree(snapshot: Snapshot, options: Options) -> list[Nested]:
    """Domains with those they contain below them; sorted within each level by name only."""
    wanted = options.filter.casefold()
    known = {account.domain.id for account in snapshot.domains}
    children: dict[str | None, list[DomainAccount]] = {}
    for account in snapshot.domains:
        parent = account.domain.parent
        children.setdefault(parent if parent in known else None, []).append(account)
    tree: list[Nested] = []

    def descend(parent: str | None, depth: int) -> None:
        for account in sorted(children.pop(parent, ()), key=_device_order):
            tree.append(Nested(account, depth))
            descend(account.domain.id, depth + 1)

    descend(None, 0)
    for stray in list(children):  # a circle of parents: shown, not followed
        tree += [Nested(account, 0) for account in children[stray]]
    return [nested for nested in tree if wanted in _device_text(nested.account)]


def _device_order(account: DomainAccount) -> tuple[int, str, str]:
    domain = account.domain
    return list(HwType).index(domain.hw_type), domain.name, domain.id


def _device_text(account: DomainAccount) -> str:
    domain = account.domain
    return f"{domain.hw_type} {domain.name} {domain.id} {domain.provenance}".casefold()


class Host(NamedTuple):
    """The cover's sum. ``power`` is None while that of any member is unknown."""

    power: Milliwatts | None
    energy: int
    consumers: int
    idle: int
    unattributed: int


def host(snapshot: Snapshot) -> Host:
    present = [account for account in snapshot.cover if account.present]
    powers = [account.power for account in present]
    known = [power for power in powers if power is not None]
    return Host(
        power=Milliwatts(sum(known)) if powers and len(known) == len(powers) else None,
        energy=sum(account.energy for account in snapshot.cover),
        consumers=sum(account.consumers for account in snapshot.cover),
        idle=sum(account.idle for account in snapshot.cover),
        unattributed=sum(account.unattributed for account in snapshot.cover),
    )
