"""Energy between two checkpoints of one ledger, by domain, owner and span name. Pure.

Totals of a ledger only rise. A lower total means a restart from zero: the delta is then the later
total. The sum of owners never exceeds the energy of their domains: owners of a kind that claim
more are dropped, and the energy of the domains stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from wattspan.attribution.top_n import OTHER
from wattspan.model import (
    NO_SPLIT,
    Checkpoint,
    Domain,
    DomainAccount,
    GapReason,
    HostRequests,
    HwType,
    InferenceRow,
    Microjoules,
    Payer,
    ProcessRow,
    SpanRow,
    StaticBasis,
    StaticSplit,
)

K = TypeVar("K")

SPAN, MODEL = "span", "model"
"""Kinds of report sections about spans, and about requests to language models."""

MAX_STORED_INTEGER = 2**61
"""Limit of claimed times and tokens: the sum of two still fits an SQLite integer."""


class UsageRole(StrEnum):
    """Role of a row of span energy. Models are another division of the same energy."""

    NAMED = "named"  # spans of one name in one service
    REST = "rest"  # spans of all names without an account or beyond the limit of the bucket
    OUTSIDE = "outside"  # energy of a service's processes outside of spans
    MODEL = "model"  # requests to one language model of one service; "other" is the rest


class SpanName(NamedTuple):
    role: UsageRole
    service: str = ""
    name: str = ""
    owner: str = ""


REST_OF_SPANS = SpanName(UsageRole.REST)
REST_OF_MODELS = SpanName(UsageRole.MODEL, OTHER, OTHER)


class HostPart(NamedTuple):
    """A part of the energy of requests on the whole host, their number and generated tokens."""

    energy: int
    requests: int
    tokens_out: int

    def plus(self, other: HostPart) -> HostPart:
        return HostPart(*(_limited(a + b) for a, b in zip(self, other, strict=True)))


_NO_ENERGY: Mapping[HwType, int] = MappingProxyType({})
_NO_DIVISIONS: Mapping[str, int] = MappingProxyType({})
_NO_SPLITS: Mapping[StaticBasis, StaticSplit] = MappingProxyType({})
_NO_PARTS: Mapping[str, HostPart] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class SpanUsage:
    """Spans of one name that ended: their energy, number, duration and tokens.

    ``divisions`` counts requests to a language model by the DivisionMethod of their energy; the
    method of requests in none of them was not recorded. ``host`` has the parts of the energy on the
    whole host as HostRequests has them, each with the number of its requests.
    """

    energy: Mapping[HwType, int] = field(default_factory=lambda: _NO_ENERGY)
    calls: int = 0
    nanoseconds: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    splits: Mapping[StaticBasis, StaticSplit] = field(default_factory=lambda: _NO_SPLITS)
    divisions: Mapping[str, int] = field(default_factory=lambda: _NO_DIVISIONS)
    host: Mapping[str, HostPart] = field(default_factory=lambda: _NO_PARTS)

    def __add__(self, other: SpanUsage) -> SpanUsage:
        energy = Counter(self.energy)
        energy.update(other.energy)
        return SpanUsage(
            dict(energy),
            self.calls + other.calls,
            min(MAX_STORED_INTEGER, self.nanoseconds + other.nanoseconds),
            min(MAX_STORED_INTEGER, self.tokens_in + other.tokens_in),
            min(MAX_STORED_INTEGER, self.tokens_out + other.tokens_out),
            splits=_sum_of_splits(self.splits, other.splits),
            divisions=Counter(self.divisions) + Counter(other.divisions),
            host=_sum_of_parts(self.host, other.host),
        )

    def only(self, kind: HwType) -> SpanUsage:
        """Return a copy with the energy of one hardware type only."""
        return replace(
            self,
            energy={k: e for k, e in self.energy.items() if k is kind},
            splits=self.splits if kind is HwType.GPU else {},
            host={part: one for part, one in self.host.items() if part == kind},
        )

    def __bool__(self) -> bool:
        return bool(self.calls or any(self.energy.values()))


def total_split(
    splits: Mapping[StaticBasis, StaticSplit],
) -> tuple[int, int, StaticBasis]:
    """Static and dynamic energy of at least one basis, and the least certain one."""
    basis = next(iter(splits))
    for other in splits:
        basis = basis.worse(other)
    static, dynamic = map(sum, zip(*splits.values(), strict=True))
    return static, dynamic, basis


def _sum_of_splits(
    one: Mapping[StaticBasis, StaticSplit], other: Mapping[StaticBasis, StaticSplit]
) -> Mapping[StaticBasis, StaticSplit]:
    if not one or not other:
        return one or other
    return {
        basis: one.get(basis, NO_SPLIT).plus(*other.get(basis, NO_SPLIT))
        for basis in StaticBasis
        if basis in one or basis in other
    }


def _sum_of_parts(
    one: Mapping[str, HostPart], other: Mapping[str, HostPart]
) -> Mapping[str, HostPart]:
    none = HostPart(0, 0, 0)
    return {
        part: one.get(part, none).plus(other.get(part, none))
        for part in sorted(one.keys() | other.keys())
    }


def spans_between(earlier: Checkpoint | None, later: Checkpoint) -> dict[SpanName, SpanUsage]:
    """Return the usage of every name since ``earlier``, or in total if that is None.

    Energy counts when its span has ended and settled, so it may be older than ``earlier``.
    """
    before = {row.key: row for row in earlier.spans} if earlier else {}
    found: dict[SpanName, SpanUsage] = {}
    for row in later.spans:
        if usage := _span_rise(before.get(row.key), row):
            name = SpanName(UsageRole.NAMED, *row.key)
            found[REST_OF_SPANS if row.key == (OTHER, OTHER, "") else name] = usage
    outside = _rises(earlier.outside if earlier else {}, later.outside)
    for (service, owner, kind), energy in outside.items():
        name = SpanName(UsageRole.OUTSIDE, service, owner=owner)
        found[name] = found.get(name, SpanUsage()) + SpanUsage({kind: _limited(energy)})
    models = {one.key: one for one in earlier.inference} if earlier else {}
    for each in later.inference:
        if usage := _requests_rise(models.get(each.key), each):
            found[SpanName(UsageRole.MODEL, *each.key)] = usage
    return found


def _requests_rise(before: InferenceRow | None, after: InferenceRow) -> SpanUsage:
    if before is not None and any(
        after.requests.get(method, 0) < count for method, count in before.requests.items()
    ):
        before = None  # the account was restarted at zero
    usage = _span_rise(None if before is None else _as_spans(before), _as_spans(after))
    known = {} if before is None else before.requests
    host = _host_rise(HostRequests() if before is None else before.host, after.host)
    return replace(usage, divisions=_rises(known, after.requests), host=host)


def _host_rise(before: HostRequests, after: HostRequests) -> dict[str, HostPart]:
    """The rise of each part that new requests have: a part that is counted no more is unknown."""
    found = {}
    for part, counts in after.counts.items():
        energy = _rise(before.energy.get(part, 0), after.energy.get(part, 0))
        requests, output = map(_rise, before.counts.get(part, (0, 0)), counts)
        if requests:
            found[part] = HostPart(energy, requests, _limited(output))
    return found


def _as_spans(row: InferenceRow) -> SpanRow:
    energy, requests = Microjoules(sum(row.energy.values())), sum(row.requests.values())
    return SpanRow(row.service, row.model, {HwType.GPU: energy}, count=requests, tokens=row.tokens)


def total_usage(usages: Iterable[SpanUsage]) -> SpanUsage:
    return sum(usages, SpanUsage())


def _span_rise(before: SpanRow | None, after: SpanRow) -> SpanUsage:
    # A lower count: the account was removed meanwhile and restarted at zero.
    if before is None or after.count < before.count:
        before = SpanRow(after.service, after.name, {})
    energy = {kind: _limited(e) for kind, e in _rises(before.energy, after.energy).items()}
    tokens = [
        _limited(_rise(before.tokens.get(d, 0), after.tokens.get(d, 0)))
        for d in ("input", "output")
    ]
    return SpanUsage(
        energy,
        after.count - before.count,
        _limited(_rise(before.time, after.time)),
        tokens[0],
        tokens[1],
        {
            basis: rise
            for basis, split in after.splits.items()
            if any(rise := NO_SPLIT.plus(*map(_rise, before.splits.get(basis, NO_SPLIT), split)))
        },
    )


def _limited(amount: int) -> int:
    return min(MAX_STORED_INTEGER, amount)


PROCESS = "process"
"""Kind of an owner that is a command; every other kind is a GroupKind."""


class EnergyOwner(NamedTuple):
    """Owner of energy in the history: a command in a group, a group, or the rest of a kind."""

    kind: str
    hw_type: HwType
    name: str
    group: str = ""  # of a command: name of its most specific group
    rest: bool = False  # all owners of the kind without a row of their own

    @classmethod
    def others(cls, kind: str, hw_type: HwType) -> EnergyOwner:
        return cls(kind, hw_type, "", rest=True)


@dataclass(frozen=True, slots=True)
class CheckpointDelta:
    """Energy of an interval that ended at Unix time ``wall`` (nanoseconds), in microjoules.

    For each hardware type the owners of kind ``process`` sum to the consumers of the domains;
    owners of every other kind sum to at most that. Energy in ``spans`` may be older.
    """

    wall: int
    domains: tuple[DomainAccount, ...]
    owners: Mapping[EnergyOwner, int]
    spans: Mapping[SpanName, SpanUsage] = field(default_factory=dict)


def delta_between(earlier: Checkpoint | None, later: Checkpoint) -> CheckpointDelta:
    """Return the energy from ``earlier`` to ``later``; in total if ``earlier`` is None."""
    before = {account.domain.id: account for account in earlier.accounts} if earlier else {}
    domains = tuple(
        delta
        for account in later.accounts
        for delta in _domain_deltas(before.get(account.domain.id), account)
        if delta.energy or delta.gaps
    )
    consumers = Counter[HwType]()
    for delta in domains:
        consumers[delta.domain.hw_type] += delta.consumers
    owners = _processes(earlier, later, consumers)
    owners.update(_groups(earlier, later, consumers))
    return CheckpointDelta(later.at.wall, domains, owners, spans_between(earlier, later))


def _domain_deltas(before: DomainAccount | None, after: DomainAccount) -> Iterator[DomainAccount]:
    """The energy of a domain, and apart from it the energy from before a change of the cover."""
    if before is None or after.energy < before.energy:
        before = DomainAccount(after.domain)
    energy = after.energy - before.energy
    counted = max(0, min(energy, after.counted - before.counted))
    here, elsewhere = counted, energy - counted
    if not after.domain.in_cover:
        here, elsewhere = elsewhere, here
    yield _domain_delta(before, after, after.domain, here, _rises(before.gaps, after.gaps))
    if elsewhere:
        known = before.domain.in_cover != after.domain.in_cover
        domain = before.domain if known else _moved(before, after)
        yield _domain_delta(before, after, domain, elsewhere, {})


def _moved(before: DomainAccount, after: DomainAccount) -> Domain:
    """The domain on the other side of the cover: it settled late, or a change was undone."""
    domain, divided = after.domain, after.divided > before.divided
    if domain.in_cover or not divided:
        return replace(domain, in_cover=not domain.in_cover, resource=None, method="none")
    return replace(domain, in_cover=True, resource=domain.id)


def _domain_delta(
    before: DomainAccount,
    after: DomainAccount,
    domain: Domain,
    energy: int,
    gaps: Mapping[GapReason, int],
) -> DomainAccount:
    consumers = after.consumers - before.consumers
    idle = after.idle - before.idle
    unattributed = after.unattributed - before.unattributed
    withheld = after.withheld - before.withheld
    if domain.resource is None:
        consumers = idle = unattributed = withheld = 0
    elif min(consumers, idle, unattributed) < 0 or consumers + idle + unattributed != energy:
        consumers, idle, unattributed, withheld = 0, 0, energy, 0
    return DomainAccount(
        domain,
        Microjoules(energy),
        Microjoules(consumers),
        Microjoules(idle),
        Microjoules(unattributed),
        gaps=gaps,
        withheld=Microjoules(min(max(0, withheld), unattributed)),
    )


def _rise(before: int, after: int) -> int:
    return after - before if after >= before else after


def _rises(before: Mapping[K, int], after: Mapping[K, int]) -> dict[K, int]:
    """Return the increase of each total, without zeros."""
    return {key: rise for key, total in after.items() if (rise := _rise(before.get(key, 0), total))}


def _processes(
    earlier: Checkpoint | None, later: Checkpoint, consumers: Mapping[HwType, int]
) -> dict[EnergyOwner, int]:
    """Return the listed processes by command, and the rest of the consumers' energy.

    The rest is a difference: it holds unlisted processes, and the final energy of formerly
    listed ones.
    """
    before: dict[Payer, ProcessRow] = {}
    if earlier is not None and earlier.boot_id == later.boot_id:
        before = {row.info.payer: row for row in earlier.processes}
    commands = Counter[EnergyOwner]()
    for row in later.processes:
        old = before.get(row.info.payer)
        for kind, rise in _rises(old.energy if old else {}, row.energy).items():
            commands[EnergyOwner(PROCESS, kind, row.info.command, row.info.group)] += rise
    named = _plausible(commands, consumers)
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
        for kind, rise in _rises(before.get(row.group, {}), row.energy).items():
            named[EnergyOwner(row.group.kind, kind, row.group.name)] = rise
    return _plausible(named, consumers)


def _plausible(
    named: dict[EnergyOwner, int], consumers: Mapping[HwType, int]
) -> dict[EnergyOwner, int]:
    """Return ``named`` without kinds and types that claim more than the consumers' energy."""
    claimed = Counter[tuple[str, HwType]]()
    for owner, energy in named.items():
        claimed[owner.kind, owner.hw_type] += energy
    return {
        owner: energy
        for owner, energy in named.items()
        if claimed[owner.kind, owner.hw_type] <= consumers.get(owner.hw_type, 0)
    }
