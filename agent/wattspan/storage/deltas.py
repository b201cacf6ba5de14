"""What spans spent between two closings of the same books, name by name. Pure.

What was spent between two closings of the same books. Pure.

The totals of a ledger only rise, so no difference is negative. Where one did fall the books were
begun anew, and what they show now is what was spent since. Detail never outweighs the whole: if
names claim more than their domains gave, they are dropped, and the whole stands without names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from wattspan.attribution.top_n import OTHER
from wattspan.model import (
    Checkpoint,
    Domain,
    DomainAccount,
    GapReason,
    HwType,
    Payer,
    ProcessRow,
    SpanRow,
)

SPAN = "span"
"""The kind of a section of a report that is about spans."""

MAX_STORED_INTEGER = 2**61
"""Of seconds and tokens, which spans only claim: two of these still fit a database's integer."""


class SpanRole(StrEnum):
    """What energy is kept for."""

    NAMED = "named"  # the spans of one name in one service
    REST = "rest"  # those of all names that have no account, or no room in the bucket
    OUTSIDE = "outside"  # a service's processes while none of their spans was open


class SpanName(NamedTuple):
    role: SpanRole
    service: str = ""
    name: str = ""


REST_OF_SPANS = SpanName(SpanRole.REST)

_NO_ENERGY: Mapping[HwType, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class SpanUsage:
    """What was done under one name: spans that ended, and what they spent and told of."""

    energy: Mapping[HwType, int] = field(default_factory=lambda: _NO_ENERGY)
    calls: int = 0
    nanoseconds: int = 0
    tokens_in: int = 0
    tokens_out: int = 0

    def __add__(self, other: SpanUsage) -> SpanUsage:
        energy = dict(self.energy)
        for kind, amount in other.energy.items():
            energy[kind] = energy.get(kind, 0) + amount
        return SpanUsage(
            energy,
            self.calls + other.calls,
            min(MAX_STORED_INTEGER, self.nanoseconds + other.nanoseconds),
            min(MAX_STORED_INTEGER, self.tokens_in + other.tokens_in),
            min(MAX_STORED_INTEGER, self.tokens_out + other.tokens_out),
        )

    def only(self, kind: HwType) -> SpanUsage:
        """The same spans, of whose energy only one type is looked at."""
        return replace(self, energy={k: e for k, e in self.energy.items() if k is kind})

    def __bool__(self) -> bool:
        return bool(self.calls or any(self.energy.values()))


def spans_between(earlier: Checkpoint | None, later: Checkpoint) -> dict[SpanName, SpanUsage]:
    """What every name spent; from the very beginning if there are no earlier books.

    Energy is booked when its span has ended and settled, so it may have been spent long before.
    """
    before = {(row.service, row.name): row for row in earlier.spans} if earlier else {}
    found: dict[SpanName, SpanUsage] = {}
    for row in later.spans:
        if use := _span_rise(before.get((row.service, row.name)), row):
            name = SpanName(SpanRole.NAMED, row.service, row.name)
            found[REST_OF_SPANS if (row.service, row.name) == (OTHER, OTHER) else name] = use
    left = earlier.outside if earlier else {}
    for (service, kind), energy in later.outside.items():
        if rise := _increase(left.get((service, kind), 0), energy):
            name = SpanName(SpanRole.OUTSIDE, service)
            found[name] = found.get(name, SpanUsage()) + SpanUsage({kind: rise})
    return found


def total_usage(uses: Iterable[SpanUsage]) -> SpanUsage:
    return sum(uses, SpanUsage())


def _span_rise(before: SpanRow | None, after: SpanRow) -> SpanUsage:
    if before is None or after.count < before.count:  # let go meanwhile, and back at zero
        before = SpanRow(after.service, after.name, {})
    energy = {
        kind: rise
        for kind, amount in after.energy.items()
        if (rise := _increase(before.energy.get(kind, 0), amount))
    }
    tokens = [
        _increase(before.tokens.get(d, 0), after.tokens.get(d, 0)) for d in ("input", "output")
    ]
    return SpanUsage(
        energy, after.count - before.count, _increase(before.time, after.time), *tokens
    )


def _increase(before: int, after: int) -> int:
    return min(MAX_STORED_INTEGER, after - before if after >= before else after)


PROCESS = "process"
"""The kind of an owner that is a command; every other kind is a GroupKind."""


class EnergyOwner(NamedTuple):
    """In whose name energy is kept: a command in a group, a group, or the rest of a kind."""

    kind: str
    hw_type: HwType
    name: str
    group: str = ""  # of a command: the name of its most specific group
    rest: bool = False  # all that have no name of their own here

    @classmethod
    def others(cls, kind: str, hw_type: HwType) -> EnergyOwner:
        return cls(kind, hw_type, "", rest=True)


@dataclass(frozen=True, slots=True)
class DomainDelta:
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
class CheckpointDelta:
    """What was spent in one stretch of time that ended at Unix time ``wall``.

    For each hardware type the owners of kind ``process`` sum to the consumers of the domains;
    those of every other kind sum to no more. What ``spans`` spent may be older than the stretch.
    """

    wall: int
    domains: tuple[DomainDelta, ...]
    owners: Mapping[EnergyOwner, int]
    spans: Mapping[SpanName, SpanUsage] = field(default_factory=dict)


def delta_between(earlier: Checkpoint | None, later: Checkpoint) -> CheckpointDelta:
    """What was spent from ``earlier`` to ``later``; from the very beginning if it is None."""
    before = {account.domain.id: account for account in earlier.accounts} if earlier else {}
    domains = tuple(
        spent
        for account in later.accounts
        if (spent := _domain_delta(before.get(account.domain.id), account))
    )
    consumers: dict[HwType, int] = {}
    for spent in domains:
        kind = spent.domain.hw_type
        consumers[kind] = consumers.get(kind, 0) + spent.consumers
    owners = _processes(earlier, later, consumers)
    owners.update(_groups(earlier, later, consumers))
    return CheckpointDelta(later.at.wall, domains, owners, spans_between(earlier, later))


def _domain_delta(before: DomainAccount | None, after: DomainAccount) -> DomainDelta:
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
    return DomainDelta(after.domain, energy, consumers, idle, unattributed, gaps)


def _rise(before: int, after: int) -> int:
    return after - before if after >= before else after


def _processes(
    earlier: Checkpoint | None, later: Checkpoint, consumers: Mapping[HwType, int]
) -> dict[EnergyOwner, int]:
    """The listed by name, and as the rest what their domains' consumers spent besides.

    The rest is found by subtraction: it holds the unlisted, and the last of those that were
    listed and are no more, whose own last reading nobody saw.
    """
    before: dict[Payer, ProcessRow] = {}
    if earlier is not None and earlier.boot_id == later.boot_id:
        before = {row.info.payer: row for row in earlier.processes}
    named: dict[EnergyOwner, int] = {}
    for row in later.processes:
        old = before.get(row.info.payer)
        for kind, energy in row.energy.items():
            if rise := _rise(old.energy.get(kind, 0) if old else 0, energy):
                owner = EnergyOwner(PROCESS, kind, row.info.command, row.info.group)
                named[owner] = named.get(owner, 0) + rise
    named = _plausible(named, consumers)
    for kind, whole in consumers.items():
        if rest := whole - sum(e for owner, e in named.items() if owner.hw_type is kind):
            named[EnergyOwner.others(PROCESS, kind)] = rest
    return named


def _groups(
    earlier: Checkpoint | None, later: Checkpoint, consumers: Mapping[HwType, int]
) -> dict[EnergyOwner, int]:
    before = {row.group: row.energy for row in earlier.groups} if earlier else {}
    named: dict[EnergyOwner, int] = {}
    for row in later.groups:
        old = before.get(row.group, {})
        for kind, energy in row.energy.items():
            if rise := _rise(old.get(kind, 0), energy):
                named[EnergyOwner(row.group.kind, kind, row.group.name)] = rise
    return _plausible(named, consumers)


def _plausible(
    named: dict[EnergyOwner, int], consumers: Mapping[HwType, int]
) -> dict[EnergyOwner, int]:
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
