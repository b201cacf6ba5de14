"""GPU boards' power management limits, in milliwatts.

Set by NVML's first setter: nvidia-ml-py's binding of the second one drops the return code and
reports success for what was refused.

GPUs' locked SM clocks, in megahertz: an upper bound, which cannot be read back.

NVML can lock clocks and unlock them, and does not tell whether they are locked. So what stood
before is never known: the original is "not locked", and taking a lock away is all that can be
done for it. What is told of a lock is what this process set itself, as long as the driver has
not been away since.
"""

from __future__ import annotations

import contextlib

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


class GpuPower:
    """The Actuator of GPU_POWER."""

    knob = Knob.GPU_POWER

    def __init__(self, boards: NvmlBoards, clock: Clock) -> None:
        self._boards = boards
        self._clock = clock

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
        return self._state(self._boards.board(device))

    def write(self, device: str, value: int | None) -> KnobState:
        """Set it and read it back; ``enforced`` is waited for, for a fifth of a second at most.

        If ``enforced`` is still higher then, the device has not yet obeyed.
        """
        name = self._boards.name(device)
        if value is None:
            raise not_removable_error(self.knob, name)
        before = self.read(device)
        self._refuse_outside(before, value)
        self._boards.ask(
            device, "set the power limit of", "nvmlDeviceSetPowerManagementLimit", value
        )
        state = wait_for_state(
            self._clock, lambda: self.read(device), lambda now: is_enforced(before, now, value)
        )
        if not is_honoured(value, state.requested):
            raise not_honoured_error(self.knob, state.name, value, state.requested)
        return state

    def close(self) -> None:
        self._boards.close()

    def _state(self, board: NvmlBoard) -> KnobState:
        ask, maybe = self._boards.ask, self._boards.ask_maybe
        requested = ask(board.id, "read the power limit of", "nvmlDeviceGetPowerManagementLimit")
        enforced = maybe(
            board.id, "read the enforced power limit of", "nvmlDeviceGetEnforcedPowerLimit"
        )
        default = maybe(
            board.id, "read the default limit of", "nvmlDeviceGetPowerManagementDefaultLimit"
        )
        constraints = maybe(
            board.id,
            "read the range of the power limit of",
            "nvmlDeviceGetPowerManagementLimitConstraints",
        )
        minimum, maximum = constraints or (None, None)
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

    def _refuse_outside(self, state: KnobState, value: int) -> None:
        """Say what the range is, which the driver's own refusal does not."""
        low, high = state.minimum or 0, state.maximum
        if low <= value and (high is None or value <= high):
            return
        raise actuator_error(
            f"set the power limit of {state.name} to {format_setting(self.knob, value)}",
            f"it can be {format_setting(self.knob, low)} to {format_setting(self.knob, high)}",
            "Ask for something within that range.",
            Trouble.MALFORMED,
        )


_SM_CLOCK = 1  # NVML_CLOCK_SM


class GpuClock:
    """The Actuator of GPU_CLOCK. ``enforced`` is told while the SM clock is seen to obey."""

    knob = Knob.GPU_CLOCK

    def __init__(self, boards: NvmlBoards, clock: Clock) -> None:
        self._boards = boards
        self._clock = clock
        self._ours: dict[str, int] = {}
        self._generation = boards.generation
        self._ranges: dict[str, tuple[int | None, int]] = {}  # they never change

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
        return self._state(self._boards.board(device))

    def write(self, device: str, value: int | None) -> KnobState:
        """Lock the clock to ``value`` at most; None unlocks it, whoever locked it."""
        if value is None:
            self._boards.ask(device, "unlock the clocks of", "nvmlDeviceResetGpuLockedClocks")
            self._ours.pop(device, None)
            return self.read(device)
        before = self.read(device)
        lowest = before.minimum or 0
        if not max(1, lowest) <= value <= (before.maximum or value):
            raise actuator_error(
                f"lock the clocks of {before.name} to {format_setting(self.knob, value)}",
                f"they can be {lowest} to {before.maximum} MHz",
                "Ask for something within that range.",
                Trouble.MALFORMED,
            )
        # The lower bound is the lowest clock there is: an idle board may go on to sleep.
        self._boards.ask(
            device, "lock the clocks of", "nvmlDeviceSetGpuLockedClocks", lowest, value
        )
        self._ours[device] = value
        return wait_for_state(
            self._clock, lambda: self.read(device), lambda now: now.enforced == value
        )

    def close(self) -> None:
        self._boards.close()

    def _state(self, board: NvmlBoard) -> KnobState:
        minimum, maximum = self._range(board.id)
        clock = self._boards.ask_maybe(
            board.id, "read the SM clock of", "nvmlDeviceGetClockInfo", _SM_CLOCK
        )
        ours = self._lock(board.id)
        obeyed = ours is not None and clock is not None and clock <= ours
        return KnobState(
            CapKey(self.knob, board.id),
            board.name,
            minimum=minimum,
            default=maximum,
            maximum=maximum,
            requested=ours,
            enforced=ours if obeyed else None,
            aliases=board.aliases,
        )

    def _lock(self, device: str) -> int | None:
        if self._generation != self._boards.generation:
            self._generation = self._boards.generation
            self._ours.clear()  # the driver was away, and clocks are not locked any more
        return self._ours.get(device)

    def _range(self, device: str) -> tuple[int | None, int]:
        known = self._ranges.get(device)
        if known is None:
            known = self._ranges[device] = self._ask_range(device)
        return known

    def _ask_range(self, device: str) -> tuple[int | None, int]:
        ask = self._boards.ask
        highest = int(ask(device, "read the clocks of", "nvmlDeviceGetMaxClockInfo", _SM_CLOCK))
        memory = self._boards.ask_maybe(
            device, "read the memory clocks of", "nvmlDeviceGetSupportedMemoryClocks"
        )
        clocks = memory and self._boards.ask_maybe(
            device, "list the clocks of", "nvmlDeviceGetSupportedGraphicsClocks", max(memory)
        )
        return (min(clocks) if clocks else None), highest
