"""``zeus.device``: the GPUs that are visible to the program, and CPU packages, by Zeus's methods.

Readings are the agent's. Limits and clocks are set by the capper for as long as this process runs;
nothing here writes to a device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic_ns
from typing import Any, NoReturn

from wattspan import sdk
from wattspan.compat.zeus.devices import DeviceIndex
from wattspan.compat.zeus.limits import (
    HeldLimits,
    ZeusBaseError,
    ZeusBaseGPUError,
    ZeusGPUNotSupportedError,
    held_limits,
)
from wattspan.compat.zeus.monitor import DeviceFigures
from wattspan.compat.zeus.power import NEWEST, NEWEST_TEMPERATURE, newest_watts
from wattspan.model import CapKey, Knob
from wattspan.sdk import MeasurementError, NotMeasuredError
from wattspan.sdk.client import Device, DeviceReader, read_devices


class ZeusGPUInitError(ZeusBaseGPUError):
    """No GPU is visible, or no agent answers."""


class ZeusGPUHeterogeneousError(ZeusBaseGPUError):
    """The GPUs are of different models."""


def _no(what: str, remedy: str) -> NoReturn:
    raise ZeusGPUNotSupportedError(f"{what}. {remedy}")


_PERSISTENCE = "Limits need no persistence mode here", "Use `nvidia-smi -pm 1`, as root."
_READ_AGAIN = "Read it again; `wattspan doctor` names the fault."
_MEMORY = "The clocks of GPU memory are not handled here", "Use `nvidia-smi -lmc`, as root."


class EnergySum:
    """Joules since the construction, by a function that reads those of a period."""

    def __init__(self) -> None:
        self._counted: tuple[int, float] = monotonic_ns(), 0.0  # replaced whole: needs no lock

    def total(self, read: Callable[[tuple[int, int]], float]) -> float:
        """Waits for the next reading. MeasurementError; the unknown time is read again later."""
        since, joules = self._counted
        period = since, monotonic_ns()
        try:
            joules += read(period)
        except NotMeasuredError:
            if period[1] - since > 3600 * 10**9:  # the agent forgets: count on from here
                self._counted = period[1], joules
            raise
        self._counted = period[1], joules
        return joules


class GPU:
    """One GPU as the program counts it. Power is in milliwatts, clocks are in megahertz."""

    def __init__(
        self,
        gpu_index: int,
        read: DeviceReader = read_devices,
        limits: HeldLimits = held_limits,
    ) -> None:
        self.gpu_index, self._read, self._limits = gpu_index, read, limits
        self._index = DeviceIndex(read, None, [])
        self._energy = EnergySum()

    def get_name(self) -> str:
        """The model."""
        return self._newest().model

    def get_power_management_limit_constraints(self) -> tuple[int, int]:
        """The lowest and the highest power limit."""
        return self._range()[:2]

    def get_power_management_limit(self) -> int:
        """The power limit that was set last."""
        return self._range()[2]

    def set_power_management_limit(self, power_limit_mw: int, block: bool = True) -> None:
        """Hold a power limit until the end of this process, or the reset.

        ZeusGPUNoPermissionError if the capper refuses, or keeps another limit in force.
        """
        self._limits.hold(self._key(Knob.GPU_POWER), power_limit_mw, block=block)

    def reset_power_management_limit(self, block: bool = True) -> None:
        """Let the capper restore the limit that this process has replaced."""
        self._limits.release(self._key(Knob.GPU_POWER))

    def set_persistence_mode(self, enabled: bool, block: bool = True) -> None:
        """ZeusGPUNotSupportedError, as the next ones."""
        _no(*_PERSISTENCE)

    def get_persistence_mode(self) -> bool:
        _no(*_PERSISTENCE)

    def get_supported_memory_clocks(self) -> list[int]:
        _no(*_MEMORY)

    def set_memory_locked_clocks(
        self, min_clock_mhz: int, max_clock_mhz: int, block: bool = True
    ) -> None:
        _no(*_MEMORY)

    def reset_memory_locked_clocks(self, block: bool = True) -> None:
        _no(*_MEMORY)

    def get_supported_graphics_clocks(self, memory_clock_mhz: int | None = None) -> list[int]:
        _no("The list of a GPU's clocks is not known here", "Use `nvidia-smi -q -d CLOCK`.")

    def set_gpu_locked_clocks(
        self, min_clock_mhz: int, max_clock_mhz: int, block: bool = True
    ) -> None:
        """Hold ``max_clock_mhz`` as the highest clock; otherwise as a power limit.

        ``min_clock_mhz`` has no effect: a capped GPU may always go lower.
        """
        self._limits.hold(self._key(Knob.GPU_CLOCK), max_clock_mhz, block=block)

    def reset_gpu_locked_clocks(self, block: bool = True) -> None:
        """Let the capper unlock the clocks that this process has locked."""
        self._limits.release(self._key(Knob.GPU_CLOCK))

    def get_average_power_usage(self) -> int:
        """The mean power between the two newest readings."""
        if (watts := newest_watts(self._newest(), monotonic_ns())) is None:
            raise NotMeasuredError(f"The power of GPU {self.gpu_index} is unknown. {_READ_AGAIN}")
        return round(watts * 1000)

    get_instant_power_usage = get_average_power_usage

    def get_average_memory_power_usage(self) -> int:
        _no("The power of GPU memory is not measured", "The counter is that of the whole board.")

    def supports_get_total_energy_consumption(self) -> bool:
        """True: the agent measures each GPU that it lists."""
        return True

    def get_total_energy_consumption(self) -> int:
        """Millijoules since the construction; waits for the next reading. MeasurementError."""
        name = f"GPU {self.gpu_index} since its last reading"

        def read(period: tuple[int, int]) -> float:
            figures = DeviceFigures(self._read, self._index, name, period)
            return figures.gpus()[self.gpu_index].joules or 0.0

        return round(1000 * self._energy.total(read))

    def get_gpu_temperature(self) -> int:
        """Degrees Celsius, of the last minute."""
        if not (known := self._newest(NEWEST_TEMPERATURE).temperatures):
            raise NotMeasuredError(
                f"The temperature of GPU {self.gpu_index} is unknown. {_READ_AGAIN}"
            )
        return known[-1][1]

    # --------------------------------------------------------------------------- inner workings

    def _newest(self, within: int = NEWEST) -> Device:
        sdk.registration.renew_if_due()  # the agent's readings would be a second apart
        now, key = monotonic_ns(), self._index.resolve().gpus[self.gpu_index]
        found: Device = self._read(now - within, now, (key,), timeline=True)[0]
        return found

    def _key(self, knob: Knob) -> CapKey:
        return CapKey(knob, self._index.resolve().gpus[self.gpu_index])

    def _range(self) -> tuple[int, int, int]:
        state = self._limits.row(self._key(Knob.GPU_POWER)).state
        if state.minimum is None or state.maximum is None or state.requested is None:
            _no(f"{state.name} does not give its power limit and range", "`wattspan caps status`.")
        return state.minimum, state.maximum, state.requested


# ------------------------------------------------------------------------------------- managers


class GPUs:
    """The GPUs that are visible to the program. Each method of ``GPU`` has its index first."""

    def __init__(
        self,
        ensure_homogeneous: bool = False,
        read: DeviceReader = read_devices,
        limits: HeldLimits = held_limits,
    ) -> None:
        self._index = DeviceIndex(read, None, [])
        self._one = functools.cache(functools.partial(GPU, read=read, limits=limits))
        models = {gpu.get_name() for gpu in self.gpus} if ensure_homogeneous else ()
        if len(models) > 1:
            names = ", ".join(sorted(models))
            raise ZeusGPUHeterogeneousError(f"GPUs are {names}: list one in CUDA_VISIBLE_DEVICES.")

    @property
    def gpus(self) -> Sequence[GPU]:
        """The GPUs in the order of the program. MeasurementError."""
        return [self._one(i) for i in self._index.resolve().gpus]

    def __len__(self) -> int:
        return len(self.gpus)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_") or not callable(method := getattr(GPU, name)):
            raise AttributeError(f"GPUs have no {name}")
        return lambda gpu_index, *rest, **options: method(self.gpus[gpu_index], *rest, **options)


@functools.cache
def get_gpus(ensure_homogeneous: bool = False) -> GPUs:
    """The GPUs that are visible to the program. ZeusGPUInitError."""
    try:
        if gpus := GPUs(ensure_homogeneous):
            return gpus
    except MeasurementError as error:
        raise ZeusGPUInitError(str(error)) from None
    raise ZeusGPUInitError("No GPU is visible to this program; see `wattspan doctor`.")


# ----------------------------------------------------------------------------------- processors


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
