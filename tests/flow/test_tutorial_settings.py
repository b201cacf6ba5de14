"""The commands of docs/tutorial-settings.md run, and print what the page shows."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest
from benchmarks.spans.agent import SpanAgent

from support.program import ENVIRONMENT, PROGRAM
from support.requirements import ROOT
from support.waiting import eventually

PAGE = ROOT / "docs" / "tutorial-settings.md"
_BLOCK = re.compile(r"^```(console|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


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


def test_page_shows_commands_of_the_whole_way() -> None:
    commands = [one.command for one in shown()]
    for words in ("frontier run", "frontier show", "frontier plot", "frontier recommend",
                  "--as config", "recurring next", "recurring report", "recurring status",
                  "python -c"):  # fmt: skip
        assert any(words in one for one in commands), words


@pytest.mark.exhaustive
@pytest.mark.slow
def test_every_command_of_the_page_prints_what_it_shows(tmp_path: Path) -> None:
    folder, programs = tmp_path / "examples", tmp_path / "bin"
    folder.mkdir()
    programs.mkdir()
    for name, words in (("wattspan", PROGRAM), ("python", [sys.executable])):
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        program.chmod(0o755)
    (folder / "train.py").write_text((ROOT / "examples" / "settings" / "train.py").read_text())
    with SpanAgent(
        tmp_path / "agent",
        profile="one-socket-h100",
        autotune__mode="apply",
        store__enabled="true",
        within=240.0,
    ) as agent:
        environ = {
            **ENVIRONMENT,
            "PATH": f"{programs}:{ENVIRONMENT.get('PATH', '/usr/bin:/bin')}",
            "PYTHONPATH": str(ROOT / "agent"),
            "WATTSPAN_RUN_DIR": str(agent.run_dir),
            "WATTSPAN_AGENT_RUN_DIR": str(agent.run_dir),
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
            outputs = {}
            for one in shown():
                outputs[one.command] = text = printed(one.command)
                lines = text.splitlines()
                for line in one.lines:
                    assert line in lines, outputs
            shell.stdin.close()
        assert any("Run at" not in text and "60 %, batch=64" in text for text in outputs.values())
        assert ElementTree.fromstring((folder / "frontier.svg").read_text()).tag.endswith("svg")


END = "-- end of the command --"
