"""Zeus, CodeCarbon, nvitop and gpustat, unmodified, on the emulated library.

Their figures are compared with the truth at the times of reading, which they print. The error of an
energy window is at most one counter step at either edge.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from testbed.clients import client_environment, fake_nvidia_smi
from testbed.gpu_boards import A40
from testbed.nvml_library import build, environment
from testbed.requirements import CLIENTS
from testbed.scripted_load import ScriptedLoad

from wattspan.clock import SystemClock
from wattspan.emulation.boards import H100
from wattspan.emulation.gpus import EmulatedGpus
from wattspan.emulation.workloads import SteadyLoad

pytestmark = [pytest.mark.needs_cc, pytest.mark.needs_clients]

BUSY = ScriptedLoad(
    ((0.3, 1.0), (0.2, 0.2))
)  # between 182 and 629 W: a constant power proves little
NAMES = ["NVIDIA H100 80GB HBM3", "NVIDIA A40"]
PEAK = (0.629, 0.304)  # joules a millisecond
STEP = (100, 20)  # milliseconds of the two boards' counters


@dataclass
class Stage:
    """A running emulated host of two GPUs, with a process on each."""

    gpus: EmulatedGpus
    environment: dict[str, str]
    pids: tuple[int, int]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    directory = tmp_path_factory.mktemp("clients")
    library = build(directory / "lib")
    helper = subprocess.Popen(["sleep", "600"])
    with EmulatedGpus(directory / "gpus", [H100, A40], SystemClock()) as gpus:
        gpus.attach(0, os.getpid(), BUSY, memory=6 << 30)
        gpus.attach(1, helper.pid, SteadyLoad(0.5), memory=3 << 30)
        gpus.start()
        seen = client_environment(
            environment(library, gpus.path), path=fake_nvidia_smi(directory / "bin")
        )
        yield Stage(gpus, seen, (os.getpid(), helper.pid))
    helper.terminate()
    helper.wait()


class Truth:
    """Exact energy of each GPU at any time during a client's run."""

    def __init__(self, gpus: EmulatedGpus) -> None:
        self._gpus = gpus

    def joules(self, gpu: int, start: int, end: int) -> float:
        before, after = self._gpus.spent_at(gpu, [start, end])
        return (after.energy - before.energy) / 1e6


def run(stage: Stage, code: str) -> tuple[Truth, list[str]]:
    done = subprocess.run(
        [str(CLIENTS), "-c", code],
        env=stage.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Truth(stage.gpus), done.stdout.splitlines()


def test_one_second_zeus_window_is_off_by_no_more_than_a_counter_step(stage: Stage) -> None:
    truth, lines = run(
        stage,
        """
import json, time
from zeus.monitor import ZeusMonitor
monitor = ZeusMonitor(gpu_indices=[0, 1])
for _ in range(5):
    times = [time.monotonic_ns()]
    monitor.begin_window("step", sync_execution=False)
    times.append(time.monotonic_ns())
    time.sleep(1)
    times.append(time.monotonic_ns())
    found = monitor.end_window("step", sync_execution=False)
    times.append(time.monotonic_ns())
    print(json.dumps([times, found.gpu_energy]))
""",
    )
    windows = [json.loads(line) for line in lines if line.startswith("[")]
    assert len(windows) == 5
    for (before, began, ending, after), found in windows:
        for gpu in (0, 1):
            edge = PEAK[gpu] * (STEP[gpu] + 10)
            assert found[str(gpu)] >= truth.joules(gpu, began, ending) - edge
            assert found[str(gpu)] <= truth.joules(gpu, before, after) + edge


def test_codecarbon_counts_the_gpus_energy(stage: Stage) -> None:
    truth, lines = run(
        stage,
        """
import json, time
from codecarbon import OfflineEmissionsTracker
tracker = OfflineEmissionsTracker(country_iso_code="DEU", measure_power_secs=1,
                                  save_to_file=False, log_level="error")
times = [time.monotonic_ns()]
tracker.start()
times.append(time.monotonic_ns())
time.sleep(6)
times.append(time.monotonic_ns())
tracker.stop()
times.append(time.monotonic_ns())
data = tracker.final_emissions_data
print(json.dumps([times, data.gpu_energy * 3.6e6, data.gpu_count, data.gpu_model]))
""",
    )
    (before, began, ending, after), joules, count, model = json.loads(lines[-1])
    edges = sum(peak * (step + 10) for peak, step in zip(PEAK, STEP, strict=True))
    assert count == 2
    assert all(name in model for name in NAMES)
    assert joules >= sum(truth.joules(gpu, began, ending) for gpu in (0, 1)) - edges
    assert joules <= sum(truth.joules(gpu, before, after) for gpu in (0, 1)) + edges


def test_nvitop_lists_both_gpus_and_their_processes(stage: Stage) -> None:
    _, lines = run(
        stage,
        """
import json, nvitop
for device in nvitop.Device.all():
    users = {p.pid: [p.gpu_memory(), p.gpu_sm_utilization()] for p in device.processes().values()}
    print(json.dumps([device.name(), device.uuid(), device.power_limit(), users]))
""",
    )
    first, second = (json.loads(line) for line in lines)
    assert [first[0], second[0]] == NAMES
    assert [first[1], second[1]] == [stage.gpus.uuid(0), stage.gpus.uuid(1)]
    assert [first[2], second[2]] == [700_000, 300_000]
    assert first[3][str(stage.pids[0])][0] == 6 << 30
    assert second[3] == {str(stage.pids[1]): [3 << 30, 50]}


def test_gpustat_shows_both_gpus_with_their_processes(stage: Stage) -> None:
    _, lines = run(
        stage,
        """
import gpustat, json
for gpu in gpustat.GPUStatCollection.new_query():
    users = [process["pid"] for process in gpu.processes]
    print(json.dumps([gpu.name, gpu.uuid, gpu.power_draw, gpu.memory_used, users]))
""",
    )
    first, second = (json.loads(line) for line in lines)
    assert [first[0], second[0]] == NAMES
    assert [first[1], second[1]] == [stage.gpus.uuid(0), stage.gpus.uuid(1)]
    assert 182 <= first[2] <= 629
    assert second[2:] == [167, 3 * 1024, [stage.pids[1]]]
    assert first[4] == [stage.pids[0]]
