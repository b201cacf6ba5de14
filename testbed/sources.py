"""The project's own files, as the tests about the project see them."""

from __future__ import annotations

import ast
import functools
import re
import shutil
import subprocess
from pathlib import Path

from testbed.requirements import ROOT

_BLOCKS = re.compile(r"^(?=class |(?:async )?def )", re.MULTILINE)
_METHODS = re.compile(r"^ {4}(?:async )?def (\w+)", re.MULTILINE)
_FUNCTION = re.compile(r"\A(?:async )?def (\w+)")


@functools.cache
def tracked() -> tuple[Path, ...]:
    """Every file the project consists of: the files tracked by git, or all files of an unpacked
    sdist."""
    if (ROOT / ".git").exists() and shutil.which("git"):
        listing = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        ).stdout.decode()
        names = (ROOT / name for name in listing.split("\0") if name)
        return tuple(path for path in names if path.is_file())
    hidden = (p for p in ROOT.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return tuple(p for p in hidden if not p.relative_to(ROOT).parts[0].startswith("."))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def python_files(*tops: str) -> list[Path]:
    """The Python files below the top-level folders ``tops``."""
    return [p for p in tracked() if p.suffix == ".py" and p.relative_to(ROOT).parts[0] in tops]


def documents() -> list[Path]:
    return [path for path in tracked() if path.suffix == ".md"]


@functools.cache
def functions(path: Path) -> dict[str, str]:
    """The text of each function and method, by name, up to the next one."""
    found: dict[str, str] = {}
    for block in _BLOCKS.split(path.read_text(encoding="utf-8")):
        _, *parts = (_METHODS if block.startswith("class ") else _FUNCTION).split(block)
        found |= zip(parts[::2], parts[1::2], strict=True)
    return found
