"""Span listeners from an operator's view: taken ports, closed directories, other agents."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from testbed.program import PROGRAM, UNPRIVILEGED, Running, options, wattspan
from testbed.reserved_port import reserved_port
from testbed.span_senders import Scrape, made, send
from testbed.waiting import eventually

SOCKETS = ("otlp.sock", "feed.sock", "api.sock")


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield int(listener.getsockname()[1])


def sends(agent: Running, name: str) -> None:
    """Have a span of this process counted, over the agent's Unix socket."""
    now = time.time_ns()
    assert send(agent.run_dir, [made(name, now - 10**8, now)]) == 200
    eventually(
        lambda: Scrape(agent.scrape("text/plain")).total("wattspan_spans_total", span_name=name),
        "the span is counted",
    )


def ended(agent: Running) -> tuple[int, str]:
    """Exit code and output of a process that ended by itself: the exit code, and the last thing
    it said."""
    code = agent.process.wait(60)
    return code, agent.said.strip().splitlines()[-1]


def test_explicit_port_in_use_is_a_one_line_error(tmp_path: Path) -> None:
    with taken_port() as port, Running(tmp_path, spans__http=f"127.0.0.1:{port}") as agent:
        code, said = ended(agent)
    assert code == 4
    assert f"127.0.0.1:{port}: the port is in use" in said
    assert "[spans] http" in said


def test_default_port_in_use_is_skipped(tmp_path: Path) -> None:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", 4318))
        listener.listen()
    except OSError:
        listener.close()  # in use by another process: equivalent
    words = [
        *("--emulate", "laptop", "--set", f"agent.run_dir={tmp_path / 'run'}"),
        *("--set", f"agent.state_dir={tmp_path / 'state'}"),
        *("--set", "exporters.prometheus.listen=127.0.0.1:0"),
    ]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("WATTSPAN_")}
    with (tmp_path / "said").open("wb") as said:
        process = subprocess.Popen(
            [*PROGRAM, "run", *words],
            env=environ | {"WATTSPAN_CONFIG": os.devnull},
            stderr=said,
            stdout=subprocess.DEVNULL,
        )
    try:
        told = eventually(
            lambda: (text := (tmp_path / "said").read_text()).count("Serving") >= 2 and text,
            "it serves what it can",
        )
        assert (
            "The agent continues without this listener: Cannot receive OTLP/HTTP on 127.0.0.1:4318"
            in told
        )
        now = time.time_ns()
        assert send(tmp_path / "run", [made("by the socket", now - 10**8, now)]) == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        listener.close()


@pytest.mark.parametrize("where", ["closed", "longer than a socket's address may be"])
def test_unusable_run_directory_disables_only_sockets(where: str, tmp_path: Path) -> None:
    run_dir = tmp_path / where
    run_dir.mkdir(mode=0o555)
    if where != "closed":
        run_dir = tmp_path / ("x" * 120)
    with Running(tmp_path, within=UNPRIVILEGED, agent__run_dir=run_dir) as agent:
        assert agent.spans_address()
        said = agent.said
        for what in ("spans as they begin", "OTLP/HTTP", "questions"):
            assert (
                f"The agent continues without this listener: Cannot receive {what} on {run_dir}"
                in said
            )
        assert said.count("run_dir.") >= 3  # the remedy
        assert agent.end() == 0


def test_explicit_sockets_are_required(tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("")
    settings = {"agent__run_dir": tmp_path / "a file", "spans__unix": "true"}
    with Running(tmp_path, **settings) as agent:
        code, said = ended(agent)
    assert code == 4
    assert "is no directory; set another [agent] run_dir." in said


def test_first_of_two_agents_keeps_its_sockets(tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    with Running(tmp_path) as first:
        first.measuring()
        with Running(tmp_path / "second", agent__run_dir=first.run_dir) as second:
            second.address()
            assert second.said.count("another agent listens there; stop it, or set another") == 3
            assert second.end() == 0
        sends(first, "to the first")
        assert first.end() == 0
    assert not any((first.run_dir / name).exists() for name in SOCKETS)


def test_sockets_of_a_killed_agent_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    with Running(tmp_path) as first:
        first.measuring()
        first.process.kill()
        first.process.wait()
        assert all((first.run_dir / name).is_socket() for name in SOCKETS)
        with Running(tmp_path / "second") as second:
            second.process.kill()
        with Running(tmp_path / "second", agent__run_dir=first.run_dir) as second:
            second.measuring()
            second.run_dir = first.run_dir
            sends(second, "to the heir")
            assert "continues without" not in second.said
            assert second.end() == 0


def test_disabled_spans_leave_only_the_query_socket(tmp_path: Path) -> None:
    with Running(tmp_path, spans__enabled="false") as agent:
        agent.measuring()
        assert [path.name for path in agent.run_dir.iterdir() if path.is_socket()] == ["api.sock"]
        assert "/v1/traces" not in agent.said
        assert agent.end() == 0


def test_disabled_queries_open_no_socket(tmp_path: Path) -> None:
    with Running(tmp_path, agent__api="false") as agent:
        agent.measuring()
        sockets = {path.name for path in agent.run_dir.iterdir() if path.is_socket()}
        assert sockets == {"otlp.sock", "feed.sock"}
        assert agent.end() == 0


def test_collector_that_is_the_agent_itself_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    itself = {"spans__http": f"127.0.0.1:{port}", "spans__forward": f"http://127.0.0.1:{port}"}
    with Running(tmp_path, **itself) as agent:
        code, said = ended(agent)
    assert code == 2
    assert "itself" in said


def test_failed_start_leaves_no_socket(tmp_path: Path) -> None:
    taken = tempfile.TemporaryDirectory(prefix="wattspan-")
    with taken as run_dir:
        (Path(run_dir) / "api.sock").write_text("no socket")
        with Running(tmp_path, agent__run_dir=run_dir, agent__api="true") as agent:
            code, said = ended(agent)
        assert code == 4
        assert "something else has that name" in said
        assert {path.name for path in Path(run_dir).iterdir()} == {"api.sock"}


def test_unsent_spans_are_logged_at_shutdown(tmp_path: Path) -> None:
    with (
        reserved_port() as port,
        Running(tmp_path, spans__forward=f"http://127.0.0.1:{port}") as agent,
    ):
        agent.measuring()
        sends(agent, "in vain")
        eventually(lambda: "Cannot forward spans" in agent.said, "it is told")
        assert agent.end() == 0
        assert agent.said.count("Cannot forward spans to") == 1
        assert "1 spans still waited for" in agent.said
        assert "forward_spool = true" in agent.said


def test_doctor_recognises_a_running_agent(tmp_path: Path) -> None:
    with Running(tmp_path) as agent:
        address = agent.spans_address().removeprefix("http://")
        settings = {"agent.run_dir": agent.run_dir, "spans.http": address}
        told = wattspan("doctor", "--emulate", "laptop", *options(settings)).stdout
        assert f"a running agent answers at {address}" in told
        assert agent.end() == 0
