"""The project's own files, as the tests about the project see them."""

from __future__ import annotations

import ast
import functools
import shutil
import subprocess
from pathlib import Path

from testbed.requirements import ROOT


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
    """The text of each function of the module and each method of its classes, by name."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found: dict[str, str] = {}
    inside: list[ast.stmt] = [*parsed(path).body]
    while inside:
        node = inside.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = "\n".join(lines[node.lineno - 1 : node.end_lineno])
        elif isinstance(node, ast.ClassDef):
            inside += node.body
    return found
