"""NVML calls that read power, energy, clocks, load and temperature.

NVML calls that read and set limits, locked clocks and persistence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wattspan.emulation.gpu_file import counter_energy
from wattspan.emulation.nvml_calls import (
    INSUFFICIENT_SIZE,
    INVALID_ARGUMENT,
    NO_PERMISSION,
    NOT_SUPPORTED,
    SUCCESS,
    VERSION_MISMATCH,
    DeviceHandle,
    NvmlCallError,
    device_call,
    device_value,
    number,
    put,
    target,
)
from wattspan.emulation.nvml_layout import (
    FAULT_DEAF,
    FAULT_NO_COUNTER,
    FAULT_NO_PERMISSION,
    FAULT_NO_POWER,
)

_UINT, _ULONGLONG = 1, 3  # nvmlValueType
_GRAPHICS, _SM, _MEMORY, _VIDEO = range(4)  # nvmlClockType
_TEMPERATURE_V1 = 0x100_000C
_MEMORY_V2 = 0x200_0028


@device_value("nvmlDeviceGetTotalEnergyConsumption")
def energy(device: DeviceHandle) -> int:
    """Millijoules since the driver was loaded."""
    identity = device.whole().identity
    device.refuse_if(FAULT_NO_COUNTER)
    if not identity.counter_step:
        raise NvmlCallError(NOT_SUPPORTED)
    return counter_energy(identity, device.moment()) // 1000


@device_value("nvmlDeviceGetPowerUsage")
def power_usage(device: DeviceHandle) -> int:
    if device.whole().identity.usage_is_average:
        return average_power(device)
    return instant_power(device)


def average_power(device: DeviceHandle) -> int:
    device.refuse_if(FAULT_NO_POWER)
    if not device.identity.has_average:
        raise NvmlCallError(NOT_SUPPORTED)
    return int(device.live.power_average)


def instant_power(device: DeviceHandle) -> int:
    device.refuse_if(FAULT_NO_POWER)
    return int(device.live.power_instant)


def requested_limit(device: DeviceHandle) -> int:
    return int(device.record.limit_request & 0xFFFF_FFFF)


_FIELDS: dict[int, tuple[int, Callable[[DeviceHandle], int]]] = {
    74: (_ULONGLONG, lambda device: device.live.capped_ns),
    83: (_ULONGLONG, energy),
    185: (_UINT, average_power),
    186: (_UINT, instant_power),
    187: (_UINT, lambda device: device.identity.limit_min),
    188: (_UINT, lambda device: device.identity.limit_max),
    189: (_UINT, lambda device: device.identity.limit_default),
    190: (_UINT, lambda device: device.live.enforced),
    191: (_ULONGLONG, energy),
    192: (_UINT, requested_limit),
    269: (_ULONGLONG, lambda device: device.live.sw_thermal_ns),
    270: (_ULONGLONG, lambda device: device.live.hw_thermal_ns),
    271: (_ULONGLONG, lambda device: device.live.power_brake_ns),
}


@device_call("nvmlDeviceGetFieldValues")
def field_values(device: DeviceHandle, count: Any, values: Any) -> None:
    """Succeeds as a whole; each entry carries its own code."""
    if number(count) <= 0:
        raise NvmlCallError(INVALID_ARGUMENT)
    rows = target(values)
    for place in range(number(count)):
        row = rows[place]
        row.timestamp = device.session.clock.now().wall // 1000
        row.latencyUsec = 0
        try:
            row.valueType, row.value.ullVal = _field(device, row.fieldId, row.scopeId)
            row.nvmlReturn = SUCCESS
        except NvmlCallError as refusal:
            row.nvmlReturn = refusal.code


def _field(device: DeviceHandle, field: int, scope: int) -> tuple[int, int]:
    # Scope 0 is the GPU; module and memory power are not emulated.
    if field not in _FIELDS or scope:
        raise NvmlCallError(NOT_SUPPORTED)
    kind, read = _FIELDS[field]
    return kind, int(read(device.whole()))


@device_call("nvmlDeviceGetClockInfo")
def clock_info(device: DeviceHandle, kind: Any, into: Any) -> None:
    put(into, _clock(device, number(kind), device.live.clock))


@device_call("nvmlDeviceGetMaxClockInfo")
def max_clock_info(device: DeviceHandle, kind: Any, into: Any) -> None:
    put(into, _clock(device, number(kind), device.identity.clock_max))


@device_call("nvmlDeviceGetClock")
def clock(device: DeviceHandle, kind: Any, which: Any, into: Any) -> None:
    current = number(which) == 0
    top = device.live.clock if current else device.identity.clock_max
    put(into, _clock(device, number(kind), top))


def _clock(device: DeviceHandle, kind: int, graphics: int) -> int:
    device.whole()
    if kind in {_GRAPHICS, _SM}:
        return graphics
    if kind == _MEMORY:
        return int(device.identity.memory_clock)
    if kind == _VIDEO:
        return graphics * 85 // 100
    raise NvmlCallError(INVALID_ARGUMENT)


@device_call("nvmlDeviceGetSupportedMemoryClocks")
def memory_clocks(device: DeviceHandle, count: Any, clocks: Any) -> None:
    _put_clocks(count, clocks, [int(device.whole().identity.memory_clock)])


@device_call("nvmlDeviceGetSupportedGraphicsClocks")
def graphics_clocks(device: DeviceHandle, memory: Any, count: Any, clocks: Any) -> None:
    identity = device.whole().identity
    if number(memory) != identity.memory_clock:
        raise NvmlCallError(INVALID_ARGUMENT)
    rising = range(identity.clock_min, identity.clock_max + 1, identity.clock_step)
    _put_clocks(count, clocks, list(reversed(rising)))


def _put_clocks(count: Any, clocks: Any, values: list[int]) -> None:
    room = target(count)
    short = clocks is None or room.value < len(values)
    room.value = len(values)
    if short:
        raise NvmlCallError(INSUFFICIENT_SIZE)
    for place, value in enumerate(values):
        clocks[place] = value


@device_call("nvmlDeviceGetUtilizationRates")
def utilisation(device: DeviceHandle, into: Any) -> None:
    if device.whole().record.mig:
        raise NvmlCallError(NOT_SUPPORTED)
    rates, live = target(into), device.live
    rates.gpu, rates.memory = live.utilisation, live.memory_utilisation


@device_value("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
def clock_reasons(device: DeviceHandle) -> int:
    return int(device.whole().live.reasons)


@device_value(
    "nvmlDeviceGetSupportedClocksEventReasons", "nvmlDeviceGetSupportedClocksThrottleReasons"
)
def supported_reasons(device: DeviceHandle) -> int:
    device.whole()
    return 0xFF


@device_call("nvmlDeviceGetTemperature")
def temperature(device: DeviceHandle, sensor: Any, into: Any) -> None:
    if number(sensor) != 0:
        raise NvmlCallError(INVALID_ARGUMENT)
    put(into, device.whole().live.temperature)


@device_call("nvmlDeviceGetTemperatureV")
def temperature_v(device: DeviceHandle, into: Any) -> None:
    asked = target(into)
    if asked.version != _TEMPERATURE_V1:
        raise NvmlCallError(VERSION_MISMATCH)
    if asked.sensorType != 0:
        raise NvmlCallError(INVALID_ARGUMENT)
    asked.temperature = device.whole().live.temperature


@device_value("nvmlDeviceGetPerformanceState", "nvmlDeviceGetPowerState")
def performance_state(device: DeviceHandle) -> int:
    device.whole()
    return 0


@device_call("nvmlDeviceGetMemoryInfo")
def memory_info(device: DeviceHandle, into: Any) -> None:
    memory, identity, used = target(into), device.identity, device.live.memory_used
    memory.total, memory.used, memory.free = (
        identity.memory_total,
        used,
        identity.memory_total - used,
    )


@device_call("nvmlDeviceGetMemoryInfo_v2")
def memory_info_v2(device: DeviceHandle, into: Any) -> None:
    memory, identity, used = target(into), device.identity, device.live.memory_used
    if memory.version != _MEMORY_V2:
        raise NvmlCallError(VERSION_MISMATCH)
    memory.total, memory.reserved = identity.memory_total, identity.memory_reserved
    memory.used, memory.free = used - identity.memory_reserved, identity.memory_total - used


_POWER_VALUE_V2 = 0x200_000C
_VOLTA = 5
_LARGEST_CLOCK = 0xFF_FFFF


@device_value("nvmlDeviceGetPowerManagementLimit")
def limit(device: DeviceHandle) -> int:
    return requested_limit(device.whole())


@device_value("nvmlDeviceGetPowerManagementDefaultLimit")
def default_limit(device: DeviceHandle) -> int:
    return int(device.whole().identity.limit_default)


@device_value("nvmlDeviceGetEnforcedPowerLimit")
def enforced_limit(device: DeviceHandle) -> int:
    return int(device.whole().live.enforced)


@device_value("nvmlDeviceGetPowerManagementMode")
def power_management(device: DeviceHandle) -> int:
    device.whole()
    return 1


@device_call("nvmlDeviceGetPowerManagementLimitConstraints")
def constraints(device: DeviceHandle, lowest: Any, highest: Any) -> None:
    put(lowest, device.whole().identity.limit_min)
    put(highest, device.identity.limit_max)


@device_call("nvmlDeviceSetPowerManagementLimit")
def set_limit(device: DeviceHandle, milliwatts: Any) -> None:
    _request_limit(device, number(milliwatts))


@device_call("nvmlDeviceSetPowerManagementLimit_v2")
def set_limit_v2(device: DeviceHandle, value: Any) -> None:
    wish = target(value)
    if wish.version != _POWER_VALUE_V2:
        raise NvmlCallError(VERSION_MISMATCH)
    if wish.powerScope != 0:
        raise NvmlCallError(NOT_SUPPORTED)
    _request_limit(device, wish.powerValueMw)


def _request_limit(device: DeviceHandle, milliwatts: int) -> None:
    identity, record = device.whole().identity, device.record
    device.refuse_if(FAULT_NO_PERMISSION, NO_PERMISSION)
    if not identity.limit_min <= milliwatts <= identity.limit_max:
        raise NvmlCallError(INVALID_ARGUMENT)
    if record.faults & FAULT_DEAF:
        return
    serial = ((record.limit_request >> 32) + 1) & 0xFFFF_FFFF
    record.limit_request = serial << 32 | milliwatts


@device_call("nvmlDeviceSetGpuLockedClocks")
def lock_clocks(device: DeviceHandle, lowest: Any, highest: Any) -> None:
    device.record.clock_request = _lock(device, number(lowest), number(highest))


@device_call("nvmlDeviceResetGpuLockedClocks")
def reset_clocks(device: DeviceHandle) -> None:
    _may_lock(device)
    device.record.clock_request = 0


@device_call("nvmlDeviceSetMemoryLockedClocks")
def lock_memory_clocks(device: DeviceHandle, lowest: Any, highest: Any) -> None:
    device.record.memory_clock_request = _lock(device, number(lowest), number(highest))


@device_call("nvmlDeviceResetMemoryLockedClocks")
def reset_memory_clocks(device: DeviceHandle) -> None:
    _may_lock(device)
    device.record.memory_clock_request = 0


def _lock(device: DeviceHandle, lowest: int, highest: int) -> int:
    _may_lock(device)
    if not 0 < highest <= _LARGEST_CLOCK or lowest > highest:
        raise NvmlCallError(INVALID_ARGUMENT)
    return lowest << 24 | highest


def _may_lock(device: DeviceHandle) -> None:
    if device.whole().identity.architecture < _VOLTA:
        raise NvmlCallError(NOT_SUPPORTED)
    device.refuse_if(FAULT_NO_PERMISSION, NO_PERMISSION)


@device_value("nvmlDeviceGetPersistenceMode")
def persistence(device: DeviceHandle) -> int:
    return int(device.whole().record.persistence_request)


@device_call("nvmlDeviceSetPersistenceMode")
def set_persistence(device: DeviceHandle, mode: Any) -> None:
    device.whole().refuse_if(FAULT_NO_PERMISSION, NO_PERMISSION)
    if number(mode) not in {0, 1}:
        raise NvmlCallError(INVALID_ARGUMENT)
    device.record.persistence_request = number(mode)
