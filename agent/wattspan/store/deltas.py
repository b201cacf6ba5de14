"""What was spent between two closings of the same books. Pure.

The totals of a ledger only rise, so no difference is negative. Where one did fall the books were
begun anew, and what they show now is what was spent since. Detail never outweighs the whole: if
names claim more than their domains gave, they are dropped, and the whole stands without names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from wattspan.model import (
    Domain,
    DomainAccount,
    GapReason,
    HwType,
    Opening,
    Payer,
    ProcessRow,
)
from wattspan.store.span_deltas import SpanName, Use, spans_between

PROCESS = "process"
"""The kind of an owner that is a command; every other kind is a GroupKind."""


class Owner(NamedTuple):
    """In whose name energy is kept: a command in a group, a group, or the rest of a kind."""

    kind: str
    hw_type: HwType
    name: str
    group: str = ""  # of a command: the name of its most specific group
    rest: bool = False  # all that have no name of their own here

    @classmethod
    def others(cls, kind: str, hw_type: HwType) -> Owner:
        return cls(kind, hw_type, "", rest=True)


@dataclass(frozen=True, slots=True)
class Spent:
    """What one domain spent; ``energy == consumers + idle + unattributed`` if it is attributed."""

    domain: Domain
    energy: int
    consumers: int
    idle: int
    unattributed: int
    gaps: Mapping[GapReason, int]

    def __bool__(self) -> bool:
        return bool(self.energy or self.gaps)


@dataclass(frozen=True, slots=True)
class Delta:
    """What was spent in one stretch of time that ended at Unix time ``wall``.

    For each hardware type the owners of kind ``process`` sum to the consumers of the domains;
    those of every other kind sum to no more. What ``spans`` spent may be older than the stretch.
    """

    wall: int
    domains: tuple[Spent, ...]
    owners: Mapping[Owner, int]
    spans: Mapping[SpanName, Use] = field(default_factory=dict)


def between(earlier: Opening | None, later: Opening) -> Delta:
    """What was spent from ``earlier`` to ``later``; from the very beginning if it is None."""
    before = {account.domain.id: account for account in earlier.accounts} if earlier else {}
    domains = tuple(
        spent
        for account in later.accounts
        if (spent := _spent(before.get(account.domain.id), account))
    )
    consumers: dict[HwType, int] = {}
    for spent in domains:
        kind = spent.domain.hw_type
        consumers[kind] = consumers.get(kind, 0) + spent.consumers
    owners = _processes(earlier, later, consumers)
    owners.update(_groups(earlier, later, consumers))
    return Delta(later.at.wall, domains, owners, spans_between(earlier, later))


def _spent(before: DomainAccount | None, after: DomainAccount) -> Spent:
    if before is None or after.energy < before.energy:
        before = DomainAccount(after.domain)
    energy = after.energy - before.energy
    consumers = after.consumers - before.consumers
    idle = after.idle - before.idle
    unattributed = after.unattributed - before.unattributed
    if not after.attributed:
        consumers = idle = unattributed = 0
    elif min(consumers, idle, unattributed) < 0 or consumers + idle + unattributed != energy:
        consumers, idle, unattributed = 0, 0, energy
    gaps = {
        reason: rise
        for reason, total in after.gaps.items()
        if (rise := _rise(before.gaps.get(reason, 0), total))
    }
    return Spent(after.domain, energy, consumers, idle, unattributed, gaps)


def _rise(before: int, after: int) -> int:
    return after - before if after >= before else after


def _processes(
    earlier: Opening | None, later: Opening, consumers: Mapping[HwType, int]
) -> dict[Owner, int]:
    """The listed by name, and as the rest what their domains' consumers spent besides.

    The rest is found by subtraction: it holds the unlisted, and the last of those that were
    listed and are no more, whose own last reading nobody saw.
    """
    before: dict[Payer, ProcessRow] = {}
    if earlier is not None and earlier.boot_id == later.boot_id:
        before = {row.info.payer: row for row in earlier.processes}
    named: dict[Owner, int] = {}
    for row in later.processes:
        old = before.get(row.info.payer)
        for kind, energy in row.energy.items():
            if rise := _rise(old.energy.get(kind, 0) if old else 0, energy):
                owner = Owner(PROCESS, kind, row.info.command, row.info.group)
                named[owner] = named.get(owner, 0) + rise
    named = _credible(named, consumers)
    for kind, whole in consumers.items():
        if rest := whole - sum(e for owner, e in named.items() if owner.hw_type is kind):
            named[Owner.others(PROCESS, kind)] = rest
    return named


def _groups(
    earlier: Opening | None, later: Opening, consumers: Mapping[HwType, int]
) -> dict[Owner, int]:
    before = {row.group: row.energy for row in earlier.groups} if earlier else {}
    named: dict[Owner, int] = {}
    for row in later.groups:
        old = before.get(row.group, {})
        for kind, energy in row.energy.items():
            if rise := _rise(old.get(kind, 0), energy):
                named[Owner(row.group.kind, kind, row.group.name)] = rise
    return _credible(named, consumers)


def _credible(named: dict[Owner, int], consumers: Mapping[HwType, int]) -> dict[Owner, int]:
    """``named`` without those kinds and types that claim more than there was."""
    claimed: dict[tuple[str, HwType], int] = {}
    for owner, energy in named.items():
        key = owner.kind, owner.hw_type
        claimed[key] = claimed.get(key, 0) + energy
    return {
        owner: energy
        for owner, energy in named.items()
        if claimed[owner.kind, owner.hw_type] <= consumers.get(owner.hw_type, 0)
    }
