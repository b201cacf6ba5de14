"""A capper's server in a thread of the test, over devices that are only numbers."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Self

from testbed.capper_bench import Bench
from wattspan.capper.protocol import CapperClient
from wattspan.capper.server import CapperSocketServer
from wattspan.clock import SystemClock
from wattspan.emulation.control import Closeable
from wattspan.http.sockets import listen_unix
from wattspan.ports import Clock


class CapperServer(Closeable):
    """Serves ``bench`` while the block runs, by the real clock unless another is given."""

    def __init__(
        self,
        bench: Bench,
        path: Path,
        *,
        allowed: frozenset[int] | None = None,
        clock: Clock | None = None,
        in_fleet: bool = False,
    ) -> None:
        self.bench, self.path = bench, path
        clock = clock or SystemClock()
        bench.clock = clock  # type: ignore[assignment]
        bench.start()
        self.desk = bench.desk(in_fleet=in_fleet)
        listening = listen_unix(path, 0o666, what="requests for caps")
        uids = frozenset({0, os.geteuid()}) if allowed is None else allowed
        self._server = CapperSocketServer(listening.socket, self.desk, clock, uids)
        self.ask, self.permit = self._server.ask, self._server.permit
        self._remove = listening.remove
        self._thread = threading.Thread(target=self._server.run, name="capper", daemon=True)

    def client(self, *, timeout: float = 20.0) -> CapperClient:
        return CapperClient(self.path, SystemClock(), who="test", timeout=timeout)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def close(self) -> None:
        self.stop()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._server.stop()
            self._thread.join(20)
            self._server.close()
            self._remove()
