"""The capper that an agent starts itself."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from testbed.capper_process import Gpu, finish, holding
from testbed.program import Running, alive, wattspan
from testbed.requirements import ROOT
from testbed.waiting import eventually

from wattspan.capper.protocol import CapperClient
from wattspan.clock import SystemClock
from wattspan.config import AgentSettings, Config
from wattspan.config.writing import to_toml
from wattspan.emulation.host import EmulatedHost, profile_named
from wattspan.ports import CapsError
from wattspan.service.capper_process import CapperProcess
from wattspan.testing import ManualClock

CAP = 600_000
ON_HOST = """
import sys
from testbed.agent_on_host import main
sys.argv = ["wattspan", sys.argv[1], *sys.argv[5:]]
main()
"""
"""Starts an agent on the host of the first argument, whatever program the next three name."""


def test_hung_child_capper_is_not_waited_for_at_every_request(tmp_path: Path) -> None:
    clock, asked = ManualClock(), list[int]()

    def answered() -> bool:
        asked.append(clock.monotonic())
        clock.advance(5)  # time until a client of a hung capper gives up
        return False

    config = Config(agent=AgentSettings(state_dir=str(tmp_path), run_dir=str(tmp_path)))
    with EmulatedHost(profile_named("batch")) as host:
        where = ("--emulated", str(host.directory))
        child = CapperProcess(clock, where, to_toml(config), answered, lambda _: None)
        child.start()
        assert child.pid is not None
        child.stop()
        eventually(lambda: not alive(frozenset({child.pid or 0})), "it has ended")
    assert len(asked) == 2  # probe for an existing capper, then for its own


def test_emulated_host_runs_until_its_capper_has_ended(tmp_path: Path) -> None:
    config = to_toml(Config(agent=AgentSettings(state_dir=str(tmp_path), run_dir=str(tmp_path))))
    with EmulatedHost(profile_named("batch")) as host:
        where, engine = ("--emulated", str(host.directory)), host._process
        answers = iter([False])  # no other capper runs
        child = CapperProcess(
            SystemClock(),
            where,
            config,
            lambda: next(answers, True),
            lambda _: None,
            kept=host.lifeline,
        )
        child.start()
        engine.stdin.close()  # as by a kill of the agent
        read = os.open(f"/proc/{engine.pid}/fd/0", os.O_RDONLY | os.O_NONBLOCK)
        with pytest.raises(BlockingIOError):  # its standard input has not ended
            os.read(read, 1)
        os.close(read)
        child.stop()
        assert engine.wait(60) == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("ended", [False, True])
def test_fixed_cap_removed_from_the_file_is_lifted(tmp_path: Path, ended: bool) -> None:
    """By a reload, and by the next start of the agent on the same devices."""
    file = tmp_path / "config.toml"
    file.write_text('[[caps.fixed]]\ndevice = "*"\nwatts = 450\n')
    with EmulatedHost(profile_named("one-socket-h100")) as host, ExitStack() as stack:
        gpu = Gpu(host)
        stack.callback(gpu.close)
        original = gpu.limit
        agent = stack.enter_context(agent_on(host, tmp_path, file))
        eventually(lambda: gpu.limit == 450_000, f"the cap is in force: {agent.said}")
        file.write_text("")
        if ended:
            assert agent.end() == 0
            assert gpu.limit == 450_000
            agent = stack.enter_context(agent_on(host, tmp_path, file))
        else:
            agent.process.send_signal(signal.SIGHUP)
        eventually(lambda: gpu.limit == original, f"it is lifted: {agent.said}")
        asked = ("caps", "status", "--json", "--capper", str(agent.run_dir / "capper.sock"))
        told = json.loads(wattspan(*asked).stdout)
        assert told["agent"] == agent.process.pid
        assert {row["holder"] for row in told["rows"]} == {""}


def agent_on(host: EmulatedHost, folder: Path, file: Path) -> Running:
    """An agent on a host that outlives it."""
    return Running(
        folder,
        *("--config", str(file)),
        emulate="one-socket-h100",
        within=[sys.executable, "-c", ON_HOST, str(host.directory)],
        environ={"PYTHONPATH": str(ROOT)},
    )


def test_capper_of_another_agent_is_replaced_after_its_end(tmp_path: Path) -> None:
    clock, log, serves = ManualClock(), list[str](), [True]
    config = Config(agent=AgentSettings(state_dir=str(tmp_path), run_dir=str(tmp_path)))
    with EmulatedHost(profile_named("batch")) as host:
        where = ("--emulated", str(host.directory))
        child = CapperProcess(clock, where, to_toml(config), lambda: bool(serves), log.append)
        child.start()
        serves.clear()
        assert child.pid is None
        eventually(lambda: child.pid is not None or later(clock), "a capper is started", 30)
        child.stop()
        eventually(lambda: not alive(frozenset({child.pid or 0})), "it has ended")
    assert "does not answer; another one is started" in log[0]


def later(clock: ManualClock) -> bool:
    """Advance one second; return False, so that a surrounding wait repeats its condition."""
    clock.advance(1)
    return False


@contextmanager
def child_with_a_cap(
    folder: Path, clock: ManualClock, log: list[str]
) -> Iterator[tuple[CapperProcess, Gpu, int]]:
    """An agent's capper, a GPU whose limit another process holds below the original."""
    socket = folder / "capper.sock"

    def answered() -> bool:
        client = CapperClient(socket, SystemClock(), who="test", timeout=0.3)
        try:
            client.rows()
        except CapsError:
            return False
        finally:
            client.close()
        return True

    config = Config(agent=AgentSettings(state_dir=str(folder), run_dir=str(folder)))
    with EmulatedHost(profile_named("one-socket-h100")) as host:
        where = ("--emulated", str(host.directory))
        child = CapperProcess(clock, where, to_toml(config), answered, log.append)
        gpu = Gpu(host)
        original = gpu.limit
        child.start()
        try:
            eventually(answered, "the capper answers")
            holder = holding(socket, gpu.key, CAP)
            try:
                assert gpu.limit == CAP
                yield child, gpu, original
            finally:
                finish(holder)
        finally:
            child.stop()
            gpu.close()


def test_stopped_capper_is_killed_and_replaced_and_its_limits_are_restored(
    tmp_path: Path,
) -> None:
    clock, log = ManualClock(), list[str]()
    with child_with_a_cap(tmp_path, clock, log) as (child, gpu, original):
        first = child.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        eventually(lambda: child.pid != first or later(clock), "another capper", 30)
        eventually(lambda: gpu.limit == original, "the original limit")
        assert not alive(frozenset({first}))
    assert any("has not answered" in line and str(first) in line for line in log), log


def test_capper_that_answers_is_never_replaced(tmp_path: Path) -> None:
    clock, log = ManualClock(), list[str]()
    with child_with_a_cap(tmp_path, clock, log) as (child, gpu, _):
        first, began = child.pid, clock.monotonic()
        eventually(lambda: clock.monotonic() - began > 100 * 10**9 or later(clock), "time passes")
        assert child.pid == first
        assert gpu.limit == CAP
    assert log == []


def test_stopped_capper_restores_its_limits_when_the_agent_ends(tmp_path: Path) -> None:
    clock, log = ManualClock(), list[str]()
    with child_with_a_cap(tmp_path, clock, log) as (child, gpu, original):
        assert child.pid is not None
        os.kill(child.pid, signal.SIGSTOP)
        child.stop()
        assert gpu.limit == original
    assert log == []
