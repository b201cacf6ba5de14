"""AMD boards: the package from PyPI in a process of its own, and the capper beside NVIDIA's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from amdsmi_library import build, environment
from support.amd_boards import AmdFaults
from support.capper_process import CapperProcess, gpu_at
from support.waiting import eventually
from wattspan.clock import SystemClock
from wattspan.emulation.boards import MI300X
from wattspan.emulation.gpus import EmulatedGpus
from wattspan.emulation.host import EmulatedHost
from wattspan.emulation.profiles import AMD_GPUS, profile_named
from wattspan.emulation.workloads import SteadyLoad
from wattspan.model import CapKey, Knob

CLIENT = """
import json, sys
from wattspan.clock import SystemClock
from wattspan.model import Consumer, PayerInfo
from wattspan.ports import SourceContext
from wattspan.sources.amdsmi.device import AmdSmiSettings
from wattspan.sources.amdsmi.source import open_amdsmi
from wattspan.testing import FakeDirectory

clock = SystemClock()
worker = Consumer(int(sys.argv[1]), 0)
directory = FakeDirectory([PayerInfo(worker, "worker")])
source = open_amdsmi(AmdSmiSettings(), SourceContext(clock, directory))
readings, spent, gpus = [], 0, ()
while spent < 200_000_000 or len(readings) < 10:
    batch = source.read()
    readings += batch.readings
    spent += sum(usage.spent.get(worker, 0) for usage in batch.usages)
    gpus = batch.gpus or gpus
    clock.sleep_until(clock.monotonic() + 20_000_000)
source.close()
print(json.dumps({
    "provenance": sorted({str(domain.provenance) for domain in batch.domains}),
    "rising": all(a.counter <= b.counter for a, b in zip(readings, readings[1:])),
    "energy": readings[-1].counter - readings[0].counter,
    "limit": gpus[0].limits.maximum,
    "failures": [str(failure) for failure in batch.failures],
}))
"""


@pytest.mark.needs_cc
def test_package_and_a_c_library_feed_the_source(tmp_path: Path) -> None:
    library = build(tmp_path)
    with EmulatedGpus(tmp_path / "gpus", [MI300X], SystemClock()) as gpus:
        gpus.attach(0, os.getpid(), SteadyLoad(0.5))
        gpus.start()
        answer = subprocess.run(
            [sys.executable, "-c", CLIENT, str(os.getpid())],
            env={**os.environ, **environment(library, gpus.path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        truth = gpus.truth(0).energy
    assert answer.returncode == 0, answer.stderr
    told = json.loads(answer.stdout)
    assert told["provenance"] == ["emulated"]  # without any declaration to the source
    assert told["rising"]
    assert 0 < told["energy"] <= truth
    assert told["limit"] == 750_000
    assert told["failures"] == []


@pytest.fixture
def host() -> Iterator[EmulatedHost]:
    with EmulatedHost(profile_named("one-socket-h100")) as host:
        yield host


def test_capper_limits_boards_of_both_vendors_although_one_hangs(
    host: EmulatedHost, tmp_path: Path
) -> None:
    with (
        EmulatedGpus(host.directory / AMD_GPUS, [MI300X, MI300X], SystemClock()) as boards,
        gpu_at(host, 650_000) as nvidia,
    ):
        boards.start()
        amd, other = (CapKey(Knob.GPU_POWER, f"gpu:0000:{bus}:00.0") for bus in ("60", "61"))

        def limit(board: int) -> int:
            return int(boards.file.record(board).limit_request & 0xFFFF_FFFF)

        with CapperProcess(host, tmp_path) as capper:
            client = capper.ready().client()
            keys = {row.state.key for row in client.rows()}
            assert {nvidia.key, amd, other} <= keys
            client.hold("one", {nvidia.key: 500_000, amd: 600_000}, "a test")
            eventually(lambda: (nvidia.limit, limit(0)) == (500_000, 600_000), "both are limited")
            AmdFaults(boards).hang(0)
            client.hold("two", {other: 650_000}, "a test")
            eventually(lambda: limit(1) == 650_000, "another board is limited")
            AmdFaults(boards).hang(0, on=False)
            client.close()
            assert capper.end() == 0, capper.said
        eventually(
            lambda: (nvidia.limit, limit(0), limit(1)) == (650_000, 750_000, 750_000),
            "the original limits are back",
        )
