"""``PowerMonitor`` and ``TemperatureMonitor``: values of GPUs over time, from the agent's readings.

A power is the mean between two readings of a board's energy counter, usually 100 ms apart; a
temperature is read every second. No process or thread polls: the agent reads anyway.
"""

from __future__ import annotations

from enum import Enum
from time import monotonic_ns, sleep, strftime, time_ns
from typing import ClassVar, Literal

from wattspan import sdk
from wattspan.compat.zeus.devices import DeviceIndex
from wattspan.compat.zeus.monitor import DeviceFigures, ZeusMonitor
from wattspan.sdk import MeasurementError
from wattspan.sdk.client import Device, DeviceReader, read_devices

NEWEST = 2 * 10**9  # nanoseconds within which the newest reading is looked for
NEWEST_TEMPERATURE = 60 * 10**9  # of which a value may be older than the monitor


class PowerDomain(Enum):
    """Powers of a GPU. The first two are the same mean here."""

    DEVICE_INSTANT = "device_instant"
    DEVICE_AVERAGE = "device_average"
    MEMORY_AVERAGE = "memory_average"


PowerDomainName = Literal["device_instant", "device_average", "memory_average"]
Timeline = list[tuple[float, float]]
"""Unix seconds and watts."""

MEASURED_DOMAINS = (PowerDomain.DEVICE_INSTANT, PowerDomain.DEVICE_AVERAGE)


def to_monotonic(unix: float) -> int:
    """Monotonic nanoseconds of Unix seconds, by the present offset of the clocks."""
    return monotonic_ns() - (time_ns() - round(unix * 1e9))


def to_unix(mono: int) -> float:
    """Unix seconds of monotonic nanoseconds, by the present offset of the clocks."""
    return (time_ns() - (monotonic_ns() - mono)) / 1e9


class GpuTimelines:
    """The agent's readings of the visible GPUs, from the construction to ``stop``.

    The base of Zeus's monitors of timelines.
    """

    read_devices: ClassVar[DeviceReader] = staticmethod(read_devices)

    def __init__(self, gpu_indices: list[int] | None, max_samples_per_gpu: int | None) -> None:
        if gpu_indices is not None and not gpu_indices:
            raise ValueError("gpu_indices is empty: name a GPU, or leave it out for all.")
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

    def _end(self) -> int:
        return monotonic_ns() if self._stopped is None else self._stopped

    def _period(self, start_time: float | None, end_time: float | None) -> tuple[int, int]:
        """The monotonic nanoseconds of the monitored part of a period in Unix seconds."""
        start = self._began if start_time is None else max(self._began, to_monotonic(start_time))
        end = self._end() if end_time is None else min(self._end(), to_monotonic(end_time))
        return start, end

    def _devices(self, start: int, end: int) -> dict[int, Device]:
        """The GPUs with their present readings in a period."""
        if self._stopped is None:
            sdk.registration.renew_if_due()  # the agent's readings would be a second apart
        ids = self._index.resolve().gpus
        found = self.read_devices(start, end, tuple(ids.values()), timeline=True)
        by_id = {device.id: device for device in found}
        return {i: by_id[key] for i, key in ids.items()}


class PowerMonitor(GpuTimelines):
    """The power of GPUs since its construction; signatures and units are those of Zeus.

    ``update_period`` is accepted and has no effect: the agent's interval applies. Only the newest
    ``max_samples_per_gpu`` values of a timeline are returned. GPUs may be of different models.
    """

    def __init__(
        self,
        gpu_indices: list[int] | None = None,
        update_period: float | None = None,
        max_samples_per_gpu: int | None = None,
        power_domains: list[PowerDomain | PowerDomainName] | None = None,
    ) -> None:
        if power_domains is not None and not power_domains:
            raise ValueError("power_domains is empty: name one, or leave it out for all.")
        self.update_period = update_period
        self.measurement_domains = [
            _measured(PowerDomain(domain)) for domain in power_domains or MEASURED_DOMAINS
        ]
        super().__init__(gpu_indices, max_samples_per_gpu)

    def get_power(
        self,
        time: float | None = None,
        power_domain: PowerDomain | PowerDomainName = PowerDomain.DEVICE_INSTANT,
    ) -> dict[int, float] | None:
        """Watts of each GPU, newest or at a Unix time; None without a reading of each."""
        self._check_monitored(power_domain)
        at = self._end() if time is None else to_monotonic(time)
        at = min(max(at, self._began), self._end())
        found = {i: newest_watts(one, at) for i, one in self._devices(at - NEWEST, at).items()}
        known = {i: watts for i, watts in found.items() if watts is not None}
        return known if len(known) == len(found) else None

    def _check_monitored(self, power_domain: PowerDomain | PowerDomainName) -> None:
        domain = PowerDomain(power_domain)
        if domain not in self.measurement_domains:
            names = ", ".join(one.value for one in self.measurement_domains)
            raise ValueError(
                f"Power domain {domain.value} is not monitored; monitored: {names}. Name it in "
                "power_domains at construction."
            )

    def get_energy(self, start_time: float, end_time: float) -> dict[int, float] | None:
        """Joules of each GPU between two Unix times."""
        period = to_monotonic(start_time), to_monotonic(end_time)
        figures = DeviceFigures(self.read_devices, self._index, "get_energy", period)
        return {i: device.joules or 0.0 for i, device in figures.gpus().items()}

    def get_power_timeline(
        self,
        power_domain: PowerDomain | PowerDomainName,
        gpu_index: int | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
    ) -> dict[int, Timeline]:
        """Unix times and watts of each GPU, in order: the time is the end of the mean."""
        self._check_monitored(power_domain)
        start, end = self._period(start_time, end_time)
        if end < start:
            return {i: [] for i in self.gpu_indices if gpu_index in (None, i)}
        offset = to_unix(0)
        return {
            i: [
                (offset + ended / 1e9, joules / (ended - began) * 1e9)
                for began, ended, joules in device.timeline
                if joules is not None and start <= ended <= end
            ][-self._most if self._most else 0 :]
            for i, device in self._devices(start, end).items()
            if gpu_index in (None, i)
        }

    def get_all_power_timelines(
        self,
        gpu_index: int | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
    ) -> dict[str, dict[int, Timeline]]:
        """``get_power_timeline`` of each monitored power."""
        return {
            domain.value: self.get_power_timeline(domain, gpu_index, start_time, end_time)
            for domain in self.measurement_domains
        }


def _measured(domain: PowerDomain) -> PowerDomain:
    if domain not in MEASURED_DOMAINS:
        raise ValueError(
            f"Power domain {domain.value} is not measured: the energy counter is that of the whole "
            "board. Ask for device_instant or device_average."
        )
    return domain


def newest_watts(device: Device, at: int) -> float | None:
    """The mean power of the newest step that has begun by a monotonic time; None without one."""
    for began, ended, joules in reversed(device.timeline):
        if joules is not None and began <= at:
            return joules / (ended - began) * 1e9
    return None


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
        known = self._samples(self._began - NEWEST_TEMPERATURE, self._end())
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


def main() -> None:
    """Measure GPUs until Ctrl-C: their energy, or their power again and again."""
    from argparse import ArgumentParser

    parser = ArgumentParser("python -m wattspan.compat.zeus.monitor", description=main.__doc__)
    parser.add_argument("figure", choices=("energy", "power"))
    parser.add_argument("--gpu-indices", nargs="+", type=int, help="all without it")
    parser.add_argument("--update-period", type=float, default=1.0, help="seconds (default: 1)")
    given = parser.parse_args()
    try:
        _measure(given.gpu_indices, given.update_period, shows_power=given.figure == "power")
    except MeasurementError as error:
        parser.error(str(error))


def _measure(indices: list[int] | None, period: float, *, shows_power: bool) -> None:
    energy, power = ZeusMonitor(indices, []), PowerMonitor(indices)
    energy.begin_window("whole", sync_execution=False)
    try:
        while True:
            sleep(period)
            if shows_power:
                watts = power.get_power() or {}
                shown = "  ".join(f"GPU {i}: {one:.1f} W" for i, one in watts.items())
                print(strftime("%X"), "", shown or "unknown", flush=True)  # noqa: T201 - a command
    except KeyboardInterrupt:
        whole = energy.end_window("whole", sync_execution=False)
        shown = "  ".join(f"GPU {i}: {one:.1f} J" for i, one in whole.gpu_energy.items())
        print(f"{whole.time:.3f} s  {shown}")  # noqa: T201
