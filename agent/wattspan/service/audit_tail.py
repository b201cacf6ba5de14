"""Follows the capper's audit log, as it is written by another process."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from wattspan.capper.audit import AuditEvent
from wattspan.model import SECOND
from wattspan.ports import Clock
from wattspan.util.rate_limited_log import RateLimitedLog

READ_INTERVAL = SECOND
"""How often it is looked at."""

MAX_READ_BYTES = 256 * 1024
"""Bytes that are read at a time; a longer line than that is none."""


class AuditTail:
    """Tells every event that is written from ``begin`` on, once, in order.

    When the log is rotated, what the old file holds is read to its end before the new one is
    begun. What happened while this agent did not run is not told: the log has it. A log that is
    not there yet is waited for; one that may not be read is said once, and tried again.
    """

    def __init__(
        self,
        path: Path,
        tell: Callable[[AuditEvent], None],
        clock: Clock,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._path, self._tell, self._log = path, tell, log
        self._failures = RateLimitedLog(clock.monotonic, log)
        self._file = -1
        self._position = 0  # after the last whole line
        self._said = False

    def begin(self) -> None:
        """Whatever is in the log already is not told."""
        if self._open():
            self._position = os.fstat(self._file).st_size

    def turn(self) -> None:
        """Tell what was written since."""
        if self._file < 0 and not self._open():
            return
        self._read()
        if self._replaced():
            self._read()  # what was written between the last look and the rotation
            self.close()
            if self._open():
                self._read()

    def run(self, stop: threading.Event) -> None:
        """Turn until ``stop`` is set, and once more."""
        ended = False
        while not ended:
            ended = stop.wait(READ_INTERVAL / SECOND)
            try:
                self.turn()
            except Exception as error:  # noqa: BLE001 - whatever is there, the rest goes on
                self._failures.failure("Following the capper's audit log", error)
                self.close()
        self.close()

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    # -------------------------------------------------------------------------------- details

    def _open(self) -> bool:
        self._position = 0
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            file = os.open(self._path, flags)
        except FileNotFoundError:
            return False
        except OSError as error:
            self._without((error.strerror or str(error)).lower())
            return False
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            self._without("it is not a file")
            return False
        self._file = file
        self._said = False
        return True

    def _without(self, cause: str) -> None:
        if not self._said:
            self._said = True
            self._log(
                f"Cannot follow the capper's audit log {self._path}: {cause}. What the capper does "
                "is not sent on; make it readable for the user of the agent."
            )

    def _replaced(self) -> bool:
        """Whether another file has the log's name now."""
        try:
            there = self._path.lstat()
        except OSError:
            return False  # it is being rotated, or is gone: then the next one will come
        mine = os.fstat(self._file)
        return (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino)

    def _read(self) -> None:
        if os.fstat(self._file).st_size < self._position:
            self._position = 0  # it was emptied, and is written anew
        while chunk := os.pread(self._file, MAX_READ_BYTES, self._position):
            end = chunk.rfind(b"\n") + 1
            if not end and len(chunk) < MAX_READ_BYTES:
                return  # half a line, whose rest is still to come
            self._position += end or len(chunk)
            for line in chunk[:end].split(b"\n"):
                self._tell_line(line)

    def _tell_line(self, line: bytes) -> None:
        try:
            event = msgspec.json.decode(line, type=AuditEvent)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return  # torn, or of a later version
        self._tell(event)
