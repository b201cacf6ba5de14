"""Waiting for something another thread or process does, without guessing how long it takes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from wattspan.clock import SystemClock

T = TypeVar("T")


def eventually(attempt: Callable[[], T | None], what: str, within: float = 60.0) -> T:
    """The first truthy result of ``attempt``; AssertionError naming ``what`` after ``within`` s.

    ``within`` bounds failures only: a test passes as soon as the condition holds, however slow the
    machine is.
    """
    clock, pause = SystemClock(), threading.Event()
    began = clock.monotonic()
    while not (result := attempt()):
        waited = (clock.monotonic() - began) / 1e9
        if waited > within:
            raise AssertionError(f"{what}: not within {within:g} s")
        # Attempts take CPU time from what they wait for, so they become less frequent.
        pause.wait(min(0.05, max(0.01, waited / 10)))
    return result


def receive_instead_of_main(number: signal.Signals) -> None:
    """Receive a signal in this thread, once the main thread waits in a system call.

    The main thread's call continues, as after a signal that arrives just before it.
    """
    stat = Path(f"/proc/self/task/{threading.main_thread().native_id}/stat")
    eventually(lambda: stat.read_text().rpartition(") ")[2][0] == "S", "the main thread waits")
    signal.pthread_kill(threading.get_ident(), number)
