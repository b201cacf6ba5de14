"""What goes wrong with real GPUs, on demand, while clients watch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from wattspan.emulation.gpu_engine import Controls, Throttle
from wattspan.emulation.nvml_layout import (
    FAULT_DEAF,
    FAULT_HANG,
    FAULT_NO_COUNTER,
    FAULT_NO_PERMISSION,
    FAULT_NO_POWER,
    FAULT_NO_PROCESSES,
)
from wattspan.emulation.nvml_state import GpuFile

GPU_IS_LOST = 15
DRIVER_NOT_LOADED = 9


class Faults:
    """Switches a fault on (``True``) or off (``False``); every client sees it at its next call."""

    def __init__(
        self, file: GpuFile, revise: Callable[[int, Callable[[Controls], Controls]], None]
    ) -> None:
        self._file, self._revise = file, revise
        self._resets: dict[int, int] = {}

    # ------------------------------------------------------------------------ the whole host

    def driver_gone(self, on: bool = True) -> None:
        """The driver is not loaded (NVML error 9, at initialisation too)."""
        self.driver_error(DRIVER_NOT_LOADED if on else 0)

    def driver_error(self, code: int) -> None:
        """Every call returns NVML error ``code``; 0 ends it."""
        self._file.header.error = code

    def driver_hang(self, on: bool = True) -> None:
        """Every call blocks until it is switched off, initialisation too."""
        self._file.header.hang = on

    # ------------------------------------------------------------------------------- one GPU

    def lost(self, gpu: int, on: bool = True) -> None:
        """The GPU fell off the bus (NVML error 15)."""
        self.error(gpu, GPU_IS_LOST if on else 0)

    def error(self, gpu: int, code: int) -> None:
        """Every call on the GPU returns NVML error ``code``; 0 ends it."""
        self._file.record(gpu).error = code

    def hang(self, gpu: int, on: bool = True) -> None:
        """Calls on the GPU block until it is switched off."""
        self._flag(gpu, FAULT_HANG, on)

    def no_permission(self, gpu: int, on: bool = True) -> None:
        """Setters are refused (NVML error 4), as they are to anybody but root."""
        self._flag(gpu, FAULT_NO_PERMISSION, on)

    def deaf(self, gpu: int, on: bool = True) -> None:
        """Limits are set with success and stay as they were, as by some setters of real drivers."""
        self._flag(gpu, FAULT_DEAF, on)

    def no_energy_counter(self, gpu: int, on: bool = True) -> None:
        """The energy counter is not supported, as in many virtual machines."""
        self._flag(gpu, FAULT_NO_COUNTER, on)

    def no_power(self, gpu: int, on: bool = True) -> None:
        """Power readings are not supported."""
        self._flag(gpu, FAULT_NO_POWER, on)

    def no_processes(self, gpu: int, on: bool = True) -> None:
        """Process lists and process utilisation are not supported."""
        self._flag(gpu, FAULT_NO_PROCESSES, on)

    def mig(self, gpu: int, on: bool = True) -> None:
        """MIG mode: no utilisation, no process utilisation, an instance for each process."""
        self._file.record(gpu).mig = on
        self._revise(gpu, lambda controls: controls)

    def reset_counter(self, gpu: int, start: int = 0) -> None:
        """The energy counter begins again at ``start`` picojoules, as when a driver reloads."""
        self._resets[gpu] = start
        self._revise(gpu, lambda controls: controls)

    def take_reset(self, gpu: int) -> int | None:
        """A pending reset, once."""
        return self._resets.pop(gpu, None)

    def reload_driver(self, gpu: int) -> None:
        """The driver was unloaded and loaded: limit and clocks are its defaults, energy is 0."""
        record = self._file.record(gpu)
        record.clock_request = record.memory_clock_request = 0
        self._resets[gpu] = 0
        self.foreign_limit(gpu, int(record.identity.limit_default))

    def foreign_limit(self, gpu: int, milliwatts: int) -> None:
        """Another client requests a power limit, as a person with nvidia-smi would."""
        record = self._file.record(gpu)
        serial = (record.limit_request >> 32) + 1
        record.limit_request = (serial & 0xFFFF_FFFF) << 32 | milliwatts
        self._revise(gpu, lambda controls: controls)

    def enforce_at_most(self, gpu: int, milliwatts: int | None) -> None:
        """Something outside (a BMC) enforces a limit below what is requested; None ends it."""
        self._revise(gpu, lambda controls: replace(controls, ceiling=milliwatts))

    def throttle(self, gpu: int, why: Throttle | None, mhz: int | None = None) -> None:
        """The clock is held at ``mhz`` for a thermal or power-brake reason; None ends it."""
        self._revise(gpu, lambda controls: replace(controls, throttle=why, throttle_mhz=mhz))

    def xid(self, gpu: int, code: int) -> None:
        """An Xid event, delivered to whoever registered for it."""
        record = self._file.record(gpu)
        record.xid = code
        record.xid_serial = (record.xid_serial + 1) & 0xFFFF_FFFF

    def _flag(self, gpu: int, flag: int, on: bool) -> None:
        record = self._file.record(gpu)
        record.faults = record.faults | flag if on else record.faults & ~flag
