"""Setup of every test: visible skips, hypothesis profiles, free ports, and a watch for leaks."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import FrameType

import pytest
from hypothesis import HealthCheck, settings
from testbed.leaks import LEFT_RUNNING, LeakWatch
from testbed.requirements import REQUIREMENTS, TOOLS, required

_EXHAUSTIVE = (
    "alone",
    "search",
    "needs_apps",
    "needs_clients",
    "needs_debian_releases",
    "needs_grafana",
    "needs_node",
    "needs_site",
)
"""Markers of tests that `make test` leaves out, for their time or their requirements."""

# Examples of a property: few and random at a desk, few and always the same ones in `make test`
# (--hypothesis-profile=fixed), many in `make test-all`.
settings.register_profile(
    "random",
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],  # a busy build server is not a failure
)
settings.register_profile(
    "fixed", settings.get_profile("random"), derandomize=True, print_blob=True
)
settings.register_profile("thorough", settings.get_profile("fixed"), max_examples=100)
settings.load_profile("random")

_WATCH = pytest.StashKey[LeakWatch]()
_LEAKS = pytest.StashKey[list[str]]()


def _go_on(number: int, frame: FrameType | None) -> None:
    """Ignore a signal here, and not in the programs that are started."""


def pytest_configure(config: pytest.Config) -> None:
    # A shell that runs the tests in the background has them ignored, and so would their children.
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            told = signal.default_int_handler if number == signal.SIGINT else _go_on
            signal.signal(number, told)
    # Coverage imports what it measures before a program does, and forgets it again: a program that
    # a test starts may then have two classes of one name. Only the workers are measured.
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ.pop("COVERAGE_PROCESS_CONFIG", None)
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), str(TOOLS)])
    try:
        required(os.environ)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(item.get_closest_marker(name) for name in _EXHAUSTIVE):
            item.add_marker("exhaustive")
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[_WATCH] = LeakWatch(os.environ)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for requirement in REQUIREMENTS:
        if item.get_closest_marker(requirement.marker) and (reason := requirement.missing()):
            if requirement.name in required(os.environ):
                pytest.fail(f"WATTSPAN_REQUIRE has {requirement.name}, but: {reason}", False)
            pytest.skip(reason)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    watch = session.config.stash[_WATCH]
    processes = watch.processes()
    leaks = [f"process {pid}: {command}" for pid, command in processes.items()]
    leaks += [f"thread {name}" for name in watch.threads()]
    watch.end(processes)
    session.config.stash[_LEAKS] = leaks
    if leaks and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = LEFT_RUNNING
    _save_coverage()


def _save_coverage() -> None:
    """Write what this process has covered before xdist hears that it is done.

    xdist kills a worker that has not ended 10 s after that, and coverage writes its data as the
    interpreter ends: on a busy machine one worker's data were missing.
    """
    coverage = sys.modules.get("coverage")
    if coverage and (current := coverage.Coverage.current()):
        current.save()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    leaks = config.stash.get(_LEAKS, [])
    if leaks:
        terminalreporter.section("left running by the tests", red=True, bold=True)
        for leak in leaks:
            terminalreporter.line(leak)


@pytest.fixture(autouse=True)
def default_log_level() -> None:
    """The level of a library: `run` in an earlier test of this process has set that of an agent."""
    logging.getLogger("wattspan").setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def no_build_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that the build server sets for the tests; the program would warn of it."""
    monkeypatch.delenv("WATTSPAN_REQUIRE", raising=False)


@pytest.fixture
def free_port() -> Iterator[Callable[[], int]]:
    """A factory of loopback ports without a listener; each port once per test.

    Until the end of the test the kernel assigns such a port to no other process: a server that
    binds the number gets it, with an address that may be reused (``SO_REUSEADDR``).
    """
    with ExitStack() as kept:

        def port() -> int:
            one = kept.enter_context(socket.socket())
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("127.0.0.1", 0))
            return int(one.getsockname()[1])

        yield port
