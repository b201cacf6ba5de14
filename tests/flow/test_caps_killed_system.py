"""A capper of the system's own that ends while an agent is its client, and another that follows."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.capper_process import CapperProcess
from support.requirements import ROOT
from support.tuned_stack import ORIGINAL, Tuned, TunedHost

pytestmark = pytest.mark.exhaustive

Note = Callable[[str, object], None]


@pytest.fixture(scope="module")
def host() -> Iterator[TunedHost]:
    with TunedHost() as host:
        yield host


@pytest.fixture
def client(host: TunedHost, tmp_path: Path) -> Iterator[Tuned]:
    """An agent that starts no capper itself."""
    with Tuned(host, tmp_path, capper="false") as agent:
        yield agent
        agent.send(signal.SIGTERM)
        assert agent.ended() == 0


def system_capper(agent: Tuned, **how: object) -> CapperProcess:
    """Started by somebody else, over the same journal."""
    return CapperProcess(
        agent.host.emulated,
        agent.folder,
        sockets=agent.host.sockets,
        caps__lease="2s",
        caps__largest_step=1.0,
        **how,  # type: ignore[arg-type]
    )


def test_an_upgrade_ends_one_capper_and_starts_another_while_the_agent_lives(
    client: Tuned, record_property: Note
) -> None:
    with system_capper(client) as old:
        old.ready()
        client.caps()
        took = client.restoring(lambda: old.process.send_signal(signal.SIGTERM))
        record_property("SIGTERM of the system's capper, for an upgrade", took)
        assert old.process.wait(20) == 0
        assert client.journal() == []
    with system_capper(client) as new:
        new.ready()
        client.caps()
        assert client.process.poll() is None
        assert new.end() == 0
    assert client.host.limit == ORIGINAL
    assert client.journal() == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_in_the_middle_of_a_write_for_the_agent_its_successor_gives_back(
    client: Tuned, record_property: Note, when: str
) -> None:
    program = [sys.executable, "-m", "support.blocking_capper", when]
    within = ["env", f"PYTHONPATH={ROOT / 'tests'}"]
    with system_capper(client, program=program, within=within) as blocked:
        client.until(lambda: "standing still" in blocked.said, "it writes")
        assert client.host.capped() == (when == "after")
        (entry,) = client.journal()
        assert (entry["original"], entry["written"]) == (ORIGINAL, False)
        client.until(lambda: client.reason() == "no_capper", "the agent does not wait for it")
        blocked.end(signal.SIGKILL)
    successors: list[CapperProcess] = []
    took = client.restoring(lambda: successors.append(system_capper(client).ready()))
    if when == "after":
        record_property("SIGKILL of a capper between write and read-back, then another", took)
    with successors[0] as successor:
        client.caps()
        assert successor.end() == 0
    assert client.host.limit == ORIGINAL
    assert client.journal() == []
