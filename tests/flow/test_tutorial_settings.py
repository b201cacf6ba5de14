"""The commands of docs/tutorial-settings.md run, and print what the page shows."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest
from benchmarks.spans.agent import SpanAgent

from support.program import ENVIRONMENT, PROGRAM
from support.requirements import ROOT
from support.waiting import eventually

PAGE = ROOT / "docs" / "tutorial-settings.md"
_BLOCK = re.compile(r"^```(console|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_START = re.compile(r"^wattspan run --emulate (\S+)(.*)$", re.MULTILINE)


class Shown(NamedTuple):
    """A command of the page, and the lines that it shows of the output."""

    command: str
    lines: list[str]


def shown() -> Iterator[Shown]:
    for kind, text in _BLOCK.findall(PAGE.read_text()):
        if kind == "python":
            yield Shown(f"python -c {shlex.quote(text)}", [])
            continue
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, *lines = part.splitlines()
            yield Shown(command, lines)


def start() -> tuple[str, dict[str, Any]]:
    """The profile and the settings with which the page starts the agent."""
    found = _START.search(PAGE.read_text())
    assert found is not None
    words = shlex.split(found[2])
    assert set(words[::2]) == {"--set"}
    pairs = (word.split("=", 1) for word in words[1::2])
    return found[1], {key.replace(".", "__"): value for key, value in pairs}


def is_shown(line: str, text: str) -> bool:
    """True if a line of ``text`` is ``line``, in which … stands for any words."""
    pattern = ".*".join(map(re.escape, line.split("…")))
    return re.search(rf"^{pattern}$", text, re.MULTILINE) is not None


def test_shown_line_is_a_whole_line_of_the_output() -> None:
    assert is_shown("… of GPU 0, at 115 W.", "first\n 9 % of GPU 0, at 115 W.\n")
    assert not is_shown("of GPU 0", "9 % of GPU 0\n")
    assert not is_shown("a…b", "a\nb")


def test_page_shows_commands_of_the_whole_way() -> None:
    commands = [one.command for one in shown()]
    for words in ("frontier run", "frontier show", "frontier plot", "frontier recommend",
                  "--as config", "--split", "wattspan advise",
                  "recurring next", "recurring report", "recurring status",
                  "python -c"):  # fmt: skip
        assert any(words in one for one in commands), words


@pytest.mark.alone
@pytest.mark.slow
def test_every_command_of_the_page_prints_what_it_shows(tmp_path: Path) -> None:
    folder, programs = tmp_path / "examples", tmp_path / "bin"
    folder.mkdir()
    programs.mkdir()
    for name, words in (("wattspan", PROGRAM), ("python", [sys.executable])):
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        program.chmod(0o755)
    for source in (ROOT / "examples" / "settings").glob("*.py"):
        (folder / source.name).write_text(source.read_text())
    profile, settings = start()
    settings |= {"store__enabled": "true"}
    with SpanAgent(tmp_path / "agent", profile=profile, within=240.0, **settings) as agent:
        environ = {
            **ENVIRONMENT,
            "PATH": f"{programs}:{ENVIRONMENT.get('PATH', '/usr/bin:/bin')}",
            "PYTHONPATH": str(ROOT / "agent"),
            "WATTSPAN_RUN_DIR": str(agent.run_dir),
            "WATTSPAN_AGENT_RUN_DIR": str(agent.run_dir),
            "WATTSPAN_AGENT_STATE_DIR": str(agent.state_dir),
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{agent.http_port}",
            "WATTSPAN_EMULATED_HOST": str(agent.host),
        }

        def printed(command: str) -> str:
            # The shell of the page belongs to all its commands: a run of a job ends with it.
            shell.stdin.write(f"{command} 2>&1; echo; echo {END}\n")
            shell.stdin.flush()
            lines = list(iter(shell.stdout.readline, f"{END}\n"))
            return "".join(lines)

        with subprocess.Popen(
            ["/bin/bash"], env=environ, cwd=folder, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        ) as shell:  # fmt: skip
            assert shell.stdin is not None
            assert shell.stdout is not None
            eventually(
                lambda: "gpu_power" in printed("wattspan caps status"), "the capper answers", 240
            )
            eventually(
                lambda: IDLE_KNOWN.search(printed("wattspan advise --json")),
                "the idle power of the board is known, as the page asks", 240,
            )  # fmt: skip
            outputs = {}
            for one in shown():
                outputs[one.command] = text = printed(one.command)
                for line in one.lines:
                    assert is_shown(line, text), outputs
            shell.stdin.close()
        assert any("Run at" not in text and "60 %, batch=64" in text for text in outputs.values())
        assert ElementTree.fromstring((folder / "frontier.svg").read_text()).tag.endswith("svg")


END = "-- end of the command --"
IDLE_KNOWN = re.compile(r'"idle_watts": [\d.]+')
