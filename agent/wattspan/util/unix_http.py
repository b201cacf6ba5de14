"""HTTP/1.1 over a Unix socket, for clients of the agent and of collectors."""

from __future__ import annotations

import http.client
import socket


class UnixHttpConnection(http.client.HTTPConnection):
    """A connection to the server that listens at ``path``; ``timeout`` is in seconds."""

    def __init__(self, path: str, timeout: float | None = None) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.sock.settimeout(self.timeout)
            self.sock.connect(self._path)
        except BaseException:
            self.sock.close()
            raise
