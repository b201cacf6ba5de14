"""The commands of docs/tutorial-saving.md run, and print what the page shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from testbed.apps import app_environment
from testbed.requirements import APPS, ROOT
from testbed.shown_commands import PageShell, is_shown, shown_commands
from testbed.tuned_training import TuningAgent

PAGE = (ROOT / "docs" / "tutorial-saving.md").read_text(encoding="utf-8")
FOLDER = ROOT / "examples" / "saving"
pytestmark = [
    pytest.mark.search,
    pytest.mark.exhaustive,
    pytest.mark.needs_apps,
    pytest.mark.needs_torch,
]


def operator() -> dict[str, str]:
    """The variables with which the page starts the agent."""
    (line,) = re.findall(
        r"^(WATTSPAN_\S+ .*)wattspan run --emulate one-socket-h100$", PAGE, re.MULTILINE
    )
    return dict(word.split("=", 1) for word in shlex.split(line))


def test_loop_of_the_page_is_that_of_the_example() -> None:
    (line,) = re.findall(r"^with (Loop\(.*\)) as loop:$", PAGE, re.MULTILINE)
    assert f"{line} as loop:" in (FOLDER / "train.py").read_text()


def test_every_command_of_the_tutorial_prints_what_it_shows(tmp_path: Path) -> None:
    folder = tmp_path / "agent"
    folder.mkdir()
    with TuningAgent(folder, config="", environ=operator()) as agent:
        environ = app_environment(
            WATTSPAN_RUN_DIR=str(agent.running.run_dir),
            WATTSPAN_AGENT_RUN_DIR=str(agent.running.run_dir),
            WATTSPAN_EMULATED_HOST=str(agent.host),
        )
        work = tmp_path / "examples"
        work.mkdir()
        for source in FOLDER.glob("*.py"):
            (work / source.name).write_text(source.read_text())
        programs = tmp_path / "bin"
        original = agent.limit
        with PageShell(work, programs, environ) as shell:
            (programs / "python").write_text(f'#!/bin/sh\nexec {APPS} "$@"\n')
            for one in shown_commands(PAGE):
                text = shell.run(one.command)
                for line in one.lines:
                    assert is_shown(line, text), (one.command, text)
            assert not (work / "train.log").read_text()
        assert agent.limit == original
