"""The right to hold caps for a short time, by connection."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from wattspan.model import CapKey, Instant

_NO_CAPS: Mapping[CapKey, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class CapGrant:
    """What one job holds: for each knob what was ``asked`` for, and how far down it may be by now.

    ``caps`` is above ``asked`` where the way down is longer than the largest step.
    """

    job: str
    why: str
    since: Instant
    asked: Mapping[CapKey, int] = field(default_factory=lambda: _NO_CAPS)
    caps: Mapping[CapKey, int] = field(default_factory=lambda: _NO_CAPS)


@dataclass(frozen=True, slots=True)
class Lease:
    """What one connection holds, until the monotonic time ``until``."""

    length: int
    until: int
    grants: Mapping[str, CapGrant] = field(default_factory=dict)


class LeaseRegistry:
    """Every lease, by the connection that renews it.

    A lease lapses as a whole: its holder is one loop, and either it runs or it does not.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._leases: dict[int, Lease] = {}

    @property
    def longest(self) -> int:
        """What a lease lasts at most, from when it next begins anew."""
        return self._longest

    @longest.setter
    def longest(self, longest: int) -> None:
        self._longest = longest

    def grant(self, holder: int, grant: CapGrant, *, length: int, now: int) -> None:
        """Let ``holder`` hold exactly ``grant`` for its job; all its leases begin anew."""
        length = min(length, self._longest) if length > 0 else self._longest
        lease = self._leases.get(holder)
        grants = {**(lease.grants if lease else {}), grant.job: grant}
        self._leases[holder] = Lease(length, now + length, grants)

    def renew(self, holder: int, now: int) -> None:
        """Begin anew. A lease that has lapsed is gone: it is not renewed."""
        if (lease := self._leases.get(holder)) is not None:
            length = min(lease.length, self._longest)
            self._leases[holder] = Lease(length, now + length, lease.grants)

    def release(self, holder: int, job: str = "") -> tuple[CapGrant, ...]:
        """What ``holder`` does not hold any more: for one job, or at all."""
        lease = self._leases.get(holder)
        if lease is None:
            return ()
        gone = tuple(grant for name, grant in lease.grants.items() if job in ("", name))
        left = {name: grant for name, grant in lease.grants.items() if job not in ("", name)}
        if left:
            self._leases[holder] = Lease(lease.length, lease.until, left)
        else:
            del self._leases[holder]
        return gone

    def lapse(self, now: int) -> tuple[CapGrant, ...]:
        """What has lapsed by ``now`` and is gone."""
        late = [holder for holder, lease in self._leases.items() if lease.until <= now]
        return tuple(grant for holder in late for grant in self.release(holder))

    def clear(self) -> tuple[CapGrant, ...]:
        """End them all."""
        return tuple(grant for holder in list(self._leases) for grant in self.release(holder))

    def drop(self, keys: Iterable[CapKey]) -> None:
        """Nobody holds ``keys`` any more; what else a job holds, it holds on."""
        gone = set(keys)
        for holder, lease in self._leases.items():
            grants = {name: _without(grant, gone) for name, grant in lease.grants.items()}
            self._leases[holder] = Lease(lease.length, lease.until, grants)

    def holding(self, key: CapKey) -> tuple[int, Lease, CapGrant] | None:
        """Who holds ``key``: the connection, its lease and the job's grant."""
        for holder, lease in self._leases.items():
            for grant in lease.grants.values():
                if key in grant.caps:
                    return holder, lease, grant
        return None

    def held(self) -> set[CapKey]:
        """Every knob that is held."""
        leases = self._leases.values()
        return {key for lease in leases for grant in lease.grants.values() for key in grant.caps}

    def grant_of(self, holder: int, job: str) -> CapGrant | None:
        lease = self._leases.get(holder)
        return lease.grants.get(job) if lease else None

    def jobs(self, holder: int) -> set[str]:
        """The jobs for which ``holder`` holds anything."""
        lease = self._leases.get(holder)
        return set(lease.grants) if lease else set()

    @property
    def next_lapse(self) -> int | None:
        """When the next one lapses unless it is renewed."""
        return min((lease.until for lease in self._leases.values()), default=None)


def _without(grant: CapGrant, gone: set[CapKey]) -> CapGrant:
    def left(caps: Mapping[CapKey, int]) -> dict[CapKey, int]:
        return {key: value for key, value in caps.items() if key not in gone}

    return CapGrant(grant.job, grant.why, grant.since, left(grant.asked), left(grant.caps))
