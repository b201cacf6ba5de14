"""The files of ``tests/field``: complete, bounded, and each tried by a test."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from testbed.field import FOLDER, MAX_ENTRIES, InvalidCaseError, build_tree, read_case, read_cases

KINDS = sorted(path.name for path in FOLDER.iterdir() if path.is_dir() and any(path.glob("*.toml")))
ROOT = FOLDER.parents[1]


@pytest.mark.parametrize("kind", KINDS)
def test_kind_is_tried_by_the_test_of_its_name_or_by_named_tests(kind: str) -> None:
    for case in read_cases(FOLDER / kind):
        if case.test is None:
            assert (FOLDER / f"test_{kind}.py").exists(), f"{kind}: no test reads its files"
        else:
            path, _, name = case.test.partition("::")
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
            assert name in names, f"{case.id}: {case.test} does not exist"


@pytest.mark.parametrize(
    "tree",
    [
        {"links": {"a": "b", "b": "a"}},
        {"links": {"class/x": "."}},
        {"links": {"class/x/device": ".."}},
        {"links": {"a": "/etc/passwd"}},
        {"links": {"a": "../outside"}},
        {"files": {"../outside": "1"}},
        {"files": {"/absolute": "1"}},
        {"files": {"name\nwith a newline": "1"}},
        {"files": {"a" * 300: "1"}},
        {"directories": ["b/../../c"]},
        {"files": {f"intel-rapl:{n}/name": "package-0" for n in range(10_000)}},
        {"modes": {"/etc/passwd": "777"}},
    ],
    ids=lambda tree: str(tree)[:40],
)
def test_hostile_listing_is_refused_and_nothing_written(tree: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidCaseError):
        build_tree(tree, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_listing_of_a_device_tree_is_built(tmp_path: Path) -> None:
    tree = {
        "files": {"devices/virtual/powercap/intel-rapl:0/name": "package-0\n"},
        "links": {"class/powercap/intel-rapl:0": "../../devices/virtual/powercap/intel-rapl:0"},
        "directories": ["module"],
        "modes": {"devices/virtual/powercap/intel-rapl:0/name": "400"},
    }
    assert len(tree["files"]) < MAX_ENTRIES
    root = build_tree(tree, tmp_path)
    assert (root / "class/powercap/intel-rapl:0/name").read_text(encoding="utf-8") == "package-0\n"
    assert (root / "module").is_dir()


@pytest.mark.parametrize(
    "text",
    ["", "id = 1", 'id = "a"\nsource = ""\ninput = "i"\nright = "r"', "id =", "\x00"],
)
def test_incomplete_case_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "case.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidCaseError, match=r"case\.toml"):
        read_case(path)
