"""Reads of processes that fail without descriptors or memory: they prove nothing."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from testbed.descriptors import no_free_descriptor

from wattspan.model import Consumer, PayerInfo, ProcessRow
from wattspan.processes.metadata import HostProcesses, RunningProcesses
from wattspan.processes.procfs import ProcFs

STAT = "42 (%s) S 1 42 42 0 -1 %d 0 0 0 0 9 9 0 0 20 0 1 0 98765 0 0" + " 0" * 14
SHORTAGES = errno.EMFILE, errno.ENFILE, errno.ENOMEM
LIVING, EARLIER = Consumer(42, 98765), Consumer(42, 98764)
Break = Callable[..., None]


@pytest.fixture
def processes(tmp_path: Path) -> ProcFs:
    """A table with one process."""
    (tmp_path / "42/task/42").mkdir(parents=True)
    (tmp_path / "42/stat").write_text(STAT % ("quite-long-name", 0))
    (tmp_path / "42/cmdline").write_bytes(b"/bin/quite-long-name-indeed\0")
    (tmp_path / "42/cgroup").write_text("0::/\n")
    return ProcFs(tmp_path)


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Break:
    """Let a function of the kernel fail, with an ``ending`` only for files whose names end so."""

    def fail(name: str, number: int, ending: str = "") -> None:
        whole = getattr(os, name)

        def failing(path: Any, *rest: Any) -> Any:
            if ending and not str(path).endswith(ending):
                return whole(path, *rest)
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, name, failing)

    return fail


@pytest.mark.parametrize("call", ["open", "read"])
@pytest.mark.parametrize("number", [*SHORTAGES, errno.ENOENT, errno.ESRCH, errno.EACCES])
def test_read_without_descriptors_or_memory_ends_no_process(
    processes: ProcFs, fail: Break, call: str, number: int
) -> None:
    running = RunningProcesses(HostProcesses(processes), processes)
    parts = processes, running, HostProcesses(processes)
    assert [one.has_ended(LIVING) for one in parts] == [False] * 3
    assert [one.has_ended(EARLIER) for one in parts] == [True] * 3
    fail(call, number)
    assert processes.identify(42) is None
    assert [one.has_ended(LIVING) for one in parts] == [number not in SHORTAGES] * 3
    assert (processes.shortage is not None) == (number in SHORTAGES)


@pytest.mark.parametrize(
    ("call", "read"),
    [
        ("open", lambda processes: processes.stat(42)),
        ("listdir", ProcFs.pids),
        ("stat", lambda processes: processes.user_id(42)),
    ],
)
@pytest.mark.parametrize("number", SHORTAGES)
def test_each_shortage_is_another_object(
    processes: ProcFs, fail: Break, call: str, read: Callable[[ProcFs], object], number: int
) -> None:
    assert read(processes) is not None
    assert processes.shortage is None
    fail(call, number)
    assert not read(processes)
    first = processes.shortage
    assert first is not None
    assert first.errno == number
    assert not read(processes)
    assert processes.shortage is not first


def test_process_without_a_free_descriptor_ends_no_other() -> None:
    processes = ProcFs()
    own = processes.identify(os.getpid())
    assert own is not None
    with no_free_descriptor(os.getpid()):
        assert not processes.has_ended(own)
        assert processes.pids() == []
        assert processes.shortage is not None
    assert not processes.has_ended(own)
    assert processes.has_ended(own._replace(started=own.started + 1))


def test_zombie_has_ended_for_those_who_want_work(processes: ProcFs, tmp_path: Path) -> None:
    (tmp_path / "42/stat").write_text(STAT % ("dead", 4))
    assert RunningProcesses(HostProcesses(processes), processes).has_ended(LIVING)
    assert not processes.has_ended(LIVING)


def test_description_with_a_failed_read_is_not_kept(
    processes: ProcFs, fail: Break, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = HostProcesses(processes)
    fail("open", errno.EMFILE, "cmdline")
    cut = directory.describe(LIVING)
    monkeypatch.undo()
    whole = directory.describe(LIVING)
    assert cut is not None
    assert whole is not None
    assert (cut.command, whole.command) == ("quite-long-name", "quite-long-name-indeed")


def test_restored_process_that_cannot_be_read_is_alive(processes: ProcFs, fail: Break) -> None:
    rows = [ProcessRow(PayerInfo(one, "saved"), {}, {}) for one in (LIVING, EARLIER)]
    fail("open", errno.EMFILE)
    assert [one.alive for one in HostProcesses(processes).restore(rows)] == [True, True]


def test_last_pid_is_known_once_its_file_can_be_opened(tmp_path: Path) -> None:
    processes = ProcFs(tmp_path)
    assert processes.last_pid() is None
    (tmp_path / "loadavg").write_text("0.10 0.20 0.30 1/400 4711\n")
    assert processes.last_pid() == 4711
    (tmp_path / "loadavg").write_text("0.10 0.20 0.30 1/400 4712\n")
    assert processes.last_pid() == 4712
    processes.close()
