"""What is to be kept goes to a disk that may not answer; who hands it over does not wait for it.

A write into the page cache takes microseconds, until a disk is slow enough, or gone: then it takes
seconds, or for ever. A poller would miss its ticks, and its watchdog would end it; spans would wait
for a disk that they do not need.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

from wattspan.model import SECOND, Failure, Trouble
from wattspan.ports import Clock

T = TypeVar("T")

CALLER_WAIT = SECOND // 2
"""A write is waited for so long, by who wants it done before the next step."""

HANG_AFTER = 2 * SECOND
"""A write that takes so long is told of."""

CLOSE_TIMEOUT_SECONDS = 1.0
"""Seconds that a write has when all is to end."""

DISK_REMEDY = "See the kernel's log for errors of the disk."


def hang_failure(source: str, thing: str, meanwhile: str) -> Failure:
    """The disk that ``thing`` is on neither takes what is written nor refuses it."""
    return Failure(
        source,
        thing,
        Trouble.STUCK,
        "its disk does not answer",
        f"{DISK_REMEDY} {meanwhile}",
        verb="write",
    )


class AsyncWriter(Generic[T]):
    """Writes in a thread of its own, in the order in which things were handed over.

    Each thing has a key; of those of one key that had to wait only the newest is written, in the
    place of the first. Once a write took too long none is waited for, until one is quick again and
    nothing is left to write.
    """

    def __init__(
        self, write: Callable[[T], None], clock: Clock, *, name: str = "wattspan-keeper"
    ) -> None:
        """``name`` is that of the thread, which begins when there is something to write."""
        self._write = write
        self._clock = clock
        self._name = name
        self._changed = threading.Condition()
        self._due: dict[Hashable, T] = {}
        self._doing: Hashable = None
        self._begun: int | None = None  # a write is under way since then, of that key
        self._waits = True
        self._closed = False
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def keep(self, thing: T) -> None:
        """Have it written, and wait a moment for it, if that is no waste: as by both below."""
        self.hand_over(thing)
        self.wait()

    def hand_over(self, thing: T, key: Hashable = None) -> None:
        """Have it written as soon as that can be. What an earlier write raised is raised here."""
        with self._changed:
            if self._error is not None:
                raise self._error
            if self._closed:
                return
            self._due[key] = thing
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def take_back(self, key: Hashable) -> None:
        """Do not write what waits under this key. A write that is under way goes on."""
        with self._changed:
            self._due.pop(key, None)
            self._changed.notify_all()

    def wait(self, keys: Iterable[Hashable] = (None,)) -> None:
        """Until what was handed over under these keys is written, but a moment at most."""
        wanted = tuple(keys)
        with self._changed:
            if self._waits and self.overdue() < CALLER_WAIT:
                self._waits = self._changed.wait_for(
                    lambda: not any(map(self._waiting, wanted)), CALLER_WAIT / 1e9
                )

    @property
    def idle(self) -> bool:
        """Whether all that was handed over is written."""
        with self._changed:
            return not self._due and self._begun is None

    def overdue(self) -> int:
        """For how many nanoseconds the write that is under way has been; 0 if none is."""
        begun = self._begun
        return 0 if begun is None else self._clock.monotonic() - begun

    def close(self, within: float = CLOSE_TIMEOUT_SECONDS) -> bool:
        """Write what waits, and end. False if that takes more than ``within`` seconds.

        The disk hangs then, and the thread with it.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(within)
        return self._thread is None or not self._thread.is_alive()

    def _waiting(self, key: Hashable) -> bool:
        return key in self._due or (self._begun is not None and self._doing == key)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._due or self._closed)
                if not self._due:
                    return
                self._doing = next(iter(self._due))
                thing = self._due.pop(self._doing)
                self._begun = self._clock.monotonic()
            error = self._written(thing)
            with self._changed:
                if self.overdue() >= CALLER_WAIT:
                    self._waits = False
                elif not self._due:
                    self._waits = True
                self._begun, self._error = None, error
                self._changed.notify_all()

    def _written(self, thing: T) -> Exception | None:
        try:
            self._write(thing)
        except Exception as error:  # noqa: BLE001 - for who hands over the next, not for this thread
            return error
        return None
