"""Memory freed by one thread is available to the others, and to other processes."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

GNU = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only GNU's C library has arenas"
)

PROGRAM = """
import ctypes, threading
from wattspan.util import process
if {share}:
    process.share_heap()
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
process.share_heap()
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
