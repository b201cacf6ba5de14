"""Owners of emulated GPUs: files, processes that come and go, faults, and invalid input."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed.emulated_faults import GpuFaults
from testbed.gpu_boards import A40, BOARDS, H200
from testbed.nvml_library import build, environment, layout_header, loaded, symbols
from testbed.waiting import eventually

from wattspan.clock import SystemClock
from wattspan.emulation.boards import H100
from wattspan.emulation.gpu_file import EmulationError, GpuFile, HostRecord, TornStateError
from wattspan.emulation.gpus import EmulatedGpus
from wattspan.emulation.nvml import EmulatedNvml
from wattspan.emulation.workloads import SteadyLoad, Training
from wattspan.testing import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def gpus(tmp_path: Path, clock: ManualClock) -> Iterator[EmulatedGpus]:
    with EmulatedGpus(tmp_path / "gpus", [H100, H200], clock) as gpus:
        yield gpus


def test_host_gpus_have_known_models(tmp_path: Path, clock: ManualClock) -> None:
    with pytest.raises(EmulationError, match="1 to 16"):
        EmulatedGpus(tmp_path / "gpus", [], clock)


def test_file_that_holds_no_gpus_is_named(tmp_path: Path) -> None:
    missing, foreign = tmp_path / "missing", tmp_path / "foreign"
    foreign.write_text("hello")
    with pytest.raises(EmulationError, match="missing: No such file"):
        GpuFile(missing)
    with pytest.raises(EmulationError, match="start the emulated host again"):
        GpuFile(foreign)


def test_file_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "gpus"
    path.write_bytes(bytes(HostRecord()))
    with pytest.raises(EmulationError, match="of this version"):
        GpuFile(path)


def test_missing_file_means_driver_not_loaded(tmp_path: Path) -> None:
    nvml = EmulatedNvml(tmp_path / "gpus", ManualClock())
    with pytest.raises(nvml.NVMLError_DriverNotLoaded):
        nvml.nvmlInit()


def test_emulated_module_leaves_the_real_one_alone(gpus: EmulatedGpus) -> None:
    import pynvml

    nvml, loaded = EmulatedNvml(gpus.path, ManualClock()), pynvml.nvmlLib
    nvml.nvmlInit()
    assert pynvml.nvmlLib is loaded
    assert nvml.NVML_CLOCK_SM == pynvml.NVML_CLOCK_SM
    assert not hasattr(nvml, "nvmlDeviceGetRainfall")


def test_two_clients_see_the_same_gpu(gpus: EmulatedGpus, clock: ManualClock) -> None:
    one, other = EmulatedNvml(gpus.path, clock), EmulatedNvml(gpus.path, clock)
    one.nvmlInit()
    other.nvmlInit()
    one.nvmlDeviceSetPowerManagementLimit(one.nvmlDeviceGetHandleByIndex(0), 300_000)
    handle = other.nvmlDeviceGetHandleByIndex(0)
    assert other.nvmlDeviceGetPowerManagementLimit(handle) == 300_000


def test_memory_and_places_are_limited(gpus: EmulatedGpus) -> None:
    gpus.attach(0, 1, SteadyLoad(), memory=79 << 30)
    with pytest.raises(ValueError, match="too little memory"):
        gpus.attach(0, 2, SteadyLoad(), memory=2 << 30)
    for pid in range(2, 65):
        gpus.attach(0, pid, SteadyLoad(0.0), memory=0)
    with pytest.raises(ValueError, match="64 processes"):
        gpus.attach(0, 100, SteadyLoad(0.0), memory=0)


def test_truth_includes_energy_until_now(gpus: EmulatedGpus, clock: ManualClock) -> None:
    gpus.attach(0, 7, SteadyLoad())
    clock.advance(2)
    assert gpus.truth(0).processes == {7: 1_118_000_000}


def test_cap_slows_progress_less_than_it_saves_power(
    gpus: EmulatedGpus, clock: ManualClock
) -> None:
    gpus.attach(0, 7, Training(step=0.01, host=0.0))
    gpus.run(10)
    free, steps = gpus.truth(0), gpus.work_log(0, 7).units
    GpuFaults(gpus).foreign_limit(0, 450_000)
    gpus.run(1)
    start, before = gpus.truth(0), gpus.work_log(0, 7).units
    gpus.run(10)
    capped = gpus.truth(0)
    slowdown = steps / (gpus.work_log(0, 7).units - before)
    energy = (capped.energy - start.energy) / free.energy
    assert 1.0 < slowdown < 1.25
    assert energy < 0.75


def test_process_that_ends_leaves_its_gpu(tmp_path: Path) -> None:
    with EmulatedGpus(tmp_path / "gpus", [A40], SystemClock()) as gpus:
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        gpus.attach(0, child.pid, SteadyLoad(), until_exit=True)
        gpus.attach(0, os.getpid(), SteadyLoad(0.0), until_exit=True)
        gpus.start(0.01)
        child.communicate(b"\n")
        eventually(lambda: len(gpus.state(0).tenants) == 1, "the exit to be noticed")
        assert [tenant.pid for tenant in gpus.state(0).tenants] == [os.getpid()]
        assert gpus.truth(0).processes[child.pid] > 0


def test_owner_that_died_while_writing_is_noticed(
    gpus: EmulatedGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = GpuFile(gpus.path)
    file.record(0).sequence += 1
    monkeypatch.setattr("wattspan.emulation.gpu_file._READ_TIMEOUT", 0.01)
    with pytest.raises(TornStateError, match="half written"):
        file.read(0, ManualClock().monotonic)
    nvml = EmulatedNvml(gpus.path, ManualClock())
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    with pytest.raises(nvml.NVMLError_Unknown):
        nvml.nvmlDeviceGetPowerUsage(handle)
    gpus.step()
    assert nvml.nvmlDeviceGetPowerUsage(handle) > 0


def test_missing_compiler_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(EmulationError, match="EmulatedNvml, which needs none"):
        build(tmp_path, compiler="no-such-compiler")


@pytest.mark.needs_cc
def test_library_exports_every_symbol_under_the_real_soname(tmp_path: Path) -> None:
    library = build(tmp_path / "lib")
    with loaded(library) as functions:
        assert [name for name in symbols() if not hasattr(functions, name)] == []
    assert b"libnvidia-ml.so.1\0" in library.read_bytes()
    assert environment(library, tmp_path / "gpus")["LD_LIBRARY_PATH"] == str(tmp_path / "lib")


def test_library_exports_both_symbols_of_nvitops_process_struct_or_neither() -> None:
    pair = {"nvmlDeviceGetConfComputeMemSizeInfo", "nvmlDeviceGetRunningProcessDetailList"}
    assert pair & symbols() in (pair, set())


def test_c_header_asserts_every_offset() -> None:
    header = layout_header()
    assert f"sizeof(struct HostRecord) == {ctypes.sizeof(HostRecord)}" in header
    assert "offsetof(struct Live, sample)" in header


def test_every_board_has_room_for_its_own_limits() -> None:
    for board in BOARDS.values():
        low, default, high = board.limits
        assert low <= default <= high
        assert board.silicon.idle < low
