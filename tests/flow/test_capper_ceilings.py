"""Ceilings on the socket of a real capper: other users of this machine, restarts, restore."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed.capper_fixtures import ORIGINAL, gpu_fixture, host_fixture
from testbed.capper_process import CapperProcess, Gpu
from testbed.local_user import asks
from testbed.program import wattspan
from testbed.waiting import eventually

from wattspan.emulation.host import EmulatedHost

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becoming other users needs root")

FLOOR = 420_000
HOUR = 3600 * 10**9
AGENT, POWER_MANAGER = 54321, 54322


host = host_fixture("one-socket-h100")
gpu = gpu_fixture()


@pytest.fixture
def capper(host: EmulatedHost, tmp_path: Path, gpu: Gpu) -> Iterator[CapperProcess]:
    with CapperProcess(
        host, tmp_path, caps__users=str(AGENT), caps__largest_step=1.0,
        environ={"WATTSPAN_CAPS_CEILING_USERS": str(POWER_MANAGER)},
    ) as capper:  # fmt: skip
        capper.sockets.chmod(0o755)
        yield capper.ready()


def ceiling(capper: CapperProcess, uid: int, limit: int | None, ttl: int | None = HOUR) -> str:
    request = json.dumps({"do": "ceiling", "limit": limit, "why": "a test", "ttl": ttl})
    return asks(uid, capper.sockets / "capper.sock", f"{request}\n")


def recorded(capper: CapperProcess, deed: str) -> list[dict[str, object]]:
    lines = (capper.directory / "audit.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["deed"] == deed]


def test_agents_user_cannot_set_a_ceiling(capper: CapperProcess, gpu: Gpu) -> None:
    for ttl in (None, HOUR):
        assert '"not_allowed"' in ceiling(capper, AGENT, 1, ttl)
    assert gpu.limit == ORIGINAL
    assert not (capper.directory / "ceilings.json").exists()
    assert recorded(capper, "refuse")[0]["uid"] == AGENT


def test_ceiling_stops_at_the_floor_and_restore_lifts_it(
    host: EmulatedHost, capper: CapperProcess, gpu: Gpu, tmp_path: Path
) -> None:
    assert '"is":"state"' in ceiling(capper, POWER_MANAGER, 1)
    eventually(lambda: gpu.limit == FLOOR, "the floor")
    assert [row["uid"] for row in recorded(capper, "ceiling")] == [POWER_MANAGER]
    shown = wattspan("caps", "status", *capper.words[2:]).stdout
    assert f"by user {POWER_MANAGER}: 0.001 W, for " in shown
    done = wattspan("caps", "restore", *capper.words)
    assert done.returncode == 0, done.stderr
    assert gpu.limit == ORIGINAL
    assert [row["uid"] for row in recorded(capper, "lift")] == [POWER_MANAGER]
    capper.end()
    with CapperProcess(host, tmp_path) as successor:
        successor.ready()
        client = successor.client()
        client.rows()
        assert client.state.ceiling is None
        client.close()


def kept(capper: CapperProcess) -> list[int]:
    told = json.loads((capper.directory / "ceilings.json").read_bytes())
    return [one["uid"] for one in told["requested"]]


def test_ceilings_of_a_killed_capper_are_lifted_by_operator_restore_only(
    capper: CapperProcess, gpu: Gpu
) -> None:
    ceiling(capper, POWER_MANAGER, 1)
    eventually(lambda: gpu.limit == FLOOR, "the floor")
    capper.end(signal.SIGKILL)
    wattspan("caps", "restore", *capper.words, SERVICE_RESULT="signal")  # as ExecStopPost= does
    assert kept(capper) == [POWER_MANAGER]
    environ = {"WATTSPAN_CAPS_CEILING_USERS": str(POWER_MANAGER)}
    done = wattspan("caps", "restore", *capper.words, **environ)
    assert done.returncode == 0, done.stderr
    assert kept(capper) == []
    assert [row["uid"] for row in recorded(capper, "lift")] == [POWER_MANAGER]
