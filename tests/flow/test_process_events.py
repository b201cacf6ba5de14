"""The real kernel's events: of every process, and of no thread."""

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from testbed.waiting import eventually

from wattspan.processes.kernel_events import (
    EventChannel,
    ProcessEvents,
    open_process_connector,
    open_taskstats,
)

NONE, FORK, EXEC, EXIT = 0, 0x1, 0x2, 0x80000000
PR_SET_NAME = 15
THREADS = 20

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root for netlink"),
    pytest.mark.needs_root,
]


@contextlib.contextmanager
def opened(opener: Callable[[], EventChannel]) -> Iterator[EventChannel]:
    try:
        channel = opener()
    except OSError as error:
        pytest.skip(f"the kernel reports no processes here: {error}")
    with contextlib.closing(channel):
        yield channel


def possible_cpus() -> str:
    return Path("/sys/devices/system/cpu/possible").read_text().strip()


def child(*, program: bool = False) -> int:
    """The pid of an ended child that has had threads, names and sessions, or has run a program."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            if program:
                os.execv("/bin/true", ["true"])
            os.setsid()
            for at in range(THREADS):
                ctypes.CDLL(None).prctl(PR_SET_NAME, b"name%d" % at, 0, 0, 0)
                thread = threading.Thread(target=int)
                thread.start()
                thread.join()
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


class Queue:
    """Everything that the kernel queues at a channel, for all processes of the host."""

    def __init__(self, channel: EventChannel) -> None:
        self._channel = channel
        self.datagrams: list[bytes] = []
        self.read()
        self.datagrams.clear()

    def read(self) -> None:
        batch = self._channel._datagrams.read()
        self.datagrams.extend(map(batch.datagram, range(len(batch.lengths))))


def numbers(datagram: bytes) -> tuple[int, list[int]]:
    """The kind of an event, and its four numbers."""
    words = memoryview(datagram).cast("I")
    return words[9], list(words[13:17])


@pytest.mark.parametrize("exits", [True, False], ids=["exits", "no exits"])
def test_connector_queues_processes_and_no_threads_or_names(exits: bool) -> None:
    events: list[tuple[int, list[int]]] = []
    with opened(lambda: open_process_connector(exits=exits)) as channel:
        queue = Queue(channel)
        pids = [child(), child(program=True)]

        def complete() -> bool:  # the event of an exit may come after its parent's wait
            queue.read()
            # The kernel acknowledges the subscription of any program to all of them.
            events[:] = [one for one in map(numbers, queue.datagrams) if one[0] != NONE]
            exited = {found[0] for kind, found in events if kind == EXIT}
            return not exits or exited >= set(pids)

        eventually(complete, "the events of both exits")
    assert {kind for kind, _ in events} == {FORK, EXEC, EXIT} - ({EXIT} if not exits else set())
    for kind, (first, second, third, fourth) in events:
        assert (third == fourth) if kind == FORK else (first == second)
    of_first = [kind for kind, found in events if pids[0] in (found[0], found[2])]
    of_second = [kind for kind, found in events if pids[1] in (found[0], found[2])]
    assert of_first == ([FORK, EXIT] if exits else [FORK])
    assert of_second == ([FORK, EXEC, EXIT] if exits else [FORK, EXEC])


def test_taskstats_queue_one_record_for_a_process_with_threads() -> None:
    with opened(lambda: open_taskstats(possible_cpus())) as channel:
        queue = Queue(channel)
        pid = child()
        queue.read()  # the kernel queues the record before the parent's wait ends
        of_child = [datagram for datagram in queue.datagrams if _group_of(datagram) == pid]
    assert len(of_child) == 1


def _group_of(datagram: bytes) -> int:
    """The thread group of an exit record of Linux 6.18."""
    return int.from_bytes(datagram[36 + 368 : 36 + 372], "little")


def test_drained_events_have_every_process() -> None:
    events, pids = ProcessEvents(), []
    with (
        opened(open_process_connector) as births,
        opened(lambda: open_taskstats(possible_cpus())) as exits,
    ):
        for _ in range(150):  # more than the slots of one read of either channel
            pids += [child(program=True), child(program=True)]

        def complete() -> bool:  # the record of an exit may come after its parent's wait
            births.drain(events)
            exits.drain(events)
            return events.exits.keys() >= set(pids)

        eventually(complete, "a record of every exit")
    assert not events.lost
    assert {pid: events.born.get(pid) for pid in pids} == dict.fromkeys(pids, os.getpid())
    assert events.execed >= set(pids)
    assert events.exited >= set(pids)
    assert {events.exits[pid][0].command for pid in pids} == {"true"}
