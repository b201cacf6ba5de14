"""NVML's field values: many in one call, each with a return code and a type of its own.

The call as a whole succeeds although single entries fail. The numbers are those of nvml.h.
"""

from __future__ import annotations

from typing import Any

from wattspan.sources.nvml_calls import SUCCESS, GpuCalls

POWER_AVERAGE = 185
POWER_INSTANT = 186
LIMIT_MINIMUM = 187
LIMIT_MAXIMUM = 188
LIMIT_DEFAULT = 189
LIMIT_ENFORCED = 190
LIMIT_REQUESTED = 192

THROTTLED = {74: "power_cap", 269: "sw_thermal", 270: "hw_thermal", 271: "power_brake"}
"""Cumulative nanoseconds of throttling, by reason."""

FIELDS = {
    POWER_AVERAGE: "average power",
    POWER_INSTANT: "instant power",
    LIMIT_MINIMUM: "minimum power limit",
    LIMIT_MAXIMUM: "maximum power limit",
    LIMIT_DEFAULT: "default power limit",
    LIMIT_ENFORCED: "enforced power limit",
    LIMIT_REQUESTED: "requested power limit",
    **{field: f"time throttled by {reason}" for field, reason in THROTTLED.items()},
}

_MEMBER = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # by value type
_BLANK = frozenset({0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF, 0x7FFFFFFFFFFFFFFF})

ALL = "field values"


def read_fields(calls: GpuCalls, fields: tuple[int, ...]) -> dict[int, int]:
    """The fields that answered. Those that are not to be had are left out, and remembered."""
    asked = list(fields)
    if calls.refuses:
        asked = [field for field in fields if calls.is_due(FIELDS[field])]
    if not asked:
        return {}
    entries = calls.ask(ALL, "nvmlDeviceGetFieldValues", asked)
    if entries is None:
        return {}
    values: dict[int, int] = {}
    for field, entry in zip(asked, entries, strict=False):
        if entry.nvmlReturn != SUCCESS:
            calls.judge(FIELDS[field], entry.nvmlReturn)
            continue
        value = _value(entry)
        if value is not None:
            values[field] = value
            calls.answered(FIELDS[field])
    return values


def _value(entry: Any) -> int | None:
    """The number in an entry, whatever its type; None for a type or a blank nobody can read."""
    if not 0 <= entry.valueType < len(_MEMBER):
        return None
    number = getattr(entry.value, _MEMBER[entry.valueType])
    return None if number in _BLANK else int(number)
