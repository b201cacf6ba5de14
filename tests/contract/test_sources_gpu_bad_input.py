"""Faulty libraries and changing boards of both vendors, on emulated boards with known truth.

An older library lacks a function, a counter is in another unit, a board appears, and a board is
divided while it is read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pynvml
import pytest
from testbed.amd_boards import AmdFaults
from testbed.emulated_faults import GpuFaults
from testbed.gpu_sessions import amdsmi_session, nvml_session
from testbed.sampled_boards import SERVE, TRAIN, SampledBoards

from wattspan.attribution.ledger import Ledger, LedgerSettings
from wattspan.capper.actuators.gpu import GpuBoards, GpuClock, GpuPower
from wattspan.emulation import amdsmi as emulated_amdsmi
from wattspan.emulation import nvml as emulated_nvml
from wattspan.emulation.amdsmi import EmulatedAmdSmi
from wattspan.emulation.boards import H100, MI300X, EmulatedBoard
from wattspan.emulation.nvml import EmulatedNvml
from wattspan.emulation.workloads import SteadyLoad
from wattspan.model import HwType, Knob, Milliwatts, Provenance, Snapshot, Tick, Trouble
from wattspan.ports import ActuatorError, SlottedActuator, SourceContext
from wattspan.sources.amdsmi.device import AmdSmiSettings, AmdSmiVendor
from wattspan.sources.gpu.session import SETTLING
from wattspan.sources.nvml.device import NvmlSettings, NvmlVendor


class Library:
    """A driver's library without some functions, or with other answers of them.

    ``refusal`` is the error of a binding that knows a function which the library lacks; None: the
    binding lacks it too.
    """

    def __init__(self, real: Any, refusal: Exception | None = None) -> None:
        self._real, self._refusal = real, refusal
        self.missing: set[str] = set()
        self.replies: dict[str, Callable[[Any], Any]] = {}

    def __getattr__(self, name: str) -> Any:
        if name in self.missing:
            if self._refusal is None:
                raise AttributeError(name)
            return self._refuse
        true = getattr(self._real, name)
        if name not in self.replies:
            return true
        return lambda *arguments: self.replies[name](true(*arguments))

    def _refuse(self, *_: Any) -> Any:
        assert self._refusal is not None
        raise self._refusal


class Vendor(SampledBoards, ABC):
    """Two boards of a vendor, the source on them, and a ledger."""

    board: EmulatedBoard
    driver: str

    def __init__(self, directory: Path) -> None:
        super().__init__(directory / "gpus", [self.board, self.board])
        self.sysfs = directory / "sys"
        self.drivers = self.sysfs / "bus/pci/drivers" / self.driver
        self.drivers.mkdir(parents=True)
        self.context = SourceContext(
            self.clock, self.context.directory, emulated=True, sysfs=self.sysfs
        )
        self.library = self.open_library(directory / "gpus")
        self.session = self.open_session()
        idle = Milliwatts(self.board.silicon.idle)
        self.ledger = Ledger(LedgerSettings(idle_powers={HwType.GPU: idle}))

    @abstractmethod
    def open_library(self, path: Path) -> Library: ...

    @abstractmethod
    def open_session(self) -> Any: ...

    @abstractmethod
    def actuators(self) -> tuple[SlottedActuator, SlottedActuator]: ...

    @abstractmethod
    def scale_counter(self, factor: Fraction) -> None:
        """The counter of the library is ``factor`` times as large as in its documented unit."""

    @abstractmethod
    def divide(self, parts: int) -> None:
        """The first board is divided into so many parts of equal size; 0: not at all."""

    def follow(self, seconds: float) -> Snapshot:
        """Run the ledger too."""
        for _ in range(round(seconds * 10)):
            batch = self.run(0.1)
            self.ledger.apply(
                Tick(self.clock.now(), {"gpu": batch.domains}, batch.readings, (), batch.usages)
            )
        return self.ledger.snapshot(self.clock.now(), "host")


class Nvidia(Vendor):
    board, driver = H100, "nvidia"

    def open_library(self, path: Path) -> Library:
        missing = pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return Library(EmulatedNvml(path, self.clock), missing)

    def open_session(self) -> Any:
        return nvml_session(self.library, NvmlSettings(), self.context)

    def actuators(self) -> tuple[SlottedActuator, SlottedActuator]:
        boards = GpuBoards(NvmlVendor(self.library, self.clock))
        return GpuPower(boards, self.clock), GpuClock(boards, self.clock)

    def scale_counter(self, factor: Fraction) -> None:
        call = "nvmlDeviceGetTotalEnergyConsumption"
        self.library.replies[call] = lambda told: int(told * factor)

    def divide(self, parts: int) -> None:
        self.gpus.divide(0, {0: (), 2: (4, 3), 4: (3, 2, 1, 1)}[parts])


class Amd(Vendor):
    board, driver = MI300X, "amdgpu"

    def id(self, gpu: int) -> str:
        return f"gpu:0000:{0x60 + gpu:02x}:00.0"

    def open_library(self, path: Path) -> Library:
        return Library(EmulatedAmdSmi(path, self.clock))

    def open_session(self) -> Any:
        return amdsmi_session(self.library, AmdSmiSettings(), self.context)

    def actuators(self) -> tuple[SlottedActuator, SlottedActuator]:
        boards = GpuBoards(AmdSmiVendor(self.library, self.clock))
        return GpuPower(boards, self.clock), GpuClock(boards, self.clock)

    def scale_counter(self, factor: Fraction) -> None:
        def scaled(told: dict[str, Any]) -> dict[str, Any]:
            return {**told, "energy_accumulator": int(told["energy_accumulator"] * factor)}

        self.library.replies["amdsmi_get_energy_count"] = scaled

    def divide(self, parts: int) -> None:
        AmdFaults(self.gpus).divide(0, parts)


VENDORS: tuple[type[Vendor], ...] = (Nvidia, Amd)
NVML_FUNCTIONS = (
    *emulated_nvml._HOST_CALLS,
    *emulated_nvml._INSTANCE_CALLS,
    *emulated_nvml._GPU_CALLS,
    *("nvmlInit", "nvmlShutdown", "nvmlGpmSampleAlloc", "nvmlGpmSampleFree"),
)
AMD_FUNCTIONS = (
    *emulated_amdsmi._PART_CALLS,
    *emulated_amdsmi._GPU_CALLS,
    *("amdsmi_init", "amdsmi_shut_down", "amdsmi_get_processor_handles"),
)
FUNCTIONS = (
    *((Nvidia, name) for name in NVML_FUNCTIONS),
    *((Amd, name) for name in AMD_FUNCTIONS),
)
ESSENTIAL = {
    *("nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID"),
    *("nvmlDeviceGetName", "amdsmi_init", "amdsmi_get_processor_handles"),
    "amdsmi_get_gpu_device_bdf",
}
"""Functions without which no board is known."""
NEEDED_BY_ALL_CAPS = {
    *("nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetIndex", "nvmlDeviceGetName"),
    *("nvmlDeviceGetUUID", "amdsmi_init", "amdsmi_get_processor_handles"),
    "amdsmi_get_gpu_device_bdf",
}
NEEDED_BY = {
    Knob.GPU_POWER: {
        *("nvmlDeviceGetPowerManagementLimit", "nvmlDeviceSetPowerManagementLimit"),
        *("amdsmi_get_power_cap_info", "amdsmi_set_power_cap"),
    },
    Knob.GPU_CLOCK: {
        *("nvmlDeviceGetMaxClockInfo", "nvmlDeviceSetGpuLockedClocks"),
        *("amdsmi_get_clock_info", "amdsmi_get_gpu_perf_level"),
        "amdsmi_set_gpu_perf_determinism_mode",
    },
}


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[type[Vendor]], Vendor]]:
    hosts: list[Vendor] = []

    def open_host(vendor: type[Vendor]) -> Vendor:
        hosts.append(vendor(tmp_path))
        return hosts[-1]

    yield open_host
    for host in hosts:
        host.close()


Opening = Callable[[type[Vendor]], Vendor]


# ------------------------------------------------------------------------- an older library


@pytest.mark.parametrize(("vendor", "function"), FUNCTIONS)
def test_energy_is_measured_without_any_function_but_the_essential_ones(
    opened: Opening, vendor: type[Vendor], function: str
) -> None:
    host = opened(vendor)
    host.library.missing.add(function)
    host.gpus.attach(0, TRAIN.pid, SteadyLoad(0.5))
    host.run(1)
    begun, before = host.of(0)[-1:], host.gpus.truth(0).energy
    host.run(1.5)
    spent = host.gpus.truth(0).energy - before
    assert not any("unexpected" in failure.cause for failure in host.batch.failures)
    if function in ESSENTIAL:
        assert host.readings == []
        assert any(failure.trouble is Trouble.ABSENT for failure in host.batch.failures)
    else:
        assert host.of(0)[-1].counter - begun[0].counter == pytest.approx(spent, rel=0.02)


@pytest.mark.parametrize(("vendor", "function"), FUNCTIONS)
def test_caps_are_set_without_a_function_or_refused_with_the_cause(
    opened: Opening, vendor: type[Vendor], function: str
) -> None:
    host = opened(vendor)
    host.library.missing.add(function)
    host.clock.on_sleep = lambda _: host.gpus.step()
    for actuator, value in zip(host.actuators(), (600_000, 1500), strict=True):
        if function in NEEDED_BY_ALL_CAPS | NEEDED_BY[actuator.knob]:
            unknown = "no such GPU" if function == "amdsmi_get_gpu_device_bdf" else ""
            with pytest.raises(
                ActuatorError, match=unknown or "too old for the call. Inst"
            ) as told:
                actuator.write(host.id(0), value)
            assert told.value.trouble is Trouble.ABSENT
        else:
            assert actuator.write(host.id(0), value).requested == value
        actuator.close()


# -------------------------------------------------------------------------- devices come and go


@pytest.mark.parametrize("vendor", VENDORS)
def test_board_that_is_bound_while_another_is_read_is_measured(
    opened: Opening, vendor: type[Vendor]
) -> None:
    host = opened(vendor)
    (host.drivers / "0000:10:00.0").mkdir()
    host.gpus.file.header.gpus = 1
    host.run(10)
    assert [domain.id for domain in host.batch.domains] == [host.id(0)]
    (host.drivers / "0000:11:00.0").mkdir()
    host.run(10)  # the driver does not offer it yet
    host.gpus.file.header.gpus = 2
    host.run(SETTLING / 1e9)
    assert {reading.domain_id for reading in host.batch.readings} == {host.id(0), host.id(1)}
    assert {reading.epoch for reading in host.of(0)} == {0}  # no gap of the first one
    assert host.batch.failures == ()


# -------------------------------------------------------------------- devices without figures


def no_figures(host: Vendor) -> None:
    faults = GpuFaults(host.gpus)
    faults.no_energy_counter(0)
    faults.no_power(0)


FAULTS: tuple[tuple[type[Vendor], Callable[[Vendor], None], str], ...] = (
    (Nvidia, lambda host: GpuFaults(host.gpus).error(0, 15), "Xid"),
    (Nvidia, lambda host: GpuFaults(host.gpus).error(0, 16), "--gpu-reset"),
    (Nvidia, lambda host: GpuFaults(host.gpus).error(0, 28), "lspci"),
    (Nvidia, lambda host: GpuFaults(host.gpus).error(0, 4), "DeviceAllow"),
    (Nvidia, lambda host: GpuFaults(host.gpus).driver_error(9), "modprobe nvidia"),
    (Nvidia, lambda host: GpuFaults(host.gpus).driver_error(18), "reboot"),
    (Nvidia, no_figures, "virtual machine"),
    (Nvidia, lambda host: GpuFaults(host.gpus).no_processes(0), "unattributed"),
    (Amd, lambda host: GpuFaults(host.gpus).error(0, 31), "lspci"),
    (Amd, lambda host: GpuFaults(host.gpus).error(0, 10), "render and video"),
    (Amd, lambda host: GpuFaults(host.gpus).driver_error(34), "modprobe amdgpu"),
    (Amd, no_figures, "virtual machine"),
    (Amd, lambda host: GpuFaults(host.gpus).no_processes(0), "unattributed"),
)


@pytest.mark.parametrize(("vendor", "fault", "remedy"), FAULTS)
def test_device_without_figures_is_reported_with_the_remedy(
    opened: Opening, vendor: type[Vendor], fault: Callable[[Vendor], None], remedy: str
) -> None:
    """The findings of `wattspan doctor` are these failures."""
    host = opened(vendor)
    host.run(0.2)
    fault(host)
    host.run(2)
    assert host.batch.failures
    assert all(failure.cause and failure.remedy for failure in host.batch.failures)
    assert any(remedy in failure.remedy for failure in host.batch.failures)


# ------------------------------------------------------------------------------ other units


@pytest.mark.parametrize("vendor", VENDORS)
@pytest.mark.parametrize("factor", [Fraction(1, 1000), Fraction(1000)])
def test_counter_in_another_unit_is_replaced_by_integrated_power(
    opened: Opening, vendor: type[Vendor], factor: Fraction
) -> None:
    host = opened(vendor)
    host.scale_counter(factor)
    host.gpus.attach(0, TRAIN.pid, SteadyLoad(1.0))
    host.run(25)
    begun, before = host.of(0)[-1], host.gpus.truth(0).energy
    host.run(10)
    last = host.of(0)[-1]
    assert last.epoch == begun.epoch > 0
    spent = host.gpus.truth(0).energy - before
    assert last.counter - begun.counter == pytest.approx(spent, rel=0.02)
    (failure,) = (one for one in host.batch.failures if one.domain_id == host.id(0))
    assert failure.cause == "its energy differs from the power of the GPU"
    assert "integrated from its power" in host.batch.domains[0].why


def test_power_limit_in_watts_instead_of_microwatts_is_unknown(opened: Opening) -> None:
    host = opened(Amd)

    def in_watts(told: dict[str, int]) -> dict[str, int]:
        return {key: value // 1_000_000 for key, value in told.items()}

    host.library.replies["amdsmi_get_power_cap_info"] = in_watts
    host.run(2)
    limits = host.status(0).limits
    assert (limits.minimum, limits.maximum, limits.requested) == (None, None, None)
    power, _ = host.actuators()
    with pytest.raises(ActuatorError, match="does not support"):
        power.read(host.id(0))
    power.close()


# -------------------------------------------------------------------------- partition modes


@pytest.mark.parametrize("vendor", VENDORS)
def test_energy_is_conserved_through_changes_of_the_partition_mode(
    opened: Opening, vendor: type[Vendor]
) -> None:
    host = opened(vendor)
    host.gpus.attach(0, TRAIN.pid, SteadyLoad(0.6))
    host.follow(3)
    first, before = host.of(0)[0], host.gpus.truth(0).energy
    begun = host.of(0)[-1].counter
    for parts in (4, 0, 2, 4, 2, 0):
        host.divide(parts)
        host.follow(1.7)
        if parts == 4:
            host.gpus.attach(0, SERVE.pid, SteadyLoad(0.3))
        elif parts == 2:
            host.gpus.detach(0, SERVE.pid)
    host.gpus.detach(0, TRAIN.pid)
    snapshot = host.follow(6)
    last = host.of(0)[-1]
    assert last.epoch == first.epoch
    truth = host.gpus.truth(0).energy - before
    assert last.counter - begun == pytest.approx(truth, rel=0.01)
    accounts = {one.domain.id: one for one in snapshot.domains}
    board = accounts[host.id(0)]
    assert board.energy == board.consumers + board.idle + board.unattributed
    settled = last.counter - first.counter
    assert board.energy == pytest.approx(settled, rel=0.05)
    assert not board.gaps
    parts_of_it = [one for one in snapshot.domains if one.domain.parent == host.id(0)]
    assert sum(one.energy for one in parts_of_it) <= board.energy
    summed = [one for one in snapshot.domains if one.domain.in_cover]
    assert {one.domain.id for one in summed} == {host.id(0), host.id(1)}
    assert snapshot.provenance[HwType.GPU] is Provenance.EMULATED


@pytest.mark.parametrize("vendor", VENDORS)
def test_limit_stays_and_is_restored_through_changes_of_the_partition_mode(
    opened: Opening, vendor: type[Vendor]
) -> None:
    host = opened(vendor)
    host.clock.on_sleep = lambda _: host.gpus.step()
    power, _ = host.actuators()
    original = power.read(host.id(0)).requested
    assert power.write(host.id(0), 500_000).requested == 500_000
    for parts in (4, 2, 0):
        host.divide(parts)
        assert power.read(host.id(0)).requested == 500_000
        assert len(power.devices()) == 2  # one limit for the board, whatever its division
    assert power.write(host.id(0), original).requested == original
    power.close()
