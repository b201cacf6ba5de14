"""The payers whose energy is a lower bound, because a part of it was not measured or not divided.

A gap of a CPU concerns every payer; that of another device its users only. While an idle power is
unknown, energy is withheld from the payers that use the domain.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from wattspan.model import Domain, HwType, Payer, Usage

_EVERYBODY = "cpu"
"""Resources with this prefix are used by every process."""


class MissingEnergy:
    """Notes missing energy, and tells whose it is; for one thread, except ``until``."""

    def __init__(self) -> None:
        self._users: dict[str, frozenset[Payer]] = {}  # of devices, by resource
        self._gaps: dict[str, tuple[HwType, int]] = {}  # by resource: type and last end
        self._recent: set[str] = set()  # resources with a gap since the last call of ``take``
        self._withheld: dict[HwType, set[Payer]] = {}

    def used(self, usage: Usage) -> None:
        """Note the users of a device."""
        if usage.resource.startswith(_EVERYBODY):
            return
        before = self._users.get(usage.resource, frozenset())
        if not before.issuperset(found := {*usage.spent, *usage.present}):
            self._users[usage.resource] = before | found

    def gap(self, domain: Domain, end: int) -> None:
        """Note a gap of an attributed domain, up to ``end`` on the monotonic clock."""
        resource = str(domain.resource)
        _, until = self._gaps.get(resource, (domain.hw_type, end))
        self._gaps[resource] = domain.hw_type, max(until, end)
        self._recent.add(resource)

    def withheld(self, kind: HwType, usage: Usage) -> None:
        """Note that energy of an interval with this usage was charged to nobody."""
        payers = self._withheld.setdefault(kind, set())
        payers.update(payer for payer, spent in usage.spent.items() if spent)

    def take(self, everybody: Iterable[Payer]) -> Iterator[tuple[Payer, HwType]]:
        """Yield whose energy of which type is missing since the last call.

        ``everybody`` are the payers of whom a gap of a CPU is missing.
        """
        withheld, self._withheld = self._withheld, {}
        recent, self._recent = self._recent, set()
        for kind, payers in withheld.items():
            yield from ((payer, kind) for payer in payers)
        for resource in recent:
            kind, _ = self._gaps[resource]
            concerned = everybody if resource.startswith(_EVERYBODY) else self._users.get(resource)
            yield from ((payer, kind) for payer in concerned or ())

    def until(self, payer: Payer) -> dict[HwType, int]:
        """The last end of a gap that concerns ``payer``, by hardware type."""
        found: dict[HwType, int] = {}
        for resource, (kind, end) in tuple(self._gaps.items()):
            if resource.startswith(_EVERYBODY) or payer in self._users.get(resource, ()):
                found[kind] = max(end, found.get(kind, end))
        return found

    def forget(self, payer: Payer) -> None:
        """Forget a payer that has ended."""
        for resource, users in self._users.items():
            if payer in users:
                self._users[resource] = users - {payer}
