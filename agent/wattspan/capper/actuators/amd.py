"""AMD boards' power limits and highest clocks, through AMD SMI.

A board is identified by the PCI address of its first function, as its domain is. Limits and clocks
are of the whole board, also of a divided one, and its first partition has them.

The driver keeps power limits in whole watts. A clock is limited by the performance level
"determinism", which shows that it is in force; the limit itself cannot be read back. The original
level is "auto". A board with any other level is managed by another program, and is left alone.

Handles are void after each initialisation of the library, and an initialisation is all that finds
a board that returned. It changes no setting of any board.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from wattspan.capper.actuators import (
    PowerActuator,
    actuator_error,
    load_identity,
    suspended_error,
)
from wattspan.capper.actuators.gpu import (
    ASK_WITHIN_RANGE,
    GPU_ID_PREFIX,
    REJECTED,
    ClockActuator,
    GpuActuator,
    trouble_of,
)
from wattspan.model import CapKey, DevicePresence, Knob, KnobState, Trouble
from wattspan.ports import ActuatorError, Clock
from wattspan.sources import gpu_calls
from wattspan.sources.amdsmi.calls import AmdSmiError, AmdSmiLibrary, cause_of, number
from wattspan.sources.amdsmi.device import EMULATED_UUID, MICROWATTS, BoardIdentity, power_limits
from wattspan.sources.amdsmi.energy import accumulated
from wattspan.sources.amdsmi.source import identify_board, is_amd, list_boards
from wattspan.sources.bound_devices import BoundDevices

_VOID_HANDLE_ERRORS = gpu_calls.GPU_ERRORS | gpu_calls.SESSION_ERRORS | {gpu_calls.UNKNOWN}
_REMEDIES = {
    gpu_calls.INVALID_ARGUMENT: ASK_WITHIN_RANGE,
    gpu_calls.NOT_SUPPORTED: "In a virtual machine, cap the board on its host.",
    gpu_calls.NO_PERMISSION: "AMD's driver lets root alone set it: run `wattspan capper` as root.",
    gpu_calls.DRIVER_NOT_LOADED: "Load it (modprobe amdgpu); limits then have the defaults.",
    gpu_calls.FUNCTION_NOT_FOUND: "Install the version of amdsmi that belongs to this host's ROCm.",
    gpu_calls.GPU_NOT_FOUND: "Look at lspci and dmesg; it is tried again.",
    gpu_calls.UNKNOWN: "Look for messages of amdgpu in dmesg; it is tried again.",
}


def amd_error(thing: str, code: int) -> ActuatorError:
    """The failure of ``thing``, as in "set the limit of GPU 0", by ``code``, one of NVML's."""
    cause = REJECTED if code == gpu_calls.INVALID_ARGUMENT else cause_of(code)
    return actuator_error(thing, cause, _REMEDIES.get(code, ""), trouble_of(code))


class AmdBoard(NamedTuple):
    """A board that the library has found; ``handle`` is that of its first partition."""

    identity: BoardIdentity
    handle: Any

    @property
    def name(self) -> str:
        return self.identity.name(emulated=self.identity.uuid.startswith(EMULATED_UUID))

    @property
    def aliases(self) -> tuple[str, ...]:
        """The address and, if they are known, the UUID and the index among AMD's boards."""
        identity = self.identity
        return tuple(filter(None, (identity.address, identity.uuid, f"amd:{identity.index}")))


class AmdBoards:
    """A session with AMD SMI, begun when it is first needed. Belongs to one thread."""

    generation = 0  # an initialisation changes no setting

    def __init__(self, amdsmi: Any, clock: Clock, sysfs: Path | None = None) -> None:
        """``sysfs`` shows the loads of the driver and of the boards; None for an emulated host."""
        self.library = AmdSmiLibrary(amdsmi, clock)
        self._sysfs = sysfs
        self._bound = None if sysfs is None else BoundDevices(sysfs, "amdgpu")
        self._losses: Counter[str] = Counter()  # of each board
        self._wide: set[str] = set()  # boards with an accumulator of more than 32 bits
        self._begun = False
        self._boards: dict[str, AmdBoard] = {}  # with handles that are not known to be void
        self._names: dict[str, str] = {}  # of all boards ever found
        self._listed: tuple[str, ...] = ()  # when they were last counted

    def board(self, device: str) -> AmdBoard:
        """The board; ActuatorError if there is none, or it does not answer."""
        address = device.removeprefix(GPU_ID_PREFIX)
        if self._bound is not None and self._bound.suspended(address):
            raise suspended_error(self._names.get(device, device))
        self._begin()
        return self._boards.get(device) or self._find(device)

    def slots(self) -> int:
        """The number of boards that the library has found. ActuatorError."""
        if self._bound is not None and self._bound.all_suspended():
            raise suspended_error("the AMD GPUs")
        self._begin()
        if self._names.keys() - self._boards.keys():
            self._reinitialise()
        self._listed = tuple(self._boards)
        return len(self._listed)

    def id_at(self, slot: int) -> str | None:
        """The id of the board in ``slot`` when they were counted; None if there is none."""
        self._begin()
        listed = self._listed or tuple(self._boards)
        return listed[slot] if slot < len(listed) else None

    def ask(self, device: str, thing: str, call: str, *arguments: Any) -> Any:
        """The result of the function ``call`` for one board; ``thing`` names the call in errors.

        A void handle is replaced, and the call repeated once. ActuatorError.
        """
        again = False
        while True:
            board = self.board(device)
            try:
                return self.library.call(call, board.handle, *arguments)
            except AmdSmiError as error:
                stale = error.value == gpu_calls.INVALID_ARGUMENT and not arguments
                if stale or error.value in _VOID_HANDLE_ERRORS:
                    self._boards.pop(device, None)
                    self._losses[device] += error.value in _VOID_HANDLE_ERRORS
                    if not again:
                        again = True
                        continue
                raise self._refusal(thing, device, error.value) from None

    def presence(self, device: str) -> DevicePresence:
        """The evidence of resets of a board, which answers. ActuatorError."""
        address, load = self.board(device).identity.address, ""
        if self._sysfs is not None:
            load = load_identity(self._sysfs, "module/amdgpu", f"bus/pci/devices/{address}/driver")
        return DevicePresence(load, self._losses[device], self._odometer(device))

    def _odometer(self, device: str) -> int | None:
        """The energy accumulator, once it is known not to be one of 32 bits, which wraps."""
        try:
            answer = self.ask(device, "read the energy counter of", "amdsmi_get_energy_count")
        except ActuatorError:
            return None
        value = number(accumulated(answer), 1 << 64) or 0
        if value >> 32:
            self._wide.add(device)
        return value if device in self._wide else None

    def close(self) -> None:
        """End the session; the next call begins another one."""
        self._boards.clear()
        if self._begun:
            self._begun = False
            with contextlib.suppress(AmdSmiError):
                self.library.call("amdsmi_shut_down")

    # ------------------------------------------------------------------------------ session

    def _begin(self) -> None:
        """Begin the session, unless it has begun."""
        if self._begun:
            return
        try:
            self.library.call("amdsmi_init")
            self._begun = True
            for index, (address, handles) in enumerate(list_boards(self.library).items()):
                self._describe(address, index, handles[0])
        except AmdSmiError as error:
            self.close()
            raise amd_error("reach the AMD GPUs", error.value) from None

    def _describe(self, address: str, index: int, handle: Any) -> None:
        """Remember a board, unless it is lost again or of another vendor."""
        try:
            uuid = self._identity_field("amdsmi_get_gpu_device_uuid", handle)
            asic = self._identity_field("amdsmi_get_gpu_asic_info", handle) or {}
        except AmdSmiError:
            return
        if not is_amd(asic):
            return
        identity = identify_board(address, index, asic, uuid or "")
        board = AmdBoard(identity, handle)
        self._boards[identity.domain_id] = board
        self._names[identity.domain_id] = board.name

    def _identity_field(self, call: str, handle: Any) -> Any:
        """The result of ``call``; None if the library does not have it. AmdSmiError."""
        try:
            return self.library.call(call, handle)
        except AmdSmiError as error:
            if error.value not in gpu_calls.FIELD_ERRORS:
                raise
            return None

    def _find(self, device: str) -> AmdBoard:
        """The board with a new handle, after an initialisation of the library."""
        self._reinitialise()
        if device in self._boards:
            return self._boards[device]
        if device in self._names:
            raise self._refusal("reach", device, gpu_calls.GPU_NOT_FOUND)
        raise actuator_error(
            f"find {device}", "this host has no such GPU", "See amd-smi list.", Trouble.ABSENT
        )

    def _reinitialise(self) -> None:
        self.close()
        self._begin()

    def _refusal(self, thing: str, device: str, code: int) -> ActuatorError:
        return amd_error(f"{thing} {self._names.get(device, device)}", code)


_READ_LIMITS, _READ_CLOCKS = "read the power limits of", "read the clocks of"
_SENSOR = 0  # of the whole board


class AmdPower(GpuActuator[AmdBoards], PowerActuator):
    """GPU_POWER of AMD boards."""

    knob = Knob.GPU_POWER

    def _put(self, before: KnobState, value: int) -> None:
        self._check_range(before, max(1, before.minimum or 0), value)
        setter, cap = "amdsmi_set_power_cap", value * MICROWATTS
        self._boards.ask(before.key.device, "set the power limit of", setter, _SENSOR, cap)

    def _state(self, device: str) -> KnobState:
        answer = self._boards.ask(device, _READ_LIMITS, "amdsmi_get_power_cap_info")
        limits = power_limits(answer)
        board = self._boards.board(device)
        if limits.requested is None:
            raise amd_error(f"{_READ_LIMITS} {board.name}", gpu_calls.NOT_SUPPORTED)
        return KnobState(
            CapKey(self.knob, device),
            board.name,
            minimum=limits.minimum,
            default=limits.default,
            maximum=limits.maximum,
            requested=limits.requested,
            enforced=limits.enforced,
            aliases=board.aliases,
            presence=self._boards.presence(device),
        )


_AUTO, _DETERMINISM = "AUTO", "DETERMINISM"


class AmdClock(ClockActuator[AmdBoards]):
    """GPU_CLOCK of AMD boards."""

    def _lock(self, device: str, lowest: int, highest: int) -> None:
        del lowest  # the level has none: an idle board can sleep
        level = self._level(device)
        if level not in {_AUTO, _DETERMINISM}:
            raise actuator_error(
                f"limit the clocks of {self._boards.board(device).name}",
                f"another program has set its performance level to {level}",
                "Set it to auto: amd-smi set --perf-level auto.",
                Trouble.DENIED,
            )
        setter = "amdsmi_set_gpu_perf_determinism_mode"
        self._boards.ask(device, "limit the clocks of", setter, highest)

    def _unlock(self, device: str) -> None:
        level = self._boards.library.constant("AmdSmiDevPerfLevel", _AUTO)
        self._boards.ask(device, "reset the clocks of", "amdsmi_set_gpu_perf_level", level)

    def _clock_of(self, device: str) -> int | None:
        if self._level(device) != _DETERMINISM:
            self._locks.pop(device, None)  # another program, or a reset of the board, removed it
        return number(self._clocks(device).get("clk"))

    def _range(self, device: str) -> tuple[int | None, int]:
        clocks = self._clocks(device)
        highest = number(clocks.get("max_clk"))
        if not highest:
            name = self._boards.board(device).name
            raise amd_error(f"{_READ_CLOCKS} {name}", gpu_calls.NOT_SUPPORTED)
        return number(clocks.get("min_clk")), highest

    def _labels(self, device: str) -> tuple[str, tuple[str, ...]]:
        board = self._boards.board(device)
        return board.name, board.aliases

    def _clocks(self, device: str) -> dict[str, Any]:
        kind = self._boards.library.constant("AmdSmiClkType", "GFX")
        answer: dict[str, Any] = self._boards.ask(
            device, _READ_CLOCKS, "amdsmi_get_clock_info", kind
        )
        return answer

    def _level(self, device: str) -> str:
        """The performance level, as in "AUTO"."""
        level = self._boards.ask(device, _READ_CLOCKS, "amdsmi_get_gpu_perf_level")
        return str(level).removeprefix("AMDSMI_DEV_PERF_LEVEL_")
