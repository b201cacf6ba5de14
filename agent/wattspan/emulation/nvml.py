"""The ``pynvml`` module over emulated GPUs: its own functions, called on another library.

Every function of the installed pynvml is taken over with its code unchanged and with globals in
which the library is the emulated one; so behaviour, structures and exceptions are pynvml's,
quirks included, and its exceptions are the very classes of the real module. The real module is
neither changed nor initialised.
"""

from __future__ import annotations

import threading
from pathlib import Path
from types import CellType, FunctionType
from typing import Any

from wattspan.clock import SystemClock
from wattspan.emulation.nvml_library import EmulatedLibrary
from wattspan.ports import Clock


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
                names[name] = _moved(value, names)
        self._names = names

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_names"][name]
        except KeyError:
            raise AttributeError(f"pynvml has no {name!r}") from None

    def __dir__(self) -> list[str]:
        return sorted(self._names)


def _moved(function: FunctionType, names: dict[str, Any]) -> FunctionType:
    """The same code with other globals; what it closes over is moved too."""
    cells = tuple(
        CellType(_moved(cell.cell_contents, names))
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
