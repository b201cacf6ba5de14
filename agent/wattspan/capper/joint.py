"""One actuator for the devices of several drivers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from wattspan.capper.devices import ConcurrentActuator
from wattspan.model import KnobState, Trouble
from wattspan.ports import ActuatorError


class JointActuator:
    """One knob of the devices of several drivers, each with an actuator of its own.

    A driver that hangs or is not loaded does not affect the devices of the others.
    """

    def __init__(self, parts: Sequence[ConcurrentActuator]) -> None:
        """``parts`` have the same knob."""
        self.knob = parts[0].knob
        self._parts = tuple(parts)
        self._owners: dict[str, ConcurrentActuator] = {}

    @property
    def unidentified(self) -> int | None:
        """Number of all devices if some of them hang and cannot be identified; else None."""
        if all(part.unidentified is None for part in self._parts):
            return None
        listed = list(self._owners.values())
        return sum(
            listed.count(part) if part.unidentified is None else part.unidentified
            for part in self._parts
        )

    def devices(self) -> tuple[KnobState, ...]:
        """The devices of all drivers that answer. ActuatorError if none does."""
        states: list[KnobState] = []
        errors: list[ActuatorError] = []
        for part in self._parts:
            try:
                found = part.devices()
            except ActuatorError as error:
                errors.append(error)
            else:
                self._owners.update((state.key.device, part) for state in found)
                states.extend(found)
        if len(errors) == len(self._parts):
            raise most_telling(errors)
        return tuple(states)

    def prefetch(self, devices: Iterable[str]) -> None:
        """Begin to read ``devices``."""
        wanted = list(devices)
        for part in self._parts:
            own = [device for device in wanted if self._owners.get(device) is part]
            if own:
                part.prefetch(own)

    def read(self, device: str) -> KnobState:
        """The state from the device's driver; of an unknown device, from the one that has it."""
        owner = self._owners.get(device)
        if owner is not None:
            return owner.read(device)
        errors: list[ActuatorError] = []
        for part in self._parts:
            try:
                state = part.read(device)
            except ActuatorError as error:
                errors.append(error)
            else:
                self._owners[device] = part
                return state
        raise most_telling(errors)

    def write(self, device: str, value: int | None) -> KnobState:
        if device not in self._owners:
            self.read(device)
        return self._owners[device].write(device, value)

    def close(self) -> None:
        for part in self._parts:
            part.close()


def most_telling(errors: Sequence[ActuatorError]) -> ActuatorError:
    """An error other than that the device is absent, if there is one."""
    return next((error for error in errors if error.trouble is not Trouble.ABSENT), errors[0])
