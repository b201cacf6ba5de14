"""The agent's own tuner under the shipped units turns a limit through the capper, and no other way.

The test checks the holder and fate of a limit, not the choice of its value. The job
works on an emulated board, where nothing slows it down but the limit: the tuner comes as far on a
machine that has much else to do.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from testbed.capper_process import Gpu
from testbed.fixtures import entered_once_in
from testbed.program import descendants
from testbed.systemd_training import board_inside, training
from testbed.systemd_wattspan import AGENT, CAPPER, PROGRAM, Installed, installed
from testbed.waiting import eventually

pytestmark = [pytest.mark.needs_systemd, pytest.mark.needs_cc]

ORIGINAL = 700_000
# Short looks, for they decide only how long this takes. And a lease that no test outlasts: the
# test ends the cap
CONFIG = """
[caps]
lease = "5m"
[autotune]
mode = "apply"
max_slowdown = 0.15
block = "300ms"
block_units = 5
settle = "100ms"
settle_units = 1
[[autotune.job]]
service = "trainer"
span = "train_step"
kind = "steps"
"""
HOPELESS = 240.0  # seconds


it = entered_once_in(lambda folder: installed(folder, "one-socket-h100"), "tuner")


@pytest.fixture(scope="module")
def gpu(it: Installed) -> Iterator[Gpu]:
    with board_inside(it) as gpu:
        yield gpu


class Trial(NamedTuple):
    """A limit that the tuner tries, and the agent that does."""

    row: dict[str, Any]  # the capper's own account of it
    agent: int  # its pid inside


@contextmanager
def a_limit_is_tried(it: Installed, gpu: Gpu) -> Iterator[Trial]:
    """The tuner has lowered the limit, and is stopped in that moment: so that it neither
    changes nor releases it before the test's action.
    """
    it.fresh()
    assert gpu.limit == ORIGINAL  # independent of the previous test
    it.host.run("sh", "-c", "rm -rf /var/lib/wattspan/*")  # or the job is known, and left alone
    it.configure(CONFIG)
    # a stopped agent sends no watchdog notifications, and an ended unit must not restart
    it.drop_in(AGENT, "[Service]\nRestart=no\nWatchdogSec=0\n")
    it.drop_in(CAPPER, "[Service]\nRestart=no\n")
    it.host.systemctl("start", CAPPER)
    it.host.systemctl("start", AGENT)
    it.metrics()
    agent = it.main_pid(AGENT)
    with training(it):
        try:
            row = eventually(lambda: stopped_at(it, gpu, agent), "a limit is tried", HOPELESS)
        except AssertionError as error:
            said = it.host.run(PROGRAM, "tune", "explain", check=False)
            told = f"{said.stdout}{said.stderr}\n{it.host.journal()[-3000:]}"
            raise AssertionError(f"{error}:\n{told}") from None
        yield Trial(row, agent)


def stopped_at(it: Installed, gpu: Gpu, agent: int) -> dict[str, Any] | None:
    """The tuner's lease, if it was stopped while holding one."""
    if gpu.limit == ORIGINAL:
        return None
    outside = seen_from_outside(it, agent)
    os.kill(outside, signal.SIGSTOP)
    eventually(lambda: is_stopped(outside), "the agent is stopped")
    # earlier requests are completed before the next response
    told = it.host.run(PROGRAM, "caps", "status", "--json", timeout=HOPELESS).stdout
    row = next(row for row in json.loads(told)["rows"] if row["knob"] == "gpu_power")
    if row["holder"] and row["requested"] < ORIGINAL:
        return dict(row)
    os.kill(outside, signal.SIGCONT)
    return None


def seen_from_outside(it: Installed, pid: int) -> int:
    """The pid that a process inside has here."""
    for outside in descendants(it.host.pid):
        with suppress(OSError):  # it has ended
            told = Path(f"/proc/{outside}/status").read_text().partition("NSpid:")[2]
            if told.partition("\n")[0].split()[-1] == str(pid):
                return outside
    raise AssertionError(f"nothing inside has pid {pid}")


def is_stopped(pid: int) -> bool:
    """True if every thread of a process is stopped."""
    try:
        stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:  # a thread has ended by now
        return False
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


def records(it: Installed) -> list[dict[str, Any]]:
    """Latest audit row of the capper."""
    text = it.host.inside("/var/lib/wattspan-capper/audit.jsonl").read_text()
    whole, _, _ = text.rpartition("\n")  # another may be on its way
    return [json.loads(line) for line in whole.splitlines()]


def test_unprivileged_tuner_writes_through_the_capper(it: Installed, gpu: Gpu) -> None:
    with a_limit_is_tried(it, gpu) as trial:
        assert trial.row["holder"] == "trainer/train_step"
        assert trial.row["original"] == ORIGINAL
        assert gpu.limit == trial.row["requested"] < ORIGINAL
        written = [one for one in records(it) if one["deed"] == "write"][-1]
        assert (written["pid"], written["new"]) == (trial.agent, gpu.limit)
        assert written["uid"] == int(it.host.run("id", "-u", "wattspan").stdout) != 0


@pytest.mark.exhaustive
def test_tuned_limit_is_restored_after_an_agent_kill(it: Installed, gpu: Gpu) -> None:
    with a_limit_is_tried(it, gpu):
        capper = it.main_pid(CAPPER)
        it.host.kill(AGENT, signal.SIGKILL)
        eventually(lambda: gpu.limit == ORIGINAL, "given back")
        assert it.main_pid(CAPPER) == capper != 0

        def restored() -> dict[str, Any] | None:
            last = records(it)[-1]
            return last if last["deed"] == "restore" else None

        assert eventually(restored, "on record")["why"] == "its holder has gone"
    it.host.wait_for(AGENT, "ActiveState", "failed")
