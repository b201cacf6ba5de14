"""The GPUs of this host through NVML: found, lost and found again; its errors as refusals.

Handles are void once a GPU fell off the bus or the driver was reloaded, and indices change when a
GPU goes. So a board is identified by the id of its domain, ``gpu:UUID``, and gets a new handle
whenever the old one turns out to be void.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from wattspan.capper.actuators import actuator_error
from wattspan.model import SECOND, Trouble
from wattspan.ports import ActuatorError, Clock
from wattspan.sources.nvml.calls import (
    DRIVER_NOT_LOADED,
    FIELD_ERRORS,
    FUNCTION_NOT_FOUND,
    GPU_ERRORS,
    GPU_IS_LOST,
    GPU_NOT_FOUND,
    LIB_RM_VERSION_MISMATCH,
    NO_PERMISSION,
    NOT_FOUND,
    NOT_SUPPORTED,
    RESET_REQUIRED,
    SESSION_ERRORS,
    UNKNOWN,
    cause_of,
    code_of,
)
from wattspan.sources.nvml.device import EMULATED_UUID
from wattspan.sources.nvml.source import LIBRARY

INVALID_ARGUMENT = 2
_VOID_HANDLE_ERRORS = GPU_ERRORS | {UNKNOWN}
_LOOK_FOR_XID = "Look for Xid messages in dmesg; it is tried again."
_REMEDIES = {
    INVALID_ARGUMENT: "Ask for a value in the device's range, as `wattspan caps status` shows it.",
    NOT_SUPPORTED: "Virtual GPUs, and many in laptops, leave it to their host; cap them there.",
    NO_PERMISSION: (
        "The driver wants CAP_SYS_ADMIN in the host's own user namespace, which root in a "
        "container does not have by itself; run `wattspan capper` as root on the host."
    ),
    DRIVER_NOT_LOADED: "Load it (modprobe nvidia); limits are the driver's defaults afterwards.",
    FUNCTION_NOT_FOUND: "Install a newer one.",
    GPU_IS_LOST: _LOOK_FOR_XID,
    RESET_REQUIRED: "Reset it with nvidia-smi --gpu-reset, or reboot.",
    LIB_RM_VERSION_MISMATCH: "Reload the driver or reboot: it was upgraded while in use.",
    GPU_NOT_FOUND: "Look at lspci and dmesg; it is tried again.",
    UNKNOWN: _LOOK_FOR_XID,
}


def nvml_error(thing: str, code: int) -> ActuatorError:
    """The failure of ``thing``, as in "set the power limit of GPU 0", by NVML's error ``code``."""
    trouble, cause = Trouble.RETRY, cause_of(code)
    if code == INVALID_ARGUMENT:
        trouble, cause = Trouble.MALFORMED, "the driver rejects the value"
    elif code == NO_PERMISSION:
        trouble = Trouble.DENIED
    elif code in FIELD_ERRORS:
        trouble = Trouble.ABSENT
    return actuator_error(thing, cause, _REMEDIES.get(code, ""), trouble)


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

    def __init__(self, nvml: Any, clock: Clock) -> None:
        self._nvml = nvml
        self._clock = clock
        self._begun = False
        self._reinitialize_at: dict[str, int] = {}  # for each lost board
        self._boards: dict[str, NvmlBoard] = {}  # with handles that are not known to be void
        self._names: dict[str, str] = {}  # of all boards ever found
        self.generation = 0

    def ids(self) -> tuple[str, ...]:
        """The ids of all boards that can be identified; none while there is no driver."""
        for _ in ("this session", "a new session"):
            with contextlib.suppress(ActuatorError):
                self._begin()
                self._list()
                return tuple(self._boards)
        return ()

    def name(self, device: str) -> str:
        """The name of ``device`` for people; its id if it was never found."""
        return self._names.get(device, device)

    def board(self, device: str) -> NvmlBoard:
        """The board; ActuatorError if there is none, or it does not answer."""
        self._begin()
        return self._boards.get(device) or self._find(device)

    def slots(self) -> int:
        """The number of boards that the driver counts. ActuatorError."""
        self._begin()
        with self._listing():
            return int(self._nvml.nvmlDeviceGetCount())

    def id_at(self, slot: int) -> str | None:
        """The id of the board with the index ``slot``; None if it cannot be identified."""
        self._begin()
        with self._listing():
            board = self._at(slot)
        return None if board is None else board.id

    def ask(self, device: str, thing: str, call: str, *arguments: int) -> Any:
        """The result of NVML's function ``call`` for one board; ``thing`` names the call in errors.

        A void handle is replaced, and the call repeated once. ActuatorError.
        """
        again = False
        while True:
            board = self.board(device)
            function = getattr(self._nvml, call, None)
            if function is None:
                raise self._refusal(thing, device, FUNCTION_NOT_FOUND)
            try:
                return function(board.handle, *arguments)
            except self._nvml.NVMLError as error:
                code = code_of(error)
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
            raise nvml_error("reach the GPUs", code_of(error)) from None
        self._begun = True
        self.generation += 1

    @contextlib.contextmanager
    def _listing(self) -> Iterator[None]:
        """End the session if the boards cannot be listed. ActuatorError."""
        try:
            yield
        except self._nvml.NVMLError as error:
            self.close()
            raise nvml_error("list the GPUs", code_of(error)) from None

    def _list(self) -> None:
        """Find every board; one without a handle is left out."""
        with self._listing():
            count = int(self._nvml.nvmlDeviceGetCount())
            found = [board for index in range(count) if (board := self._at(index)) is not None]
        self._boards = {board.id: board for board in found}
        self._names.update({board.id: board.name for board in found})

    def _at(self, index: int) -> NvmlBoard | None:
        try:
            return self._describe(index, self._nvml.nvmlDeviceGetHandleByIndex(index))
        except self._nvml.NVMLError as error:
            if code_of(error) in SESSION_ERRORS:
                raise
            return None

    def _describe(self, index: int, handle: Any) -> NvmlBoard:
        uuid = _text(self._nvml.nvmlDeviceGetUUID(handle))
        return NvmlBoard(
            GPU_ID_PREFIX + uuid, index, _text(self._nvml.nvmlDeviceGetName(handle)), handle
        )

    def _is_void(self, device: str, code: int, *, with_arguments: bool) -> bool:
        """True if ``code`` means that the handle is void; then it is dropped."""
        if code in SESSION_ERRORS:
            self.close()
            return True
        # A getter has no argument to reject but its handle.
        stale = code == INVALID_ARGUMENT and not with_arguments
        if stale or code in _VOID_HANDLE_ERRORS:
            self._boards.pop(device, None)
            return True
        return False

    def _find(self, device: str) -> NvmlBoard:
        """A new handle for a board. No other board is called, since that call may hang."""
        try:
            board = self._by_uuid(device)
        except self._nvml.NVMLError as error:
            code = code_of(error)
        else:
            self._reinitialize_at.pop(device, None)
            return board
        if device in self._names:
            return self._find_lost(device, code)
        if code in SESSION_ERRORS:
            self.close()
        if code != NOT_FOUND:
            raise self._refusal("find", device, code)
        raise actuator_error(
            f"find {device}", "this host has no such GPU", "See nvidia-smi -L.", Trouble.ABSENT
        )

    def _find_lost(self, device: str, code: int) -> NvmlBoard:
        """A board that was found before, after an initialisation of the library if one is due."""
        now = self._clock.monotonic()
        if code in SESSION_ERRORS or now >= self._reinitialize_at.setdefault(
            device, now + REINITIALIZE_AFTER
        ):
            self._reinitialize_at[device] = now + REINITIALIZE_AFTER
            self.close()
            self._begin()
            with contextlib.suppress(self._nvml.NVMLError):
                return self._by_uuid(device)
            self._list()
            if device in self._boards:
                return self._boards[device]
        lost = GPU_NOT_FOUND if code == NOT_FOUND else code
        raise self._refusal("reach", device, lost)

    def _by_uuid(self, device: str) -> NvmlBoard:
        handle = self._nvml.nvmlDeviceGetHandleByUUID(device.removeprefix(GPU_ID_PREFIX))
        index = int(self._nvml.nvmlDeviceGetIndex(handle))
        board = self._describe(index, handle)
        self._boards[device], self._names[device] = board, board.name
        return board

    def _refusal(self, thing: str, device: str, code: int) -> ActuatorError:
        return nvml_error(f"{thing} {self.name(device)}", code)


def load_pynvml() -> Any:
    """The ``pynvml`` module, or None where the driver's library is not installed."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    import pynvml

    return pynvml


def _text(value: Any) -> str:
    """Old bindings return bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
