"""NVML calls that read and set limits, locked clocks and persistence."""

from __future__ import annotations

from typing import Any

from wattspan.emulation.nvml_calls import (
    INVALID_ARGUMENT,
    NO_PERMISSION,
    NOT_SUPPORTED,
    VERSION_MISMATCH,
    Device,
    Refused,
    device_call,
    device_value,
    number,
    put,
    target,
)
from wattspan.emulation.nvml_layout import FAULT_DEAF, FAULT_NO_PERMISSION
from wattspan.emulation.nvml_readings import requested_limit

_POWER_VALUE_V2 = 0x200_000C
_VOLTA = 5
_LARGEST_CLOCK = 0xFF_FFFF


@device_value("nvmlDeviceGetPowerManagementLimit")
def limit(device: Device) -> int:
    return requested_limit(device.whole())


@device_value("nvmlDeviceGetPowerManagementDefaultLimit")
def default_limit(device: Device) -> int:
    return int(device.whole().identity.limit_default)


@device_value("nvmlDeviceGetEnforcedPowerLimit")
def enforced_limit(device: Device) -> int:
    return int(device.whole().live.enforced)


@device_value("nvmlDeviceGetPowerManagementMode")
def power_management(device: Device) -> int:
    device.whole()
    return 1


@device_call("nvmlDeviceGetPowerManagementLimitConstraints")
def constraints(device: Device, lowest: Any, highest: Any) -> None:
    put(lowest, device.whole().identity.limit_min)
    put(highest, device.identity.limit_max)


@device_call("nvmlDeviceSetPowerManagementLimit")
def set_limit(device: Device, milliwatts: Any) -> None:
    _request_limit(device, number(milliwatts))


@device_call("nvmlDeviceSetPowerManagementLimit_v2")
def set_limit_v2(device: Device, value: Any) -> None:
    wish = target(value)
    if wish.version != _POWER_VALUE_V2:
        raise Refused(VERSION_MISMATCH)
    if wish.powerScope != 0:
        raise Refused(NOT_SUPPORTED)
    _request_limit(device, wish.powerValueMw)


def _request_limit(device: Device, milliwatts: int) -> None:
    identity, record = device.whole().identity, device.record
    device.refuse_if(FAULT_NO_PERMISSION, NO_PERMISSION)
    if not identity.limit_min <= milliwatts <= identity.limit_max:
        raise Refused(INVALID_ARGUMENT)
    if record.faults & FAULT_DEAF:
        return
    serial = ((record.limit_request >> 32) + 1) & 0xFFFF_FFFF
    record.limit_request = serial << 32 | milliwatts


@device_call("nvmlDeviceSetGpuLockedClocks")
def lock_clocks(device: Device, lowest: Any, highest: Any) -> None:
    device.record.clock_request = _lock(device, number(lowest), number(highest))


@device_call("nvmlDeviceResetGpuLockedClocks")
def reset_clocks(device: Device) -> None:
    _may_lock(device)
    device.record.clock_request = 0


@device_call("nvmlDeviceSetMemoryLockedClocks")
def lock_memory_clocks(device: Device, lowest: Any, highest: Any) -> None:
    device.record.memory_clock_request = _lock(device, number(lowest), number(highest))


@device_call("nvmlDeviceResetMemoryLockedClocks")
def reset_memory_clocks(device: Device) -> None:
    _may_lock(device)
    device.record.memory_clock_request = 0


def _lock(device: Device, lowest: int, highest: int) -> int:
    _may_lock(device)
    if not 0 < highest <= _LARGEST_CLOCK or lowest > highest:
        raise Refused(INVALID_ARGUMENT)
    return lowest << 24 | highest


def _may_lock(device: Device) -> None:
    if device.whole().identity.architecture < _VOLTA:
        raise Refused(NOT_SUPPORTED)
    device.refuse_if(FAULT_NO_PERMISSION, NO_PERMISSION)


@device_value("nvmlDeviceGetPersistenceMode")
def persistence(device: Device) -> int:
    return int(device.whole().record.persistence_request)


@device_call("nvmlDeviceSetPersistenceMode")
def set_persistence(device: Device, mode: Any) -> None:
    device.whole().refuse_if(FAULT_NO_PERMISSION, NO_PERMISSION)
    if number(mode) not in {0, 1}:
        raise Refused(INVALID_ARGUMENT)
    device.record.persistence_request = number(mode)
