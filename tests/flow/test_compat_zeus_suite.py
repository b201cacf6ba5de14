"""Zeus's own tests, and each of their promises where ``install()`` takes the place of Zeus.

The tests replace the driver, the clock and the processes inside of Zeus, none of which is here, so
that they run on Zeus only. Each promise is a program, or a reason why there is none.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import product
from pathlib import Path

import pytest
from testbed import zeus_promises as promises
from testbed.nvml_library import build, environment
from testbed.program import ENVIRONMENT
from testbed.requirements import CLIENTS, ROOT
from testbed.spans.agent import SpanAgent
from testbed.zeus_suite import (
    INSTALL,
    NOT_RUN,
    RUN_SCRIPT,
    SERVER,
    STREAMS,
    own_tests,
    passed_on_install,
    passed_on_zeus,
    prepared,
)

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.long,
    pytest.mark.needs_clients,
    pytest.mark.needs_cc,
]

Program = Callable[[Path], None]


@dataclass(frozen=True)
class Promise:
    """A program that holds on ``install()``, or that fails there with an error like ``differs``.

    ``then`` are programs that read on Zeus what it has written. ``alone`` has the reason why the
    program runs on ``install()`` only. ``reason`` says why a promise differs, or why it is not
    applicable, in which case it has no program.
    """

    program: Program | None
    differs: str = ""
    reason: str = ""
    alone: str = ""
    then: tuple[Program, ...] = ()

    @property
    def name(self) -> str:
        return self.program.__name__ if self.program else ""

    @property
    def verdict(self) -> str:
        if self.program is None:
            return "not applicable"
        return "differs" if self.differs else "holds"


def not_applicable(reason: str) -> tuple[Promise, ...]:
    return (Promise(None, reason=reason),)


PROCESS = "Zeus measures in a process of its own, which a short window ends before it has begun"
ADDRESS = "Zeus asks the service itself"
NO_COUNTERS = "Zeus finds no counters of CPUs here"
THREAD = "arguments of a process of Zeus are internal: a thread pushes"
TUNER = "the agent's tuner sets limits within the operator's budget; there is no sweep"

PROMISES: Mapping[str, tuple[Promise, ...]] = {
    "monitor.test_energy.test_monitor": (
        Promise(promises.wrong_windows_are_refused),
        Promise(promises.windows_in_any_order_have_their_own_time_and_energy),
        Promise(promises.gpus_are_all_or_those_named),
        Promise(promises.visible_gpus_are_numbered_from_0),
        Promise(
            promises.log_has_a_line_for_each_window,
            then=(promises.windows_are_logged, promises.zeus_replays_a_log),
        ),
        Promise(
            promises.packages_have_energy_and_those_with_a_counter_memory_too, alone=NO_COUNTERS
        ),
        Promise(
            promises.energy_of_0_is_warned_of,
            differs="[0-3] of 5 windows have 0 J",
            reason="the energy between two steps of a counter is interpolated",
        ),
        *not_applicable("GPUs without a counter: the agent integrates their power"),
        *not_applicable("measurement_states and calls of NVML are internal"),
    ),
    "monitor.test_energy.test_begin_window_restart": (
        Promise(promises.open_window_is_begun_anew_on_request),
    ),
    "monitor.test_carbon.test_get_current_*": (
        Promise(promises.intensity_is_that_of_the_service, alone=ADDRESS),
    ),
    "monitor.test_carbon.test_*_one_hour": (
        Promise(promises.emission_is_energy_times_intensity, alone=PROCESS),
    ),
    "monitor.test_carbon.test_*_one_day": (
        Promise(promises.each_period_has_its_own_intensity, alone=PROCESS),
    ),
    "monitor.test_price.test_get_prices*": (
        Promise(promises.tariff_is_that_of_the_service, alone=ADDRESS),
    ),
    "monitor.test_price.test_*_one_hour": (
        Promise(promises.cost_is_energy_times_price, alone=PROCESS),
    ),
    "monitor.test_price.test_*_one_day": (
        Promise(
            promises.hours_of_a_tariff_are_utc,
            differs="is not of the hour in UTC",
            reason="tariffs have local hours",
            alone=PROCESS,
        ),
    ),
    f"{STREAMS}*": not_applicable("a client of zeusd, which the agent replaces"),
    "test_metric.test_energy_histogram": (
        Promise(promises.histogram_observes_each_window, alone=NO_COUNTERS),
    ),
    "test_metric.test_energy_cumulative_counter": (
        Promise(promises.counter_rises_while_its_window_is_open, alone=NO_COUNTERS),
        *not_applicable(THREAD),
    ),
    "test_metric.test_power_gauge": (
        Promise(promises.gauge_has_the_power_while_its_window_is_open, alone=NO_COUNTERS),
        *not_applicable(THREAD),
    ),
    "optimizer.test_power_limit_optimizer.test_power_limit_optimizer": (
        Promise(promises.selectors_choose_the_least_energy_time_or_cost),
        Promise(
            promises.slowdown_selects_the_lowest_limit_within_it,
            differs="250 W is chosen within 1.1",
            reason="a lower limit can cost more energy than a higher one",
        ),
        *not_applicable(TUNER),
    ),
    "optimizer.test_power_limit_optimizer.test_HFGPLO_signature_equivalence": (
        Promise(promises.optimizers_have_the_same_signature),
    ),
    f"{SERVER}*": not_applicable("the agent keeps recurring trainings: there is no SQL server"),
}
"""The promises of Zeus's tests, by the names of the tests."""

README = ROOT / "examples" / "zeus" / "README.md"
PROGRAMS = [one for kept in PROMISES.values() for one in kept if one.program]


@dataclass(frozen=True)
class Host:
    """An agent on an emulated host, and the variables with which Zeus reads the same GPUs."""

    agent: SpanAgent
    nvml: dict[str, str]

    def on_install(self, program: Program, folder: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", INSTALL + RUN_SCRIPT]
        return self._run(command, program, folder, {"WATTSPAN_RUN_DIR": str(self.agent.run_dir)})

    def on_zeus(self, program: Program, folder: Path) -> subprocess.CompletedProcess[str]:
        return self._run([str(CLIENTS), "-W", "ignore"], program, folder, self.nvml)

    def _run(
        self, command: list[str], program: Program, folder: Path, environ: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        folder.mkdir(exist_ok=True)
        return subprocess.run(
            [*command, inspect.getfile(program), program.__name__, str(folder)],
            env={**ENVIRONMENT, **environ},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    folder = tmp_path_factory.mktemp("host")
    with SpanAgent(folder, profile="two-socket-h100") as agent:
        yield Host(agent, environment(build(folder / "lib"), agent.host / "gpus"))


def test_each_test_of_zeus_has_its_promises() -> None:
    tests = own_tests()
    assert len(tests) > 50, "nothing was found"
    kept_by = {test: [name for name in PROMISES if fnmatch(test, name)] for test in tests}
    assert [test for test, names in kept_by.items() if len(names) != 1] == []
    assert {name for names in kept_by.values() for name in names} == set(PROMISES)
    assert all(one.program or one.reason for kept in PROMISES.values() for one in kept)


def test_promises_are_listed_for_users() -> None:
    rows = {
        f"| `{test}` | {one.name.replace('_', ' ')} | {one.verdict} | {one.reason} |"
        for test, kept in PROMISES.items()
        for one in kept
    }
    listed = README.read_text().partition("## Zeus's own tests")[2].splitlines()
    assert {line for line in listed if line.startswith("| `")} == rows


def test_own_tests_pass_on_zeus(tmp_path: Path) -> None:
    passed = passed_on_zeus(prepared(tmp_path))
    assert {test for test in own_tests() if not test.startswith(NOT_RUN)} == set(passed)
    assert all(passed.values()), passed


def test_own_tests_need_more_than_the_public_names(tmp_path: Path) -> None:
    """A test that passes here is run as it is, instead of its program."""
    passed = passed_on_install(prepared(tmp_path))
    assert passed, "nothing was run"
    assert not any(passed.values()), passed


@pytest.mark.parametrize("promise", PROGRAMS, ids=[one.name for one in PROGRAMS])
def test_promise_of_zeus_holds_or_differs_as_stated(
    promise: Promise, host: Host, tmp_path: Path
) -> None:
    assert promise.program is not None
    here = host.on_install(promise.program, tmp_path / "install")
    if promise.differs:
        error = (here.stderr.splitlines() or [""])[-1]
        assert here.returncode != 0, promise.reason
        assert re.search(f"^AssertionError: .*{promise.differs}", error), here.stderr
    else:
        assert here.returncode == 0, here.stderr
    if not promise.alone:
        there = host.on_zeus(promise.program, tmp_path / "zeus")
        assert there.returncode == 0, there.stderr
    for written, reader in product(tmp_path.iterdir(), promise.then):
        read = host.on_zeus(reader, written)
        assert read.returncode == 0, read.stderr
