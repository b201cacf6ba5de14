"""A host's part in a fleet, and the sums of the fleet that its leader knows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FleetPlace:
    """The sums of the registered hosts at one place, in milliwatts.

    ``budget`` is None without one. ``enforceable`` is the highest sum of limits that may be in
    force now, ``safe`` the sum without contact. Either exceeds a budget that was lowered until the
    hosts have followed. ``absent`` are the hosts without a session.
    """

    place: str
    budget: int | None
    hosts: int
    demand: int
    allotted: int
    safe: int
    enforceable: int
    absent: int = 0

    @property
    def headroom(self) -> int | None:
        """The part of the budget that no host may use; None without a budget."""
        return None if self.budget is None else self.budget - self.enforceable


@dataclass(frozen=True, slots=True)
class FleetAccounts:
    """A host's part in its fleet, in milliwatts.

    ``allotment`` is the limit in force, and ``safe`` that without contact; None while the capper
    does not answer. ``demand`` is None if the host asks for the power of all its devices.
    ``trouble`` is the reason without contact, ``waiting`` the reason without an allotment.
    ``places`` are known to the leader only, as is ``ended``, the number of hosts whose registration
    has ended because they were absent for too long.
    """

    allotment: int | None = None
    safe: int | None = None
    demand: int | None = None
    in_contact: bool = False
    leads: bool = False
    leader: str = ""
    trouble: str = ""
    waiting: str = ""
    places: tuple[FleetPlace, ...] = ()
    ended: int = 0
