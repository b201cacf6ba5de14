"""Carries closed books from the poller to the store, at the store's own pace."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from wattspan.model import Opening, SourceHealth


class Books(Protocol):
    """Where closed books are kept. Writing never raises; trouble shows in ``health``."""

    def write(self, opening: Opening) -> bool: ...

    @property
    def health(self) -> SourceHealth: ...

    def close(self) -> None: ...


class Recorder:
    """Writes the newest books, each at most once. Older ones need not be written at all."""

    def __init__(self, books: Books, newest: Callable[[], Opening | None]) -> None:
        self._books = books
        self._newest = newest
        self._written: Opening | None = None

    def turn(self) -> None:
        """Write the newest books if they are not yet written."""
        opening = self._newest()
        if opening is None or opening is self._written:
            return
        if self._books.write(opening):
            self._written = opening

    def run(self, stop: threading.Event, interval: int) -> None:
        """Turn at once, and every ``interval`` nanoseconds until ``stop``.

        What an earlier run could not write any more is so in the history before anybody asks.
        """
        self.turn()
        while not stop.wait(interval / 1e9):
            self.turn()
