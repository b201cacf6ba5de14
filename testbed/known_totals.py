"""Totals for the tests of the store: a small host with known totals, and the expected content of a
file."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from wattspan.clock import SystemClock
from wattspan.model import (
    Checkpoint,
    Consumer,
    Domain,
    DomainAccount,
    GapReason,
    Group,
    GroupKind,
    GroupRow,
    HwType,
    Microjoules,
    Milliwatts,
    PayerInfo,
    ProcessRow,
    Provenance,
    Reading,
)
from wattspan.testing import ManualClock

J = 10**6

PACKAGE = Domain(
    "package-0",
    HwType.CPU,
    "package-0",
    "rapl",
    Provenance.MEASURED,
    resource="cpu:0",
    method="cpu-time",
)
CORE = Domain(
    "core-0",
    HwType.CPU,
    "core-0",
    "rapl",
    Provenance.MEASURED,
    in_cover=False,
    parent="package-0",
)
GPU = Domain(
    "GPU-0", HwType.GPU, "GPU 0", "nvml", Provenance.DERIVED, resource="gpu:0", method="gpu-sm"
)


def an_hour_ago(*, emulated: bool = False) -> Books:
    """A host whose clock starts an hour ago."""
    return Books(ManualClock(wall=SystemClock().now().wall - 3600 * 10**9), emulated=emulated)


@dataclass
class Books:
    """A host that spends, per turn: idle 2 J, unattributed 1 J, and the energy charged to each
    process.

    Every process is in the container ``c<pid>`` and half of them in the user ``u``.
    """

    clock: ManualClock = field(default_factory=ManualClock)
    boot_id: str = "boot"
    emulated: bool = False
    turns: int = 0
    spent: dict[int, int] = field(default_factory=dict)

    def spend(self, joules: dict[int, int], *, seconds: float = 5.0) -> Checkpoint:
        """``seconds`` pass; each pid spends so many joules of the package and of the GPU."""
        self.clock.advance(seconds)
        self.turns += 1
        for pid, energy in joules.items():
            self.spent[pid] = self.spent.get(pid, 0) + energy * J
        return self.now()

    def now(self) -> Checkpoint:
        at = self.clock.now()
        return Checkpoint(
            at=at,
            boot_id=self.boot_id,
            accounts=tuple(self._account(domain) for domain in (PACKAGE, CORE, GPU)),
            readings=(Reading(PACKAGE.id, at, Microjoules(123), 4),),
            groups=(
                *(self._group(GroupKind.CONTAINER, f"c{pid}", e) for pid, e in self.spent.items()),
                self._group(GroupKind.USER, "u", sum(e for p, e in self.spent.items() if p % 2)),
            ),
            processes=tuple(self._process(pid, energy) for pid, energy in self.spent.items()),
            other={HwType.CPU: Microjoules(self.turns * J), HwType.GPU: Microjoules(0)},
            retired={HwType.CPU: Microjoules(0)},
        )

    @property
    def consumers(self) -> int:
        """Energy charged to the consumers of the package: the processes, and 1 J a turn by
        the unlisted."""
        return sum(self.spent.values()) + self.turns * J

    @property
    def package(self) -> int:
        return self.consumers + 3 * self.turns * J

    def _account(self, domain: Domain) -> DomainAccount:
        if self.emulated:
            domain = Domain(
                domain.id,
                domain.hw_type,
                domain.name,
                domain.source,
                Provenance.EMULATED,
                domain.in_cover,
                domain.parent,
                domain.resource,
                domain.method,
            )
        energy = Microjoules(self.package)
        if domain.resource is None:
            return DomainAccount(domain, energy, settled=self.clock.now())
        consumers = self.consumers if domain.hw_type is HwType.CPU else sum(self.spent.values())
        idle = 2 * self.turns * J
        return DomainAccount(
            domain,
            energy,
            Microjoules(consumers),
            Microjoules(idle),
            Microjoules(energy - consumers - idle),
            gaps={GapReason.RESET: self.turns * 10**9} if domain.hw_type is HwType.GPU else {},
            idle_power=Milliwatts(12_345),
            settled=self.clock.now(),
            withheld=Microjoules(self.turns * J // 4 if domain.hw_type is HwType.CPU else 0),
        )

    def _group(self, kind: GroupKind, name: str, energy: int) -> GroupRow:
        return GroupRow(Group(kind, name), self._both(energy), {})

    def _process(self, pid: int, energy: int) -> ProcessRow:
        groups = (
            Group(GroupKind.CONTAINER, f"c{pid}"),
            *([Group(GroupKind.USER, "u")] * (pid % 2)),
        )
        info = PayerInfo(Consumer(pid, 7), f"job{pid}", groups, user="u", parent=1)
        return ProcessRow(info, self._both(energy), {})

    @staticmethod
    def _both(energy: int) -> dict[HwType, Microjoules]:
        return {HwType.CPU: Microjoules(energy), HwType.GPU: Microjoules(energy)}


Totals = dict[tuple[str, str], int]


def totals(opening: Checkpoint | None) -> Totals:
    """All totals that a history must sum to, without zeros."""
    found: Totals = {}
    for account in opening.accounts if opening is not None else ():
        for name in ("energy", "consumers", "idle", "unattributed", "withheld"):
            found[account.domain.id, name] = getattr(account, name)
        for reason, lasted in account.gaps.items():
            found[account.domain.id, f"gap {reason}"] = lasted
        if account.attributed:
            key = ("processes", account.domain.hw_type.value)
            found[key] = found.get(key, 0) + account.consumers
    return {key: value for key, value in found.items() if value}


def history(path: Path, step: int | None = None) -> Totals:
    """The same of a file's history, at one step or at all."""
    where = "" if step is None else f" WHERE step = {step}"
    found: Totals = {}
    with closing(sqlite3.connect(path)) as database:
        for domain, *sums in database.execute(
            "SELECT id, sum(energy), sum(consumers), sum(idle), sum(unattributed), sum(withheld)"
            f" FROM domain_energy JOIN domain ON key = domain{where} GROUP BY id"
        ):
            for name, value in zip(
                ("energy", "consumers", "idle", "unattributed", "withheld"), sums, strict=True
            ):
                found[domain, name] = value
        for domain, reason, lasted in database.execute(
            "SELECT id, reason, sum(nanoseconds) FROM gap JOIN domain ON key = domain"
            f"{where} GROUP BY id, reason"
        ):
            found[domain, f"gap {reason}"] = lasted
        for hw_type, energy in database.execute(
            'SELECT hw_type, sum(energy) FROM owner_energy JOIN owner ON key = "owner"'
            f"{where + ' AND' if where else ' WHERE'} kind = 'process' GROUP BY hw_type"
        ):
            found["processes", hw_type] = energy
    return {key: value for key, value in found.items() if value}


def buckets(path: Path, step: int) -> list[int]:
    """The starts of the buckets that hold anything."""
    with closing(sqlite3.connect(path)) as database:
        rows = database.execute(
            "SELECT DISTINCT start FROM domain_energy WHERE step = ? ORDER BY start", (step,)
        )
        return [start for (start,) in rows]


def owners(path: Path, kind: str) -> dict[tuple[str, str], int]:
    """Energy by name and hardware type of all owners of a kind, in microjoules."""
    with closing(sqlite3.connect(path)) as database:
        rows = database.execute(
            'SELECT name, hw_type, sum(energy) FROM owner_energy JOIN owner ON key = "owner"'
            " WHERE kind = ? GROUP BY name, hw_type",
            (kind,),
        )
        return {(name, hw_type): energy for name, hw_type, energy in rows}
