"""The real scheduler's count of the work of each process on each socket.

Each CPU of this machine is a socket of the emulated topology.
"""

import contextlib
import ctypes
import os
import pickle
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
from testbed.waiting import eventually

from wattspan.clock import SystemClock
from wattspan.processes import HostUsage, open_processes
from wattspan.processes.cpu_socket_times import SocketTimes
from wattspan.util.cpu_topology import (
    CpuTopology,
)

MS = 1_000_000
CPUS_OF_A_SOCKET = ((os.cpu_count() or 1) + 1) // 2
CAPABILITY_VERSION_3 = 0x20080522  # <linux/capability.h>
CAPABILITY = "socket times (eBPF)"

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root for eBPF"),
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two CPUs"),
    pytest.mark.needs_root,
]


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    cpus = tmp_path / "devices/system/cpu"
    for cpu in range(os.cpu_count() or 1):
        (cpus / f"cpu{cpu}/topology").mkdir(parents=True)
        (cpus / f"cpu{cpu}/topology/physical_package_id").write_text(f"{cpu % 2}\n")
    return tmp_path


@pytest.fixture
def times(sysfs: Path) -> Iterator[SocketTimes]:
    try:
        times = SocketTimes(CpuTopology(sysfs), CpuTopology().possible)
    except OSError as error:
        pytest.skip(f"eBPF cannot be used here: {error}")
    yield times
    times.close()


@dataclass(frozen=True)
class Burnt:
    """Nanoseconds of work on one CPU, on the thread's clock and on the wall's.

    The thread's clock stops for other threads and for time that a hypervisor took from the CPU. The
    kernel's count includes the latter, so it lies between the two.
    """

    used: int
    passed: int


class Child(NamedTuple):
    pid: int
    work: dict[int, Burnt]


@contextlib.contextmanager
def running(work: Callable[[], dict[int, Burnt]]) -> Iterator[Child]:
    """A child that has done its ``work``, by CPU, and waits."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.write(writer, pickle.dumps(work()))
            signal.pause()
        os._exit(0)
    os.close(writer)
    try:
        yield Child(pid, pickle.loads(os.read(reader, 4096)))
    finally:
        os.close(reader)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def burn(cpu: int, nanoseconds: int) -> Burnt:
    """Use the CPU time of this thread on one CPU, and be free to use all again."""
    os.sched_setaffinity(0, {cpu})
    began, end = time.monotonic_ns(), time.thread_time_ns() + nanoseconds
    while time.thread_time_ns() < end:
        pass
    passed = time.monotonic_ns() - began
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    return Burnt(nanoseconds, passed)


def burn_both() -> dict[int, Burnt]:
    return {0: burn(0, 60 * MS), 1: burn(1, 140 * MS)}


def burn_in_threads() -> dict[int, Burnt]:
    work = {}
    thread = threading.Thread(target=lambda: work.setdefault(1, burn(1, 100 * MS)))
    thread.start()
    work[0] = burn(0, 50 * MS)
    thread.join()
    return work


def test_work_of_a_moving_process_is_counted_on_both_sockets(times: SocketTimes) -> None:
    began = time.monotonic_ns()
    times.sample()
    with running(burn_both) as child:
        counted = times.sample().by_process()[child.pid]
    passed = time.monotonic_ns() - began
    for socket in (0, 1):
        elsewhere = child.work[1 - socket].passed
        assert 0.95 * child.work[socket].used <= counted[socket] <= 1.01 * (passed - elsewhere)


def test_threads_are_counted_with_their_process(times: SocketTimes) -> None:
    times.sample()
    with running(burn_in_threads) as child:
        counted = times.sample().by_process()[child.pid]
    for socket, burnt in child.work.items():
        assert counted[socket] >= 0.95 * burnt.used


def test_counts_of_processes_on_one_cpu_fit_into_the_time(times: SocketTimes) -> None:
    began = time.monotonic_ns()
    times.sample()
    rival = threading.Thread(target=burn, args=(0, 60 * MS))
    rival.start()
    with running(burn_both) as child:
        rival.join()
        counted = times.sample().by_process()
    passed = time.monotonic_ns() - began
    assert min(counted[pid][0] for pid in (os.getpid(), child.pid)) >= 0.95 * 60 * MS
    for socket in (0, 1):
        total = sum(one.get(socket, 0) for one in counted.values())
        assert total <= 1.01 * passed * CPUS_OF_A_SOCKET


def test_process_that_never_waits_is_counted_while_it_runs(times: SocketTimes) -> None:
    times.sample()
    burn(1, 100 * MS)
    end = time.thread_time_ns() + 100 * MS
    os.sched_setaffinity(0, {1})
    try:
        while time.thread_time_ns() < end:
            pass
        counted = times.sample().by_process()[os.getpid()]
    finally:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    assert sum(counted.values()) >= 180 * MS


def test_ended_process_is_counted_once(times: SocketTimes) -> None:
    times.sample()
    pid = os.fork()
    if pid == 0:
        burn(1, 20 * MS)
        os._exit(0)
    os.waitpid(pid, 0)
    assert times.sample().by_process()[pid][1] >= 18 * MS
    eventually(lambda: pid not in times.sample().by_process(), "nothing is counted after the end")


def test_changed_topology_is_used_after_a_refresh(times: SocketTimes, sysfs: Path) -> None:
    cpus = sysfs / "devices/system/cpu"
    (cpus / "cpu1/topology/physical_package_id").write_text("0\n")
    (cpus / "online").write_text("0-1\n")
    times._topology.refresh()
    times.refresh()
    times.sample()
    with running(burn_both) as child:
        assert times.sample().by_process()[child.pid].keys() == {0}


def spent_by(host: HostUsage, pid: int) -> dict[str, int]:
    """The charges of a process in one poll, by resource."""
    return {
        usage.resource: sum(
            n for payer, n in usage.spent.items() if getattr(payer, "pid", 0) == pid
        )
        for usage in host.usage.poll().usages
    }


def test_usage_of_a_moving_process_is_divided_by_the_count(sysfs: Path) -> None:
    began = time.monotonic_ns()
    host = open_processes(SystemClock(), sysfs=sysfs)
    with contextlib.closing(host.usage):
        if not all(one.active for one in host.capabilities if one.name == CAPABILITY):
            pytest.skip("eBPF cannot be used here")
        host.usage.poll()
        with running(burn_both) as child:
            spent = spent_by(host, child.pid)
        passed = time.monotonic_ns() - began
    assert spent["cpu:0"] + spent["cpu:1"] == spent["cpu"] >= 199 * MS
    first, second = child.work[0], child.work[1]
    least = second.used / (passed - second.passed + second.used)
    most = (passed - first.passed) / (passed - first.passed + first.used)
    assert 0.95 * least <= spent["cpu:1"] / spent["cpu"] <= 1.01 * most


def test_host_with_one_socket_has_no_count() -> None:
    host = open_processes(SystemClock())
    host.usage.close()
    sockets = len(CpuTopology().sockets)
    assert (CAPABILITY in {one.name for one in host.capabilities}) is (sockets > 1)


def test_unpermitted_count_is_a_missing_capability_with_a_remedy(sysfs: Path) -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            header, none = struct.pack("=Ii", CAPABILITY_VERSION_3, 0), bytes(24)
            assert ctypes.CDLL(None).capset(header, none) == 0
            host = open_processes(SystemClock(), sysfs=sysfs)
            missing = next(one for one in host.capabilities if one.name == CAPABILITY)
            os.write(writer, f"{missing.active} {missing.remedy}".encode())
        os._exit(0)
    os.close(writer)
    said = os.read(reader, 4096).decode()
    os.close(reader)
    os.waitpid(pid, 0)
    assert said.startswith("False Grant CAP_BPF and CAP_PERFMON")


def test_closing_leaves_no_descriptor(sysfs: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        try:
            SocketTimes(CpuTopology(sysfs), CpuTopology().possible).close()
        except OSError as error:
            pytest.skip(f"eBPF cannot be used here: {error}")
    assert len(list(Path("/proc/self/fd").iterdir())) == before
