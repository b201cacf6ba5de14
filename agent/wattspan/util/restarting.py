"""Threads that run again after an unexpected error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic_ns  # noqa: TID251 - waits for events are in real time

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
