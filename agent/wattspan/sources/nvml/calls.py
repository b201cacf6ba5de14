"""NVML's functions, the meaning of its errors, and its field values.

Field values: many in one call, each with a return code and a type of its own. The call as a whole
succeeds although single entries fail. The numbers are those of nvml.h.
"""

from __future__ import annotations

import re
from typing import Any

from wattspan.ports import Clock
from wattspan.sources.gpu.calls import (
    DEPRECATED,
    DRIVER_NOT_LOADED,
    FUNCTION_NOT_FOUND,
    GPU_IS_LOST,
    GPU_NOT_FOUND,
    INSUFFICIENT_SIZE,
    LIB_RM_VERSION_MISMATCH,
    LIBRARY_NOT_FOUND,
    NO_PERMISSION,
    NOT_FOUND,
    NOT_SUPPORTED,
    RESET_REQUIRED,
    SUCCESS,
    TIMED_OUT,
    UNINITIALIZED,
    UNKNOWN,
    VERSION_MISMATCH,
    DriverLibrary,
    DriverMessages,
    GpuCalls,
)
from wattspan.sources.gpu.port import driver_text

_BUS_ID = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])")

_LOOK_FOR_XID = "Look for Xid messages in dmesg; it is tried again."
MESSAGES = DriverMessages(
    source="nvml",
    label="NVML",
    causes={
        UNINITIALIZED: "NVML is not initialised",
        NOT_SUPPORTED: "this GPU, in its present mode, does not support it",
        NO_PERMISSION: "permission denied",
        NOT_FOUND: "the driver has no such data",
        INSUFFICIENT_SIZE: "the list grew faster than it could be read",
        DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded",
        TIMED_OUT: "the driver timed out",
        LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 was not found",
        FUNCTION_NOT_FOUND: "the installed driver is too old for the call",
        GPU_IS_LOST: "the GPU has fallen off the bus or is otherwise inaccessible",
        RESET_REQUIRED: "the GPU needs a reset",
        17: "the operating system blocked the request",
        LIB_RM_VERSION_MISMATCH: "the NVML library and the loaded driver differ in version",
        20: "the driver is out of memory",
        VERSION_MISMATCH: "the installed driver does not know this version of the call",
        DEPRECATED: "the installed driver no longer supports the call",
        27: "the driver is not ready yet",
        GPU_NOT_FOUND: "the driver no longer knows the GPU",
        UNKNOWN: "the driver reports an unknown error",
    },
    remedies={
        NO_PERMISSION: (
            "Give the agent access to /dev/nvidiactl and /dev/nvidia*: in a container through"
            " NVIDIA's runtime, in a systemd unit with DeviceAllow=."
        ),
        DRIVER_NOT_LOADED: "Load it (modprobe nvidia); the agent keeps trying.",
        LIB_RM_VERSION_MISMATCH: "Reload the driver or reboot: it was upgraded while in use.",
        GPU_IS_LOST: "Look for Xid messages in dmesg; the agent keeps trying.",
        RESET_REQUIRED: "Reset it with nvidia-smi --gpu-reset, or reboot; the agent keeps trying.",
        GPU_NOT_FOUND: "Look at lspci and dmesg; the agent keeps trying.",
        17: "Look for a cgroup device rule that keeps the agent from /dev/nvidia*.",
    },
    setter_remedies={
        NOT_SUPPORTED: "Virtual GPUs, and many in laptops, leave it to the host: cap them there.",
        NO_PERMISSION: (
            "The driver wants CAP_SYS_ADMIN in the host's own user namespace, which root in a "
            "container does not have by itself; run `wattspan capper` as root on the host."
        ),
        DRIVER_NOT_LOADED: "Load it (modprobe nvidia); limits then have the defaults.",
        FUNCTION_NOT_FOUND: "Install a newer one.",
        GPU_IS_LOST: _LOOK_FOR_XID,
        RESET_REQUIRED: "Reset it with nvidia-smi --gpu-reset, or reboot.",
        LIB_RM_VERSION_MISMATCH: "Reload the driver or reboot: it was upgraded while in use.",
        GPU_NOT_FOUND: "Look at lspci and dmesg; it is tried again.",
        UNKNOWN: _LOOK_FOR_XID,
    },
    untrusted="Its power is integrated instead; a newer driver may help.",
    unmeasured="In a virtual machine, read it on the host; else, try a newer driver.",
    motionless="In a virtual machine, read it on the host; else, try a newer driver.",
    list_command="See nvidia-smi -L.",
    hang="Look for Xid messages in dmesg",
)


def open_library(nvml: Any, clock: Clock) -> DriverLibrary:
    """NVML's functions, of the binding ``nvml``."""
    return DriverLibrary(nvml, clock, nvml.NVMLError, _code_of)


def _code_of(error: Exception) -> int:
    code = getattr(error, "value", UNKNOWN)
    return code if isinstance(code, int) else UNKNOWN


def pci_address(info: Any) -> str:
    """The address in NVML's structure in the kernel's form: its domain has four digits, not eight.

    "" without a valid one.
    """
    found = _BUS_ID.fullmatch(driver_text(getattr(info, "busId", "")).lower())
    return "" if found is None else f"{int(found[1], 16):04x}:{found[2]}"


POWER_AVERAGE = 185
POWER_INSTANT = 186
LIMIT_MINIMUM = 187
LIMIT_MAXIMUM = 188
LIMIT_DEFAULT = 189
LIMIT_ENFORCED = 190
LIMIT_REQUESTED = 192

THROTTLE_FIELDS = {74: "power_cap", 269: "sw_thermal", 270: "hw_thermal", 271: "power_brake"}
"""Cumulative nanoseconds of throttling, by reason."""

FIELDS = {
    POWER_AVERAGE: "average power",
    POWER_INSTANT: "instant power",
    LIMIT_MINIMUM: "minimum power limit",
    LIMIT_MAXIMUM: "maximum power limit",
    LIMIT_DEFAULT: "default power limit",
    LIMIT_ENFORCED: "enforced power limit",
    LIMIT_REQUESTED: "requested power limit",
    **{field: f"time throttled by {reason}" for field, reason in THROTTLE_FIELDS.items()},
}

_VALUE_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # by value type
_BLANK_VALUES = frozenset({0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF, 0x7FFFFFFFFFFFFFFF})

FIELD_VALUES = "field values"


MODULE_SCOPE = 1
"""NVML_POWER_SCOPE_MODULE: the superchip around a GPU, with its CPU and memory."""


def read_fields(calls: GpuCalls, fields: tuple[int, ...], scope: int = 0) -> dict[int, int]:
    """The fields that answered. Unavailable fields are omitted, and remembered."""
    names = {field: FIELDS[field] + (" of the module" if scope else "") for field in fields}
    asked = list(fields)
    if calls.any_refused:
        asked = [field for field in fields if calls.is_due(names[field])]
    if not asked:
        return {}
    scoped = [(field, scope) for field in asked] if scope else asked
    entries = calls.ask(FIELD_VALUES, "nvmlDeviceGetFieldValues", scoped)
    if entries is None:
        return {}
    values: dict[int, int] = {}
    for field, entry in zip(asked, entries, strict=False):
        if entry.nvmlReturn != SUCCESS:
            calls.record_error(names[field], entry.nvmlReturn)
            continue
        value = _field_value(entry)
        if value is not None:
            values[field] = value
            calls.record_answer(names[field])
    return values


def _field_value(entry: Any) -> int | None:
    """The number in an entry, whatever its type; None for an unknown type or a blank value."""
    if not 0 <= entry.valueType < len(_VALUE_MEMBERS):
        return None
    number = getattr(entry.value, _VALUE_MEMBERS[entry.valueType])
    return None if number in _BLANK_VALUES else int(number)
