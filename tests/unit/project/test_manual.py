"""The manual page wattspan(1): every command, option and exit code, without a fault of notation."""

from __future__ import annotations

import re
import runpy
import subprocess
from functools import cache

import pytest
from testbed.requirements import ROOT, find_program

from wattspan.cli import COMMANDS


@cache
def manual() -> str:
    page = runpy.run_path(str(ROOT / "scripts" / "manual.py"))["page"]
    return "\n".join(page("2026-01-31")) + "\n"


def readable() -> str:
    return manual().replace(r"\-", "-").replace(r"\e", "\\")


def test_manual_has_every_command_and_its_options() -> None:
    commands = re.findall(r"^\.SS (wattspan[a-z -]*?) (?:\[|[A-Z])", readable(), re.MULTILINE)
    reference = (ROOT / "docs/reference/commands.md").read_text(encoding="utf-8")
    assert commands == re.findall(r"^### `(wattspan .+)`$", reference, re.MULTILINE)
    assert {f"wattspan {name}" for name in COMMANDS} <= set(commands)
    options = set(re.findall(r"^  (?:-\w, )?(--[a-z][a-z-]*)", reference, re.MULTILINE))
    assert len(options) > 50
    assert options - set(re.findall(r"--[a-z][a-z-]*", readable())) == set()


def test_manual_has_every_exit_code() -> None:
    status = readable().partition(".SH EXIT STATUS\n")[2].partition(".SH")[0]
    codes = re.findall(r"^\.B (\d+)$", status, re.MULTILINE)
    assert codes[:4] == ["0", "1", "2", "3"]
    assert codes[-2:] == ["70", "130"]


def test_manual_has_the_sections_of_a_manual_page() -> None:
    assert re.findall(r"^\.SH (.+)$", manual(), re.MULTILINE) == [
        "NAME",
        "SYNOPSIS",
        "DESCRIPTION",
        "OPTIONS",
        "COMMANDS",
        "EXIT STATUS",
        "ENVIRONMENT",
        "FILES",
        "SEE ALSO",
    ]
    for word in ("WATTSPAN_CONFIG", "WATTSPAN_RUN_DIR", "/etc/wattspan/config.toml"):
        assert word in manual()


@pytest.mark.needs_mandoc
def test_mandoc_finds_no_fault() -> None:
    program = find_program("mandoc")
    assert program
    done = subprocess.run(
        [program, "-T", "lint", "-W", "warning"],
        input=manual(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")
