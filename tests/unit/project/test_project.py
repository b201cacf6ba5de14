"""The project's promises about itself that no type checker or linter can hold."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from testbed.requirements import ROOT
from testbed.sources import documents, functions, parsed, python_files, tracked

from wattspan.model import Trouble
from wattspan.model.settings import convert, keys
from wattspan.plugins import discover
from wattspan.ports import CounterSource, SourceContext
from wattspan.testing import FakeDirectory, ManualClock
from wattspan.util.files import PUBLIC_ADDRESS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


# ------------------------------------------------------------------------------------ sources


def test_every_test_can_fail() -> None:
    """Each test asserts, expects an exception, or calls a helper of the tests that does."""
    files = python_files("tests") + python_files("testbed")
    everything = [one for path in files for one in functions(path).items()]
    calls = [(name, set(re.findall(r"(\w+)\(", text))) for name, text in everything]
    asserts = re.compile(r"(^ *|: )assert\b", re.MULTILINE)
    asserting = {"raises", "warns", "fail", "approx"}
    asserting |= {name for name, text in everything if asserts.search(text)}
    while more := {name for name, names in calls if names & asserting} - asserting:
        asserting |= more
    tests = [name for name, _ in everything if name.startswith("test_")]
    assert [test for test in tests if test not in asserting] == []
    assert len(tests) > 20


@pytest.mark.parametrize(
    ("folder", "others"),
    [
        ("tests", "benchmarks"),
        ("testbed", "benchmarks|unit|flow|property|contract|field|fuzz"),
        ("benchmarks", "unit|flow|property|contract|field|fuzz"),
    ],
)
def test_tests_and_benchmarks_share_only_the_testbed(folder: str, others: str) -> None:
    imports = re.compile(rf"^ *(from|import) ({others})\b", re.MULTILINE)
    files = python_files(folder)
    assert len(files) > 20
    assert [name(p) for p in files if imports.search(p.read_text(encoding="utf-8"))] == []


def test_tests_do_not_sleep() -> None:
    def sleeps(node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute):
            return ast.unparse(node) in {"time.sleep", "asyncio.sleep"}
        return (
            isinstance(node, ast.ImportFrom)
            and node.module == "time"
            and "sleep" in {alias.name for alias in node.names}
        )

    files = [p for p in python_files("tests") if "sleep" in p.read_text(encoding="utf-8")]
    assert [name(p) for p in files if any(map(sleeps, ast.walk(parsed(p))))] == []


def test_files_hold_no_machine_paths() -> None:
    private = [
        r"/(root|home)/[a-z.]+/",  # a home directory
        r"/opt/(wheels|pypi)",
        r"/work/[a-z]+",
        r"(extra-)?index-url|find-links|pythonhosted|artifactory",
        r"/tmp/(bash|claude|brief)",
    ]
    pattern = re.compile("|".join(private))
    found = [
        f"{name(path)}: {match[0]}"
        for path in tracked()
        if path != Path(__file__) and path.suffix not in {".csv", ".png", ".gz"}
        if (match := pattern.search(path.read_text(encoding="utf-8", errors="replace")))
    ]
    assert found == []


@pytest.mark.parametrize(
    "path", [p for p in tracked() if p.parent.name in {"scripts", ".ci"}], ids=lambda p: p.name
)
def test_every_script_runs_and_parses(path: Path) -> None:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    if path.suffix == ".py":
        assert ast.get_docstring(parsed(path))
        return
    assert path.stat().st_mode & 0o111, f"{path.name} is not executable"
    shell = {"#!/bin/sh": "sh", "#!/usr/bin/env bash": "bash"}[first]
    checked = subprocess.run([shell, "-n", str(path)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


# ---------------------------------------------------------------------------------- documents


def targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))


def found_in_documents(pattern: str) -> list[tuple[Path, str]]:
    found = re.compile(pattern, re.MULTILINE)
    pages = ((path, path.read_text(encoding="utf-8")) for path in documents())
    return [(path, one) for path, text in pages for one in found.findall(text)]


def test_every_make_command_in_a_document_exists() -> None:
    commands = found_in_documents(r"(?:^|`)make ([a-z-]+)")
    assert len(commands) > 20
    assert [(name(p), command) for p, command in commands if command not in targets()] == []


@pytest.mark.slow
def test_every_test_that_a_document_names_is_there() -> None:
    files = {path.relative_to(ROOT / "tests"): path for path in python_files("tests")}
    named = [
        (page, *found)
        for page in documents()
        if page.name != "CHANGELOG.md"  # history of the project
        for found in re.findall(
            r"(?<![\w*])([\w*/]*test_[\w*]+\.py)(?:::(\w+))?", page.read_text(encoding="utf-8")
        )
    ]
    assert len(named) > 50
    missing = {
        f"{name(page)}: {pattern}{test and '::'}{test}"
        for page, pattern, test in named
        if not any(
            short.match(pattern.removeprefix("tests/")) and (not test or test in functions(path))
            for short, path in files.items()
        )
    }
    assert missing == set()


def test_help_lists_every_target_a_person_would_type() -> None:
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True).stdout
    described = set(re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.MULTILINE))
    assert {"demo", "test", "test-all", "check", "docs", "bench", "lock", "clean"} <= described
    assert all(f"make {target} " in listed for target in described)


def test_reference_pages_match_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))  # as for a script that Python runs
    made = runpy.run_path(str(ROOT / "scripts" / "reference.py"))["pages"]()
    assert {"commands.md", "metrics.md", "reasons.md"} <= made.keys()
    for page, text in made.items():
        written = (ROOT / "docs" / "reference" / page).read_text(encoding="utf-8")
        assert written == text, f"{page} is out of date: run `make docs`"
    folder = ROOT / "docs" / "reference"
    generated = {name((folder / page).resolve()) for page in [*made, "dashboards.md"]}
    structure = runpy.run_path(str(ROOT / "scripts" / "structure.py"))
    assert set(structure["GENERATED"]) == generated


def test_words_of_documentation_are_within_their_ceiling() -> None:
    structure = runpy.run_path(str(ROOT / "scripts" / "structure.py"))
    words = structure["words_of_documentation"]()
    ceilings = tomllib.loads((ROOT / "structure.toml").read_text(encoding="utf-8"))
    assert words.keys() >= {"README.md", "docs/index.md"}
    assert words.keys().isdisjoint(structure["GENERATED"])
    most = sorted(words, key=words.__getitem__, reverse=True)[:10]
    assert sum(words.values()) <= ceilings["words_of_documentation"], f"the longest are {most}"


def test_messages_have_the_public_address_of_the_project() -> None:
    assert PROJECT["project"].get("urls", {}).get("Documentation", "") == PUBLIC_ADDRESS
    assert PUBLIC_ADDRESS == "" or re.fullmatch(r"https://\S+/", PUBLIC_ADDRESS)


def test_every_setting_is_explained() -> None:
    tables = discover().schema.tables
    silent = [
        f"{where}.{key.name}"
        for where, table in tables.items()
        for key in keys(table).values()
        if not key.doc
    ]
    assert silent == []


DECISIONS = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))


def test_decisions_are_numbered_without_holes_and_listed() -> None:
    assert [int(p.name[:4]) for p in DECISIONS] == list(range(1, len(DECISIONS) + 1))
    index = (ROOT / "docs" / "decisions" / "README.md").read_text(encoding="utf-8")
    assert [p.name for p in DECISIONS if p.name not in index] == []


def test_changelog_has_the_current_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[(.+?)\]", changelog, re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert PROJECT["project"]["version"] in headings or len(headings) == 1


def test_source_in_the_guide_works(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "how-to" / "write-a-plugin.md").read_text(encoding="utf-8")
    code, *_ = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    module: dict[str, Any] = {"__name__": "guide"}
    exec(compile(code, "guide", "exec", dont_inherit=True), module)
    meter = tmp_path / "meter"
    meter.write_text("42")

    plugin = module["plugin"]
    settings = convert({"path": str(meter)}, plugin.settings, "sources.meter")
    source = plugin.open(settings, SourceContext(ManualClock(), FakeDirectory()))
    assert isinstance(source, CounterSource)
    assert [reading.counter for reading in source.read().readings] == [42_000]
    meter.write_text("nonsense")
    assert [failure.trouble for failure in source.read().failures] == [Trouble.RETRY]


# ------------------------------------------------------------------------------- distributions

ENTRY_POINTS = [
    (group, point)
    for group in ("console_scripts", *PROJECT["project"]["entry-points"])
    for point in metadata.distribution("wattspan").entry_points.select(group=group)
]


@pytest.mark.parametrize(("group", "point"), ENTRY_POINTS, ids=lambda v: getattr(v, "name", v))
def test_every_entry_point_resolves(group: str, point: metadata.EntryPoint) -> None:
    assert point.load() is not None, group


def test_every_entry_point_is_installed() -> None:
    declared = {
        (group, key)
        for group, points in PROJECT["project"]["entry-points"].items()
        for key in points
    }
    assert {(g, p.name) for g, p in ENTRY_POINTS if g != "console_scripts"} == declared


@pytest.mark.parametrize("lock", ["run", "package", "dev", "build"])
def test_every_locked_package_has_its_hashes(lock: str) -> None:
    text = (ROOT / "requirements" / f"{lock}.txt").read_text(encoding="utf-8")
    pins = re.findall(r"^\S+==\S+.*\\\n    --hash=sha256:", text, re.MULTILINE)
    assert len(pins) == len(re.findall(r"^[a-z]", text, re.MULTILINE)) > 0


def test_lock_file_has_every_dependency() -> None:
    text = (ROOT / "requirements" / "run.txt").read_text(encoding="utf-8")
    locked = set(re.findall(r"^([a-z0-9.-]+)==", text, re.MULTILINE))
    wanted = {re.split(r"[>=<\[; ]", d)[0].lower() for d in PROJECT["project"]["dependencies"]}
    assert wanted <= locked
