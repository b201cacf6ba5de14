"""Cases from the field: inputs that other programs, kernels and users made, one TOML file each.

A file stands in ``tests/field/<kind>/`` and has:

- ``id``: the report's short name; unique in its folder;
- ``source``: where the report or payload can be checked, with versions where they matter;
- ``input``: the input in a sentence; ``right``: the expected result in a sentence;
- ``test``: only if the case is tried elsewhere, ``tests/…/test_x.py::test_y``;
- any further tables, which the one test of the kind reads (``[tree]``, ``[expected]``, …).

``docs/field.md`` is generated from these files by ``make docs``.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "tests/field"
MAX_FILE_BYTES = 2_000_000
MAX_ENTRIES = 5_000
MAX_PATH_CHARACTERS = 1_000
MAX_SEGMENT_BYTES = 255


class InvalidCaseError(ValueError):
    """A case file that is refused: names the file, the entry and the rule."""


@dataclass(frozen=True)
class FieldCase:
    """One report, with the tables that the test of its kind reads."""

    id: str
    kind: str
    source: str
    input: str
    right: str
    test: str | None
    tables: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, table: str) -> Any:
        return self.tables[table]

    def get(self, table: str, default: Any = None) -> Any:
        return self.tables.get(table, default)


def field_cases(kind: str, folder: Path = FOLDER) -> list[Any]:
    """The parameters of the test of one kind: its cases that are not tried elsewhere."""
    found = [case for case in read_cases(folder / kind) if case.test is None]
    if not found:
        raise InvalidCaseError(f"{folder / kind}: no case: a test of no case proves nothing")
    return [pytest.param(case, id=case.id) for case in found]


def read_cases(folder: Path) -> list[FieldCase]:
    cases = [read_case(path) for path in sorted(folder.glob("*.toml"))]
    if len({case.id for case in cases}) != len(cases):
        raise InvalidCaseError(f"{folder}: an id stands in two files")
    return cases


def read_case(path: Path) -> FieldCase:
    """:raises InvalidCaseError: the file is too large, is not TOML, or lacks a key."""
    if path.stat().st_size > MAX_FILE_BYTES:
        raise InvalidCaseError(f"{path}: larger than {MAX_FILE_BYTES} bytes")
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidCaseError(f"{path}: {error}") from None
    words = {key: document.pop(key, None) for key in ("id", "source", "input", "right")}
    for key, value in words.items():
        if not isinstance(value, str) or not value.strip():
            raise InvalidCaseError(f"{path}: `{key}` must be a text")
    test = document.pop("test", None)
    return FieldCase(kind=path.parent.name, test=test, tables=document, **words)  # type: ignore[arg-type]


def build_tree(tree: Mapping[str, Any], root: Path) -> Path:
    """Write a listing below ``root``: ``files`` (path: text), ``links`` (path: target),
    ``directories`` (paths) and ``modes`` (path: octal text), all relative to it.

    :raises InvalidCaseError: more than :data:`MAX_ENTRIES` entries, a path that is absolute, leaves
        the root or has control characters, or a link whose target lies outside or leads to itself.
    """
    files, links = dict(tree.get("files", {})), dict(tree.get("links", {}))
    directories, modes = list(tree.get("directories", [])), dict(tree.get("modes", {}))
    if (count := len(files) + len(links) + len(directories)) > MAX_ENTRIES:
        raise InvalidCaseError(f"{count} entries; at most {MAX_ENTRIES}")
    for path in (*files, *links, *directories, *modes):
        _check_path(path)
    for path, target in links.items():
        _check_link(path, target, links)
    for path in directories:
        (root / path).mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    for path, target in links.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).symlink_to(target)
    for path, mode in modes.items():
        (root / path).chmod(int(mode, 8))
    return root


def _check_path(path: str) -> None:
    parts = path.split("/")
    if not path or len(path) > MAX_PATH_CHARACTERS or not path.isprintable():
        raise InvalidCaseError(f"path {path[:80]!r}: empty, too long, or with control characters")
    if any(part in ("", ".", "..") or len(os.fsencode(part)) > MAX_SEGMENT_BYTES for part in parts):
        raise InvalidCaseError(f"path {path[:80]!r}: absolute, with dots, or a segment is too long")


def _check_link(path: str, target: str, links: Mapping[str, str]) -> None:
    """Follow a link by name only: nothing is written before the whole listing is checked."""
    place, seen = path, set[str]()
    while place in links:
        if place in seen:
            raise InvalidCaseError(f"link {path!r}: leads to itself")
        seen.add(place)
        if PurePosixPath(links[place]).is_absolute() or not links[place].isprintable():
            raise InvalidCaseError(
                f"link {path!r}: target {target[:80]!r} is absolute or unprintable"
            )
        joined = os.path.normpath(PurePosixPath(place).parent / links[place])
        if joined == ".." or joined.startswith("../"):
            raise InvalidCaseError(f"link {path!r}: target {target[:80]!r} leaves the listing")
        if PurePosixPath(place).is_relative_to(joined):
            raise InvalidCaseError(f"link {path!r}: leads to a directory that holds it")
        place = joined
