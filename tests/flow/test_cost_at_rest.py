"""An agent at rest: how often its threads wake up."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
from testbed.program import Running

pytestmark = pytest.mark.long

SECONDS = 5.0
MOST = 10.0
"""Voluntary switches a second: two timers, and four waits for the store and for each other."""


def switches(agent: Running) -> int:
    """The voluntary context switches of all threads so far."""
    tasks = Path(f"/proc/{agent.process.pid}/task")
    statuses = "".join(one.read_text() for one in tasks.glob("*/status"))
    return sum(map(int, re.findall(r"^voluntary_ctxt_switches:\s+(\d+)$", statuses, re.MULTILINE)))


def wake_ups(agent: Running) -> float:
    """Switches a second, without any request of ours."""
    before = switches(agent)
    threading.Event().wait(SECONDS)  # the period that is measured
    return (switches(agent) - before) / SECONDS


def test_agent_at_rest_wakes_up_a_few_times_a_second(tmp_path: Path) -> None:
    with Running(tmp_path, agent__interval="1s") as agent:
        agent.measuring()
        assert wake_ups(agent) <= MOST
