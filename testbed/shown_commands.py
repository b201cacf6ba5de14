"""The commands that a page shows with their output, and one shell that runs them."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from testbed.program import PROGRAM
from wattspan.emulation.control import Closeable

_BLOCK = re.compile(r"^```(console|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SCRIPT = re.compile(r"^ *```sh\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_DOCUMENT = re.compile(r"<<'?(\w+)'?")
_END = "-- end of the command --"


class Shown(NamedTuple):
    """A command of a page, and the lines that it shows of the output."""

    command: str
    lines: list[str]


def shown_commands(text: str) -> Iterator[Shown]:
    """The commands of ``console`` blocks, whose prompts are ``$`` and ``>``, and Python blocks."""
    for kind, block in _BLOCK.findall(text):
        if kind == "python":
            yield Shown(f"python -c {shlex.quote(block)}", [])
            continue
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            first, *lines = part.splitlines()
            more = [line[2:] for line in lines if re.match(r">( |$)", line)]
            yield Shown("\n".join([first, *more]), lines[len(more) :])


def is_shown(line: str, text: str) -> bool:
    """True if a line of ``text`` is ``line``, in which … stands for any words."""
    pattern = ".*".join(map(re.escape, line.split("…")))
    return re.search(rf"^{pattern}$", text, re.MULTILINE) is not None


def script_commands(text: str) -> Iterator[str]:
    """The commands of ``sh`` blocks, which show no output; one may have several lines."""
    for block in _SCRIPT.findall(text):
        held: list[str] = []
        for line in textwrap.dedent(block).splitlines():
            if held or (line.strip() and not line.lstrip().startswith("#")):
                held.append(line)
            if held and is_whole("\n".join(held)):
                yield "\n".join(held)
                held.clear()
        if held:
            raise ValueError(f"a command without an end: {held}")


def is_whole(command: str) -> bool:
    """True if a shell would run ``command`` and not wait for the next line."""
    if command.endswith("\\"):
        return False
    if document := _DOCUMENT.search(command):
        return command.splitlines()[-1] == document[1]
    try:
        words = list(shlex.shlex(command, posix=True, punctuation_chars=True))
    except ValueError:  # a quotation without an end
        return False
    return words.count("do") <= words.count("done")


class PageShell(Closeable):
    """One shell for all commands of a page: a process that it starts ends with it at the latest.

    ``wattspan`` and ``python`` are those of the tests, found in ``programs``.
    """

    def __init__(self, folder: Path, programs: Path, environ: Mapping[str, str]) -> None:
        """``folder`` is its working directory, ``programs`` a directory that is made."""
        programs.mkdir()
        for name, words in (("wattspan", PROGRAM), ("python", [sys.executable])):
            program = programs / name
            program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
            program.chmod(0o755)
        self._shell = subprocess.Popen(
            ["/bin/bash"],
            env={**environ, "PATH": f"{programs}:{environ.get('PATH', '/usr/bin:/bin')}"},
            cwd=folder,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def run(self, command: str) -> str:
        """The output and the errors of a command."""
        shell = self._shell
        # The shell has read all of it before the command can read the same standard input.
        shell.stdin.write(f"{{ {command}\n}} 2>&1; echo; echo {_END}\n")
        shell.stdin.flush()
        return "".join(iter(shell.stdout.readline, f"{_END}\n"))

    def close(self) -> None:
        """End the shell and everything that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._shell.pid, signal.SIGKILL)
        self._shell.communicate()
