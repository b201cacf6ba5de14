"""The shape of an NVML call: arguments as ctypes passes them, results by reference, a code back.

The emulated library has C's interface, so that pynvml itself can call it unchanged. A call is a
function of a GPU (or of the session) that returns what C would write to its last argument, or
raises ``Refused`` with NVML's error code.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

from wattspan.emulation.gpu_file import GpuFile, GpuSnapshot, TornStateError
from wattspan.emulation.nvml_layout import FAULT_HANG, GpuRecord, Identity, Live
from wattspan.ports import Clock

SUCCESS = 0
UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
INSUFFICIENT_SIZE = 7
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
VERSION_MISMATCH = 25
UNKNOWN = 999

_HANDLE_BASE, _HANDLE_STRIDE = 0x10000, 0x100
_POLL = 0.005  # seconds between two looks at a condition somebody else changes


class NvmlCallError(Exception):
    """The call returns this NVML error code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class LibrarySession:
    """What the library holds between initialisation and shutdown."""

    def __init__(self, file: GpuFile, clock: Clock) -> None:
        self.file, self.clock = file, clock
        self.pause = threading.Event()
        self.event_sets: dict[int, dict[int, int]] = {}  # by handle: Xid serial seen, by GPU

    def ready(self) -> None:
        """Return when the driver answers; refuse if it says no."""
        while self.file.header.hang:
            self.pause.wait(_POLL)
        if self.file.header.error:
            raise NvmlCallError(int(self.file.header.error))

    def gpus(self) -> int:
        return int(self.file.header.gpus)


class DeviceHandle:
    """One GPU, or one MIG instance of it (``instance`` > 0), as a handle names it."""

    def __init__(self, session: LibrarySession, index: int, instance: int = 0) -> None:
        self.session, self.index, self.instance = session, index, instance

    @classmethod
    def of(cls, session: LibrarySession, handle: Any) -> DeviceHandle:
        """The device behind a handle; refuses what is none."""
        address = address_of(handle)
        index, instance = divmod(address - _HANDLE_BASE, _HANDLE_STRIDE)
        if address < _HANDLE_BASE or index >= session.gpus():
            raise NvmlCallError(INVALID_ARGUMENT)
        return cls(session, index, instance)

    @property
    def handle(self) -> int:
        return _HANDLE_BASE + self.index * _HANDLE_STRIDE + self.instance

    @property
    def record(self) -> GpuRecord:
        return self.session.file.record(self.index)

    @property
    def identity(self) -> Identity:
        return self.session.file.identity(self.index)

    def moment(self) -> GpuSnapshot:
        """A consistent copy of the state now."""
        try:
            return self.session.file.read(self.index, self.session.clock.monotonic)
        except TornStateError:
            raise NvmlCallError(UNKNOWN) from None

    @property
    def live(self) -> Live:
        return self.moment().live

    def ready(self) -> None:
        """Return when the GPU answers; refuse if it is lost."""
        while self.record.faults & FAULT_HANG:
            self.session.pause.wait(_POLL)
        if self.record.error:
            raise NvmlCallError(int(self.record.error))

    def refuse_if(self, fault: int, code: int = NOT_SUPPORTED) -> None:
        if self.record.faults & fault:
            raise NvmlCallError(code)

    def whole(self) -> DeviceHandle:
        """This device, which must not be a MIG instance."""
        if self.instance:
            raise NvmlCallError(NOT_SUPPORTED)
        return self


DeviceCall = Callable[..., Any]
SessionCall = Callable[..., Any]

DEVICE_CALLS: dict[str, DeviceCall] = {}
SESSION_CALLS: dict[str, SessionCall] = {}


def device_call(*names: str) -> Callable[[DeviceCall], DeviceCall]:
    """Register a call whose first argument is a device handle."""

    def register(call: DeviceCall) -> DeviceCall:
        DEVICE_CALLS.update(dict.fromkeys(names, call))
        return call

    return register


def device_value(
    *names: str,
) -> Callable[[Callable[[DeviceHandle], int]], Callable[[DeviceHandle], int]]:
    """Register a call that yields one number through its last argument."""

    def register(read: Callable[[DeviceHandle], int]) -> Callable[[DeviceHandle], int]:
        def call(device: DeviceHandle, into: Any) -> None:
            put(into, read(device))

        DEVICE_CALLS.update(dict.fromkeys(names, call))
        return read

    return register


def device_text(
    *names: str,
) -> Callable[[Callable[[DeviceHandle], bytes]], Callable[[DeviceHandle], bytes]]:
    """Register a call that yields text through a buffer and its size."""

    def register(read: Callable[[DeviceHandle], bytes]) -> Callable[[DeviceHandle], bytes]:
        def call(device: DeviceHandle, buffer: Any, size: Any) -> None:
            put_text(buffer, size, read(device))

        DEVICE_CALLS.update(dict.fromkeys(names, call))
        return read

    return register


def session_call(*names: str) -> Callable[[SessionCall], SessionCall]:
    """Register a call that needs no device."""

    def register(call: SessionCall) -> SessionCall:
        SESSION_CALLS.update(dict.fromkeys(names, call))
        return call

    return register


# --------------------------------------------------------------------------------- arguments


def number(argument: Any) -> int:
    """An integer argument, plain or wrapped in a ctypes type."""
    return int(getattr(argument, "value", argument))


def target(reference: Any) -> Any:
    """The object that an argument passed by reference refers to; refuses a null pointer."""
    if reference is None:
        raise NvmlCallError(INVALID_ARGUMENT)
    if hasattr(reference, "_obj"):
        return reference._obj  # noqa: SLF001 - how ctypes exposes what byref refers to
    return reference.contents if hasattr(reference, "contents") else reference


def put(reference: Any, value: int) -> None:
    """Write a number through a reference."""
    target(reference).value = value


def put_text(buffer: Any, size: Any, text: bytes) -> None:
    """Write a terminated string, if it fits."""
    if len(text) >= number(size):
        raise NvmlCallError(INSUFFICIENT_SIZE)
    buffer.value = text


def put_handle(reference: Any, device: DeviceHandle) -> None:
    ctypes.c_void_p.from_buffer(target(reference)).value = device.handle


def address_of(handle: Any) -> int:
    """The address in an opaque pointer; 0 for a null one."""
    if isinstance(handle, ctypes._Pointer):  # noqa: SLF001 - the public base class of pointers
        return ctypes.cast(handle, ctypes.c_void_p).value or 0
    return handle if isinstance(handle, int) else 0


def put_rows(count: Any, rows: Any, items: Sequence[Sequence[int]]) -> None:
    """Fill an array of structures and its count; too small an array learns the right size."""
    room = target(count)
    short = room.value < len(items)
    room.value = len(items)
    if short or (rows is None and items):
        raise NvmlCallError(INSUFFICIENT_SIZE)
    for place, item in enumerate(items):
        row = rows[place]
        for (name, *_), value in zip(row._fields_, item, strict=False):
            setattr(row, name, value)
