"""Actuators: the knobs of devices, one module per family. Each reads back what it wrote.

The ``trouble`` of an ActuatorError:

- DENIED: this process may not write the knob; with ``locked``, no process may until the next boot.
- ABSENT: there is no such device, or it has no such knob.
- RETRY: the device or its driver does not answer now.
- MALFORMED: the device reports another value than it took, or cannot have the value.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path

from wattspan.model import MILLISECOND, Knob, KnobState, Trouble
from wattspan.ports import ActuatorError, Clock, SlottedActuator

COARSEST_STEP = 1_000
"""Milliwatts of the coarsest step of a power limit.

RAPL's unit is 2**-N watts, an eighth as a rule and one watt at the coarsest, and rounds down. A
board's firmware may keep whole watts.
"""

SETTLE_TIMEOUT = 200 * MILLISECOND
"""Longest time until a device obeys. Setters themselves take 10 to 20 ms."""

READ_INTERVAL = 10 * MILLISECOND


def format_setting(knob: Knob, value: int | None) -> str:
    """``"312.5 W"``, ``"1410 MHz"``."""
    if value is None:
        return "unknown"
    return f"{value} MHz" if knob is Knob.GPU_CLOCK else f"{value / 1000:g} W"


def actuator_error(
    thing: str, cause: str, remedy: str, trouble: Trouble, *, locked: bool = False
) -> ActuatorError:
    """``thing`` is the attempt, as in "read the power limit of GPU 0"."""
    sentence = f"Cannot {thing}: {cause}."
    return ActuatorError(f"{sentence} {remedy}".rstrip(), trouble, locked=locked)


def load_identity(sysfs: Path, *nodes: str) -> str:
    """Identifies the present load of a driver and of a device by their ``nodes`` in sysfs.

    The kernel numbers a node anew whenever it is registered. "" if there is none of them.
    """
    found = []
    for node in nodes:
        with contextlib.suppress(OSError):
            found.append(str((sysfs / node).lstat().st_ino))
    return "-".join(found)


def is_honoured(wanted: int, shown: int | None) -> bool:
    """True if ``shown`` is the power limit ``wanted`` after rounding, which is always down."""
    return shown is not None and wanted - COARSEST_STEP < shown <= wanted


def is_enforced(before: KnobState, now: KnobState, wanted: int) -> bool:
    """True if the device shows the limit ``wanted`` now, and obeys it.

    A lower limit from outside that was in force ``before`` may stay in force.
    """
    if not is_honoured(wanted, now.requested):
        return False
    if now.enforced is None or now.enforced == now.requested:
        return True
    return now.enforced < wanted and _limited_externally(before)


def _limited_externally(state: KnobState) -> bool:
    requested, enforced = state.requested, state.enforced
    return requested is not None and enforced is not None and enforced < requested


class DeviceActuator(ABC):
    """One knob of all devices of a family, read by ``_state``."""

    knob: Knob

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last: dict[str, KnobState] = {}

    @abstractmethod
    def slots(self) -> int:
        """Number of device slots. ActuatorError."""

    @abstractmethod
    def id_at(self, slot: int) -> str | None:
        """Id of the device in ``slot``; None if it cannot be identified. ActuatorError."""

    @abstractmethod
    def _state(self, device: str) -> KnobState:
        """The present state of one device. ActuatorError."""

    def devices(self) -> tuple[KnobState, ...]:
        """The state of all devices that can be read; none while there is no driver."""
        states = []
        with contextlib.suppress(ActuatorError):
            for slot in range(self.slots()):
                device = self.id_at(slot)
                with contextlib.suppress(ActuatorError):
                    if device is not None:
                        states.append(self._state(device))
        return tuple(states)

    def read(self, device: str) -> KnobState:
        state = self._last[device] = self._state(device)
        return state

    def _before(self, device: str) -> KnobState:
        """The state before a write: the caller has just read it."""
        return self._last.get(device) or self.read(device)

    def _settled(self, device: str, good: Callable[[KnobState], bool]) -> KnobState:
        """The first state that is ``good``, or the one after SETTLE_TIMEOUT."""
        end = self._clock.monotonic() + SETTLE_TIMEOUT
        while True:
            state = self.read(device)
            now = self._clock.monotonic()
            if good(state) or now >= end:
                return state
            self._clock.sleep_until(min(end, now + READ_INTERVAL))


class PowerActuator(DeviceActuator):
    """A power limit. It cannot be absent, and devices round it down."""

    def _always_limited(self, before: KnobState) -> ActuatorError:
        """The refusal to remove the limit."""
        return actuator_error(
            f"remove the {self.knob.value} limit of {before.name}",
            "a device always has one",
            "Set it to its original value instead.",
            Trouble.MALFORMED,
        )

    def _confirmed(self, before: KnobState, value: int) -> KnobState:
        """The state of a device that was set to ``value``. ActuatorError if it shows another one.

        ``enforced`` is waited for; if it is still higher after that, the device does not obey yet.
        """
        state = self._settled(before.key.device, lambda now: is_enforced(before, now, value))
        if not is_honoured(value, state.requested):
            raise self._not_honoured(before, value, state.requested)
        return state

    def _not_honoured(self, before: KnobState, wanted: int, shown: int | None) -> ActuatorError:
        """The device took ``wanted`` without an error and now shows ``shown``."""
        return actuator_error(
            f"set {before.name} to {format_setting(self.knob, wanted)}",
            f"it was taken without an error, and reads back as {format_setting(self.knob, shown)}",
            "Another program may have set it at the same moment; look for DCGM, nvidia-smi, tuned"
            " or another power manager.",
            Trouble.MALFORMED,
        )


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
        with contextlib.suppress(ActuatorError):
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
