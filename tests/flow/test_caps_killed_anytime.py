"""Kills at any moment, with the recovery of a real host: the original limit is restored in every
case."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from testbed.fixtures import entered
from testbed.program import PROGRAM
from testbed.tuned_stack import ORIGINAL, OwnHost, Tuned, TunedHost
from testbed.waiting import eventually

from wattspan.clock import SystemClock

pytestmark = pytest.mark.exhaustive

Note = Callable[[str, object], None]


host = entered(TunedHost, "module")


@pytest.mark.parametrize("seed", range(4))
def test_kill_at_a_random_moment_restores_the_original(
    host: TunedHost, tmp_path: Path, seed: int
) -> None:
    draw, clock = random.Random(seed), SystemClock()
    killed = ("both", "capper", "agent", "both")[seed]
    with Tuned(host, tmp_path) as agent:
        agent.until(lambda: agent.capper, "there is a capper")
        due = clock.monotonic() + round(draw.uniform(0, 9) * 1e9)
        eventually(lambda: clock.monotonic() >= due, "the moment")
        capper = agent.capper
        assert capper is not None
        if killed != "agent":
            os.kill(capper, signal.SIGKILL)
        if killed != "capper":
            agent.send(signal.SIGKILL)
        else:
            agent.until(lambda: agent.capper not in (None, capper), "there is another")
            agent.send(signal.SIGTERM)
        agent.ended()
        agent.restore()  # as a service manager does after every end
    assert host.limit == ORIGINAL
    assert agent.journal() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_unmodified_program_leaves_the_original_limit(
    tmp_path: Path, record_property: Note, number: signal.Signals
) -> None:
    with closing(OwnHost()) as host:
        with Tuned(host, tmp_path, program=PROGRAM) as agent:
            agent.until(lambda: host.find(agent.process.pid), "it has an emulated host")
            agent.caps()
            if number == signal.SIGTERM:
                host.let_go()  # a mapped file remains available to its users
            took = agent.restoring(lambda: agent.send(number))
            record_property(f"{number.name} of a plain `wattspan run --emulate`", took)
            host.let_go()
            agent.until(lambda: agent.journal() == [], "nothing is held")
            agent.ended()
        assert host.limit == ORIGINAL
