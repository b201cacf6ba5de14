"""The emulated ``libnvidia-ml.so.1`` without a compiler: C's functions, called through pynvml.

The ``pynvml`` module over emulated GPUs: its own functions, called on another library.

Every function of the installed pynvml is taken over with its code unchanged and with globals in
which the library is the emulated one; so behaviour, structures and exceptions are pynvml's,
quirks included, and its exceptions are the very classes of the real module. The real module is
neither changed nor initialised.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from types import CellType, FunctionType
from typing import Any

from wattspan.clock import SystemClock
from wattspan.emulation.gpu_file import EmulationError, GpuFile
from wattspan.emulation.nvml_calls import (
    DEVICE_CALLS,
    DRIVER_NOT_LOADED,
    NOT_SUPPORTED,
    SESSION_CALLS,
    SUCCESS,
    UNINITIALIZED,
    DeviceHandle,
    LibrarySession,
    NvmlCallError,
)
from wattspan.ports import Clock

_CALL_MODULES = ("identity", "readings", "events")
MESSAGES = {
    0: "The operation was successful",
    1: "Uninitialized",
    2: "Invalid Argument",
    3: "Not Supported",
    4: "Insufficient Permissions",
    5: "Already Initialized",
    6: "Not Found",
    7: "Insufficient Size",
    8: "Insufficient External Power",
    9: "Driver Not Loaded",
    10: "Timeout",
    12: "NVML Shared Library Not Found",
    13: "Function Not Found",
    15: "GPU is lost",
    16: "GPU requires restart",
    18: "RM has detected an NVML/RM version mismatch.",
    25: "Argument version mismatch",
    28: "GPU not found",
}


@cache
def symbols() -> frozenset[str]:
    """The names of every function the real library exports."""
    listed = files("wattspan.emulation").joinpath("libnvidia_ml", "symbols.txt")
    return frozenset(listed.read_text("utf-8").split())


class EmulatedLibrary:
    """Has an attribute for every NVML function; each takes ctypes arguments and returns a code."""

    def __init__(self, path: Path, clock: Clock) -> None:
        """Nothing is opened before ``nvmlInit``; without the file the driver is not loaded."""
        for chapter in _CALL_MODULES:
            import_module(f"wattspan.emulation.nvml_{chapter}")
        self._path, self._clock = path, clock
        self._lock = threading.Lock()
        self._session: LibrarySession | None = None
        self._users = 0

    def __getattr__(self, name: str) -> _Function:
        if name not in symbols():
            raise AttributeError(name)
        function = _Function(self._bound(name))
        setattr(self, name, function)
        return function

    def _bound(self, name: str) -> Callable[..., Any]:
        if name in {"nvmlInit", "nvmlInit_v2", "nvmlInitWithFlags"}:
            return self._init
        if name == "nvmlShutdown":
            return self._shutdown
        if name == "nvmlErrorString":
            return _error_string
        if name in SESSION_CALLS:
            call = SESSION_CALLS[name]
            return lambda *arguments: self._answer(lambda it: call(it, *arguments))
        if name in DEVICE_CALLS:
            on_device = DEVICE_CALLS[name]
            return lambda handle, *arguments: self._answer(
                lambda it: on_device(_ready(it, handle), *arguments)
            )
        return lambda *_: NOT_SUPPORTED

    def _answer(self, call: Callable[[LibrarySession], None]) -> int:
        session = self._session
        if session is None:
            return UNINITIALIZED
        try:
            session.ready()
            call(session)
        except NvmlCallError as refusal:
            return refusal.code
        return SUCCESS

    def _init(self, *_: Any) -> int:
        with self._lock:
            if self._session is None:
                try:
                    session = LibrarySession(GpuFile(self._path), self._clock)
                    session.ready()
                except EmulationError:
                    return DRIVER_NOT_LOADED
                except NvmlCallError as refusal:
                    return refusal.code
                self._session = session
            self._users += 1
        return SUCCESS

    def _shutdown(self) -> int:
        with self._lock:
            if self._session is None:
                return UNINITIALIZED
            self._users -= 1
            if self._users == 0:
                self._session = None
        return SUCCESS


class _Function:
    """A foreign function, to which pynvml may set ``restype``."""

    restype: Any = None

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)


def _ready(session: LibrarySession, handle: Any) -> DeviceHandle:
    device = DeviceHandle.of(session, handle)
    device.ready()
    return device


def _error_string(code: Any) -> bytes:
    return MESSAGES.get(int(getattr(code, "value", code)), "Unknown Error").encode()


class EmulatedNvml:
    """Stands in for the ``pynvml`` module: ``nvml.nvmlInit()``, ``nvml.NVMLError``, ..."""

    def __init__(self, path: Path, clock: Clock | None = None) -> None:
        """GPUs from the file at ``path``, which need not exist before ``nvmlInit``."""
        import pynvml

        names: dict[str, Any] = dict(vars(pynvml))
        names["nvmlLib"] = EmulatedLibrary(path, clock or SystemClock())
        names["libLoadLock"] = threading.Lock()
        names["_nvmlLib_refcount"] = 0
        names["_nvmlGetFunctionPointer_cache"] = {}
        for name, value in vars(pynvml).items():
            if isinstance(value, FunctionType) and value.__module__ == pynvml.__name__:
                names[name] = _rebound(value, names)
        self._names = names

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_names"][name]
        except KeyError:
            raise AttributeError(f"pynvml has no {name!r}") from None

    def __dir__(self) -> list[str]:
        return sorted(self._names)


def _rebound(function: FunctionType, names: dict[str, Any]) -> FunctionType:
    """The same code with other globals; what it closes over is moved too."""
    cells = tuple(
        CellType(_rebound(cell.cell_contents, names))
        if isinstance(cell.cell_contents, FunctionType)
        else cell
        for cell in function.__closure__ or ()
    )
    moved = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, cells or None
    )
    moved.__kwdefaults__ = function.__kwdefaults__
    moved.__doc__ = function.__doc__
    return moved
