"""Memory freed by one thread is available to the others; threads run again after an error."""

from __future__ import annotations

import platform
import subprocess
import sys
import threading

import pytest

from wattspan.testing import ManualClock
from wattspan.util.process import (
    FIRST_RESTART,
    LONGEST_RESTART,
    report_failure,
    run_again,
    thread_continues,
)

GNU = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only GNU's C library has arenas"
)

PROGRAM = """
import ctypes, threading
from wattspan.util import process
if {share}:
    process.configure_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
barrier = threading.Barrier(9)
def ask():
    libc.malloc(1000)
    barrier.wait()
threads = [threading.Thread(target=ask) for _ in range(8)]
for thread in threads: thread.start()
barrier.wait()
libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
libc.fflush(None)
"""


def heaps(*, share: bool) -> int:
    program = PROGRAM.format(share=share)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    return done.stdout.count(b"<heap ")


RELEASE = """
from pathlib import Path
from wattspan.util import process
process.configure_memory()
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
held = [bytearray(2000) for _ in range(20_000)]
last = held.pop()  # at the end of the heap, which therefore keeps its size
held.clear()
before = resident()
process.release_memory()
print(before - resident())
"""


@GNU
def test_free_memory_inside_the_heap_is_returned() -> None:
    done = subprocess.run([sys.executable, "-c", RELEASE], capture_output=True, check=True)
    assert int(done.stdout) > 20_000_000


@GNU
def test_threads_share_one_heap() -> None:
    assert heaps(share=True) == 1
    assert heaps(share=False) > 1


# ------------------------------------------------------------ threads that run again


def delays_of(runs: list[int]) -> list[float]:
    """The delays after failing runs of these seconds."""
    clock, delays, left = ManualClock(), list[float](), list(runs)

    def run(_: threading.Event) -> None:
        if left:
            clock.advance(left.pop(0))
            raise ValueError

    def wait(seconds: float) -> bool:
        delays.append(seconds)
        clock.advance(seconds)
        return False

    before, threading.excepthook = threading.excepthook, lambda _: None
    try:
        run_again(run, threading.Event(), wait=wait, monotonic=clock.monotonic)
    finally:
        threading.excepthook = before
    return delays


def test_delay_doubles_up_to_the_longest() -> None:
    delays = delays_of([0] * 8)
    assert delays == [min(FIRST_RESTART * 2**n, LONGEST_RESTART) for n in range(8)]


def test_delay_is_the_first_again_after_a_long_run() -> None:
    assert delays_of([0, 0, 61, 0]) == [1, 2, 1, 2]


def test_stop_during_a_delay_ends_the_runs() -> None:
    runs, told = list[int](), list[bool]()

    def run(_: threading.Event) -> None:
        runs.append(1)
        raise ValueError

    before, threading.excepthook = (
        threading.excepthook,
        lambda _: told.append(thread_continues()),
    )
    try:
        run_again(run, threading.Event(), wait=lambda _: True)
        report_failure(ValueError())
    finally:
        threading.excepthook = before
    assert (runs, told) == ([1], [True, True])
    assert not thread_continues()
