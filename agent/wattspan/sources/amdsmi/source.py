"""The ``amdsmi`` source plugin: AMD GPUs through AMD SMI, and the import of its package.

The package binds every symbol of AMD's library when it is imported: without the library, or with
one of another release, the import fails. The library below 26.2 is not safe across threads: one
thread of a process makes all calls.
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

from wattspan.ports import CounterSource, SourceContext, SourceError, SourcePlugin
from wattspan.sources.amdsmi.device import AmdSmiSettings, AmdSmiVendor
from wattspan.sources.gpu.session import SYSFS, open_gpus
from wattspan.util.text import pip_command, printable

LIBRARY = "libamd_smi.so"
PACKAGE = "amdsmi"


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
    failed, refused = list[str](), list[str]()
    for path in sdk_modules(sdk_roots() if roots is None else roots, refused):
        sys.path.insert(0, str(path))
        try:
            return _imported()
        except BindingError as error:
            failed.append(f"{printable(str(path))} ({error.cause})")
        sys.path.remove(str(path))
    if failed:
        cause = f"{first.cause}, and the module of the SDK does not load either: "
        raise BindingError(cause + ", ".join(failed), first.remedy)
    if refused:
        raise BindingError(f"{first.cause}, and {'; '.join(refused)}", _TRUST_REMEDY)
    raise BindingError(first.cause, f"{first.remedy} {_SDK_REMEDY}")


def sdk_roots() -> tuple[Path, ...]:
    """The places of ROCm: those of the environment, of ``/opt`` and of Python's own packages."""
    named = [os.environ[name] for name in ("ROCM_HOME", "ROCM_PATH") if os.environ.get(name)]
    installed = sorted(Path("/opt").glob("rocm*"), reverse=True)
    nested = [core for path in installed for core in sorted(path.glob("core*"), reverse=True)]
    packaged = [Path(path) / "_rocm_sdk_core" for path in sys.path if path]
    return tuple(dict.fromkeys((*map(Path, named), *installed, *nested, *packaged)))


def sdk_modules(roots: Iterable[Path], refused: list[str] | None = None) -> list[Path]:
    """The directories of ROCm SDKs with the module, which only root or this user may write.

    Every file of them is checked, and the SDK's own directories above, which could be replaced.
    Sentences about the others are appended to ``refused``.
    """
    found: dict[Path, None] = {}
    for root in roots:
        with contextlib.suppress(OSError, RuntimeError):
            path = (root / "share/amd_smi").resolve(strict=True)
            (path / PACKAGE / "__init__.py").stat()
            above = root, root / "share", path.parent, path.parent.parent
            every = (*above, path, *path.rglob("*"))
            foreign = next((one for one in every if not _is_trusted(one)), None)
            if foreign is None:
                found[path] = None
            elif refused is not None:
                refused.append(
                    f"{printable(str(path))} is not used, because other users can write"
                    f" {printable(str(foreign))}"
                )
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
            f"Run {pip_command('amdsmi==VERSION')}, with the version of this host's ROCm.",
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


_TRUST_REMEDY = (
    "Let only root own and write the SDK's directories and files: chown -R root, chmod -R go-w."
)
_SDK_REMEDY = (
    "With ROCm 10, set ROCM_PATH to the root of its SDK, or add <root>/share/amd_smi to PYTHONPATH."
)


def _unusable(error: Exception) -> BindingError:
    cause = f"the Python package amdsmi does not load, {type(error).__name__}: {error}"
    return BindingError(printable(cause), "Reinstall it.")


def open_amdsmi(settings: AmdSmiSettings, context: SourceContext) -> CounterSource | None:
    """The AMD GPUs of this host; None without the package or its library, unless enabled is true.

    A driver that is not loaded is no reason for None: it can be loaded at any time.
    """
    if settings.enabled is False:
        return None
    try:
        amdsmi = _amdsmi_of(context)
    except BindingError as error:
        if settings.enabled is True:
            raise SourceError(
                f'Cannot read AMD GPUs: {error} Or set sources.amdsmi.enabled to "auto".'
            ) from None
        return None
    return (
        None
        if amdsmi is None
        else open_gpus(AmdSmiVendor(amdsmi, context.clock), settings, context)
    )


def _amdsmi_of(context: SourceContext) -> Any:
    """The AMD SMI to ask: an emulated host's own, and never the real one in its stead."""
    if context.emulated or context.amdsmi is not None:
        return context.amdsmi
    return load_binding()


def has_driver(context: SourceContext) -> bool:
    """True if the kernel has the driver; a search for the package takes 20 ms."""
    drivers = (context.sysfs or SYSFS) / "bus/pci/drivers"
    return (drivers / AmdSmiVendor.kernel_driver).is_dir()


plugin = SourcePlugin(settings=AmdSmiSettings, open=open_amdsmi, present=has_driver)
