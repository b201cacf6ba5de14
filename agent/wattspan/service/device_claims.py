"""Devices that two sources read: each counts once.

It belongs to a source that knows its users, else to the first source that has it: a sensor of hwmon
gives way to the library of the driver.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from wattspan.model import Domain, Failure, Trouble
from wattspan.ports import Batch


class _Selection(NamedTuple):
    """The domains of a source, those of them that are its own, and the failures of the rest."""

    listed: tuple[Domain, ...]
    own: tuple[Domain, ...]
    failures: tuple[Failure, ...]


class _Owner(NamedTuple):
    source: str
    knows_users: bool


class DeviceClaims:
    """The source that owns each device, by PCI address. For one thread.

    Two libraries may know one board, with different ids: a library that imitates NVML on AMD's
    boards beside AMD SMI.
    """

    def __init__(self) -> None:
        self._owners: dict[str, _Owner] = {}  # by address
        self._selections: dict[str, _Selection] = {}  # by source

    def without_duplicates(self, source: str, batch: Batch) -> Batch:
        """``batch`` without other sources' devices; its domains are the same until they change."""
        selection = self._selections.get(source)
        if selection is None or selection.listed is not batch.domains:
            selection = self._select(source, batch.domains)
        if len(selection.own) == len(batch.domains):
            return batch
        own = {domain.id for domain in selection.own}
        foreign = {domain.id for domain in batch.domains} - own
        return replace(
            batch,
            domains=selection.own,
            readings=tuple(one for one in batch.readings if one.domain_id not in foreign),
            failures=(*batch.failures, *selection.failures),
            usages=tuple(one for one in batch.usages if one.resource not in foreign),
            gpus=tuple(one for one in batch.gpus if one.domain_id not in foreign),
        )

    def _select(self, source: str, domains: tuple[Domain, ...]) -> _Selection:
        addresses = {domain.pci for domain in domains if domain.pci}
        given_up = {
            address
            for address, owner in self._owners.items()
            if owner.source == source and address not in addresses
        }
        for address in given_up:
            del self._owners[address]
        taken = [domain for domain in domains if self._takes(source, domain)]
        if given_up or taken:
            self._selections.clear()  # those of the other sources change
        for domain in taken:
            self._owners[domain.pci] = _Owner(source, True)
        own, failures = [], []
        for domain in domains:
            claim = _Owner(source, domain.resource is not None)
            owner = self._owners.setdefault(domain.pci, claim) if domain.pci else claim
            if owner.source == source:
                own.append(domain)
            else:
                failures.append(_duplicate(source, domain, owner.source))
        kept = domains if len(own) == len(domains) else tuple(own)
        selection = self._selections[source] = _Selection(domains, kept, tuple(failures))
        return selection

    def _takes(self, source: str, domain: Domain) -> bool:
        """True if the device belongs to another source, which does not know its users."""
        owner = self._owners.get(domain.pci)
        if owner is None or owner.source == source or domain.resource is None:
            return False
        return not owner.knows_users


def _duplicate(source: str, domain: Domain, owner: str) -> Failure:
    return Failure(
        source,
        domain.name,
        Trouble.ABSENT,
        f"it is at PCI address {domain.pci}, whose device the source {owner} reads",
        f"Set sources.{source}.enabled = false, or leave it: each device counts once.",
        domain.id,
    )
