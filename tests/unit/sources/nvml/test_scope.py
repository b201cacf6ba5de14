"""The counter of a superchip's module: the energy of its CPU is not the GPU's."""

from __future__ import annotations

from pathlib import Path

import pytest
from testbed.covers import cover_of, decided
from testbed.fake_nvml import FakeGpu, FakeNvml
from testbed.field import build_tree
from testbed.gpu_sessions import nvml_session

from wattspan.model import Domain, HwType, Provenance, Thing, ThingKind
from wattspan.ports import Batch, SourceContext
from wattspan.sources.nvml.device import NvmlSettings
from wattspan.testing import FakeDirectory, ManualClock

GRACE = Domain(
    "hwmon:grace", HwType.CPU, "Grace", "hwmon", Provenance.DERIVED, resource="cpu:0",
    measures=Thing(ThingKind.SOCKET, 0),
)  # fmt: skip


class Superchip:
    """A GPU of 400 W in a module of 550 W, and the session that reads it."""

    def __init__(self, energy: str = "auto", **facts: float | bool) -> None:
        self.clock = ManualClock()
        self.gpu = FakeGpu("GPU-a", name="NVIDIA GH200 480GB", watts=400.0, **facts)  # type: ignore[arg-type]
        self.nvml = FakeNvml(self.clock, self.gpu)
        context = SourceContext(self.clock, FakeDirectory(), nvml=self.nvml)
        settings = NvmlSettings(energy=energy)  # type: ignore[arg-type]
        self.session = nvml_session(self.nvml, settings, context, nested=False)

    def run(self, seconds: float) -> tuple[Batch, float | None]:
        """The last batch, and the watts that the readings of the time show."""
        readings = []
        for _ in range(round(seconds * 10)):
            self.clock.advance(0.1)
            batch = self.session.sample()
            readings += batch.readings
        same = [one for one in readings if one.epoch == readings[-1].epoch]
        elapsed = same[-1].at.mono - same[0].at.mono
        watts = (same[-1].counter - same[0].counter) * 1000 / elapsed if elapsed else None
        return batch, watts


def test_counter_of_the_module_gives_way_to_the_power_of_the_gpu() -> None:
    chip = Superchip(module_watts=150.0)
    batch, watts = chip.run(90)
    (domain,) = batch.domains
    assert watts == pytest.approx(400, rel=0.01)
    assert domain.provenance is Provenance.DERIVED
    assert "its energy counter is that of its module" in domain.why
    assert batch.failures == ()
    cover = decided((domain, GRACE))
    assert all(one.in_cover for one in cover.values())


def test_counter_that_fits_the_gpu_counts() -> None:
    chip = Superchip(module_watts=150.0, counts_module=False)
    chip.run(20)
    batch, watts = chip.run(20)
    assert watts == pytest.approx(400, rel=0.01)
    assert batch.domains[0].provenance is Provenance.MEASURED
    assert batch.domains[0].measures is None


def test_chosen_counter_of_a_module_contains_the_cpu_in_the_cover() -> None:
    batch, watts = Superchip("counter", module_watts=150.0).run(20)
    (domain,) = batch.domains
    assert watts == pytest.approx(550, rel=0.01)
    assert domain.measures == Thing(ThingKind.MODULE)
    assert domain.why == "the module with its CPU and memory, by its energy counter"
    cover = decided((domain, GRACE))
    assert cover[domain.id].in_cover
    assert not cover[GRACE.id].in_cover


def test_chosen_counters_of_two_modules_both_count(tmp_path: Path) -> None:
    files = {"devices/system/cpu/online": "0-1"}
    boards = []
    for socket, address in enumerate(("0009:01:00.0", "0019:01:00.0")):
        files[f"bus/pci/devices/{address}/local_cpulist"] = str(socket)
        files[f"devices/system/cpu/cpu{socket}/topology/physical_package_id"] = str(socket)
        boards.append(FakeGpu(f"GPU-{socket}", watts=400.0, module_watts=150.0, address=address))
    clock = ManualClock()
    nvml = FakeNvml(clock, *boards)
    context = SourceContext(clock, FakeDirectory(), sysfs=build_tree({"files": files}, tmp_path))
    session = nvml_session(nvml, NvmlSettings(energy="counter"), context, nested=False)
    for _ in range(20):
        clock.advance(0.1)
        domains = session.sample().domains
    assert [one.measures for one in domains] == [
        Thing(ThingKind.MODULE, 0), Thing(ThingKind.MODULE, 1)
    ]  # fmt: skip
    assert cover_of((*domains, GRACE)) == {one.id for one in domains}


def test_counter_without_any_power_of_the_gpu_is_taken_for_the_modules() -> None:
    chip = Superchip(module_watts=150.0)
    plain = chip.nvml.fields

    def only_the_module(gpu: FakeGpu, asked: list[int | tuple[int, int]]) -> object:
        chip.nvml.errors |= dict.fromkeys((185, 186), 0 if isinstance(asked[0], tuple) else 3)
        return plain(gpu, asked)

    chip.nvml.answers = {"nvmlDeviceGetFieldValues": lambda _, *args: only_the_module(*args)}
    chip.nvml.errors["nvmlDeviceGetPowerUsage"] = 3
    batch, watts = chip.run(20)
    assert watts == pytest.approx(550, rel=0.01)
    assert batch.domains[0].measures == Thing(ThingKind.MODULE)


@pytest.mark.parametrize("extra", [0.0, 2.0])
def test_board_without_a_module_counts_by_its_counter(extra: float) -> None:
    batch, _ = Superchip(module_watts=extra).run(20)
    assert batch.domains[0].provenance is Provenance.MEASURED
    assert batch.domains[0].measures is None
    assert batch.failures == ()


def test_spike_beyond_the_limits_leaves_the_scope_of_the_counter() -> None:
    chip = Superchip(module_watts=150.0, counts_module=False)
    before, _ = chip.run(30)
    chip.nvml.draw(chip.gpu, 1_600.0)
    spike, _ = chip.run(0.2)
    assert "power" in spike.failures[0].thing
    assert spike.domains == before.domains


def test_binding_without_scopes_reads_the_board() -> None:
    chip = Superchip()
    plain = chip.nvml.fields

    def old(gpu: FakeGpu, asked: list[int | tuple[int, int]]) -> object:
        if isinstance(asked[0], tuple):
            raise TypeError("an integer is required")
        return plain(gpu, asked)

    chip.nvml.answers = {"nvmlDeviceGetFieldValues": lambda _, *args: old(*args)}
    batch, _ = chip.run(5)
    assert batch.domains[0].provenance is Provenance.MEASURED
