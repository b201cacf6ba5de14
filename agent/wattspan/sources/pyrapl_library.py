"""pyRAPL, held at arm's length.

What the library does and what is done about it here:

- importing it logs through the root logger, which installs a handler as a side effect, and its
  patterns are errors under ``-W error``: imported late, handlers kept, warnings silenced;
- its paths are fixed to ``/sys``: for another root its ``DeviceAPI`` is given other files;
- a refusal or a failed read may be an OSError, ValueError, IndexError or an exception of its
  own: all become :class:`PyRaplError`;
- descriptors are shared between threads and after a fork, offsets included: one lock, and
  opened anew in a child;
- differences it computes go negative when a counter wraps: only absolute values are taken.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

_REAL_SYSFS = Path("/sys")


class PyRaplError(Exception):
    """pyRAPL cannot start or cannot read; the message is the cause, as a clause."""


class PyRaplSensor:
    """The absolute counters that pyRAPL's ``Sensor`` reports, in microjoules.

    ``packages`` and ``memories`` are the zones' directories by socket, used where ``sysfs`` is
    not the real one; there the library's own search for zones cannot work.
    """

    def __init__(self, sysfs: Path, packages: dict[int, Path], memories: dict[int, Path]) -> None:
        """PyRaplError if pyRAPL is not there or refuses this host."""
        self._library = _import()
        self._make: Callable[[], Any] = (
            self._library.Sensor
            if sysfs == _REAL_SYSFS
            else lambda: _rooted_sensor(self._library, packages, memories)
        )
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._sensor = self._opened()

    def read(self) -> list[int | None]:
        """Package and memory of socket 0, of socket 1, ...; None for what is not there.

        PyRaplError if any of them cannot be read: pyRAPL reads all or nothing.
        """
        with self._lock:
            if self._owner != os.getpid():  # a fork shares the offsets of every file
                self._close()
                self._sensor, self._owner = self._opened(), os.getpid()
            with self._translated():
                return [None if value < 0 else round(value) for value in self._sensor.energy()]

    def close(self) -> None:
        with self._lock:
            self._close()

    def _opened(self) -> Any:
        with warnings.catch_warnings(), self._translated():
            warnings.simplefilter("ignore")  # it leaves files for the collector to close
            return self._make()

    def _close(self) -> None:
        for api in self._sensor._device_api.values():  # noqa: SLF001 - it has no close
            for file in api._sys_files:  # noqa: SLF001
                file.close()

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (self._library.PyRAPLException, OSError, ValueError, IndexError) as error:
            traceback.clear_frames(error.__traceback__)  # or they keep its open files alive
            raise PyRaplError(_cause(self._library, error)) from None


def _cause(library: Any, error: Exception) -> str:
    name = type(error).__name__
    if isinstance(error, library.PyRAPLException):
        return f"pyRAPL refuses this host ({name}); it knows one package a socket and decimal ids"
    if isinstance(error, PermissionError):
        return f"permission denied on {error.filename or 'a counter'}"
    return f"{name}: {error}"


def _import() -> Any:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    quiet = logging.NullHandler()
    root.addHandler(quiet)  # with a handler in place, none is installed
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # what it says is that its optional outputs are missing
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import pyRAPL
    except ImportError as error:
        raise PyRaplError(f"the pyRAPL library cannot be imported ({error})") from error
    finally:
        logging.disable(before)
        root.handlers[:] = handlers
        root.setLevel(level)
    return pyRAPL


def _rooted_sensor(library: Any, packages: dict[int, Path], memories: dict[int, Path]) -> Any:
    """pyRAPL's own Sensor and DeviceAPI, reading files that were found for them."""

    class RootedAPI(library.DeviceAPI):  # type: ignore[misc]
        def __init__(self, zones: dict[int, Path]) -> None:
            self._socket_ids = sorted(zones)
            self._sys_files = [
                (zones[socket] / "energy_uj").open("r") for socket in self._socket_ids
            ]

    class RootedSensor(library.Sensor):  # type: ignore[misc]
        def __init__(self) -> None:
            if not packages:
                raise library.PyRAPLCantRecordEnergyConsumption(library.Device.PKG)
            self._device_api = {library.Device.PKG: RootedAPI(packages)}
            if memories.keys() == packages.keys():  # as the original: of all sockets or of none
                self._device_api[library.Device.DRAM] = RootedAPI(memories)
            self._available_devices: Sequence[Any] = list(self._device_api)
            self._socket_ids = sorted(packages)

    return RootedSensor()
