"""One owner writing as fast as it can, readers in other processes: no reader sees a torn state."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from testbed.nvml_library import build, environment
from testbed.requirements import ROOT

from wattspan.clock import SystemClock
from wattspan.emulation.boards import H100
from wattspan.emulation.gpus import EmulatedGpus
from wattspan.emulation.workloads import SteadyLoad

pytestmark = pytest.mark.exhaustive

READS = 3000

_STATE_READER = f"""
import sys
from pathlib import Path
from wattspan.clock import SystemClock
sys.path.append({str(Path(__file__).parents[1])!r})
from testbed.gpu_state import true_energy
from wattspan.emulation.gpu_file import GpuFile, counter_energy
file, clock = GpuFile(Path(sys.argv[1])), SystemClock().monotonic
energy = counter = 0
reads, seen = 0, set()
while reads < {READS} or len(seen) < 2:  # a busy machine may not run the writer for a while
    reads += 1
    moment = file.read(0, clock)
    live = moment.live
    held = sum(live.process[place].memory for place in range(live.processes))
    assert live.memory_used == held + file.identity(0).memory_reserved, "torn"
    assert live.power in ({{70_000: 0, 629_000: 1}}), live.power
    assert (live.power == 629_000) == (live.processes == 2), "torn"
    assert true_energy(moment) >= energy, "energy ran backwards"
    assert counter_energy(file.identity(0), moment) >= counter, "the counter ran backwards"
    energy, counter = true_energy(moment), counter_energy(file.identity(0), moment)
    seen.add(live.power)
print(sorted(seen))
"""

_NVML_READER = f"""
import pynvml
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(0)
energy, reads, seen = 0, 0, set()
while reads < {READS} or len(seen) < 2:
    reads += 1
    now = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    assert now >= energy, "the counter ran backwards"
    energy = now
    seen.add(len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle)))
print(sorted(seen))
"""


@pytest.fixture
def gpus(tmp_path: Path) -> Iterator[EmulatedGpus]:
    # A counter of the finest step shows the slightest step backwards.
    board = replace(H100, counter_step=1)
    with EmulatedGpus(tmp_path / "gpus", [board], SystemClock()) as gpus:
        gpus.attach(0, 1, SteadyLoad(0.0), memory=1 << 30)
        yield gpus


def readers_while_writing(gpus: EmulatedGpus, *commands: list[str], env: dict[str, str]) -> None:
    """Alternate between two very different states until every reader is done."""
    started = [
        subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for command in commands
    ]
    while any(reader.poll() is None for reader in started):
        gpus.attach(0, 2, SteadyLoad(), memory=7 << 30)
        gpus.step()
        gpus.detach(0, 2)
    spoken = [reader.communicate() for reader in started]
    for reader, (out, err) in zip(started, spoken, strict=True):
        assert reader.returncode == 0, err
        assert out.count(",") == 1, f"only one state was ever seen: {out}"


def test_readers_of_the_state_never_see_it_torn(gpus: EmulatedGpus) -> None:
    command = [sys.executable, "-c", _STATE_READER, str(gpus.path)]
    readers_while_writing(
        gpus, command, command, env={**os.environ, "PYTHONPATH": str(ROOT / "agent")}
    )


@pytest.mark.needs_cc
def test_clients_of_the_library_never_see_energy_run_backwards(
    gpus: EmulatedGpus, tmp_path: Path
) -> None:
    env = {**os.environ, **environment(build(tmp_path / "lib"), gpus.path)}
    command = [sys.executable, "-c", _NVML_READER]
    readers_while_writing(gpus, command, command, env=env)


@pytest.mark.needs_cc
def test_cap_set_in_another_process_is_enforced(tmp_path: Path) -> None:
    program = """
import pynvml
pynvml.nvmlInit()
pynvml.nvmlDeviceSetPowerManagementLimit(pynvml.nvmlDeviceGetHandleByIndex(0), 350_000)
pynvml.nvmlShutdown()
"""
    with EmulatedGpus(tmp_path / "gpus", [H100], SystemClock()) as gpus:
        gpus.attach(0, os.getpid(), SteadyLoad())
        env = {**os.environ, **environment(build(tmp_path / "lib"), gpus.path)}
        subprocess.run([sys.executable, "-c", program], env=env, check=True)
        gpus.run(0.15)
        assert gpus.state(0).enforced == 350_000
        assert gpus.state(0).point.power <= 350_000
