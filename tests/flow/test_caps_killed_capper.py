"""A capper process that ends while its cap is in force: restored original, continued tuning."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest
from testbed.fixtures import entered
from testbed.program import alive
from testbed.tuned_stack import ORIGINAL, Tuned, TunedHost
from testbed.waiting import eventually

Note = Callable[[str, object], None]


host = entered(TunedHost, "module")


@pytest.fixture(scope="module")
def agent(host: TunedHost, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tuned]:
    """One agent that survives failures of its cappers, and restores at the end."""
    with Tuned(host, tmp_path_factory.mktemp("agent")) as agent:
        yield agent
        agent.send(signal.SIGTERM)
        assert agent.ended() == 0
        assert host.limit == ORIGINAL
        assert agent.journal() == []


def ended(pid: int) -> None:
    eventually(lambda: not alive(frozenset({pid})), "it has ended")


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param((signal.SIGTERM,), marks=pytest.mark.exhaustive),
        (signal.SIGKILL,),
        pytest.param((signal.SIGSTOP, signal.SIGKILL), marks=pytest.mark.exhaustive),
    ],
    ids=lambda numbers: " then ".join(one.name for one in numbers),
)
def test_next_capper_restores_and_the_agent_caps_again(
    agent: Tuned, record_property: Note, numbers: tuple[signal.Signals, ...]
) -> None:
    first = agent.caps().capper
    assert first is not None

    def end() -> None:
        for number in numbers:
            os.kill(first, number)

    took = agent.restoring(end)
    record_property(f"{' then '.join(one.name for one in numbers)} of the agent's capper", took)
    ended(first)
    second = agent.caps().capper
    assert second not in (None, first)
    (entry,) = agent.until(agent.journal, "a cap is written down")
    assert entry["original"] == ORIGINAL
    assert agent.process.poll() is None


@pytest.mark.exhaustive
def test_stopped_capper_restores_its_expired_cap_on_resume(
    agent: Tuned, record_property: Note
) -> None:
    capper = agent.caps().capper
    assert capper is not None
    os.kill(capper, signal.SIGSTOP)
    agent.until(lambda: agent.reason() == "no_capper", "it is missed")
    assert agent.capper == capper, "one capper a host, even while it does not answer"
    took = agent.restoring(lambda: os.kill(capper, signal.SIGCONT))
    record_property("SIGSTOP of the agent's capper, from its SIGCONT on", took)
    assert agent.caps().capper == capper
