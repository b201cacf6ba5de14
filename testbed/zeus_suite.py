"""Zeus's own tests of monitors, optimizers and metrics, on Zeus and on ``install()``.

They are those of its source distribution, which leaves their data files out: these are written
here, in the formats that the tests read, with values of our own.
"""

from __future__ import annotations

import ast
import csv
import json
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from testbed.clients import ZEUS_SOURCE
from testbed.requirements import CLIENTS, ROOT

SUITES = ("monitor", "optimizer", "test_metric.py")
SERVER = "optimizer.batch_size."
STREAMS = "monitor.test_power_streaming."
NOT_RUN = (SERVER, STREAMS)
"""Tests that need a server with an SQL database, and tests that pauses of 50 ms decide."""

MODULES = (
    "monitor/test_carbon.py",
    "monitor/test_price.py",
    "optimizer/test_power_limit_optimizer.py",
    "test_metric.py",
)
WINDOWS = "monitor/test_energy.py"
GPU_CASES = (
    *(f"tests/{WINDOWS}::test_monitor[mock_gpus{i}]" for i in range(0, 1200, 100)),
    f"tests/{WINDOWS}::test_begin_window_restart",
)
"""Some combinations of GPUs: all of them take minutes."""
FRAMEWORK = """
def devices(kind):
    return [0]


def device_count():
    return 1
"""
"""The part of JAX that Zeus's optimizer asks: one device, in one process."""

INSTALL = "import wattspan.compat.zeus as z; assert z.install(); "
"""The line that a script of Zeus gets."""

RUN_SCRIPT = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
"""Runs the script that is the first argument, with the others."""


def own_tests() -> set[str]:
    """The names of all tests of the suites, such as ``monitor.test_energy.test_monitor``."""
    found = set()
    for suite in SUITES:
        path = ZEUS_SOURCE / "tests" / suite
        for file in sorted(path.rglob("test_*.py")) if path.is_dir() else [path]:
            module = ".".join(file.relative_to(ZEUS_SOURCE / "tests").with_suffix("").parts)
            for node in ast.parse(file.read_text()).body:
                inside = node.body if isinstance(node, ast.ClassDef) else [node]
                prefix = f"{module}.{node.name}" if isinstance(node, ast.ClassDef) else module
                found |= {
                    f"{prefix}.{one.name}"
                    for one in inside
                    if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
                    and one.name.startswith("test_")
                }
    return found


def prepared(folder: Path) -> Path:
    """A copy of Zeus's tests with data files, beside a stand-in for JAX."""
    shutil.copytree(ZEUS_SOURCE / "tests", folder / "tests")
    _write_profile(folder / "tests" / "profile_data")
    _write_intensities(folder / "tests" / "monitor" / "carbon_history_files")
    _write_tariffs(folder / "tests" / "monitor" / "price_output_files")
    (folder / "jax.py").write_text(FRAMEWORK)
    return folder


def _write_profile(folder: Path) -> None:
    """The energy and time of two GPUs at each limit; least energy within the range."""
    folder.mkdir()
    with (folder / "two.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["start_time", "window_name", "elapsed_time", "gpu0_energy", "gpu1_energy"])
        for watts in range(300, 175, -25):
            lost = (300 - watts) ** 2
            joules = 10 * watts * (1 + lost / 30_000)
            rows.writerow([0, f"limit_{watts}", 10 + lost / 2_000, joules, joules + 1])


def _write_intensities(folder: Path) -> None:
    """Two answers, which together have the hours of the tests."""
    folder.mkdir()
    first = datetime(2024, 11, 30, 7)  # noqa: DTZ001 - written as UTC
    hours = [
        {
            "datetime": f"{first + timedelta(hours=i):%Y-%m-%dT%H}:00:00.000Z",
            "carbonIntensity": 300 + i,
        }
        for i in range(30)
    ]
    for name, part in (("carbon_history_file1", hours[:23]), ("carbon_history_file2", hours[23:])):
        (folder / name).write_text(json.dumps({"history": part}))


def _write_tariffs(folder: Path) -> None:
    """A flat tariff, one with three prices a day, and no tariff, by their labels in the tests."""
    folder.mkdir()
    flat = [[0] * 24 for _ in range(12)]
    thirds = [[hour // 8 for hour in range(24)] for _ in range(12)]
    tariffs = {
        "ann_arbor": ("539f6d3bec4f024411ecb311", [[{"rate": 0.1056, "adj": 0.029681}]], flat),
        "virginia": ("539f6e1dec4f024411ecbeaf", [[{"rate": 0.1 * i}] for i in (1, 2, 3)], thirds),
    }
    for name, (label, rates, schedule) in tariffs.items():
        tariff = {
            "label": label,
            "energyratestructure": rates,
            "energyweekdayschedule": schedule,
            "energyweekendschedule": schedule,
        }
        (folder / f"{name}.json").write_text(json.dumps({"items": [tariff]}))
    (folder / "invalid.json").write_text("{}")


def passed_on_zeus(folder: Path) -> dict[str, bool]:
    """True for each test of Zeus all cases of which pass on Zeus."""
    environ = {**_environment(), "PYTHONPATH": str(folder)}
    return _passed([str(CLIENTS), "-m", "pytest"], environ, folder)


def passed_on_install(folder: Path) -> dict[str, bool]:
    """The same after ``install()``, where Zeus is not installed.

    Without their ``conftest.py``, which resets the devices that Zeus has found.
    """
    code = f"{INSTALL}import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))"
    packages = without_zeus(folder / "packages")
    ours = (ROOT / "agent", sysconfig.get_paths()["purelib"])  # the last has our dependencies
    path = os.pathsep.join(map(str, (folder, packages, *ours)))
    command = [str(CLIENTS), "-S", "-c", code, "--noconftest"]
    return _passed(command, {**_environment(), "PYTHONPATH": path}, folder)


def without_zeus(folder: Path) -> Path:
    """A folder with the packages of the clients' environment, but for Zeus."""
    folder.mkdir()
    packages = next((CLIENTS.parents[1] / "lib").glob("python3.*/site-packages"))
    for one in packages.iterdir():
        if not one.name.startswith("zeus"):
            (folder / one.name).symlink_to(one)
    return folder


def _environment() -> dict[str, str]:
    kept = ("HOME", "LANG", "PATH", "TMPDIR")
    return {name: os.environ[name] for name in kept if name in os.environ}


def _passed(command: Sequence[str], environ: Mapping[str, str], folder: Path) -> dict[str, bool]:
    results = folder / "results.xml"
    results.unlink(missing_ok=True)
    options = [
        "--continue-on-collection-errors",
        "-p",
        "no:cacheprovider",
        f"--junit-xml={results}",
    ]
    modules = [f"tests/{module}" for module in MODULES]
    done = subprocess.run(
        [*command, "-q", "-W", "ignore", *options, *modules, *GPU_CASES],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert results.exists(), done.stdout + done.stderr
    found: dict[str, bool] = {}
    for case in ElementTree.parse(results).iter("testcase"):
        name = case.attrib["name"].partition("[")[0]
        module = case.attrib.get("classname", "").removeprefix("tests.")
        known = f"{module}.{name}"
        found[known] = found.get(known, True) and not _failed(case)
    return found


def _failed(case: Any) -> bool:
    return any(case.find(kind) is not None for kind in ("failure", "error", "skipped"))
