"""The commands of docs/tutorial-settings.md run, and print what the page shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from testbed.program import ENVIRONMENT
from testbed.requirements import ROOT
from testbed.shown_commands import PageShell, Shown, is_shown, shown_commands
from testbed.spans.agent import SpanAgent
from testbed.waiting import eventually

PAGE = ROOT / "docs" / "tutorial-settings.md"
_START = re.compile(r"^wattspan run --emulate (\S+)(.*)$", re.MULTILINE)


def shown() -> list[Shown]:
    return list(shown_commands(PAGE.read_text()))


def start() -> tuple[str, dict[str, Any]]:
    """The profile and the settings with which the page starts the agent."""
    found = _START.search(PAGE.read_text())
    assert found is not None
    words = shlex.split(found[2])
    assert set(words[::2]) == {"--set"}
    pairs = (word.split("=", 1) for word in words[1::2])
    return found[1], {key.replace(".", "__"): value for key, value in pairs}


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
    folder = tmp_path / "examples"
    folder.mkdir()
    for source in (ROOT / "examples" / "settings").glob("*.py"):
        (folder / source.name).write_text(source.read_text())
    profile, settings = start()
    settings |= {"store__enabled": "true"}
    with SpanAgent(tmp_path / "agent", profile=profile, within=240.0, **settings) as agent:
        environ = {
            **ENVIRONMENT,
            "PYTHONPATH": str(ROOT / "agent"),
            "WATTSPAN_RUN_DIR": str(agent.run_dir),
            "WATTSPAN_AGENT_RUN_DIR": str(agent.run_dir),
            "WATTSPAN_AGENT_STATE_DIR": str(agent.state_dir),
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{agent.http_port}",
            "WATTSPAN_EMULATED_HOST": str(agent.host),
        }

        # The shell of the page belongs to all its commands: a run of a job ends with it.
        with PageShell(folder, tmp_path / "bin", environ) as shell:
            eventually(
                lambda: "gpu_power" in shell.run("wattspan caps status"), "the capper answers", 240
            )
            eventually(
                lambda: IDLE_KNOWN.search(shell.run("wattspan advise --json")),
                "the idle power of the board is known, as the page asks", 240,
            )  # fmt: skip
            outputs = {}
            for one in shown():
                outputs[one.command] = text = shell.run(one.command)
                for line in one.lines:
                    assert is_shown(line, text), outputs
        assert any("Run at" not in text and "60 %, batch=64" in text for text in outputs.values())
        assert ElementTree.fromstring((folder / "frontier.svg").read_text()).tag.endswith("svg")


IDLE_KNOWN = re.compile(r'"idle_watts": [\d.]+')
