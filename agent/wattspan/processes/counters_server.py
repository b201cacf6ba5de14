"""The listener of a helper for performance counters, where systemd passes no connections."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection
from errno import EEXIST
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingUnixStreamServer
from threading import BoundedSemaphore
from typing import Any

from wattspan.processes.performance_counters import SumsProgram, serve_sums

MOST_CONNECTIONS = 2
"""Each has a program that the kernel runs at every context switch: an agent, and its successor."""


class CountersServer(ThreadingUnixStreamServer):
    """Listens at a path and serves each agent in a thread of its own; OSError.

    ``tell`` gets the errors that agents were told.
    """

    daemon_threads, block_on_close = True, False

    def __init__(
        self,
        path: Path,
        permitted: Collection[int],
        opener: Callable[[], SumsProgram],
        tell: Callable[[str], object] = lambda _: None,
    ) -> None:
        """``permitted`` and ``opener`` are those of :func:`serve_sums`."""
        self._permitted, self._opener, self._tell = permitted, opener, tell
        self._free = BoundedSemaphore(MOST_CONNECTIONS)
        if os.path.lexists(path):  # of one that was killed
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise FileExistsError(EEXIST, "There is a file that is no socket", str(path))
            path.unlink()
        before = os.umask(0o117)  # a later chmod could be of another file
        try:
            super().__init__(str(path), BaseRequestHandler)
        finally:
            os.umask(before)

    def verify_request(self, request: Any, client_address: object) -> bool:
        """False, which closes the connection, while there are as many as permitted."""
        return self._free.acquire(blocking=False)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start the thread of a connection."""
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def finish_request(self, request: Any, client_address: object) -> None:
        """Serve an agent until it has ended."""
        try:
            if error := serve_sums(request, self._permitted, self._opener):
                self._tell(error)
        finally:
            self._free.release()
