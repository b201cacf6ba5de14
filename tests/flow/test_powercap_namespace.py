"""Programs with /sys hard-coded, unmodified, on the emulated tree in a mount namespace."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from testbed.powercap_host import PowercapHost, python_on

pytestmark = pytest.mark.needs_root


@pytest.fixture(autouse=True)
def _needs_namespaces() -> None:
    tried = subprocess.run(
        ["unshare", "--mount", "mount", "--make-rprivate", "/"], capture_output=True, text=True
    )
    if tried.returncode:
        pytest.skip(f"no private mount namespaces here: {tried.stderr.strip()}")


def test_unmodified_pyrapl_reads_the_tree(tmp_path: Path) -> None:
    with PowercapHost(tmp_path) as host:
        host.pass_time(100)
        host.work(1, 7)
        host.pass_time(1)
        done = python_on(tmp_path, "import pyRAPL; print(list(pyRAPL.Sensor().energy()))")
        assert done.returncode == 0, done.stderr
        shown = [
            int((host.tree.path(zone) / "energy_uj").read_text())
            for zone in ("intel-rapl:0", "intel-rapl:0:0", "intel-rapl:1", "intel-rapl:1:0")
        ]
        assert json.loads(done.stdout) == shown


def test_readers_agree_on_the_host_sysfs(tmp_path: Path) -> None:
    code = """
import json, sys
from pathlib import Path
from wattspan.clock import SystemClock
from wattspan.sources.rapl.powercap import cross_check
from wattspan.sources.rapl.pyrapl import PyRaplSource
check = cross_check(Path("/sys"), SystemClock(), duration=10_000_000)
source = PyRaplSource(Path("/sys"), SystemClock())
source.open()
print(json.dumps({
    "agrees": all(c.agrees for c in check.comparisons),
    "compared": len([c for c in check.comparisons if c.agrees]),
    "failures": [str(f) for f in check.failures],
    "sensor": type(source._sensor._sensor).__name__,
    "ids": [d.id for d in source.read().domains],
}))
"""
    with PowercapHost(tmp_path):
        done = python_on(tmp_path, code)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "agrees": True,
        "compared": 4,
        "failures": [],
        "sensor": "Sensor",  # the library's own, not the one given other files
        "ids": ["rapl:package-0", "rapl:package-0/dram", "rapl:package-1", "rapl:package-1/dram"],
    }


def test_pyrapl_refusal_of_dies_names_the_other_reader(tmp_path: Path) -> None:
    code = """
from pathlib import Path
from wattspan.sources.rapl.pyrapl import PyRaplError, PyRaplSensor
try:
    PyRaplSensor(Path("/sys"), {}, {})
except PyRaplError as error:
    print(error)
"""
    with PowercapHost(tmp_path, "multi-die"):
        done = python_on(tmp_path, code)
    assert "pyRAPL refuses this host" in done.stdout, done.stderr


def test_host_sysfs_is_unchanged_by_the_namespace(tmp_path: Path) -> None:
    before = Path("/sys").stat()
    with PowercapHost(tmp_path):
        python_on(tmp_path, "pass")
    assert (Path("/sys").stat().st_dev, Path("/sys").stat().st_ino) == (
        before.st_dev,
        before.st_ino,
    )
