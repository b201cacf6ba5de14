"""Follows the capper's audit log while the capper writes it."""

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
MAX_READ_BYTES = 256 * 1024
"""Bytes of one read; a longer line is skipped."""


class AuditTail:
    """Passes on every event that is written after ``begin``, once and in order.

    After a rotation the old file is read to its end before the new one. A missing log is waited
    for; an unreadable one is logged once, and tried again.
    """

    def __init__(
        self,
        path: Path,
        handle: Callable[[AuditEvent], None],
        clock: Clock,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._path, self._handle, self._log = path, handle, log
        self._failures = RateLimitedLog(clock.monotonic, log)
        self._file = -1
        self._position = 0  # after the last whole line
        self._unreadable = False

    def begin(self) -> None:
        """Skip the present content of the log."""
        if self._open():
            self._position = os.fstat(self._file).st_size

    def turn(self) -> None:
        """Pass on what was written since the last turn."""
        if self._file < 0 and not self._open():
            return
        self._read()
        if self._replaced():
            self._read()  # rows written between the last read and the rotation
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
            except Exception as error:  # noqa: BLE001 - the rest of the agent continues
                self._failures.failure("Following the capper's audit log", error)
                self.close()
        self.close()

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _open(self) -> bool:
        self._position = 0
        try:
            file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return False
        except OSError as error:
            return self._refuse((error.strerror or str(error)).lower())
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            return self._refuse("it is not a file")
        self._file, self._unreadable = file, False
        return True

    def _refuse(self, cause: str) -> bool:
        if not self._unreadable:
            self._log(
                f"Cannot follow the capper's audit log {self._path}: {cause}. Its events are not "
                "sent on; make it readable for the user of the agent."
            )
        self._unreadable = True
        return False

    def _replaced(self) -> bool:
        """True if the path leads to another file now."""
        try:
            there = self._path.lstat()
        except OSError:
            return False  # a rotation is under way
        return not os.path.samestat(there, os.fstat(self._file))

    def _read(self) -> None:
        if os.fstat(self._file).st_size < self._position:
            self._position = 0  # it was emptied, and is written anew
        while chunk := os.pread(self._file, MAX_READ_BYTES, self._position):
            end = chunk.rfind(b"\n") + 1
            if not end and len(chunk) < MAX_READ_BYTES:
                return  # an incomplete line
            self._position += end or len(chunk)
            for line in chunk[:end].split(b"\n"):
                try:
                    event = msgspec.json.decode(line, type=AuditEvent)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    continue  # torn, or of a later version
                self._handle(event)
