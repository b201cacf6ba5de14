"""Commands that ask the running agent find it in the run directory of their configuration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from wattspan.cli import cli
from wattspan.clock import SystemClock
from wattspan.http.messages import HttpRequest, HttpResponse
from wattspan.http.server import HttpServer
from wattspan.http.sockets import listen_unix

COST = ("--joules", "1", "--seconds", "1", "--power", "1")
ASKING: dict[str, tuple[str, ...]] = {
    "advise": (),
    "frontier run": (
        "--param",
        "size=1,2",
        "--unit",
        "stdout:.",
        "--output",
        "new",
        "echo",
        "{size}",
    ),
    "measure": ("true",),
    "recurring forget": ("job",),
    "recurring next": ("job",),
    "recurring report": ("job", "reached", *COST),
    "recurring status": (),
    "top": ("--once",),
    "tune explain": ("job",),
    "tune history": (),
    "tune recommend": ("job",),
    "tune status": (),
}
"""Commands that ask the agent, with arguments."""

OTHERS = (
    "caps",  # the capper; the agent for a user who may not ask it: test_caps.py
    "capper", "completion", "config", "counters", "demo",
    "doctor",  # it reads counters for seconds: test_doctor.py
    "fleet", "frontier", "pipeline",
    "report",  # the store; the agent for a user who may not read it: test_report.py
    "run", "service", "serving",
)  # fmt: skip
"""Commands, or groups of them, that need no agent."""


def commands(group: click.Command, prefix: str = "") -> Iterator[str]:
    """The names of all commands that are no groups."""
    if not isinstance(group, click.Group):
        yield prefix.strip()
        return
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.resolve_command(context, [name])[1]
        assert found is not None
        yield from commands(found, f"{prefix}{name} ")


def test_each_command_asks_the_agent_or_needs_none() -> None:
    unlisted = {name for name in commands(cli) if name.split()[0] not in OTHERS}
    assert unlisted == {name for name in ASKING if name.split()[0] not in OTHERS}


@pytest.mark.parametrize("name", ASKING)
def test_command_asks_the_agent_of_its_configuration(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in ("WATTSPAN_RUN_DIR", "WATTSPAN_AGENT_RUN_DIR"):
        monkeypatch.delenv(variable, raising=False)
    directory = tmp_path / "run"
    directory.mkdir()
    file = tmp_path / "config.toml"
    file.write_text(
        f'[agent]\nrun_dir = "{directory}"\nstate_dir = "{tmp_path}/state"\n'
        '[exporters.prometheus]\nlisten = "127.0.0.1:1"\n'
    )
    asked: list[str] = []

    async def answer(request: HttpRequest) -> HttpResponse:
        asked.append(request.path)
        return HttpResponse(404, b'{"detail": "nothing is here"}', "application/json")

    server = HttpServer(SystemClock(), log=lambda _: None)
    server.add_http(listen_unix(directory / "api.sock", what="questions"), answer)
    server.start()
    try:
        CliRunner().invoke(cli, [*name.split(), "--config", str(file), *ASKING[name]])
    finally:
        server.stop()
    assert asked
