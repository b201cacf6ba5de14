"""Contract of emulated AMD SMI: of the product's ``EmulatedAmdSmi`` and of the tests' C library.

The ``amdsmi`` package from PyPI calls the C library.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from testbed import amdsmi_library
from testbed.amd_boards import AmdFaults

from wattspan.clock import SystemClock
from wattspan.emulation.amdsmi import EmulatedAmdSmi
from wattspan.emulation.boards import H100, MI300X
from wattspan.emulation.gpu_engine import ProcessKind
from wattspan.emulation.gpu_file import ENERGY_UNIT, EmulationError
from wattspan.emulation.gpus import EmulatedGpus
from wattspan.emulation.workloads import SteadyLoad
from wattspan.ports import Clock
from wattspan.testing import ManualClock

WORKER, VIEWER = 4_000_001, 4_000_002

_C = pytest.param("c", marks=pytest.mark.needs_cc)


@pytest.fixture(params=["python", _C])
def implementation(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def clock(implementation: str) -> Clock:
    """The C library uses the host's clock only; the module takes any, so that tests do not wait."""
    if implementation == "c":
        amdsmi_library.load()  # built before time begins for the boards
        return SystemClock()
    return ManualClock()


@pytest.fixture
def gpus(tmp_path: Path, clock: Clock) -> Iterator[EmulatedGpus]:
    with EmulatedGpus(tmp_path / "gpus", [MI300X, MI300X], clock) as gpus:
        yield gpus


@pytest.fixture
def faults(gpus: EmulatedGpus) -> AmdFaults:
    return AmdFaults(gpus)


@pytest.fixture
def smi(
    implementation: str, gpus: EmulatedGpus, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """An AMD SMI that was not initialised yet."""
    smi: Any = EmulatedAmdSmi(gpus.path, clock)
    if implementation == "c":
        monkeypatch.setenv(amdsmi_library.ENVIRONMENT, str(gpus.path))
        smi = amdsmi_library.load()
    yield smi
    AmdFaults(gpus).driver_error(0)
    for _ in range(3):
        try:
            smi.amdsmi_shut_down()
        except smi.AmdSmiLibraryException:
            break


@pytest.fixture
def begun(smi: Any) -> Any:
    smi.amdsmi_init()
    return smi


@pytest.fixture
def board(begun: Any) -> Any:
    return begun.amdsmi_get_processor_handles()[0]


def code(smi: Any, call: str, *arguments: Any) -> int:
    """The status code of the error that a call raises."""
    with pytest.raises(smi.AmdSmiLibraryException) as caught:
        getattr(smi, call)(*arguments)
    return int(caught.value.get_error_code())


# --------------------------------------------------------------------------------- lifecycle


def test_calls_before_init_and_after_shutdown_are_not_initialised(smi: Any) -> None:
    assert code(smi, "amdsmi_get_processor_handles") == 32
    smi.amdsmi_init()
    (handle, _) = smi.amdsmi_get_processor_handles()
    smi.amdsmi_shut_down()
    assert code(smi, "amdsmi_get_processor_handles") == 32
    assert code(smi, "amdsmi_get_gpu_device_bdf", handle) == 32
    assert code(smi, "amdsmi_shut_down") == 32


def test_init_fails_until_the_driver_is_loaded(smi: Any, faults: AmdFaults) -> None:
    faults.driver_error(34)
    assert code(smi, "amdsmi_init") == 34
    faults.driver_error(0)
    smi.amdsmi_init()


def test_boards_are_told_by_address_identity_and_driver(begun: Any) -> None:
    handles = begun.amdsmi_get_processor_handles()
    addresses = [begun.amdsmi_get_gpu_device_bdf(handle) for handle in handles]
    assert addresses == ["0000:60:00.0", "0000:61:00.0"]
    uuids = {begun.amdsmi_get_gpu_device_uuid(handle) for handle in handles}
    assert uuids == {f"e0e0e0e0-0000-1000-8000-{index:012x}" for index in (0, 1)}
    asic = begun.amdsmi_get_gpu_asic_info(handles[0])
    assert (asic["market_name"], asic["vendor_id"]) == (MI300X.name, "0x1002")
    assert asic["num_compute_units"] == 304
    assert begun.amdsmi_get_gpu_driver_info(handles[0])["driver_version"] == "6.14.14"


def test_board_that_is_gone_is_not_found_by_an_initialisation(smi: Any, faults: AmdFaults) -> None:
    faults.lost(0)
    smi.amdsmi_init()
    (handle,) = smi.amdsmi_get_processor_handles()
    assert smi.amdsmi_get_gpu_device_bdf(handle) == "0000:61:00.0"


def test_lost_board_answers_with_its_error(begun: Any, board: Any, faults: AmdFaults) -> None:
    faults.lost(0, 31)
    assert code(begun, "amdsmi_get_energy_count", board) == 31


def test_hanging_call_returns_when_the_board_answers(
    begun: Any, board: Any, faults: AmdFaults
) -> None:
    faults.hang(0)
    answered = threading.Event()

    def ask() -> None:
        begun.amdsmi_get_energy_count(board)
        answered.set()

    thread = threading.Thread(target=ask)
    thread.start()
    assert not answered.wait(0.05)
    faults.hang(0, on=False)
    assert answered.wait(10)
    thread.join()


# --------------------------------------------------------------------------------- partitions


@pytest.mark.parametrize(("count", "mode"), [(2, "DPX"), (4, "QPX"), (8, "CPX")])
def test_divided_board_has_a_handle_for_each_partition(
    smi: Any, faults: AmdFaults, count: int, mode: str
) -> None:
    faults.divide(0, count)
    smi.amdsmi_init()
    handles = smi.amdsmi_get_processor_handles()
    assert len(handles) == count + 1
    addresses = [smi.amdsmi_get_gpu_device_bdf(handle) for handle in handles[:count]]
    assert addresses == [f"0000:60:00.{function}" for function in range(count)]
    assert smi.amdsmi_get_gpu_compute_partition(handles[0]) == mode
    assert smi.amdsmi_get_gpu_compute_partition(handles[-1]) == "SPX"


def test_first_partition_alone_answers_for_the_board(
    smi: Any, gpus: EmulatedGpus, faults: AmdFaults
) -> None:
    faults.divide(0, 2)
    gpus.attach(0, WORKER, SteadyLoad(0.5))
    gpus.attach(0, VIEWER, SteadyLoad(0.25))
    smi.amdsmi_init()
    first, second, _ = smi.amdsmi_get_processor_handles()
    smi.amdsmi_get_energy_count(first)
    for call in ("energy_count", "power_info", "power_cap_info"):
        assert code(smi, f"amdsmi_get_{call}", second) == 2
    pids = [
        [process["pid"] for process in smi.amdsmi_get_gpu_process_list(handle)]
        for handle in (first, second)
    ]
    assert pids == [[WORKER], [VIEWER]]


def test_handle_of_a_former_partition_is_not_found(smi: Any, faults: AmdFaults) -> None:
    faults.divide(0, 4)
    smi.amdsmi_init()
    last = smi.amdsmi_get_processor_handles()[3]
    faults.divide(0, 2)
    assert code(smi, "amdsmi_get_gpu_activity", last) == 31


# ---------------------------------------------------------------------------------- readings


def test_accumulator_times_resolution_is_the_energy(
    begun: Any, board: Any, gpus: EmulatedGpus
) -> None:
    gpus.attach(0, WORKER, SteadyLoad(1.0))
    gpus.run(0.5)
    before = begun.amdsmi_get_energy_count(board)
    truth = gpus.truth(0).energy
    after = begun.amdsmi_get_energy_count(board)
    assert after["counter_resolution"] == pytest.approx(15.3)
    assert isinstance(after["timestamp"], int)
    steps = [told["energy_accumulator"] * ENERGY_UNIT // 1_000_000 for told in (before, after)]
    assert steps[0] - 15 <= truth <= steps[1] + 800_000  # 1 ms of 750 W


def test_short_accumulator_wraps(begun: Any, board: Any, faults: AmdFaults) -> None:
    faults.reset_counter(0, ((1 << 32) + 1000) * ENERGY_UNIT)
    assert begun.amdsmi_get_energy_count(board)["energy_accumulator"] > 1 << 32
    faults.short_counter(0)
    assert begun.amdsmi_get_energy_count(board)["energy_accumulator"] < 1 << 30


def test_power_is_that_of_the_moment_in_watts(begun: Any, board: Any, gpus: EmulatedGpus) -> None:
    gpus.attach(0, WORKER, SteadyLoad(1.0))
    gpus.run(0.2)
    power = begun.amdsmi_get_power_info(board)
    assert power["current_socket_power"] == power["socket_power"] == 730
    assert power["average_socket_power"] == "N/A"
    assert power["power_limit"] == 750


def test_unsupported_readings_are_refused(begun: Any, board: Any, faults: AmdFaults) -> None:
    faults.no_energy_counter(0)
    faults.no_power(0)
    faults.no_processes(0)
    for call in ("energy_count", "power_info", "gpu_process_list"):
        assert code(begun, f"amdsmi_get_{call}", board) == 2


def test_processes_have_engine_time_or_occupied_compute_units(
    begun: Any, board: Any, gpus: EmulatedGpus
) -> None:
    gpus.attach(0, WORKER, SteadyLoad(0.5), memory=1 << 32)
    gpus.attach(0, VIEWER, SteadyLoad(0.25), kind=ProcessKind.GRAPHICS)
    gpus.run(0.4)
    worker, viewer = begun.amdsmi_get_gpu_process_list(board)
    assert (worker["pid"], worker["mem"]) == (WORKER, 1 << 32)
    assert (worker["cu_occupancy"], worker["engine_usage"]["gfx"]) == (152, 0)
    assert (viewer["pid"], viewer["cu_occupancy"]) == (VIEWER, "N/A")
    assert viewer["engine_usage"]["gfx"] == pytest.approx(100_000_000, rel=0.3)
    activity = begun.amdsmi_get_gpu_activity(board)
    assert activity["gfx_activity"] == 75
    assert activity["mm_activity"] == "N/A"


def test_clocks_temperature_and_memory_are_told(begun: Any, board: Any, gpus: EmulatedGpus) -> None:
    gpus.attach(0, WORKER, SteadyLoad(1.0), memory=1 << 32)
    clocks = begun.amdsmi_get_clock_info(board, begun.AmdSmiClkType.GFX)
    assert (clocks["clk"], clocks["min_clk"], clocks["max_clk"]) == (2100, 500, 2100)
    assert begun.amdsmi_get_clock_info(board, begun.AmdSmiClkType.MEM)["clk"] == 1300
    temperature = begun.amdsmi_get_temp_metric(
        board, begun.AmdSmiTemperatureType.HOTSPOT, begun.AmdSmiTemperatureMetric.CURRENT
    )
    assert 20 < temperature < 90
    video = begun.AmdSmiMemoryType.VRAM
    assert begun.amdsmi_get_gpu_memory_total(board, video) == MI300X.memory
    used = begun.amdsmi_get_gpu_memory_usage(board, video)
    assert used == (1 << 32) + MI300X.reserved_memory


# ---------------------------------------------------------------------------------- controls


def test_power_cap_is_kept_in_whole_watts(begun: Any, board: Any) -> None:
    assert begun.amdsmi_get_power_cap_info(board)["min_power_cap"] == 300_000_000
    begun.amdsmi_set_power_cap(board, 0, 512_900_000)
    caps = begun.amdsmi_get_power_cap_info(board)
    assert caps["power_cap"] == 512_000_000
    assert caps["default_power_cap"] == caps["max_power_cap"] == 750_000_000


@pytest.mark.parametrize("microwatts", [0, 299_000_000, 751_000_000])
def test_power_cap_outside_the_range_is_out_of_bounds(
    begun: Any, board: Any, microwatts: int
) -> None:
    assert code(begun, "amdsmi_set_power_cap", board, 0, microwatts) == 17


def test_setters_need_permission(begun: Any, board: Any, faults: AmdFaults) -> None:
    faults.no_permission(0)
    auto = begun.AmdSmiDevPerfLevel.AUTO
    assert code(begun, "amdsmi_set_power_cap", board, 0, 400_000_000) == 10
    assert code(begun, "amdsmi_set_gpu_perf_determinism_mode", board, 1500) == 10
    assert code(begun, "amdsmi_set_gpu_perf_level", board, auto) == 10


def test_clock_limit_is_a_performance_level(begun: Any, board: Any, gpus: EmulatedGpus) -> None:
    level: Callable[[], str] = lambda: begun.amdsmi_get_gpu_perf_level(board)  # noqa: E731
    assert level() == "AMDSMI_DEV_PERF_LEVEL_AUTO"
    assert code(begun, "amdsmi_set_gpu_perf_determinism_mode", board, 2200) == 1
    begun.amdsmi_set_gpu_perf_determinism_mode(board, 1500)
    assert level() == "AMDSMI_DEV_PERF_LEVEL_DETERMINISM"
    assert gpus.file.record(0).clock_request == 500 << 24 | 1500
    begun.amdsmi_set_gpu_perf_level(board, begun.AmdSmiDevPerfLevel.AUTO)
    assert level() == "AMDSMI_DEV_PERF_LEVEL_AUTO"


# ------------------------------------------------------------------------------- the package


@pytest.mark.needs_cc
def test_structures_of_the_library_are_those_of_the_package() -> None:
    wrapper = amdsmi_library.load().amdsmi_interface.amdsmi_wrapper
    sizes = {
        "asic_info": 896, "driver_info": 768, "power_cap_info": 64, "power_info": 192,
        "clk_info": 32, "engine_usage": 64, "proc_info": 704,
    }  # fmt: skip
    for name, size in sizes.items():
        assert ctypes.sizeof(getattr(wrapper, f"amdsmi_{name}_t")) == size


@pytest.mark.needs_cc
def test_further_functions_of_the_package_are_not_supported(tmp_path: Path) -> None:
    library = ctypes.CDLL(str(amdsmi_library.build(tmp_path)))
    assert library.amdsmi_get_violation_status() == 2


def test_file_has_the_boards_of_one_vendor(tmp_path: Path) -> None:
    with pytest.raises(EmulationError, match="one vendor"):
        EmulatedGpus(tmp_path / "gpus", [H100, MI300X], ManualClock())


def test_module_has_no_further_function(gpus: EmulatedGpus) -> None:
    with pytest.raises(AttributeError, match="amdsmi_get_violation_status"):
        EmulatedAmdSmi(gpus.path).amdsmi_get_violation_status  # noqa: B018
