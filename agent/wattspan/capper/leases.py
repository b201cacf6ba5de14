"""The leases and grants of the capper's clients, and the rows that show them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from wattspan.capper.ownership import foreign_limit_error
from wattspan.capper.planner import OperatorLimits, Planner, TunedLimit, WriteCause
from wattspan.capper.protocol import RefusalReason
from wattspan.model import CapKey, CapRow, Instant, KnobState
from wattspan.ports import CapsError

_UNUSABLE = (
    RefusalReason.NO_PERMISSION,
    RefusalReason.LOCKED,
    RefusalReason.LOST,
    RefusalReason.NOT_HONOURED,
)


@dataclass(frozen=True, slots=True)
class CapGrant:
    """The limits of one job of a connection: as ``requested``, and as ``granted`` so far.

    ``granted`` is above ``requested`` while the way down is longer than the largest step.
    """

    holder: int
    cause: WriteCause
    since: Instant
    requested: Mapping[CapKey, int]
    granted: Mapping[CapKey, int]

    def without(self, keys: Collection[CapKey]) -> CapGrant:
        def left(limits: Mapping[CapKey, int]) -> dict[CapKey, int]:
            return {key: value for key, value in limits.items() if key not in keys}

        return replace(self, requested=left(self.requested), granted=left(self.granted))


class Lease(NamedTuple):
    """The time of all grants of one connection, until the monotonic time ``until``."""

    length: int
    until: int


class LeaseRegistry:
    """All grants, and the leases of the connections that renew them.

    A lease expires as a whole: its holder is one loop, which runs or does not.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest
        """The length of a lease at most, from its next renewal on."""
        self.leases: dict[int, Lease] = {}
        self._grants: dict[tuple[int, str], CapGrant] = {}

    def grant(self, grant: CapGrant, *, length: int, now: int) -> None:
        """Let the holder hold exactly ``grant`` for its job; renews all its grants."""
        self._grants[grant.holder, grant.cause.job] = grant
        self._begin(grant.holder, length if length > 0 else self.longest, now)

    def renew(self, holder: int, now: int) -> None:
        """Restart the lease. An expired lease is gone, and is not renewed."""
        if lease := self.leases.get(holder):
            self._begin(holder, lease.length, now)

    def _begin(self, holder: int, length: int, now: int) -> None:
        length = min(length, self.longest)
        self.leases[holder] = Lease(length, now + length)

    def release(self, holder: int, job: str = "") -> dict[CapKey, WriteCause]:
        """End the grant of one job, or all of ``holder``; their knobs and causes."""
        ended = [grant for name, grant in self.grants(holder).items() if job in ("", name)]
        for grant in ended:
            del self._grants[holder, grant.cause.job]
        if not self.grants(holder):
            self.leases.pop(holder, None)
        return {key: grant.cause for grant in ended for key in grant.granted}

    def expire(self, now: int) -> dict[CapKey, WriteCause]:
        """End the leases that are over; their knobs and causes."""
        ended = [holder for holder, lease in self.leases.items() if lease.until <= now]
        return {key: cause for holder in ended for key, cause in self.release(holder).items()}

    def clear(self) -> None:
        self.leases.clear()
        self._grants.clear()

    def drop(self, keys: Collection[CapKey]) -> None:
        """End the grants of ``keys``; other knobs of the same jobs stay granted."""
        self._grants = {at: grant.without(keys) for at, grant in self._grants.items()}

    def holding(self, key: CapKey) -> CapGrant | None:
        """The grant that holds ``key``."""
        return next((grant for grant in self._grants.values() if key in grant.granted), None)

    def limits(self) -> dict[CapKey, TunedLimit]:
        """Every granted limit."""
        return {
            key: TunedLimit(value, grant.cause)
            for grant in self._grants.values()
            for key, value in grant.granted.items()
        }

    def grants(self, holder: int) -> dict[str, CapGrant]:
        """The grants of ``holder``, by job."""
        return {job: grant for (of, job), grant in self._grants.items() if of == holder}

    @property
    def next_expiry(self) -> int | None:
        """Expiry of the next lease without a renewal."""
        return min((lease.until for lease in self.leases.values()), default=None)

    def check(
        self, holder: int, job: str, requested: Mapping[CapKey, int], planner: Planner
    ) -> None:
        """CapsError if the limits cannot be granted."""
        for key, value in requested.items():
            state, held = planner.states.get(key), self.holding(key)
            if state is None:
                raise CapsError(
                    f"No {key.knob} of {key.device!r} can be set here; `wattspan caps status`"
                    " lists the knobs of this host.",
                    RefusalReason.UNKNOWN_DEVICE,
                    key.device,
                )
            if (why := forbidden(state, planner.demand.limits)) is not None:
                raise CapsError(why, RefusalReason.NOT_ALLOWED, key.device)
            if value <= 0:
                raise CapsError(
                    f"Cannot cap {state.name} to {value} {key.knob.unit}: ask for more than 0.",
                    RefusalReason.MALFORMED,
                    key.device,
                )
            if held is not None and (held.holder, held.cause.job) != (holder, job):
                by = f" by process {held.cause.pid}" if held.cause.pid else ""
                raise CapsError(
                    f"{state.name} is held for {held.cause.job!r}{by}; one job at a time holds a"
                    " device. Let one agent tune it: [autotune] gpus names the GPUs of an agent.",
                    RefusalReason.HELD,
                    key.device,
                )
            entry = planner.entries.get(key)
            if entry is not None and entry.left_alone:
                raise foreign_limit_error(entry)

    def row(self, key: CapKey, planner: Planner, error: CapsError | None) -> CapRow:
        """A knob as last read, and its holder; ``error`` is that of one that is not tried now."""
        state, entry, demand = planner.ranged(key), planner.entries.get(key), planner.demand
        held, cause, imposed = self.holding(key), demand.cause(key), demand.imposed
        foreign = entry is not None and entry.left_alone
        if error is None and entry is not None and foreign:
            error = foreign_limit_error(entry)
        return CapRow(
            state=state,
            original=entry.original if entry is not None else state.requested,
            wanted=held.requested[key] if held is not None else imposed.fixed.get(key),
            ceiling=planner.imposed_limit(key) or imposed.shares.get(key),
            holder=cause.job,
            why=cause.why,
            since=held.since if held is not None else None,
            expires=self.leases[held.holder].until if held is not None else None,
            foreign=foreign,
            lost=entry is not None and entry.lost,
            usable=error is None or error.refusal not in _UNUSABLE,
            trouble="" if error is None else str(error),
        )


def forbidden(state: KnobState, limits: OperatorLimits) -> str | None:
    """The reason if no tuner may hold a knob, else None."""
    if limits.knobs and state.key.knob not in limits.knobs:
        return (
            f"The {state.key.knob} of {state.name} is not to be tuned: [autotune] knobs does"
            f' not name it. Add "{state.key.knob}" to that list.'
        )
    if limits.tunable and not state.is_named(limits.tunable):
        return (
            f"{state.name} is not to be tuned: [autotune] gpus does not name it. Add it to that"
            " list, or choose another device."
        )
    return None
