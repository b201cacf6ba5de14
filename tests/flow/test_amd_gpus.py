"""AMD boards: the package from PyPI in a process of its own, and the capper beside NVIDIA's."""

from __future__ import annotations

from pathlib import Path

import pytest
from testbed.amd_boards import AmdFaults
from testbed.amdsmi_library import build, environment
from testbed.capper_process import CapperProcess, gpu_at
from testbed.fixtures import entered
from testbed.gpu_source_process import read_source
from testbed.waiting import eventually

from wattspan.clock import SystemClock
from wattspan.emulation.boards import MI300X
from wattspan.emulation.gpu_file import AMD_GPUS
from wattspan.emulation.gpus import EmulatedGpus
from wattspan.emulation.host import EmulatedHost, profile_named
from wattspan.model import CapKey, Knob


@pytest.mark.needs_cc
def test_package_and_a_c_library_feed_the_source(tmp_path: Path) -> None:
    library = build(tmp_path)
    file = tmp_path / "gpus"
    told = read_source("amdsmi", MI300X, file, environment(library, file))
    assert told["provenance"] == ["emulated"]  # without any declaration to the source
    assert told["rising"]
    assert 0 < told["energy"] <= told["truth"]
    assert told["limit"] == 750_000
    assert told["failures"] == []


host = entered(lambda: EmulatedHost(profile_named("one-socket-h100")))


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
