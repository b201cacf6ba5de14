"""Which host's limits these are, and where what is known of them is kept."""

from __future__ import annotations

import os
import pwd
import shlex
import stat
from dataclasses import dataclass
from pathlib import Path

from wattspan.capper.journal import JournalError
from wattspan.capper.journal_entries import PREFIX
from wattspan.util.files import FileLock, LockHeldError, LockHolder

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SYSTEM_STATE = Path("/var/lib/wattspan")
SYSTEM_CAPPER_STATE = Path("/var/lib/wattspan-capper")
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


def capper_directory(state_dir: Path, *, emulated: bool) -> Path:
    """Where the capper's own directory is, whether there or not.

    Of the system's agent it stands beside the state directory: who owns a directory may rename
    what is in it, and the agent is not trusted with what the capper believes.
    """
    if emulated:
        return state_dir / "capper-emulated"
    return SYSTEM_CAPPER_STATE if state_dir == SYSTEM_STATE else state_dir / "capper"


def open_capper_directory(state_dir: Path, *, emulated: bool = False) -> Path:
    """The capper's own directory in ``state_dir``; JournalError if it cannot be had or trusted.

    What it holds is believed by a process with every right, so nobody else may write it. An
    emulated host's limits are kept apart from true ones.
    """
    directory = capper_directory(state_dir, emulated=emulated)
    remedy = "Make it writable, or set another [agent] state_dir."
    try:
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        raise JournalError(
            f"Cannot keep a journal in {directory}: {error.strerror}. {remedy}"
        ) from None
    if remedy := _distrust_reason(directory, found):
        raise JournalError(f"Cannot keep a journal in {directory}: {remedy}")
    return directory


def _distrust_reason(directory: Path, found: os.stat_result) -> str:
    """Why what the directory holds cannot be believed, and what helps; "" if it can.

    A journal that says what is to be given back is nothing that anybody is told to remove.
    """
    user = os.geteuid()
    if found.st_uid != user and user != 0:
        owner = _user_name(found.st_uid)
        how = "Use sudo." if found.st_uid == 0 else f"Run this as {owner}."
        return f"it belongs to {owner}, and only {owner} may. {how}"
    whole = stat.S_ISDIR(found.st_mode)
    if whole and found.st_uid == user and not found.st_mode & 0o022:
        return ""
    others = "others may write what is believed there."
    if not any(directory.glob(f"{PREFIX}*")):
        return f"{others} Remove it, and let the capper make its own."
    if not whole:
        return f"{others} It is a link to what holds a journal: put that in its place."
    place = shlex.quote(str(directory))
    return (
        f"{others} It holds a journal of limits that are to be given back: if what that says is"
        f" true, run `chown -R {user} {place} && chmod -R go-w {place}`."
    )


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


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
