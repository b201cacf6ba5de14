"""`wattspan measure`, the program: its signals, its terminal, its exit codes, its figures."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed.constant_history import ConstantPast
from testbed.program import ENVIRONMENT, PROGRAM
from testbed.query_server import FAR, Anybody, Living, QueryServer


def python(script: str) -> tuple[str, ...]:
    return (sys.executable, "-S", "-c", script)


# -------------------------------------------------------------------------------------- signals

REPORTS_SIGNALS = """
import signal, sys
def told(number, frame):
    print(number, flush=True)
    raise SystemExit(7)
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    if signal.getsignal(number) is signal.SIG_IGN:
        print("ignored", number, flush=True)
    else:
        signal.signal(number, told)
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[QueryServer]:
    """Every process draws 2 W of CPU, and the host 30 W."""
    with QueryServer(tmp_path, ConstantPast(until=FAR, others=2000), Living()) as server:
        yield server


def words(agent: QueryServer, *arguments: str) -> list[str]:
    return [*PROGRAM, "measure", *arguments]


def environment(agent: QueryServer) -> dict[str, str]:
    return {**ENVIRONMENT, "WATTSPAN_RUN_DIR": str(agent.folder)}


def measured(agent: QueryServer, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words(agent, *arguments),
        env=environment(agent),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT]
)
def test_signal_sent_to_us_reaches_the_command(agent: QueryServer, number: int) -> None:
    with subprocess.Popen(
        words(agent, "-r", "3", "--", *python(REPORTS_SIGNALS)),
        env=environment(agent),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as program:
        assert program.stdout.readline() == "ready\n"
        program.send_signal(number)
        said = program.stdout.readline()
        if number == signal.SIGUSR1:  # the command that requests no stop
            assert program.stdout.readline() == "ready\n"
            program.send_signal(signal.SIGTERM)
        _, errors = program.communicate(timeout=60)
    assert said == f"{int(number)}\n"
    assert program.returncode == 7
    assert "the command's processes" in errors


def test_interrupt_key_reaches_the_command_once_and_the_table_is_shown(
    agent: QueryServer,
) -> None:
    pid, terminal = pty.fork()
    if not pid:
        os.environ.update(environment(agent))
        os.execv(sys.executable, words(agent, "--", *python(REPORTS_SIGNALS)))
    said = b""
    try:
        while b"ready" not in said:
            said += os.read(terminal, 1000)
        os.write(terminal, b"\x03")
        while chunk := _read(terminal):
            said += chunk
    finally:
        _, status = os.waitpid(pid, 0)
        os.close(terminal)
    assert said.count(b"2\r\n") == 1
    assert b"the command's processes" in said
    assert os.waitstatus_to_exitcode(status) == 7


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1000)
    except OSError:  # the other side is gone
        return b""


def test_signals_ignored_from_the_start_stay_ignored(agent: QueryServer) -> None:
    program = subprocess.Popen(
        ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *words(agent, *python(REPORTS_SIGNALS))],
        env=environment(agent),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with program:
        assert program.stdout.readline() == f"ignored {int(signal.SIGHUP)}\n"
        assert program.stdout.readline() == "ready\n"
        program.terminate()
        assert program.communicate(timeout=60)[0] == "15\n"
    assert program.returncode == 7


# ---------------------------------------------------------------------------- the whole program


def test_measure_runs_the_command_unchanged_and_reports_energy(agent: QueryServer) -> None:
    done = subprocess.run(
        words(agent, "sh", "-c", "cat; echo oops >&2; exit 3"),
        env=environment(agent),
        input="for its eyes\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "for its eyes\n"
    assert done.stderr.startswith("oops\n")
    assert "cpu package-0" in done.stderr
    assert done.returncode == 3


def test_figures_are_those_of_the_command(agent: QueryServer, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    done = measured(agent, "-r", "2", "--json", "-o", str(out), "--", "sleep", "0.05")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(out.read_text())
    assert told["argv"] == ["sleep", "0.05"]
    assert told["measured_by"] == "the running agent"
    assert told["notes"] == []
    assert len(told["runs"]) == 2
    for one in told["runs"]:
        assert one["seconds"] > 0.05
        assert one["command"]["joules"]["cpu"] == pytest.approx(2 * one["seconds"], rel=0.01)
        assert one["host"]["joules"]["cpu"] == pytest.approx(30 * one["seconds"], rel=0.01)
        assert (one["exit_code"], one["coverage"], one["complete"]) == (0, 1.0, True)
    assert told["mean"]["command_joules"]["total"] == pytest.approx(
        2.2 * told["mean"]["seconds"], rel=0.01
    )
    assert told["stdev"]["seconds"] > 0
    watched = {consumer for consumer, family in agent.past.watched if family}
    assert len(watched) == 3  # the program, and each run of the command


def test_measure_works_in_another_pid_namespace(tmp_path: Path) -> None:
    with QueryServer(tmp_path, ConstantPast(until=FAR, others=2000), Anybody()) as agent:
        done = measured(agent, "true")
    assert done.returncode == 0
    assert "include `wattspan measure` itself" in done.stderr


def test_options_after_the_command_are_the_commands(agent: QueryServer) -> None:
    done = measured(agent, "sh", "-c", "echo $0 $1", "--json", "-r")
    assert done.stdout == "--json -r\n"


@pytest.mark.parametrize(("command", "code"), [("nonesuch", 127), ("/", 126)])
def test_unrunnable_command_has_the_shell_exit_code(
    agent: QueryServer, command: str, code: int
) -> None:
    done = measured(agent, "--", command)
    assert done.returncode == code
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"wattspan: Cannot run '{command}': ")


def test_first_nonzero_exit_code_is_returned(agent: QueryServer, tmp_path: Path) -> None:
    script = f"echo x >> {tmp_path}/runs; test $(wc -l < {tmp_path}/runs) -ne 2 || exit 9"
    done = measured(agent, "-r", "3", "--", "sh", "-c", script)
    assert done.returncode == 9
    assert (tmp_path / "runs").read_text() == "x\n" * 3
    assert "Some runs ended with exit code 9." in done.stderr


def test_unwritable_output_is_reported_before_the_command_runs(
    agent: QueryServer, tmp_path: Path
) -> None:
    done = measured(agent, "-o", "/nonexistent/x", "--", "touch", str(tmp_path / "ran"))
    assert done.returncode == 2
    assert "'/nonexistent/x': No such file or directory" in done.stderr
    assert not (tmp_path / "ran").exists()


def test_measure_without_agent_and_counters_does_not_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [*PROGRAM, "measure", "--set", "sources.rapl.enabled=false",
         "--set", "sources.nvml.enabled=false", "--", "touch", str(tmp_path / "ran")],
        env={**ENVIRONMENT, "WATTSPAN_RUN_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 3
    assert f"No wattspan agent answers at {tmp_path}/api.sock" in done.stderr
    assert "Nor can it be measured without an agent" in done.stderr
    assert "wattspan doctor" in done.stderr
    assert "is ignored" not in done.stderr
    assert not (tmp_path / "ran").exists()
