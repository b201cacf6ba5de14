"""Guarantees of every actuator: the same for all actuators and hardware.

On a scripted NVML, on the emulated NVML and AMD SMI, on the real bindings over the emulated C
libraries, and on powercap trees with a kernel's behaviour behind them.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pynvml
import pytest
from testbed import amdsmi_library, lumen
from testbed.amd_boards import AmdFaults
from testbed.emulated_faults import FaultyPowercapTree, GpuFaults
from testbed.fake_actuators import FakeRapl, KnobNvml
from testbed.fake_nvml import FakeGpu
from testbed.gpu_boards import A40
from testbed.lumen import Pylumen
from testbed.nvml_library import ENVIRONMENT, build, loaded
from testbed.powercap_layouts import LAYOUTS

from wattspan.capper.actuators.cpu import CpuPower
from wattspan.capper.actuators.gpu import GpuBoards, GpuClock, GpuPower
from wattspan.capper.workers import open_actuators
from wattspan.clock import SystemClock
from wattspan.emulation.amdsmi import EmulatedAmdSmi
from wattspan.emulation.boards import H100, MI300X
from wattspan.emulation.gpus import EmulatedGpus
from wattspan.emulation.nvml import EmulatedNvml
from wattspan.model import CapKey, Knob, KnobState, Trouble
from wattspan.plugins import ACTUATORS, load_actuators
from wattspan.ports import Actuator, ActuatorError, Clock
from wattspan.sources.amdsmi.device import AmdSmiVendor
from wattspan.sources.nvml.device import NvmlVendor
from wattspan.testing import ManualClock


class Bench(ABC):
    """Two devices with an actuator, and faults of the first."""

    actuator: Actuator
    ids: tuple[str, str]
    lower: int  # a setting below the current one

    @abstractmethod
    def deny(self) -> None: ...

    @abstractmethod
    def lose(self, lost: bool) -> None: ...

    def close(self) -> None:
        self.actuator.close()

    @property
    def first(self) -> str:
        return self.ids[0]

    def state(self, place: int = 0) -> KnobState:
        return self.actuator.read(self.ids[place])


def actuator_of(knob: Knob, nvml: Any, clock: Clock) -> Actuator:
    boards = GpuBoards(NvmlVendor(nvml, clock))
    return GpuPower(boards, clock) if knob is Knob.GPU_POWER else GpuClock(boards, clock)


class FakeBench(Bench):
    def __init__(self, knob: Knob) -> None:
        clock = ManualClock()
        gpus = FakeGpu("GPU-a"), FakeGpu("GPU-b")
        for gpu in gpus:
            gpu.limits[190] = gpu.limits[192]
        self.nvml = KnobNvml(clock, *gpus)
        self.actuator = actuator_of(knob, self.nvml, clock)
        self.ids = ("gpu:GPU-a", "gpu:GPU-b")
        self.lower = 300_000 if knob is Knob.GPU_POWER else 1_200

    def deny(self) -> None:
        for setter in ("nvmlDeviceSetPowerManagementLimit", "nvmlDeviceSetGpuLockedClocks"):
            self.nvml.errors[setter, "GPU-a"] = 4

    def lose(self, lost: bool) -> None:
        self.nvml.errors["GPU-a"] = 15 if lost else 0


class EmulatedBench(Bench):
    def __init__(self, knob: Knob, path: Path, clock: Clock, nvml: Any = None) -> None:
        self.gpus = EmulatedGpus(path, [H100, A40], clock)
        if isinstance(clock, ManualClock):
            clock.on_sleep = lambda _: self.gpus.step()
        else:
            self.gpus.start()
        self.actuator = actuator_of(knob, nvml or EmulatedNvml(path, clock), clock)
        self.ids = (f"gpu:{self.gpus.uuid(0)}", f"gpu:{self.gpus.uuid(1)}")
        self.lower = 300_000 if knob is Knob.GPU_POWER else 1_200

    def deny(self) -> None:
        GpuFaults(self.gpus).no_permission(0)

    def lose(self, lost: bool) -> None:
        GpuFaults(self.gpus).lost(0, on=lost)

    def close(self) -> None:
        super().close()
        self.gpus.close()


class AmdBench(Bench):
    def __init__(self, knob: Knob, path: Path, clock: Clock, amdsmi: Any = None) -> None:
        self.gpus = EmulatedGpus(path, [MI300X, MI300X], clock)
        if isinstance(clock, ManualClock):
            clock.on_sleep = lambda _: self.gpus.step()
        else:
            self.gpus.start()
        boards = GpuBoards(AmdSmiVendor(amdsmi or EmulatedAmdSmi(path, clock), clock))
        self.actuator = (GpuPower if knob is Knob.GPU_POWER else GpuClock)(boards, clock)
        self.ids = ("gpu:0000:60:00.0", "gpu:0000:61:00.0")
        self.lower = 400_000 if knob is Knob.GPU_POWER else 1_200

    def deny(self) -> None:
        AmdFaults(self.gpus).no_permission(0)

    def lose(self, lost: bool) -> None:
        AmdFaults(self.gpus).lost(0, 31 if lost else 0)

    def close(self) -> None:
        super().close()
        self.gpus.close()


class PluginBench(Bench):
    """The vendor of GPUs in the guide to plugins, loaded by its entry point."""

    def __init__(self, knob: Knob, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = ManualClock()
        self.binding = Pylumen(clock)
        monkeypatch.setitem(sys.modules, "lumen_gpus", lumen.load(monkeypatch, self.binding))
        entry = EntryPoint("lumen", "lumen_gpus:actuators", ACTUATORS)
        plugins = load_actuators(["lumen"], lambda group: [entry] if group == ACTUATORS else [])
        opened = open_actuators([knob], clock=clock, sysfs=root, emulated=True, plugins=plugins)
        (self.actuator,) = opened
        self.ids = ("gpu:0000:0a:00.0", "gpu:0000:0b:00.0")
        self.lower = 300_000 if knob is Knob.GPU_POWER else 1_200

    def deny(self) -> None:
        self.binding.first.denied = True

    def lose(self, lost: bool) -> None:
        self.binding.first.status = 3 if lost else 0


class TreeBench(Bench):
    def __init__(self, root: Path) -> None:
        self.layout = LAYOUTS["xeon-2s"]
        self.tree = FaultyPowercapTree(root, self.layout, cpus=2)
        self.kernel = FakeRapl()
        self.actuator = CpuPower(root, ManualClock(), put=self.kernel.put)
        self.ids = ("rapl:package-0", "rapl:package-1")
        self.lower = 150_000

    def deny(self) -> None:
        self.kernel.refuses = 13  # EACCES

    def lose(self, lost: bool) -> None:
        zones = [zone for zone in self.layout.zones if zone.directory.startswith("intel-rapl:0")]
        if lost:
            self.tree.remove("intel-rapl:0")
        else:
            for zone in zones:
                self.tree.add(zone)

    def close(self) -> None:
        super().close()
        self.tree.close()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


def through_c(
    knob: Knob, path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bench]:
    """The installed binding, which finds the emulated C library by its SONAME."""
    monkeypatch.setenv(ENVIRONMENT, str(path))
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(pynvml, "_nvmlLib_refcount", 0)
    with loaded(request.getfixturevalue("library")):
        yield EmulatedBench(knob, path, SystemClock(), pynvml)


def benches() -> list[Any]:
    gpus = [
        pytest.param((knob, on), id=f"{knob}-{on}", marks=marks)
        for knob in (Knob.GPU_POWER, Knob.GPU_CLOCK)
        for on, marks in (("fake", ()), ("emulated", ()), ("c", pytest.mark.needs_cc))
    ]
    amd = [
        pytest.param((knob, on), id=f"{knob}-{on}", marks=marks)
        for knob in (Knob.GPU_POWER, Knob.GPU_CLOCK)
        for on, marks in (("amd", ()), ("amd-c", pytest.mark.needs_cc))
    ]
    plugin = [
        pytest.param((knob, "plugin"), id=f"{knob}-plugin")
        for knob in (Knob.GPU_POWER, Knob.GPU_CLOCK)
    ]
    return [*gpus, *amd, *plugin, pytest.param((Knob.CPU_POWER, "tree"), id="cpu_power-tree")]


@pytest.fixture(params=benches())
def bench(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bench]:
    knob, on = request.param
    if on == "c":
        for bench in through_c(knob, tmp_path / "gpus", request, monkeypatch):
            yield bench
            bench.close()
        return
    if on == "amd-c":
        monkeypatch.setenv(amdsmi_library.ENVIRONMENT, str(tmp_path / "gpus"))
    made = {
        "amd": lambda: AmdBench(knob, tmp_path / "gpus", ManualClock()),
        "amd-c": lambda: AmdBench(knob, tmp_path / "gpus", SystemClock(), amdsmi_library.load()),
        "fake": lambda: FakeBench(knob),
        "plugin": lambda: PluginBench(knob, tmp_path / "sys", monkeypatch),
        "emulated": lambda: EmulatedBench(knob, tmp_path / "gpus", ManualClock()),
        "tree": lambda: TreeBench(tmp_path / "sys"),
    }[on]()
    yield made
    made.close()


@pytest.fixture
def resets(bench: Bench) -> int | None:
    """Value that restores the original."""
    return None if bench.actuator.knob is Knob.GPU_CLOCK else bench.state().requested


def refused(bench: Bench, device: str, value: int | None) -> ActuatorError:
    with pytest.raises(ActuatorError) as caught:
        bench.actuator.write(device, value)
    return caught.value


# ------------------------------------------------------------------------------------ facts


def test_every_device_is_listed_under_the_id_of_its_domain(bench: Bench) -> None:
    keys = [state.key for state in bench.actuator.devices()]
    assert keys == [CapKey(bench.actuator.knob, device) for device in bench.ids]


def test_device_reading_matches_its_listing(bench: Bench) -> None:
    listed = bench.actuator.devices()
    assert listed == (bench.state(0), bench.state(1))
    assert all(state.name and state.aliases for state in listed)


def test_default_is_within_the_range(bench: Bench) -> None:
    state = bench.state()
    assert state.maximum is not None
    assert (state.minimum or 0) <= state.default <= state.maximum


def test_listing_and_reading_write_nothing(bench: Bench) -> None:
    before = bench.actuator.devices()
    for _ in range(3):
        bench.actuator.devices()
        bench.state()
    assert bench.actuator.devices() == before


# ----------------------------------------------------------------------------------- writing


def test_written_limit_is_read_back_as_requested_and_enforced(bench: Bench) -> None:
    answer = bench.actuator.write(bench.first, bench.lower)
    assert (answer.requested, answer.enforced) == (bench.lower, bench.lower)
    assert bench.state() == answer


def test_writing_one_device_leaves_the_other_alone(bench: Bench) -> None:
    other = bench.state(1)
    bench.actuator.write(bench.first, bench.lower)
    assert bench.state(1) == other


def test_range_does_not_move_with_the_setting(bench: Bench) -> None:
    before = bench.state()
    after = bench.actuator.write(bench.first, bench.lower)
    assert (after.minimum, after.default, after.maximum) == (
        before.minimum, before.default, before.maximum,
    )  # fmt: skip


def test_original_limit_is_restored(bench: Bench, resets: int | None) -> None:
    before = bench.state()
    bench.actuator.write(bench.first, bench.lower)
    assert bench.actuator.write(bench.first, resets) == before


def test_same_may_be_written_again(bench: Bench) -> None:
    first = bench.actuator.write(bench.first, bench.lower)
    assert bench.actuator.write(bench.first, bench.lower) == first


def test_invalid_limit_is_rejected_before_the_device(bench: Bench) -> None:
    before = bench.state()
    for value in (0, -1):
        assert refused(bench, bench.first, value).trouble is Trouble.MALFORMED
    assert bench.state() == before


def test_only_an_actuator_without_default_can_be_reset(bench: Bench) -> None:
    if bench.actuator.knob is Knob.GPU_CLOCK:
        assert bench.actuator.write(bench.first, None).requested is None
    else:
        assert refused(bench, bench.first, None).trouble is Trouble.MALFORMED


# ------------------------------------------------------------------------------------ trouble


def test_device_that_is_not_here_is_named(bench: Bench) -> None:
    for device in ("gpu:GPU-nowhere", "rapl:package-9", ""):
        error = refused(bench, device, bench.lower)
        assert error.trouble is Trouble.ABSENT
        assert device in str(error)


def test_missing_permission_is_reported_without_a_change(bench: Bench) -> None:
    before = bench.state()
    bench.deny()
    error = refused(bench, bench.first, bench.lower)
    assert error.trouble is Trouble.DENIED
    assert not error.locked
    assert before.name in str(error)
    assert "as root" in str(error)
    assert bench.state() == before


def test_lost_device_affects_only_itself(bench: Bench) -> None:
    bench.actuator.devices()
    bench.lose(True)
    assert [state.key.device for state in bench.actuator.devices()] == [bench.ids[1]]
    assert refused(bench, bench.first, bench.lower).trouble is Trouble.RETRY
    with pytest.raises(ActuatorError):
        bench.state()
    assert bench.state(1).key.device == bench.ids[1]


def test_returning_device_is_controlled_again(bench: Bench) -> None:
    bench.actuator.devices()
    bench.lose(True)
    refused(bench, bench.first, bench.lower)
    bench.lose(False)
    assert bench.actuator.write(bench.first, bench.lower).requested == bench.lower
    assert len(bench.actuator.devices()) == 2


def test_every_refusal_is_a_sentence_with_thing_cause_and_remedy(bench: Bench) -> None:
    bench.actuator.devices()
    errors = [refused(bench, "nothing", 5), refused(bench, bench.first, 0)]
    bench.deny()
    errors.append(refused(bench, bench.first, bench.lower))
    bench.lose(True)
    errors.append(refused(bench, bench.first, bench.lower))
    for error in errors:
        thing, cause = str(error).split(": ", 1)
        assert thing.startswith("Cannot ")
        assert len(cause.split(". ")) >= 2
        assert cause.endswith(".")


def test_closing_twice_is_closing(bench: Bench) -> None:
    bench.actuator.devices()
    bench.actuator.close()
    bench.actuator.close()
    assert len(bench.actuator.devices()) == 2


@pytest.mark.needs_cc
def test_emulated_host_without_gpus_never_gets_those_of_the_library_that_is_installed(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A demo on a GPU host would otherwise cap the host's own boards."""
    for bench in through_c(Knob.GPU_POWER, tmp_path / "gpus", request, monkeypatch):
        clock = SystemClock()
        assert open_actuators([Knob.GPU_POWER], sysfs=tmp_path, clock=clock, emulated=True) == ()
        (found,) = open_actuators([Knob.GPU_POWER], sysfs=tmp_path, clock=clock)
        assert found.devices() == bench.actuator.devices()
        found.close()
        bench.close()
