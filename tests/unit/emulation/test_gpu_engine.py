"""One emulated GPU through time: meters, samples, controls and their delay."""

from __future__ import annotations

from dataclasses import replace

import pytest
from testbed.gpu_boards import A40, P100, V100
from testbed.scripted_load import ScriptedLoad

from wattspan.emulation.boards import H100, PowerSegment, extended, mean_power
from wattspan.emulation.gpu_engine import (
    Controls,
    EnergySplit,
    GpuState,
    GpuTenant,
    ProcessKind,
    Throttle,
    attached,
    detached,
    energies,
    energy_split,
    new_gpu,
    step,
)
from wattspan.emulation.workloads import SteadyLoad

MS = 1_000_000
SECOND = 1000 * MS
WALL = 1_700_000_000 * SECOND
FULL = GpuTenant(100, SteadyLoad(), 1 << 30)


def run(
    gpu: GpuState, seconds: float, asked: Controls | None = None, every: int = 10 * MS
) -> GpuState:
    end = gpu.at + round(seconds * SECOND)
    while gpu.at < end:
        now = min(end, gpu.at + every)
        gpu = step(gpu, now, WALL + now, asked)
    return gpu


def split(gpu: GpuState) -> EnergySplit:
    return energy_split(energies(gpu))


def test_idle_gpu_spends_its_idle_power() -> None:
    gpu = run(new_gpu(H100, 0), 10)
    assert split(gpu).energy == split(gpu).idle == 700_000_000


def test_processes_are_charged_their_dynamic_energy() -> None:
    gpu = attached(attached(new_gpu(H100, 0), FULL), GpuTenant(200, SteadyLoad(0.0), 1 << 30))
    found = split(run(gpu, 10))
    assert found.energy == 6_290_000_000
    assert found.processes == {100: 5_590_000_000, 200: 0}


def test_energy_of_detached_processes_remains_counted() -> None:
    gpu = run(attached(new_gpu(H100, 0), FULL), 1)
    gone = run(detached(gpu, 100), 1)
    assert split(gone).processes == {100: 559_000_000}
    again = run(attached(gone, FULL), 1)
    assert split(again).processes == {100: 1_118_000_000}


def test_pid_is_on_a_gpu_once() -> None:
    with pytest.raises(ValueError, match="already"):
        attached(attached(new_gpu(H100, 0), FULL), FULL)
    with pytest.raises(ValueError, match="not on this GPU"):
        detached(new_gpu(H100, 0), 100)


def test_cap_takes_effect_after_its_latency() -> None:
    board = replace(H100, cap_latency=300 * MS)
    gpu = run(attached(new_gpu(board, 0), FULL), 1)
    asked = Controls(limit=400_000)
    waiting = run(gpu, 0.3, asked)
    assert (waiting.enforced, waiting.point.power) == (700_000, 629_000)
    settled = run(waiting, 0.02, asked)
    assert settled.enforced == 400_000
    assert settled.point.power <= 400_000


def test_binding_cap_is_counted_in_nanoseconds() -> None:
    gpu = attached(new_gpu(replace(H100, cap_latency=0), 0), FULL)
    gpu = run(gpu, 0.01, Controls(limit=400_000))
    assert run(gpu, 2, Controls(limit=400_000)).capped_ns == 2 * SECOND


def test_outside_ceiling_lowers_the_enforced_limit() -> None:
    gpu = run(new_gpu(H100, 0), 1, Controls(limit=700_000, ceiling=500_000))
    assert gpu.controls.limit == 700_000
    assert gpu.enforced == 500_000


def test_throttling_holds_the_clock_and_is_counted() -> None:
    asked = Controls(limit=700_000, throttle=Throttle.HW_THERMAL, throttle_mhz=900)
    gpu = run(attached(new_gpu(replace(H100, cap_latency=0), 0), FULL), 1.01, asked)
    assert gpu.point.mhz == 900
    assert dict(gpu.throttled_ns) == {Throttle.HW_THERMAL: SECOND}


def test_hopper_sensor_has_windows_of_one_second_and_25_milliseconds() -> None:
    gpu = run(new_gpu(H100, 0), 5)
    gpu = run(attached(gpu, FULL), 0.5)
    assert gpu.power_instant == 629_000
    assert gpu.power_average == (70_000 + 629_000) // 2


def test_part_time_sensor_misses_power_between_its_windows() -> None:
    """Busy for the first 50 ms of each 100 ms: the last 25 ms before each edge are idle."""
    work = GpuTenant(100, ScriptedLoad(((0.05, 1.0), (0.05, 0.0))), 1 << 30)
    gpu = run(attached(new_gpu(H100, 0), work), 3)
    assert gpu.power_instant == 70_000
    assert split(gpu).energy == pytest.approx(3 * 349_500_000)


def test_older_board_has_no_average_and_a_p100_no_counter() -> None:
    assert run(new_gpu(V100, 0), 2).power_average is None
    assert P100.counter_step is None


def test_sensor_has_a_proportional_error() -> None:
    board = replace(A40, sensor=replace(A40.sensor, gain_ppm=-50_000))
    gpu = run(new_gpu(board, 0), 2)
    assert gpu.power_instant == round(0.95 * board.silicon.idle)


def test_utilisation_samples_contain_only_active_processes() -> None:
    gpu = attached(new_gpu(H100, 0), GpuTenant(100, SteadyLoad(0.5), 1 << 30))
    gpu = run(attached(gpu, GpuTenant(200, SteadyLoad(0.0), 1 << 30)), 1.01)
    assert {sample.pid for sample in gpu.samples} == {100}
    assert {sample.sm for sample in gpu.samples} == {50}
    assert len(gpu.samples) == 6
    assert gpu.samples[-1].stamp <= (WALL + gpu.at) // 1000
    assert gpu.utilisation == 50


def test_ring_of_samples_is_bounded() -> None:
    gpu = run(attached(new_gpu(H100, 0), FULL), 20, every=100 * MS)
    assert len(gpu.samples) == 72
    assert {sample.sm for sample in gpu.samples} == {100}


def test_process_that_left_is_in_the_sample_of_its_last_period() -> None:
    gpu = run(attached(new_gpu(H100, 0), FULL), 0.1)
    gpu = run(detached(gpu, 100), 1)
    assert gpu.samples == ()  # the driver forgets it with its context
    assert gpu.utilisation == 0


def test_step_rejects_a_time_before_the_present() -> None:
    with pytest.raises(ValueError, match="decreased"):
        step(new_gpu(H100, 100), 99, WALL)


def test_memory_is_the_sum_of_processes_and_driver() -> None:
    gpu = attached(new_gpu(H100, 0), GpuTenant(1, SteadyLoad(0.0), 5 << 30, ProcessKind.MPS))
    assert gpu.memory_used == (5 << 30) + H100.reserved_memory


def test_mean_power_without_history_is_unknown() -> None:
    assert mean_power((), 0, 100) is None
    assert mean_power((PowerSegment(0, 10, 5),), 10, 10) is None


def test_history_covers_the_longest_window() -> None:
    history: tuple[PowerSegment, ...] = ()
    for start in range(0, 1000, 10):
        history = extended(history, PowerSegment(start, start + 10, start), keep=100)
    assert history[0].start == 900
    assert mean_power(history, 980, 1000) == 985
    assert extended(history, PowerSegment(1000, 1000, 7), keep=100) == history
