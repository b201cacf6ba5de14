"""``TemperatureMonitor``: the temperature of GPUs over time, as the agent reads it every second."""

from __future__ import annotations

from time import monotonic_ns
from typing import ClassVar

from wattspan.compat.zeus.indices import DeviceIndex
from wattspan.compat.zeus.power import to_monotonic, to_unix
from wattspan.sdk.devices import DeviceReader, read_devices

_NEWEST = 60 * 10**9  # nanoseconds before the construction that count: a value may be that old


class TemperatureMonitor:
    """The temperature of GPUs since its construction; signatures and units are those of Zeus.

    ``update_period`` has no effect: the agent reads once a second, and keeps at least an hour.
    Only the newest ``max_samples_per_gpu`` values are returned.
    """

    read_devices: ClassVar[DeviceReader] = staticmethod(read_devices)

    def __init__(
        self,
        gpu_indices: list[int] | None = None,
        update_period: float = 1.0,
        max_samples_per_gpu: int | None = None,
    ) -> None:
        if gpu_indices is not None and not gpu_indices:
            raise ValueError("gpu_indices is empty: name a GPU, or leave it out for all.")
        self.update_period = update_period
        self._most = max_samples_per_gpu
        self._index = DeviceIndex(self.read_devices, gpu_indices, [])
        self._index.check(type(self).__name__)
        self._began = monotonic_ns()
        self._stopped: int | None = None

    @property
    def gpu_indices(self) -> list[int]:
        """Indices of the GPUs, as the framework numbers them; empty without an agent."""
        return self._index.gpu_indices

    def stop(self) -> None:
        """End the monitored period; its values remain available."""
        self._stopped = self._stopped or monotonic_ns()

    def get_temperature(self, time: float | None = None) -> dict[int, int] | None:
        """Degrees Celsius of each GPU, newest or nearest to a Unix time; None without a value."""
        known = self._samples(self._began - _NEWEST, self._end())
        at = self._end() if time is None else to_monotonic(time)
        if not all(known.values()):
            return None
        return {
            i: min(samples, key=lambda one: abs(one[0] - at))[1] for i, samples in known.items()
        }

    def get_temperature_timeline(
        self,
        gpu_index: int | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
    ) -> dict[int, list[tuple[float, int]]]:
        """Unix times and degrees Celsius of each GPU, in order."""
        start = self._began if start_time is None else max(self._began, to_monotonic(start_time))
        end = self._end() if end_time is None else min(self._end(), to_monotonic(end_time))
        offset = to_unix(0)
        return {
            i: [(offset + mono / 1e9, celsius) for mono, celsius in samples]
            for i, samples in self._samples(start, max(start, end)).items()
            if gpu_index in (None, i)
        }

    def _end(self) -> int:
        return monotonic_ns() if self._stopped is None else self._stopped

    def _samples(self, start: int, end: int) -> dict[int, tuple[tuple[int, int], ...]]:
        ids = self._index.resolve().gpus
        found = self.read_devices(start, end, tuple(ids.values()), timeline=True)
        by_id = {device.id: device.temperatures for device in found}
        most = -self._most if self._most else 0
        return {i: by_id[key][most:] for i, key in ids.items()}
