"""The energy of single devices of this host, from their readings: ``/v1/energy?of=devices``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic, sleep

from wattspan.sdk import AgentBusyError
from wattspan.sdk.client import LONGEST_WAIT, POLL_PAUSE, Device, request_json

DeviceReader = Callable[..., Sequence[Device]]
"""Called as ``read_devices``."""


def read_devices(
    start: int,
    end: int,
    ids: Sequence[str] | None = None,
    *,
    timeout: float = 0.0,
    timeline: bool = False,
    parts: bool = False,
    directories: tuple[str, ...] = (),
) -> tuple[Device, ...]:
    """The energy of the devices with ``ids``, or of all, between two monotonic times.

    With ``parts``, also of the MIG instances of the devices; parts can be named in any case.

    Waits at most ``timeout`` seconds until each device has a reading after ``end`` or is silent.
    Raises a MeasurementError if no agent responds, or if it refuses the query.
    """
    if ids is not None and not ids:
        return ()
    query = {"of": "devices", "start": f"mono:{start}", "end": f"mono:{end}"}
    if ids is not None:
        query["hw_id"] = ",".join(ids)
    if timeline:
        query["timeline"] = "1"
    if parts:
        query["parts"] = "1"
    deadline = monotonic() + timeout
    while True:
        wait = min(LONGEST_WAIT, max(0.0, deadline - monotonic()))
        try:
            response = request_json(
                "/v1/energy",
                {**query, "wait": f"{wait * 1e3:.0f}ms"},
                patience=wait,
                directories=directories,
            )
        except AgentBusyError:
            if monotonic() >= deadline:
                raise
        else:
            found = tuple(map(Device.of, response["devices"]))
            if all(one.complete or one.silent for one in found) or monotonic() >= deadline:
                return found
        sleep(POLL_PAUSE)
