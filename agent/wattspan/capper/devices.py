"""Every knob that can be turned here, as it was last seen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Protocol, runtime_checkable

from wattspan.capper.protocol import Refusal
from wattspan.model import CapKey, Knob, KnobState, Trouble
from wattspan.ports import Actuator, ActuatorError

_REFUSALS = {
    Trouble.DENIED: Refusal.NO_PERMISSION,
    Trouble.MALFORMED: Refusal.NOT_HONOURED,
}
_POWER = (Knob.GPU_POWER, Knob.CPU_POWER)


@runtime_checkable
class Concurrent(Protocol):
    """An actuator that can read several devices at once, and list them although some hang."""

    @property
    def unidentified(self) -> int | None:
        """Number of all devices if some of them hang and cannot be identified; else None."""
        ...

    def prefetch(self, devices: Iterable[str]) -> None:
        """Begin to read ``devices``; ``read`` then takes up the result."""
        ...


class Devices:
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
            if isinstance(actuator, Concurrent) and (count := actuator.unidentified) is not None
        )

    def prefetch(self, keys: Iterable[CapKey]) -> None:
        """Begin to read ``keys``, so that several devices that hang share one deadline."""
        for knob, group in groupby(sorted(keys), key=lambda key: key.knob):
            actuator: object = self._actuators.get(knob)
            if isinstance(actuator, Concurrent):
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


def is_power(knob: Knob) -> bool:
    """Whether the knob counts towards a budget of watts."""
    return knob in _POWER


def refusal(error: ActuatorError) -> Refusal:
    """What the trouble of a device is in the protocol's words."""
    return Refusal.LOCKED if error.locked else _REFUSALS.get(error.trouble, Refusal.LOST)


def named(chosen: Iterable[str], state: KnobState) -> bool:
    """Whether any of ``chosen`` means this device: its id, UUID, index, zone, or "*"."""
    known = {"*", state.key.device, *state.aliases}
    return any(one in known for one in chosen)
