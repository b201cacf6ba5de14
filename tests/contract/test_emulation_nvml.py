"""Contract of emulated NVML: of the product's ``EmulatedNvml`` and of the tests' C library.

The installed ``pynvml`` calls the C library, which it finds by its SONAME. Tests marked ``only_c``
call functions that third-party clients need and the product does not.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest
from testbed.emulated_faults import GpuFaults
from testbed.gpu_boards import A40, P100
from testbed.nvml_library import ENVIRONMENT, build, loaded

from wattspan.clock import SystemClock
from wattspan.emulation.boards import H100
from wattspan.emulation.gpu_engine import ProcessKind, Throttle
from wattspan.emulation.gpus import EmulatedGpus
from wattspan.emulation.nvml import EmulatedNvml
from wattspan.emulation.workloads import SteadyLoad
from wattspan.ports import Clock
from wattspan.testing import ManualClock

GIB = 1 << 30
TRAINER, RESIDENT, VIEWER = 4_000_001, 4_000_002, 4_000_003


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


_C = pytest.param("c", marks=pytest.mark.needs_cc)
only_c = pytest.mark.parametrize("implementation", [_C], indirect=True)


@pytest.fixture(params=["python", _C])
def implementation(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def clock(implementation: str, request: pytest.FixtureRequest) -> Clock:
    """The C library uses the host's clock only; the module takes any, so that tests do not wait."""
    if implementation == "c":
        request.getfixturevalue("library")  # built before time begins for the boards
        return SystemClock()
    return ManualClock()


@pytest.fixture
def gpus(tmp_path: Path, clock: Clock) -> Iterator[EmulatedGpus]:
    with EmulatedGpus(tmp_path / "gpus", [H100, A40, P100], clock) as gpus:
        yield gpus


@pytest.fixture
def nvml(
    implementation: str,
    request: pytest.FixtureRequest,
    gpus: EmulatedGpus,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Any]:
    """An NVML that was not initialised yet."""
    if implementation == "python":
        yield EmulatedNvml(gpus.path, clock)
        return
    monkeypatch.setenv(ENVIRONMENT, str(gpus.path))
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(pynvml, "_nvmlLib_refcount", 0)
    with loaded(request.getfixturevalue("library")):
        yield pynvml


@pytest.fixture
def begun(nvml: Any, gpus: EmulatedGpus) -> Iterator[Any]:
    nvml.nvmlInit()
    yield nvml
    GpuFaults(gpus).driver_error(0)
    nvml.nvmlShutdown()


@pytest.fixture
def h100(begun: Any) -> Any:
    return begun.nvmlDeviceGetHandleByIndex(0)


@pytest.fixture
def a40(begun: Any) -> Any:
    return begun.nvmlDeviceGetHandleByIndex(1)


@pytest.fixture
def p100(begun: Any) -> Any:
    return begun.nvmlDeviceGetHandleByIndex(2)


def code(call: Callable[..., Any], *arguments: Any) -> int:
    """The NVML error that a call raises."""
    with pytest.raises(pynvml.NVMLError) as caught:
        call(*arguments)
    return int(caught.value.value)


def fields(nvml: Any, handle: Any, *wanted: Any) -> dict[int, tuple[int, int, int]]:
    found = nvml.nvmlDeviceGetFieldValues(handle, list(wanted))
    return {f.fieldId: (f.nvmlReturn, f.valueType, f.value.ullVal) for f in found}


# --------------------------------------------------------------------------------- lifecycle


def test_calls_before_init_or_after_shutdown_are_uninitialized(nvml: Any) -> None:
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    nvml.nvmlInit()
    nvml.nvmlShutdown()
    assert nvml.nvmlDeviceGetCount() == 3
    nvml.nvmlShutdown()
    assert code(nvml.nvmlDeviceGetCount) == nvml.NVML_ERROR_UNINITIALIZED
    assert code(nvml.nvmlDeviceGetName, handle) == nvml.NVML_ERROR_UNINITIALIZED
    assert code(nvml.nvmlShutdown) == nvml.NVML_ERROR_UNINITIALIZED


def test_init_fails_until_the_driver_is_loaded(nvml: Any, gpus: EmulatedGpus) -> None:
    GpuFaults(gpus).driver_gone()
    with pytest.raises(pynvml.NVMLError_DriverNotLoaded):
        nvml.nvmlInit()
    GpuFaults(gpus).driver_gone(False)
    nvml.nvmlInit()
    GpuFaults(gpus).driver_gone()
    assert code(nvml.nvmlDeviceGetCount) == 9
    GpuFaults(gpus).driver_gone(False)
    nvml.nvmlShutdown()


def test_errors_are_the_binding_classes(begun: Any) -> None:
    with pytest.raises(pynvml.NVMLError_InvalidArgument) as caught:
        begun.nvmlDeviceGetHandleByIndex(3)
    assert str(caught.value) == "Invalid Argument"
    assert issubclass(begun.NVMLError_InvalidArgument, begun.NVMLError)
    assert begun.NVMLError is pynvml.NVMLError


@only_c
def test_versions_are_available(begun: Any) -> None:
    assert begun.nvmlErrorString(15) == "GPU is lost"
    assert begun.nvmlSystemGetDriverVersion() == "580.95.05"
    assert begun.nvmlSystemGetNVMLVersion() == "13.580.95.05"
    assert begun.nvmlSystemGetCudaDriverVersion() == 13000


@only_c
def test_call_that_is_not_emulated_is_not_supported(begun: Any, h100: Any) -> None:
    assert code(begun.nvmlDeviceGetFanSpeed, h100) == begun.NVML_ERROR_NOT_SUPPORTED
    assert code(begun.nvmlDeviceGetEccMode, h100) == begun.NVML_ERROR_NOT_SUPPORTED
    assert code(begun.nvmlGpmQueryIfStreamingEnabled, h100) == begun.NVML_ERROR_NOT_SUPPORTED


# ---------------------------------------------------------------------------------- identity


def test_gpus_have_real_names_and_emulated_uuids(begun: Any, gpus: EmulatedGpus) -> None:
    handles = [begun.nvmlDeviceGetHandleByIndex(index) for index in range(3)]
    names = [begun.nvmlDeviceGetName(handle) for handle in handles]
    assert names == ["NVIDIA H100 80GB HBM3", "NVIDIA A40", "Tesla P100-PCIE-16GB"]
    uuids = [begun.nvmlDeviceGetUUID(handle) for handle in handles]
    assert uuids == [gpus.uuid(index) for index in range(3)]
    assert uuids[1] == "GPU-e0e0e0e0-0000-4000-8000-000000000001"
    assert [begun.nvmlDeviceGetArchitecture(handle) for handle in handles] == [9, 7, 4]


@only_c
def test_gpu_is_found_by_uuid_serial_and_either_form_of_its_bus_id(begun: Any, a40: Any) -> None:
    pci = begun.nvmlDeviceGetPciInfo(a40)
    assert (pci.busId, pci.busIdLegacy) == ("00000000:11:00.0", "0000:11:00.0")
    assert (pci.domain, pci.bus, pci.device) == (0, 0x11, 0)
    found = [
        begun.nvmlDeviceGetHandleByUUID(begun.nvmlDeviceGetUUID(a40)),
        begun.nvmlDeviceGetHandleBySerial(begun.nvmlDeviceGetSerial(a40)),
        begun.nvmlDeviceGetHandleByPciBusId(pci.busId),
        begun.nvmlDeviceGetHandleByPciBusId(pci.busIdLegacy),
    ]
    assert [begun.nvmlDeviceGetIndex(handle) for handle in found] == [1, 1, 1, 1]
    assert begun.nvmlDeviceGetCudaComputeCapability(a40) == (8, 6)
    assert begun.nvmlDeviceGetBrand(a40) == begun.NVML_BRAND_NVIDIA
    assert code(begun.nvmlDeviceGetHandleByUUID, "GPU-0") == begun.NVML_ERROR_NOT_FOUND
    assert code(begun.nvmlDeviceGetHandleByPciBusId, "slot") == begun.NVML_ERROR_INVALID_ARGUMENT


# ---------------------------------------------------------------------------------- readings


def test_counter_shows_the_truth_in_millijoules_as_of_its_last_edge(
    begun: Any, gpus: EmulatedGpus, h100: Any
) -> None:
    gpus.attach(0, TRAINER, SteadyLoad())
    gpus.run(0.25)
    before = gpus.truth(0).energy
    shown = begun.nvmlDeviceGetTotalEnergyConsumption(h100)
    after = gpus.truth(0).energy
    step = 700 * 100_000  # microjoules in one step of the counter, at most
    assert (before - step) // 1000 <= shown <= after // 1000
    answers = fields(begun, h100, 83, 191)
    assert answers[83] == answers[191]
    assert answers[83][:2] == (0, begun.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG)
    assert answers[83][2] >= shown


def test_counter_advances_between_steps_of_the_owner(
    begun: Any, gpus: EmulatedGpus, clock: Clock, a40: Any
) -> None:
    gpus.step()
    first = begun.nvmlDeviceGetTotalEnergyConsumption(a40)
    clock.sleep_until(clock.monotonic() + 50_000_000)
    assert begun.nvmlDeviceGetTotalEnergyConsumption(a40) > first


def test_p100_has_no_counter_and_no_average(begun: Any, p100: Any) -> None:
    unsupported = begun.NVML_ERROR_NOT_SUPPORTED
    assert code(begun.nvmlDeviceGetTotalEnergyConsumption, p100) == unsupported
    answers = fields(begun, p100, 83, 185, 186)
    assert [answers[field][0] for field in (83, 185, 186)] == [3, 3, 0]
    assert begun.nvmlDeviceGetPowerUsage(p100) == 28_000


def test_power_and_limits_come_in_milliwatts(begun: Any, gpus: EmulatedGpus, h100: Any) -> None:
    answers = fields(begun, h100, 185, 186, 187, 188, 189, 190, 192)
    assert {field: value for field, (_, _, value) in answers.items()} == {
        185: 70_000, 186: 70_000, 187: 200_000, 188: 700_000, 189: 700_000, 190: 700_000,
        192: 700_000,
    }  # fmt: skip
    assert {kind for _, kind, _ in answers.values()} == {begun.NVML_VALUE_TYPE_UNSIGNED_INT}
    assert begun.nvmlDeviceGetPowerUsage(h100) == 70_000
    assert begun.nvmlDeviceGetPowerManagementLimitConstraints(h100) == [200_000, 700_000]
    assert begun.nvmlDeviceGetPowerManagementDefaultLimit(h100) == 700_000


def test_unknown_fields_and_other_scopes_fail_alone(begun: Any, h100: Any) -> None:
    found = begun.nvmlDeviceGetFieldValues(h100, [(185, 0), (185, 1), (185, 2), 1, 999, 190])
    assert [entry.nvmlReturn for entry in found] == [0, 3, 3, 3, 3, 0]
    assert [entry.scopeId for entry in found] == [0, 1, 2, 0, 0, 0]
    assert found[0].timestamp > 1_600_000_000_000_000  # Unix microseconds


def test_clocks_memory_and_temperature(begun: Any, gpus: EmulatedGpus, h100: Any) -> None:
    gpus.attach(0, TRAINER, SteadyLoad(), memory=10 * GIB)
    assert begun.nvmlDeviceGetClockInfo(h100, begun.NVML_CLOCK_SM) == 1980
    assert begun.nvmlDeviceGetClockInfo(h100, begun.NVML_CLOCK_MEM) == 2619
    assert begun.nvmlDeviceGetMaxClockInfo(h100, begun.NVML_CLOCK_GRAPHICS) == 1980
    assert begun.nvmlDeviceGetSupportedMemoryClocks(h100) == [2619]
    clocks = begun.nvmlDeviceGetSupportedGraphicsClocks(h100, 2619)
    assert (clocks[0], clocks[1], clocks[-1], len(clocks)) == (1980, 1965, 345, 110)
    memory = begun.nvmlDeviceGetMemoryInfo(h100)
    assert (memory.total, memory.used) == (80 * GIB, 10 * GIB + GIB // 2)
    assert begun.nvmlDeviceGetTemperature(h100, begun.NVML_TEMPERATURE_GPU) == 30


@only_c
def test_newer_calls_agree_with_older_ones(begun: Any, gpus: EmulatedGpus, h100: Any) -> None:
    gpus.attach(0, TRAINER, SteadyLoad(), memory=10 * GIB)
    memory = begun.nvmlDeviceGetMemoryInfo(h100)
    newer = begun.nvmlDeviceGetMemoryInfo(h100, begun.nvmlMemory_v2)
    assert (newer.used, newer.reserved, newer.free) == (10 * GIB, GIB // 2, memory.free)
    assert begun.nvmlDeviceGetTemperatureV(h100, begun.NVML_TEMPERATURE_GPU) == 30
    assert begun.nvmlDeviceGetPerformanceState(h100) == 0
    assert begun.nvmlDeviceGetComputeMode(h100) == 0


# --------------------------------------------------------------------------------- processes


def test_processes_are_listed_by_kind(begun: Any, gpus: EmulatedGpus, h100: Any) -> None:
    assert begun.nvmlDeviceGetComputeRunningProcesses(h100) == []
    gpus.attach(0, TRAINER, SteadyLoad(), memory=7 * GIB)
    gpus.attach(0, RESIDENT, SteadyLoad(0.0), memory=2 * GIB, kind=ProcessKind.MPS)
    gpus.attach(0, VIEWER, SteadyLoad(0.1), kind=ProcessKind.GRAPHICS)
    (compute,) = begun.nvmlDeviceGetComputeRunningProcesses(h100)
    assert (compute.pid, compute.usedGpuMemory) == (TRAINER, 7 * GIB)
    assert compute.gpuInstanceId == compute.computeInstanceId == 0xFFFFFFFF
    (graphics,) = begun.nvmlDeviceGetGraphicsRunningProcesses(h100)
    (mps,) = begun.nvmlDeviceGetMPSComputeRunningProcesses(h100)
    assert (graphics.pid, mps.pid) == (VIEWER, RESIDENT)


def test_only_processes_that_work_have_utilisation(
    begun: Any, gpus: EmulatedGpus, h100: Any
) -> None:
    gpus.attach(0, TRAINER, SteadyLoad(0.6))
    gpus.attach(0, RESIDENT, SteadyLoad(0.0))
    gpus.run(0.4)
    samples = begun.nvmlDeviceGetProcessUtilization(h100, 0)
    assert {sample.pid for sample in samples} == {TRAINER}
    assert 0 < max(sample.smUtil for sample in samples) <= 60
    newest = max(sample.timeStamp for sample in samples)
    assert code(begun.nvmlDeviceGetProcessUtilization, h100, newest) == begun.NVML_ERROR_NOT_FOUND
    assert len(begun.nvmlDeviceGetProcessUtilization(h100, newest - 1)) == 1
    assert 0 < begun.nvmlDeviceGetUtilizationRates(h100).gpu <= 60


@only_c
def test_size_query_of_a_non_empty_list_is_insufficient_size(
    begun: Any, gpus: EmulatedGpus, h100: Any
) -> None:
    """Fields hidden by pynvml: the first call of two, and an array that is too small."""
    gpus.attach(0, TRAINER, SteadyLoad())
    gpus.attach(0, RESIDENT, SteadyLoad(0.0))
    call = begun._nvmlGetFunctionPointer("nvmlDeviceGetComputeRunningProcesses_v3")
    count = ctypes.c_uint(0)
    assert call(h100, ctypes.byref(count), None) == begun.NVML_ERROR_INSUFFICIENT_SIZE
    assert count.value == 2
    short = (begun.c_nvmlProcessInfo_v3_t * 1)()
    count.value = 1
    assert call(h100, ctypes.byref(count), short) == begun.NVML_ERROR_INSUFFICIENT_SIZE
    assert count.value == 2


# ---------------------------------------------------------------------------------- controls


def test_limit_is_requested_at_once_and_enforced_a_little_later(
    begun: Any, gpus: EmulatedGpus, h100: Any
) -> None:
    gpus.attach(0, TRAINER, SteadyLoad())
    begun.nvmlDeviceSetPowerManagementLimit(h100, 400_000)
    assert begun.nvmlDeviceGetPowerManagementLimit(h100) == 400_000
    assert begun.nvmlDeviceGetEnforcedPowerLimit(h100) == 700_000
    gpus.run(0.15)
    assert begun.nvmlDeviceGetEnforcedPowerLimit(h100) == 400_000
    assert 345 < begun.nvmlDeviceGetClockInfo(h100, begun.NVML_CLOCK_SM) < 1980
    reasons = begun.nvmlDeviceGetCurrentClocksEventReasons(h100)
    assert reasons == pynvml.nvmlClocksEventReasonSwPowerCap
    gpus.run(0.05)
    assert fields(begun, h100, 74)[74][2] > 0


def test_limit_out_of_range_is_refused_and_changes_nothing(begun: Any, h100: Any) -> None:
    for milliwatts in (199_999, 700_001):
        with pytest.raises(pynvml.NVMLError_InvalidArgument):
            begun.nvmlDeviceSetPowerManagementLimit(h100, milliwatts)
    assert begun.nvmlDeviceGetPowerManagementLimit(h100) == 700_000


@only_c
def test_bindings_v2_setter_hides_a_refusal(begun: Any, gpus: EmulatedGpus, h100: Any) -> None:
    """A trap of the real binding, so a trap of the emulated one."""
    assert begun.nvmlDeviceSetPowerManagementLimit_v2(h100, 0, 300_000) == 0
    assert begun.nvmlDeviceGetPowerManagementLimit(h100) == 300_000
    assert begun.nvmlDeviceSetPowerManagementLimit_v2(h100, 0, 1) == 0
    assert begun.nvmlDeviceGetPowerManagementLimit(h100) == 300_000


def test_setters_need_permission(begun: Any, gpus: EmulatedGpus, h100: Any) -> None:
    GpuFaults(gpus).no_permission(0)
    for call, *arguments in (
        (begun.nvmlDeviceSetPowerManagementLimit, h100, 400_000),
        (begun.nvmlDeviceSetGpuLockedClocks, h100, 345, 900),
        (begun.nvmlDeviceResetGpuLockedClocks, h100),
    ):
        assert code(call, *arguments) == begun.NVML_ERROR_NO_PERMISSION
    GpuFaults(gpus).no_permission(0, False)
    begun.nvmlDeviceSetPowerManagementLimit(h100, 400_000)


def test_clocks_can_be_locked_and_unlocked(begun: Any, gpus: EmulatedGpus, h100: Any) -> None:
    gpus.attach(0, TRAINER, SteadyLoad())
    begun.nvmlDeviceSetGpuLockedClocks(h100, 345, 1001)
    gpus.run(0.15)
    assert begun.nvmlDeviceGetClockInfo(h100, begun.NVML_CLOCK_SM) == 990
    begun.nvmlDeviceResetGpuLockedClocks(h100)
    gpus.run(0.15)
    assert begun.nvmlDeviceGetClockInfo(h100, begun.NVML_CLOCK_SM) == 1980
    assert code(begun.nvmlDeviceSetGpuLockedClocks, h100, 900, 800) == 2


def test_p100_cannot_lock_its_clocks(begun: Any, p100: Any) -> None:
    assert code(begun.nvmlDeviceSetGpuLockedClocks, p100, 600, 900) == 3


@only_c
def test_persistence_mode_is_remembered(begun: Any, gpus: EmulatedGpus, h100: Any) -> None:
    begun.nvmlDeviceSetPersistenceMode(h100, 0)
    assert begun.nvmlDeviceGetPersistenceMode(h100) == 0
    GpuFaults(gpus).no_permission(0)
    assert code(begun.nvmlDeviceSetPersistenceMode, h100, 1) == begun.NVML_ERROR_NO_PERMISSION


def test_foreign_limit_and_outside_ceiling_are_visible(
    begun: Any, gpus: EmulatedGpus, h100: Any
) -> None:
    begun.nvmlDeviceSetPowerManagementLimit(h100, 400_000)
    GpuFaults(gpus).foreign_limit(0, 650_000)
    GpuFaults(gpus).enforce_at_most(0, 500_000)
    gpus.run(0.15)
    assert begun.nvmlDeviceGetPowerManagementLimit(h100) == 650_000
    assert begun.nvmlDeviceGetEnforcedPowerLimit(h100) == 500_000


# ------------------------------------------------------------------------------------ faults


def test_lost_gpu_does_not_affect_the_others(
    begun: Any, gpus: EmulatedGpus, h100: Any, a40: Any
) -> None:
    GpuFaults(gpus).lost(0)
    assert code(begun.nvmlDeviceGetPowerUsage, h100) == begun.NVML_ERROR_GPU_IS_LOST
    assert code(begun.nvmlDeviceGetName, h100) == begun.NVML_ERROR_GPU_IS_LOST
    assert code(begun.nvmlDeviceGetHandleByIndex, 0) == begun.NVML_ERROR_GPU_IS_LOST
    assert begun.nvmlDeviceGetPowerUsage(a40) > 0
    GpuFaults(gpus).lost(0, False)
    assert begun.nvmlDeviceGetPowerUsage(h100) > 0


def test_hanging_call_blocks_until_it_is_released(
    begun: Any, gpus: EmulatedGpus, h100: Any, a40: Any
) -> None:
    GpuFaults(gpus).hang(0)
    answers: list[int] = []
    thread = threading.Thread(target=lambda: answers.append(begun.nvmlDeviceGetPowerUsage(h100)))
    thread.start()
    assert begun.nvmlDeviceGetPowerUsage(a40) > 0
    thread.join(0.05)
    assert thread.is_alive()
    GpuFaults(gpus).hang(0, False)
    thread.join(10)
    assert answers == [70_000]


def test_reset_counter_starts_again(begun: Any, gpus: EmulatedGpus, h100: Any) -> None:
    gpus.run(0.25)
    shown = begun.nvmlDeviceGetTotalEnergyConsumption(h100)
    GpuFaults(gpus).reset_counter(0)
    assert begun.nvmlDeviceGetTotalEnergyConsumption(h100) < shown
    assert gpus.truth(0).energy // 1000 >= shown


def test_counters_can_be_unsupported_as_in_a_virtual_machine(
    begun: Any, gpus: EmulatedGpus, h100: Any
) -> None:
    GpuFaults(gpus).no_energy_counter(0)
    GpuFaults(gpus).no_power(0)
    GpuFaults(gpus).no_processes(0)
    for call, *arguments in (
        (begun.nvmlDeviceGetTotalEnergyConsumption, h100),
        (begun.nvmlDeviceGetPowerUsage, h100),
        (begun.nvmlDeviceGetComputeRunningProcesses, h100),
        (begun.nvmlDeviceGetProcessUtilization, h100, 0),
    ):
        assert code(call, *arguments) == begun.NVML_ERROR_NOT_SUPPORTED
    assert [entry[0] for entry in fields(begun, h100, 83, 185, 186, 190).values()] == [3, 3, 3, 0]


def test_mig_has_no_utilisation(begun: Any, gpus: EmulatedGpus, h100: Any) -> None:
    gpus.attach(0, TRAINER, SteadyLoad())
    gpus.attach(0, RESIDENT, SteadyLoad(0.0))
    gpus.run(0.2)
    assert begun.nvmlDeviceGetMigMode(h100) == [0, 0]
    GpuFaults(gpus).mig(0)
    assert begun.nvmlDeviceGetMigMode(h100) == [1, 1]
    assert code(begun.nvmlDeviceGetUtilizationRates, h100) == 3
    assert code(begun.nvmlDeviceGetProcessUtilization, h100, 0) == 3
    listed = begun.nvmlDeviceGetComputeRunningProcesses(h100)
    assert [(entry.pid, entry.gpuInstanceId) for entry in listed] == [(TRAINER, 1), (RESIDENT, 2)]


def test_mig_instances_have_separate_handles(
    begun: Any, gpus: EmulatedGpus, h100: Any, a40: Any
) -> None:
    gpus.divide(0, (3, 1))
    gpus.attach(0, TRAINER, SteadyLoad(), instance=2)
    assert begun.nvmlDeviceGetMaxMigDeviceCount(h100) == 7
    large, small = (begun.nvmlDeviceGetMigDeviceHandleByIndex(h100, index) for index in (0, 1))
    assert begun.nvmlDeviceGetUUID(small) == "MIG-e0e0e0e0-0000-4000-8000-000000000002"
    assert begun.nvmlDeviceGetName(large) == "NVIDIA H100 80GB HBM3 MIG 3g.40gb"
    assert begun.nvmlDeviceGetGpuInstanceId(large) == 1
    assert begun.nvmlDeviceGetComputeInstanceId(small) == 0
    attributes = begun.nvmlDeviceGetAttributes_v2(large)
    assert (attributes.gpuInstanceSliceCount, attributes.multiprocessorCount) == (3, 60)
    assert [p.pid for p in begun.nvmlDeviceGetComputeRunningProcesses(small)] == [TRAINER]
    assert begun.nvmlDeviceGetComputeRunningProcesses(large) == []
    assert code(begun.nvmlDeviceGetTotalEnergyConsumption, small) == 3
    assert code(begun.nvmlDeviceGetGpuInstanceId, h100) == 3
    assert code(begun.nvmlDeviceGetMigDeviceHandleByIndex, h100, 2) == 6
    assert code(begun.nvmlDeviceGetMigMode, a40) == 3
    gpus.divide(0, ())
    assert code(begun.nvmlDeviceGetMigDeviceHandleByIndex, h100, 0) == 6
    assert code(begun.nvmlDeviceGetAttributes_v2, large) == 6


@only_c
def test_mig_handle_names_its_device(begun: Any, gpus: EmulatedGpus, h100: Any) -> None:
    gpus.divide(0, (1,))
    instance = begun.nvmlDeviceGetMigDeviceHandleByIndex(h100, 0)
    assert begun.nvmlDeviceIsMigDeviceHandle(instance).value == 1
    assert begun.nvmlDeviceIsMigDeviceHandle(h100).value == 0
    parent = begun.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(instance)
    assert begun.nvmlDeviceGetIndex(parent) == 0


def activity(begun: Any, first: Any, second: Any) -> list[tuple[int, float]]:
    asked = begun.c_nvmlGpmMetricsGet_t()
    asked.version, asked.numMetrics = begun.NVML_GPM_METRICS_GET_VERSION, 2
    asked.sample1, asked.sample2 = first, second
    asked.metrics[0].metricId = begun.NVML_GPM_METRIC_SM_UTIL
    asked.metrics[1].metricId = begun.NVML_GPM_METRIC_DRAM_BW_UTIL
    begun.nvmlGpmMetricsGet(asked)
    return [(metric.nvmlReturn, metric.value) for metric in asked.metrics[:2]]


def test_activity_of_an_instance_is_relative_to_its_size(
    begun: Any, gpus: EmulatedGpus, h100: Any
) -> None:
    gpus.divide(0, (3, 1))
    gpus.attach(0, TRAINER, SteadyLoad(0.25), instance=1)
    assert begun.nvmlGpmQueryDeviceSupport(h100).isSupportedDevice == 1
    samples = [begun.nvmlGpmSampleAlloc() for _ in range(4)]
    for pair in (samples[:2], samples[2:]):
        gpus.run(0.1)
        for instance, sample in zip((1, 2), pair, strict=True):
            begun.nvmlGpmMigSampleGet(h100, instance, sample)
    assert activity(begun, samples[0], samples[2]) == [(0, pytest.approx(25, abs=1e-3)), (3, 0)]
    assert activity(begun, samples[1], samples[3])[0] == (0, 0)
    assert code(activity, begun, samples[2], samples[0]) == begun.NVML_ERROR_INVALID_ARGUMENT
    assert code(begun.nvmlGpmMigSampleGet, h100, 3, samples[0]) == begun.NVML_ERROR_NOT_FOUND
    for sample in samples:
        begun.nvmlGpmSampleFree(sample)


def test_activity_is_not_supported_before_hopper(
    begun: Any, gpus: EmulatedGpus, h100: Any, a40: Any
) -> None:
    gpus.divide(0, (1,))
    sample = begun.nvmlGpmSampleAlloc()
    assert begun.nvmlGpmQueryDeviceSupport(a40).isSupportedDevice == 0
    assert code(begun.nvmlGpmMigSampleGet, a40, 1, sample) == begun.NVML_ERROR_NOT_SUPPORTED
    GpuFaults(gpus).no_activity(0)
    assert begun.nvmlGpmQueryDeviceSupport(h100).isSupportedDevice == 0
    assert code(begun.nvmlGpmMigSampleGet, h100, 1, sample) == begun.NVML_ERROR_NOT_SUPPORTED


def test_throttling_is_counted_by_its_reason(begun: Any, gpus: EmulatedGpus, h100: Any) -> None:
    gpus.attach(0, TRAINER, SteadyLoad())
    GpuFaults(gpus).throttle(0, Throttle.HW_THERMAL, 1200)
    gpus.run(0.15)
    reasons = begun.nvmlDeviceGetCurrentClocksEventReasons(h100)
    assert reasons == pynvml.nvmlClocksEventReasonHwThermalSlowdown | 0x8
    answers = fields(begun, h100, 269, 270, 271)
    assert answers[270][2] > 0
    assert answers[269][2] == answers[271][2] == 0


@only_c
def test_event_wait_times_out_without_an_xid(begun: Any, gpus: EmulatedGpus, h100: Any) -> None:
    watched = begun.nvmlEventSetCreate()
    assert begun.nvmlDeviceGetSupportedEventTypes(h100) == begun.nvmlEventTypeXidCriticalError
    begun.nvmlDeviceRegisterEvents(h100, begun.nvmlEventTypeXidCriticalError, watched)
    assert code(begun.nvmlEventSetWait_v2, watched, 1) == begun.NVML_ERROR_TIMEOUT
    GpuFaults(gpus).xid(0, 79)
    event = begun.nvmlEventSetWait_v2(watched, 1000)
    assert (event.eventType, event.eventData) == (begun.nvmlEventTypeXidCriticalError, 79)
    assert begun.nvmlDeviceGetIndex(event.device) == 0
    assert code(begun.nvmlEventSetWait_v2, watched, 1) == begun.NVML_ERROR_TIMEOUT
    begun.nvmlEventSetFree(watched)
