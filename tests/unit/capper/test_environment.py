"""Environment of the capper: systemd, users, and tables for a person."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from testbed.capper_bench import W

from wattspan.capper.host_directory import capper_directory, capper_socket_path
from wattspan.capper.protocol import CeilingRow, KnobRow, StateReply
from wattspan.cli.caps import state_lines
from wattspan.cli.formatting import local_time
from wattspan.config import AgentSettings
from wattspan.model import SECOND, Knob
from wattspan.testing import ManualClock
from wattspan.util.unix_sockets import peer_credentials, uids_of


def test_users_are_named_by_name_or_number() -> None:
    uids, unknown = uids_of(("root", "4711", "nobody-of-this-name"))
    assert uids == {0, 4711}
    assert unknown == ("nobody-of-this-name",)


def test_peer_identity_comes_from_the_kernel() -> None:
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        assert peer_credentials(one) == (os.getpid(), os.geteuid())


def state(*rows: KnobRow, ceiling: int | None = None) -> StateReply:
    return StateReply(rows=list(rows), lease=10 * SECOND, ceiling=ceiling)


def test_lease_table_shows_holder_limit_time_and_reason() -> None:
    clock = ManualClock()
    now = clock.monotonic()
    row = KnobRow(
        knob=Knob.GPU_POWER,
        device="gpu:GPU-1",
        name="H100 0",
        minimum=200 * W,
        default=700 * W,
        maximum=700 * W,
        requested=512_500,
        enforced=500 * W,
        original=650 * W,
        wanted=512_500,
        ceiling=600 * W,
        holder="train",
        why="Hold 512.5 W.",
        since_mono=now - 3725 * SECOND,
        since_wall=0,
        expires=now + 8 * SECOND,
    )
    assert state_lines(state(row, ceiling=2000 * W), clock) == [
        "Ceiling of all devices together: 2000 W",
        "H100 0 (gpu:GPU-1)",
        "    gpu_power: 512.5 W of 200 W to 700 W, default 700 W",
        "    obeys 500 W",
        "    held for train: 512.5 W; the original is 650 W",
        f"    since {local_time(0)}",
        "    lapses in 8.0 s unless renewed",
        "    because: Hold 512.5 W",
        "    its imposed limit: 600 W",
    ]


def test_each_ceiling_is_shown_with_owner_limit_time_left_and_reason() -> None:
    clock = ManualClock()
    told = StateReply(
        rows=[KnobRow(knob=Knob.GPU_POWER, device="gpu:GPU-1", name="H100 0", requested=200 * W)],
        lease=10 * SECOND,
        ceiling=100 * W,
        short=320 * W,
        ceilings=[
            CeilingRow(source="configuration", limit=2000 * W),
            CeilingRow(source="file", limit=1200 * W, uid=0, why="grid"),
            CeilingRow(
                source="socket", limit=100 * W, uid=1000, expires=clock.monotonic() + 75 * SECOND
            ),
        ],
    )
    assert state_lines(told, clock)[:5] == [
        "Ceiling of all devices together: 100 W",
        "    [caps] budget_watts: 2000 W",
        "    [caps] budget_file by user 0: 1200 W; because: grid",
        "    set on the socket by user 1000: 100 W, for 75.0 s",
        "    It cannot be kept: the devices' floors take 320 W more.",
    ]


def test_clock_is_shown_in_its_own_unit() -> None:
    row = KnobRow(
        knob=Knob.GPU_CLOCK, device="gpu:GPU-1", name="H100 0", maximum=1980, trouble="Odd."
    )
    assert state_lines(state(row), ManualClock()) == [
        "H100 0 (gpu:GPU-1)",
        "    gpu_clock: unknown, at most 1980 MHz",
        "    Odd.",
    ]


def test_host_without_actuators_is_reported() -> None:
    assert state_lines(state(), ManualClock()) == ["This host has no device with a power limit."]


def test_systems_capper_has_directories_of_its_own() -> None:
    # the owner of a directory may rename its entries, and the agent owns its directory
    agent = AgentSettings()
    state, run = Path(agent.state_dir), Path(agent.run_dir)
    assert capper_directory(state, emulated=False) == Path("/var/lib/wattspan-capper")
    assert capper_socket_path(run) == Path("/run/wattspan-capper/capper.sock")


def test_capper_socket_of_another_agent_is_in_its_run_directory(tmp_path: Path) -> None:
    assert capper_directory(tmp_path, emulated=False) == tmp_path / "capper"
    assert capper_socket_path(tmp_path) == tmp_path / "capper.sock"
    assert (
        capper_directory(Path(AgentSettings().state_dir), emulated=True).name == "capper-emulated"
    )
    assert capper_socket_path(Path(AgentSettings().run_dir), emulated=True) == Path(
        "/run/wattspan/capper.sock"
    )
