"""Unexpected errors of threads, which do not end the agent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from wattspan.model import SECOND, Failure, SourceHealth, Trouble
from wattspan.ports import Clock
from wattspan.util.process import LONGEST_RESTART, thread_continues
from wattspan.util.throttle import RateLimitedLog

THREADS = "threads"  # the name of failed threads among the sources
SHOWN_FOR = 300 * SECOND
"""A thread that runs again is in health until it has run for so long without an error."""

MAX_THREADS = 64


class ThreadFailures:
    """Counts and logs the unexpected errors of threads, which do not end the agent.

    A thread that has ended is in health until `forget_ended`. Safe from any thread.
    """

    def __init__(self, clock: Clock, log: Callable[[str], None]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._log = RateLimitedLog(clock.monotonic, log)
        self._failed = 0
        self._recent: dict[str, tuple[int, str]] = {}
        self._ended: dict[str, str] = {}

    def record(self, thread: str, error: BaseException) -> None:
        """Count an error, and log it unless the thread has logged one just now.

        The current thread is the failed one: it runs again, or ends.
        """
        cause = f"{type(error).__name__}: {str(error)[:200]}"
        with self._lock:
            self._failed += 1
            if not thread_continues():
                if thread in self._ended or len(self._ended) < MAX_THREADS:
                    self._ended[thread] = cause
            elif thread in self._recent or len(self._recent) < MAX_THREADS:
                self._recent[thread] = self._clock.monotonic(), cause
            self._log.write(
                f"The thread {thread!r} failed: {cause}. Please report this; the agent continues.",
                thread,
            )

    def forget_ended(self) -> None:
        """No thread is left that ended by an error: all parts are started anew."""
        with self._lock:
            self._ended.clear()

    def health(self) -> tuple[SourceHealth, ...]:
        """The threads that ended, or failed in the last minutes; empty before the first error."""
        shown = SHOWN_FOR + round(LONGEST_RESTART * SECOND)
        with self._lock:
            now = self._clock.monotonic()
            self._recent = {k: v for k, v in self._recent.items() if now - v[0] < shown}
            failed = self._failed
            causes = {thread: cause for thread, (_, cause) in self._recent.items()}
            ended = dict(self._ended)
        if not failed:
            return ()
        failures = tuple(
            Failure(
                THREADS,
                f"the thread {thread!r}",
                Trouble.MALFORMED,
                cause,
                "This is a bug; report it. "
                + (
                    "Restart the agent: its part is missing until then."
                    if thread in ended
                    else "Its part may lack figures; the agent continues."
                ),
                verb="run",
            )
            for thread, cause in sorted((causes | ended).items())
        )
        return (SourceHealth(THREADS, not failures, 0, failed, failures),)


@contextmanager
def report_thread_failures(report: Callable[[str, BaseException], None]) -> Iterator[None]:
    """Report the unexpected error that ends a thread."""

    def hook(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            report(args.thread.name if args.thread is not None else "?", args.exc_value)

    before, threading.excepthook = threading.excepthook, hook
    try:
        yield
    finally:
        threading.excepthook = before
