"""The test bench itself: a silent skip or a missed leak makes every other test worth less."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from testbed.leaks import LEFT_RUNNING, LeakWatch
from testbed.requirements import REQUIREMENTS, ROOT, required
from testbed.waiting import eventually

pytestmark = pytest.mark.slow

INNER = """
import subprocess, sys, threading, pytest
@pytest.mark.needs_prometheus
def test_that_needs_something(): assert True
def test_that_leaks():
    threading.Thread(target=threading.Event().wait, daemon=True, name="stray").start()
    subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert True
"""


NO_TOOLS = """
import pathlib
from testbed import requirements
requirements.TOOLS = pathlib.Path("/nonexistent")
"""


def run_inner(tmp_path: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on INNER, under this project's conftest and on a machine without tools."""
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "no_tools.py").write_text(NO_TOOLS)
    (tmp_path / "test_inner.py").write_text(INNER)
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no_tools", "-W", "ignore"]
    command += ["-p", "no:cacheprovider", "-o", "markers=needs_prometheus: x", *arguments]
    bare = {"PATH": "/nonexistent", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{tmp_path}"}
    return subprocess.run(
        [*command, "test_inner.py"],
        cwd=tmp_path,
        env=bare | environ,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_missing_tool_that_is_required_is_a_failure(tmp_path: Path) -> None:
    result = run_inner(tmp_path, "-k", "needs", WATTSPAN_REQUIRE="prometheus")
    assert result.returncode == 1, result.stdout
    assert "WATTSPAN_REQUIRE has prometheus, but: no prometheus" in result.stdout


def test_requirement_nobody_knows_is_refused_by_name(tmp_path: Path) -> None:
    result = run_inner(tmp_path, WATTSPAN_REQUIRE="promtheus")
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    known = (
        "apps, browser, cc, clients, debian, debian_releases, etcd, grafana, loop, mandoc, network,"
        " node, packaging, prometheus, pushgateway, root, site, systemd, torch"
    )
    assert f"WATTSPAN_REQUIRE names promtheus; known: {known}" in result.stderr


def test_session_that_leaves_threads_and_processes_behind_fails(tmp_path: Path) -> None:
    """Although its tests have passed or were skipped with the package of a missing tool."""
    result = run_inner(tmp_path)
    assert result.returncode == LEFT_RUNNING, result.stdout
    assert "thread stray" in result.stdout
    assert "-c input()" in result.stdout
    assert "no prometheus and no promtool; run scripts/debian-tool prometheus" in result.stdout
    assert "1 passed, 1 skipped" in result.stdout


def test_thread_that_ends_in_time_is_no_leak() -> None:
    release = threading.Event()
    watch = LeakWatch({})
    thread = threading.Thread(target=release.wait, name="tidy")
    thread.start()
    assert watch.threads(patience=0) == ["tidy"]
    release.set()
    assert watch.threads() == []


def test_every_requirement_has_its_marker(pytestconfig: pytest.Config) -> None:
    known = {line.split(":")[0] for line in pytestconfig.getini("markers")}
    assert {requirement.marker for requirement in REQUIREMENTS} <= known


def test_requirements_may_be_separated_by_commas_or_spaces() -> None:
    assert required({"WATTSPAN_REQUIRE": "cc, root"}) == {"cc", "root"}
    assert required({}) == frozenset()


def test_free_ports_are_different(free_port: Callable[[], int]) -> None:
    assert len({free_port() for _ in range(20)}) == 20


def test_what_never_happens_is_named() -> None:
    with pytest.raises(AssertionError, match="the moon falls: not within"):
        eventually(lambda: False, "the moon falls", within=0.02)


def test_what_happens_is_returned() -> None:
    assert eventually(lambda: 42, "an answer") == 42
