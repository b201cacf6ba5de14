"""GPU boards' power limits and locked SM clocks, through NVML.

Power limits, in milliwatts, are set by NVML's first setter: nvidia-ml-py's binding of the second
one drops the return code and reports success for a refusal.

A locked SM clock, in megahertz, is an upper bound that cannot be read back: NVML locks and unlocks
clocks, and does not report whether they are locked. So the original is "not locked", and a reset is
all that can restore it. The reported lock is the one that this process set, as long as the driver
has not been reloaded since.
"""

from __future__ import annotations

from collections.abc import Iterable

from wattspan.capper.actuators import (
    DeviceActuator,
    PowerActuator,
    actuator_error,
    format_setting,
)
from wattspan.capper.actuators.nvml import NvmlBoards
from wattspan.model import CapKey, Knob, KnobState, Trouble
from wattspan.ports import Clock

_READ_LIMITS, _READ_CLOCKS = "read the power limits of", "read the clocks of"
_SM_CLOCK = 1  # NVML_CLOCK_SM


class _GpuActuator(DeviceActuator):
    """Common part of both knobs of a board."""

    def __init__(self, boards: NvmlBoards, clock: Clock) -> None:
        super().__init__(clock)
        self._boards = boards

    def slots(self) -> int:
        return self._boards.slots()

    def id_at(self, slot: int) -> str | None:
        return self._boards.id_at(slot)

    def close(self) -> None:
        self._boards.close()

    def _ids(self) -> Iterable[str]:
        return self._boards.ids()

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


class GpuPower(_GpuActuator, PowerActuator):
    """The Actuator of GPU_POWER."""

    knob = Knob.GPU_POWER

    def _put(self, before: KnobState, value: int) -> None:
        self._check_range(before, before.minimum or 0, value)
        setter = "nvmlDeviceSetPowerManagementLimit"
        self._boards.ask(before.key.device, "set the power limit of", setter, value)

    def _state(self, device: str) -> KnobState:
        board, maybe = self._boards.board(device), self._boards.ask_maybe
        requested = self._boards.ask(device, _READ_LIMITS, "nvmlDeviceGetPowerManagementLimit")
        enforced = maybe(device, _READ_LIMITS, "nvmlDeviceGetEnforcedPowerLimit")
        default = maybe(device, _READ_LIMITS, "nvmlDeviceGetPowerManagementDefaultLimit")
        limits = maybe(device, _READ_LIMITS, "nvmlDeviceGetPowerManagementLimitConstraints")
        minimum, maximum = limits or (None, None)
        return KnobState(
            CapKey(self.knob, device),
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
        setter = "nvmlDeviceSetGpuLockedClocks"
        self._boards.ask(device, "lock the clocks of", setter, lowest, value)
        self._locks[device] = value
        return self._settled(device, lambda now: now.enforced == value)

    def _state(self, device: str) -> KnobState:
        board = self._boards.board(device)
        if device not in self._ranges:
            self._ranges[device] = self._range(device)
        minimum, maximum = self._ranges[device]
        clock = self._boards.ask_maybe(device, _READ_CLOCKS, "nvmlDeviceGetClockInfo", _SM_CLOCK)
        if self._session != self._boards.generation:
            self._session = self._boards.generation
            self._locks.clear()  # the driver was reloaded, and no clock is locked any more
        lock = self._locks.get(device)
        obeyed = lock is not None and clock is not None and clock <= lock
        return KnobState(
            CapKey(self.knob, device),
            board.name,
            minimum=minimum,
            default=maximum,
            maximum=maximum,
            requested=lock,
            enforced=lock if obeyed else None,
            aliases=board.aliases,
        )

    def _range(self, device: str) -> tuple[int | None, int]:
        maybe = self._boards.ask_maybe
        highest = self._boards.ask(device, _READ_CLOCKS, "nvmlDeviceGetMaxClockInfo", _SM_CLOCK)
        memory = maybe(device, _READ_CLOCKS, "nvmlDeviceGetSupportedMemoryClocks")
        clocks = memory and maybe(
            device, _READ_CLOCKS, "nvmlDeviceGetSupportedGraphicsClocks", max(memory)
        )
        return (min(clocks) if clocks else None), int(highest)
