"""Common part of the emulated libraries of GPU drivers: the file, its boards, and their faults.

A fault blocks or refuses; its code is one of the library's own.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from pathlib import Path

from wattspan.clock import SystemClock
from wattspan.emulation.gpu_file import (
    FAULT_DEAF,
    FAULT_HANG,
    FAULT_NO_PERMISSION,
    EmulationError,
    GpuFile,
    GpuSnapshot,
    Identity,
    Live,
    TornStateError,
)
from wattspan.ports import Clock

_POLL = 0.005  # seconds between two checks of a fault that blocks calls


class EmulatedDriver(ABC):
    """A driver's library over the file at ``path``, which is opened when it is initialised."""

    uninitialised: int
    not_loaded: int
    not_supported: int
    denied: int
    torn: int  # the owner of the file stopped in the middle of writing

    def __init__(self, path: Path, clock: Clock | None = None) -> None:
        self._path, self.clock = path, clock or SystemClock()
        self._pause = threading.Event()
        self._file: GpuFile | None = None

    @abstractmethod
    def failure(self, code: int) -> Exception:
        """The library's exception for one of its codes."""

    def _load(self) -> GpuFile:
        """The file of a driver that answers."""
        try:
            file = GpuFile(self._path)
        except EmulationError:
            raise self.failure(self.not_loaded) from None
        self._await_driver(file)
        return file

    def _opened(self) -> GpuFile:
        file = self._file
        if file is None:
            raise self.failure(self.uninitialised)
        self._await_driver(file)
        return file

    def _await_driver(self, file: GpuFile) -> None:
        """Return when the driver answers; its error if it refuses."""
        while file.header.hang:
            self._pause.wait(_POLL)
        if file.header.error:
            raise self.failure(int(file.header.error))

    def _gpu(self, file: GpuFile, index: int, part: int = 0) -> CalledGpu:
        """The GPU, or a ``part`` of it, that a call is about; its error if it is lost."""
        record = file.record(index)
        while record.faults & FAULT_HANG:
            self._pause.wait(_POLL)
        if record.error:
            raise self.failure(int(record.error))
        return CalledGpu(self, file, index, part)


class CalledGpu:
    """The GPU, its MIG instance or its partition (``part``), that a call is about."""

    def __init__(self, driver: EmulatedDriver, file: GpuFile, index: int, part: int) -> None:
        self._driver, self.clock = driver, driver.clock
        self.file, self.index, self.part = file, index, part
        self.record = file.record(index)
        self.identity: Identity = self.record.identity

    def snapshot(self) -> GpuSnapshot:
        try:
            return self.file.read(self.index, self.clock.monotonic)
        except TornStateError:
            raise self._driver.failure(self._driver.torn) from None

    @property
    def live(self) -> Live:
        return self.snapshot().live

    def refuse_if(self, fault: int, code: int | None = None) -> None:
        """Refuse the call with ``code``, "not supported" by default, if there is the fault."""
        if self.record.faults & fault:
            raise self._driver.failure(self._driver.not_supported if code is None else code)

    @property
    def requested_limit(self) -> int:
        return int(self.record.limit_request) & 0xFFFF_FFFF

    def request_limit(self, milliwatts: int, rejected: int) -> None:
        """Request a power limit; ``rejected`` is the code for one out of range."""
        self.refuse_if(FAULT_NO_PERMISSION, self._driver.denied)
        if not self.identity.limit_min <= milliwatts <= self.identity.limit_max:
            raise self._driver.failure(rejected)
        if not self.record.faults & FAULT_DEAF:
            self.record.request_limit(milliwatts)

    def request_clock(self, lowest: int, highest: int) -> None:
        """Request bounds of the clock in megahertz; 0 for none."""
        self.refuse_if(FAULT_NO_PERMISSION, self._driver.denied)
        self.record.clock_request = lowest << 24 | highest
