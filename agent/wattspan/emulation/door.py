"""Where processes that are not its owner's reach an emulated host: a Unix socket.

A job that somebody starts himself cannot be given work on an emulated board by the profile; it
comes here, takes a board and says how busy it keeps it, as a program with a real GPU would by
launching kernels. JSON, a line each way, one thread a guest. The kernel says who the guest is,
so nobody works in another's name. The host's directory is private to its user.
"""

from __future__ import annotations

import json
import socket
import socketserver
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAME = "engine.sock"

Answer = Callable[[int, str], dict[str, Any]]
"""The answer to a line that the process with this pid has written."""

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Door:
    """Answers guests at ``directory / NAME`` until it is closed."""

    def __init__(self, directory: Path, answer: Answer) -> None:
        self._server = _Server(str(directory / NAME), _Guest)
        self._server.answer = answer
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="emulated-door", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    block_on_close = False  # a guest that stays is no reason to
    answer: Answer


class _Guest(socketserver.StreamRequestHandler):
    server: _Server
    timeout = None

    def handle(self) -> None:
        raw = self.request.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid = _CREDENTIALS.unpack(raw)[0]
        for line in self.rfile:
            answer = self.server.answer(pid, line.decode(errors="replace"))
            try:
                self.wfile.write(json.dumps(answer).encode() + b"\n")
            except OSError:
                return  # it left without waiting for the answer
