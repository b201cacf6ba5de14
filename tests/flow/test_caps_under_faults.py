"""Full disk, lost board and foreign writes: state of the cap."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from testbed.fixtures import entered
from testbed.program import fill, on_a_disk_of
from testbed.stopped_holders import go_on, still_while_capped
from testbed.tuned_stack import ORIGINAL, THEIRS, Tuned, TunedHost

pytestmark = pytest.mark.exhaustive

Note = Callable[[str, object], None]
DECISIONS = "wattspan_autotune_decisions_total"
REFUSED = "trainer/train_step gpu_power decline no_capper"


host = entered(TunedHost, "module")


@pytest.fixture
def agent(host: TunedHost, tmp_path: Path) -> Iterator[Tuned]:
    with Tuned(host, tmp_path) as agent:
        yield agent
    host.fault("lost", on=False)
    host.gpu.set(ORIGINAL)


@pytest.mark.needs_root
def test_full_disk_leaves_the_job_uncapped_until_space_returns(
    host: TunedHost, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    with Tuned(host, tmp_path, within=on_a_disk_of("1m", state)) as agent:
        seen = Path(f"/proc/{agent.process.pid}/root{state}")
        agent.until((seen / "capper-emulated" / "lock").exists, "there is a capper")
        fill(seen / "filler")
        agent.until(lambda: agent.reason() == "no_capper", "a cap is refused")
        assert "Cannot write the journal" in agent.told()["decision"]["sentence"]
        assert agent.metrics("wattspan_capper_writes_total") == {"": 0.0}
        agent.until(lambda: agent.metrics(DECISIONS).get(REFUSED), "it is counted")
        assert host.limit == ORIGINAL
        (line,) = (line for line in agent.said.splitlines() if "capper-emulated" in line)
        assert "No space left on device" in line
        (seen / "filler").unlink()
        agent.caps()
        agent.send(signal.SIGTERM)
        assert agent.ended() == 0
    assert host.limit == ORIGINAL


def test_board_lost_while_capped_is_restored_on_return(
    agent: Tuned, host: TunedHost, record_property: Note
) -> None:
    capper = still_while_capped(agent)
    host.fault("lost", on=True)
    go_on(agent.process.pid, capper)
    agent.until(lambda: not agent.told().get("applied", True), "it is given up")
    assert agent.journal()[0]["original"] == ORIGINAL
    took = agent.restoring(lambda: host.fault("lost", on=False))
    record_property("a lost board, from its return on", took)
    agent.caps()
    agent.send(signal.SIGTERM)
    assert agent.ended() == 0
    assert host.limit == ORIGINAL
    assert agent.journal() == []


def test_board_lost_at_shutdown_is_restored_by_the_restore_command(
    agent: Tuned, host: TunedHost, record_property: Note
) -> None:
    capper = still_while_capped(agent)
    host.fault("lost", on=True)
    agent.send(signal.SIGTERM)
    go_on(agent.process.pid, capper)
    assert agent.ended() == 0
    assert "`wattspan caps restore`" in agent.said
    host.fault("lost", on=False)
    assert host.capped()
    took = agent.restoring(agent.restore)
    record_property("a board lost until after the end, then `wattspan caps restore`", took)
    assert agent.journal() == []


def test_foreign_limit_during_a_trial_is_kept(agent: Tuned, host: TunedHost) -> None:
    capper = still_while_capped(agent)
    host.gpu.set(THEIRS)
    go_on(agent.process.pid, capper)
    agent.until(lambda: agent.reason() == "foreign_writer", "it is noticed")
    assert host.limit == THEIRS
    agent.send(signal.SIGKILL)
    agent.ended()
    assert host.limit == THEIRS
    assert "0 limits were restored by the" in agent.restore()
    assert host.limit == THEIRS
    assert {entry["foreign"] for entry in agent.journal()} <= {THEIRS}
