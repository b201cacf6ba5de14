"""A simulated host: domains with true energy, processes with true CPU time, and faults.

It produces readings and usage with the defects of real sources (late, wrapped, missing) and applies
them to a ledger tick by tick. Property tests drive it with generated events.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from wattspan.attribution.ledger import Ledger
from wattspan.attribution.packed_attributions import PackedAttributions
from wattspan.model import (
    Attribution,
    Consumer,
    Domain,
    Group,
    GroupKind,
    HwType,
    Microjoules,
    Milliwatts,
    PayerInfo,
    Provenance,
    Reading,
    Snapshot,
    Tick,
    Usage,
    energy_at,
)
from wattspan.testing import ManualClock

PACKAGE = Domain(
    "rapl:package-0",
    HwType.CPU,
    "package-0",
    "rapl",
    Provenance.MEASURED,
    resource="cpu:0",
    method="cpu-time",
    modulus=Microjoules(65_533 * 10**6),
    max_power=Milliwatts(400_000),
)
CORE = Domain(
    "rapl:package-0/core",
    HwType.CPU,
    "core",
    "rapl",
    Provenance.MEASURED,
    in_cover=False,
    parent="rapl:package-0",
    modulus=Microjoules(65_533 * 10**6),
    max_power=Milliwatts(400_000),
)
DRAM = Domain(
    "rapl:package-0/dram",
    HwType.MEMORY,
    "dram",
    "rapl",
    Provenance.MEASURED,
    resource="cpu:0",
    method="cpu-time-proxy",
    modulus=Microjoules(65_712 * 10**6),
    max_power=Milliwatts(100_000),
)
GPU = Domain(
    "gpu:GPU-0",
    HwType.GPU,
    "GPU 0",
    "nvml",
    Provenance.MEASURED,
    resource="gpu:GPU-0",
    method="gpu-sm-utilisation",
    max_power=Milliwatts(1_400_000),
    resolution=100_000_000,
)
CPUS = 4
DOMAINS = {"rapl": (PACKAGE, CORE, DRAM), "nvml": (GPU,)}
"""The domains of the host, by source."""


@dataclass
class TrueDomain:
    domain: Domain
    spent: int = 0  # all that was ever spent, uJ
    counter: int = 0
    epoch: int = 0
    readable: bool = True

    def spend(self, energy: int) -> None:
        self.spent += energy
        self.counter += energy
        if self.domain.modulus is not None:
            self.counter %= self.domain.modulus


@dataclass
class World:
    """The host, its true energy, and the ledger under test."""

    ledger: Ledger
    clock: ManualClock = field(default_factory=ManualClock)
    timeline: PackedAttributions = field(
        default_factory=lambda: PackedAttributions(300 * 10**9, 10**7)
    )
    domains: dict[str, TrueDomain] = field(default_factory=dict)
    alive: dict[int, Consumer] = field(default_factory=dict)
    started: int = 0
    gpu_backlog: dict[Consumer, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.domains = {d.id: TrueDomain(d) for d in (PACKAGE, CORE, DRAM, GPU)}
        self._usage_from = self._gpu_from = self.clock.now()
        self.apply(domains=DOMAINS, readings=self.readings())

    def apply(self, **facts: Any) -> list[Attribution]:
        """Apply a tick to the ledger; append settled energy to the history."""
        settled = self.ledger.apply(Tick(self.clock.now(), **facts))
        for attribution in settled:
            self.timeline.add(attribution)
        return settled

    def born(self, pid: int) -> None:
        """A process starts, with a pid that an earlier process may have had."""
        self.started += 1
        old = self.alive.get(pid)
        self.alive[pid] = Consumer(pid, self.started)
        groups = (Group(GroupKind.CONTAINER, f"c{pid % 3}"), Group(GroupKind.USER, f"u{pid % 2}"))
        born = PayerInfo(self.alive[pid], f"job{pid}", groups, f"u{pid % 2}")
        self.apply(births=[born], exits=[] if old is None else [old])

    def turn(
        self,
        nanoseconds: int,
        loads: dict[int, int],
        *,
        gpu_loads: dict[int, int] | None = None,
        unclaimed: int = 0,
        dying: tuple[int, ...] = (),
        gpu_usage_comes: bool = True,
        power: int = 80_000,
    ) -> Snapshot:
        """Advance time; processes use CPU and GPU (in percent); poll."""
        spent = {
            self.alive[pid]: nanoseconds * load // 100
            for pid, load in loads.items()
            if pid in self.alive and load
        }
        for pid, load in (gpu_loads or {}).items():
            if pid in self.alive and load:
                who = self.alive[pid]
                self.gpu_backlog[who] = self.gpu_backlog.get(who, 0) + nanoseconds * load // 100
        for true in self.domains.values():
            true.spend(energy_at(min(power, true.domain.max_power), nanoseconds))
        self.clock.advance(ns=nanoseconds)
        now = self.clock.now()
        usages: list[Usage] = []
        if now.mono > self._usage_from.mono:
            usages.append(
                Usage("cpu:0", self._usage_from, now, spent, unclaimed, CPUS * nanoseconds)
            )
            self._usage_from = now
        if gpu_usage_comes and now.mono > self._gpu_from.mono:
            usages.append(Usage("gpu:GPU-0", self._gpu_from, now, self.gpu_backlog))
            self._gpu_from, self.gpu_backlog = now, {}
        exits = [self.alive.pop(pid) for pid in dying if pid in self.alive]
        self.apply(readings=self.readings(), usages=usages, exits=exits)
        return self.ledger.snapshot(now, "host")

    def reset(self, domain_id: str) -> None:
        self.domains[domain_id].counter = 0

    def relabel(self, domain_id: str) -> None:
        """The driver is reloaded: the counter restarts and the source knows."""
        true = self.domains[domain_id]
        true.counter, true.epoch = 0, true.epoch + 1

    def readings(self) -> list[Reading]:
        now = self.clock.now()
        return [
            Reading(true.domain.id, now, Microjoules(true.counter), true.epoch)
            for true in self.domains.values()
            if true.readable
        ]


def imbalances(snapshot: Snapshot) -> list[str]:
    """All accounts of a snapshot that do not balance; empty for a valid snapshot."""
    wrong: list[str] = []
    consumers: dict[HwType, int] = {}
    for account in snapshot.domains:
        parts = account.consumers + account.idle + account.unattributed
        if account.attributed and parts != account.energy:
            wrong.append(f"{account.domain.id}: {account.energy} != {parts}")
        if min(account.energy, account.consumers, account.idle, account.unattributed) < 0:
            wrong.append(f"{account.domain.id}: a negative account")
        if not 0 <= account.withheld <= account.unattributed:
            wrong.append(f"{account.domain.id}: {account.withheld} withheld of the unattributed")
        if account.pending < 0:
            wrong.append(f"{account.domain.id}: pending is negative")
        kind = account.domain.hw_type
        if account.attributed:
            consumers[kind] = consumers.get(kind, 0) + account.consumers
    for kind, total in consumers.items():
        listed = sum(row.energy.get(kind, 0) for row in snapshot.processes)
        booked = listed + snapshot.other.get(kind, 0) + snapshot.retired.get(kind, 0)
        if booked != total:
            wrong.append(f"{kind}: processes {booked} != consumers {total}")
        by_kind: dict[GroupKind, int] = {}
        for row in snapshot.groups:
            energy = row.energy.get(kind, 0)
            by_kind[row.group.kind] = by_kind.get(row.group.kind, 0) + energy
        wrong.extend(
            f"{kind}: groups of kind {group_kind} {energy} > consumers {total}"
            for group_kind, energy in by_kind.items()
            if energy > total
        )
    return wrong


def steps_back(before: Snapshot, after: Snapshot) -> list[str]:
    """All counters of ``after`` that are lower than in ``before``."""
    wrong: list[str] = []
    old = {account.domain.id: account for account in before.domains}
    for account in after.domains:
        past = old.get(account.domain.id)
        if past is None:
            continue
        wrong.extend(
            f"{account.domain.id}.{name}"
            for name in ("energy", "consumers", "idle", "unattributed", "withheld")
            if getattr(account, name) < getattr(past, name)
        )
        for reason, lasted in past.gaps.items():
            if account.gaps.get(reason, 0) < lasted:
                wrong.append(f"{account.domain.id} gap {reason}")
    rows = {row.info.payer: row for row in before.processes}
    for row in after.processes:
        past_row = rows.get(row.info.payer)
        if past_row is not None and any(
            row.energy.get(kind, 0) < energy for kind, energy in past_row.energy.items()
        ):
            wrong.append(f"{row.info.payer}")
    groups = {group.group: group for group in before.groups}
    for group in after.groups:
        past_group = groups.get(group.group)
        if past_group is not None and any(
            group.energy.get(kind, 0) < energy for kind, energy in past_group.energy.items()
        ):
            wrong.append(f"{group.group}")
    for name in ("other", "retired"):
        ours = getattr(after, name)
        wrong.extend(
            name for kind, energy in getattr(before, name).items() if ours.get(kind, 0) < energy
        )
    return wrong
