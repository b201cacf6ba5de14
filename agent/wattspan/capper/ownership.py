"""The owner of the setting that a device shows, and the errors about it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from msgspec.structs import replace

from wattspan.capper.actuators import is_honoured
from wattspan.capper.audit import AuditAction
from wattspan.capper.devices import Absence
from wattspan.capper.journal import EntrySource, JournalEntry
from wattspan.capper.protocol import RefusalReason
from wattspan.model import SECOND, CapKey, Knob, KnobState, ModelEnum
from wattspan.ports import CapsError

QUIET_PERIOD: Final = 60 * SECOND
"""Time that a restored original must last after a foreign write before the knob is used again."""
MAX_QUIET_PERIOD: Final = 3600 * SECOND
_ENFORCEMENT_TIMEOUT: Final = 5 * SECOND


def is_readable(knob: Knob) -> bool:
    """True if the setting can be read back. Locked clocks can only be set and reset."""
    return knob is not Knob.GPU_CLOCK


class SettingOwner(ModelEnum):
    """The last writer of a setting."""

    OURS = "ours"
    ORIGINAL = "original"  # the setting before the first write, or the one after a start
    FOREIGN = "foreign"
    UNKNOWN = "unknown"  # the device does not report its setting now


class QuietPeriods:
    """The times that a restored original must last after a foreign write; each is longer."""

    def __init__(self) -> None:
        self._periods: dict[CapKey, tuple[int, int]] = {}  # begin, and length

    def begin(self, key: CapKey, now: int) -> None:
        """Begin a period at a foreign write, twice as long as the one before."""
        known = self._periods.get(key)
        length = QUIET_PERIOD if known is None else min(2 * known[1], MAX_QUIET_PERIOD)
        self._periods[key] = now, length

    def end(self, key: CapKey) -> None:
        """Forget the period of a knob that was reset."""
        self._periods.pop(key, None)

    def is_over(self, entry: JournalEntry, now: int) -> bool:
        """True if the period of a knob is over; one of an earlier capper begins ``now``."""
        if entry.foreign is not None and not entry.lost and entry.key not in self._periods:
            self.begin(entry.key, now)
        since, length = self._periods.get(entry.key, (now, 1))
        return now - since >= length


class Ownership(NamedTuple):
    """Result of comparing a journal entry with its device.

    ``entry`` is the entry from now on, None if the capper holds nothing there. With an ``error``
    the knob must not be written now. ``action`` with ``old``, ``new`` and ``why`` is an event of
    the audit log.
    """

    entry: JournalEntry | None
    error: CapsError | None = None
    action: AuditAction | None = None
    old: int | None = None
    new: int | None = None
    why: str = ""


def review_entry(
    entry: JournalEntry,
    state: KnobState,
    *,
    inherited: bool,
    wanted: bool,
    quiet: bool,
    now: int,
    absence: Absence = Absence.NONE,
) -> Ownership:
    """Compare an entry with its device. Pure.

    ``inherited``: a former capper made the entry, and this is the first comparison. ``wanted``: a
    cap is wanted, so another program restored the original. ``quiet``: no other program changed
    the setting for a while. ``now`` is Unix time in nanoseconds. ``absence`` is that of the device
    since the last comparison.
    """
    if entry.lost:
        return _review_lost(entry, state)
    reset = review_absence(entry, state, absence)
    if reset is not None:
        return reset
    if entry.foreign is not None:
        return _review_foreign(entry, state, quiet=quiet)
    owner = setting_owner(entry, state)
    if owner is SettingOwner.UNKNOWN:
        return Ownership(entry, unreadable_error(state))
    if inherited:
        if owner is SettingOwner.OURS:
            if not is_original_plausible(entry, state):
                return _lost(state, now)
        elif entry.source is EntrySource.EARLIER:
            why = "the limit of an earlier boot is not in force any more"
            return Ownership(None, None, AuditAction.VOID, entry.value, state.requested, why)
        elif owner is SettingOwner.FOREIGN and entry.source is EntrySource.SALVAGED:
            return _lost(state, now)
    if owner is SettingOwner.OURS:
        return Ownership(entry)
    if owner is SettingOwner.ORIGINAL and (inherited or not (wanted and entry.written)):
        return Ownership(None)
    return release_to_other(entry, state)


def review_absence(entry: JournalEntry, state: KnobState, absence: Absence) -> Ownership | None:
    """The ownership of a knob that returned without our setting; None if it did not.

    A device that was absent has its own default, or what was there before our first write, without
    any other program. Our setting and another program's are gone alike, so nothing is held there.
    A lock that cannot be read back is taken to be gone, and is still to be removed at the end.
    """
    if absence is Absence.NONE or entry.source is not EntrySource.RECORDED:
        return None
    present = state.requested
    if not is_readable(entry.knob):
        if not entry.written or (absence is Absence.UNANSWERED and present == entry.value):
            return None
        unlocked = replace(entry, before=None, written=False)
        return Ownership(unlocked, None, AuditAction.RESET, entry.value, None, _RESET)
    if absence is Absence.RESET and entry.written and _is_switched_off(entry, state):
        off = replace(entry, before=entry.value, written=False)
        return Ownership(off, None, AuditAction.RESET, entry.value, present, _RESET)
    own = (entry.original, entry.default if state.default is None else state.default)
    if present is None or (present == entry.value and entry.foreign is None):
        return None
    if not any(is_honoured(one, present) for one in own if one is not None):
        return None
    old = entry.value if entry.foreign is None else entry.foreign
    return Ownership(None, None, AuditAction.RESET, old, present, _RESET)


def _is_switched_off(entry: JournalEntry, state: KnobState) -> bool:
    """True for a package that shows our limit and does not keep it, as after a driver's reload."""
    ours = entry.foreign is None and state.requested == entry.value
    return ours and entry.knob is Knob.CPU_POWER and state.enforced is None


_RESET = "the device or its driver was absent, and returned without the cap"


def release_to_other(entry: JournalEntry, state: KnobState) -> Ownership:
    """Leave a knob to the other program that has set it."""
    left = replace(entry, foreign=state.requested, before=None, written=True)
    error = foreign_limit_error(left)
    return Ownership(left, error, AuditAction.FOREIGN, entry.value, state.requested)


def _review_lost(entry: JournalEntry, state: KnobState) -> Ownership:
    """A lost entry ends once another limit is set."""
    present = state.requested
    changed = None not in (entry.foreign, present) and present != entry.foreign
    if changed or not may_be_capped(state):
        why = "a limit was set on it after the loss of its original"
        return Ownership(None, None, AuditAction.VOID, entry.foreign, present, why)
    known = present if entry.foreign is None else entry.foreign
    return Ownership(replace(entry, foreign=known), unrecovered_limit_error(entry))


def _review_foreign(entry: JournalEntry, state: KnobState, *, quiet: bool) -> Ownership:
    """A foreign entry ends once an original was in force undisturbed for a while."""
    present = state.requested
    if present is None:
        return Ownership(entry, unreadable_error(state))
    if present != entry.foreign:
        entry = replace(entry, foreign=present)
        error = foreign_limit_error(entry)
        return Ownership(entry, error, AuditAction.FOREIGN, new=present)
    if quiet and present in (entry.original, entry.default):
        return Ownership(None)
    return Ownership(entry, foreign_limit_error(entry))


def _lost(state: KnobState, now: int) -> Ownership:
    """The original is unknown: the knob must not be written if a cap may be in force there."""
    entry = lost_entry(state, now)
    if entry is None:
        return Ownership(None)
    error = unrecovered_limit_error(entry)
    return Ownership(entry, error, AuditAction.FAIL, new=state.requested, why=str(error))


def lost_entry(state: KnobState, now: int) -> JournalEntry | None:
    """The entry of a knob with an unknown original; None if no cap can be in force there."""
    if not may_be_capped(state):
        return None
    entry = new_entry(state, now)
    return replace(entry, original=None, foreign=state.requested, source=EntrySource.LOST)


def new_entry(state: KnobState, now: int) -> JournalEntry:
    """The entry of a knob before its first write, with its present setting as the original."""
    return JournalEntry(
        knob=state.key.knob,
        device=state.key.device,
        name=state.name,
        original=state.requested if is_readable(state.key.knob) else None,
        default=state.default,
        minimum=state.minimum,
        maximum=state.maximum,
        since=now,
        presence=state.presence,
    )


def intended_entry(
    entry: JournalEntry | None, state: KnobState, value: int, now: int
) -> JournalEntry:
    """The entry of a knob that is about to be set to ``value``."""
    if entry is None:
        return replace(new_entry(state, now), value=value)
    return replace(
        entry,
        before=state.requested,
        value=value,
        written=False,
        source=EntrySource.RECORDED,
        presence=state.presence,
    )


def with_imposed(
    entries: Mapping[CapKey, JournalEntry], limits: Mapping[CapKey, int]
) -> dict[CapKey, JournalEntry]:
    """The entries with the limits that stay in force if this process ends."""
    return {
        key: entry if entry.imposed == limits.get(key) else replace(entry, imposed=limits.get(key))
        for key, entry in entries.items()
    }


def recorded_state(entry: JournalEntry) -> KnobState:
    """The last known state of the device of ``entry``, which has not been read yet."""
    limit = entry.value if entry.source is EntrySource.RECORDED else entry.original
    return KnobState(
        entry.key,
        entry.name or entry.device,
        minimum=entry.minimum,
        default=entry.default,
        maximum=entry.maximum,
        requested=limit if entry.foreign is None else entry.foreign,
    )


def setting_owner(entry: JournalEntry, state: KnobState) -> SettingOwner:
    """The owner of the setting that a device with this entry shows.

    Until a write is known to have arrived, the setting before it is ours as well, and so is a
    value just below ours, because devices round down to their unit. A knob that cannot be read is
    taken for ours. Our value of an earlier boot is the device's own if it is the default, with
    which the device starts.
    """
    if not is_readable(entry.knob):
        return SettingOwner.OURS
    present = state.requested
    if present is None:
        return SettingOwner.UNKNOWN
    if entry.source is EntrySource.EARLIER and present == entry.default:
        return SettingOwner.ORIGINAL
    if present == entry.value:
        return SettingOwner.OURS
    if not entry.written and entry.value is not None:
        if present == entry.before:
            return SettingOwner.OURS
        if present != entry.original and is_honoured(entry.value, present):
            return SettingOwner.OURS
    if entry.original is not None and is_honoured(entry.original, present):
        return SettingOwner.ORIGINAL
    return SettingOwner.FOREIGN


def is_original_plausible(entry: JournalEntry, state: KnobState) -> bool:
    """True if the original may be written: within the device's range, and above our value.

    Some drivers derive the range from the present limit, so the range that was recorded with the
    original counts as well.
    """
    if not is_readable(entry.knob):
        return entry.original is None
    if entry.original is None or entry.value is None:
        return False
    maxima = [value for value in (state.maximum, entry.maximum) if value is not None]
    if not maxima:  # without a range, only a checksum can vouch for the original
        return entry.source is not EntrySource.SALVAGED and entry.original >= entry.value
    lowest = min(state.minimum or 0, entry.minimum or 0)
    return max(lowest, entry.value, 1) <= entry.original <= max(maxima)


def may_be_capped(state: KnobState) -> bool:
    """True if a cap of ours could be in force: every cap is below the device's maximum."""
    present, maximum = state.requested, state.maximum
    return present is None or maximum is None or present < maximum


def is_obeyed(entry: JournalEntry, state: KnobState) -> bool:
    """True if the device is not known to obey a limit above the written one."""
    if not entry.written or entry.left_alone or not is_readable(entry.knob):
        return True
    return entry.value is None or state.enforced is None or state.enforced <= entry.value


def foreign_limit_error(entry: JournalEntry) -> CapsError:
    """Another program has set the knob of ``entry``."""
    if entry.lost:
        return unrecovered_limit_error(entry)
    return CapsError(
        f"The {entry.knob} of {entry.name or entry.device} is not written: another program has set"
        f" it to {entry.foreign} {entry.knob.unit}, and no cap is in force. Find that program"
        " (`nvidia-smi`, DCGM, a Slurm prolog), or take its limit as the new original with"
        " `wattspan caps accept`.",
        RefusalReason.FOREIGN,
        entry.device,
    )


def unrecovered_limit_error(entry: JournalEntry) -> CapsError:
    """The original of ``entry`` is unknown."""
    return CapsError(
        f"The {entry.knob} of {entry.name} ({entry.device}) is not written: its original is"
        " unknown, because the journal was damaged. Set the limit by hand, or take the present one"
        " as the original with `wattspan caps accept`.",
        RefusalReason.UNRECOVERED,
        entry.device,
    )


def unreadable_error(state: KnobState) -> CapsError:
    return CapsError(
        f"{state.name} does not report its {state.key.knob}, so it could not be restored;"
        " it is not written. Look for errors of the driver in the kernel's log.",
        RefusalReason.LOST,
        state.key.device,
    )


def reset_notice(entry: JournalEntry, result: Ownership) -> str:
    """The news of a reset, for the log."""
    shown = "is not known" if result.new is None else f"is {result.new} {entry.knob.unit}"
    return (
        f"The cap on the {entry.knob} of {entry.name or entry.device} was off: {result.why}. The"
        f" limit {shown} now; the cap is applied again if it is still wanted."
    )


def reset_error(state: KnobState) -> CapsError:
    return CapsError(
        f"{state.name} was reset, or its driver was, while its {state.key.knob} was about to be"
        " written. It is written at the next turn.",
        RefusalReason.LOST,
        state.key.device,
    )


def not_honoured_error(state: KnobState, value: int | None, shown: int | None) -> CapsError:
    unit = state.key.knob.unit
    return CapsError(
        f"{state.name} was set to {value} {unit} and reports {shown} {unit}. Look for another"
        " power manager, or a limit set outside this system.",
        RefusalReason.NOT_HONOURED,
        state.key.device,
    )


def require_original(state: KnobState) -> None:
    """CapsError for a knob without a setting that could be restored."""
    if is_readable(state.key.knob) and state.requested is None:
        raise unreadable_error(state)


def disobedience(
    entries: Mapping[CapKey, JournalEntry],
    states: Mapping[CapKey, KnobState],
    since: dict[CapKey, int],
    now: int,
) -> dict[CapKey, CapsError]:
    """The errors of devices that show a cap and do not obey it, for longer than they may take.

    ``since`` has the monotonic time at which each of them was found; it is updated.
    """
    errors: dict[CapKey, CapsError] = {}
    for key, entry in entries.items():
        state = states.get(key)
        if state is None or is_obeyed(entry, state):
            since.pop(key, None)
        elif now - since.setdefault(key, now) >= _ENFORCEMENT_TIMEOUT:
            errors[key] = disobeyed_error(state)
    return errors


def disobeyed_error(state: KnobState) -> CapsError:
    knob = state.key.knob
    return CapsError(
        f"{state.name} shows a limit of {state.requested} {knob.unit} and obeys {state.enforced}:"
        " the cap has no effect and is restored. Look for another power manager.",
        RefusalReason.NOT_HONOURED,
        state.key.device,
    )


def foreign_notices(entries: Iterable[JournalEntry]) -> Iterator[str]:
    """A sentence for each knob that is left to another program."""
    for entry in entries:
        if entry.foreign is not None and not entry.lost:
            yield str(foreign_limit_error(entry))


def unrecovered_notice(entries: Iterable[JournalEntry]) -> str:
    """Names the devices with lost originals; "" if there are none."""
    lost = ", ".join(f"{one.knob} of {one.name}" for one in entries if one.lost)
    return lost and (
        f"The journal was damaged, and the original limit is unknown: {lost}. Set each limit by"
        " hand, or take the present ones as the originals with `wattspan caps accept`."
    )
