"""Findings of doctor on span receivers and destinations."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from wattspan.cli.doctor import Finding, Severity
from wattspan.cli.doctor.network import examine_engines, examine_spans
from wattspan.config import (
    AgentSettings,
    Config,
    ServingEngineSettings,
    ServingSettings,
    SettingOrigin,
    SpansSettings,
)
from wattspan.http.sockets import other_loopback
from wattspan.model.settings import Listen

NOWHERE = Listen("")


def told(run_dir: Path, *asked: str, **spans: object) -> dict[str, Finding]:
    settings = SpansSettings(**({"http": NOWHERE} | spans))  # type: ignore[arg-type]
    origins = {key: SettingOrigin("file", "a file") for key in asked}
    config = Config(agent=AgentSettings(run_dir=str(run_dir)), spans=settings, origins=origins)
    return {finding.what: finding for finding in examine_spans(config)}


def test_free_ports_are_ok_and_stay_unused(tmp_path: Path) -> None:
    found = told(tmp_path / "run", http=Listen("127.0.0.1:0"))
    assert list(found) == ["spans.http"]
    assert {finding.mark for finding in found.values()} == {Severity.OK}
    assert list(tmp_path.iterdir()) == []


def test_disabled_spans_are_a_note(tmp_path: Path) -> None:
    found = told(tmp_path, enabled=False)
    assert list(found) == ["spans"]
    assert found["spans"].mark is Severity.NOTE


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("key", ["http", "grpc"])
def test_port_in_use_is_a_failure_only_if_it_is_explicit(
    key: str, asked: bool, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        keys = [f"spans.{key}"] if asked else []
        finding = told(tmp_path, *keys, **{key: Listen(f"127.0.0.1:{port}")})[f"spans.{key}"]
    assert finding.mark is (Severity.FAIL if asked else Severity.WARN)
    assert ("will not start" if asked else "go on without it") in finding.detail
    assert f":{port}" in finding.remedy


def test_collector_is_connected_to(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as collector:
        url = f"http://127.0.0.1:{collector.getsockname()[1]}"
        assert told(tmp_path, forward=url)["spans.forward"].mark is Severity.OK
    finding = told(tmp_path, forward=url)["spans.forward"]
    assert finding.mark is Severity.WARN
    assert "connection refused" in finding.detail
    path = tmp_path / "collector.sock"
    assert told(tmp_path, forward=f"unix://{path}")["spans.forward"].mark is Severity.WARN


def test_each_engine_has_a_line_and_its_port_is_not_asked(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("geheim")
    secret.chmod(0o644)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        engines = (
            ServingEngineSettings(url, name="chat"),
            ServingEngineSettings(url, name="code", process="v", token_file=str(secret)),
        )
        config = Config(serving=ServingSettings(engine=engines))
        chat, code = examine_engines(config)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert chat.mark is Severity.OK
    assert url in chat.detail
    assert 'source="engine:chat"' in chat.detail
    assert code.mark is Severity.FAIL
    assert "chmod 0640" in code.detail
    assert "geheim" not in code.detail


def test_other_program_at_the_other_address_of_localhost_is_found(tmp_path: Path) -> None:
    """Clients of "localhost" try ::1 first, and whoever listens there receives their spans."""
    try:
        silent = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this host has no IPv6")
    with silent:
        port = silent.getsockname()[1]
        http = Listen(f"127.0.0.1:{port}")
        found = told(tmp_path, http=http)["spans.http"]
        explicit = told(tmp_path, "spans.http", http=http)["spans.http"]
    assert found.mark is Severity.WARN
    assert f"[::1]:{port}" in found.detail
    assert explicit.mark is Severity.OK


IMITATION = """
import encodings.idna, http.server, os, socket, sys

class Agent(http.server.BaseHTTPRequestHandler):
    server_version = "wattspan/1"
    do_GET = lambda self: (self.send_response(200), self.end_headers())
    log_message = lambda *_: None

host, port, user, run_dir = sys.argv[1:]
if run_dir:
    api = socket.socket(socket.AF_UNIX)
    api.bind(f"{run_dir}/otlp.sock")
    os.chmod(f"{run_dir}/otlp.sock", 0o666)
os.setuid(int(user))
if run_dir:
    api.listen()
http.server.HTTPServer.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
server = http.server.HTTPServer((host, int(port)), Agent)
print("ready", flush=True)
server.serve_forever()
"""


def imitated(held: ExitStack, host: str, port: int, user: int, run_dir: Path | None) -> None:
    """A program of ``user`` that answers as the agent does, with the agent's socket or without."""
    arguments = host, str(port), str(user), str(run_dir or "")
    program = [sys.executable, "-c", IMITATION, *arguments]
    child = held.enter_context(subprocess.Popen(program, stdout=subprocess.PIPE, text=True))
    held.callback(child.kill)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"


OTHER_USER = pytest.param(65534, marks=pytest.mark.needs_root)


@pytest.mark.parametrize("user", [os.getuid(), OTHER_USER])
@pytest.mark.parametrize("runs", [True, False])
def test_program_that_answers_as_the_agent_is_one_only_with_its_run_directory(
    runs: bool, user: int, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    http = Listen(f"127.0.0.1:{free_port()}")
    with ExitStack() as held:
        imitated(held, "127.0.0.1", http.port, user, tmp_path if runs else None)
        found = told(tmp_path, "spans.http", http=http)["spans.http"]
    assert found.mark is (Severity.OK if runs else Severity.WARN)
    assert ("a running agent answers" if runs else "unknown by whom") in found.detail


@pytest.mark.parametrize("imitator", [os.getuid(), OTHER_USER])
@pytest.mark.parametrize("first", [True, False])
def test_program_that_answers_as_the_agent_at_one_address_of_localhost_is_found(
    first: bool, imitator: int, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    """Another process is no agent while one runs: neither of another user nor of the same."""
    http = Listen(f"127.0.0.1:{free_port()}")
    if other_loopback(http) is None:
        pytest.skip("this host has no IPv6")
    with ExitStack() as held:
        imitated(held, "127.0.0.1", http.port, imitator if first else os.getuid(), None)
        imitated(held, "::1", http.port, os.getuid() if first else imitator, None)
        assert told(tmp_path, http=http)["spans.http"].mark is Severity.WARN
        agent = socket.socket(socket.AF_UNIX)
        held.enter_context(agent)
        agent.bind(str(tmp_path / "otlp.sock"))
        agent.listen()
        found = told(tmp_path, http=http)["spans.http"]
    assert found.mark is Severity.WARN
    assert "unknown by whom" in found.detail
