"""GPUs' locked SM clocks, in megahertz: an upper bound, which cannot be read back.

NVML can lock clocks and unlock them, and does not tell whether they are locked. So what stood
before is never known: the original is "not locked", and taking a lock away is all that can be
done for it. What is told of a lock is what this process set itself, as long as the driver has
not been away since.
"""

from __future__ import annotations

import contextlib

from wattspan.actuators.errors import refused, shown
from wattspan.actuators.nvml_boards import Board, Boards
from wattspan.actuators.readback import settled
from wattspan.model import CapKey, Knob, KnobState, Trouble
from wattspan.ports import ActuatorError, Clock

_SM = 1  # NVML_CLOCK_SM


class GpuClock:
    """The Actuator of GPU_CLOCK. ``enforced`` is told while the SM clock is seen to obey."""

    knob = Knob.GPU_CLOCK

    def __init__(self, boards: Boards, clock: Clock) -> None:
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
            raise refused(
                f"lock the clocks of {before.name} to {shown(self.knob, value)}",
                f"they can be {lowest} to {before.maximum} MHz",
                "Ask for something within that range.",
                Trouble.MALFORMED,
            )
        # The lower bound is the lowest clock there is: an idle board may go on to sleep.
        self._boards.ask(
            device, "lock the clocks of", "nvmlDeviceSetGpuLockedClocks", lowest, value
        )
        self._ours[device] = value
        return settled(self._clock, lambda: self.read(device), lambda now: now.enforced == value)

    def close(self) -> None:
        self._boards.close()

    def _state(self, board: Board) -> KnobState:
        minimum, maximum = self._range(board.id)
        clock = self._boards.ask_maybe(
            board.id, "read the SM clock of", "nvmlDeviceGetClockInfo", _SM
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
        highest = int(ask(device, "read the clocks of", "nvmlDeviceGetMaxClockInfo", _SM))
        memory = self._boards.ask_maybe(
            device, "read the memory clocks of", "nvmlDeviceGetSupportedMemoryClocks"
        )
        clocks = memory and self._boards.ask_maybe(
            device, "list the clocks of", "nvmlDeviceGetSupportedGraphicsClocks", max(memory)
        )
        return (min(clocks) if clocks else None), highest
