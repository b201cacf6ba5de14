"""An agent that is really ended while its cap is in force, however: the original limit is back."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.stopped_holders import go_on, still_while_capped
from support.tuned_stack import LEASE, ORIGINAL, Tuned, TunedHost
from support.waiting import eventually

Note = Callable[[str, object], None]


@pytest.fixture(scope="module")
def host() -> Iterator[TunedHost]:
    with TunedHost() as host:
        yield host


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
