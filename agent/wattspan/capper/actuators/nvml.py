"""What NVML's codes mean to somebody who wants to turn a knob.

The GPUs of this host through NVML: found, lost and found again.

Handles are void once a GPU fell off the bus or the driver was loaded again; indices change when
a GPU goes. So a board is known by the id of its domain, ``gpu:UUID``, and its handle is asked for
again whenever it turns out to be void.
"""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import dataclass
from typing import Any

from wattspan.capper.actuators.common import actuator_error
from wattspan.model import SECOND, Trouble
from wattspan.ports import ActuatorError, Clock

UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
DRIVER_NOT_LOADED = 9
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
LIB_RM_VERSION_MISMATCH = 18
VERSION_MISMATCH = 25
DEPRECATED = 26
GPU_NOT_FOUND = 28
UNKNOWN = 999

SESSION_ERRORS = frozenset({UNINITIALIZED, DRIVER_NOT_LOADED, LIB_RM_VERSION_MISMATCH})
BOARD_ERRORS = frozenset({GPU_IS_LOST, RESET_REQUIRED, GPU_NOT_FOUND, UNKNOWN})
FIELD_ERRORS = frozenset(
    {NOT_SUPPORTED, NOT_FOUND, FUNCTION_NOT_FOUND, VERSION_MISMATCH, DEPRECATED}
)

_CAUSES: dict[int, tuple[Trouble, str, str]] = {
    UNINITIALIZED: (
        Trouble.RETRY,
        "the connection to the driver is gone",
        "It is made anew at the next attempt.",
    ),
    INVALID_ARGUMENT: (
        Trouble.MALFORMED,
        "the driver says that this is no value of it",
        "Ask for one within the device's range, as `wattspan caps status` shows it.",
    ),
    NOT_SUPPORTED: (
        Trouble.ABSENT,
        "this GPU does not have it",
        "Virtual GPUs, and many in laptops, leave it to their host; cap them there.",
    ),
    NO_PERMISSION: (
        Trouble.DENIED,
        "permission denied",
        "The driver wants CAP_SYS_ADMIN in the host's own user namespace, which root in a "
        "container does not have by itself; run `wattspan capper` as root on the host.",
    ),
    DRIVER_NOT_LOADED: (
        Trouble.RETRY,
        "the NVIDIA driver is not loaded",
        "Load it (modprobe nvidia); limits are the driver's defaults afterwards.",
    ),
    FUNCTION_NOT_FOUND: (
        Trouble.ABSENT,
        "the installed driver is too old to know the call",
        "Install a newer one.",
    ),
    GPU_IS_LOST: (
        Trouble.RETRY,
        "the GPU has fallen off the bus or is otherwise inaccessible",
        "Look for Xid messages in dmesg; it is tried again.",
    ),
    RESET_REQUIRED: (
        Trouble.RETRY,
        "the GPU needs a reset",
        "Reset it with nvidia-smi --gpu-reset, or reboot.",
    ),
    LIB_RM_VERSION_MISMATCH: (
        Trouble.RETRY,
        "the NVML library and the loaded driver differ in version",
        "Reload the driver or reboot: it was upgraded while in use.",
    ),
    GPU_NOT_FOUND: (
        Trouble.RETRY,
        "the driver no longer knows the GPU",
        "Look at lspci and dmesg; it is tried again.",
    ),
    UNKNOWN: (
        Trouble.RETRY,
        "the driver reports an unknown error",
        "Look for Xid messages in dmesg; it is tried again.",
    ),
}


def error_code(error: Exception) -> int:
    """NVML's code behind the binding's error."""
    code = getattr(error, "value", UNKNOWN)
    return code if isinstance(code, int) else UNKNOWN


def nvml_error(thing: str, code: int) -> ActuatorError:
    """Why ``thing`` (as in "set the power limit of GPU 0") was answered with ``code``."""
    trouble, cause, remedy = _CAUSES.get(
        code,
        (
            Trouble.ABSENT if code in FIELD_ERRORS else Trouble.RETRY,
            f"NVML answers with error {code}",
            "",
        ),
    )
    return actuator_error(thing, cause, remedy, trouble)


LIBRARY = "libnvidia-ml.so.1"
GPU_ID_PREFIX = "gpu:"
EMULATED_UUID_PREFIX = "GPU-e0e0e0e0-0000-4000-8000-"
"""How the UUIDs of this project's emulated boards begin, and no real one's."""

REINITIALIZE_AFTER = 30 * SECOND
"""How long a board has been lost before the library is initialised anew for its sake, and again.
Where nobody else keeps the driver loaded, that ends the limits of all other boards."""


@dataclass(frozen=True, slots=True)
class NvmlBoard:
    """One GPU. ``handle`` is good for this session of the library, as long as it answers."""

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
        return f"Emulated {label}" if self.uuid.startswith(EMULATED_UUID_PREFIX) else label

    @property
    def aliases(self) -> tuple[str, ...]:
        return self.uuid, str(self.index)


class NvmlBoards:
    """A session with NVML, begun when it is first needed. Belongs to one thread.

    ``generation`` grows whenever the driver was, or may have been, away: whatever it was told
    before is forgotten.
    """

    def __init__(self, nvml: Any, clock: Clock) -> None:
        self._nvml = nvml
        self._clock = clock
        self._begun = False
        self._afresh: dict[str, int] = {}  # lost boards: when to initialise the library for each
        self._boards: dict[str, NvmlBoard] = {}  # those whose handles are thought to be good
        self._names: dict[str, str] = {}  # of all that were ever seen
        self.generation = 0

    def all(self) -> tuple[NvmlBoard, ...]:
        """Every board that answers to its name; none while there is no driver."""
        for _ in ("as it is", "begun anew"):
            with contextlib.suppress(ActuatorError):
                self._begin()
                self._list()
                return tuple(self._boards.values())
        return ()

    def name(self, device: str) -> str:
        """What people call ``device``; its id if it was never seen."""
        return self._names.get(device, device)

    def board(self, device: str) -> NvmlBoard:
        """The board; ActuatorError if there is none, or it does not answer."""
        self._begin()
        if device not in self._boards and device in self._names:
            return self._found_again(device)
        return self._boards.get(device) or self._found(device)

    def slots(self) -> int:
        """The number of boards that the driver counts. ActuatorError."""
        self._begin()
        try:
            return int(self._nvml.nvmlDeviceGetCount())
        except self._nvml.NVMLError as error:
            self.close()
            raise nvml_error("list the GPUs", error_code(error)) from None

    def id_at(self, slot: int) -> str | None:
        """The id of the board with the index ``slot``; None if it cannot be identified."""
        self._begin()
        try:
            board = self._at(slot)
        except self._nvml.NVMLError as error:
            self.close()
            raise nvml_error("list the GPUs", error_code(error)) from None
        return None if board is None else board.id

    def ask(self, device: str, thing: str, call: str, *arguments: int) -> Any:
        """The answer of NVML's function ``call`` about one board; ``thing`` is what it tells.

        A void handle is replaced, and the question is asked once more.
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
                code = error_code(error)
                lost = self._is_void(device, code, with_arguments=bool(arguments))
                if again or not lost:
                    raise self._refusal(thing, device, code) from None
                again = True

    def ask_maybe(self, device: str, thing: str, call: str, *arguments: int) -> Any:
        """The same, or None where this board has no such thing."""
        try:
            return self.ask(device, thing, call, *arguments)
        except ActuatorError as error:
            if error.trouble in {Trouble.ABSENT, Trouble.DENIED}:
                return None
            raise

    def close(self) -> None:
        """Let the driver go; it is taken up again by the next question."""
        self._boards.clear()
        if self._begun:
            self._begun = False
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()

    # ------------------------------------------------------------------------------ session

    def _begin(self) -> None:
        """Reach the driver, unless it has been reached."""
        if self._begun:
            return
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise nvml_error("reach the GPUs", error_code(error)) from None
        self._begun = True
        self.generation += 1

    def _list(self) -> None:
        """Take hold of every board; one that cannot be had is left out."""
        boards = {}
        try:
            for index in range(int(self._nvml.nvmlDeviceGetCount())):
                if (board := self._at(index)) is not None:
                    boards[board.id] = board
        except self._nvml.NVMLError as error:
            self.close()
            raise nvml_error("list the GPUs", error_code(error)) from None
        self._boards = boards
        self._names.update({board.id: board.name for board in boards.values()})

    def _at(self, index: int) -> NvmlBoard | None:
        try:
            return self._describe(index, self._nvml.nvmlDeviceGetHandleByIndex(index))
        except self._nvml.NVMLError as error:
            if error_code(error) in SESSION_ERRORS:
                raise
            return None

    def _describe(self, index: int, handle: Any) -> NvmlBoard:
        uuid = _text(self._nvml.nvmlDeviceGetUUID(handle))
        return NvmlBoard(
            GPU_ID_PREFIX + uuid, index, _text(self._nvml.nvmlDeviceGetName(handle)), handle
        )

    def _is_void(self, device: str, code: int, *, with_arguments: bool) -> bool:
        """Whether ``code`` says that the handle is no good any longer; then it is dropped."""
        if code in SESSION_ERRORS:
            self.close()
            return True
        # A getter has nothing to object to but its handle.
        stale = code == INVALID_ARGUMENT and not with_arguments
        if stale or code in BOARD_ERRORS:
            self._boards.pop(device, None)
            return True
        return False

    def _found(self, device: str) -> NvmlBoard:
        """A board that was not seen before: no other board is asked, for a call on it may hang."""
        try:
            return self._by_uuid(device)
        except self._nvml.NVMLError as error:
            code = error_code(error)
            if code in SESSION_ERRORS:
                self.close()
            if code != NOT_FOUND:
                raise self._refusal("find", device, code) from None
        raise actuator_error(
            f"find {device}", "this host has no such GPU", "See nvidia-smi -L.", Trouble.ABSENT
        )

    def _found_again(self, device: str) -> NvmlBoard:
        """A new handle for a board that was there once."""
        try:
            board = self._by_uuid(device)
        except self._nvml.NVMLError as error:
            code = error_code(error)
        else:
            self._afresh.pop(device, None)
            return board
        now = self._clock.monotonic()
        if code in SESSION_ERRORS or now >= self._afresh.setdefault(
            device, now + REINITIALIZE_AFTER
        ):
            self._afresh[device] = now + REINITIALIZE_AFTER
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
    """Old bindings answer in bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
