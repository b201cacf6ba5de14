"""Which host's limits these are, and where what is known of them is kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from wattspan.capper.journal import JournalError, capper_directory, open_capper_directory
from wattspan.util.files import FileLock, LockHeldError, LockHolder

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SOCKET_FILE = "capper.sock"
SYSTEM_RUN = Path("/run/wattspan")
SYSTEM_CAPPER_RUN = Path("/run/wattspan-capper")
AUDIT_FILE = "audit.jsonl"


@dataclass(frozen=True, slots=True)
class CapperHost:
    """The host, by the boot it is in, and the capper's own directory.

    An emulated host is one that has never been booted before and never will be again.
    """

    directory: Path
    boot_id: str

    @property
    def audit(self) -> Path:
        return self.directory / AUDIT_FILE

    @property
    def ceilings(self) -> Path:
        return self.directory / "ceilings.json"


def capper_socket_path(run_dir: Path, *, emulated: bool = False) -> Path:
    """Where the capper of the agent whose sockets are in ``run_dir`` answers.

    That of the system's agent has a directory of its own, in which the agent can put nothing.
    """
    own = run_dir == SYSTEM_RUN and not emulated
    return (SYSTEM_CAPPER_RUN if own else run_dir) / SOCKET_FILE


def audit_path(state_dir: Path, *, emulated: bool) -> Path:
    """Where the capper of this host, or of an emulated one, records what it does."""
    return capper_directory(state_dir, emulated=emulated) / AUDIT_FILE


def open_capper_host(state_dir: Path, emulated: Path | None = None) -> CapperHost:
    """Where the capper of this host, or of the ``emulated`` one there, keeps things.

    JournalError if it cannot.
    """
    directory = open_capper_directory(state_dir, emulated=emulated is not None)
    try:
        boot_id = BOOT_ID.read_text().strip()
    except OSError as error:
        raise JournalError(
            f"Cannot tell which boot this is: {BOOT_ID}: {error.strerror}."
        ) from None
    if emulated is not None:
        boot_id = f"{boot_id} {emulated.name}"
    return CapperHost(directory, boot_id)


class CapperLock:
    """The right to be the capper of a host, held until released or until the process ends.

    It can be had on a disk that has become read-only, too: giving back must not depend on it.
    """

    def __init__(self, place: CapperHost) -> None:
        """Take it; JournalError names the process that has it, if it is known."""
        path = place.directory / "lock"
        try:
            self._lock = FileLock(path, unwritable=True)
        except LockHeldError as error:
            raise JournalError(_lock_held_message(path, error.holder)) from None
        except OSError as error:
            raise JournalError(
                f"Cannot lock {path}: {error.strerror}. Make it writable for the capper."
            ) from None

    def release(self) -> None:
        self._lock.release()


def _lock_held_message(path: Path, holder: LockHolder) -> str:
    if holder.pid is None:
        return (
            f"It is not known which process has the lock {path} of this host's capper:"
            f" {holder.doubt}. Find it with `fuser -v {path}`, and end it."
        )
    if holder.pid == holder.noted:
        return (
            f"Process {holder.pid} is the capper of this host, and there is one only: it has the"
            f" lock {path}. Leave it, or end it."
        )
    return (
        f"Process {holder.pid} has the lock {path} of this host's capper, and has not written its"
        " number there, as a capper does. End it, unless it is one that has just begun."
    )
