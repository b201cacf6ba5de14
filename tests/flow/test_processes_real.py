"""Charges of real processes on the real kernel equal the kernel's CPU times."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE

import pytest
from testbed.waiting import eventually

from wattspan.clock import SystemClock
from wattspan.model import Consumer, PayerInfo, Remainder
from wattspan.ports import UsageBatch
from wattspan.processes import HostUsage, open_processes
from wattspan.processes.procfs import TICK

CPUACCT = Path("/sys/fs/cgroup/cpuacct")
MS = 1_000_000

rooted = pytest.mark.skipif(os.geteuid() != 0, reason="needs root for netlink and cgroups")


class Watch:
    """Polls a source and sums its usage."""

    def __init__(self, host: HostUsage) -> None:
        self.host = host
        self.spent: Counter[object] = Counter()
        self.unclaimed = 0
        self.infos: dict[object, PayerInfo] = {}
        self.exited: list[object] = []
        self.poll()

    def poll(self) -> UsageBatch:
        batch = self.host.usage.poll()
        self.infos.update((info.payer, info) for info in batch.infos)
        self.exited.extend(batch.exited)
        for usage in batch.usages:
            if usage.resource == "cpu":
                self.spent.update(usage.spent)
                self.unclaimed += usage.unclaimed
                assert min(usage.spent.values(), default=1) > 0
        return batch

    def of_pid(self, pid: int) -> int:
        return sum(n for p, n in self.spent.items() if isinstance(p, Consumer) and p.pid == pid)

    def of_children(self, parent: int) -> int:
        return sum(n for p, n in self.spent.items() if self.infos[p].parent == parent)


@pytest.fixture(params=["auto", False], ids=["events", "no events"])
def any_watch(request: pytest.FixtureRequest) -> Iterator[Watch]:
    with watching(request.param) as watch:
        yield watch


@contextlib.contextmanager
def watching(events: object) -> Iterator[Watch]:
    host = open_processes(SystemClock(), events=events)  # type: ignore[arg-type]
    with contextlib.closing(host.usage):
        yield Watch(host)


def burn(nanoseconds: int) -> None:
    end = time.process_time_ns() + nanoseconds
    while time.process_time_ns() < end:
        pass


def fork(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            work()
        os._exit(0)
    return pid


def test_process_is_charged_its_own_time_to_a_hundredth(any_watch: Watch) -> None:
    pid = fork(lambda: burn(200 * MS))
    for _ in range(3):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        any_watch.poll()
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # an exited zombie
    any_watch.poll()
    used = os.wait4(pid, 0)[2]
    any_watch.poll()
    truth = (used.ru_utime + used.ru_stime) * 1e9
    assert any_watch.of_pid(pid) == pytest.approx(truth, rel=0.01)
    assert pid in {payer.pid for payer in any_watch.exited if isinstance(payer, Consumer)}


def test_process_charge_includes_all_threads(any_watch: Watch) -> None:
    def work() -> None:
        from threading import Thread

        threads = [Thread(target=burn, args=(60 * MS,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    pid = fork(work)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    any_watch.poll()
    used = os.wait4(pid, 0)[2]
    assert any_watch.of_pid(pid) == pytest.approx((used.ru_utime + used.ru_stime) * 1e9, rel=0.01)


_FORKER = """
import os, resource, sys, time
for line in sys.stdin:
    for _ in range(int(line)):
        pid = os.fork()
        if pid == 0:
            end = time.process_time_ns() + 1_000_000
            while time.process_time_ns() < end:
                pass
            os._exit(0)
        os.waitpid(pid, 0)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(round((used.ru_utime + used.ru_stime) * 1e9), flush=True)
"""


def brief_lives(watch: Watch, rounds: int = 10, each: int = 25) -> tuple[int, int]:
    """Children that are born, work for a millisecond and are gone between two polls.

    Returns the pid of their parent and their CPU time. The parent is small: the exit of a child
    with the memory of this process would cost more than its work, and the kernel does not report
    the costs of exits by process.
    """
    command = [sys.executable, "-S", "-E", "-c", _FORKER]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        used = 0
        for _ in range(rounds):
            parent.stdin.write(f"{each}\n")
            parent.stdin.flush()
            used = int(parent.stdout.readline())
            watch.poll()
        watch.poll()
        parent.stdin.close()
    return parent.pid, used


@rooted
@pytest.mark.needs_root
def test_hundreds_of_children_shorter_than_a_poll_are_all_charged_by_name() -> None:
    with watching(True) as watch:
        parent, truth = brief_lives(watch)
        named = [p for p in watch.spent if watch.infos[p].parent == parent]
        assert 10 <= len(named) < 250  # siblings that end in one poll share an account
        # The costs of exits are charged as well. The truth lacks them; a busy machine raises them.
        assert 0.9 * truth <= watch.of_children(parent) <= 1.5 * truth


@rooted
@pytest.mark.needs_root
def test_brief_programs_run_by_a_shell_are_charged_by_name() -> None:
    with watching(True) as watch:
        shell = fork(
            lambda: os.execv("/bin/sh", ["sh", "-c", "for i in 1 2 3 4 5; do /bin/true; done"])
        )
        os.waitpid(shell, 0)
        watch.poll()
        commands = [i.command for i in watch.infos.values() if i.parent == shell]
        assert commands == ["true"]  # of all five


@pytest.fixture
def own_cgroup() -> Iterator[Path]:
    path = CPUACCT / f"wattspan-test-{os.getpid()}"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    yield path
    (CPUACCT / "cgroup.procs").write_text(str(os.getpid()))

    def removed() -> bool:  # the kernel removes the cgroup's last process shortly after its exit
        with contextlib.suppress(OSError):
            path.rmdir()
        return not path.exists()

    eventually(removed, f"{path} is empty")


@pytest.mark.exhaustive
@rooted
@pytest.mark.needs_root
def test_short_work_without_events_is_charged_to_its_cgroup(own_cgroup: Path) -> None:
    with watching(False) as watch:
        (own_cgroup / "cgroup.procs").write_text(str(os.getpid()))
        burn(5 * MS)
        watch.poll()  # we are seen at work,
        watch.host.usage._audited.clear()
        row = watch.host.usage._table.get(os.getpid())
        row.cgroup_text = Path("/proc/self/cgroup").read_text()
        burn(MS)
        watch.poll()  # and our cgroup is known from here on
        _, truth = brief_lives(watch)
        remainder = watch.spent[Remainder(f"/{own_cgroup.name}")]
        assert remainder == pytest.approx(truth, rel=0.1)
        info = watch.infos[Remainder(f"/{own_cgroup.name}")]
        assert info.group == f"/{own_cgroup.name}"


@pytest.mark.skipif(not (CPUACCT / "cpuacct.usage").exists(), reason="needs cgroup v1's cpuacct")
def test_charges_and_remainder_sum_to_the_host_cpu_time(any_watch: Watch) -> None:
    def usage() -> int:
        return int((CPUACCT / "cpuacct.usage").read_text())

    def polled() -> tuple[int, int, int]:
        """Usage reported so far, between the readings before and after it."""
        before = usage()
        any_watch.poll()
        return before, any_watch.spent.total() + any_watch.unclaimed, usage()

    earliest, had, latest = polled()
    brief_lives(any_watch, rounds=5)
    burn(200 * MS)
    before, has, after = polled()
    # other processes run during the reading: its value is between the surrounding readings
    least, most = before - latest, after - earliest
    assert 0.95 * least <= has - had <= 1.05 * most


def test_racing_exits_never_raise(any_watch: Watch) -> None:
    for _ in range(20):
        pids = [fork(lambda: burn(MS // 4)) for _ in range(10)]
        for pid in pids[::2]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        any_watch.poll()
        for pid in pids:
            os.waitpid(pid, 0)
        any_watch.poll()


CLONE_NEWPID, CLONE_NEWNS = 0x20000000, 0x00020000


@rooted
@pytest.mark.needs_root
def test_really_reused_pid_does_not_inherit() -> None:
    """In a new pid namespace the next pid can be chosen: here one before the last."""
    reader, writer = os.pipe()

    def init_of_namespace() -> None:
        libc = ctypes.CDLL(None)
        libc.mount(b"none", b"/", None, (1 << 18) | 16384, None)  # private, recursive
        if libc.mount(b"proc", b"/proc", b"proc", 0, None) != 0:
            os.write(writer, b"skip")
            return
        with watching(False) as watch:
            first, other = fork(signal.pause), fork(signal.pause)
            burn(2 * MS)
            watch.poll()
            one = watch.host.directory.identify(first)
            os.kill(first, signal.SIGKILL)
            os.waitpid(first, 0)
            told_apart = time.clock_gettime_ns(time.CLOCK_BOOTTIME) + 2 * TICK
            eventually(
                lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME) > told_apart,
                "a start time that can be told from the first's",
            )
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(first - 1))
            second = fork(lambda: burn(30 * MS))
            os.waitid(os.P_PID, second, os.WEXITED | os.WNOWAIT)
            watch.poll()
            two = watch.host.directory.identify(second)
            good = second == first and two is not None and one != two
            good = good and watch.spent[one] < 20 * MS and watch.spent[two] >= 29 * MS
            good = good and one in watch.exited
            os.kill(other, signal.SIGKILL)
            os.write(writer, b"good" if good else repr((one, two, watch.spent)).encode())

    def in_new_namespace() -> None:
        if ctypes.CDLL(None).unshare(CLONE_NEWPID | CLONE_NEWNS) != 0:
            os.write(writer, b"skip")
            return
        os.waitpid(fork(init_of_namespace), 0)

    os.waitpid(fork(in_new_namespace), 0)
    os.close(writer)
    said = os.read(reader, 65536)
    os.close(reader)
    if said == b"skip":
        pytest.skip("no namespaces can be made here")
    assert said == b"good"


def test_capabilities_name_remedies() -> None:
    with watching(False) as watch:
        capabilities = {one.name: one for one in watch.host.capabilities}
        assert not capabilities["process events"].active
        assert "CAP_NET_ADMIN" in capabilities["exit accounting (taskstats)"].remedy
        assert capabilities["busy time"].active


def test_emulated_topology_divides_the_same_work_over_its_sockets(tmp_path: Path) -> None:
    cpus = tmp_path / "devices/system/cpu"
    for cpu in range(os.cpu_count() or 1):
        (cpus / f"cpu{cpu}/topology").mkdir(parents=True)
        (cpus / f"cpu{cpu}/topology/physical_package_id").write_text(f"{cpu % 2}\n")
    if (os.cpu_count() or 1) < 2:
        pytest.skip("needs two CPUs")
    host = open_processes(SystemClock(), sysfs=tmp_path)
    host.usage.poll()

    def pinned() -> None:
        os.sched_setaffinity(0, {1})
        burn(100 * MS)
        signal.pause()

    pid = fork(pinned)
    spent: dict[str, int] = {}

    def worked() -> bool:
        for usage in host.usage.poll().usages:
            mine = sum(n for p, n in usage.spent.items() if getattr(p, "pid", 0) == pid)
            spent[usage.resource] = spent.get(usage.resource, 0) + mine
        return spent.get("cpu", 0) >= 99 * MS

    eventually(worked, "100 ms of work on CPU 1")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    host.usage.close()
    assert spent["cpu:0"] + spent["cpu:1"] == spent["cpu"]
    assert spent["cpu:1"] >= 0.9 * spent["cpu"]
