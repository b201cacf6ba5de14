"""NVML calls that say which GPUs there are and what they are.

NVML calls that say which processes use a GPU, and how much.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wattspan.emulation.nvml_calls import (
    INVALID_ARGUMENT,
    NOT_FOUND,
    NOT_SUPPORTED,
    DeviceHandle,
    LibrarySession,
    NvmlCallError,
    device_call,
    device_text,
    device_value,
    number,
    put,
    put_handle,
    put_rows,
    put_text,
    session_call,
    target,
)
from wattspan.emulation.nvml_layout import FAULT_NO_PROCESSES, KINDS, NO_INSTANCE


@session_call("nvmlSystemGetDriverVersion")
def driver_version(session: LibrarySession, buffer: Any, size: Any) -> None:
    put_text(buffer, size, session.file.header.driver_version)


@session_call("nvmlSystemGetNVMLVersion")
def nvml_version(session: LibrarySession, buffer: Any, size: Any) -> None:
    put_text(buffer, size, session.file.header.nvml_version)


@session_call("nvmlSystemGetCudaDriverVersion", "nvmlSystemGetCudaDriverVersion_v2")
def cuda_version(session: LibrarySession, into: Any) -> None:
    put(into, session.file.header.cuda_version)


@session_call("nvmlSystemGetProcessName")
def process_name(session: LibrarySession, pid: Any, buffer: Any, size: Any) -> None:
    del session
    try:
        name = Path(f"/proc/{number(pid)}/cmdline").read_bytes().partition(b"\0")[0]
    except OSError:
        raise NvmlCallError(NOT_FOUND) from None
    buffer.value = name[: number(size) - 1]


@session_call("nvmlDeviceGetCount", "nvmlDeviceGetCount_v2")
def count(session: LibrarySession, into: Any) -> None:
    put(into, session.gpus())


@session_call("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetHandleByIndex_v2")
def handle_by_index(session: LibrarySession, index: Any, into: Any) -> None:
    if number(index) >= session.gpus():
        raise NvmlCallError(INVALID_ARGUMENT)
    _hand_out(DeviceHandle(session, number(index)), into)


@session_call("nvmlDeviceGetHandleByUUID")
def handle_by_uuid(session: LibrarySession, wanted: Any, into: Any) -> None:
    _hand_out(_find(session, "uuid", wanted), into)


@session_call("nvmlDeviceGetHandleBySerial")
def handle_by_serial(session: LibrarySession, wanted: Any, into: Any) -> None:
    _hand_out(_find(session, "serial", wanted), into)


@session_call("nvmlDeviceGetHandleByPciBusId", "nvmlDeviceGetHandleByPciBusId_v2")
def handle_by_bus(session: LibrarySession, wanted: Any, into: Any) -> None:
    # 0000:17:00.0 and 00000000:17:00.0 name the same slot.
    domain, _, rest = _bytes(wanted).upper().partition(b":")
    try:
        full = b"%08X:%s" % (int(domain, 16), rest)
    except ValueError:
        raise NvmlCallError(INVALID_ARGUMENT) from None
    _hand_out(_find(session, "bus_id", full), into)


def _find(session: LibrarySession, field: str, wanted: Any) -> DeviceHandle:
    for index in range(session.gpus()):
        if getattr(session.file.identity(index), field) == _bytes(wanted):
            return DeviceHandle(session, index)
    raise NvmlCallError(NOT_FOUND)


def _bytes(text: Any) -> bytes:
    value: bytes = getattr(text, "value", text)
    return value


def _hand_out(device: DeviceHandle, into: Any) -> None:
    device.ready()  # a lost GPU has no handle
    put_handle(into, device)


@device_text("nvmlDeviceGetName")
def name(device: DeviceHandle) -> bytes:
    text: bytes = device.identity.name
    return text


@device_text("nvmlDeviceGetUUID")
def uuid(device: DeviceHandle) -> bytes:
    text: bytes = device.identity.uuid
    if device.instance:
        return b"MIG-%s%02x" % (text.removeprefix(b"GPU-")[:-2], device.instance)
    return text


@device_text("nvmlDeviceGetSerial")
def serial(device: DeviceHandle) -> bytes:
    text: bytes = device.whole().identity.serial
    return text


@device_call("nvmlDeviceGetPciInfo_v2", "nvmlDeviceGetPciInfo_v3")
def pci_info(device: DeviceHandle, into: Any) -> None:
    info, identity = target(into), device.whole().identity
    info.busIdLegacy, info.busId = identity.bus_id_legacy, identity.bus_id
    info.domain, info.bus, info.device = identity.domain, identity.bus, identity.device
    info.pciDeviceId, info.pciSubSystemId = identity.pci_device, 0


@device_value("nvmlDeviceGetIndex")
def index_of(device: DeviceHandle) -> int:
    return device.whole().index


@device_value("nvmlDeviceGetMinorNumber")
def minor_number(device: DeviceHandle) -> int:
    return device.whole().index


@device_value("nvmlDeviceGetArchitecture")
def architecture(device: DeviceHandle) -> int:
    return int(device.identity.architecture)


@device_value("nvmlDeviceGetBrand")
def brand(device: DeviceHandle) -> int:
    return int(device.identity.brand)


@device_call("nvmlDeviceGetCudaComputeCapability")
def compute_capability(device: DeviceHandle, major: Any, minor: Any) -> None:
    put(major, device.identity.compute_major)
    put(minor, device.identity.compute_minor)


@device_value("nvmlDeviceGetComputeMode")
def compute_mode(device: DeviceHandle) -> int:
    device.whole()
    return 0


# ---------------------------------------------------------------------------------------- MIG

_WITH_MIG = {(8, 0), (9, 0), (10, 0)}  # of the Ampere chips only A100 and A30


@device_call("nvmlDeviceGetMigMode")
def mig_mode(device: DeviceHandle, current: Any, pending: Any) -> None:
    identity = device.whole().identity
    if (identity.compute_major, identity.compute_minor) not in _WITH_MIG:
        raise NvmlCallError(NOT_SUPPORTED)
    put(current, bool(device.record.mig))
    put(pending, bool(device.record.mig))


@device_value("nvmlDeviceGetMaxMigDeviceCount")
def max_mig_devices(device: DeviceHandle) -> int:
    return 7 if device.whole().identity.compute_major >= 9 else 0


@device_call("nvmlDeviceGetMigDeviceHandleByIndex")
def mig_handle(device: DeviceHandle, index: Any, into: Any) -> None:
    if not device.whole().record.mig or number(index) >= device.live.processes:
        raise NvmlCallError(NOT_FOUND)
    put_handle(into, DeviceHandle(device.session, device.index, number(index) + 1))


@device_value("nvmlDeviceIsMigDeviceHandle")
def is_mig(device: DeviceHandle) -> int:
    return bool(device.instance)


@device_call("nvmlDeviceGetDeviceHandleFromMigDeviceHandle")
def mig_parent(device: DeviceHandle, into: Any) -> None:
    if not device.instance:
        raise NvmlCallError(INVALID_ARGUMENT)
    put_handle(into, DeviceHandle(device.session, device.index))


@device_value("nvmlDeviceGetGpuInstanceId")
def gpu_instance(device: DeviceHandle) -> int:
    return _instance(device)


@device_value("nvmlDeviceGetComputeInstanceId")
def compute_instance(device: DeviceHandle) -> int:
    _instance(device)
    return 0


@device_call("nvmlDeviceGetAttributes_v2")
def attributes(device: DeviceHandle, into: Any) -> None:
    _instance(device)
    found = target(into)
    found.multiprocessorCount = device.identity.multiprocessors // 8
    found.gpuInstanceSliceCount = found.computeInstanceSliceCount = 1
    found.memorySizeMB = device.identity.memory_total // 8 // (1 << 20)


def _instance(device: DeviceHandle) -> int:
    if not device.instance:
        raise NvmlCallError(NOT_SUPPORTED)
    return device.instance


def _list_processes(device: DeviceHandle, kind: str, count: Any, rows: Any) -> None:
    device.refuse_if(FAULT_NO_PROCESSES)
    live, wanted = device.live, KINDS.index(kind)
    entries = [live.process[place] for place in range(live.processes)]
    put_rows(
        count,
        rows,
        [
            (entry.pid, entry.memory, entry.instance, _compute_instance(entry.instance))
            for entry in entries
            if entry.kind == wanted and device.instance in {0, entry.instance}
        ],
    )


def _compute_instance(instance: int) -> int:
    return NO_INSTANCE if instance == NO_INSTANCE else 0


@device_call("nvmlDeviceGetComputeRunningProcesses_v2", "nvmlDeviceGetComputeRunningProcesses_v3")
def compute_processes(device: DeviceHandle, count: Any, rows: Any) -> None:
    _list_processes(device, "compute", count, rows)


@device_call("nvmlDeviceGetGraphicsRunningProcesses_v2", "nvmlDeviceGetGraphicsRunningProcesses_v3")
def graphics_processes(device: DeviceHandle, count: Any, rows: Any) -> None:
    _list_processes(device, "graphics", count, rows)


@device_call(
    "nvmlDeviceGetMPSComputeRunningProcesses_v2", "nvmlDeviceGetMPSComputeRunningProcesses_v3"
)
def mps_processes(device: DeviceHandle, count: Any, rows: Any) -> None:
    _list_processes(device, "mps", count, rows)


@device_call("nvmlDeviceGetProcessUtilization")
def process_utilisation(device: DeviceHandle, rows: Any, count: Any, last_seen: Any) -> None:
    """Samples newer than ``last_seen``; only of processes that did something."""
    device.whole().refuse_if(FAULT_NO_PROCESSES)
    if device.record.mig:
        raise NvmlCallError(NOT_SUPPORTED)
    live = device.live
    samples = [live.sample[place] for place in range(live.samples)]
    newer = [
        (sample.pid, sample.stamp, sample.sm, sample.memory, 0, 0)
        for sample in samples
        if sample.stamp > number(last_seen)
    ]
    if not newer:
        raise NvmlCallError(NOT_FOUND)
    put_rows(count, rows, newer)
