"""Which processes use which device, as far as is told of use: the devices' own word for GPUs."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from wattspan.model import SECOND, Payer, Usage

RECENT = 10 * SECOND
"""A process that did not use a device for so long does not use it."""


@dataclass(slots=True)
class _Used:
    """Use of one resource in this stretch of ``RECENT`` and in the one before."""

    stretch: int = 0
    now: Counter[Payer] = field(default_factory=Counter)
    before: Counter[Payer] = field(default_factory=Counter)

    def turn_to(self, stretch: int) -> None:
        if stretch > self.stretch:
            self.before = self.now if stretch == self.stretch + 1 else Counter()
            self.now, self.stretch = Counter(), stretch


class Tenants:
    """Fed by the poller, asked by the tuner."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used: dict[str, _Used] = {}

    def see(self, usages: Iterable[Usage]) -> None:
        """What processes did with devices."""
        with self._lock:
            for usage in usages:
                used = self._used.setdefault(usage.resource, _Used())
                used.turn_to(usage.end.mono // RECENT)
                for payer, spent in usage.spent.items():
                    if spent > 0:
                        used.now[payer] += spent

    def of(self, resource: str, now: int) -> frozenset[Payer]:
        """Who used ``resource`` of late."""
        with self._lock:
            used = self._at(resource, now)
            return frozenset(used.now.keys() | used.before.keys())

    def used_by(self, payers: Collection[Payer], now: int) -> dict[str, set[Payer]]:
        """The resources that ``payers`` used of late, and which of them did."""
        found: dict[str, set[Payer]] = {}
        with self._lock:
            for resource in self._used:
                used = self._at(resource, now)
                users = {one for one in payers if used.now[one] or used.before[one]}
                if users:
                    found[resource] = users
        return found

    def share(self, resource: str, payers: Collection[Payer], now: int) -> float:
        """The part of ``resource``'s use that was ``payers``' of late; 0 if it had none."""
        with self._lock:
            used = self._at(resource, now)
            everything = used.now + used.before
            return sum(everything[one] for one in payers) / max(1, everything.total())

    def _at(self, resource: str, now: int) -> _Used:
        used = self._used.get(resource, _Used())
        used.turn_to(now // RECENT)
        return used
