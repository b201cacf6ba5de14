"""Actuators of a driver that is not there yet: it may be loaded, or installed, at any time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from wattspan.capper.actuators import actuator_error
from wattspan.model import Knob, KnobState, Trouble
from wattspan.ports import ActuatorError, SlottedActuator


class AwaitedDriver:
    """A driver whose actuators are opened by the first call that finds its library."""

    def __init__(self, node: Path, opener: Callable[[], Iterable[SlottedActuator]]) -> None:
        """``node`` is in sysfs once the kernel has the driver.

        ``opener`` returns nothing without a library, which it may look for at each call.
        """
        self._node, self._opener = node, opener
        self._actuators: dict[Knob, SlottedActuator] = {}

    def open(self, awaited: Iterable[Knob]) -> list[SlottedActuator]:
        """The actuators; if there is none yet, those of the ``awaited`` knobs."""
        found = list(self._opener())
        return found or [AwaitedActuator(knob, self) for knob in awaited]

    def require(self) -> None:
        """ActuatorError unless the kernel has the driver: no process is to be started for it."""
        if not self._node.is_dir():
            raise self._error(f"the driver {self._node.name} is not loaded")

    def actuator(self, knob: Knob) -> SlottedActuator:
        """The opened actuator of ``knob``. ActuatorError while there is none."""
        if not self._actuators:
            self._actuators = {one.knob: one for one in self._opener()}
        if knob not in self._actuators:
            raise self._error(f"the library of the driver {self._node.name} is not found")
        return self._actuators[knob]

    def _error(self, cause: str) -> ActuatorError:
        remedy = "Its devices appear once it is there."
        return actuator_error("list devices", cause, remedy, Trouble.ABSENT)

    def close(self) -> None:
        """Close what was opened; the next call opens it again."""
        for actuator in self._actuators.values():
            actuator.close()
        self._actuators = {}


class AwaitedActuator:
    """One knob of the devices of an awaited driver."""

    def __init__(self, knob: Knob, driver: AwaitedDriver) -> None:
        self.knob, self.driver = knob, driver

    def devices(self) -> tuple[KnobState, ...]:
        """The state of all devices; none while there is no library."""
        with suppress(ActuatorError):
            return self.driver.actuator(self.knob).devices()
        return ()

    def slots(self) -> int:
        return self.driver.actuator(self.knob).slots()

    def id_at(self, slot: int) -> str | None:
        return self.driver.actuator(self.knob).id_at(slot)

    def read(self, device: str) -> KnobState:
        return self.driver.actuator(self.knob).read(device)

    def write(self, device: str, value: int | None) -> KnobState:
        return self.driver.actuator(self.knob).write(device, value)

    def close(self) -> None:
        self.driver.close()
