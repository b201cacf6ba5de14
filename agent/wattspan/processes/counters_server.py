"""The listener of a helper for performance counters, where systemd passes no connections."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingUnixStreamServer
from typing import Any

from wattspan.processes.performance_counters import SumsProgram, serve_sums


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
        path.unlink(missing_ok=True)  # of one that was killed
        super().__init__(str(path), BaseRequestHandler)
        path.chmod(0o660)

    def finish_request(self, request: Any, client_address: object) -> None:
        """Serve an agent until it has ended."""
        if error := serve_sums(request, self._permitted, self._opener):
            self._tell(error)
