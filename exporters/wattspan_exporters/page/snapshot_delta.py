"""The energy between two snapshots, by device, process and span: exact and additive.

Consecutive deltas add up to the delta from the first start to the last end, so an hour is kept as
a few dozen of them, and a process that has ended meanwhile keeps its name. Each keeps a bounded
number of processes and spans by name; the rest stays in the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import add, attrgetter, sub
from typing import Any, NamedTuple, TypeVar

from wattspan.model import (
    NO_SPLIT,
    SECOND,
    Consumer,
    Domain,
    DomainAccount,
    Group,
    HwType,
    Instant,
    Payer,
    PayerInfo,
    ProcessRow,
    Snapshot,
    SpanRow,
    StaticBasis,
    service_label,
)

HARDWARE_TYPES = tuple(HwType)
STATIC_BASES = tuple(StaticBasis)

EnergyByType = tuple[int, ...]
"""Microjoules by hardware type, in the order of ``HARDWARE_TYPES``."""

ZERO_ENERGY: EnergyByType = (0,) * len(HARDWARE_TYPES)

MAX_PROCESSES = 64
"""Named processes of a delta, those with the highest energy; the rest is summed by group."""

MAX_UNLISTED_GROUPS = 32
"""Groups with a sum of unnamed processes; processes of further groups are unlisted."""

MAX_SPANS = 48
"""Span names of a delta, those with the highest energy; the rest is summed by service."""

K = TypeVar("K")
V = TypeVar("V")

SpanKey = tuple[str, str | None]
"""A service with its owner, and a span name; None is the sum of its other names."""


class DeviceDelta(NamedTuple):
    """The energy of one device, its time, and its division.

    Energy is booked when it is settled, with a varying delay. Therefore the time of a device's
    energy is the advance of its account's settlement, not of the clock.
    """

    domain: Domain
    present: bool  # or lost: its source cannot read it
    energy: int
    consumers: int
    idle: int
    unattributed: int
    lasted: int  # ns of settlement, including gaps and unknown times
    known: int  # ns of these with known energy
    timed: int  # energy of the known time; the first energy of a new account has no known time
    unmeasured: int = 0  # snapshots at which it was present and gave no reading

    @property
    def undivided(self) -> int:
        """Energy that is never attributed."""
        return self.energy - self.consumers - self.idle - self.unattributed

    @property
    def known_power(self) -> float | None:
        """Mean watts of the time with known energy; None if that is below a second."""
        # 1 uJ/ns is 1 kW.
        return 1000 * self.timed / self.known if self.known >= SECOND else None

    @property
    def mean_power(self) -> float | None:
        """Mean watts of the whole time, at least: gaps add nothing; None if nothing is known."""
        measured = self.lasted >= SECOND and (self.energy or self.known)
        return 1000 * self.energy / self.lasted if measured else None

    def merged(self, later: DeviceDelta) -> DeviceDelta:
        sums = map(add, self[2:], later[2:])
        return DeviceDelta(later.domain, later.present, *sums)


class ProcessDelta(NamedTuple):
    """The energy of one process."""

    info: PayerInfo
    parts: EnergyByType

    def merged(self, later: ProcessDelta) -> ProcessDelta:
        return ProcessDelta(later.info, add_energy(self.parts, later.parts))


class SpanDelta(NamedTuple):
    """The energy of the ended spans of one name."""

    trace: str | None  # of the newest exemplar
    parts: EnergyByType
    splits: tuple[int, ...]  # static and dynamic GPU energy, for each of STATIC_BASES
    calls: int
    time: int
    tokens: int  # of output
    bounded: int  # calls whose energy is a lower bound

    @property
    def numbers(self) -> tuple[int, ...]:
        return (*self.parts, *self.splits, *self[3:])

    def with_numbers(self, trace: str | None, numbers: tuple[int, ...]) -> SpanDelta:
        """The same fields with other ``numbers``."""
        parts, rest = numbers[: len(self.parts)], numbers[len(self.parts) :]
        return SpanDelta(trace, parts, rest[: len(self.splits)], *rest[len(self.splits) :])

    def merged(self, later: SpanDelta) -> SpanDelta:
        return self.with_numbers(
            later.trace or self.trace, tuple(map(add, self.numbers, later.numbers))
        )


@dataclass(frozen=True, slots=True)
class SnapshotDelta:
    """The energy settled from ``start`` to ``end``, ``duration`` awake nanoseconds."""

    start: Instant
    end: Instant
    duration: int = 0
    devices: Mapping[str, DeviceDelta] = field(default_factory=dict)
    processes: Mapping[Payer, ProcessDelta] = field(default_factory=dict)
    unlisted_by_group: Mapping[Group | None, EnergyByType] = field(default_factory=dict)
    spans: Mapping[SpanKey, SpanDelta] = field(default_factory=dict)
    outside: Mapping[str, int] = field(default_factory=dict)  # outside of spans, by service
    senders: Mapping[str, frozenset[Consumer]] = field(default_factory=dict)
    agent_cpu: float = 0.0

    @property
    def consumers(self) -> EnergyByType:
        """The energy of all processes, by hardware type."""
        return tuple(
            sum(one.consumers for one in self.devices.values() if one.domain.hw_type is kind)
            for kind in HARDWARE_TYPES
        )

    @property
    def unlisted(self) -> EnergyByType:
        """The energy of processes without a row now or before."""
        listed = [one.parts for one in self.processes.values()]
        listed += self.unlisted_by_group.values()
        return tuple(map(sub, self.consumers, total_energy(listed)))


def add_energy(one: EnergyByType, other: EnergyByType) -> EnergyByType:
    return tuple(map(add, one, other))


def total_energy(many: Iterable[EnergyByType]) -> EnergyByType:
    return tuple(map(sum, zip(ZERO_ENERGY, *many, strict=True)))


# ----------------------------------------------------------------------- between two snapshots


def delta_between(before: Snapshot, after: Snapshot) -> SnapshotDelta | None:
    """The difference of two snapshots; None if ``after`` does not continue ``before``.

    Accounts of one ledger never decrease: after a decrease the ledger is another one.
    """
    if after.at.mono < before.at.mono:
        return None
    devices = _devices(before, after)
    if devices is None:
        return None
    spans, outside = _spans(before.spans.rows, after.spans.rows), _outside(before, after)
    services = {service for service, _ in spans} | outside.keys()
    delta = SnapshotDelta(
        before.at,
        after.at,
        after.at.mono - before.at.mono,
        devices,
        _processes(before.processes, after.processes),
        {},
        spans,
        outside,
        {
            service: frozenset(sent)
            for service, sent in after.spans.senders.items()
            if service in services
        },
        max(0.0, after.stats.cpu_seconds - before.stats.cpu_seconds),
    )
    return None if min(delta.unlisted) < 0 else delta


_ACCOUNTS = attrgetter("counted", "consumers", "idle", "unattributed")


def _devices(before: Snapshot, after: Snapshot) -> dict[str, DeviceDelta] | None:
    """The devices of the cover; None if an account decreased."""
    old = {account.domain.id: account for account in before.domains}
    devices: dict[str, DeviceDelta] = {}
    lost = after.lost
    for account in after.domains:
        domain = account.domain
        earlier = old.pop(domain.id, None)
        # A new account began at zero.
        since = earlier or DomainAccount(domain)
        grown = tuple(map(sub, _ACCOUNTS(account), _ACCOUNTS(since)))
        if min(grown) < 0:
            return None
        if domain.in_cover or since.domain.in_cover:
            passed = after.at.mono - before.at.mono
            times = _times(since, account, passed)
            expected = account.present or domain.id in lost
            mute = int(expected and (account.silent or not account.measured))
            devices[domain.id] = DeviceDelta(domain, expected, *(*grown, *times, mute))
    return None if old else devices


def _times(since: DomainAccount, account: DomainAccount, passed: int) -> tuple[int, int, int]:
    """``lasted``, ``known`` and ``timed`` of a DeviceDelta over ``passed`` nanoseconds."""
    moved = settled_time(since, account)
    if moved is None:
        return passed, 0, 0
    # The account of a missing device stands still, and jumps when the device is back.
    lasted = moved if since.present and account.present else passed
    return lasted, moved - gap_time(since, account), account.counted - since.counted


def settled_time(since: DomainAccount, account: DomainAccount) -> int | None:
    """Awake nanoseconds between two settlements of an account; None if unknown."""
    if since.settled is None or account.settled is None:
        return None
    return account.settled.mono - since.settled.mono


def gap_time(since: DomainAccount, account: DomainAccount) -> int:
    """Awake nanoseconds of gaps between two settlements; negative if the account differs."""
    gaps = sum(account.gaps.values()) - sum(since.gaps.values())
    if gaps <= 0 or since.settled is None or account.settled is None:
        return gaps
    # The gap of a suspension includes the suspended time.
    return max(0, gaps - (account.settled.asleep - since.settled.asleep))


def _processes(
    before: tuple[ProcessRow, ...], after: tuple[ProcessRow, ...]
) -> dict[Payer, ProcessDelta]:
    """The growth of each row. A row that is new, or decreased, began at zero."""
    old = {row.info.payer: row.energy for row in before}
    processes: dict[Payer, ProcessDelta] = {}
    for row in after:
        earlier = old.get(row.info.payer)
        if earlier == row.energy:
            continue
        parts = grown = _parts(row.energy)
        if earlier is not None:
            grown = tuple(map(sub, parts, _parts(earlier)))
            if min(grown) < 0:
                grown = parts
        if any(grown):
            processes[row.info.payer] = ProcessDelta(row.info, grown)
    return processes


def _spans(before: tuple[SpanRow, ...], after: tuple[SpanRow, ...]) -> dict[SpanKey, SpanDelta]:
    if before is after:
        return {}
    old = {row.key: row for row in before}
    spans: dict[SpanKey, SpanDelta] = {}
    for row in after:
        earlier = old.get(row.key)
        if earlier is row:
            continue
        now = _span_delta(row)
        if earlier is not None and row.count >= earlier.count:
            was = _span_delta(earlier)
            newest = now.trace if now.trace != was.trace else None
            now = now.with_numbers(newest, tuple(map(sub, now.numbers, was.numbers)))
        # A name that was evicted and returned began at zero.
        if min(now.numbers) < 0:
            now = _span_delta(row)
        if any(now.parts) or now.calls:
            spans[service_label(row.service, row.owner), row.name] = now
    return spans


def _span_delta(row: SpanRow) -> SpanDelta:
    newest = max(row.exemplars.values(), key=attrgetter("wall"), default=None)
    trace = None if newest is None else newest.trace
    tokens = row.tokens.get("output", 0)
    splits = (row.splits.get(basis, NO_SPLIT) for basis in STATIC_BASES)
    parts = tuple(chain.from_iterable(splits))
    return SpanDelta(
        trace, _parts(row.energy), parts, row.count, row.time, tokens, row.bounded_count
    )


def _outside(before: Snapshot, after: Snapshot) -> dict[str, int]:
    old, new = before.spans.outside, after.spans.outside
    outside: dict[str, int] = {}
    if old is not new:
        for key, energy in new.items():
            if (grown := energy - old.get(key, 0)) > 0:
                merge_into(outside, {service_label(key[0], key[1]): grown}, add)
    return outside


def _parts(energy: Mapping[HwType, int]) -> EnergyByType:
    get = energy.get
    return tuple([get(kind, 0) for kind in HARDWARE_TYPES])


# ------------------------------------------------------------------------- sums of deltas


def merge_deltas(deltas: Iterable[SnapshotDelta]) -> SnapshotDelta:
    """Consecutive deltas as one; there is at least one."""
    consecutive = list(deltas)
    if len(consecutive) == 1:
        return consecutive[0]
    sums: dict[str, dict[Any, Any]] = {name: {} for name in _MERGED}
    for one in consecutive:
        for name, merged in _MERGED.items():
            merge_into(sums[name], getattr(one, name), merged)
    return SnapshotDelta(
        consecutive[0].start,
        consecutive[-1].end,
        sum(one.duration for one in consecutive),
        agent_cpu=sum(one.agent_cpu for one in consecutive),
        **sums,
    )


def merge_into(into: dict[K, V], later: Mapping[K, V], merged: Callable[[V, V], V]) -> None:
    """Add ``later`` to ``into``; values of the same key become ``merged(earlier, later)``."""
    for key, value in later.items():
        into[key] = merged(into[key], value) if key in into else value


def _union(known: frozenset[Consumer], later: frozenset[Consumer]) -> frozenset[Consumer]:
    return known if known == later else known | later  # equal sets are kept once


_MERGED: Mapping[str, Callable[[Any, Any], Any]] = {
    "devices": DeviceDelta.merged,
    "processes": ProcessDelta.merged,
    "unlisted_by_group": add_energy,
    "spans": SpanDelta.merged,
    "outside": add,
    "senders": _union,
}
"""The sum of two values of each field by name."""


def _span_rank(name: SpanKey, spans: Mapping[SpanKey, SpanDelta]) -> tuple[bool, int]:
    return name[1] is None, sum(spans[name].parts)


def most_specific_group(info: PayerInfo) -> Group | None:
    """The most specific group of a process."""
    return info.groups[0] if info.groups else None


def limit_names(delta: SnapshotDelta) -> SnapshotDelta:
    """The delta with a bounded number of names; the sums stay the same."""
    processes = dict(delta.processes)
    by_group = dict(delta.unlisted_by_group)
    if len(processes) > MAX_PROCESSES:
        ranked = sorted(processes, key=lambda payer: sum(processes[payer].parts))
        for payer in ranked[:-MAX_PROCESSES]:
            info, parts = processes.pop(payer)
            merge_into(by_group, {most_specific_group(info): parts}, add_energy)
    if len(by_group) > MAX_UNLISTED_GROUPS:
        largest = sorted(by_group, key=lambda group: sum(by_group[group]))[-MAX_UNLISTED_GROUPS:]
        by_group = {group: by_group[group] for group in largest}
    spans = dict(delta.spans)
    if len(spans) > MAX_SPANS:
        for name in sorted(spans, key=lambda name: _span_rank(name, spans))[:-MAX_SPANS]:
            others: SpanKey = (name[0], None)
            merge_into(spans, {others: spans.pop(name)}, SpanDelta.merged)
    return replace(delta, processes=processes, unlisted_by_group=by_group, spans=spans)
