"""NVML calls that wait for events, and profiling (GPM), which is not emulated."""

from __future__ import annotations

import ctypes
from typing import Any

from wattspan.emulation.nvml_calls import (
    INVALID_ARGUMENT,
    NOT_SUPPORTED,
    TIMEOUT,
    DeviceHandle,
    LibrarySession,
    NvmlCallError,
    address_of,
    device_call,
    device_value,
    number,
    put_handle,
    session_call,
    target,
)
from wattspan.emulation.nvml_layout import NO_INSTANCE

XID = 0x8
_POLL_MS = 5
_FIRST_SET, _SET_STRIDE = 0x5000, 16


def _watched(session: LibrarySession, handle: Any) -> dict[int, int]:
    """The Xid serial last seen on each GPU that an event set watches."""
    watched = session.event_sets.get(address_of(handle))
    if watched is None:
        raise NvmlCallError(INVALID_ARGUMENT)
    return watched


@session_call("nvmlEventSetCreate")
def create_event_set(session: LibrarySession, into: Any) -> None:
    number = max(session.event_sets, default=_FIRST_SET) + _SET_STRIDE
    session.event_sets[number] = {}
    ctypes.c_void_p.from_buffer(target(into)).value = number


@session_call("nvmlEventSetFree")
def free_event_set(session: LibrarySession, handle: Any) -> None:
    _watched(session, handle)
    del session.event_sets[address_of(handle)]


@device_value("nvmlDeviceGetSupportedEventTypes")
def supported_events(device: DeviceHandle) -> int:
    device.whole()
    return XID


@device_call("nvmlDeviceRegisterEvents")
def register_events(device: DeviceHandle, types: Any, handle: Any) -> None:
    if number(types) & ~XID:
        raise NvmlCallError(NOT_SUPPORTED)
    watched = _watched(device.session, handle)
    if number(types):
        watched[device.whole().index] = int(device.record.xid_serial)


@session_call("nvmlEventSetWait", "nvmlEventSetWait_v2")
def wait_for_event(session: LibrarySession, handle: Any, data: Any, milliseconds: Any) -> None:
    """Blocks for up to that long; that nothing happened is the error TIMEOUT."""
    watched, event, left = _watched(session, handle), target(data), number(milliseconds)
    while True:
        for index, serial in watched.items():
            device = DeviceHandle(session, index)
            if device.record.xid_serial != serial:
                watched[index] = (serial + 1) & 0xFFFF_FFFF
                put_handle(_Field(event, "device"), device)
                event.eventType, event.eventData = XID, device.record.xid
                event.gpuInstanceId = event.computeInstanceId = NO_INSTANCE
                return
        if left <= 0:
            raise NvmlCallError(TIMEOUT)
        session.pause.wait(min(left, _POLL_MS) / 1000)
        left -= _POLL_MS


class _Field:
    """A reference to a pointer inside a structure, which has no object of its own."""

    def __init__(self, structure: ctypes.Structure, name: str) -> None:
        offset = getattr(type(structure), name).offset
        self._obj = ctypes.c_void_p.from_buffer(structure, offset)


@device_call("nvmlGpmQueryDeviceSupport")
def gpm_support(device: DeviceHandle, into: Any) -> None:
    support = target(into)
    del device
    support.isSupportedDevice = 0
