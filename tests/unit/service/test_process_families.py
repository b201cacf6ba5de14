"""Families of processes, and the removal of ended ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattspan.model import SECOND, Consumer, Principal
from wattspan.service.process_families import (
    MAX_PROCESSES,
    REMOVAL_INTERVAL,
    ProcessFamilies,
    ServiceProcesses,
)

ANN, BOB = Principal(1000), Principal(2000)
LIFETIME = 300 * SECOND
LATER = LIFETIME + REMOVAL_INTERVAL

SHELL, MAKE, COMPILER = Consumer(10, 1), Consumer(11, 2), Consumer(12, 3)


@pytest.fixture
def families() -> ProcessFamilies:
    found = ProcessFamilies(LIFETIME)
    found.add(SHELL, 1)
    found.add(MAKE, SHELL.pid)
    found.add(COMPILER, MAKE.pid)
    return found


def test_family_has_all_descendants(families: ProcessFamilies) -> None:
    assert families.family(SHELL) == {SHELL, MAKE, COMPILER}
    assert families.family(COMPILER) == {COMPILER}


def test_reused_pid_has_no_older_children(families: ProcessFamilies) -> None:
    assert families.family(Consumer(MAKE.pid, 9)) == {Consumer(MAKE.pid, 9)}


def test_ended_process_stays_for_its_lifetime(families: ProcessFamilies) -> None:
    families.end(MAKE, SECOND)
    assert families.remove_ended(SECOND + LIFETIME) == set()
    assert MAKE in families.family(SHELL)


def test_children_of_a_removed_process_go_to_its_parent(families: ProcessFamilies) -> None:
    families.end(MAKE, SECOND)
    assert families.remove_ended(SECOND + LATER) == {MAKE}
    assert families.family(SHELL) == {SHELL, COMPILER}
    assert len(families) == 2


def test_removal_of_several_generations_keeps_the_family(families: ProcessFamilies) -> None:
    linker = Consumer(13, 4)
    families.add(linker, COMPILER.pid)
    families.end(COMPILER, SECOND)
    families.end(MAKE, SECOND)
    families.remove_ended(SECOND + LATER)
    assert families.family(SHELL) == {SHELL, linker}


def test_orphan_that_is_described_anew_stays_in_the_family(families: ProcessFamilies) -> None:
    families.end(MAKE, SECOND)
    families.add(COMPILER, 1)
    assert families.family(SHELL) == {SHELL, MAKE, COMPILER}
    families.remove_ended(SECOND + LATER)
    families.add(COMPILER, 1)
    assert families.family(SHELL) == {SHELL, COMPILER}


def test_child_of_a_reused_pid_stays_with_it(families: ProcessFamilies) -> None:
    second = Consumer(MAKE.pid, 50)
    families.end(second, SECOND)
    families.add(second, 1)
    families.remove_ended(SECOND + LATER)
    assert families.family(SHELL) == {SHELL, MAKE, COMPILER}


def test_child_belongs_to_the_last_process_with_the_pid_of_its_parent(
    families: ProcessFamilies,
) -> None:
    second, job = Consumer(MAKE.pid, 50), Consumer(60, 55)
    families.end(MAKE, SECOND)
    families.add(second, 1)
    families.add(job, second.pid)
    assert families.family(SHELL) == {SHELL, MAKE, COMPILER}
    families.remove_ended(SECOND + LATER)
    assert families.family(SHELL) == {SHELL, COMPILER}
    assert families.family(second) == {second, job}


def test_grandchild_belongs_to_the_process_that_had_the_pid_at_the_birth_of_its_parent(
    families: ProcessFamilies,
) -> None:
    other = Consumer(SHELL.pid, COMPILER.started)
    families.end(MAKE, SECOND)
    families.end(SHELL, SECOND + LATER)
    families.add(other, 1)
    families.remove_ended(SECOND + LATER)
    assert families.family(SHELL) == {SHELL, COMPILER}
    assert families.family(other) == {other}


def test_removal_waits_for_its_interval(families: ProcessFamilies) -> None:
    now = 10 * LATER
    assert families.remove_ended(now) == set()
    families.end(MAKE, now - LATER)
    assert families.remove_ended(now + REMOVAL_INTERVAL - 1) == set()
    assert families.remove_ended(now + REMOVAL_INTERVAL) == {MAKE}


def test_container_of_a_removed_process_is_forgotten(families: ProcessFamilies) -> None:
    one, other = Consumer(20, 5), Consumer(21, 6)
    families.add(one, 1, "container", ANN)
    families.add(other, 1, "container", ANN)
    assert families.service(one).members == {one, other}
    families.end(other, SECOND)
    families.remove_ended(SECOND + LATER)
    assert families.service(one).members == {one}


def test_oldest_processes_are_forgotten_beyond_the_limit() -> None:
    families = ProcessFamilies(LIFETIME)
    for pid in range(MAX_PROCESSES + 5):
        families.add(Consumer(100 + pid, pid), 1)
    assert len(families) == MAX_PROCESSES


def serving() -> tuple[ProcessFamilies, Consumer, Consumer]:
    """Families with an API server of Ann's and its worker."""
    families = ProcessFamilies(LIFETIME)
    api, worker = Consumer(100, 1), Consumer(101, 2)
    families.add(api, 1, principal=ANN)
    families.add(worker, api.pid, principal=ANN)
    return families, api, worker


def test_processes_of_a_user_displace_none_of_another() -> None:
    families, api, worker = serving()
    for pid in range(2 * MAX_PROCESSES):
        families.add(Consumer(1000 + pid, 3 + pid), 1, principal=BOB)
    assert families.service(api, {worker}).members == {api, worker}
    assert len(families) == MAX_PROCESSES


@pytest.mark.slow
def test_short_lived_processes_displace_no_running_one_of_their_user() -> None:
    families, api, worker = serving()
    for pid in range(2 * MAX_PROCESSES):
        families.add(Consumer(1000 + pid, 3 + pid), 1, principal=ANN)
        families.end(Consumer(1000 + pid, 3 + pid), SECOND)
    assert families.family(api) == {api, worker}
    assert len(families) == MAX_PROCESSES + 2
    families.remove_ended(SECOND + LATER)
    assert len(families) == 2
    assert families.known({api, worker, SHELL}) == {api, worker}


@pytest.mark.exhaustive
def test_ended_processes_beyond_the_limit_are_removed_before_their_time() -> None:
    families = ProcessFamilies(LIFETIME)
    ended = [Consumer(100 + pid, pid) for pid in range(5 * MAX_PROCESSES)]
    for one in ended:
        families.add(one, 1, principal=BOB)
        families.end(one, SECOND)
    early = families.remove_ended(SECOND + REMOVAL_INTERVAL)
    assert len(early) >= 2 * MAX_PROCESSES
    assert early.isdisjoint(ended[-MAX_PROCESSES:])
    assert early | families.remove_ended(SECOND + LATER + REMOVAL_INTERVAL) == set(ended)
    assert len(families) == 0


def test_steady_churn_keeps_the_number_of_processes_bounded() -> None:
    families = ProcessFamilies(LIFETIME)
    for second in range(4 * LIFETIME // SECOND):
        now = second * SECOND
        families.add(Consumer(1000 + second, second), 1)
        families.end(Consumer(1000 + second, second), now)
        families.remove_ended(now)
    assert len(families) <= (LIFETIME + 2 * REMOVAL_INTERVAL) // SECOND


@given(
    parents=st.lists(st.integers(0, 30), min_size=1, max_size=30), ended=st.sets(st.integers(0, 29))
)
def test_removal_changes_no_family_of_the_others(parents: list[int], ended: set[int]) -> None:
    """Process n has a parent among the earlier ones, or pid 1."""
    families = ProcessFamilies(LIFETIME)
    processes = [Consumer(100 + number, number) for number in range(len(parents))]
    for number, process in enumerate(processes):
        parent = parents[number] % (number + 1)
        families.add(process, 1 if parent == number else processes[parent].pid)
    gone = {processes[number] for number in ended if number < len(processes)}
    before = {process: families.family(process) for process in processes}
    for process in gone:
        families.end(process, SECOND)
    families.remove_ended(SECOND + LATER)
    for process in set(processes) - gone:
        assert families.family(process) == before[process] - gone


def test_equal_container_name_of_another_principal_joins_no_service() -> None:
    families = ProcessFamilies(LIFETIME)
    engine, forger = Consumer(7, 1), Consumer(8, 2)
    families.add(engine, 1, "container", Principal(1000, "0123456789ab"))
    families.add(forger, 1, "container", Principal(2000))
    assert families.service(engine).members == {engine}
    assert families.service(forger).members == {forger}


@pytest.mark.parametrize(("user", "joined"), [(0, True), (1000, False)])
def test_descendant_of_another_user_is_in_the_service_of_root_only(
    user: int, *, joined: bool
) -> None:
    families = ProcessFamilies(LIFETIME)
    engine, worker = Consumer(7, 1), Consumer(8, 2)
    families.add(engine, 1, principal=Principal(user))
    families.add(worker, engine.pid, principal=BOB)
    assert families.service(engine).members == ({engine, worker} if joined else {engine})


def test_service_without_a_principal_is_its_process_alone() -> None:
    families = ProcessFamilies(LIFETIME)
    engine, other = Consumer(7, 1), Consumer(8, 2)
    families.add(engine, 1, "container")
    families.add(other, engine.pid, "container")
    assert families.service(engine).members == {engine}


ALICE = Principal(1000)
LAUNCHER, API, WORKER, SHELL = Consumer(20, 1), Consumer(21, 2), Consumer(22, 3), Consumer(19, 0)


def _launched(**launcher: Any) -> ProcessFamilies:
    """An API server and a worker below a launcher in a shell."""
    families = ProcessFamilies(LIFETIME)
    families.add(SHELL, 1, principal=ALICE, starts_others=True)
    families.add(LAUNCHER, SHELL.pid, **{"principal": ALICE, **launcher})
    families.add(API, LAUNCHER.pid, principal=ALICE)
    families.add(WORKER, LAUNCHER.pid, principal=ALICE)
    return families


def test_service_is_the_family_of_the_nearest_launcher_with_a_gpu_user() -> None:
    found = _launched().service(API, {WORKER}, {API: "vllm"})
    assert found[:2] == ({LAUNCHER, API, WORKER}, LAUNCHER)


def test_service_with_a_gpu_user_of_its_own_has_no_launcher() -> None:
    assert _launched().service(API, {API, WORKER}) == ServiceProcesses(frozenset({API}))


def test_service_without_gpu_users_is_its_own_family() -> None:
    assert _launched().service(API) == ServiceProcesses(frozenset({API}))


@pytest.mark.parametrize(
    "launcher",
    [
        {"starts_others": True},
        {"principal": Principal(1001)},
        {"principal": None},
        {"container": "c"},
        {"groups": ("unit", "other.service")},
    ],
    ids=str,
)
def test_launcher_of_another_kind_or_owner_is_none(launcher: dict[str, Any]) -> None:
    assert _launched(**launcher).service(API, {WORKER}) == ServiceProcesses(frozenset({API}))


def test_shell_and_init_are_no_launchers() -> None:
    families = _launched()
    client = Consumer(30, 5)
    families.add(client, SHELL.pid, principal=ALICE)
    assert families.service(client, {WORKER}) == ServiceProcesses(frozenset({client}))
    daemon = Consumer(31, 6)
    families.add(Consumer(1, 0), 0, principal=ALICE)
    families.add(daemon, 1, principal=ALICE)
    assert families.service(daemon, {WORKER}) == ServiceProcesses(frozenset({daemon}))


def test_launcher_that_was_a_shell_before_its_exec_is_one() -> None:
    families = _launched(starts_others=True)
    families.add(LAUNCHER, SHELL.pid, principal=ALICE)
    assert families.service(API, {WORKER}).launcher == LAUNCHER


def test_reused_pid_of_a_parent_is_no_launcher() -> None:
    families = ProcessFamilies(LIFETIME)
    families.add(API, 20, principal=ALICE)
    families.add(Consumer(20, 9), 1, principal=ALICE)
    families.add(WORKER, 20, principal=ALICE)
    assert families.service(API, {WORKER}).launcher is None


@pytest.mark.parametrize(("service", "related"), [("vllm", True), ("tool", False)])
def test_only_senders_of_one_service_and_parent_are_related(service: str, *, related: bool) -> None:
    families = _launched()
    sibling = Consumer(23, 4)
    families.add(sibling, LAUNCHER.pid, principal=ALICE)
    found = families.service(API, {WORKER}, {API: "vllm", sibling: service})
    assert (found.launcher == LAUNCHER) == related


def test_related_sender_has_the_same_parent() -> None:
    families = _launched()
    nephew = Consumer(24, 5)
    families.add(nephew, WORKER.pid, principal=ALICE)
    assert families.service(API, {WORKER}, {API: "vllm", nephew: "vllm"}).launcher is None


def test_launchers_are_searched_to_a_bounded_height() -> None:
    families = ProcessFamilies(LIFETIME)
    for pid in range(100, 300):
        families.add(Consumer(pid, pid), pid - 1, principal=ALICE)
    families.add(WORKER, 101, principal=ALICE)
    assert families.service(Consumer(299, 299), {WORKER}).launcher is None


def test_process_of_an_unknown_principal_has_no_launcher() -> None:
    families = _launched()
    unknown = Consumer(25, 6)
    families.add(unknown, LAUNCHER.pid)
    assert families.service(unknown, {WORKER}) == ServiceProcesses(frozenset({unknown}))
    assert families.service(Consumer(99, 9), {WORKER}) == ServiceProcesses(
        frozenset({Consumer(99, 9)})
    )
