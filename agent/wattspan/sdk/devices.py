"""The energy of single devices of this host, from their readings: ``/v1/energy?of=devices``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import monotonic, sleep
from typing import Any, NamedTuple

from wattspan.sdk import AgentBusyError
from wattspan.sdk.client import LONGEST_WAIT, POLL_PAUSE, request_json


class DeviceEnergy(NamedTuple):
    """The energy of one device in a period; ``joules`` is None if it is unknown.

    ``number`` is the index by the driver of a GPU, and the package of a CPU and of memory.
    ``complete``: the device has a reading after the period, so the values are final. ``silent``: it
    is gone, or gives no readings. ``timeline`` has begin, end and joules between readings,
    ``temperatures`` time and degrees Celsius; both only on request. Times are monotonic
    nanoseconds.
    """

    id: str
    kind: str
    name: str
    joules: float | None
    uncertainty: float | None
    coverage: float
    provenance: str
    number: int | None = None
    uuid: str | None = None
    model: str = ""
    complete: bool = True
    silent: bool = False
    timeline: tuple[tuple[int, int, float | None], ...] = ()
    temperatures: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, response: Mapping[str, Any]) -> DeviceEnergy:
        """From an element of ``devices`` in a response."""
        return cls(
            id=response["hw_id"],
            kind=response["hw_type"],
            name=response["hw_name"],
            joules=response["joules"],
            uncertainty=response["uncertainty_joules"],
            coverage=response["coverage"],
            provenance=response["provenance"],
            number=response["index"],
            uuid=response["uuid"],
            model=response["model"],
            complete=response["complete"],
            silent=response["silent"],
            timeline=tuple(map(tuple, response.get("timeline") or ())),
            temperatures=tuple(map(tuple, response.get("temperatures") or ())),
        )


DeviceReader = Callable[..., Sequence[DeviceEnergy]]
"""Called as ``read_devices``."""


def read_devices(
    start: int,
    end: int,
    ids: Sequence[str] | None = None,
    *,
    timeout: float = 0.0,
    timeline: bool = False,
    directories: tuple[str, ...] = (),
) -> tuple[DeviceEnergy, ...]:
    """The energy of the devices with ``ids``, or of all, between two monotonic times.

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
            found = tuple(map(DeviceEnergy.of, response["devices"]))
            if all(one.complete or one.silent for one in found) or monotonic() >= deadline:
                return found
        sleep(POLL_PAUSE)
