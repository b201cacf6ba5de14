"""``zeus.device.cpu`` and ``zeus.device.soc``: energies of CPU packages, by Zeus's methods."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from wattspan.compat.zeus.devices import DeviceIndex
from wattspan.compat.zeus.hardware import EnergySum
from wattspan.compat.zeus.limits import ZeusBaseError
from wattspan.compat.zeus.monitor import DeviceFigures
from wattspan.sdk import MeasurementError
from wattspan.sdk.client import Device, DeviceReader, read_devices


class ZeusBaseCPUError(ZeusBaseError):
    """The base of the errors of CPU packages."""


class ZeusCPUInitError(ZeusBaseCPUError):
    """No CPU package is measured, or no agent answers."""


class ZeusBaseSoCError(ZeusBaseError):
    """The base of the errors of systems on a chip."""


class ZeusSoCInitError(ZeusBaseSoCError):
    """There is no system on a chip by Zeus's methods."""


@dataclass
class CpuDramMeasurement:
    """Millijoules of a CPU package, and of its memory if that has a counter."""

    cpu_mj: float
    dram_mj: float | None = None

    def __sub__(self, other: CpuDramMeasurement) -> CpuDramMeasurement:
        memory = None
        if self.dram_mj is not None or other.dram_mj is not None:
            memory = (self.dram_mj or 0.0) - (other.dram_mj or 0.0)
        return CpuDramMeasurement(self.cpu_mj - other.cpu_mj, memory)

    def __truediv__(self, other: float) -> CpuDramMeasurement:
        memory = None if self.dram_mj is None else self.dram_mj / other
        return CpuDramMeasurement(self.cpu_mj / other, memory)


class CPU:
    """One CPU package."""

    def __init__(self, cpu_index: int, read: DeviceReader = read_devices) -> None:
        self.cpu_index, self._read = cpu_index, read
        self._index = DeviceIndex(read, [], [cpu_index])
        self._package, self._memory = EnergySum(), EnergySum()

    def get_total_energy_consumption(self) -> CpuDramMeasurement:
        """Energy since the construction; waits for the next reading. MeasurementError."""
        package = self._package.total(self._reader(DeviceFigures.packages))
        if not self.supports_get_dram_energy_consumption():
            return CpuDramMeasurement(1000 * package)
        memory = self._memory.total(self._reader(DeviceFigures.memory))
        return CpuDramMeasurement(1000 * package, 1000 * memory)

    def supports_get_dram_energy_consumption(self) -> bool:
        """True if the memory of the package has a counter. MeasurementError."""
        return self.cpu_index in self._index.resolve().memory

    def _reader(
        self, devices_of: Callable[[DeviceFigures], Mapping[int, Sequence[Device]]]
    ) -> Callable[[tuple[int, int]], float]:
        name = f"CPU {self.cpu_index} since its last reading"

        def read(period: tuple[int, int]) -> float:
            found = devices_of(DeviceFigures(self._read, self._index, name, period))
            return sum(one.joules or 0.0 for one in found[self.cpu_index])

        return read


class CPUs:
    """The CPU packages of the host. Each method of ``CPU`` has its index first."""

    def __init__(self, read: DeviceReader = read_devices) -> None:
        packages = DeviceIndex(read, [], None).resolve().packages
        self.cpus: Sequence[CPU] = [CPU(number, read) for number in packages]

    def __len__(self) -> int:
        return len(self.cpus)

    def get_total_energy_consumption(self, index: int) -> CpuDramMeasurement:
        return self.cpus[index].get_total_energy_consumption()

    def supports_get_dram_energy_consumption(self, index: int) -> bool:
        return self.cpus[index].supports_get_dram_energy_consumption()


@functools.cache
def get_cpus() -> CPUs:
    """The CPU packages of the host. ZeusCPUInitError."""
    try:
        if cpus := CPUs():
            return cpus
    except MeasurementError as error:
        raise ZeusCPUInitError(str(error)) from None
    raise ZeusCPUInitError("No CPU package is measured here; see `wattspan doctor`.")


def get_soc() -> NoReturn:
    """ZeusSoCInitError: the agent has the sensors of such a board as devices of the host."""
    raise ZeusSoCInitError(
        "No system on a chip is read by Zeus's methods here. Read `all_energy` of a window, which "
        "has the power sensors of a Jetson; boards of Apple are not measured."
    )
