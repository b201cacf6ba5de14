"""``TemperatureMonitor``: the temperature of GPUs over time, as the agent reads it every second."""

from __future__ import annotations

from wattspan.compat.zeus.power import GpuTimelines, to_monotonic, to_unix

_NEWEST = 60 * 10**9  # nanoseconds before the construction that count: a value may be that old


class TemperatureMonitor(GpuTimelines):
    """The temperature of GPUs since its construction; signatures and units are those of Zeus.

    ``update_period`` has no effect: the agent reads once a second, and keeps at least an hour.
    Only the newest ``max_samples_per_gpu`` values are returned.
    """

    def __init__(
        self,
        gpu_indices: list[int] | None = None,
        update_period: float = 1.0,
        max_samples_per_gpu: int | None = None,
    ) -> None:
        super().__init__(gpu_indices, max_samples_per_gpu)
        self.update_period = update_period

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
        start, end = self._period(start_time, end_time)
        offset = to_unix(0)
        return {
            i: [(offset + mono / 1e9, celsius) for mono, celsius in samples]
            for i, samples in self._samples(start, max(start, end)).items()
            if gpu_index in (None, i)
        }

    def _samples(self, start: int, end: int) -> dict[int, tuple[tuple[int, int], ...]]:
        most = -self._most if self._most else 0
        return {i: one.temperatures[most:] for i, one in self._devices(start, end).items()}
