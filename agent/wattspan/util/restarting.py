"""Threads that run again after an unexpected error."""

from __future__ import annotations

import threading
from collections.abc import Callable

FIRST_RESTART, LONGEST_RESTART = 1.0, 60.0  # seconds until a failed thread runs again


def run_again(run: Callable[[threading.Event], object], stop: threading.Event) -> None:
    """Run until ``run`` returns; after an error report it, and run again after a delay."""
    delay = FIRST_RESTART
    while True:
        try:
            run(stop)
        except Exception as error:  # noqa: BLE001 - a failed part must not end the others
            report_failure(error)
        else:
            return
        if stop.wait(delay):
            return
        delay = min(2 * delay, LONGEST_RESTART)


def report_failure(error: BaseException) -> None:
    """Report an error of the current thread to the hook for failed threads."""
    arguments = (type(error), error, error.__traceback__, threading.current_thread())
    threading.excepthook(threading.ExceptHookArgs(arguments))
