"""An agent that is really ended while its cap is in force, however: the original limit is back."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from testbed.fixtures import entered
from testbed.journals import journal_entries
from testbed.program import Running, alive, descendants
from testbed.stopped_holders import go_on, still_while_capped
from testbed.tuned_stack import LEASE, ORIGINAL, PROFILE, Tuned, TunedHost
from testbed.waiting import eventually

from wattspan.capper.protocol import CapperClient
from wattspan.clock import SystemClock
from wattspan.model import Knob
from wattspan.ports import CapsError

Note = Callable[[str, object], None]


host = entered(TunedHost, "module")


@pytest.fixture
def agent(host: TunedHost, tmp_path: Path) -> Iterator[Tuned]:
    with Tuned(host, tmp_path) as agent:
        yield agent


def test_terminated_agent_restores_its_caps(agent: Tuned, record_property: Note) -> None:
    agent.caps()
    took = agent.restoring(lambda: agent.send(signal.SIGTERM))
    record_property("SIGTERM of the agent", took)
    assert agent.ended() == 0
    assert agent.host.limit == ORIGINAL
    assert agent.journal() == []


def test_killed_agent_has_its_caps_restored_and_the_next_caps_again(
    agent: Tuned, host: TunedHost, record_property: Note
) -> None:
    agent.caps()
    took = agent.restoring(lambda: agent.send(signal.SIGKILL))
    record_property("SIGKILL of the agent", took)
    assert agent.ended() == -signal.SIGKILL
    assert agent.journal() == []
    with Tuned(host, agent.folder) as successor:
        successor.caps()
        written = successor.until(successor.journal, "a cap is written down")
        assert written[0]["original"] == ORIGINAL
        successor.send(signal.SIGTERM)
        assert successor.ended() == 0
    assert host.limit == ORIGINAL
    assert agent.journal() == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("shares_run_dir", [True, False])
def test_agent_started_at_once_after_a_kill_has_a_capper(
    tmp_path: Path, *, shares_run_dir: bool
) -> None:
    """The killed agent's capper restores the limit of the emulated host, which ends after it."""
    with Running(tmp_path, emulate=PROFILE, autotune__mode="apply") as killed:
        first = holding_client(killed)
        family = descendants(killed.process.pid)
        killed.end(signal.SIGKILL)
        place = {"agent__run_dir": killed.run_dir} if shares_run_dir else {}
        with Running(tmp_path, emulate=PROFILE, autotune__mode="apply", **place) as successor:
            successor.run_dir = place.get("agent__run_dir", successor.run_dir)
            holding_client(successor).close()
            eventually(lambda: not alive(family), "nothing of the killed agent is left")
            assert successor.end() == 0
        first.close()
    folder = killed.state_dir / "capper-emulated"
    assert journal_entries(folder) == []
    events = map(json.loads, (folder / "audit.jsonl").read_text().splitlines())
    deeds = [event["deed"] for event in events if event["deed"] in {"restore", "end"}]
    assert deeds == ["restore", "end"] * 2


def holding_client(agent: Running) -> CapperClient:
    """A client of the agent's capper that holds a cap of its GPU."""
    client = CapperClient(agent.run_dir / "capper.sock", SystemClock(), who="test", timeout=20.0)

    def held() -> bool:
        with suppress(CapsError):
            row = next(row for row in client.rows() if row.state.key.knob is Knob.GPU_POWER)
            return bool(client.hold("job", {row.state.key: 600_000}, "a test"))
        return False

    eventually(held, f"its capper answers: {agent.said}")
    return client


@pytest.mark.exhaustive
def test_stopped_agent_loses_its_lease_and_resumes_tuning(
    agent: Tuned, record_property: Note
) -> None:
    agent.caps()
    took = agent.restoring(lambda: agent.send(signal.SIGSTOP))
    record_property(f"SIGSTOP of the agent (a lease of {LEASE:.0f} s)", took)
    eventually(lambda: agent.journal() == [], "nothing is held")
    assert agent.process.poll() is None
    agent.send(signal.SIGCONT)
    agent.caps()
    agent.until(
        lambda: agent.told().get("decision", {}).get("move") in {"probe", "hold"}, "it tunes on"
    )
    agent.send(signal.SIGTERM)
    assert agent.ended() == 0
    assert agent.host.limit == ORIGINAL


@pytest.mark.exhaustive
def test_agent_that_ends_continues_its_stopped_capper_which_restores_the_limit(
    agent: Tuned,
) -> None:
    still_while_capped(agent)
    agent.send(signal.SIGTERM)
    go_on(agent.process.pid)
    assert agent.process.wait(60) == 0
    eventually(lambda: not agent.host.capped(), "the capper restores the limit")
    agent.ended()
    assert agent.journal() == []


@pytest.mark.exhaustive
def test_next_agent_restores_after_both_are_killed(
    agent: Tuned, host: TunedHost, record_property: Note
) -> None:
    os.kill(still_while_capped(agent), signal.SIGKILL)
    agent.send(signal.SIGKILL)
    assert agent.ended() == -signal.SIGKILL
    assert host.capped()
    successors: list[Tuned] = []
    took = agent.restoring(lambda: successors.append(Tuned(host, agent.folder)))
    record_property("SIGKILL of both, then another agent", took)
    with successors[0] as successor:
        successor.send(signal.SIGTERM)
        assert successor.ended() == 0
    assert host.limit == ORIGINAL
    assert agent.journal() == []
