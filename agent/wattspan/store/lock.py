"""One agent a store."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from wattspan.ports import StoreError


class Lock:
    """The right to write one store, held until released or until the process ends.

    The kernel lets go of it however the process dies, so there is no stale lock.
    """

    def __init__(self, path: Path) -> None:
        """Take it; StoreError names the process that has it."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._descriptor, 20).decode("ascii", "replace").strip()
            os.close(self._descriptor)
            raise StoreError(
                f"Cannot open the store {path.with_suffix('')}: process {holder or 'unknown'} is"
                " writing it. Stop that agent, or give this one a state_dir of its own."
            ) from None
        except OSError:
            os.close(self._descriptor)
            raise
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode("ascii"), 0)

    @property
    def released(self) -> bool:
        return self._descriptor < 0

    def release(self) -> None:
        os.close(self._descriptor)
        self._descriptor = -1
