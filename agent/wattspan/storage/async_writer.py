"""Writes in a thread, so that callers do not wait for a slow or hanging disk.

A write into the page cache takes microseconds, but seconds or forever if the disk is slow or gone.
The poller would then miss its ticks until the watchdog ends it, and spans would be delayed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

from wattspan.model import SECOND, Failure, Trouble
from wattspan.ports import Clock

T = TypeVar("T")

CALLER_WAIT = SECOND // 2
"""Longest wait of a caller for its write, in nanoseconds."""

HANG_AFTER = 2 * SECOND
"""Duration of a write from which on it is reported as hanging, in nanoseconds."""

CLOSE_TIMEOUT_SECONDS = 1.0
"""Longest wait for pending writes at the end of the process."""

DISK_REMEDY = "Check the kernel log for disk errors."


def hang_failure(source: str, thing: str, meanwhile: str) -> Failure:
    """Return the failure of a disk that neither completes nor rejects writes of ``value``."""
    return Failure(
        source,
        thing,
        Trouble.STUCK,
        "its disk does not respond",
        f"{DISK_REMEDY} {meanwhile}",
        verb="write",
    )


class AsyncWriter(Generic[T]):
    """Writes values in its own thread, in order of submission.

    Each value has a key; of the waiting values of one key only the newest is written, at the
    position of the first. After a slow write, callers do not wait until a write is fast again
    and the queue is empty.
    """

    def __init__(
        self, write: Callable[[T], None], clock: Clock, *, name: str = "wattspan-keeper"
    ) -> None:
        """``name`` is the name of the thread, which starts with the first value."""
        self._write = write
        self._clock = clock
        self._name = name
        self._changed = threading.Condition()
        self._queue: dict[Hashable, T] = {}
        self._current_key: Hashable = None
        self._start: int | None = None  # start of the write in progress, of key `_current_key`
        self._callers_wait = True
        self._closed = False
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def submit_and_wait(self, value: T) -> None:
        """Submit ``value`` and wait for its write, at most `CALLER_WAIT`."""
        self.submit(value)
        self.wait()

    def submit(self, value: T, key: Hashable = None) -> None:
        """Submit ``value``. Raises the error of the last write, once; ``value`` is written."""
        with self._changed:
            error, self._error = self._error, None
            if not self._closed:
                self._enqueue(value, key)
        if error is not None:
            raise error

    def cancel(self, key: Hashable) -> None:
        """Remove the waiting value of ``key``. A write in progress continues."""
        with self._changed:
            self._queue.pop(key, None)
            self._changed.notify_all()

    def wait(self, keys: Iterable[Hashable] = (None,)) -> None:
        """Wait until the values of ``keys`` are written, at most `CALLER_WAIT`."""
        wanted = tuple(keys)
        with self._changed:
            if self._callers_wait and self.overdue() < CALLER_WAIT:
                self._callers_wait = self._changed.wait_for(
                    lambda: not any(map(self._waiting, wanted)), CALLER_WAIT / 1e9
                )

    @property
    def idle(self) -> bool:
        """True if every submitted value is written."""
        with self._changed:
            return not self._queue and self._start is None

    def overdue(self) -> int:
        """Return the duration of the write in progress in nanoseconds; 0 without one."""
        start = self._start
        return 0 if start is None else self._clock.monotonic() - start

    def close(self, within: float = CLOSE_TIMEOUT_SECONDS) -> bool:
        """Write the waiting values and end. False if that takes more than ``within`` seconds.

        The disk hangs in that case, and the thread with it.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(within)
        return self._thread is None or not self._thread.is_alive()

    def _enqueue(self, value: T, key: Hashable) -> None:
        self._queue[key] = value
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _waiting(self, key: Hashable) -> bool:
        return key in self._queue or (self._start is not None and self._current_key == key)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                self._current_key = next(iter(self._queue))
                value = self._queue.pop(self._current_key)
                self._start = self._clock.monotonic()
            error = self._try_write(value)
            with self._changed:
                if self.overdue() >= CALLER_WAIT:
                    self._callers_wait = False
                elif not self._queue:
                    self._callers_wait = True
                self._start, self._error = None, error
                self._changed.notify_all()

    def _try_write(self, value: T) -> Exception | None:
        try:
            self._write(value)
        except Exception as error:  # noqa: BLE001 - raised to the next caller
            return error
        return None
