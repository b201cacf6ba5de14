"""Which host's limits these are, and where what is known of them is kept."""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from wattspan.capper.journal import JournalError, directory_in, open_directory

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SOCKET = "capper.sock"
AUDIT = "audit.jsonl"


@dataclass(frozen=True, slots=True)
class Place:
    """The host, by the boot it is in, and the capper's own directory.

    An emulated host is one that has never been booted before and never will be again.
    """

    directory: Path
    boot_id: str

    @property
    def audit(self) -> Path:
        return self.directory / AUDIT

    @property
    def ceilings(self) -> Path:
        return self.directory / "ceilings.json"


def audit_path(state_dir: Path, *, emulated: bool) -> Path:
    """Where the capper of this host, or of an emulated one, records what it does."""
    return directory_in(state_dir, emulated=emulated) / AUDIT


def open_place(state_dir: Path, emulated: Path | None = None) -> Place:
    """Where the capper of this host, or of the ``emulated`` one there, keeps things.

    JournalError if it cannot.
    """
    directory = open_directory(state_dir, emulated=emulated is not None)
    try:
        boot_id = BOOT_ID.read_text().strip()
    except OSError as error:
        raise JournalError(
            f"Cannot tell which boot this is: {BOOT_ID}: {error.strerror}."
        ) from None
    if emulated is not None:
        boot_id = f"{boot_id} {emulated.name}"
    return Place(directory, boot_id)


class Lock:
    """The right to be the capper of a host, held until released or until the process ends.

    The kernel lets go of it however the process dies, so there is no stale lock.
    """

    def __init__(self, place: Place) -> None:
        """Take it; JournalError names the process that has it."""
        path = place.directory / "lock"
        try:
            self._descriptor = os.open(
                path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644
            )
        except OSError as error:
            raise JournalError(f"Cannot lock {path}: {error.strerror}.") from None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(self._descriptor, 20).decode("ascii", "replace").strip()
            os.close(self._descriptor)
            raise JournalError(
                f"Process {holder or 'unknown'} is the capper of this host, and there is one only:"
                f" it has the lock {path}. Leave it, or end it."
            ) from None
        with contextlib.suppress(OSError):  # a full disk: then it has no name, and holds
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode("ascii"), 0)

    def release(self) -> None:
        os.close(self._descriptor)
