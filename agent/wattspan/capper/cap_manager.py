"""Grants caps, and brings knobs to their limits: observe, plan, journal, write, verify.

A limit is on disk before it is written. A device has no compare-and-swap: it is read just before
each write, and a foreign write in the microseconds between is noticed in the readback. So a write
takes three reads of a device: the observation that the plan needs, one before and one after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace as replaced
from functools import partial

from msgspec.structs import replace

from wattspan.capper.actuators import COARSEST_STEP, is_honoured
from wattspan.capper.audit import AuditAction, AuditEvent
from wattspan.capper.devices import DeviceError, ManagedDevices
from wattspan.capper.journal import ALL_DEVICES, EntrySource, Journal, JournalEntry, JournalError
from wattspan.capper.leases import CapGrant, LeaseRegistry, forbidden
from wattspan.capper.ownership import (
    Ownership,
    QuietPeriods,
    disobedience,
    foreign_limit_error,
    intended_entry,
    is_readable,
    lost_entry,
    not_honoured_error,
    recorded_state,
    release_to_other,
    require_original,
    reset_error,
    reset_notice,
    review_absence,
    review_entry,
    unrecovered_limit_error,
    with_imposed,
)
from wattspan.capper.planner import (
    CapDemand,
    ImposedLimits,
    OperatorLimits,
    Plan,
    Planner,
    WriteCause,
    is_power_knob,
)
from wattspan.capper.protocol import RefusalReason
from wattspan.model import MILLISECOND, SECOND, CapKey, CapRow, KnobState, Trouble
from wattspan.ports import SUSPENDED, CapsError, Clock
from wattspan.sharing.power_budget import RampAllowance
from wattspan.util.unix_sockets import PeerCredentials

LISTING_INTERVAL = 10 * SECOND
"""Interval of device discovery, and of reads of devices without a lease."""
PRESENCE_INTERVAL = 3600 * SECOND
"""Interval of journal writes without a change; a capper that is killed writes none at its end."""
HOLD_TIMEOUT = 500 * MILLISECOND
UNKNOWN_PEER = PeerCredentials()

FOREIGN_REASONS = (RefusalReason.FOREIGN, RefusalReason.UNRECOVERED)
_NOT_WRITTEN = (Trouble.DENIED, Trouble.ABSENT)
"""A write that ends in one of these has certainly not been carried out."""
_UNWANTED = WriteCause(why="no cap is wanted any more")
_RAMP = WriteCause(why="towards its original limit, within [caps] ramp_watts_per_second")

KnobErrors = dict[CapKey, CapsError]


class CapManager:
    """Grants, holds, restores and reports caps; the only writer of the journal and of the devices.

    Belongs to one thread. ``turn`` is to be called about every second.
    """

    def __init__(
        self,
        devices: ManagedDevices,
        journal: Journal,
        clock: Clock,
        record: Callable[[AuditEvent], None],
        limits: OperatorLimits,
    ) -> None:
        self.leases = LeaseRegistry(limits.longest_lease)
        self.suspended = False
        """True once everything was restored on request; then nothing is set any more."""
        self.writes = self.restores = self.resets = 0
        self.news: list[str] = []
        """A sentence for each reset since the list was last cleared."""
        self.journal_trouble = ""
        self.devices, self._journal = devices, journal
        self._clock, self._record, self._limits = clock, record, limits
        self._imposed = ImposedLimits()
        self._listed: int | None = None
        self._presence_recorded = clock.monotonic()
        self.entries: dict[CapKey, JournalEntry] = dict(journal.entries)
        self._inherited = set(journal.entries)
        """Entries of a former capper that were not compared with their device yet."""
        self._quiet = QuietPeriods()
        self._disobeyed_since: dict[CapKey, int] = {}
        self._exempt = set(journal.entries)
        """Knobs whose cap or capper has ended: no ramp delays their way up."""
        self._ramp: RampAllowance | None = None

    def start(self, *, enumerate_devices: bool = True) -> None:
        """Take over the journal. Its devices are shown as recorded until they are read.

        Devices are listed with ``enumerate_devices``, and if a damaged journal does not name them.
        """
        for key, entry in self.entries.items():
            if entry.device != ALL_DEVICES:
                self.devices.knobs.setdefault(key, recorded_state(entry))
        if enumerate_devices or any(key.device == ALL_DEVICES for key in self.entries):
            self.devices.find()
        self._name_lost()

    def reconfigure(self, limits: OperatorLimits) -> None:
        """Apply other settings from now on. Limits that are still permitted stay."""
        self._limits, self.leases.longest = limits, limits.longest_lease
        for key, state in list(self.devices.knobs.items()):
            held = self.leases.holding(key)
            if held is not None and forbidden(state, limits) is not None:
                self.release(held.holder, held.cause.job, "it is not to be tuned any more")

    def hasten(self) -> None:
        """Change limits in one step from now on, as before the end of the capper."""
        self._limits = replaced(self._limits, ramp=0, largest_step=1.0)

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
        if not concerned <= self.devices.knobs.keys():
            self.devices.find()
        if self.suspended and requested:
            raise CapsError(SUSPENDED, RefusalReason.NOT_ALLOWED)
        self.leases.check(holder, job, requested, self.planner())
        errors = self.observe(concerned & self.devices.knobs.keys())
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

    def impose_retained(self) -> None:
        """Impose the limits that the journal retains, without a configuration."""
        entries = self.entries.items()
        limits = {key: entry.imposed for key, entry in entries if entry.imposed is not None}
        self.impose(ImposedLimits(fixed=limits))

    def accept(self) -> int:
        """Take foreign limits, and those of earlier boots, as the originals; number of knobs."""
        accepted = [
            key
            for key, entry in self.entries.items()
            if entry.left_alone or entry.source is EntrySource.EARLIER
        ]
        for key in accepted:
            self._forget(key)
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
        self._record_presence()
        return errors

    def _restore_all(self, why: str) -> tuple[CapsError, ...]:
        self.leases.clear()
        self.devices.retry_now()
        keys = set(self.entries)
        errors = self._reconcile(keys, dict.fromkeys(keys, WriteCause(why=why)))
        return tuple(e for e in errors.values() if e.refusal != RefusalReason.FOREIGN)

    # -------------------------------------------------------------------------------- time

    def turn(self) -> None:
        """Expire leases, observe every knob with a limit, and bring it there."""
        ended = {
            key: cause._replace(why="its lease lapsed")
            for key, cause in self.leases.expire(self._clock.monotonic()).items()
        }
        self.find_devices()
        self._reconcile({*self.entries, *self.planner().wanted()}, ended)
        now = self._clock.monotonic()
        disobeying = disobedience(self.entries, self.devices.knobs, self._disobeyed_since, now)
        for key, error in disobeying.items():
            self.leases.drop([key])
            self._reconcile([key], {key: WriteCause(why=str(error))})
            self._fail(key, error)
        now = self._clock.monotonic()
        if now - self._presence_recorded >= PRESENCE_INTERVAL:
            self._presence_recorded = now
            self._record_presence()

    def find_devices(self) -> None:
        """Look for devices, if the last time was long ago."""
        now = self._clock.monotonic()
        due = self._listed is None or now - self._listed >= LISTING_INTERVAL
        if due or self.devices.listing_stuck:
            self._listed = now
            self.devices.find()

    # ------------------------------------------------------------------------------- reports

    def planner(self) -> Planner:
        """Every knob with the present demand for it."""
        knobs, entries = dict(self.devices.knobs), dict(self.entries)
        return Planner(self._demand(), knobs, entries, self.devices.hidden, self.devices.failing)

    def rows(self) -> tuple[CapRow, ...]:
        """Every knob as last read, and its holder."""
        planner, resting = self.planner(), self.devices.resting
        return tuple(self.leases.row(key, planner, resting(key)) for key in sorted(planner.states))

    @property
    def refused(self) -> frozenset[str]:
        """The errors of knobs that do not have their imposed limit."""
        imposed = self._demand().imposed
        errors = map(self.devices.failure, {*imposed.fixed, *imposed.shares})
        return frozenset(str(error) for error in errors if error is not None)

    @property
    def retained(self) -> int:
        """The number of limits that stay in force when the capper ends."""
        return sum(entry.imposed is not None for entry in self.entries.values())

    def outstanding(self) -> Iterator[AuditEvent]:
        """A row for each cap in force, from the original to the present value."""
        for entry in self.entries.values():
            value = entry.value if entry.written else entry.before
            if value is not None and not entry.left_alone:
                at = self._clock.now().wall
                yield self._journal.row(AuditAction.WRITE, entry, entry.original, value, at=at)

    # -------------------------------------------------------------------------- reconciliation

    def _demand(self) -> CapDemand:
        imposed = ImposedLimits() if self.suspended else self._imposed
        return CapDemand(self.leases.limits(), imposed, self._limits)

    def _reconcile(
        self, keys: Iterable[CapKey], ended: Mapping[CapKey, WriteCause] | None = None
    ) -> KnobErrors:
        keys = set(keys)
        errors = self.observe(keys)
        self._drop_foreign(errors)
        return errors | self._apply(keys - errors.keys(), ended=ended)

    def observe(self, keys: Iterable[CapKey]) -> KnobErrors:
        """Read knobs and compare them with the journal. Knobs that must not be written now."""
        errors: KnobErrors = {}
        wanted, keys = self.planner().wanted(), sorted(keys)
        self.devices.prefetch(key for key in keys if self.devices.resting(key) is None)
        for key in keys:
            rest = self.devices.resting(key)
            # A restore needs no journal and does not wait for one.
            if rest is not None and rest.refusal != RefusalReason.NO_JOURNAL:
                errors[key] = rest
            else:
                self._attempt(key, errors, partial(self._observe, key, wanted=key in wanted))
        return errors

    def _apply(
        self,
        keys: Iterable[CapKey],
        *,
        until: int | None = None,
        ended: Mapping[CapKey, WriteCause] | None = None,
    ) -> KnobErrors:
        """Bring observed knobs to their limits. The errors by knob.

        Writes that are not begun by the monotonic time ``until`` are left to the next call.
        ``ended`` has the knobs whose cap has ended, and the causes: they are raised or restored
        at once, all others within the ramp.
        """
        keys, errors, ended = set(keys), KnobErrors(), ended or {}
        plan = self.planner().plan(keys)
        self._exempt |= ended.keys()
        self._exempt -= keys - {*plan.increase, *plan.restore}
        for key in keys - {*plan.lower, *plan.increase, *plan.restore}:
            self.devices.succeed(key)  # its limit is in force
        plan = self._ramped(plan)
        self._write_all(plan.lower, errors, until)
        for key, value in plan.increase.items():  # each alone: two that fit may not fit together
            if self.planner().fits(key, value):
                self._write_all({key: value}, errors, until)
        for key in plan.restore:
            original = self.entries[key].original
            if self.planner().fits(key, original):
                if self._demand().imposed.budget is not None and original is not None:
                    self._save({key: original})
                cause = ended.get(key, _UNWANTED)
                self._attempt(key, errors, partial(self._restore, key, cause))
        self._save()
        self._drop_foreign(errors)
        return errors

    def _drop_foreign(self, errors: KnobErrors) -> None:
        """End the grants of knobs that another program has set."""
        self.leases.drop([k for k, error in errors.items() if error.refusal in FOREIGN_REASONS])

    def _fail(self, key: CapKey, error: CapsError) -> None:
        """Do not try a knob before a delay that grows with each failure."""
        if error.refusal in FOREIGN_REASONS:  # nothing is written, and it is observed every time
            return
        if self.devices.fail(key, error):
            about = JournalEntry(knob=key.knob, device=key.device)
            self._note(AuditAction.FAIL, about, None, None, WriteCause(why=str(error)))

    def _record_presence(self) -> None:
        """Have on disk how each device was last confirmed, so that later resets are found.

        An odometer of the last write would be exceeded soon after a reset.
        """
        for key, entry in self.entries.items():
            if entry.source is EntrySource.RECORDED:
                presence = self.devices.confirmed(key, entry.presence)
                self.entries[key] = replace(entry, presence=presence)
        self._store()

    def _name_lost(self) -> None:
        """Replace "every device", where devices can be listed, by those that may be capped."""
        now = self._clock.now().wall
        for knob in [key.knob for key in self.entries if key.device == ALL_DEVICES]:
            if not self.devices.is_listed(knob):
                continue
            del self.entries[CapKey(knob, ALL_DEVICES)]
            for key, found in self.devices.knobs.items():
                lost = lost_entry(found, now)
                if key.knob is knob and key not in self.entries and lost is not None:
                    self.entries[key] = lost
                    error = str(unrecovered_limit_error(lost))
                    self._note(AuditAction.FAIL, lost, None, found.requested, WriteCause(why=error))

    def _ramped(self, plan: Plan) -> Plan:
        """The part of ``plan`` that the ramp permits now."""
        rate, now = self._limits.ramp, self._clock.monotonic()
        if not rate:
            self._ramp = None
            return plan
        self._ramp = (self._ramp or RampAllowance.full(rate, now)).advanced(rate, now)
        return self.planner().ramped(plan, self._ramp, self._exempt)

    def _use_ramp(self, key: CapKey, present: int | None, value: int | None) -> None:
        """Count a change that is about to be written."""
        if self._ramp and is_power_knob(key.knob) and present is not None and value is not None:
            self._ramp = self._ramp.used(value - present)

    # ---------------------------------------------------------------------------- observation

    def _observe(self, key: CapKey, *, wanted: bool) -> None:
        """Read one knob, and update its entry. CapsError if it must not be written now."""
        entry, every = self.entries.get(key), self.entries.get(CapKey(key.knob, ALL_DEVICES))
        if entry is None and every is not None:
            raise unrecovered_limit_error(every)
        found, now = self.devices.read(key), self._clock.monotonic()
        if entry is None:
            self.devices.confirm(key)
            return
        result = review_entry(
            entry,
            found,
            inherited=key in self._inherited,
            wanted=wanted,
            quiet=self._quiet.is_over(entry, now),
            now=self._clock.now().wall,
            absence=self.devices.absence(key, entry.presence),
        )
        if found.requested is not None or not is_readable(key.knob):
            self._inherited.discard(key)
            self.devices.confirm(key)
        self._adopt(key, entry, result)
        if result.error is not None:
            raise result.error

    def _adopt(self, key: CapKey, entry: JournalEntry, result: Ownership) -> None:
        if result.entry is None:
            self._forget(key)
        else:
            self.entries[key] = result.entry
        if result.action is None:
            return
        if result.action is AuditAction.RESET:
            self.resets += 1
            self.news.append(reset_notice(entry, result))
            self._quiet.end(key)
        if result.action is AuditAction.FOREIGN:
            self._quiet.begin(key, self._clock.monotonic())
        about = result.entry if result.action is AuditAction.FAIL and result.entry else entry
        self._note(result.action, about, result.old, result.new, WriteCause(why=result.why))

    # ---------------------------------------------------------------------------------- writes

    def _write_all(
        self, targets: Mapping[CapKey, int], errors: KnobErrors, until: int | None
    ) -> None:
        """Journal all ``targets`` at once, then write and verify each.

        One that has no setting to restore is refused, and the others are written.
        """
        for key in targets:
            if (rest := self.devices.resting(key)) is not None:
                errors[key] = rest
            elif key not in self.entries:
                self._attempt(key, errors, partial(require_original, self.devices.knobs[key]))
        targets = {key: value for key, value in targets.items() if key not in errors}
        if not targets:
            return
        try:
            self._journal_intent(targets)
        except JournalError as error:
            for key in targets:
                errors[key] = CapsError(str(error), RefusalReason.NO_JOURNAL, key.device)
                self._fail(key, errors[key])
            return
        for key in targets:
            if until is not None and self._clock.monotonic() > until:
                return
            cause = self._demand().cause(key)
            cause = cause if any(cause) else _RAMP
            self._attempt(key, errors, partial(self._write, key, cause))

    def _journal_intent(self, targets: Mapping[CapKey, int]) -> None:
        """Have on disk that these knobs are about to be written. JournalError."""
        now, states = self._clock.now().wall, self.devices.knobs
        draft = self.entries | {
            key: intended_entry(self.entries.get(key), states[key], value, now)
            for key, value in targets.items()
        }
        draft = with_imposed(draft, self.planner().retained(targets))
        self._journal.save(draft)
        self.entries = draft

    def _write(self, key: CapKey, cause: WriteCause) -> None:
        """Write the journaled limit, unless another program wrote the knob, and verify it."""
        entry, state = self.entries[key], self.devices.read(key)
        present = entry.original if entry.before is None else entry.before
        if is_readable(key.knob) and state.requested != present:
            raise self._overtaken(entry, state)
        value, least = entry.value, entry.minimum
        self._use_ramp(key, present, value)
        try:
            shown, failure = self._put(key, value)
        except DeviceError as error:
            if not is_readable(key.knob) and error.trouble in _NOT_WRITTEN:
                self._undo(entry)
            raise
        if is_readable(key.knob):
            if (value or 0) + COARSEST_STEP <= (shown or 0) < (present or 0):
                least = shown  # its firmware raises what is lower
            elif value is None or not is_honoured(value, shown):
                if shown == present:
                    self._undo(entry)
                raise failure or not_honoured_error(state, value, shown)
            value = shown
        self.entries[key] = replace(entry, value=value, minimum=least, before=None, written=True)
        self.devices.succeed(key)
        self.devices.confirm(key)
        self.writes += 1
        self._note(AuditAction.WRITE, entry, present, value, cause)

    def _restore(self, key: CapKey, cause: WriteCause) -> None:
        """Restore the original if the present value is the capper's; verify it."""
        self._observe(key, wanted=False)
        entry = self.entries.get(key)
        if entry is None:  # the original is in force already
            self.devices.succeed(key)
            return
        original = entry.original
        self._use_ramp(key, entry.value, original)
        shown, failure = self._put(key, original)
        if is_readable(key.knob) and not (original is not None and is_honoured(original, shown)):
            most = self.devices.knobs[key].maximum or 0
            if (entry.value or 0) < most < (original or 0):  # its range was lowered since
                self._write_all({key: most}, {}, None)
            raise failure or not_honoured_error(self.devices.knobs[key], original, shown)
        self._forget(key)
        self.devices.succeed(key)
        self.restores += 1
        self._note(AuditAction.RESTORE, entry, entry.value, original, cause)

    def _put(self, key: CapKey, value: int | None) -> tuple[int | None, DeviceError | None]:
        """Write one knob; the limit that it shows then, and the error of the write.

        A write that failed may have arrived all the same. DeviceError if that cannot be read.
        """
        try:
            return self.devices.write(key, value).requested, None
        except DeviceError as error:
            if not is_readable(key.knob):
                raise
            return self.devices.read(key).requested, error

    def _undo(self, entry: JournalEntry) -> None:
        """The write was not carried out: the entry is as before it."""
        if entry.before is None:
            self._forget(entry.key)
        else:
            undone = replace(entry, value=entry.before, before=None, written=True)
            self.entries[entry.key] = undone

    def _forget(self, key: CapKey) -> None:
        self.entries.pop(key, None)
        self._inherited.discard(key)

    def _overtaken(self, entry: JournalEntry, state: KnobState) -> CapsError:
        """The setting changed between the observation and the write."""
        reset = review_absence(entry, state, self.devices.absence(entry.key, entry.presence))
        if reset is not None:
            self._adopt(entry.key, entry, reset)
            return reset_error(state)
        if entry.before is None:  # the capper had set nothing there
            self._forget(entry.key)
        else:
            self._adopt(entry.key, entry, release_to_other(entry, state))
        return foreign_limit_error(replace(entry, foreign=state.requested))

    def _save(self, planned: Mapping[CapKey, int] | None = None) -> None:
        """Have the present entries on disk, with the limits that stay if this process ends."""
        retained = self.planner().retained(planned or {})
        self.entries = with_imposed(self.entries, retained)
        self._store()

    def _store(self) -> None:
        try:
            self._journal.save(self.entries)
            self.journal_trouble = ""
        except JournalError as error:
            self.journal_trouble = str(error)

    # -------------------------------------------------------------------------------- calls

    def _attempt(self, key: CapKey, errors: KnobErrors, act: Callable[[], None]) -> None:
        try:
            act()
        except CapsError as error:
            errors[key] = error
            self._fail(key, error)

    def _note(
        self,
        action: AuditAction,
        entry: JournalEntry,
        old: int | None,
        new: int | None,
        cause: WriteCause,
    ) -> None:
        at = self._clock.now().wall
        self._record(self._journal.row(action, entry, old, new, at=at, **cause._asdict()))
