"""Leases, grants and commands: the demand for limits, and its result."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from wattspan.capper.ownership import foreign_limit_error
from wattspan.capper.planner import (
    CapDemand,
    ImposedLimits,
    OperatorLimits,
    Planner,
    TunedLimit,
    WriteCause,
)
from wattspan.capper.protocol import RefusalReason
from wattspan.capper.reconciler import FOREIGN_REASONS, KnobErrors, Reconciler
from wattspan.model import MILLISECOND, SECOND, CapKey, CapRow, Instant, KnobState
from wattspan.ports import SUSPENDED, CapsError, Clock
from wattspan.util.unix_sockets import PeerCredentials

LISTING_INTERVAL = 10 * SECOND
"""Interval of device discovery, and of reads of devices without a lease."""
PRESENCE_INTERVAL = 3600 * SECOND
"""Interval of journal writes without a change; a capper that is killed writes none at its end."""
HOLD_TIMEOUT = 500 * MILLISECOND
UNKNOWN_PEER = PeerCredentials()
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


class CapManager:
    """Grants, holds, restores and reports caps. Belongs to one thread.

    ``turn`` is to be called about every second.
    """

    def __init__(self, reconciler: Reconciler, clock: Clock, limits: OperatorLimits) -> None:
        self.leases = LeaseRegistry(limits.longest_lease)
        self.suspended = False
        """True once everything was restored on request; then nothing is set any more."""
        self.reconciler, self._clock, self._limits = reconciler, clock, limits
        self._imposed = ImposedLimits()
        self._listed: int | None = None
        self._presence_recorded = clock.monotonic()

    def reconfigure(self, limits: OperatorLimits) -> None:
        """Apply other settings from now on. Limits that are still permitted stay."""
        self._limits, self.leases.longest = limits, limits.longest_lease
        for key, state in list(self.reconciler.knobs.items()):
            held = self.leases.holding(key)
            if held is not None and self._forbidden(state) is not None:
                self.release(held.holder, held.cause.job, "it is not to be tuned any more")

    def hasten(self) -> None:
        """Change limits in one step from now on, as before the end of the capper."""
        self._limits = replace(self._limits, ramp=0, largest_step=1.0)

    # ---------------------------------------------------------------------------- requests

    def hold(
        self,
        holder: int,
        job: str,
        requested: Mapping[CapKey, int],
        why: str,
        *,
        lease: int = 0,
        peer: PeerCredentials = UNKNOWN_PEER,
    ) -> None:
        """Hold exactly these limits for ``job``, or none: CapsError with the refusal.

        It returns after HOLD_TIMEOUT even if not every device is set by then; the next turn
        continues.
        """
        now, former = self._clock.now(), self.leases.grants(holder).get(job)
        concerned = {*requested, *(former.granted if former else ())}
        if not concerned <= self.reconciler.knobs.keys():
            self.reconciler.devices.find()
        self._check(holder, job, requested)
        errors = self.reconciler.observe(concerned & self.reconciler.knobs.keys(), self._demand())
        planner = self.planner()
        granted = {key: planner.grant(key, value) for key, value in requested.items()}
        since = former.since if former and former.requested == requested else now
        cause = WriteCause(job, why, *peer)
        grant = CapGrant(holder, cause, since, dict(requested), granted)
        self.leases.grant(grant, length=lease, now=now.mono)
        self._drop_foreign(errors)
        errors |= self._apply(concerned - errors.keys(), until=now.mono + HOLD_TIMEOUT)
        refused = next((errors[key] for key in requested if key in errors), None)
        if refused is not None:
            self.release(holder, job, "the hold could not be had whole")
            raise refused

    def renew(self, holder: int) -> None:
        """Restart the lease of a connection."""
        self.leases.renew(holder, self._clock.monotonic())

    def release(self, holder: int, job: str = "", why: str = "its holder let go") -> None:
        """Restore the limits that ``holder`` holds for ``job``, or all of them."""
        released = self.leases.release(holder, job).items()
        ended = {key: cause._replace(why=why) for key, cause in released}
        self._reconcile(ended, ended)

    def impose(self, imposed: ImposedLimits) -> None:
        """Set the limits that apply from the next turn on without any lease."""
        self._imposed = imposed

    def accept(self) -> int:
        """Take foreign limits as the originals; the number of knobs."""
        accepted = self.reconciler.accept_foreign()
        self._reconcile(accepted)
        return len(accepted)

    def restore(self) -> tuple[CapsError, ...]:
        """Restore everything, imposed limits too; the failures. Nothing is set again later.

        Foreign limits stay.
        """
        self.suspended = True
        return self._restore_all("everything is given back")

    def stop(self) -> tuple[CapsError, ...]:
        """End every lease: each knob goes to its imposed limit, or to its original.

        Returns the failures. Fixed caps and budgets stay in force until the operator lifts them.
        """
        errors = self._restore_all("the capper stops")
        self.reconciler.record_presence()
        return errors

    def impose_retained(self) -> None:
        """Impose the limits that the journal retains, without a configuration."""
        entries = self.reconciler.entries.items()
        limits = {key: entry.imposed for key, entry in entries if entry.imposed is not None}
        self.impose(ImposedLimits(fixed=limits))

    # -------------------------------------------------------------------------------- time

    def turn(self) -> None:
        """Expire leases, observe every knob with a limit, and bring it there."""
        ended = {
            key: cause._replace(why="its lease lapsed")
            for key, cause in self.leases.expire(self._clock.monotonic()).items()
        }
        self.find_devices()
        wanted = self.planner().wanted()
        self._reconcile({*self.reconciler.entries, *wanted}, ended)
        for key, error in self.reconciler.disobeying().items():
            self.leases.drop([key])
            self._reconcile([key], {key: WriteCause(why=str(error))})
            self.reconciler.fail(key, error)
        now = self._clock.monotonic()
        if now - self._presence_recorded >= PRESENCE_INTERVAL:
            self._presence_recorded = now
            self.reconciler.record_presence()

    def find_devices(self) -> None:
        """Look for devices, if the last time was long ago."""
        now = self._clock.monotonic()
        due = self._listed is None or now - self._listed >= LISTING_INTERVAL
        if due or self.reconciler.devices.listing_stuck:
            self._listed = now
            self.reconciler.devices.find()

    # ------------------------------------------------------------------------------- reports

    def planner(self) -> Planner:
        """Every knob with the present demand for it."""
        return self.reconciler.planner(self._demand())

    def rows(self) -> tuple[CapRow, ...]:
        """Every knob as last read, and its holder."""
        planner = self.planner()
        return tuple(
            self._row(planner.ranged(key), planner.demand) for key in sorted(planner.states)
        )

    @property
    def refused(self) -> frozenset[str]:
        """The errors of knobs that do not have their imposed limit."""
        imposed = self._demand().imposed
        errors = map(self.reconciler.devices.failure, {*imposed.fixed, *imposed.shares})
        return frozenset(str(error) for error in errors if error is not None)

    # ------------------------------------------------------------------------- inner workings

    def _demand(self) -> CapDemand:
        imposed = ImposedLimits() if self.suspended else self._imposed
        return CapDemand(self.leases.limits(), imposed, self._limits)

    def _reconcile(
        self, keys: Iterable[CapKey], ended: Mapping[CapKey, WriteCause] | None = None
    ) -> KnobErrors:
        keys = set(keys)
        errors = self.reconciler.observe(keys, self._demand())
        self._drop_foreign(errors)
        return errors | self._apply(keys - errors.keys(), ended=ended)

    def _apply(
        self,
        keys: Iterable[CapKey],
        *,
        until: int | None = None,
        ended: Mapping[CapKey, WriteCause] | None = None,
    ) -> KnobErrors:
        errors = self.reconciler.apply(self._demand(), keys, until=until, ended=ended or {})
        self._drop_foreign(errors)
        return errors

    def _drop_foreign(self, errors: KnobErrors) -> None:
        """End the grants of knobs that another program has set."""
        self.leases.drop([k for k, error in errors.items() if error.refusal in FOREIGN_REASONS])

    def _restore_all(self, why: str) -> tuple[CapsError, ...]:
        self.leases.clear()
        self.reconciler.devices.retry_now()
        keys = set(self.reconciler.entries)
        errors = self._reconcile(keys, dict.fromkeys(keys, WriteCause(why=why)))
        return tuple(e for e in errors.values() if e.refusal != RefusalReason.FOREIGN)

    def _check(self, holder: int, job: str, requested: Mapping[CapKey, int]) -> None:
        """CapsError if the limits cannot be granted; nothing has been changed then."""
        if self.suspended and requested:
            raise CapsError(SUSPENDED, RefusalReason.NOT_ALLOWED)
        for key, value in requested.items():
            state, held = self.reconciler.knobs.get(key), self.leases.holding(key)
            if state is None:
                raise CapsError(
                    f"No {key.knob} of {key.device!r} can be set here; `wattspan caps status`"
                    " lists the knobs of this host.",
                    RefusalReason.UNKNOWN_DEVICE,
                    key.device,
                )
            if (why := self._forbidden(state)) is not None:
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
            entry = self.reconciler.entries.get(key)
            if entry is not None and entry.left_alone:
                raise foreign_limit_error(entry)

    def _forbidden(self, state: KnobState) -> str | None:
        """The reason if no tuner may hold a knob, else None."""
        knobs, tunable = self._limits.knobs, self._limits.tunable
        if knobs and state.key.knob not in knobs:
            return (
                f"The {state.key.knob} of {state.name} is not to be tuned: [autotune] knobs does"
                f' not name it. Add "{state.key.knob}" to that list.'
            )
        if tunable and not state.is_named(tunable):
            return (
                f"{state.name} is not to be tuned: [autotune] gpus does not name it. Add it to that"
                " list, or choose another device."
            )
        return None

    def _row(self, state: KnobState, demand: CapDemand) -> CapRow:
        key, entry = state.key, self.reconciler.entries.get(state.key)
        held, cause, imposed = self.leases.holding(key), demand.cause(key), demand.imposed
        foreign, error = (
            entry is not None and entry.left_alone,
            self.reconciler.devices.resting(key),
        )
        if error is None and entry is not None and foreign:
            error = foreign_limit_error(entry)
        return CapRow(
            state=state,
            original=entry.original if entry is not None else state.requested,
            wanted=held.requested[key] if held is not None else imposed.fixed.get(key),
            ceiling=imposed.shares.get(key),
            holder=cause.job,
            why=cause.why,
            since=held.since if held is not None else None,
            expires=self.leases.leases[held.holder].until if held is not None else None,
            foreign=foreign,
            lost=entry is not None and entry.lost,
            usable=error is None or error.refusal not in _UNUSABLE,
            trouble="" if error is None else str(error),
        )
