"""The energy of a training run so far: of its GPUs, or of its processes where it has none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from time import monotonic_ns
from typing import Any, Protocol

from wattspan.compat.zeus.indices import DeviceIndex
from wattspan.sdk import MeasurementError
from wattspan.sdk.client import Device, read_measurement, request_json
from wattspan.sdk.devices import DeviceReader, read_devices

READ_TIMEOUT = 5.0
"""Seconds to wait for the readings of a period that has just ended."""


class RunMeter(Protocol):
    """Measures one run. All calls may raise MeasurementError."""

    def gpus(self) -> str:
        """The number and the model of the GPUs: ``"2 x NVIDIA H100"``; "" without any."""
        ...

    def power(self) -> float:
        """The highest power of the devices in watts, to which the time of a run is compared."""
        ...

    def begin(self) -> None:
        """Begin to measure."""
        ...

    def read(self) -> tuple[float, float]:
        """Joules and seconds since ``begin``."""
        ...


class AgentMeter:
    """Measures by the agent of this host: the GPUs that are visible to this program, whole.

    A program without GPUs is measured by its processes; then ``max_power`` is needed, as no device
    of its own states a limit.
    """

    def __init__(
        self,
        max_power: float | None = None,
        read: DeviceReader = read_devices,
        directories: tuple[str, ...] = (),
    ) -> None:
        self._max_power, self._read, self._directories = max_power, read, directories
        self._index = DeviceIndex(read, None, [])
        self._found: list[Device] = []
        self._began: int | None = None

    def gpus(self) -> str:
        boards = self._boards()
        models = Counter(board.model or board.name for board in boards)
        return ", ".join(f"{count} x {model}" for model, count in sorted(models.items()))

    def power(self) -> float:
        if self._max_power is not None:
            return self._max_power
        ids = [board.id for board in self._boards()]
        if not ids:
            raise MeasurementError(
                "The highest power of a program without GPUs is not known. Give max_power in watts."
            )
        snapshot = request_json("/v1/snapshot", {}, directories=self._directories)
        limits = {one["hw_id"]: _limit(one) for one in snapshot["domains"]}
        known = [limits.get(one) for one in ids]
        if None in known:
            board = ids[known.index(None)]
            raise MeasurementError(
                f"The power limit of {board} is not known. Give max_power in watts."
            )
        return sum(limit for limit in known if limit is not None)

    def begin(self) -> None:
        if not self._boards():  # a long run is longer than the agent's history of processes
            request_json("/v1/watch", {"pid": "self", "family": "1"}, directories=self._directories)
        self._began = monotonic_ns()

    def read(self) -> tuple[float, float]:
        if self._began is None:
            raise MeasurementError("The run has not begun. Call on_train_begin() first.")
        start, end = self._began, monotonic_ns()
        ids = [board.id for board in self._boards()]
        seconds = (end - start) / 1e9
        if not ids:
            own = {"pid": "self", "family": "1", "start": f"mono:{start}", "end": f"mono:{end}"}
            found = read_measurement(own, READ_TIMEOUT, self._directories)
            return found.joules.total, seconds
        devices = self._read(start, end, ids, timeout=READ_TIMEOUT, directories=self._directories)
        return sum(map(_joules, devices)), seconds

    def _boards(self) -> list[Device]:
        """The GPUs of this program; they are kept once some were found."""
        if not self._found:
            ids = set(self._index.resolve().gpus.values())
            now = monotonic_ns()
            devices = self._read(now, now, directories=self._directories)
            self._found = [one for one in devices if one.id in ids]
        return self._found


def _limit(domain: Mapping[str, Any]) -> float | None:
    """The power limit of a GPU before any cap, in watts."""
    gpu = domain.get("gpu") or {}
    limit: float | None = gpu.get("default_limit_watts") or gpu.get("limit_watts")
    return limit


def _joules(device: Device) -> float:
    if device.joules is None:
        raise MeasurementError(
            f"The energy of {device.name} is not known for this run: {device.coverage:.0%} of its "
            "time was measured."
        )
    return device.joules
