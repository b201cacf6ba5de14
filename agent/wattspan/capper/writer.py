"""Writes to devices, each only if what stands there is what we know, and only once it is on disk.

A device has no compare-and-swap of its own. So it is read just before each write; a writer who
comes in the microseconds between is noticed when the value is read back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from wattspan.capper.actuators.common import is_honoured
from wattspan.capper.audit import AuditAction, AuditEvent, row_checksum
from wattspan.capper.devices import (
    ManagedDevices,
    SettingOwner,
    is_adoptable,
    is_original_plausible,
    is_readable,
    may_be_capped,
    refusal_reason,
    setting_owner,
)
from wattspan.capper.journal import EntrySource, Journal, JournalEntry, JournalError
from wattspan.capper.journal_records import ALL_DEVICES
from wattspan.capper.protocol import RefusalReason
from wattspan.model import SECOND, CapKey, KnobState, Trouble
from wattspan.ports import ActuatorError, CapsError, Clock

QUIET_PERIOD = 60 * SECOND
"""How long an original that somebody else put back must stand before the knob is turned again."""
MAX_QUIET_PERIOD = 3600 * SECOND

_NOT_WRITTEN = frozenset({Trouble.DENIED, Trouble.ABSENT})
"""Troubles of which a write that ends in them has certainly not been carried out."""


class WriteCause(NamedTuple):
    """On whose behalf something is written."""

    job: str = ""
    why: str = ""
    pid: int | None = None
    uid: int | None = None


class _QuietPeriod(NamedTuple):
    since: int
    needed: int


class LimitWriter:
    """The entries of the journal, and the devices they speak of.

    Every call about one knob raises CapsError: FOREIGN where it is somebody else's now, LOST
    where it does not answer.
    """

    def __init__(
        self,
        devices: ManagedDevices,
        journal: Journal,
        clock: Clock,
        record: Callable[[AuditEvent], None],
    ) -> None:
        self.devices = devices
        self.entries: dict[CapKey, JournalEntry] = dict(journal.entries)
        self.writes = 0
        self.restores = 0
        self._journal, self._clock, self._record = journal, clock, record
        self._inherited = set(self.entries)
        self._calm: dict[CapKey, _QuietPeriod] = {}

    def assume_recorded(self) -> None:
        """Show a device that does not answer as its entry records it, until it is read."""
        for entry in self.entries.values():
            if entry.device == ALL_DEVICES:
                continue
            certain = entry.source is EntrySource.RECORDED
            limit = entry.value if certain else entry.original
            self.devices.assume(
                KnobState(
                    entry.key,
                    entry.name or entry.device,
                    minimum=entry.minimum,
                    default=entry.default,
                    maximum=entry.maximum,
                    requested=limit if entry.foreign is None else entry.foreign,
                )
            )

    def look(self, key: CapKey, *, wanted: bool) -> KnobState:
        """Read a knob, and let go of it if it is not ours any more.

        ``wanted``: whether anybody wants a cap on it, so that the original's being back there is
        somebody else's doing and no matter of course.
        """
        entry = self.entries.get(key)
        every = self.entries.get(CapKey(key.knob, ALL_DEVICES))
        if entry is None and every is not None:
            raise unrecovered_limit_error(every)
        state = self._read(key)
        if entry is None:
            return state
        if entry.lost:
            self._look_at_lost(entry, state)
            return state
        if entry.foreign is not None:
            self._inherited.discard(key)
            self._thaw(entry, state)
            return state
        standing = setting_owner(entry, state)
        if standing is SettingOwner.UNKNOWN:
            raise _unreadable_limit_error(state)
        inherited = key in self._inherited
        self._inherited.discard(key)
        if inherited and self._is_void(entry, state, standing):
            return state
        match standing:
            case SettingOwner.ORIGINAL if inherited or not (wanted and entry.written):
                self._forget(key)
            case SettingOwner.ORIGINAL | SettingOwner.FOREIGN:
                raise self._let_go(entry, state)
        return state

    def intend(self, targets: Mapping[CapKey, int], retained: Mapping[CapKey, int]) -> None:
        """Have it on disk that these knobs, just looked at, are about to be set. JournalError.

        ``retained`` are the limits that all knobs keep if this process ends from now on.
        """
        draft = dict(self.entries)
        for key, value in targets.items():
            entry, state = self.entries.get(key), self.devices.states[key]
            if entry is not None:
                draft[key] = replace(
                    entry,
                    before=state.requested,
                    value=value,
                    written=False,
                    source=EntrySource.RECORDED,
                )
            else:
                draft[key] = self._opened(state, value)
        draft = _retaining(draft, retained)
        self._journal.save(draft)
        self.entries = draft

    def put(self, key: CapKey, cause: WriteCause) -> None:
        """Carry out what is intended for ``key``, and see that it stands there afterwards."""
        entry, state = self.entries[key], self._read(key)
        stood = entry.original if entry.before is None else entry.before
        if is_readable(key.knob) and state.requested != stood:
            raise self._overtaken(entry, state)
        value = entry.value
        assert value is not None  # noqa: S101 - it was intended
        try:
            told = self.devices.write(key, value).requested
        except ActuatorError as error:
            told = self._despite(entry, stood, error)
        if is_readable(key.knob):
            if not is_honoured(value, told):
                if told == stood:
                    self._undo(entry)
                raise _not_honoured_error(state, value, told)
            value = told if told is not None else value
        self.entries[key] = replace(entry, value=value, before=None, written=True)
        self.writes += 1
        self._tell(AuditAction.WRITE, entry, stood, value, cause)

    def give_back(self, key: CapKey, cause: WriteCause) -> None:
        """Restore the original, if what stands there is ours; if the original does, be content."""
        self.look(key, wanted=False)
        entry = self.entries.get(key)
        if entry is None:
            return
        if entry.foreign is not None:
            raise foreign_limit_error(entry)
        stood = self.devices.states[key].requested
        try:
            told = self.devices.write(key, entry.original).requested
        except ActuatorError as error:
            self.devices.failed(key, error)
            told = self._read(key).requested if is_readable(key.knob) else None
            if not is_readable(key.knob) or told == stood:
                raise device_error(key, error) from None
        original = entry.original
        if is_readable(key.knob) and not (original is not None and is_honoured(original, told)):
            raise _not_honoured_error(self.devices.states[key], original, told)
        self._forget(key)
        self.restores += 1
        self._tell(AuditAction.RESTORE, entry, entry.value, original, cause)

    def accept(self, key: CapKey) -> None:
        """What somebody else has written is the original from now on."""
        self._forget(key)

    @property
    def needs_enumeration(self) -> bool:
        """True if a damaged journal leaves it to the hardware to name the devices."""
        return any(key.device == ALL_DEVICES for key in self.entries)

    def name_lost(self) -> None:
        """Replace "every device", where devices can be listed, by those that may be capped."""
        for knob in [key.knob for key in self.entries if key.device == ALL_DEVICES]:
            if not self.devices.listed(knob):
                continue
            del self.entries[CapKey(knob, ALL_DEVICES)]
            for state in self.devices.states.values():
                if state.key.knob is knob and state.key not in self.entries:
                    self._lose(state.key, state)

    @property
    def unrecovered(self) -> str:
        """Names the devices whose original limits are lost; "" if there are none."""
        lost = ", ".join(f"{one.knob} of {one.name}" for one in self.entries.values() if one.lost)
        return lost and (
            f"The journal was damaged, and the original limit is unknown: {lost}. Set each limit by"
            " hand, or take the present ones as the originals with `wattspan caps accept`."
        )

    def outstanding(self) -> Iterator[AuditEvent]:
        """A row for each cap in force, from the original to the value that stands."""
        for entry in self.entries.values():
            value = entry.value if entry.written else entry.before
            if value is not None and not entry.left_alone:
                yield self._event(AuditAction.WRITE, entry, entry.original, value, WriteCause())

    def retain(self, limits: Mapping[CapKey, int]) -> None:
        """Note the limit that each knob keeps if this process ends now; the others: none."""
        self.entries = _retaining(self.entries, limits)

    def flush(self) -> None:
        """Have on disk what is so: what was written, what was given back. JournalError."""
        self._journal.save(self.entries)

    def obeyed(self, key: CapKey) -> bool:
        """Whether the device is not known to obey anything higher than what we set."""
        entry, state = self.entries.get(key), self.devices.states.get(key)
        if entry is None or state is None or not entry.written or entry.left_alone:
            return True
        ours, enforced = entry.value, state.enforced
        return ours is None or enforced is None or not is_readable(key.knob) or enforced <= ours

    # --------------------------------------------------------------------------- inner workings

    def _read(self, key: CapKey) -> KnobState:
        try:
            return self.devices.read(key)
        except ActuatorError as error:
            self.devices.failed(key, error)
            raise device_error(key, error) from None

    def _opened(self, state: KnobState, value: int) -> JournalEntry:
        if is_readable(state.key.knob) and state.requested is None:
            raise JournalError(str(_unreadable_limit_error(state)))
        return JournalEntry(
            knob=state.key.knob,
            device=state.key.device,
            name=state.name,
            original=state.requested if is_readable(state.key.knob) else None,
            default=state.default,
            minimum=state.minimum,
            maximum=state.maximum,
            value=value,
            since=self._clock.now().wall,
        )

    def _despite(self, entry: JournalEntry, stood: int | None, error: ActuatorError) -> int | None:
        """What stands after a write that failed: it may have arrived all the same."""
        self.devices.failed(entry.key, error)
        if not is_readable(entry.knob):
            if error.trouble in _NOT_WRITTEN:
                self._undo(entry)
            raise device_error(entry.key, error) from None
        told = self._read(entry.key).requested
        if entry.value is None or not is_honoured(entry.value, told):
            if told == stood:
                self._undo(entry)
            raise device_error(entry.key, error) from None
        return told

    def _undo(self, entry: JournalEntry) -> None:
        """The write has not been carried out: what stood there stands there."""
        if entry.before is None:
            self._forget(entry.key)
        else:
            self.entries[entry.key] = replace(entry, value=entry.before, before=None, written=True)

    def _is_void(self, entry: JournalEntry, state: KnobState, standing: SettingOwner) -> bool:
        """True if an inherited entry has ended; CapsError if it cannot be relied upon."""
        if standing is SettingOwner.OURS:
            lost = not is_original_plausible(entry, state)
        elif entry.source is EntrySource.EARLIER:
            self._forget(entry.key)
            why = "the limit of an earlier boot is not in force any more"
            self._tell(AuditAction.VOID, entry, entry.value, state.requested, WriteCause(why=why))
            return True
        else:
            lost = standing is SettingOwner.FOREIGN and entry.source is EntrySource.SALVAGED
        if lost:
            self._lose(entry.key, state)
            if entry.key in self.entries:
                raise unrecovered_limit_error(self.entries[entry.key])
        return lost

    def _lose(self, key: CapKey, state: KnobState) -> None:
        """Leave a knob alone whose original limit is unknown, if a cap may be in force there."""
        self._forget(key)
        if not may_be_capped(state):
            return
        lost = self.entries[key] = JournalEntry(
            knob=key.knob,
            device=key.device,
            name=state.name,
            default=state.default,
            minimum=state.minimum,
            maximum=state.maximum,
            foreign=state.requested,
            since=self._clock.now().wall,
            source=EntrySource.LOST,
        )
        self._tell(
            AuditAction.FAIL,
            lost,
            None,
            state.requested,
            WriteCause(why=str(unrecovered_limit_error(lost))),
        )

    def _look_at_lost(self, entry: JournalEntry, state: KnobState) -> None:
        """Let go of a lost entry once another limit is set; CapsError as long as it is not."""
        present = state.requested
        self._inherited.discard(entry.key)
        if not may_be_capped(state) or (
            entry.foreign is not None and present is not None and present != entry.foreign
        ):
            self._forget(entry.key)
            why = "a limit was set on it after the loss of its original"
            self._tell(AuditAction.VOID, entry, entry.foreign, present, WriteCause(why=why))
            return
        if entry.foreign is None and present is not None:
            self.entries[entry.key] = replace(entry, foreign=present)
        raise unrecovered_limit_error(entry)

    def _overtaken(self, entry: JournalEntry, state: KnobState) -> CapsError:
        """Somebody has written between our look and our write."""
        if entry.before is None:  # we never wrote: theirs is simply what we shall find next time
            self._forget(entry.key)
            return foreign_limit_error(replace(entry, foreign=state.requested))
        self._undo(entry)
        return self._let_go(entry, state)

    def _let_go(self, entry: JournalEntry, state: KnobState) -> CapsError:
        """Adopt what somebody else has written, and leave the knob to them."""
        theirs = replace(entry, foreign=state.requested, before=None, written=True)
        self.entries[entry.key] = theirs
        self._unsettle(entry.key)
        self._tell(AuditAction.FOREIGN, entry, entry.value, state.requested, WriteCause())
        return foreign_limit_error(theirs)

    def _thaw(self, entry: JournalEntry, state: KnobState) -> None:
        """Take a knob back once an original has stood there undisturbed for a while."""
        present = state.requested
        if present is None:
            raise _unreadable_limit_error(state)
        if present != entry.foreign:
            entry = replace(entry, foreign=present)
            self.entries[entry.key] = entry
            self._unsettle(entry.key)
            self._tell(AuditAction.FOREIGN, entry, None, present, WriteCause())
        calm = self._calm.get(entry.key)
        if calm is None:
            calm = self._calm[entry.key] = _QuietPeriod(self._clock.monotonic(), QUIET_PERIOD)
        if not is_adoptable(entry, present) or self._clock.monotonic() - calm.since < calm.needed:
            raise foreign_limit_error(entry)
        del self.entries[entry.key]

    def _unsettle(self, key: CapKey) -> None:
        """Calm begins anew, and must last longer each time."""
        calm = self._calm.get(key)
        needed = QUIET_PERIOD if calm is None else min(2 * calm.needed, MAX_QUIET_PERIOD)
        self._calm[key] = _QuietPeriod(self._clock.monotonic(), needed)

    def _forget(self, key: CapKey) -> None:
        self.entries.pop(key, None)
        self._inherited.discard(key)

    def _tell(
        self,
        deed: AuditAction,
        entry: JournalEntry,
        old: int | None,
        new: int | None,
        cause: WriteCause,
    ) -> None:
        self._record(self._event(deed, entry, old, new, cause))

    def _event(
        self,
        deed: AuditAction,
        entry: JournalEntry,
        old: int | None,
        new: int | None,
        cause: WriteCause,
    ) -> AuditEvent:
        event = AuditEvent(
            at=self._clock.now().wall,
            deed=deed,
            knob=entry.knob,
            device=entry.device,
            name=entry.name,
            old=old,
            new=new,
            why=cause.why,
            job=cause.job,
            pid=cause.pid,
            uid=cause.uid,
            original=entry.original,
        )
        return replace(event, check=row_checksum(self._journal.boot_id, event))


def _retaining(
    entries: Mapping[CapKey, JournalEntry], limits: Mapping[CapKey, int]
) -> dict[CapKey, JournalEntry]:
    return {
        key: entry if entry.imposed == limits.get(key) else replace(entry, imposed=limits.get(key))
        for key, entry in entries.items()
    }


def device_error(key: CapKey, error: ActuatorError) -> CapsError:
    """A device's trouble, as whoever wanted a cap is told of it."""
    return CapsError(str(error), refusal_reason(error), key.device)


def foreign_limit_error(entry: JournalEntry) -> CapsError:
    """Why a knob that somebody else has written is left alone."""
    if entry.lost:
        return unrecovered_limit_error(entry)
    return CapsError(
        f"{entry.name or entry.device} is left alone: somebody else has set its {entry.knob} to"
        f" {entry.foreign} {entry.knob.unit}. Find out who (`nvidia-smi`, DCGM, a Slurm prolog),"
        " or take theirs as the new original with `wattspan caps accept`.",
        RefusalReason.FOREIGN,
        entry.device,
    )


def unrecovered_limit_error(entry: JournalEntry) -> CapsError:
    """Why a knob is left alone whose original limit is unknown."""
    return CapsError(
        f"The {entry.knob} of {entry.name} ({entry.device}) is left alone: its original is unknown,"
        " because the journal was damaged. Set the limit by hand, or take the present one as the"
        " original with `wattspan caps accept`.",
        RefusalReason.UNRECOVERED,
        entry.device,
    )


def _unreadable_limit_error(state: KnobState) -> CapsError:
    return CapsError(
        f"{state.name} does not tell its {state.key.knob}, so it could not be given back;"
        " it is not touched.",
        RefusalReason.LOST,
        state.key.device,
    )


def _not_honoured_error(state: KnobState, value: int | None, told: int | None) -> CapsError:
    unit = state.key.knob.unit
    return CapsError(
        f"{state.name} was told {value} {unit} and shows {told} {unit}: it does not do what it"
        " is told. Look for another power manager, or a limit set outside this system.",
        RefusalReason.NOT_HONOURED,
        state.key.device,
    )
