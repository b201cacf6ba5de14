"""`wattspan doctor` as a person runs it, on trees of counters."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from wattspan.clock import SystemClock
from wattspan.emulation.powercap_engine import CpuLaw, PowercapEngine, PowercapRunner
from wattspan.emulation.powercap_tree import LAYOUTS, PowercapTree


def doctor(tmp_path: Path, *arguments: str, config: str = "") -> subprocess.CompletedProcess[str]:
    """The real program, with a configuration under which it looks at ``tmp_path`` only."""
    path = tmp_path / "wattspan.toml"
    path.write_text(f"""
[agent]
state_dir = "{tmp_path}/state"
run_dir = "{tmp_path}/run"
[sources.rapl]
sysfs = "{tmp_path}/sys"
[sources.nvml]
enabled = false
[exporters.prometheus]
listen = "127.0.0.1:0"
[spans]
http = "127.0.0.1:0"
{config}
""")
    environ = {k: v for k, v in os.environ.items() if not k.startswith("WATTSPAN_")}
    program = [sys.executable, "-c", "from wattspan.cli import main; main()", "doctor"]
    return subprocess.run(
        [*program, "--config", str(path), *arguments],
        env={**environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.fixture
def counters(tmp_path: Path) -> Iterator[Path]:
    """A sysfs whose counters move as those of an idle host do."""
    tree = PowercapTree(tmp_path / "sys", LAYOUTS["xeon-2s"], cpus=2)
    clock = SystemClock()
    runner = PowercapRunner(PowercapEngine(tree, CpuLaw(), clock, lambda: (0, 0)), clock)
    runner.start()
    yield tree.root
    runner.stop()
    tree.close()


def section(title: str, output: str) -> str:
    (found,) = [part for part in output.split("\n\n") if part.startswith(title)]
    return found


def line_with(text: str, output: str) -> str:
    (found,) = [line for line in output.splitlines() if text in line]
    return found


def test_host_without_counters_gets_advice_and_exit_code_3(tmp_path: Path) -> None:
    (tmp_path / "sys").mkdir()
    done = doctor(tmp_path)
    assert done.returncode == 3, done.stderr
    assert "0 counters can be read" in done.stdout
    assert "wattspan demo" in done.stdout
    assert "intel_rapl_msr" in done.stdout


@pytest.mark.usefixtures("counters")
def test_doctor_lists_every_counter_with_its_coverage(tmp_path: Path) -> None:
    done = doctor(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    source, both = section("Source rapl", done.stdout), section("RAPL by powercap", done.stdout)
    assert line_with("cpu package-0", source).startswith("  ok ")
    assert "measured, counted: " in line_with("cpu package-0", source)
    assert "difference" in line_with("cpu package-0", both)
    assert "Processes" in done.stdout
    assert f"{tmp_path}/state will be created" in " ".join(done.stdout.split())


def test_unreadable_counter_affects_only_its_own_line(counters: Path, tmp_path: Path) -> None:
    energy = counters / "class/powercap/intel-rapl:1/energy_uj"
    energy.unlink()
    energy.mkdir()
    done = doctor(tmp_path)
    assert done.returncode == 0, done.stdout
    assert "FAIL" in done.stdout
    assert "intel-rapl:1/energy_uj" in done.stdout
    assert "cpu package-0" in done.stdout


@pytest.mark.usefixtures("counters")
def test_programs_get_the_same_as_json(tmp_path: Path) -> None:
    done = doctor(tmp_path, "--json")
    told = json.loads(done.stdout)
    assert (done.returncode, told["readable_counters"]) == (0, 4)
    assert [s["title"] for s in told["sections"]] == [
        "Host",
        "GPUs",
        "Source amdsmi",
        "Source estimate",
        "Source hwmon",
        "Source nvml",
        "Source rapl",
        "RAPL by powercap and by pyRAPL, over 1.0 s",
        "Cover",
        "Processes",
        "Agent",
        "Configuration",
        "Directories",
        "Ports",
        "Security",
        "Spans and API",
        "Exporters",
        "Tuning and caps",
        "Fleet",
        "Cost and carbon",
    ]


def test_doctor_lists_emulated_actuators_without_writes(tmp_path: Path) -> None:
    tuned = '[autotune]\nmode = "advise"\nknobs = ["gpu_power", "cpu_power"]\n'
    done = doctor(tmp_path, "--emulate", "two-socket-h100", config=tuned)
    told = " ".join(section("Tuning and caps", done.stdout).split())
    assert "H100 80GB HBM3 0 700 W now, 200 W at least, 700 W at most" in told
    assert "cpu_power package-1 270 W now, 270 W at most" in told
    assert "none is needed, because no cap is configured" in told
    assert not (tmp_path / "state").exists()


def test_broken_configuration_is_a_finding_and_the_rest_is_examined(tmp_path: Path) -> None:
    config = '[processes]\ntop = "many"\nidle = "equal"\n'
    done = doctor(tmp_path, "--emulate", "laptop", config=config)
    assert done.returncode == 2, done.stderr
    assert "Bad value for 'processes.top'" in " ".join(
        section("Configuration", done.stdout).split()
    )
    assert "Correct it" in done.stdout
    assert "package-0" in done.stdout  # a counter, which was read
    facts = json.loads(doctor(tmp_path, "--emulate", "laptop", "--json", config=config).stdout)
    assert facts["worst"] == "fail"
    assert facts["readable_counters"]


def test_output_without_a_terminal_has_no_colour(tmp_path: Path) -> None:
    assert "\x1b" not in doctor(tmp_path).stdout


def test_doctor_labels_an_emulated_host(tmp_path: Path) -> None:
    done = doctor(tmp_path, "--emulate", "laptop")
    assert done.returncode == 0
    told = section("Source rapl", done.stdout)
    assert "emulated, counted" in line_with("cpu package-0 ", told)
    assert "emulated, not summed" in line_with("enclosure psys", told)
    assert "of an emulated host" in done.stdout.splitlines()[-1]


def test_unknown_emulation_profile_is_a_one_line_error(tmp_path: Path) -> None:
    done = doctor(tmp_path, "--emulate", "mainframe")
    assert (done.returncode, done.stdout) == (2, "")
    assert "There is no emulated host 'mainframe'. Choose one of: two-socket-h100," in done.stderr
