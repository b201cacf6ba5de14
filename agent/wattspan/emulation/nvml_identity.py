"""NVML calls that say which GPUs there are and what they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wattspan.emulation.nvml_calls import (
    INVALID_ARGUMENT,
    NOT_FOUND,
    NOT_SUPPORTED,
    Device,
    Refused,
    Session,
    device_call,
    device_text,
    device_value,
    number,
    put,
    put_handle,
    put_text,
    session_call,
    target,
)


@session_call("nvmlSystemGetDriverVersion")
def driver_version(session: Session, buffer: Any, size: Any) -> None:
    put_text(buffer, size, session.file.header.driver_version)


@session_call("nvmlSystemGetNVMLVersion")
def nvml_version(session: Session, buffer: Any, size: Any) -> None:
    put_text(buffer, size, session.file.header.nvml_version)


@session_call("nvmlSystemGetCudaDriverVersion", "nvmlSystemGetCudaDriverVersion_v2")
def cuda_version(session: Session, into: Any) -> None:
    put(into, session.file.header.cuda_version)


@session_call("nvmlSystemGetProcessName")
def process_name(session: Session, pid: Any, buffer: Any, size: Any) -> None:
    del session
    try:
        name = Path(f"/proc/{number(pid)}/cmdline").read_bytes().partition(b"\0")[0]
    except OSError:
        raise Refused(NOT_FOUND) from None
    buffer.value = name[: number(size) - 1]


@session_call("nvmlDeviceGetCount", "nvmlDeviceGetCount_v2")
def count(session: Session, into: Any) -> None:
    put(into, session.gpus())


@session_call("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetHandleByIndex_v2")
def handle_by_index(session: Session, index: Any, into: Any) -> None:
    if number(index) >= session.gpus():
        raise Refused(INVALID_ARGUMENT)
    _hand_out(Device(session, number(index)), into)


@session_call("nvmlDeviceGetHandleByUUID")
def handle_by_uuid(session: Session, wanted: Any, into: Any) -> None:
    _hand_out(_find(session, "uuid", wanted), into)


@session_call("nvmlDeviceGetHandleBySerial")
def handle_by_serial(session: Session, wanted: Any, into: Any) -> None:
    _hand_out(_find(session, "serial", wanted), into)


@session_call("nvmlDeviceGetHandleByPciBusId", "nvmlDeviceGetHandleByPciBusId_v2")
def handle_by_bus(session: Session, wanted: Any, into: Any) -> None:
    # 0000:17:00.0 and 00000000:17:00.0 name the same slot.
    domain, _, rest = _bytes(wanted).upper().partition(b":")
    try:
        full = b"%08X:%s" % (int(domain, 16), rest)
    except ValueError:
        raise Refused(INVALID_ARGUMENT) from None
    _hand_out(_find(session, "bus_id", full), into)


def _find(session: Session, field: str, wanted: Any) -> Device:
    for index in range(session.gpus()):
        if getattr(session.file.identity(index), field) == _bytes(wanted):
            return Device(session, index)
    raise Refused(NOT_FOUND)


def _bytes(text: Any) -> bytes:
    value: bytes = getattr(text, "value", text)
    return value


def _hand_out(device: Device, into: Any) -> None:
    device.ready()  # a lost GPU has no handle
    put_handle(into, device)


@device_text("nvmlDeviceGetName")
def name(device: Device) -> bytes:
    text: bytes = device.identity.name
    return text


@device_text("nvmlDeviceGetUUID")
def uuid(device: Device) -> bytes:
    text: bytes = device.identity.uuid
    if device.instance:
        return b"MIG-%s%02x" % (text.removeprefix(b"GPU-")[:-2], device.instance)
    return text


@device_text("nvmlDeviceGetSerial")
def serial(device: Device) -> bytes:
    text: bytes = device.whole().identity.serial
    return text


@device_call("nvmlDeviceGetPciInfo_v2", "nvmlDeviceGetPciInfo_v3")
def pci_info(device: Device, into: Any) -> None:
    info, identity = target(into), device.whole().identity
    info.busIdLegacy, info.busId = identity.bus_id_legacy, identity.bus_id
    info.domain, info.bus, info.device = identity.domain, identity.bus, identity.device
    info.pciDeviceId, info.pciSubSystemId = identity.pci_device, 0


@device_value("nvmlDeviceGetIndex")
def index_of(device: Device) -> int:
    return device.whole().index


@device_value("nvmlDeviceGetMinorNumber")
def minor_number(device: Device) -> int:
    return device.whole().index


@device_value("nvmlDeviceGetArchitecture")
def architecture(device: Device) -> int:
    return int(device.identity.architecture)


@device_value("nvmlDeviceGetBrand")
def brand(device: Device) -> int:
    return int(device.identity.brand)


@device_call("nvmlDeviceGetCudaComputeCapability")
def compute_capability(device: Device, major: Any, minor: Any) -> None:
    put(major, device.identity.compute_major)
    put(minor, device.identity.compute_minor)


@device_value("nvmlDeviceGetComputeMode")
def compute_mode(device: Device) -> int:
    device.whole()
    return 0


# ---------------------------------------------------------------------------------------- MIG

_WITH_MIG = {(8, 0), (9, 0), (10, 0)}  # of the Ampere chips only A100 and A30


@device_call("nvmlDeviceGetMigMode")
def mig_mode(device: Device, current: Any, pending: Any) -> None:
    identity = device.whole().identity
    if (identity.compute_major, identity.compute_minor) not in _WITH_MIG:
        raise Refused(NOT_SUPPORTED)
    put(current, bool(device.record.mig))
    put(pending, bool(device.record.mig))


@device_value("nvmlDeviceGetMaxMigDeviceCount")
def max_mig_devices(device: Device) -> int:
    return 7 if device.whole().identity.compute_major >= 9 else 0


@device_call("nvmlDeviceGetMigDeviceHandleByIndex")
def mig_handle(device: Device, index: Any, into: Any) -> None:
    if not device.whole().record.mig or number(index) >= device.live.processes:
        raise Refused(NOT_FOUND)
    put_handle(into, Device(device.session, device.index, number(index) + 1))


@device_value("nvmlDeviceIsMigDeviceHandle")
def is_mig(device: Device) -> int:
    return bool(device.instance)


@device_call("nvmlDeviceGetDeviceHandleFromMigDeviceHandle")
def mig_parent(device: Device, into: Any) -> None:
    if not device.instance:
        raise Refused(INVALID_ARGUMENT)
    put_handle(into, Device(device.session, device.index))


@device_value("nvmlDeviceGetGpuInstanceId")
def gpu_instance(device: Device) -> int:
    return _instance(device)


@device_value("nvmlDeviceGetComputeInstanceId")
def compute_instance(device: Device) -> int:
    _instance(device)
    return 0


@device_call("nvmlDeviceGetAttributes_v2")
def attributes(device: Device, into: Any) -> None:
    _instance(device)
    found = target(into)
    found.multiprocessorCount = device.identity.multiprocessors // 8
    found.gpuInstanceSliceCount = found.computeInstanceSliceCount = 1
    found.memorySizeMB = device.identity.memory_total // 8 // (1 << 20)


def _instance(device: Device) -> int:
    if not device.instance:
        raise Refused(NOT_SUPPORTED)
    return device.instance
