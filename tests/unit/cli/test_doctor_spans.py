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

host, port, user = sys.argv[1:]
os.setuid(int(user))
http.server.HTTPServer.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
server = http.server.HTTPServer((host, int(port)), Agent)
print("ready", flush=True)
server.serve_forever()
"""


def imitated(held: ExitStack, host: str, port: int, user: int) -> None:
    """A program of ``user`` that answers as the agent does."""
    program = [sys.executable, "-c", IMITATION, host, str(port), str(user)]
    child = held.enter_context(subprocess.Popen(program, stdout=subprocess.PIPE, text=True))
    held.callback(child.kill)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"


@pytest.mark.parametrize(
    ("first", "second", "mark"),
    [
        (os.getuid(), os.getuid(), Severity.OK),
        (None, os.getuid(), Severity.WARN),
        pytest.param(0, 65534, Severity.WARN, marks=pytest.mark.needs_root),
    ],
)
def test_program_that_answers_as_the_agent_at_the_other_address_is_found(
    first: int | None,
    second: int,
    mark: Severity,
    tmp_path: Path,
    free_port: Callable[[], int],
) -> None:
    port = free_port()
    http = Listen(f"127.0.0.1:{port}")
    if other_loopback(http) is None:
        pytest.skip("this host has no IPv6")
    with ExitStack() as held:
        if first is not None:
            imitated(held, "127.0.0.1", port, first)
        imitated(held, "::1", port, second)
        assert told(tmp_path, http=http)["spans.http"].mark is mark
