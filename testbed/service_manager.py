"""A service manager as a service sees it: a socket that stores received notifications."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

from testbed.waiting import eventually
from wattspan.emulation.control import Closeable


class ServiceManager(Closeable):
    """Hears every message of a service, in order. ``environ`` is the environment of the service.

    ``watchdog`` is the seconds within which it awaits a sign of life; it never ends anything.
    """

    def __init__(self, *, watchdog: float | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="wattspan-")
        path = str(Path(self._folder.name) / "notify")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(path)
        self._socket.setblocking(False)
        self.environ = {"NOTIFY_SOCKET": path}
        if watchdog is not None:
            self.environ["WATCHDOG_USEC"] = str(round(watchdog * 1e6))
        self._messages: list[str] = []

    @property
    def messages(self) -> list[str]:
        """All notifications received so far."""
        while True:
            try:
                self._messages.append(self._socket.recv(65536).decode())
            except BlockingIOError:
                return self._messages

    @property
    def lines(self) -> list[str]:
        return [line for message in self.messages for line in message.split("\n")]

    def count(self, line: str) -> int:
        return self.lines.count(line)

    @property
    def status(self) -> str:
        """The newest sentence."""
        told = [line for line in self.lines if line.startswith("STATUS=")]
        return told[-1].removeprefix("STATUS=") if told else ""

    def hears(self, line: str, times: int = 1) -> None:
        """Wait until ``line`` was received so often."""
        eventually(lambda: self.count(line) >= times, f"{line} {times} times in {self.messages}")

    def reads(self, holds: Callable[[str], bool], what: str) -> str:
        """Wait for a status that ``holds``; the status."""
        eventually(lambda: holds(self.status), what)
        return self.status

    def close(self) -> None:
        self._socket.close()
        self._folder.cleanup()
