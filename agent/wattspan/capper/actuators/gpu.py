"""GPU boards' power limits and locked SM clocks, through NVML.

Power limits, in milliwatts, are set by NVML's first setter: nvidia-ml-py's binding of the second
one drops the return code and reports success for a refusal.

A locked SM clock, in megahertz, is an upper bound that cannot be read back: NVML locks and unlocks
clocks, and does not report whether they are locked. So the original is "not locked", and a reset is
all that can restore it. The reported lock is the one that this process set, as long as the driver
has not been reloaded since.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod

from wattspan.capper.actuators.common import (
    actuator_error,
    format_setting,
    is_enforced,
    is_honoured,
    not_honoured_error,
    not_removable_error,
    wait_for_state,
)
from wattspan.capper.actuators.nvml import NvmlBoard, NvmlBoards
from wattspan.model import CapKey, Knob, KnobState, Trouble
from wattspan.ports import ActuatorError, Clock

_SM_CLOCK = 1  # NVML_CLOCK_SM


class _GpuActuator(ABC):
    """Common part of both knobs of a board."""

    knob: Knob

    def __init__(self, boards: NvmlBoards, clock: Clock) -> None:
        self._boards, self._clock = boards, clock
        self._last: dict[str, KnobState] = {}

    def devices(self) -> tuple[KnobState, ...]:
        states = []
        for board in self._boards.all():
            with contextlib.suppress(ActuatorError):
                states.append(self._state(board))
        return tuple(states)

    def slots(self) -> int:
        return self._boards.slots()

    def id_at(self, slot: int) -> str | None:
        return self._boards.id_at(slot)

    def read(self, device: str) -> KnobState:
        state = self._last[device] = self._state(self._boards.board(device))
        return state

    def close(self) -> None:
        self._boards.close()

    @abstractmethod
    def _state(self, board: NvmlBoard) -> KnobState: ...

    def _before(self, device: str) -> KnobState:
        """The state before a write: the caller has just read it."""
        return self._last.get(device) or self.read(device)

    def _check_range(self, state: KnobState, lowest: int, value: int) -> None:
        """Name the range, which the driver's own refusal does not."""
        if lowest <= value <= (state.maximum or value):
            return
        setting, low, high = (
            format_setting(self.knob, one) for one in (value, lowest, state.maximum)
        )
        raise actuator_error(
            f"set the {self.knob.value} of {state.name} to {setting}",
            f"the range is {low} to {high}",
            "Ask for a value in that range.",
            Trouble.MALFORMED,
        )


class GpuPower(_GpuActuator):
    """The Actuator of GPU_POWER."""

    knob = Knob.GPU_POWER

    def write(self, device: str, value: int | None) -> KnobState:
        """Set the limit and read it back.

        ``enforced`` is waited for; if it is still higher after that, the device does not obey yet.
        """
        name = self._boards.name(device)
        if value is None:
            raise not_removable_error(self.knob, name)
        before = self._before(device)
        self._check_range(before, before.minimum or 0, value)
        self._boards.ask(
            device, "set the power limit of", "nvmlDeviceSetPowerManagementLimit", value
        )
        state = wait_for_state(
            self._clock, lambda: self.read(device), lambda now: is_enforced(before, now, value)
        )
        if not is_honoured(value, state.requested):
            raise not_honoured_error(self.knob, state.name, value, state.requested)
        return state

    def _state(self, board: NvmlBoard) -> KnobState:
        maybe = self._boards.ask_maybe
        requested = self._boards.ask(
            board.id, "read the power limit of", "nvmlDeviceGetPowerManagementLimit"
        )
        enforced = maybe(
            board.id, "read the enforced power limit of", "nvmlDeviceGetEnforcedPowerLimit"
        )
        default = maybe(
            board.id, "read the default limit of", "nvmlDeviceGetPowerManagementDefaultLimit"
        )
        minimum, maximum = maybe(
            board.id,
            "read the range of the power limit of",
            "nvmlDeviceGetPowerManagementLimitConstraints",
        ) or (None, None)
        return KnobState(
            CapKey(self.knob, board.id),
            board.name,
            minimum=minimum,
            default=default,
            maximum=maximum,
            requested=int(requested),
            enforced=enforced,
            aliases=board.aliases,
        )


class GpuClock(_GpuActuator):
    """The Actuator of GPU_CLOCK. ``enforced`` is reported while the SM clock obeys the lock."""

    knob = Knob.GPU_CLOCK

    def __init__(self, boards: NvmlBoards, clock: Clock) -> None:
        super().__init__(boards, clock)
        self._locks: dict[str, int] = {}
        self._session = boards.generation
        self._ranges: dict[str, tuple[int | None, int]] = {}  # they never change

    def write(self, device: str, value: int | None) -> KnobState:
        """Lock the clock to ``value`` at most; None unlocks it, whoever locked it."""
        if value is None:
            self._boards.ask(device, "unlock the clocks of", "nvmlDeviceResetGpuLockedClocks")
            self._locks.pop(device, None)
            return self.read(device)
        before = self._before(device)
        lowest = before.minimum or 0
        self._check_range(before, max(1, lowest), value)
        # The lower bound is the lowest clock there is, so that an idle board can still sleep.
        self._boards.ask(
            device, "lock the clocks of", "nvmlDeviceSetGpuLockedClocks", lowest, value
        )
        self._locks[device] = value
        return wait_for_state(
            self._clock, lambda: self.read(device), lambda now: now.enforced == value
        )

    def _state(self, board: NvmlBoard) -> KnobState:
        if board.id not in self._ranges:
            self._ranges[board.id] = self._range(board.id)
        minimum, maximum = self._ranges[board.id]
        clock = self._boards.ask_maybe(
            board.id, "read the SM clock of", "nvmlDeviceGetClockInfo", _SM_CLOCK
        )
        if self._session != self._boards.generation:
            self._session = self._boards.generation
            self._locks.clear()  # the driver was reloaded, and no clock is locked any more
        lock = self._locks.get(board.id)
        obeyed = lock is not None and clock is not None and clock <= lock
        return KnobState(
            CapKey(self.knob, board.id),
            board.name,
            minimum=minimum,
            default=maximum,
            maximum=maximum,
            requested=lock,
            enforced=lock if obeyed else None,
            aliases=board.aliases,
        )

    def _range(self, device: str) -> tuple[int | None, int]:
        highest = self._boards.ask(
            device, "read the clocks of", "nvmlDeviceGetMaxClockInfo", _SM_CLOCK
        )
        memory = self._boards.ask_maybe(
            device, "read the memory clocks of", "nvmlDeviceGetSupportedMemoryClocks"
        )
        clocks = memory and self._boards.ask_maybe(
            device, "list the clocks of", "nvmlDeviceGetSupportedGraphicsClocks", max(memory)
        )
        return (min(clocks) if clocks else None), int(highest)
