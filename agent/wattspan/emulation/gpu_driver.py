"""Common part of the emulated libraries of GPU drivers: the file, and faults that block or refuse.

A fault's code is one of the library's own.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from pathlib import Path

from wattspan.clock import SystemClock
from wattspan.emulation.gpu_file import FAULT_HANG, EmulationError, GpuFile, GpuRecord
from wattspan.ports import Clock

_POLL = 0.005  # seconds between two checks of a fault that blocks calls


class EmulatedDriver(ABC):
    """A driver's library over the file at ``path``, which is opened when it is initialised."""

    uninitialised: int
    not_loaded: int

    def __init__(self, path: Path, clock: Clock | None = None) -> None:
        self._path, self._clock = path, clock or SystemClock()
        self._pause = threading.Event()
        self._file: GpuFile | None = None

    @abstractmethod
    def _failure(self, code: int) -> Exception:
        """The library's exception for one of its codes."""

    def _load(self) -> GpuFile:
        """The file of a driver that answers."""
        try:
            file = GpuFile(self._path)
        except EmulationError:
            raise self._failure(self.not_loaded) from None
        self._await_driver(file)
        return file

    def _opened(self) -> GpuFile:
        file = self._file
        if file is None:
            raise self._failure(self.uninitialised)
        self._await_driver(file)
        return file

    def _await_driver(self, file: GpuFile) -> None:
        """Return when the driver answers; its error if it refuses."""
        while file.header.hang:
            self._pause.wait(_POLL)
        if file.header.error:
            raise self._failure(int(file.header.error))

    def _await_gpu(self, record: GpuRecord) -> None:
        """Return when the GPU answers; its error if it is lost."""
        while record.faults & FAULT_HANG:
            self._pause.wait(_POLL)
        if record.error:
            raise self._failure(int(record.error))
