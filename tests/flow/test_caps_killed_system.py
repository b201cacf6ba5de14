"""A capper of the system's own that ends while an agent is its client, and another that follows."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from testbed.capper_process import CapperProcess
from testbed.fixtures import entered
from testbed.tuned_stack import ORIGINAL, Tuned, TunedHost

pytestmark = pytest.mark.exhaustive

Note = Callable[[str, object], None]


host = entered(TunedHost, "module")


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


def test_upgrade_replaces_the_capper_of_a_running_agent(
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
