"""Every knob that can be turned here, as it was last seen.

Whose is the setting that stands on a device? Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Protocol, runtime_checkable

from wattspan.capper.actuators.common import is_honoured
from wattspan.capper.journal import EntrySource, JournalEntry
from wattspan.capper.protocol import RefusalReason
from wattspan.model import CapKey, Knob, KnobState, ModelEnum, Trouble
from wattspan.ports import Actuator, ActuatorError

_REFUSAL_REASONS = {
    Trouble.DENIED: RefusalReason.NO_PERMISSION,
    Trouble.MALFORMED: RefusalReason.NOT_HONOURED,
}
_POWER_KNOBS = (Knob.GPU_POWER, Knob.CPU_POWER)


@runtime_checkable
class ConcurrentActuator(Protocol):
    """An actuator that can read several devices at once, and list them although some hang."""

    @property
    def unidentified(self) -> int | None:
        """Number of all devices if some of them hang and cannot be identified; else None."""
        ...

    def prefetch(self, devices: Iterable[str]) -> None:
        """Begin to read ``devices``; ``read`` then takes up the result."""
        ...


class ManagedDevices:
    """The actuators, and each knob's state and trouble as of the last call that told."""

    def __init__(self, actuators: Sequence[Actuator]) -> None:
        self._actuators = {actuator.knob: actuator for actuator in actuators}
        self.states: dict[CapKey, KnobState] = {}
        self.troubles: dict[CapKey, ActuatorError] = {}
        self.deaf: dict[Knob, ActuatorError] = {}
        """Kinds of knobs of which no device could be listed, and why."""

    def look(self) -> None:
        """Find what is there; a device that does not answer now keeps what was known of it."""
        for knob, actuator in self._actuators.items():
            try:
                found = actuator.devices()
            except ActuatorError as error:
                self.deaf[knob] = error
                continue
            self.deaf.pop(knob, None)
            self.states.update((state.key, state) for state in found)

    def listed(self, knob: Knob) -> bool:
        """True if the last look could list the devices with this knob."""
        return knob in self._actuators and knob not in self.deaf

    def assume(self, state: KnobState) -> None:
        """Take ``state``, which a journal records, until the device is read."""
        self.states.setdefault(state.key, state)

    @property
    def listing_stuck(self) -> bool:
        """True if the devices of a knob are unknown because the driver does not answer."""
        return any(error.trouble is Trouble.STUCK for error in self.deaf.values())

    @property
    def hidden(self) -> bool:
        """True if there are devices that hang and are not known, so that their limits are not."""
        return self.listing_stuck or any(
            count > sum(key.knob is knob for key in self.states)
            for knob, actuator in self._actuators.items()
            if isinstance(actuator, ConcurrentActuator)
            and (count := actuator.unidentified) is not None
        )

    def prefetch(self, keys: Iterable[CapKey]) -> None:
        """Begin to read ``keys``, so that several devices that hang share one deadline."""
        for knob, group in groupby(sorted(keys), key=lambda key: key.knob):
            actuator: object = self._actuators.get(knob)
            if isinstance(actuator, ConcurrentActuator):
                actuator.prefetch(key.device for key in group)

    def read(self, key: CapKey) -> KnobState:
        """One knob as it is now; ActuatorError."""
        return self._told(key, self._actuator(key).read(key.device))

    def stuck(self, key: CapKey) -> bool:
        """True if the newest call on a knob did not return within its deadline."""
        error = self.troubles.get(key)
        return error is not None and error.trouble is Trouble.STUCK

    def refresh(self, key: CapKey) -> None:
        """Read a knob that is known, if it answers now."""
        if key in self.states:
            with suppress(ActuatorError):
                self.read(key)

    def write(self, key: CapKey, value: int | None) -> KnobState:
        """Set one knob, and read it back; ActuatorError."""
        return self._told(key, self._actuator(key).write(key.device, value))

    def failed(self, key: CapKey, error: ActuatorError) -> None:
        """Remember why a knob could not be read or written."""
        self.troubles[key] = error

    def close(self) -> None:
        for actuator in self._actuators.values():
            actuator.close()

    def _told(self, key: CapKey, state: KnobState) -> KnobState:
        self.states[key] = state
        self.troubles.pop(key, None)
        return state

    def _actuator(self, key: CapKey) -> Actuator:
        actuator = self._actuators.get(key.knob)
        if actuator is None:
            raise ActuatorError(
                f"Cannot set {key.knob} of {key.device}: no such knob is in use here; name it in"
                " [autotune] knobs.",
                Trouble.ABSENT,
            )
        return actuator


def is_power_knob(knob: Knob) -> bool:
    """Whether the knob counts towards a budget of watts."""
    return knob in _POWER_KNOBS


def refusal_reason(error: ActuatorError) -> RefusalReason:
    """What the trouble of a device is in the protocol's words."""
    return (
        RefusalReason.LOCKED
        if error.locked
        else _REFUSAL_REASONS.get(error.trouble, RefusalReason.LOST)
    )


def matches_device(chosen: Iterable[str], state: KnobState) -> bool:
    """Whether any of ``chosen`` means this device: its id, UUID, index, zone, or "*"."""
    known = {"*", state.key.device, *state.aliases}
    return any(one in known for one in chosen)


class SettingOwner(ModelEnum):
    """Whose it is."""

    OURS = "ours"
    ORIGINAL = "original"  # what stood there before us, or what the device starts with
    FOREIGN = "foreign"  # neither
    UNKNOWN = "unknown"  # the device does not tell now


def is_readable(knob: Knob) -> bool:
    """Whether what stands can be read back. Locked clocks can be set and reset, and no more."""
    return knob is not Knob.GPU_CLOCK


def setting_owner(entry: JournalEntry, state: KnobState) -> SettingOwner:
    """Whose the setting is that ``state`` shows, where the journal has ``entry``.

    As long as a write may not have arrived, what stood there before it is ours as well, and a
    value just below it, for devices round down to their unit. A knob that cannot be read is
    ours as far as anybody can tell. Of an earlier boot our value is the device's own if it is the
    default, at which the device starts.
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
    original, highest = entry.original, _highest(state.maximum, entry.maximum)
    if original is None or entry.value is None:
        return False
    if highest is None:  # the device reports no range: only a checksum can vouch for the original
        return entry.source is not EntrySource.SALVAGED and original >= entry.value
    lowest = min(state.minimum or 0, entry.minimum or 0)
    return max(lowest, entry.value, 1) <= original <= highest


def may_be_capped(state: KnobState) -> bool:
    """True if a cap of ours could be in force: every cap is below the device's maximum."""
    present, maximum = state.requested, state.maximum
    return present is None or maximum is None or present < maximum


def is_adoptable(entry: JournalEntry, present: int | None) -> bool:
    """Whether a knob somebody else has written is back to where anybody may begin anew."""
    return present is not None and present in (entry.original, entry.default)


def _highest(*values: int | None) -> int | None:
    return max((value for value in values if value is not None), default=None)
