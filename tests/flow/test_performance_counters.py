"""The real scheduler's sums of perf events, through the helper's protocol.

The kernel's own events take the place of the hardware's, which virtual machines lack: cpu-clock
(nanoseconds) for the cycles, and page faults, whose number each process knows, for the misses.
"""

import mmap
import os
import resource
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
from testbed.waiting import eventually

from wattspan.clock import SystemClock
from wattspan.model import SECOND, Consumer, Counts
from wattspan.processes import open_processes
from wattspan.processes.cpu_socket_times import SocketTimes
from wattspan.processes.ebpf import PerfEvent
from wattspan.processes.performance_counters import (
    HARDWARE_EVENTS,
    OFFERED_EVENTS,
    CountersClient,
    CounterSums,
    open_program,
    serve_sums,
)
from wattspan.util.cpu_topology import CpuTopology

MS = 1_000_000
CPU_CLOCK, FAULTS, SWITCHES = (1, 0), (1, 2), (1, 3)
SOFTWARE_EVENTS: tuple[PerfEvent, ...] = (CPU_CLOCK, CPU_CLOCK, SWITCHES, FAULTS)
PAGES = 512

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root for eBPF"),
    pytest.mark.needs_root,
]


@pytest.fixture(scope="module", autouse=True)
def usable() -> None:
    try:
        open_program([SOFTWARE_EVENTS]).close()
    except OSError as error:
        pytest.skip(f"eBPF cannot be used here: {error}")


@pytest.fixture
def client(tmp_path: Path) -> Iterator[CountersClient]:
    """A client that waits for a helper, as systemd starts it for each connection."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "counters.sock"))
    listener.listen()
    helpers = []

    def serve(connection: socket.socket) -> None:
        with connection:
            serve_sums(connection, {0}, partial(open_program, [SOFTWARE_EVENTS]))

    def accept() -> None:
        with suppress(OSError):
            while True:
                helpers.append(threading.Thread(target=serve, args=(listener.accept()[0],)))
                helpers[-1].start()

    accepting = threading.Thread(target=accept)
    accepting.start()
    client = CountersClient(SystemClock(), tmp_path / "counters.sock", patience=30 * SECOND)
    yield client
    client.close()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    for thread in (accepting, *helpers):
        thread.join()


def asked(client: CountersClient) -> dict[int, Counts]:
    """The sums of each process over all sockets, since the last call."""
    client.request()
    sums = client.sample()
    assert sums is not None, client.failures
    return by_pid(sums)


def by_pid(sums: CounterSums) -> dict[int, Counts]:
    found: dict[int, Counts] = {}
    for at, pair in enumerate(sums.pairs):
        words, pid = sums.words[5 * at : 5 * at + 5], pair >> 32
        found[pid] = Counts(*map(sum, zip(words, found.get(pid, (0,) * 5), strict=True)))
    return found


def burn(nanoseconds: int) -> tuple[int, int]:
    """Use CPU time; returns it and the page faults meanwhile."""
    faults, began = minor_faults(), time.process_time_ns()
    while time.process_time_ns() < began + nanoseconds:
        pass
    return time.process_time_ns() - began, minor_faults() - faults


def touch() -> tuple[int, int]:
    """Touch new pages; returns the CPU time and the page faults."""
    faults, began = minor_faults(), time.process_time_ns()
    with mmap.mmap(-1, PAGES * mmap.PAGESIZE) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        for page in range(PAGES):
            memory[page * mmap.PAGESIZE] = 1
    return time.process_time_ns() - began, minor_faults() - faults


def minor_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class Worker:
    """A child that works whenever it is told to, and tells its CPU time and page faults."""

    def __init__(self, work: Callable[[], tuple[int, int]]) -> None:
        (self._told, told), (tell, self._tell) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            with suppress(BaseException):
                while os.read(tell, 1):
                    os.write(told, struct.pack("=QQ", *work()))
            os._exit(0)
        os.close(told)
        os.close(tell)

    def work(self) -> tuple[int, int]:
        """Let it work once, and wait until it sleeps: a switch counts its last work."""
        os.write(self._tell, b"x")
        done = struct.unpack("=QQ", os.read(self._told, 16))
        state = Path(f"/proc/{self.pid}/stat")
        eventually(lambda: state.read_text().rpartition(")")[2].split()[0] == "S", "it sleeps")
        return done

    def end(self) -> None:
        os.close(self._tell)
        os.close(self._told)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


@contextmanager
def worker(work: Callable[[], tuple[int, int]]) -> Iterator[Worker]:
    """A child that has worked once, and has the pages for it."""
    child = Worker(work)
    try:
        child.work()
        yield child
    finally:
        child.end()


def test_time_and_events_of_a_busy_process_are_counted(client: CountersClient) -> None:
    with worker(partial(burn, 200 * MS)) as child:
        asked(client)
        began = time.monotonic_ns()
        used, _ = child.work()
        counts = asked(client)[child.pid]
        passed = time.monotonic_ns() - began
    # A few interrupts, and the time that a hypervisor took, are counted as well.
    assert 0.95 * used <= counts.time <= passed
    assert 0.95 <= counts.cycles / counts.time <= 1.05
    assert 0.95 <= counts.reference / counts.time <= 1.05


def test_events_are_counted_with_the_process_that_causes_them(client: CountersClient) -> None:
    with worker(touch) as touching, worker(partial(burn, 50 * MS)) as burning:
        asked(client)
        (_, faults), (_, others) = touching.work(), burning.work()
        counts = asked(client)
    assert faults >= PAGES
    assert faults <= counts[touching.pid].misses <= faults + 64  # the pipe's work is not timed
    assert counts[burning.pid].misses <= others + 64


def test_sums_of_several_reads_are_those_of_all_work(client: CountersClient) -> None:
    with worker(touch) as child:
        asked(client)
        faults = counted = 0
        for _ in range(20):
            faults += child.work()[1]
            counted += asked(client)[child.pid].misses
    assert 0.99 * faults <= counted <= 1.02 * faults


def test_ended_process_is_counted_once(client: CountersClient) -> None:
    asked(client)
    with worker(touch) as child:
        _, faults = child.work()
    assert asked(client)[child.pid].misses >= faults
    assert asked(client).get(child.pid, Counts(0, 0, 0, 0, 0)).misses == 0


def test_usages_of_the_agent_have_the_counts(client: CountersClient) -> None:
    host = open_processes(SystemClock(), counters=client)
    with closing(host.usage), worker(partial(burn, 100 * MS)) as child:
        for _ in range(2):
            host.usage.poll()
        child.work()
        usages = host.usage.poll().usages
    whole, *sockets = usages
    payer = next(one for one in whole.spent if isinstance(one, Consumer) and one.pid == child.pid)
    assert whole.counts is not None
    assert whole.counts[payer].time >= 0.95 * 100 * MS
    assert whole.counts[payer].time <= 1.5 * whole.spent[payer]
    parts = [one.counts[payer] for one in sockets if one.counts and payer in one.counts]
    assert tuple(map(sum, zip(*parts, strict=True))) == whole.counts[payer]


def test_closed_client_ends_its_helper_and_the_next_connection_has_a_new_one(
    client: CountersClient,
) -> None:
    asked(client)
    client.close()
    with worker(touch) as child:
        child.work()
        counts = asked(client)
    assert counts.get(child.pid, Counts(0, 0, 0, 0, 0)).misses < PAGES


def test_hardware_events_are_counted_or_their_absence_is_told() -> None:
    try:
        program = open_program(OFFERED_EVENTS)
    except OSError as error:
        assert "the CPUs or the kernel do not offer them" in str(error)  # noqa: PT017
        with pytest.raises(OSError, match=r"No such|not supported|Invalid"):
            SocketTimes(CpuTopology(), CpuTopology().possible, events=HARDWARE_EVENTS)
        return
    with closing(program), worker(partial(burn, 100 * MS)) as child:
        program.sums()
        child.work()
        counts = by_pid(CounterSums.decoded(program.sums()))[child.pid]
    assert counts.cycles > counts.time / 10
    assert counts.instructions > counts.time / 10
    assert counts.reference > 0
    assert counts.misses < counts.instructions


def test_closing_a_program_with_events_leaves_no_descriptor() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        open_program([SOFTWARE_EVENTS]).close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
