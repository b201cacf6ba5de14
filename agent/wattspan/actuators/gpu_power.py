"""GPU boards' power management limits, in milliwatts.

Set by NVML's first setter: nvidia-ml-py's binding of the second one drops the return code and
reports success for what was refused.
"""

from __future__ import annotations

import contextlib

from wattspan.actuators.errors import no_number, not_honoured, refused, shown
from wattspan.actuators.nvml_boards import Board, Boards
from wattspan.actuators.readback import is_kept, obeys, settled
from wattspan.model import CapKey, Knob, KnobState, Trouble
from wattspan.ports import ActuatorError, Clock


class GpuPower:
    """The Actuator of GPU_POWER."""

    knob = Knob.GPU_POWER

    def __init__(self, boards: Boards, clock: Clock) -> None:
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
            raise no_number(self.knob, name)
        before = self.read(device)
        self._refuse_outside(before, value)
        self._boards.ask(
            device, "set the power limit of", "nvmlDeviceSetPowerManagementLimit", value
        )
        state = settled(
            self._clock, lambda: self.read(device), lambda now: obeys(before, now, value)
        )
        if not is_kept(value, state.requested):
            raise not_honoured(self.knob, state.name, value, state.requested)
        return state

    def close(self) -> None:
        self._boards.close()

    def _state(self, board: Board) -> KnobState:
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
        raise refused(
            f"set the power limit of {state.name} to {shown(self.knob, value)}",
            f"it can be {shown(self.knob, low)} to {shown(self.knob, high)}",
            "Ask for something within that range.",
            Trouble.MALFORMED,
        )
