"""GPU boards' power limits and locked SM clocks, through NVML.

Handles are void once a GPU fell off the bus or the driver was reloaded, and indices change when a
GPU goes. So a board is identified by the id of its domain, ``gpu:UUID``, and gets a new handle
whenever the old one turns out to be void.

Power limits, in milliwatts, are set by NVML's first setter: nvidia-ml-py's binding of the second
one drops the return code and reports success for a refusal.

A locked SM clock, in megahertz, is an upper bound that cannot be read back: NVML locks and unlocks
clocks, and does not report whether they are locked. So the original is "not locked", and a reset is
all that can restore it. The reported lock is the one that this process set, as long as the driver
has not been reloaded since.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from wattspan.capper.actuators import (
    DeviceActuator,
    PowerActuator,
    actuator_error,
    format_setting,
    load_identity,
    suspended_error,
)
from wattspan.model import SECOND, CapKey, DevicePresence, Knob, KnobState, Trouble
from wattspan.ports import ActuatorError, Clock
from wattspan.sources import gpu_calls
from wattspan.sources.bound_devices import BoundDevices
from wattspan.sources.nvml.calls import cause_of, pci_address
from wattspan.sources.nvml.device import EMULATED_UUID

REJECTED = "the driver rejects the value"
ASK_WITHIN_RANGE = "Ask for a value in the device's range, as `wattspan caps status` shows it."
_VOID_HANDLE_ERRORS = gpu_calls.GPU_ERRORS | {gpu_calls.UNKNOWN}
_LOOK_FOR_XID = "Look for Xid messages in dmesg; it is tried again."
_REMEDIES = {
    gpu_calls.INVALID_ARGUMENT: ASK_WITHIN_RANGE,
    gpu_calls.NOT_SUPPORTED: (
        "Virtual GPUs, and many in laptops, leave it to the host: cap them there."
    ),
    gpu_calls.NO_PERMISSION: (
        "The driver wants CAP_SYS_ADMIN in the host's own user namespace, which root in a "
        "container does not have by itself; run `wattspan capper` as root on the host."
    ),
    gpu_calls.DRIVER_NOT_LOADED: "Load it (modprobe nvidia); limits then have the defaults.",
    gpu_calls.FUNCTION_NOT_FOUND: "Install a newer one.",
    gpu_calls.GPU_IS_LOST: _LOOK_FOR_XID,
    gpu_calls.RESET_REQUIRED: "Reset it with nvidia-smi --gpu-reset, or reboot.",
    gpu_calls.LIB_RM_VERSION_MISMATCH: "Reload the driver or reboot: it was upgraded while in use.",
    gpu_calls.GPU_NOT_FOUND: "Look at lspci and dmesg; it is tried again.",
    gpu_calls.UNKNOWN: _LOOK_FOR_XID,
}


def nvml_error(thing: str, code: int) -> ActuatorError:
    """The failure of ``thing``, as in "set the power limit of GPU 0", by NVML's error ``code``."""
    cause = REJECTED if code == gpu_calls.INVALID_ARGUMENT else cause_of(code)
    return actuator_error(thing, cause, _REMEDIES.get(code, ""), trouble_of(code))


def trouble_of(code: int) -> Trouble:
    """The class of NVML's error ``code``."""
    if code == gpu_calls.INVALID_ARGUMENT:
        return Trouble.MALFORMED
    if code == gpu_calls.NO_PERMISSION:
        return Trouble.DENIED
    return Trouble.ABSENT if code in gpu_calls.FIELD_ERRORS else Trouble.RETRY


GPU_ID_PREFIX = "gpu:"
REINITIALIZE_AFTER = 30 * SECOND
"""Interval of library initialisations for a lost board. If no
other process keeps the driver loaded, an initialisation ends the limits of all other boards."""


@dataclass(frozen=True, slots=True)
class NvmlBoard:
    """One GPU. ``handle`` is valid in this session of the library, as long as the GPU answers."""

    id: str
    index: int
    model: str
    handle: Any
    pci: str = ""

    @property
    def uuid(self) -> str:
        return self.id.removeprefix(GPU_ID_PREFIX)

    @property
    def name(self) -> str:
        label = f"{self.model or 'GPU'} {self.index}"
        return f"Emulated {label}" if self.uuid.startswith(EMULATED_UUID) else label

    @property
    def aliases(self) -> tuple[str, ...]:
        return self.uuid, str(self.index)


class NvmlBoards:
    """A session with NVML, begun when it is first needed. Belongs to one thread.

    ``generation`` grows whenever the driver was, or may have been, reloaded, and lost its settings.
    """

    def __init__(self, nvml: Any, clock: Clock, sysfs: Path | None = None) -> None:
        """``sysfs`` shows the loads of the driver and of the boards; None for an emulated host."""
        self._nvml = nvml
        self._clock = clock
        self._sysfs = sysfs
        self._bound = None if sysfs is None else BoundDevices(sysfs, "nvidia")
        self._places: dict[str, tuple[int, str]] = {}  # index and PCI address of each board
        self._losses: Counter[str] = Counter()  # void handles of each board
        self._begun = False
        self._reinitialize_at: dict[str, int] = {}  # for each lost board
        self._boards: dict[str, NvmlBoard] = {}  # with handles that are not known to be void
        self._names: dict[str, str] = {}  # of all boards ever found
        self.generation = 0

    def name(self, device: str) -> str:
        """The name of ``device`` for people; its id if it was never found."""
        return self._names.get(device, device)

    def board(self, device: str) -> NvmlBoard:
        """The board; ActuatorError if there is none, or it does not answer."""
        if device in self._places and self._is_suspended(self._places[device][1]):
            raise suspended_error(self.name(device))
        self._begin()
        return self._boards.get(device) or self._find(device)

    def _is_suspended(self, pci: str) -> bool:
        return self._bound is not None and self._bound.suspended(pci)

    def slots(self) -> int:
        """The number of boards that the driver counts. ActuatorError."""
        if self._bound is not None and self._bound.all_suspended():
            raise suspended_error("the GPUs")
        code = gpu_calls.UNKNOWN
        for _ in ("this session", "a new session"):
            self._begin()
            try:
                return int(self._nvml.nvmlDeviceGetCount())
            except self._nvml.NVMLError as error:
                self.close()
                code = gpu_calls.code_of(error)
        raise nvml_error("list the GPUs", code)

    def id_at(self, slot: int) -> str | None:
        """The id of the board with the index ``slot``; None if it cannot be identified."""
        for device, (index, pci) in self._places.items():
            if index == slot and self._is_suspended(pci):
                return device
        self._begin()
        try:
            return self._describe(slot, self._nvml.nvmlDeviceGetHandleByIndex(slot)).id
        except self._nvml.NVMLError as error:
            if (code := gpu_calls.code_of(error)) not in gpu_calls.SESSION_ERRORS:
                return None
            self.close()
            raise nvml_error("list the GPUs", code) from None

    def ask(self, device: str, thing: str, call: str, *arguments: int) -> Any:
        """The result of NVML's function ``call`` for one board; ``thing`` names the call in errors.

        A void handle is replaced, and the call repeated once. ActuatorError.
        """
        again = False
        while True:
            board = self.board(device)
            function = getattr(self._nvml, call, None)
            if function is None:
                raise self._refusal(thing, device, gpu_calls.FUNCTION_NOT_FOUND)
            try:
                return function(board.handle, *arguments)
            except self._nvml.NVMLError as error:
                code = gpu_calls.code_of(error)
                lost = self._is_void(device, code, with_arguments=bool(arguments))
                if again or not lost:
                    raise self._refusal(thing, device, code) from None
                again = True

    def ask_maybe(self, device: str, thing: str, call: str, *arguments: int) -> Any:
        """The same, or None if this board does not support or permit the call."""
        try:
            return self.ask(device, thing, call, *arguments)
        except ActuatorError as error:
            if error.trouble in {Trouble.ABSENT, Trouble.DENIED}:
                return None
            raise

    def presence(self, device: str) -> DevicePresence:
        """The evidence of resets of a board, which answers. ActuatorError."""
        known, ask = self.board(device), self.ask_maybe
        load, mig = "", ask(device, _READ_LIMITS, "nvmlDeviceGetMigMode")
        if self._sysfs is not None:
            driver = f"bus/pci/devices/{known.pci}/driver" if known.pci else ""
            load = load_identity(self._sysfs, "module/nvidia", *filter(None, (driver,)))
        return DevicePresence(
            f"{load}{' mig' if mig and mig[0] else ''}",  # the change of the mode is a reset
            self.generation + self._losses[device],
            ask(device, _READ_ENERGY, "nvmlDeviceGetTotalEnergyConsumption"),
        )

    def close(self) -> None:
        """End the session; the next call begins another one."""
        self._boards.clear()
        if self._begun:
            self._begun = False
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()

    # ------------------------------------------------------------------------------ session

    def _begin(self) -> None:
        """Begin the session, unless it has begun."""
        if self._begun:
            return
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise nvml_error("reach the GPUs", gpu_calls.code_of(error)) from None
        self._begun = True
        self.generation += 1

    def _describe(self, index: int, handle: Any) -> NvmlBoard:
        pci, uuid = "", _text(self._nvml.nvmlDeviceGetUUID(handle))
        model = _text(self._nvml.nvmlDeviceGetName(handle))
        with contextlib.suppress(AttributeError, self._nvml.NVMLError):
            pci = pci_address(self._nvml.nvmlDeviceGetPciInfo(handle))
        board = NvmlBoard(GPU_ID_PREFIX + uuid, index, model, handle, pci)
        self._boards[board.id], self._names[board.id] = board, board.name
        self._places[board.id] = index, pci
        return board

    def _is_void(self, device: str, code: int, *, with_arguments: bool) -> bool:
        """True if ``code`` means that the handle is void; then it is dropped."""
        if code in gpu_calls.SESSION_ERRORS:
            self.close()
            return True
        # A getter has no argument to reject but its handle.
        stale = code == gpu_calls.INVALID_ARGUMENT and not with_arguments
        if stale or code in _VOID_HANDLE_ERRORS:
            self._boards.pop(device, None)
            self._losses[device] += 1
            return True
        return False

    def _find(self, device: str) -> NvmlBoard:
        """A new handle for a board. No other board is called, since that call may hang."""
        try:
            board = self._by_uuid(device)
        except self._nvml.NVMLError as error:
            code = gpu_calls.code_of(error)
        else:
            self._reinitialize_at.pop(device, None)
            return board
        if device in self._names:
            return self._find_lost(device, code)
        if code in gpu_calls.SESSION_ERRORS:
            self.close()
        if code != gpu_calls.NOT_FOUND:
            raise self._refusal("find", device, code)
        raise actuator_error(
            f"find {device}", "this host has no such GPU", "See nvidia-smi -L.", Trouble.ABSENT
        )

    def _find_lost(self, device: str, code: int) -> NvmlBoard:
        """A board that was found before, after an initialisation of the library if one is due."""
        now = self._clock.monotonic()
        if code in gpu_calls.SESSION_ERRORS or now >= self._reinitialize_at.setdefault(
            device, now + REINITIALIZE_AFTER
        ):
            self._reinitialize_at[device] = now + REINITIALIZE_AFTER
            self.close()
            self._begin()
            with contextlib.suppress(self._nvml.NVMLError):
                return self._by_uuid(device)
            for slot in range(self.slots()):
                if self.id_at(slot) == device:
                    return self._boards[device]
        lost = gpu_calls.GPU_NOT_FOUND if code == gpu_calls.NOT_FOUND else code
        raise self._refusal("reach", device, lost)

    def _by_uuid(self, device: str) -> NvmlBoard:
        handle = self._nvml.nvmlDeviceGetHandleByUUID(device.removeprefix(GPU_ID_PREFIX))
        return self._describe(int(self._nvml.nvmlDeviceGetIndex(handle)), handle)

    def _refusal(self, thing: str, device: str, code: int) -> ActuatorError:
        return nvml_error(f"{thing} {self.name(device)}", code)


def _text(value: Any) -> str:
    """Old bindings return bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


_READ_LIMITS, _READ_CLOCKS = "read the power limits of", "read the clocks of"
_READ_ENERGY = "read the energy counter of"
_SM_CLOCK = 1  # NVML_CLOCK_SM


class GpuSlots(Protocol):
    """The boards of one driver, by slot; ``generation`` grows when they may have lost settings."""

    @property
    def generation(self) -> int: ...

    def slots(self) -> int: ...

    def id_at(self, slot: int) -> str | None: ...

    def presence(self, device: str) -> DevicePresence: ...

    def close(self) -> None: ...


BoardsT = TypeVar("BoardsT", bound=GpuSlots)


class GpuActuator(DeviceActuator, Generic[BoardsT]):
    """Common part of both knobs of a board."""

    def __init__(self, boards: BoardsT, clock: Clock) -> None:
        super().__init__(clock)
        self._boards = boards

    def slots(self) -> int:
        return self._boards.slots()

    def id_at(self, slot: int) -> str | None:
        return self._boards.id_at(slot)

    def close(self) -> None:
        self._boards.close()

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


class GpuPower(GpuActuator[NvmlBoards], PowerActuator):
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
            presence=self._boards.presence(device),
        )


class ClockActuator(GpuActuator[BoardsT]):
    """The Actuator of GPU_CLOCK. ``enforced`` is reported while the SM clock obeys the lock."""

    knob = Knob.GPU_CLOCK

    def __init__(self, boards: BoardsT, clock: Clock) -> None:
        super().__init__(boards, clock)
        self._locks: dict[str, int] = {}
        self._session = boards.generation
        self._ranges: dict[str, tuple[int | None, int]] = {}  # they never change

    @abstractmethod
    def _lock(self, device: str, lowest: int, highest: int) -> None:
        """Lock the clock to a range in megahertz. ActuatorError."""

    @abstractmethod
    def _unlock(self, device: str) -> None:
        """Unlock the clock, whoever locked it. ActuatorError."""

    @abstractmethod
    def _clock_of(self, device: str) -> int | None:
        """The present clock in megahertz. ActuatorError."""

    @abstractmethod
    def _range(self, device: str) -> tuple[int | None, int]:
        """The lowest and the highest clock in megahertz. ActuatorError."""

    @abstractmethod
    def _labels(self, device: str) -> tuple[str, tuple[str, ...]]:
        """The name and the aliases of a board. ActuatorError."""

    def write(self, device: str, value: int | None) -> KnobState:
        """Lock the clock to ``value`` at most; None unlocks it, whoever locked it."""
        if value is None:
            self._unlock(device)
            self._locks.pop(device, None)
            return self.read(device)
        before = self._before(device)
        lowest = before.minimum or 0
        self._check_range(before, max(1, lowest), value)
        # The lower bound is the lowest clock there is, so that an idle board can still sleep.
        self._lock(device, lowest, value)
        self._locks[device] = value
        return self._settled(device, lambda now: now.enforced == value)

    def _state(self, device: str) -> KnobState:
        name, aliases = self._labels(device)
        if device not in self._ranges:
            self._ranges[device] = self._range(device)
        minimum, maximum = self._ranges[device]
        clock = self._clock_of(device)
        if self._session != self._boards.generation:
            self._session = self._boards.generation
            self._locks.clear()  # the driver was reloaded, and no clock is locked any more
        lock = self._locks.get(device)
        obeyed = lock is not None and clock is not None and clock <= lock
        return KnobState(
            CapKey(self.knob, device),
            name,
            minimum=minimum,
            default=maximum,
            maximum=maximum,
            requested=lock,
            enforced=lock if obeyed else None,
            aliases=aliases,
            presence=self._boards.presence(device),
        )


class GpuClock(ClockActuator[NvmlBoards]):
    """GPU_CLOCK through NVML."""

    def _lock(self, device: str, lowest: int, highest: int) -> None:
        setter = "nvmlDeviceSetGpuLockedClocks"
        self._boards.ask(device, "lock the clocks of", setter, lowest, highest)

    def _unlock(self, device: str) -> None:
        self._boards.ask(device, "unlock the clocks of", "nvmlDeviceResetGpuLockedClocks")

    def _clock_of(self, device: str) -> int | None:
        clock = self._boards.ask_maybe(device, _READ_CLOCKS, "nvmlDeviceGetClockInfo", _SM_CLOCK)
        return None if clock is None else int(clock)

    def _labels(self, device: str) -> tuple[str, tuple[str, ...]]:
        board = self._boards.board(device)
        return board.name, board.aliases

    def _range(self, device: str) -> tuple[int | None, int]:
        maybe = self._boards.ask_maybe
        highest = self._boards.ask(device, _READ_CLOCKS, "nvmlDeviceGetMaxClockInfo", _SM_CLOCK)
        memory = maybe(device, _READ_CLOCKS, "nvmlDeviceGetSupportedMemoryClocks")
        clocks = memory and maybe(
            device, _READ_CLOCKS, "nvmlDeviceGetSupportedGraphicsClocks", max(memory)
        )
        return (min(clocks) if clocks else None), int(highest)
