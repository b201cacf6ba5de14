"""The project's own files, as the tests about the project see them."""

from __future__ import annotations

import ast
import functools
import shutil
import subprocess
from collections.abc import Iterator
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


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method of the file, nested ones included."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def called(node: ast.AST) -> set[str]:
    """The last names of everything called below ``node``: ``a.b.c()`` is ``c``."""
    names = set()
    for call in ast.walk(node):
        if isinstance(call, ast.Call):
            if isinstance(call.func, ast.Attribute):
                names.add(call.func.attr)
            elif isinstance(call.func, ast.Name):
                names.add(call.func.id)
    return names
