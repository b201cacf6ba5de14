"""No child process of the program imports a module from the working directory or PYTHONPATH."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from testbed.program import ENVIRONMENT, PROGRAM, options
from testbed.waiting import eventually

HOSTILE = ("click", "msgspec", "psutil", "pyarrow", "sitecustomize", "usercustomize", "wattspan")

ENGINE_AND_WORKLOAD = """
from pathlib import Path
from wattspan.emulation.host import EmulatedHost
from wattspan.emulation.host import profile_named

with EmulatedHost(profile_named("batch")) as host:
    assert host.start_jobs()
    # A relative name is the parent's, wherever the child runs.
    assert host.start_jobs(Path("otlp.sock"))
"""

CAPPER = """
import os
from wattspan.clock import SystemClock
from wattspan.config import AgentSettings
from wattspan.config import Config
from wattspan.config.writing import to_toml
from wattspan.emulation.host import EmulatedHost
from wattspan.emulation.host import profile_named
from wattspan.service.capper_process import CapperProcess

folder = os.environ["FOLDER"]
config = Config(agent=AgentSettings(state_dir=folder, run_dir=folder))
with EmulatedHost(profile_named("batch")) as host:
    emulated = ("--emulated", str(host.directory))
    there = lambda: os.path.exists(os.path.join(folder, "capper.sock"))
    child = CapperProcess(SystemClock(), emulated, to_toml(config), there, print)
    child.start()
    assert there(), "the capper does not listen"
    assert os.readlink(f"/proc/{child.pid}/cwd") == "/"
    child.stop()
"""

CONVERSION = """
import os
from wattspan.ports import WattspanError
from wattspan_exporters.files import parts

part, draft = os.memfd_create("part"), os.memfd_create("draft")
os.write(part, b"not a row")
parts.has_pyarrow = lambda: True
try:
    parts._to_parquet(part, draft)
except WattspanError as error:
    print(error)
"""


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A directory of modules, each of which writes its name into ``imported``."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    note = folder / "imported"
    for name in HOSTILE:
        (folder / f"{name}.py").write_text(f"open({str(note)!r}, 'a').write({name!r} + ' ')\n")
    return folder


@pytest.mark.parametrize(
    "parent",
    [ENGINE_AND_WORKLOAD, CAPPER, CONVERSION],
    ids=["emulated host", "capper", "conversion"],
)
def test_child_imports_no_module_of_the_working_directory(
    hostile: Path, tmp_path: Path, parent: str
) -> None:
    state = tmp_path / "s"
    state.mkdir()
    done = subprocess.run(
        [sys.executable, "-I", "-c", parent],
        cwd=hostile,
        env={**ENVIRONMENT, "PYTHONPATH": str(hostile), "FOLDER": str(state)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    imported = hostile / "imported"
    assert not imported.exists(), f"imported: {imported.read_text()}"
    assert done.returncode == 0, done.stderr


def test_agents_capper_uses_the_agents_relative_directories(hostile: Path) -> None:
    settings = {
        "agent.state_dir": "state",
        "agent.run_dir": "run",
        "caps.capper": "true",
        "autotune.mode": "apply",
        "spans.http": "",
        "exporters.prometheus.listen": "127.0.0.1:0",
    }
    agent = subprocess.Popen(
        [*PROGRAM[:1], "-I", *PROGRAM[1:], "run", "--emulate", "batch", *options(settings)],
        cwd=hostile,
        env={**ENVIRONMENT, "PYTHONPATH": str(hostile)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        there = (hostile / "run" / "capper.sock").exists
        eventually(lambda: there() or agent.poll() is not None, "the capper's socket", 20)
        assert there()
    finally:
        agent.terminate()
        said = agent.communicate(timeout=30)[1].decode()
    assert not (hostile / "imported").exists(), (hostile / "imported").read_text()
    assert agent.returncode == 0, said


def test_python_m_wattspan_imports_no_module_of_the_working_directory(hostile: Path) -> None:
    (hostile / "wattspan.py").unlink()  # Python itself chooses the program, before its first line
    for name in ("sitecustomize", "usercustomize"):
        (hostile / f"{name}.py").unlink()
    done = subprocess.run(
        [sys.executable, "-m", "wattspan", "doctor", "--json"],
        cwd=hostile,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert not (hostile / "imported").exists(), (hostile / "imported").read_text()
    assert done.returncode in (0, 3), done.stderr


def test_packages_scripts_ignore_the_environment_of_their_caller(hostile: Path) -> None:
    """Slurm's epilog is root's, with the environment that slurmd gives it."""
    root = Path(__file__).parents[2]
    bin_ = hostile.parent / "bin"
    bin_.mkdir()
    (bin_ / "wattspan").write_text(
        f"#!/bin/sh\nexec {sys.executable} -c 'from wattspan.cli import main; main()' \"$@\"\n"
    )
    (bin_ / "wattspan").chmod(0o755)
    subprocess.run(
        ["/bin/sh", str(root / "packaging/slurm/epilog")],
        cwd=hostile,
        env={
            "PATH": f"{bin_}:{os.environ['PATH']}",
            "PYTHONPATH": str(hostile),
            "SLURM_JOB_ID": "7",
            "WATTSPAN_SETTLE": "0",
            "WATTSPAN_JOBS": os.devnull,
            "WATTSPAN_CONFIG": os.devnull,
        },
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert not (hostile / "imported").exists(), (hostile / "imported").read_text()
