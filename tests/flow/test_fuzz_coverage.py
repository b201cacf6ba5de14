"""The fuzz targets under libFuzzer, guided by coverage: a moment each, as a check that it works.

`make fuzz` takes as long as it is given; docs/how-to/fuzz.md says how.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).resolve().parents[2]

pytest.importorskip("atheris", reason="no atheris: it has wheels for CPython on x86-64 only")


def fuzz(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fuzz", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_fuzz_targets_pass_briefly(tmp_path: Path) -> None:
    done = fuzz("--seconds", "1", "--jobs", "2", "--seed", "1", "--findings", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(fuzz("--list").stdout.splitlines())
    assert all(line.endswith("clean") for line in lines)


def test_fuzz_finding_has_its_reproduction_command(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "from fuzz import registry\n"
        "def run(data):\n"
        "    if data[:1] == b'x': raise ValueError('an x is too much')\n"
        "target = registry.Target('broken', run, 'whose', 'holds', (), (b'x',))\n"
        "from fuzz.campaign import drive_all, reproducer, why\n"
        "(outcome,) = drive_all([target], 5, Path(sys.argv[1]))\n"
        "print(outcome.is_clean, why(outcome))\n"
        "print(reproducer(outcome.crashes[0], target))\n"
        "print(outcome.crashes[0].read_bytes()[:1])\n"
    )
    done = subprocess.run(
        [sys.executable, str(broken), str(tmp_path / "found")],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    first, second, third = done.stdout.splitlines()[-3:]
    assert first == "False ValueError: an x is too much"
    assert second.startswith(f"make fuzz target=broken input={tmp_path}/found/broken-crash-")
    assert third == "b'x'"
