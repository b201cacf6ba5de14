"""Programs that come to an emulated host by its door: their permissions and true values."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from testbed.scripted_load import ScriptedLoad

from wattspan.clock import SystemClock
from wattspan.emulation.boards import H100, EnergyLog
from wattspan.emulation.control import HOST_VARIABLE, ControlClient, EmulatedGpu, running_host
from wattspan.emulation.gpus import EmulatedGpus
from wattspan.emulation.host import EmulatedHost, profile_named
from wattspan.ports import WattspanError
from wattspan.testing import ManualClock


def test_client_draws_energy_by_its_load() -> None:
    clock = SystemClock()
    with EmulatedHost(profile_named("one-socket-h100")) as host:
        with EmulatedGpu(0, host=host.directory) as gpu:
            times = [clock.monotonic()]
            with gpu.busy(0.5), gpu.busy(0.9):  # more than there is
                clock.sleep_until(clock.monotonic() + 50_000_000)
            times += [clock.monotonic(), clock.monotonic() + 50_000_000]
            clock.sleep_until(times[-1])
            before, after, later = gpu.spent(times)
        assert before == 0
        assert after > 0.05 * 50e6  # at least 50 W
        assert later == after
        truth = host.ask(do="truth", at=times)["at"]
        assert [moment["gpus"][0]["processes"].get(str(os.getpid()), 0) for moment in truth] == [
            before, after, later,
        ]  # fmt: skip
        assert truth[-1]["zones"]["intel-rapl:0"] > truth[0]["zones"]["intel-rapl:0"]


def test_client_acts_for_its_own_process() -> None:
    with EmulatedHost(profile_named("one-socket-h100")) as host:
        guest = ControlClient(host.directory)
        with pytest.raises(WattspanError, match="refuses"):
            guest.ask()
        guest.ask(do="attach", gpu=0, load=0.3)
        assert set(guest.ask(do="truth")["gpus"][0]["processes"]) == {str(os.getpid())}
        with pytest.raises(WattspanError, match="already on this GPU"):
            guest.ask(do="attach", gpu=0, load=0.3)
        guest.close()


def test_exited_client_leaves_its_board() -> None:
    with EmulatedHost(profile_named("one-socket-h100")) as host:
        code = "from wattspan.emulation.control import EmulatedGpu; EmulatedGpu(0)"
        environ = {**os.environ, HOST_VARIABLE: str(host.directory)}
        for _ in range(2):
            subprocess.run([sys.executable, "-c", code], env=environ, check=True)


def test_missing_emulated_host_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("wattspan.emulation.control._HOST_DIRECTORIES", (tmp_path,))
    with pytest.raises(WattspanError, match=r"No emulated host runs .*`wattspan run --emulate"):
        running_host()
    monkeypatch.setenv(HOST_VARIABLE, str(tmp_path))
    with pytest.raises(WattspanError, match="Check that it is still running"):
        ControlClient()


def test_truth_between_two_steps_is_exact(tmp_path: Path) -> None:
    clock = ManualClock()
    with EmulatedGpus(tmp_path / "gpus", [H100], clock) as gpus:
        gpus.attach(0, 7, ScriptedLoad(((0.3, 1.0), (0.2, 0.2))))
        start, known = clock.monotonic(), []
        for _ in range(40):
            clock.advance(0.013)
            truth = gpus.truth(0)
            known.append((clock.monotonic(), truth.energy, truth.processes[7]))
        for time, energy, process in known:
            (spent,) = gpus.spent_at(0, [time])
            assert (spent.energy, spent.processes[7]) == (energy, process)
        (early, _, first), (late, _, second) = known[:2]
        middle = gpus.spent_at(0, [(early + late) // 2])[0].processes[7]
        assert abs(2 * middle - first - second) <= 2
        with pytest.raises(LookupError, match="not remembered"):
            gpus.spent_at(0, [start - 1_000_000_000])


def test_energy_log_interpolates_between_recorded_times() -> None:
    log = EnergyLog[str](2)
    for time in (0, 10, 20):
        log.record(time, {"package": time * 3})
    assert log.at(15) == {"package": 45}
    for time in (5, 99):
        with pytest.raises(LookupError, match="not remembered"):
            log.at(time)
