"""AMD SMI calls with classified errors, and the import of the package that makes them.

The package binds every symbol of AMD's library when it is imported: without the library, or with
one of another release, the import fails. The library below 26.2 is not safe across threads: one
thread of a process makes all calls.

AMD SMI's status codes become those codes of NVML with the same meaning, by which ``GpuCalls``
decides: an error costs one field, one GPU or the whole session.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import stat
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from wattspan.model import Failure
from wattspan.ports import Clock
from wattspan.sources import gpu_calls
from wattspan.util.text import printable

SOURCE = "amdsmi"
LABEL = "AMD SMI"
LIBRARY = "libamd_smi.so"
PACKAGE = "amdsmi"
AMD = "0x1002"
"""AMD's number as a vendor of PCI devices, as the package and the kernel write it."""

INVALID = 1
"""AMDSMI_STATUS_INVAL: also the answer to a handle of an earlier initialisation."""

NVML_CODES = {
    INVALID: gpu_calls.INVALID_ARGUMENT,
    2: gpu_calls.NOT_SUPPORTED,
    3: gpu_calls.NOT_SUPPORTED,  # not yet implemented
    5: gpu_calls.FUNCTION_NOT_FOUND,
    6: gpu_calls.GPU_NOT_FOUND,  # an error of libdrm: the device file is gone
    10: gpu_calls.NO_PERMISSION,
    17: gpu_calls.INVALID_ARGUMENT,  # out of bounds
    18: gpu_calls.UNINITIALIZED,
    31: gpu_calls.GPU_NOT_FOUND,
    32: gpu_calls.UNINITIALIZED,
    34: gpu_calls.DRIVER_NOT_LOADED,
    40: gpu_calls.NOT_SUPPORTED,  # no data
    52: gpu_calls.NOT_SUPPORTED,  # no file of the driver for it
}
"""Codes of NVML, by AMDSMI_STATUS_*. Any other is an unknown error."""

_TRANSIENT = frozenset({8, 9, 11, 30})  # timeout, retry, interrupt, busy
_TIMED_OUT = 10  # NVML's code, which means no more than that the call failed this time

_CAUSES = {
    _TIMED_OUT: "the driver is busy or timed out",
    gpu_calls.UNINITIALIZED: "AMD SMI is not initialised",
    gpu_calls.INVALID_ARGUMENT: "AMD SMI rejects the call",
    gpu_calls.NOT_SUPPORTED: "this GPU or its driver does not support it",
    gpu_calls.NO_PERMISSION: "permission denied",
    gpu_calls.DRIVER_NOT_LOADED: "the amdgpu driver is not loaded",
    gpu_calls.FUNCTION_NOT_FOUND: "the installed package or library is too old for the call",
    gpu_calls.GPU_NOT_FOUND: "the driver no longer knows the GPU",
    gpu_calls.UNKNOWN: "the library reports an unknown error",
}
_REMEDIES = {
    gpu_calls.NO_PERMISSION: (
        "Give the agent access to /dev/kfd and /dev/dri/renderD*: the groups render and video, in a"
        " container with --device, in a systemd unit with DeviceAllow=."
    ),
    gpu_calls.DRIVER_NOT_LOADED: "Load it (modprobe amdgpu); the agent keeps trying.",
    gpu_calls.GPU_NOT_FOUND: "Look at lspci and dmesg; the agent keeps trying.",
}


def cause_of(code: int) -> str:
    """The meaning of ``code``, as the cause in a sentence."""
    return _CAUSES.get(code, f"AMD SMI answers with error {code}")


def call_failure(thing: str, code: int, domain_id: str | None = None) -> Failure:
    """The failure of ``thing`` by ``code``, which is one of NVML's."""
    trouble, remedy = gpu_calls.call_trouble(code), _REMEDIES.get(code, "")
    return Failure(SOURCE, thing, trouble, cause_of(code), remedy, domain_id)


class BindingError(Exception):
    """The package cannot be used: ``cause`` is a clause, ``remedy`` a sentence."""

    def __init__(self, cause: str, remedy: str) -> None:
        super().__init__(f"{cause}. {remedy}")
        self.cause, self.remedy = cause, remedy


def load_binding(roots: Sequence[Path] | None = None) -> Any:
    """The ``amdsmi`` module. BindingError if it, its library or one of its symbols is missing.

    The installed package comes first. If it does not load, the module of a ROCm SDK below one of
    ``roots`` is used: ROCm 10 ships it without installing it, beside the library that it fits.
    """
    try:
        return _imported()
    except BindingError as error:
        first = error
    failed = []
    for path in sdk_modules(sdk_roots() if roots is None else roots):
        sys.path.insert(0, str(path))
        try:
            return _imported()
        except BindingError as error:
            failed.append(f"{printable(str(path))} ({error.cause})")
        sys.path.remove(str(path))
    if failed:
        cause = f"{first.cause}, and the module of the SDK does not load either: "
        raise BindingError(cause + ", ".join(failed), first.remedy)
    raise BindingError(first.cause, f"{first.remedy} {_SDK_REMEDY}")


def sdk_roots() -> tuple[Path, ...]:
    """The places of ROCm: those of the environment, of ``/opt`` and of Python's own packages."""
    named = [os.environ[name] for name in ("ROCM_HOME", "ROCM_PATH") if os.environ.get(name)]
    installed = sorted(Path("/opt").glob("rocm*"), reverse=True)
    nested = [core for path in installed for core in sorted(path.glob("core*"), reverse=True)]
    packaged = [Path(path) / "_rocm_sdk_core" for path in sys.path if path]
    return tuple(dict.fromkeys((*map(Path, named), *installed, *nested, *packaged)))


def sdk_modules(roots: Iterable[Path]) -> list[Path]:
    """The directories of ROCm SDKs with the module, which only root or this user may write.

    Every file of them is checked, and the SDK's own directories above, which could be replaced.
    """
    found: dict[Path, None] = {}
    for root in roots:
        with contextlib.suppress(OSError, RuntimeError):
            path = (root / "share/amd_smi").resolve(strict=True)
            (path / PACKAGE / "__init__.py").stat()
            above = root, root / "share", path.parent, path.parent.parent
            if all(map(_is_trusted, (*above, path, *path.rglob("*")))):
                found[path] = None
    return list(found)


def _is_trusted(path: Path) -> bool:
    """True if only root and this user may write a file or directory, and what a link leads to."""
    states = [path.lstat()]
    with contextlib.suppress(FileNotFoundError):  # a link that leads nowhere
        states.append(path.stat())
    return all(
        s.st_uid in {0, os.geteuid()} and (stat.S_ISLNK(s.st_mode) or not s.st_mode & 0o022)
        for s in states
    )


def _imported() -> Any:
    """The module, imported anew. BindingError."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints that it finds no library
            return importlib.import_module(PACKAGE)
    except BaseException as error:
        for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
            del sys.modules[name]
        importlib.invalidate_caches()
        if not isinstance(error, Exception):
            raise
        raise _explained(error) from None


def _explained(error: Exception) -> BindingError:
    if isinstance(error, ModuleNotFoundError) and error.name == PACKAGE:
        return BindingError(
            "the Python package amdsmi is not installed",
            "Install wattspan[amd], with the version of amdsmi that belongs to this host's ROCm.",
        )
    if isinstance(error, AttributeError):
        _, missing, symbol = printable(str(error)).rpartition("undefined symbol: ")
        if missing:
            return BindingError(
                f"{LIBRARY} has no {symbol}: it is older than the Python package amdsmi, or so new"
                " that it no longer has it",
                "Install the version of amdsmi that belongs to this host's ROCm, or a newer ROCm.",
            )
    elif isinstance(error, KeyError | OSError):
        return BindingError(
            f"{LIBRARY} was not found",
            "Install ROCm's package amd-smi-lib, or set ROCM_PATH to the directory above its lib.",
        )
    return _unusable(error)


_SDK_REMEDY = (
    "With ROCm 10, set ROCM_PATH to the root of its SDK, or add <root>/share/amd_smi to PYTHONPATH."
)


def _unusable(error: Exception) -> BindingError:
    cause = f"the Python package amdsmi does not load, {type(error).__name__}: {error}"
    return BindingError(printable(cause), "Reinstall it.")


class AmdSmiError(Exception):
    """A failed call. ``value`` is the code of NVML with its meaning, ``status`` AMD SMI's own."""

    def __init__(self, value: int, status: int = 0) -> None:
        super().__init__(cause_of(value))
        self.value, self.status = value, status


class AmdSmiLibrary:
    """AMD SMI's functions. Errors are AmdSmiErrors.

    ``current`` is the name of the call under way and the monotonic time of its start; None without
    a call. Other threads read it, so one attribute holds one tuple.
    """

    error: type[Exception] = AmdSmiError

    def __init__(self, amdsmi: Any, clock: Clock) -> None:
        self.module = amdsmi
        self._clock = clock
        self.current: tuple[str, int] | None = None

    def call(self, name: str, *arguments: Any) -> Any:
        function = getattr(self.module, name, None)
        if function is None:
            raise AmdSmiError(gpu_calls.FUNCTION_NOT_FOUND)
        self.current = (name, self._clock.monotonic())
        try:
            return function(*arguments)
        except self.module.AmdSmiException as error:
            raise _classified(error) from None
        finally:
            self.current = None

    def constant(self, enumeration: str, name: str) -> Any:
        """A member of one of the package's enumerations."""
        return getattr(getattr(self.module, enumeration), name)


def _classified(error: Exception) -> AmdSmiError:
    status = getattr(error, "err_code", None)
    if not isinstance(status, int):
        return AmdSmiError(gpu_calls.UNKNOWN)
    if status in _TRANSIENT:
        return AmdSmiError(_TIMED_OUT, status)
    return AmdSmiError(NVML_CODES.get(status, gpu_calls.UNKNOWN), status)


def number(value: Any, most: int = 0xFFFF_FFFE) -> int | None:
    """A figure of the package; None for "N/A", for a blank value and for one above ``most``."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        return None
    return int(value)
