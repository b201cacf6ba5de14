"""ZeusMonitor on a real agent and an emulated GPU whose true energy is known."""

from __future__ import annotations

import csv
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from time import monotonic_ns

import pytest
from testbed.program import ENVIRONMENT, Running, host_of
from testbed.waiting import eventually

from wattspan.compat.zeus import PowerMonitor, TemperatureMonitor, ZeusMonitor
from wattspan.compat.zeus.limits import HeldLimits, ZeusGPUNotSupportedError
from wattspan.compat.zeus.monitor import WindowMeasurement
from wattspan.emulation.control import ControlClient, EmulatedGpu
from wattspan.model import CapKey, Knob
from wattspan.sdk import MeasurementError
from wattspan.sdk.client import DeviceReader, read_devices, request_json

PROFILE = "one-socket-h100"
PARTS = 8


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Running(tmp_path_factory.mktemp("agent"), emulate=PROFILE) as running:
        measures(running)
        yield running
        running.end()


@pytest.fixture(autouse=True)
def no_cuda_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def reader(run_dir: Path) -> DeviceReader:
    return partial(read_devices, directories=(str(run_dir),))


def measures(running: Running) -> None:
    """Until the GPU has readings."""

    def known() -> bool:
        try:
            now = monotonic_ns()
            found = reader(running.run_dir)(now - 10**8, now, timeout=5.0)
        except MeasurementError:
            return False
        return any(one.kind == "gpu" and one.coverage == 1.0 for one in found)

    eventually(known, "the GPU is measured", within=60)


def monitor_of(run_dir: Path) -> ZeusMonitor:
    class Monitor(ZeusMonitor):
        read_devices = reader(run_dir)

    return Monitor()


def true_joules(host: Path, window: WindowMeasurement) -> float:
    """The energy of the board in a window."""
    with ControlClient(host) as client:
        before, after = client.ask(do="truth", at=list(window.period))["at"]
    return float(after["gpus"][0]["energy"] - before["gpus"][0]["energy"]) / 1e6


def test_windows_have_the_energy_of_the_board(agent: Running) -> None:
    host, monitor = host_of(agent.process.pid), monitor_of(agent.run_dir)
    assert (monitor.gpu_indices, monitor.cpu_indices) == ([0], [0])
    parts = []
    with EmulatedGpu(0, host=host) as gpu:
        monitor.begin_window("whole", sync_execution=False)
        for i in range(PARTS):
            key = f"part {i}"
            monitor.begin_window(key, sync_execution=False)
            with gpu.busy(0.9 if i % 2 else 0.3):
                readings = known_after(agent, monitor)
            parts.append((readings, monitor.finish_window(key, sync_execution=False)))
        whole = monitor.finish_window("whole", sync_execution=False)
    assert whole.coverage == 1.0
    assert set(whole.provenance.values()) == {"emulated"}
    true = true_joules(host, whole)
    assert abs(whole.total_energy - true) <= 2 * whole.uncertainty[0]
    assert whole.uncertainty[0] < 0.25 * true
    inside = sum(window.total_energy for _, window in parts)
    assert 0.8 * whole.total_energy < inside <= whole.total_energy + 1e-5
    assert whole.cpu_energy is not None
    assert whole.cpu_energy[0] > 0
    assert whole.all_energy["gpu"] == pytest.approx(whole.total_energy)


def known_after(agent: Running, monitor: ZeusMonitor) -> int:
    """Wait for two further readings of the GPU; the time of the newest."""
    began = monotonic_ns()

    def newest() -> int:
        found = reader(agent.run_dir)(began, monotonic_ns(), timeline=True)
        steps = [step for one in found if one.kind == "gpu" for step in one.timeline]
        return steps[-1][1] if len(steps) > 2 else 0

    return eventually(newest, "the GPU is read again", within=30)


def test_power_and_temperature_are_those_of_the_board(agent: Running) -> None:
    class Power(PowerMonitor):
        read_devices = reader(agent.run_dir)

    class Temperature(TemperatureMonitor):
        read_devices = reader(agent.run_dir)

    power, temperature = Power(), Temperature()
    watts = eventually(power.get_power, "a power is known", within=30)
    assert 20 < watts[0] < 800
    timeline = eventually(
        lambda: power.get_power_timeline("device_instant")[0], "a reading", within=30
    )
    assert all(20 < one < 800 for _, one in timeline)
    degrees = eventually(temperature.get_temperature, "a temperature is known", within=30)
    assert 15 < degrees[0] < 110


def test_window_over_a_restart_of_the_agent_is_partial(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="wattspan-") as sockets:
        run_dir = Path(sockets)
        settings = {"emulate": PROFILE, "agent__run_dir": run_dir}
        first, second = tmp_path / "first", tmp_path / "second"
        for folder in (first, second):
            folder.mkdir()
        with Running(first, **settings) as running:
            running.run_dir = run_dir
            measures(running)
            monitor = monitor_of(run_dir)
            monitor.begin_window("epoch", sync_execution=False)
            running.end()
        monitor.begin_window("step", sync_execution=False)
        with Running(second, **settings) as running:
            running.run_dir = run_dir
            measures(running)
            epoch = monitor.finish_window("epoch", sync_execution=False)
            with pytest.warns(RuntimeWarning, match=r"window 'epoch' is partial: \d+% of "):
                assert epoch.total_energy > 0
            assert 0 < epoch.coverage < 1
            monitor.begin_window("after", sync_execution=False)
            known_after(running, monitor)
            after = monitor.finish_window("after", sync_execution=False)
            assert after.coverage == 1.0
            assert after.total_energy > 0
            running.end()


def test_program_without_an_agent_goes_on_and_logs_no_energy(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import sys, warnings
        warnings.simplefilter("ignore")
        from wattspan.compat.zeus import ZeusMonitor
        monitor = ZeusMonitor(gpu_indices=[0], log_file=sys.argv[1])
        monitor.begin_window("step", sync_execution=False)
        step = monitor.end_window("step", sync_execution=False)
        try:
            print(step.total_energy)
        except Exception as error:
            print(type(error).__name__)
        print(sorted({"torch", "jax", "cupy", "msgspec", "click"} & set(sys.modules)))
        """
    )
    log = tmp_path / "zeus.csv"
    done = subprocess.run(
        [sys.executable, "-c", script, str(log)],
        env={**ENVIRONMENT, "WATTSPAN_RUN_DIR": str(tmp_path), "HOME": os.environ["HOME"]},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines() == ["AgentUnavailableError", "[]"]
    header, line = log.read_text().splitlines()
    assert header == "start_time,window_name,elapsed_time,gpu0_energy"
    assert line.split(",")[1] == "step"
    assert line.endswith(",")


@pytest.mark.parametrize("ended_by", ["SIGTERM", "SIGKILL", "exit"])
def test_log_has_the_lines_of_a_program_that_ends_at_once(
    agent: Running, tmp_path: Path, ended_by: str
) -> None:
    log = tmp_path / "windows.csv"
    script = f"""
        import os, signal, sys
        from wattspan.compat.zeus import ZeusMonitor

        monitor = ZeusMonitor(log_file={str(log)!r})
        for name in ("one", "two, quoted", "three"):
            monitor.begin_window(name, sync_execution=False)
            monitor.end_window(name, sync_execution=False)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if {ended_by!r} != "exit":
            os.kill(os.getpid(), getattr(signal, {ended_by!r}))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**ENVIRONMENT, "WATTSPAN_RUN_DIR": str(agent.run_dir)},
        check=False,
    )
    assert done.returncode == (0 if ended_by == "exit" else -signal.Signals[ended_by])

    def lines() -> list[list[str]]:
        with log.open(encoding="utf-8", newline="") as file:
            return list(csv.reader(file))

    eventually(lambda: len(lines()) >= 4, "all lines are written", within=60)
    header, *windows = lines()
    assert header[-1] == "gpu0_energy"
    assert [one[1] for one in windows] == ["one", "two, quoted", "three"]
    assert all(float(one[3]) >= 0 for one in windows)


def test_mig_instance_of_the_program_has_a_part_of_the_energy_of_its_board(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Running(tmp_path, emulate="h100-mig") as running:
        measures(running)
        now = monotonic_ns()
        listed = reader(running.run_dir)(now, now, parts=True)
        first, *others = (one for one in listed if one.parent is not None)
        assert others
        assert all(one.parent is None for one in reader(running.run_dir)(now, now))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", first.uuid or "")
        monitor = monitor_of(running.run_dir)
        eventually(lambda: _newest(running, first.id), "the instance has energy", within=60)
        monitor.begin_window("step", sync_execution=False)
        eventually(lambda: monotonic_ns() - now > 3 * 10**9, "time passes")
        window = monitor.finish_window("step", sync_execution=False)
        whole = reader(running.run_dir)(*window.period, [first.parent or ""], timeout=5.0)[0]
        assert monitor.gpu_indices == [0]
        assert window.coverage == 1.0
        assert whole.joules is not None
        assert 0 < window.gpu_energy[0] < whole.joules
        running.end()


def _newest(running: Running, key: str) -> bool:
    now = monotonic_ns()
    (found,) = reader(running.run_dir)(now - 10 * 10**9, now, [key])
    return bool(found.joules)


# ------------------------------------------------------------------------- limits and commands

HOLD = """
import os, sys
from wattspan.compat.zeus import install
assert install()
from zeus.device import get_gpus
gpus = get_gpus()
before = gpus.get_power_management_limit(0)
gpus.set_power_management_limit(0, 500_000)
if os.fork() == 0:
    sys.stdin.read()  # until the test ends: a child does not keep the limit
    os._exit(0)
print(before, gpus.get_power_management_limit(0), flush=True)
sys.stdin.read()
"""


def test_limit_of_a_killed_program_is_restored(tmp_path: Path) -> None:
    settings = {"autotune__mode": "apply", "caps__lease": "1m"}
    with Running(tmp_path, emulate=PROFILE, **settings) as running:
        measures(running)
        environ = {**ENVIRONMENT, "WATTSPAN_RUN_DIR": str(running.run_dir)}
        limits = HeldLimits(partial(request_json, directories=(str(running.run_dir),)))
        now = monotonic_ns()
        (board,) = (one for one in reader(running.run_dir)(now, now) if one.kind == "gpu")
        key = CapKey(Knob.GPU_POWER, board.id)
        eventually(partial(_has_capper, limits, key), "a capper runs", within=60)
        with subprocess.Popen(
            [sys.executable, "-c", HOLD],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as program:
            assert program.stdout is not None
            assert program.stdout.readline() == "700000 500000\n"
            row = limits.row(key)
            assert row.holder == f"zeus.device of process {program.pid}"
            program.kill()
            eventually(
                lambda: limits.row(key).state.requested == 700_000, "the original limit", within=30
            )
        running.end()


def _has_capper(limits: HeldLimits, key: CapKey) -> bool:
    try:
        return limits.row(key).state.requested is not None
    except ZeusGPUNotSupportedError:
        return False


def test_commands_print_the_devices_and_their_power(agent: Running) -> None:
    environ = {**ENVIRONMENT, "WATTSPAN_RUN_DIR": str(agent.run_dir)}
    module = [sys.executable, "-m", "wattspan.compat.zeus.show_env"]
    shown = subprocess.run(module, env=environ, capture_output=True, text=True, check=True).stdout
    assert "GPU 0 of this program: NVIDIA H100 80GB HBM3\n" in shown
    assert "measures package-0 (rapl:package-0, emulated)\n" in shown
    assert "    no power limit: No capper runs here" in shown
    with subprocess.Popen(
        [*module[:-1], "wattspan.compat.zeus.monitor", "power", "--update-period", "0.2"],
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
    ) as monitor:
        assert monitor.stdout is not None
        line = monitor.stdout.readline()
        assert re.fullmatch(r"\S+  GPU 0: \d+\.\d W\n", line), line
        monitor.send_signal(signal.SIGINT)
        rest = monitor.stdout.read().splitlines()
    assert re.fullmatch(r"\d+\.\d{3} s  GPU 0: \d+\.\d J", rest[-1])
