"""NVML of an emulated host: the functions of ``pynvml`` that the agent and the capper call.

A call reads the file of emulated GPUs (``gpu_file``) and answers as pynvml does: with numbers,
text and pynvml's own structures, or with pynvml's own exceptions. The real module is neither
changed nor initialised.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pynvml

from wattspan.emulation.boards import MIG_SLICES
from wattspan.emulation.gpu_file import (
    FAULT_NO_COUNTER,
    FAULT_NO_GPM,
    FAULT_NO_PERMISSION,
    FAULT_NO_POWER,
    FAULT_NO_PROCESSES,
    KINDS,
    NO_INSTANCE,
    CalledGpu,
    DriverCalls,
    EmulatedDriver,
    GpuFile,
    InstanceEntry,
    Live,
    counter_energy,
)
from wattspan.ports import Clock

_WITH_MIG = {(8, 0), (9, 0), (10, 0)}  # of the Ampere chips only A100 and A30
_VOLTA = 5
_HOPPER = 9
_INSTANCE = 1 << 16  # the handle of a MIG instance is that of its GPU and a multiple of this
_LARGEST_CLOCK = 0xFF_FFFF


class EmulatedNvml(EmulatedDriver):
    """Stands in for the ``pynvml`` module: ``nvml.nvmlInit()``, ``nvml.NVMLError``, ..."""

    uninitialised = pynvml.NVML_ERROR_UNINITIALIZED
    not_loaded = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    not_supported = pynvml.NVML_ERROR_NOT_SUPPORTED
    denied = pynvml.NVML_ERROR_NO_PERMISSION
    torn = pynvml.NVML_ERROR_UNKNOWN

    def __init__(self, path: Path, clock: Clock | None = None) -> None:
        super().__init__(path, clock, _INSTANCE_CALLS, _GPU_CALLS)
        self._lock = threading.Lock()
        self._users = 0
        self._samples: dict[int, _GpmSample] = {}  # of the caller, by address

    def __getattr__(self, name: str) -> Any:
        """An NVML function that is emulated, or a constant or an exception of pynvml."""
        if name.startswith(("NVML", "c_nvml")):
            return getattr(pynvml, name)
        if name in _INSTANCE_CALLS or name in _GPU_CALLS:
            return partial(self._ask_gpu, name)
        if name in _HOST_CALLS:
            return partial(self._ask_host, _HOST_CALLS[name])
        own: dict[str, Callable[..., Any]] = {
            "nvmlInit": self._init,
            "nvmlShutdown": self._shutdown,
            "nvmlGpmSampleAlloc": self._allocate_sample,
            "nvmlGpmSampleFree": self._free_sample,
        }
        if name not in own:
            raise AttributeError(f"The emulated NVML has no {name!r}.")
        return own[name]

    def _init(self) -> None:
        with self._lock:
            if self._file is None:
                self._file = self._load()
            self._users += 1

    def _shutdown(self) -> None:
        with self._lock:
            if self._file is None:
                raise _error(pynvml.NVML_ERROR_UNINITIALIZED)
            self._users -= 1
            if self._users == 0:
                self._file = None

    def _ask_host(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return call(self._opened(), *arguments)

    def _ask_gpu(self, name: str, handle: int, *arguments: Any) -> Any:
        instance, index = divmod(handle, _INSTANCE)
        return self._answer(name, self._gpu(self._opened(), index, instance), *arguments)

    def _allocate_sample(self) -> Any:
        self._opened()
        sample = _GpmSample()
        self._samples[ctypes.addressof(sample)] = sample
        return ctypes.cast(ctypes.pointer(sample), pynvml.c_nvmlGpmSample_t)

    def _free_sample(self, sample: Any) -> None:
        self._samples.pop(ctypes.addressof(sample.contents), None)

    def failure(self, code: int) -> Exception:
        return _error(code)


def _error(code: int) -> Exception:
    """pynvml's exception for a code: of the subclass that pynvml raises."""
    error: Exception = pynvml.NVMLError(code)
    return error


# ------------------------------------------------------------------------------------ identity


def _count(file: GpuFile) -> int:
    return int(file.header.gpus)


def _handle_by_index(file: GpuFile, index: int) -> int:
    if not 0 <= index < _count(file):
        raise _error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    if file.record(index).error:
        raise _error(int(file.record(index).error))
    return index


def _handle_by_uuid(file: GpuFile, uuid: str | bytes) -> int:
    wanted = uuid.encode() if isinstance(uuid, str) else uuid
    for index in range(_count(file)):
        if file.identity(index).uuid == wanted:
            return _handle_by_index(file, index)
    raise _error(pynvml.NVML_ERROR_NOT_FOUND)


def _entry(live: Live, instance: int) -> InstanceEntry:
    """A MIG instance by its id; "not found" if it was destroyed."""
    for entry in live.instance[: live.instances]:
        if entry.id == instance:
            found: InstanceEntry = entry
            return found
    raise _error(pynvml.NVML_ERROR_NOT_FOUND)


def _name(gpu: CalledGpu) -> str:
    name = str(gpu.identity.name.decode())
    if not gpu.part:
        return name
    entry = _entry(gpu.live, gpu.part)
    return f"{name} MIG {entry.slices}g.{entry.memory >> 30}gb"


def _uuid(gpu: CalledGpu) -> str:
    uuid = str(gpu.identity.uuid.decode())
    return f"MIG-{uuid[4:-2]}{gpu.part:02x}" if gpu.part else uuid


def _mig_handle(gpu: CalledGpu, index: int) -> int:
    live = gpu.live
    if index >= live.instances:
        raise _error(pynvml.NVML_ERROR_NOT_FOUND)
    return gpu.index + int(live.instance[index].id) * _INSTANCE


def _instance_id(gpu: CalledGpu) -> int:
    if not gpu.part:
        raise _error(pynvml.NVML_ERROR_NOT_SUPPORTED)
    return gpu.part


def _attributes(gpu: CalledGpu) -> Any:
    entry = _entry(gpu.live, _instance_id(gpu))
    return _structure(
        "c_nvmlDeviceAttributes",
        multiprocessorCount=entry.multiprocessors,
        gpuInstanceSliceCount=entry.slices,
        computeInstanceSliceCount=entry.slices,
        memorySizeMB=entry.memory >> 20,
    )


def _max_instances(gpu: CalledGpu) -> int:
    capable = (gpu.identity.compute_major, gpu.identity.compute_minor) in _WITH_MIG
    return MIG_SLICES if capable else 0


def _mig_mode(gpu: CalledGpu) -> list[int]:
    if not _max_instances(gpu):
        raise _error(pynvml.NVML_ERROR_NOT_SUPPORTED)
    return [int(gpu.record.mig)] * 2  # present and pending mode


# ------------------------------------------------------------------------------------- profiling


class _GpmSample(ctypes.Structure):
    """A sample of a MIG instance: its time, and the active time until then, in nanoseconds."""

    _fields_ = (("at", ctypes.c_uint64), ("active", ctypes.c_uint64))


def _gpm_support(gpu: CalledGpu) -> Any:
    supported = gpu.identity.architecture >= _HOPPER and not gpu.record.faults & FAULT_NO_GPM
    return _structure("c_nvmlGpmSupport_t", isSupportedDevice=int(supported))


def _sample_instance(gpu: CalledGpu, instance: int, sample: Any) -> Any:
    gpu.refuse_if(FAULT_NO_GPM)
    if gpu.identity.architecture < _HOPPER:
        raise _error(pynvml.NVML_ERROR_NOT_SUPPORTED)
    live = gpu.live
    kept = ctypes.cast(sample, ctypes.POINTER(_GpmSample)).contents
    kept.at, kept.active = live.at, _entry(live, instance).active
    return sample


def _gpm_metrics(_file: GpuFile, asked: Any) -> Any:
    """The activity between two samples; each metric has a return code of its own."""
    first, second = (
        ctypes.cast(sample, ctypes.POINTER(_GpmSample)).contents
        for sample in (asked.sample1, asked.sample2)
    )
    duration = int(second.at - first.at)
    if duration <= 0:
        raise _error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    for metric in asked.metrics[: asked.numMetrics]:
        metric.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
        if metric.metricId in {
            pynvml.NVML_GPM_METRIC_SM_UTIL,
            pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL,
        }:
            metric.nvmlReturn = 0
            metric.value = 100.0 * (second.active - first.active) / duration
    return asked


# ----------------------------------------------------------------------------------- processes


def _list_processes(kind: str) -> Callable[[CalledGpu], list[Any]]:
    def listed(gpu: CalledGpu) -> list[Any]:
        gpu.refuse_if(FAULT_NO_PROCESSES)
        live, wanted = gpu.live, KINDS.index(kind)
        return [
            _structure(
                "c_nvmlProcessInfo_v3_t",
                pid=entry.pid,
                usedGpuMemory=entry.memory,
                gpuInstanceId=entry.instance,
                computeInstanceId=NO_INSTANCE if entry.instance == NO_INSTANCE else 0,
            )
            for entry in live.process[: live.processes]
            if entry.kind == wanted and gpu.part in {0, entry.instance}
        ]

    return listed


def _process_utilisation(gpu: CalledGpu, last_seen: int) -> list[Any]:
    """Samples newer than ``last_seen``, of processes that used the GPU."""
    gpu.refuse_if(FAULT_NO_PROCESSES)
    if gpu.record.mig:
        raise _error(pynvml.NVML_ERROR_NOT_SUPPORTED)
    live = gpu.live
    newer = [
        _structure(
            "c_nvmlProcessUtilizationSample_t",
            pid=sample.pid,
            timeStamp=sample.stamp,
            smUtil=sample.sm,
            memUtil=sample.memory,
        )
        for sample in live.sample[: live.samples]
        if sample.stamp > last_seen
    ]
    if not newer:
        raise _error(pynvml.NVML_ERROR_NOT_FOUND)
    return newer


def _structure(kind: str, **values: int | bytes) -> Any:
    return getattr(pynvml, kind)(**values)


# ------------------------------------------------------------------------------------ readings


def _energy(gpu: CalledGpu) -> int:
    """Millijoules since the driver was loaded."""
    gpu.refuse_if(FAULT_NO_COUNTER)
    if not gpu.identity.counter_step:
        raise _error(pynvml.NVML_ERROR_NOT_SUPPORTED)
    return counter_energy(gpu.identity, gpu.snapshot) // 1000


def _average_power(gpu: CalledGpu) -> int:
    gpu.refuse_if(FAULT_NO_POWER)
    if not gpu.identity.has_average:
        raise _error(pynvml.NVML_ERROR_NOT_SUPPORTED)
    return int(gpu.live.power_average)


def _instant_power(gpu: CalledGpu) -> int:
    gpu.refuse_if(FAULT_NO_POWER)
    return int(gpu.live.power_instant)


def _power_usage(gpu: CalledGpu) -> int:
    return _average_power(gpu) if gpu.identity.usage_is_average else _instant_power(gpu)


_UINT, _ULONGLONG = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
_FIELDS: dict[int, tuple[int, Callable[[CalledGpu], int]]] = {
    74: (_ULONGLONG, lambda gpu: gpu.live.capped_ns),
    83: (_ULONGLONG, _energy),
    185: (_UINT, _average_power),
    186: (_UINT, _instant_power),
    187: (_UINT, lambda gpu: gpu.identity.limit_min),
    188: (_UINT, lambda gpu: gpu.identity.limit_max),
    189: (_UINT, lambda gpu: gpu.identity.limit_default),
    190: (_UINT, lambda gpu: gpu.live.enforced),
    191: (_ULONGLONG, _energy),
    192: (_UINT, lambda gpu: gpu.requested_limit),
    269: (_ULONGLONG, lambda gpu: gpu.live.sw_thermal_ns),
    270: (_ULONGLONG, lambda gpu: gpu.live.hw_thermal_ns),
    271: (_ULONGLONG, lambda gpu: gpu.live.power_brake_ns),
}
"""By NVML's field number: the type of the value and its reader."""


def _field_values(gpu: CalledGpu, fields: list[int | tuple[int, int]]) -> list[Any]:
    """Succeeds as a whole; each entry has a return code of its own."""
    return [
        _field_value(gpu, *(field if isinstance(field, tuple) else (field, 0))) for field in fields
    ]


def _field_value(gpu: CalledGpu, field: int, scope: int) -> Any:
    entry = _structure("c_nvmlFieldValue_t", fieldId=field, scopeId=scope)
    entry.timestamp = gpu.clock.now().wall // 1000
    if field not in _FIELDS or scope:  # scope 0 is the GPU; module and memory are not emulated
        entry.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
        return entry
    entry.valueType, read = _FIELDS[field]
    try:
        entry.value.ullVal = int(read(gpu))
    except pynvml.NVMLError as error:
        entry.nvmlReturn = error.value
    return entry


def _clock(gpu: CalledGpu, kind: int, graphics: int) -> int:
    if kind == pynvml.NVML_CLOCK_MEM:
        return int(gpu.identity.memory_clock)
    if kind not in {pynvml.NVML_CLOCK_GRAPHICS, pynvml.NVML_CLOCK_SM}:
        raise _error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    return graphics


def _graphics_clocks(gpu: CalledGpu, memory: int) -> list[int]:
    identity = gpu.identity
    if memory != identity.memory_clock:
        raise _error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    return list(range(identity.clock_min, identity.clock_max + 1, identity.clock_step))[::-1]


def _utilisation(gpu: CalledGpu) -> Any:
    if gpu.record.mig:
        raise _error(pynvml.NVML_ERROR_NOT_SUPPORTED)
    live = gpu.live
    return _structure("c_nvmlUtilization_t", gpu=live.utilisation, memory=live.memory_utilisation)


def _temperature(gpu: CalledGpu, sensor: int) -> int:
    if sensor != pynvml.NVML_TEMPERATURE_GPU:
        raise _error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    return int(gpu.live.temperature)


def _memory_info(gpu: CalledGpu) -> Any:
    total, used = gpu.identity.memory_total, gpu.live.memory_used
    return _structure("c_nvmlMemory_t", total=total, used=used, free=total - used)


# ------------------------------------------------------------------------------------ controls


def _set_limit(gpu: CalledGpu, milliwatts: int) -> None:
    gpu.request_limit(milliwatts, pynvml.NVML_ERROR_INVALID_ARGUMENT)


def _lock_clocks(gpu: CalledGpu, lowest: int, highest: int) -> None:
    _refuse_locking(gpu)
    if not 0 < highest <= _LARGEST_CLOCK or lowest > highest:
        raise _error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    gpu.request_clock(lowest, highest)


def _reset_clocks(gpu: CalledGpu) -> None:
    _refuse_locking(gpu)
    gpu.request_clock(0, 0)


def _refuse_locking(gpu: CalledGpu) -> None:
    if gpu.identity.architecture < _VOLTA:
        raise _error(pynvml.NVML_ERROR_NOT_SUPPORTED)
    gpu.refuse_if(FAULT_NO_PERMISSION, pynvml.NVML_ERROR_NO_PERMISSION)


_HOST_CALLS: DriverCalls = {
    "nvmlSystemGetDriverVersion": lambda file: file.header.driver_version.decode(),
    "nvmlDeviceGetCount": _count,
    "nvmlDeviceGetHandleByIndex": _handle_by_index,
    "nvmlDeviceGetHandleByUUID": _handle_by_uuid,
    "nvmlGpmMetricsGet": _gpm_metrics,
}
_INSTANCE_CALLS: DriverCalls = {
    "nvmlDeviceGetName": _name,
    "nvmlDeviceGetUUID": _uuid,
    "nvmlDeviceGetGpuInstanceId": _instance_id,
    "nvmlDeviceGetComputeInstanceId": lambda gpu: _instance_id(gpu) * 0,
    "nvmlDeviceGetAttributes_v2": _attributes,
    "nvmlDeviceGetComputeRunningProcesses": _list_processes("compute"),
    "nvmlDeviceGetGraphicsRunningProcesses": _list_processes("graphics"),
    "nvmlDeviceGetMPSComputeRunningProcesses": _list_processes("mps"),
}
"""The calls on a GPU or on one of its MIG instances; those below refuse an instance."""
_GPU_CALLS: DriverCalls = {
    "nvmlDeviceGetIndex": lambda gpu: gpu.index,
    "nvmlDeviceGetPciInfo": lambda gpu: _structure("nvmlPciInfo_t", busId=gpu.identity.bus_id),
    "nvmlDeviceGetArchitecture": lambda gpu: gpu.identity.architecture,
    "nvmlDeviceGetPowerManagementDefaultLimit": lambda gpu: gpu.identity.limit_default,
    "nvmlDeviceGetPowerManagementLimitConstraints": lambda gpu: [
        gpu.identity.limit_min,
        gpu.identity.limit_max,
    ],
    "nvmlDeviceGetEnforcedPowerLimit": lambda gpu: gpu.live.enforced,
    "nvmlDeviceGetClockInfo": lambda gpu, kind: _clock(gpu, kind, gpu.live.clock),
    "nvmlDeviceGetMaxClockInfo": lambda gpu, kind: _clock(gpu, kind, gpu.identity.clock_max),
    "nvmlDeviceGetSupportedMemoryClocks": lambda gpu: [gpu.identity.memory_clock],
    "nvmlDeviceGetCurrentClocksEventReasons": lambda gpu: gpu.live.reasons,
    "nvmlDeviceGetMigMode": _mig_mode,
    "nvmlDeviceGetMaxMigDeviceCount": _max_instances,
    "nvmlDeviceGetMigDeviceHandleByIndex": _mig_handle,
    "nvmlGpmQueryDeviceSupport": _gpm_support,
    "nvmlGpmMigSampleGet": _sample_instance,
    "nvmlDeviceGetProcessUtilization": _process_utilisation,
    "nvmlDeviceGetTotalEnergyConsumption": _energy,
    "nvmlDeviceGetPowerUsage": _power_usage,
    "nvmlDeviceGetPowerManagementLimit": lambda gpu: gpu.requested_limit,
    "nvmlDeviceGetFieldValues": _field_values,
    "nvmlDeviceGetSupportedGraphicsClocks": _graphics_clocks,
    "nvmlDeviceGetUtilizationRates": _utilisation,
    "nvmlDeviceGetTemperature": _temperature,
    "nvmlDeviceGetMemoryInfo": _memory_info,
    "nvmlDeviceSetPowerManagementLimit": _set_limit,
    "nvmlDeviceSetGpuLockedClocks": _lock_clocks,
    "nvmlDeviceResetGpuLockedClocks": _reset_clocks,
}
