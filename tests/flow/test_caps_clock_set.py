"""The wall clock is set while a cap is in force: leases, tuning and restoring do not mind."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from testbed.capper_process import CapperProcess
from testbed.requirements import ROOT, find_program
from testbed.tuned_stack import LEASE, ORIGINAL, Tuned, TunedHost
from testbed.waiting import eventually

from wattspan.clock import SystemClock
from wattspan.model import SECOND

pytestmark = [pytest.mark.exhaustive, pytest.mark.needs_cc]
CAP, HOUR = 500_000, 3600


@dataclass(frozen=True)
class WallClock:
    """Wall time of programs with this environment."""

    file: Path
    environ: dict[str, str]

    def off_by(self, seconds: int) -> None:
        # in place: the file is mapped.
        with self.file.open("r+b") as file:
            file.write(struct.pack("=q", seconds * SECOND))


@pytest.fixture(scope="module")
def wall(tmp_path_factory: pytest.TempPathFactory) -> WallClock:
    folder = tmp_path_factory.mktemp("clock")
    library, file = folder / "stepped_clock.so", folder / "offset"
    compiler = find_program("cc", "gcc", "clang")
    assert compiler is not None
    source = ROOT / "testbed" / "stepped_clock.c"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"]
    subprocess.run(command, check=True)
    file.write_bytes(bytes(8))
    return WallClock(file, {"LD_PRELOAD": str(library), "STEPPED_CLOCK": str(file)})


@pytest.fixture
def host(wall: WallClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[TunedHost]:
    """Its trainer's spans use the stepped clock."""
    wall.off_by(0)
    with monkeypatch.context() as patch:
        for name, value in wall.environ.items():
            patch.setenv(name, value)
        host = TunedHost()
    with host:
        yield host


def test_clock_of_a_test_can_be_set(wall: WallClock) -> None:
    wall.off_by(-HOUR)
    words = [sys.executable, "-c", "import time; print(time.time_ns())"]
    told = subprocess.run(
        words, env={**os.environ, **wall.environ}, capture_output=True, text=True, check=True
    )
    off = (int(told.stdout) - SystemClock().now().wall) / 1e9
    assert off == pytest.approx(-HOUR, abs=60)


def test_lease_time_is_unaffected_by_clock_steps(
    wall: WallClock, host: TunedHost, tmp_path: Path
) -> None:
    within = ["env", *(f"{key}={value}" for key, value in wall.environ.items())]
    with CapperProcess(host.emulated, tmp_path, within=within, caps__lease="2s") as capper:
        client = capper.ready().client()
        client.hold("job", {host.gpu.key: CAP}, "why")
        assert host.capped()
        wall.off_by(HOUR)
        client.rows(renew=True)
        assert capper.row(host.gpu.key).holder == "job", "an hour later is not too late"
        wall.off_by(-HOUR)
        client.rows(renew=True)
        clock = SystemClock()
        began = clock.monotonic()
        assert capper.row(host.gpu.key).holder == "job"
        eventually(host.restored, "the lease lapses")
        assert (clock.monotonic() - began) / 1e9 < LEASE + 8, "two hours earlier is no more time"
        client.close()
        assert capper.end() == 0


def test_tuning_continues_over_clock_steps(
    wall: WallClock, host: TunedHost, tmp_path: Path
) -> None:
    with Tuned(host, tmp_path, environ=wall.environ) as agent:
        agent.caps()
        wall.off_by(HOUR)
        agent.caps()
        wall.off_by(-HOUR)
        agent.caps()
        agent.send(signal.SIGTERM)
        assert agent.ended() == 0
    assert host.limit == ORIGINAL
    assert agent.journal() == []
