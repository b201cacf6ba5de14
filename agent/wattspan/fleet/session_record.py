"""The newest session of this host on disk, for the agent that follows a crash of this one.

A lock is held until the end of the process. The agent that gets it knows that the process that
wrote the record sends nothing any more, to the capper or to the fleet, and ends that session.
A record of another boot is of no use: a copy of this host's disk may run elsewhere.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec

from wattspan.util.files import FileLock, LockHeldError, replace_file


class _StoredSession(msgspec.Struct, frozen=True):
    boot_id: str
    session: str


class SessionRecord:
    """``former`` is the session of the process that ended before, "" if none is known."""

    def __init__(self, folder: Path, boot_id: str) -> None:
        """The record in ``folder``; it stays empty if another agent holds the lock."""
        self._path, self._boot_id = folder / "fleet-session.json", boot_id
        self._lock: FileLock | None = None
        with suppress(OSError, LockHeldError):
            self._lock = FileLock(folder / "fleet.lock")
        self.former = self._load() if self._lock is not None and boot_id else ""

    def note(self, session: str) -> None:
        """Record a session before it begins. A full disk costs the next agent time, and no more."""
        if self._lock is not None:
            content = msgspec.json.encode(_StoredSession(self._boot_id, session))
            with suppress(OSError):
                replace_file(self._path, content, self._path.with_suffix(".new"))

    def close(self) -> None:
        """Release the lock, once this process acts for the host no more. Idempotent."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _load(self) -> str:
        try:
            stored = msgspec.json.decode(self._path.read_bytes(), type=_StoredSession)
        except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
            return ""
        return stored.session if stored.boot_id == self._boot_id else ""
