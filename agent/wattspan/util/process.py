"""This process: its heap, the command lines of its children, and threads that run again.

glibc creates a heap for each thread, up to eight per CPU, so that threads do not wait for each
other. Python's threads run one at a time, and many mostly empty heaps waste memory: two soaks of
four minutes used 94 and 96 MB with separate heaps and 77 MB with one, under different load.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import site
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic_ns  # noqa: TID251 - waits for events are in real time


def module_command(module: str, *arguments: str) -> tuple[str, ...]:
    """The command that runs a module of ours with this interpreter; start it with ``cwd="/"``.

    The child imports modules from the installation only, never from the working directory, the
    directories in PYTHONPATH or any other ``PYTHON*`` variable: the child may be privileged, and
    another user may own the directory. The user's own site directory counts only where the
    running package was installed in it (``pip install --user``).
    """
    return (sys.executable, *_flags(), "-m", module, *arguments)


def _flags() -> tuple[str, ...]:
    in_user_site = site.ENABLE_USER_SITE and Path(__file__).is_relative_to(
        site.getusersitepackages()
    )
    return ("-E", "-P") if in_user_site else ("-I",)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # <malloc.h>

_LARGE = 1 << 20
"""Size from which on a block has a mapping of its own, which is unmapped when freed.

glibc raises this bound to the largest block that was freed, up to 32 MiB. Bodies of
requests would then lie in the heap, between small blocks that keep it from shrinking. A usual
batch of spans is smaller, so its blocks are reused without a call of the kernel.
"""

_TRIM = 4 << 20
"""Free bytes at the top of the heap that are not returned to the kernel."""


def configure_memory() -> None:
    """One heap for all threads, with glibc, and few collections of garbage.

    Call this before the first thread starts, and before most modules are imported: their thousands
    of objects stay, and a twelfth of the time of the start was spent on their collection.
    """
    # Spans are tens of thousands of small objects without cycles that live for a second.
    gc.set_threshold(50_000, 20, 100)
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_ARENA_MAX, 1)
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE)
        library.mallopt(_M_TRIM_THRESHOLD, _TRIM)


def release_memory() -> None:
    """Return free memory to the kernel, that of the C library and of Python's free lists.

    Python keeps up to two thousand freed tuples of each length, which hold pages of others, until a
    full collection of garbage. That takes some milliseconds, so call this every few minutes.
    """
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


# ------------------------------------------------------------ threads that run again after an error

FIRST_RESTART, LONGEST_RESTART = 1.0, 60.0  # seconds until a failed thread runs again


class _Report(threading.local):
    continues = False


_report = _Report()


def run_again(
    run: Callable[[threading.Event], object],
    stop: threading.Event,
    *,
    wait: Callable[[float], bool] | None = None,
    monotonic: Callable[[], int] = monotonic_ns,
) -> None:
    """Run until ``run`` returns; after an error report it, and run again after a delay.

    The delay doubles, and is the first again after a run that was longer than the longest delay.
    ``wait``, by default that of ``stop``, waits for seconds, and returns True to end.
    """
    wait = stop.wait if wait is None else wait
    delay = FIRST_RESTART
    while True:
        begin = monotonic()
        try:
            run(stop)
        except Exception as error:  # noqa: BLE001 - a failed part must not end the others
            report_failure(error)
        else:
            return
        if monotonic() - begin > LONGEST_RESTART * 1e9:
            delay = FIRST_RESTART
        if wait(delay):
            return
        delay = min(2 * delay, LONGEST_RESTART)


def report_failure(error: BaseException) -> None:
    """Report an error of the current thread, which continues, to the hook for failed threads."""
    arguments = (type(error), error, error.__traceback__, threading.current_thread())
    _report.continues = True
    try:
        threading.excepthook(threading.ExceptHookArgs(arguments))
    finally:
        _report.continues = False


def thread_continues() -> bool:
    """For the hook for failed threads: True if the thread continues, False if it ends."""
    return _report.continues
