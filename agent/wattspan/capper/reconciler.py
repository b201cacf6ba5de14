"""Brings knobs to their limits: observe, plan, journal, write, verify.

A limit is on disk before it is written. A device has no compare-and-swap: it is read just before
each write, and a foreign write in the microseconds between is noticed in the readback. So a write
takes three reads of a device: the observation that the plan needs, one before and one after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Final, NamedTuple

from msgspec.structs import replace

from wattspan.capper.actuators import is_honoured
from wattspan.capper.audit import AuditAction, AuditEvent, row_checksum
from wattspan.capper.devices import DeviceError, ManagedDevices
from wattspan.capper.journal import ALL_DEVICES, EntrySource, Journal, JournalEntry, JournalError
from wattspan.capper.ownership import (
    Ownership,
    disobeyed_error,
    foreign_limit_error,
    is_obeyed,
    is_readable,
    lost_entry,
    new_entry,
    not_honoured_error,
    recorded_state,
    release_to_other,
    reset_error,
    reset_notice,
    review_absence,
    review_entry,
    unreadable_error,
    unrecovered_limit_error,
)
from wattspan.capper.planner import CapDemand, Plan, Planner, WriteCause, is_power_knob
from wattspan.capper.protocol import RefusalReason
from wattspan.model import SECOND, CapKey, KnobState, Trouble
from wattspan.ports import CapsError, Clock
from wattspan.sharing.power_budget import RampAllowance

QUIET_PERIOD: Final = 60 * SECOND
"""Time that a restored original must last after a foreign write before the knob is used again."""
MAX_QUIET_PERIOD: Final = 3600 * SECOND
FOREIGN_REASONS = (RefusalReason.FOREIGN, RefusalReason.UNRECOVERED)
_NOT_WRITTEN = (Trouble.DENIED, Trouble.ABSENT)
"""A write that ends in one of these has certainly not been carried out."""
_ENFORCEMENT_TIMEOUT = 5 * SECOND
_UNWANTED = WriteCause(why="no cap is wanted any more")
_RAMP = WriteCause(why="towards its original limit, within [caps] ramp_watts_per_second")

KnobErrors = dict[CapKey, CapsError]


class _QuietPeriod(NamedTuple):
    since: int
    needed: int


class Reconciler:
    """Owns the state of all knobs and is the only writer of the journal and of the devices."""

    def __init__(
        self,
        devices: ManagedDevices,
        journal: Journal,
        clock: Clock,
        record: Callable[[AuditEvent], None],
    ) -> None:
        self.writes = 0
        self.restores = 0
        self.resets = 0
        self.news: list[str] = []
        """A sentence for each reset since the list was last cleared."""
        self.journal_trouble = ""
        self.devices, self._journal = devices, journal
        self._clock, self._record = clock, record
        self._entries: dict[CapKey, JournalEntry] = dict(journal.entries)
        self._inherited = set(journal.entries)
        """Entries of a former capper that were not compared with their device yet."""
        self._quiet: dict[CapKey, _QuietPeriod] = {}
        self._disobeyed_since: dict[CapKey, int] = {}
        self._exempt = set(journal.entries)
        """Knobs whose cap or capper has ended: no ramp delays their way up."""
        self._ramp: RampAllowance | None = None

    # ------------------------------------------------------------------------------ knowledge

    @property
    def knobs(self) -> Mapping[CapKey, KnobState]:
        """Every known knob as last read."""
        return MappingProxyType(self.devices.knobs)

    @property
    def entries(self) -> Mapping[CapKey, JournalEntry]:
        return MappingProxyType(self._entries)

    def planner(self, demand: CapDemand) -> Planner:
        knobs, entries = dict(self.devices.knobs), dict(self._entries)
        return Planner(demand, knobs, entries, self.devices.hidden, self.devices.failing)

    @property
    def retained(self) -> int:
        """The number of limits that stay in force when the capper ends."""
        return sum(entry.imposed is not None for entry in self._entries.values())

    @property
    def unrecovered(self) -> str:
        """Names the devices with lost originals; "" if there are none."""
        entries = self._entries.values()
        lost = ", ".join(f"{one.knob} of {one.name}" for one in entries if one.lost)
        return lost and (
            f"The journal was damaged, and the original limit is unknown: {lost}. Set each limit by"
            " hand, or take the present ones as the originals with `wattspan caps accept`."
        )

    @property
    def foreign(self) -> Iterator[str]:
        """A sentence for each knob that is left to another program."""
        for entry in self._entries.values():
            if entry.foreign is not None and not entry.lost:
                yield str(foreign_limit_error(entry))

    def outstanding(self) -> Iterator[AuditEvent]:
        """A row for each cap in force, from the original to the present value."""
        for entry in self._entries.values():
            value = entry.value if entry.written else entry.before
            if value is not None and not entry.left_alone:
                yield self._event(AuditAction.WRITE, entry, entry.original, value)

    # -------------------------------------------------------------------------------- devices

    def start(self, *, enumerate_devices: bool = True) -> None:
        """Take over the journal. Its devices are shown as recorded until they are read.

        Devices are listed with ``enumerate_devices``, and if a damaged journal does not name them.
        """
        for key, entry in self._entries.items():
            if entry.device != ALL_DEVICES:
                self.devices.knobs.setdefault(key, recorded_state(entry))
        if enumerate_devices or any(key.device == ALL_DEVICES for key in self._entries):
            self.devices.find()
        self._name_lost()

    def _name_lost(self) -> None:
        """Replace "every device", where devices can be listed, by those that may be capped."""
        now = self._clock.now().wall
        for knob in [key.knob for key in self._entries if key.device == ALL_DEVICES]:
            if not self.devices.is_listed(knob):
                continue
            del self._entries[CapKey(knob, ALL_DEVICES)]
            for key, found in self.devices.knobs.items():
                lost = lost_entry(found, now)
                if key.knob is knob and key not in self._entries and lost is not None:
                    self._entries[key] = lost
                    error = str(unrecovered_limit_error(lost))
                    self._note(AuditAction.FAIL, lost, None, found.requested, WriteCause(why=error))

    # -------------------------------------------------------------------------- reconciliation

    def observe(self, keys: Iterable[CapKey], demand: CapDemand) -> KnobErrors:
        """Read knobs and compare them with the journal. Knobs that must not be written now."""
        errors: KnobErrors = {}
        wanted, keys = self.planner(demand).wanted(), sorted(keys)
        self.devices.prefetch(key for key in keys if self.devices.resting(key) is None)
        for key in keys:
            rest = self.devices.resting(key)
            # A restore needs no journal and does not wait for one.
            if rest is not None and rest.refusal != RefusalReason.NO_JOURNAL:
                errors[key] = rest
            else:
                self._attempt(key, errors, partial(self._observe, key, wanted=key in wanted))
        return errors

    def apply(
        self,
        demand: CapDemand,
        keys: Iterable[CapKey],
        *,
        until: int | None = None,
        ended: Mapping[CapKey, WriteCause],
    ) -> KnobErrors:
        """Bring observed knobs to their limits. The errors by knob.

        Writes that are not begun by the monotonic time ``until`` are left to the next call.
        ``ended`` has the knobs whose cap has ended, and the causes: they are raised or restored
        at once, all others within the ramp.
        """
        keys, errors = set(keys), KnobErrors()
        plan = self.planner(demand).plan(keys)
        self._exempt |= ended.keys()
        self._exempt -= keys - {*plan.increase, *plan.restore}
        for key in keys - {*plan.lower, *plan.increase, *plan.restore}:
            self.devices.succeed(key)  # its limit is in force
        plan = self._ramped(demand, plan)
        self._write_all(demand, plan.lower, errors, until)
        for key, value in plan.increase.items():  # each alone: two that fit may not fit together
            if self.planner(demand).fits(key, value):
                self._write_all(demand, {key: value}, errors, until)
        for key in plan.restore:
            original = self._entries[key].original
            if self.planner(demand).fits(key, original):
                if demand.imposed.budget is not None and original is not None:
                    self._save(demand, {key: original})
                cause = ended.get(key, _UNWANTED)
                self._attempt(key, errors, partial(self._restore, key, cause))
        self._save(demand)
        return errors

    def disobeying(self) -> KnobErrors:
        """Devices that show a cap and do not obey it, for longer than they may take."""
        now, since, errors = self._clock.monotonic(), self._disobeyed_since, KnobErrors()
        for key, entry in self._entries.items():
            state = self.devices.knobs.get(key)
            if state is None or is_obeyed(entry, state):
                since.pop(key, None)
            elif now - since.setdefault(key, now) >= _ENFORCEMENT_TIMEOUT:
                errors[key] = disobeyed_error(state)
        return errors

    def fail(self, key: CapKey, error: CapsError) -> None:
        """Do not try a knob before a delay that grows with each failure."""
        if error.refusal in FOREIGN_REASONS:  # nothing is written, and it is observed every time
            return
        if self.devices.fail(key, error):
            about = JournalEntry(knob=key.knob, device=key.device)
            self._note(AuditAction.FAIL, about, None, None, WriteCause(why=str(error)))

    def record_presence(self) -> None:
        """Have on disk how each device was last confirmed, so that later resets are found.

        An odometer of the last write would be exceeded soon after a reset.
        """
        for key, entry in self._entries.items():
            if entry.source is EntrySource.RECORDED:
                presence = self.devices.confirmed(key, entry.presence)
                self._entries[key] = replace(entry, presence=presence)
        self._store()

    def accept_foreign(self) -> list[CapKey]:
        """Forget the entries of foreign limits and of earlier boots; their knobs."""
        accepted = [
            key
            for key, entry in self._entries.items()
            if entry.left_alone or entry.source is EntrySource.EARLIER
        ]
        for key in accepted:
            self._forget(key)
        return accepted

    def _ramped(self, demand: CapDemand, plan: Plan) -> Plan:
        """The part of ``plan`` that the ramp permits now."""
        rate, now = demand.limits.ramp, self._clock.monotonic()
        if not rate:
            self._ramp = None
            return plan
        self._ramp = (self._ramp or RampAllowance.full(rate, now)).advanced(rate, now)
        return self.planner(demand).ramped(plan, self._ramp, self._exempt)

    def _use_ramp(self, key: CapKey, present: int | None, value: int | None) -> None:
        """Count a change that is about to be written."""
        if self._ramp and is_power_knob(key.knob) and present is not None and value is not None:
            self._ramp = self._ramp.used(value - present)

    # ---------------------------------------------------------------------------- observation

    def _observe(self, key: CapKey, *, wanted: bool) -> None:
        """Read one knob, and update its entry. CapsError if it must not be written now."""
        entry, every = self._entries.get(key), self._entries.get(CapKey(key.knob, ALL_DEVICES))
        if entry is None and every is not None:
            raise unrecovered_limit_error(every)
        found, now = self.devices.read(key), self._clock.monotonic()
        if entry is None:
            self.devices.confirm(key)
            return
        quiet = self._quiet.get(key)
        if entry.foreign is not None and not entry.lost and quiet is None:
            quiet = self._quiet[key] = _QuietPeriod(now, QUIET_PERIOD)
        result = review_entry(
            entry,
            found,
            inherited=key in self._inherited,
            wanted=wanted,
            quiet=quiet is not None and now - quiet.since >= quiet.needed,
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
            self._entries[key] = result.entry
        if result.action is None:
            return
        if result.action is AuditAction.RESET:
            self.resets += 1
            self.news.append(reset_notice(entry, result))
            self._quiet.pop(key, None)
        if result.action is AuditAction.FOREIGN:  # the next quiet period must be longer
            quiet = self._quiet.get(key)
            needed = QUIET_PERIOD if quiet is None else min(2 * quiet.needed, MAX_QUIET_PERIOD)
            self._quiet[key] = _QuietPeriod(self._clock.monotonic(), needed)
        about = result.entry if result.action is AuditAction.FAIL and result.entry else entry
        self._note(result.action, about, result.old, result.new, WriteCause(why=result.why))

    # ---------------------------------------------------------------------------------- writes

    def _write_all(
        self,
        demand: CapDemand,
        targets: Mapping[CapKey, int],
        errors: KnobErrors,
        until: int | None,
    ) -> None:
        """Journal all ``targets`` at once, then write and verify each.

        One that has no setting to restore is refused, and the others are written.
        """
        for key in targets:
            if (rest := self.devices.resting(key)) is not None:
                errors[key] = rest
            elif key not in self._entries:
                self._attempt(key, errors, partial(self._require_original, key))
        targets = {key: value for key, value in targets.items() if key not in errors}
        if not targets:
            return
        try:
            self._journal_intent(demand, targets)
        except JournalError as error:
            for key in targets:
                errors[key] = CapsError(str(error), RefusalReason.NO_JOURNAL, key.device)
                self.fail(key, errors[key])
            return
        for key in targets:
            if until is not None and self._clock.monotonic() > until:
                return
            cause = demand.cause(key)
            cause = cause if any(cause) else _RAMP
            self._attempt(key, errors, partial(self._write, key, cause))

    def _require_original(self, key: CapKey) -> None:
        """CapsError for a knob without a setting that could be restored."""
        state = self.devices.knobs[key]
        if is_readable(key.knob) and state.requested is None:
            raise unreadable_error(state)

    def _journal_intent(self, demand: CapDemand, targets: Mapping[CapKey, int]) -> None:
        """Have on disk that these knobs are about to be written. JournalError."""
        draft = dict(self._entries)
        for key, value in targets.items():
            entry, state = draft.get(key), self.devices.knobs[key]
            if entry is not None:
                draft[key] = replace(
                    entry,
                    before=state.requested,
                    value=value,
                    written=False,
                    source=EntrySource.RECORDED,
                    presence=state.presence,
                )
            else:
                draft[key] = replace(new_entry(state, self._clock.now().wall), value=value)
        draft = _with_imposed(draft, self.planner(demand).retained(targets))
        self._journal.save(draft)
        self._entries = draft

    def _write(self, key: CapKey, cause: WriteCause) -> None:
        """Write the journaled limit, unless another program wrote the knob, and verify it."""
        entry, state = self._entries[key], self.devices.read(key)
        present = entry.original if entry.before is None else entry.before
        if is_readable(key.knob) and state.requested != present:
            raise self._overtaken(entry, state)
        value = entry.value
        self._use_ramp(key, present, value)
        try:
            shown, failure = self._put(key, value)
        except DeviceError as error:
            if not is_readable(key.knob) and error.trouble in _NOT_WRITTEN:
                self._undo(entry)
            raise
        if is_readable(key.knob):
            if value is None or not is_honoured(value, shown):
                if shown == present:
                    self._undo(entry)
                raise failure or not_honoured_error(state, value, shown)
            value = shown
        self._entries[key] = replace(entry, value=value, before=None, written=True)
        self.devices.succeed(key)
        self.devices.confirm(key)
        self.writes += 1
        self._note(AuditAction.WRITE, entry, present, value, cause)

    def _restore(self, key: CapKey, cause: WriteCause) -> None:
        """Restore the original if the present value is the capper's; verify it."""
        self._observe(key, wanted=False)
        entry = self._entries.get(key)
        if entry is None:  # the original is in force already
            self.devices.succeed(key)
            return
        original = entry.original
        self._use_ramp(key, entry.value, original)
        shown, failure = self._put(key, original)
        if is_readable(key.knob) and not (original is not None and is_honoured(original, shown)):
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
            self._entries[entry.key] = undone

    def _forget(self, key: CapKey) -> None:
        self._entries.pop(key, None)
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

    def _save(self, demand: CapDemand, planned: Mapping[CapKey, int] | None = None) -> None:
        """Have the present entries on disk, with the limits that stay if this process ends."""
        retained = self.planner(demand).retained(planned or {})
        self._entries = _with_imposed(self._entries, retained)
        self._store()

    def _store(self) -> None:
        try:
            self._journal.save(self._entries)
            self.journal_trouble = ""
        except JournalError as error:
            self.journal_trouble = str(error)

    # -------------------------------------------------------------------------------- calls

    def _attempt(self, key: CapKey, errors: KnobErrors, act: Callable[[], None]) -> None:
        try:
            act()
        except CapsError as error:
            errors[key] = error
            self.fail(key, error)

    def _note(
        self,
        action: AuditAction,
        entry: JournalEntry,
        old: int | None,
        new: int | None,
        cause: WriteCause,
    ) -> None:
        self._record(self._event(action, entry, old, new, cause))

    def _event(
        self,
        action: AuditAction,
        entry: JournalEntry,
        old: int | None,
        new: int | None,
        cause: WriteCause = WriteCause(),  # noqa: B008 - immutable
    ) -> AuditEvent:
        event = AuditEvent(
            at=self._clock.now().wall,
            deed=action,
            knob=entry.knob,
            device=entry.device,
            name=entry.name,
            old=old,
            new=new,
            original=entry.original,
            **cause._asdict(),
        )
        return replace(event, check=row_checksum(self._journal.boot_id, event))


def _with_imposed(
    entries: Mapping[CapKey, JournalEntry], limits: Mapping[CapKey, int]
) -> dict[CapKey, JournalEntry]:
    """The entries with the limits that stay in force if this process ends."""
    return {
        key: entry if entry.imposed == limits.get(key) else replace(entry, imposed=limits.get(key))
        for key, entry in entries.items()
    }
