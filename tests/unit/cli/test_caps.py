"""The capper that `wattspan caps` asks: its name, the right to change it, and consent."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from testbed.fixtures import entered
from testbed.process_rights import without_root

from wattspan.capper.protocol import CapperAddress, CapperClient, KnobRow, RefusalReason, StateReply
from wattspan.cli.caps import capper_line, permitted_capper, require_right
from wattspan.config import AgentSettings, Config
from wattspan.model import Knob
from wattspan.ports import CapsError
from wattspan.testing import ManualClock

SOCKET = Path("/tmp/other/capper.sock")
ROWS = [
    KnobRow(knob=knob, device=device, name=name)
    for knob in (Knob.GPU_POWER, Knob.GPU_CLOCK)
    for device, name in (("gpu:0", "H100 0"), ("gpu:1", "H100 1"))
]


class AnsweringClient(CapperClient):
    """A client whose capper answers, or fails, without a socket."""

    def __init__(self, answer: StateReply | CapsError, *, shared: bool = False) -> None:
        super().__init__(
            lambda: (CapperAddress(SOCKET, shared=shared),), ManualClock(), who="a test"
        )
        self._answer = answer

    def rows(self, *, renew: bool = False) -> tuple[()]:
        if isinstance(self._answer, CapsError):
            raise self._answer
        self.state = self._answer
        return ()


def state(agent: int = 0) -> StateReply:
    return StateReply(rows=ROWS, lease=1, pid=12, agent=agent)


class Case(NamedTuple):
    agent: int
    socket: str
    line: str


@pytest.mark.parametrize(
    "case",
    [
        Case(7, "/tmp/x/capper.sock", "of the agent process 7, on /tmp/x/capper.sock"),
        Case(0, "/run/wattspan-capper/capper.sock", "of the system's service, on /run/"),
        Case(0, "/tmp/x/capper.sock", ", started without an agent, on /tmp/x/capper.sock"),
    ],
)
def test_capper_is_named_with_its_agent(case: Case) -> None:
    line = capper_line(state(case.agent), Path(case.socket))
    assert line.startswith("Capper: process 12")
    assert case.line in line


def test_own_capper_needs_no_consent() -> None:
    asked = permitted_capper(AnsweringClient(state()), None, "restore")
    assert asked.devices == ["H100 0", "H100 1"]


def test_capper_of_another_agent_is_refused_with_its_name_and_devices() -> None:
    with pytest.raises(CapsError, match="belongs to another agent") as refused:
        permitted_capper(AnsweringClient(state(7), shared=True), None, "restore")
    sentence = str(refused.value)
    assert "of the agent process 7" in sentence
    assert "H100 0, H100 1" in sentence
    assert f"`wattspan caps restore --capper {SOCKET}`" in sentence


def test_named_capper_of_another_agent_is_permitted() -> None:
    client = AnsweringClient(state(7), shared=True)
    assert permitted_capper(client, SOCKET, "restore") is not None


def test_missing_capper_is_none_unless_it_was_named() -> None:
    gone = CapsError("No capper answers.")
    assert permitted_capper(AnsweringClient(gone), None, "restore") is None
    with pytest.raises(CapsError, match="No capper answers"):
        permitted_capper(AnsweringClient(gone), SOCKET, "restore")


def test_refusal_of_the_capper_is_passed_on_unless_it_ends() -> None:
    refusal = CapsError("Not you.", RefusalReason.NOT_ALLOWED)
    with pytest.raises(CapsError, match="Not you"):
        permitted_capper(AnsweringClient(refusal), None, "restore")
    ending = CapsError("It ends.", RefusalReason.ENDING)
    assert permitted_capper(AnsweringClient(ending), None, "restore") is None


nobody = entered(without_root)


def of(state_dir: str | Path) -> Config:
    return Config(agent=AgentSettings(state_dir=str(state_dir)))


@pytest.mark.usefixtures("nobody")
def test_user_without_a_journal_is_refused() -> None:
    with pytest.raises(CapsError, match=r"nothing was changed.*sudo wattspan caps restore"):
        require_right(of("/var/lib/wattspan"), "restore")


@pytest.fixture
def directory_of_nobody() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        if os.geteuid() == 0:
            os.chown(folder, 65534, -1)
        yield folder


def test_user_with_an_own_state_directory_may_restore(
    directory_of_nobody: str, nobody: None
) -> None:
    require_right(of(f"{directory_of_nobody}/state"), "restore")
