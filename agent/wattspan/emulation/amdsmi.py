"""AMD SMI of an emulated host: the functions of ``amdsmi`` that the agent and the capper call.

A call reads the file of emulated GPUs (``gpu_file``) and answers as the package does: with the
same dictionaries and units, or with an exception of the same name and code. The package itself
cannot be imported on a host without AMD's library, so that its enumerations and exceptions are
repeated here, as far as they are used.
"""

from __future__ import annotations

from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from wattspan.emulation.boards import AMD_VENDOR
from wattspan.emulation.gpu_file import (
    ENERGY_UNIT,
    FAULT_NO_COUNTER,
    FAULT_NO_PERMISSION,
    FAULT_NO_POWER,
    FAULT_NO_PROCESSES,
    KINDS,
    CalledGpu,
    DriverCalls,
    EmulatedDriver,
    ProcessEntry,
    energy_accumulator,
)
from wattspan.ports import Clock

SUCCESS = 0
INVALID = 1
NOT_SUPPORTED = 2
NO_PERMISSION = 10
INTERNAL_EXCEPTION = 16
OUT_OF_BOUNDS = 17
NOT_FOUND = 31
NOT_INITIALISED = 32
DRIVER_NOT_LOADED = 34

PARTITION_MODES = {0: "SPX", 1: "SPX", 2: "DPX", 4: "QPX", 8: "CPX"}
"""AMD's name of a division, by the number of partitions."""

_MICROWATTS = 1000  # in a milliwatt
_LARGEST_CLOCK = 0xFF_FFFF


class AmdSmiException(Exception):  # noqa: N818 - the package's name
    """The base of the package's errors."""


class AmdSmiLibraryException(AmdSmiException):
    """An error that the library returned, with its code."""

    def __init__(self, err_code: int) -> None:
        super().__init__(err_code)
        self.err_code = err_code

    def get_error_code(self) -> int:
        return self.err_code


class AmdSmiInitFlags(IntEnum):
    INIT_AMD_GPUS = 2


class AmdSmiClkType(IntEnum):
    GFX = 0
    MEM = 4


class AmdSmiTemperatureType(IntEnum):
    HOTSPOT = 1


class AmdSmiTemperatureMetric(IntEnum):
    CURRENT = 0


class AmdSmiMemoryType(IntEnum):
    VRAM = 0


class AmdSmiDevPerfLevel(IntEnum):
    AUTO = 0
    DETERMINISM = 8


class ProcessorHandle(NamedTuple):
    """One partition of a GPU. ``session`` is that of the initialisation that found it."""

    gpu: int
    partition: int
    session: int


class EmulatedAmdSmi(EmulatedDriver):
    """Stands in for the ``amdsmi`` module: ``smi.amdsmi_init()``, ``smi.AmdSmiClkType``, ..."""

    uninitialised = NOT_INITIALISED
    not_loaded = DRIVER_NOT_LOADED
    not_supported = NOT_SUPPORTED
    denied = NO_PERMISSION
    torn = INTERNAL_EXCEPTION

    def __init__(self, path: Path, clock: Clock | None = None) -> None:
        super().__init__(path, clock, _PART_CALLS, _GPU_CALLS)
        self._session = 0
        self._processors: tuple[ProcessorHandle, ...] = ()

    def __getattr__(self, name: str) -> Any:
        """A function of AMD SMI that is emulated, an enumeration or an exception."""
        if name.startswith("AmdSmi") and name in globals():
            return globals()[name]
        if name in _PART_CALLS or name in _GPU_CALLS:
            return partial(self._ask, name)
        raise AttributeError(f"The emulated AMD SMI has no {name!r}.")

    def amdsmi_init(self, flag: int = AmdSmiInitFlags.INIT_AMD_GPUS) -> None:
        """Find the GPUs that answer now: later ones, and other partitions, need another call."""
        del flag
        file = self._load()
        self._session += 1
        self._processors = tuple(
            ProcessorHandle(gpu, partition, self._session)
            for gpu in range(file.header.gpus)
            if not file.record(gpu).error
            for partition in range(max(1, file.record(gpu).partitions))
        )
        self._file = file

    def amdsmi_shut_down(self) -> None:
        self._opened()
        self._file, self._processors = None, ()

    def amdsmi_get_processor_handles(self) -> list[ProcessorHandle]:
        self._opened()
        return list(self._processors)

    def _ask(self, name: str, handle: ProcessorHandle, *arguments: Any) -> Any:
        file = self._opened()
        if handle.session != self._session:
            raise AmdSmiLibraryException(INVALID)
        gpu = self._gpu(file, handle.gpu, handle.partition)
        if handle.partition >= max(1, gpu.record.partitions):
            raise AmdSmiLibraryException(NOT_FOUND)
        return self._answer(name, gpu, *arguments)

    def failure(self, code: int) -> Exception:
        return AmdSmiLibraryException(code)


# ------------------------------------------------------------------------------------ identity


def _bdf(gpu: CalledGpu) -> str:
    identity = gpu.identity
    place = f"{identity.domain:04x}:{identity.bus:02x}:{identity.device:02x}"
    return f"{place}.{gpu.part}"


def _asic(gpu: CalledGpu) -> dict[str, Any]:
    identity = gpu.identity
    return {
        "market_name": identity.name.decode(),
        "vendor_id": hex(AMD_VENDOR),
        "vendor_name": "Advanced Micro Devices Inc. [AMD/ATI]",
        "device_id": hex(identity.pci_device >> 16),
        "num_compute_units": identity.multiprocessors // max(1, gpu.record.partitions),
    }


def _driver(gpu: CalledGpu) -> dict[str, str]:
    version = gpu.file.header.driver_version.decode()
    return {"driver_name": "amdgpu", "driver_version": version, "driver_date": "N/A"}


# ------------------------------------------------------------------------------------ readings


def _energy(gpu: CalledGpu) -> dict[str, Any]:
    gpu.refuse_if(FAULT_NO_COUNTER)
    moment = gpu.snapshot
    return {
        "energy_accumulator": energy_accumulator(gpu.record, moment),
        "counter_resolution": ENERGY_UNIT / 1_000_000,
        "timestamp": moment.now,
    }


def _power(gpu: CalledGpu) -> dict[str, Any]:
    """Watts. An MI300 has a current power and no average."""
    gpu.refuse_if(FAULT_NO_POWER)
    watts = gpu.live.power_instant // 1000
    return {
        "socket_power": watts,
        "current_socket_power": watts,
        "average_socket_power": "N/A",
        "power_limit": gpu.requested_limit // 1000,
    }


def _activity(gpu: CalledGpu) -> dict[str, Any]:
    live = gpu.live
    return {
        "gfx_activity": live.utilisation,
        "umc_activity": live.memory_utilisation,
        "mm_activity": "N/A",
    }


def _clock_info(gpu: CalledGpu, kind: int) -> dict[str, Any]:
    identity, live = gpu.identity, gpu.live
    if kind == AmdSmiClkType.MEM:
        memory = identity.memory_clock
        return {"clk": memory, "min_clk": memory, "max_clk": memory, "clk_locked": "N/A"}
    if kind != AmdSmiClkType.GFX:
        raise AmdSmiLibraryException(INVALID)
    return {
        "clk": live.clock,
        "min_clk": identity.clock_min,
        "max_clk": identity.clock_max,
        "clk_locked": bool(gpu.record.clock_request),
    }


def _temperature(gpu: CalledGpu, sensor: int, metric: int) -> int:
    if sensor != AmdSmiTemperatureType.HOTSPOT or metric != AmdSmiTemperatureMetric.CURRENT:
        raise AmdSmiLibraryException(NOT_SUPPORTED)
    return int(gpu.live.temperature)


def _video_memory(kind: int, value: int) -> int:
    if kind != AmdSmiMemoryType.VRAM:
        raise AmdSmiLibraryException(NOT_SUPPORTED)
    return int(value)


def _processes(gpu: CalledGpu) -> list[ProcessEntry]:
    """The processes of this partition; the emulated host deals them out in turn."""
    live = gpu.live
    return list(live.process[gpu.part : live.processes : max(1, gpu.record.partitions)])


def _process_list(gpu: CalledGpu) -> list[dict[str, Any]]:
    """The processes, as the driver tells of them.

    The time on the graphics engine is cumulative, and counted for graphics processes only; the
    occupied compute units are those of the moment, and of compute processes only.
    """
    gpu.refuse_if(FAULT_NO_PROCESSES)
    units = gpu.identity.multiprocessors
    return [
        {
            "name": "N/A",
            "pid": entry.pid,
            "mem": entry.memory,
            "engine_usage": {"gfx": entry.busy if _is_graphics(entry) else 0, "enc": 0},
            "memory_usage": {"gtt_mem": 0, "cpu_mem": 0, "vram_mem": entry.memory},
            "cu_occupancy": "N/A"
            if _is_graphics(entry)
            else (entry.share * units + 500_000) // 1_000_000,
        }
        for entry in _processes(gpu)
    ]


def _is_graphics(entry: ProcessEntry) -> bool:
    return KINDS[entry.kind] == "graphics"


# ------------------------------------------------------------------------------------ controls


def _power_cap(gpu: CalledGpu) -> dict[str, int]:
    """Microwatts."""
    identity = gpu.identity
    return {
        "power_cap": gpu.requested_limit * _MICROWATTS,
        "default_power_cap": identity.limit_default * _MICROWATTS,
        "dpm_cap": 0,
        "min_power_cap": identity.limit_min * _MICROWATTS,
        "max_power_cap": identity.limit_max * _MICROWATTS,
    }


def _set_power_cap(gpu: CalledGpu, sensor: int, microwatts: int) -> None:
    """The driver keeps whole watts."""
    if sensor:
        raise AmdSmiLibraryException(INVALID)
    gpu.request_limit(microwatts // (1000 * _MICROWATTS) * 1000, OUT_OF_BOUNDS)


def _perf_level(gpu: CalledGpu) -> str:
    locked = bool(gpu.record.clock_request)
    return f"AMDSMI_DEV_PERF_LEVEL_{'DETERMINISM' if locked else 'AUTO'}"


def _set_perf_level(gpu: CalledGpu, level: int) -> None:
    if level != AmdSmiDevPerfLevel.AUTO:
        raise AmdSmiLibraryException(NOT_SUPPORTED)
    gpu.request_clock(0, 0)


def _set_determinism(gpu: CalledGpu, megahertz: int) -> None:
    gpu.refuse_if(FAULT_NO_PERMISSION, NO_PERMISSION)
    identity = gpu.identity
    if not identity.clock_min <= megahertz <= min(identity.clock_max, _LARGEST_CLOCK):
        raise AmdSmiLibraryException(INVALID)
    gpu.request_clock(identity.clock_min, megahertz)


_PART_CALLS: DriverCalls = {
    "amdsmi_get_gpu_device_bdf": _bdf,
    "amdsmi_get_gpu_device_uuid": lambda gpu: gpu.identity.uuid.decode(),
    "amdsmi_get_gpu_asic_info": _asic,
    "amdsmi_get_gpu_driver_info": _driver,
    "amdsmi_get_gpu_compute_partition": lambda gpu: PARTITION_MODES[gpu.record.partitions],
    "amdsmi_get_gpu_activity": _activity,
    "amdsmi_get_clock_info": _clock_info,
    "amdsmi_get_temp_metric": _temperature,
    "amdsmi_get_gpu_memory_total": lambda gpu, kind: _video_memory(kind, gpu.identity.memory_total),
    "amdsmi_get_gpu_memory_usage": lambda gpu, kind: _video_memory(kind, gpu.live.memory_used),
    "amdsmi_get_gpu_process_list": _process_list,
    "amdsmi_get_gpu_perf_level": _perf_level,
    "amdsmi_set_gpu_perf_level": _set_perf_level,
    "amdsmi_set_gpu_perf_determinism_mode": _set_determinism,
}
_GPU_CALLS: DriverCalls = {
    "amdsmi_get_energy_count": _energy,
    "amdsmi_get_power_info": _power,
    "amdsmi_get_power_cap_info": _power_cap,
    "amdsmi_set_power_cap": _set_power_cap,
}
"""The calls that only the first partition answers, for the whole board."""
