"""The commands of docs/how-to/run-a-fleet.md run against a real etcd, and print what it shows."""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from pathlib import Path

import pytest
from testbed.program import ENVIRONMENT
from testbed.requirements import ROOT, find_program
from testbed.reserved_port import reserved_port
from testbed.shown_commands import PageShell, Shown, is_shown, shown_commands
from testbed.waiting import eventually

PAGE = (ROOT / "docs" / "how-to" / "run-a-fleet.md").read_text()
_PORTS = ("12379", "12380")
"""The ports of the page, in whose place a test uses free ones."""


def run_as_shown(shell: PageShell, one: Shown) -> None:
    """Run a command until it prints what the page shows: readers wait for the states there."""
    printed = [shell.run(one.command)]

    def absent() -> list[str]:
        return [line for line in one.lines if not is_shown(line, printed[-1])]

    def is_printed() -> bool:
        if absent():
            printed.append(shell.run(one.command))
        return not absent()

    try:
        eventually(is_printed, one.command, 120)
    except AssertionError as error:
        raise AssertionError(f"{error}: {absent()} is not in\n{printed[-1]}") from None


def test_page_shows_commands_of_the_whole_way() -> None:
    shown = list(shown_commands(PAGE))
    commands = "\n".join(one.command for one in shown)
    for words in ("etcd --data-dir", "fleet budget row-1", "wattspan run", "wattspan doctor",
                  "drain host-2", "--undo", "kill -KILL", "rm -r fleet"):  # fmt: skip
        assert words in commands, words
    assert sum("fleet status" in one.command and bool(one.lines) for one in shown) > 5
    (hosts,) = (one for one in shown if "cat >host-" in one.command)
    assert hosts.command.endswith("\nEND\ndone")
    assert hosts.lines == []
    for port in _PORTS:
        assert port in PAGE


@pytest.mark.needs_etcd
@pytest.mark.exhaustive
def test_every_command_of_the_page_prints_what_it_shows(tmp_path: Path) -> None:
    with ExitStack() as stack:
        ports = {port: str(stack.enter_context(reserved_port())) for port in _PORTS}
        page = re.sub("|".join(_PORTS), lambda found: ports[found[0]], PAGE)
        etcd = find_program("etcd")
        assert etcd is not None
        environ = {
            **ENVIRONMENT,
            "PATH": f"{ENVIRONMENT['PATH']}:{Path(etcd).parent}",
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "agent", ROOT / "exporters"))),
        }
        shell = stack.enter_context(PageShell(tmp_path, tmp_path / "bin", environ))
        for one in shown_commands(page):
            run_as_shown(shell, one)
        assert not (tmp_path / "fleet").exists()
