"""From the first observation to a certified setting, its release after a foreign write, and the
next start."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from testbed.fixtures import entered
from testbed.stopped_holders import go_on, still_while_capped
from testbed.tuned_stack import ORIGINAL, THEIRS, Tuned, TunedHost

pytestmark = [pytest.mark.long, pytest.mark.exhaustive]

Note = Callable[[str, object], None]


host = entered(TunedHost, "module")


def test_held_cap_yields_to_a_foreign_write_until_restart(host: TunedHost, tmp_path: Path) -> None:
    with Tuned(host, tmp_path, block="200ms", floor=0.85) as agent:
        agent.until(lambda: agent.told().get("state") == "holding", "a setting is held", 180)

        def in_force() -> int:
            before, reason, after = host.limit, agent.reason(), host.limit
            return before or 0 if reason == "certified" and before == after != ORIGINAL else 0

        certified = agent.until(in_force, "it is in force")
        capper = still_while_capped(agent)
        host.gpu.set(THEIRS)
        go_on(agent.process.pid, capper)
        agent.until(lambda: agent.reason() == "foreign_writer", "it is noticed")
        agent.send(signal.SIGTERM)
        assert agent.ended() == 0
    assert host.limit == THEIRS
    agent.accept()
    host.gpu.set(ORIGINAL)
    book = json.loads((tmp_path / "state/tuning/certified-emulated.json").read_text())
    assert str(certified) in json.dumps(book)
    with Tuned(host, tmp_path, block="200ms", floor=0.85) as successor:
        first = successor.until(
            lambda: limit if (limit := host.limit) != ORIGINAL else None, "a cap is in force"
        )
        assert first == certified, "what was certified is proved first"
        assert successor.capper is not None
        successor.send(signal.SIGKILL)
        successor.ended()
    assert host.limit == ORIGINAL
    assert successor.journal() == []
