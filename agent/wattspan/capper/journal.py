"""The capper's directory, lock and journal.

The journal has the original limit of every written knob, on disk before the write: two copies per
boot, each replaced whole (written under another name, synchronized, renamed, the directory
synchronized). A device is written only after both copies are on disk. Whenever the process or the
power ends, each copy is the one before or the one after.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shlex
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from wattspan.capper.journal_entries import (
    COPIES,
    PREFIX,
    JournalEntry,
    RecoveredEntries,
    encode_journal,
    read_journal,
    safe_file_name,
)
from wattspan.model import CapKey
from wattspan.ports import WattspanError
from wattspan.util.files import (
    FileLock,
    LockHeldError,
    LockHolder,
    replace_file,
    synchronize_directory,
)

_DRAFT = "journal.draft"
_OLD_DRAFTS = f"{PREFIX}*.new"
"""Drafts of earlier releases, one for each boot."""


class JournalError(WattspanError):
    """A limit cannot be recorded, so it must not be set."""

    exit_code = 6


Entries = Mapping[CapKey, JournalEntry]


class Journal:
    """The journal of this boot, in a directory that only its owner may write.

    ``entries`` are those of this boot, and those of earlier boots whose limits may still be in
    force. ``trouble`` names damaged files; copies of them are kept under names that begin
    with ``damaged-``. ``complete`` is False if entries are missing.
    """

    def __init__(
        self,
        directory: Path,
        boot_id: str,
        audit: Path | None = None,
        *,
        stamp: Callable[[], int] = int,
    ) -> None:
        """Read the journals; a damaged one is completed from the audit log ``audit``.

        ``stamp`` is a monotonic clock of the boot. Generations increase with it while there is no
        file, so that an old file is never taken for the newest.
        """
        self._directory, self.boot_id, self._stamp = directory, boot_id, stamp
        self._paths = tuple(
            directory / f"{PREFIX}{safe_file_name(boot_id)}{suffix}" for suffix in COPIES
        )
        found = read_journal(directory, boot_id, audit)
        self.trouble, self.complete = _recovery_warning(found), found.complete
        self.entries: dict[CapKey, JournalEntry] = found.entries
        self._outdated, self._saved = found.outdated, found.newest
        self._on_disk: Entries | None = dict(found.entries) if found.current else None
        self._tidy(found.damaged)

    @property
    def path(self) -> Path:
        """The first of the copies."""
        return self._paths[0]

    def save(self, entries: Entries) -> None:
        """Have exactly ``entries`` on disk when this returns; JournalError if they are not.

        If it fails each copy is the one before or the new one, and ``entries`` is as it was.
        """
        if entries == self._on_disk:
            return
        generation = max(self._saved + 1, self._stamp())
        try:
            if entries:
                self._replace(
                    encode_journal(self.boot_id, generation, self._saved, entries.values())
                )
            else:
                for path in self._paths:
                    path.unlink(missing_ok=True)
            synchronize_directory(self._directory)
            for path in self._outdated:  # their entries are in this boot's journal now
                path.unlink(missing_ok=True)
            self._outdated = []
        except OSError as error:
            self._on_disk = None  # unknown now
            raise JournalError(
                f"Cannot write the journal {self.path}: {error.strerror}; no cap is set without a"
                " record. Make room there, or make it writable."
            ) from None
        self._saved = generation
        self.entries = dict(entries)
        self._on_disk = dict(entries)

    def _replace(self, text: bytes) -> None:
        for path in self._paths:
            self._replace_copy(path, text)

    def _replace_copy(self, path: Path, text: bytes) -> None:
        replace_file(path, text, self._directory / _DRAFT)

    def _tidy(self, damaged: list[Path]) -> None:
        """Remove the drafts of a killed process, and keep a copy of each damaged file."""
        for draft in (self._directory / _DRAFT, *self._directory.glob(_OLD_DRAFTS)):
            with contextlib.suppress(OSError):
                draft.unlink()
        for path in damaged:
            with contextlib.suppress(OSError):
                path.with_name(f"damaged-{path.name}").write_bytes(path.read_bytes())


def _recovery_warning(found: RecoveredEntries) -> str:
    if found.complete and not found.damaged:
        return ""
    names = ", ".join(str(path) for path in found.damaged) or "One copy of it"
    if found.complete:
        return (
            f"The journal is damaged ({names}). Every entry was recovered from its other copy or"
            " from the audit log. Check the disk."
        )
    return (
        f"The journal is damaged ({names}), and entries of it are lost. A limit that it may have"
        " held is not written before you set that limit by hand or run `wattspan caps accept`;"
        " `wattspan caps status` names the devices. Check the disk."
    )


# ------------------------------------------------------------------- directory, socket and lock

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SYSTEM_STATE = Path("/var/lib/wattspan")
SYSTEM_CAPPER_STATE = Path("/var/lib/wattspan-capper")
SOCKET_FILE = "capper.sock"
SYSTEM_RUN = Path("/run/wattspan")
SYSTEM_CAPPER_RUN = Path("/run/wattspan-capper")
AUDIT_FILE = "audit.jsonl"


@dataclass(frozen=True, slots=True)
class CapperHost:
    """The host by its boot, and the capper's own directory. An emulated host has one boot."""

    directory: Path
    boot_id: str

    @property
    def audit(self) -> Path:
        return self.directory / AUDIT_FILE

    @property
    def ceilings(self) -> Path:
        return self.directory / "ceilings.json"

    @property
    def allotment(self) -> Path:
        return self.directory / "allotment.json"


def capper_socket_path(run_dir: Path, *, emulated: bool = False) -> Path:
    """The socket of the capper beside an agent with sockets in ``run_dir``.

    The system's capper has a directory of its own, in which the agent can create nothing.
    """
    own = run_dir == SYSTEM_RUN and not emulated
    return (SYSTEM_CAPPER_RUN if own else run_dir) / SOCKET_FILE


def audit_path(state_dir: Path, *, emulated: bool) -> Path:
    """The audit log of the capper of this host, or of an emulated one."""
    return capper_directory(state_dir, emulated=emulated) / AUDIT_FILE


def open_capper_host(state_dir: Path, emulated: Path | None = None) -> CapperHost:
    """This host, or the ``emulated`` one of that directory. JournalError if it is unusable."""
    directory = open_capper_directory(state_dir, emulated=emulated is not None)
    try:
        boot_id = BOOT_ID.read_text().strip()
    except OSError as error:
        raise JournalError(
            f"Cannot read the id of this boot from {BOOT_ID}: {error.strerror}. Mount /proc."
        ) from None
    return CapperHost(directory, boot_id if emulated is None else f"{boot_id} {emulated.name}")


def capper_directory(state_dir: Path, *, emulated: bool) -> Path:
    """The capper's own directory, whether it exists or not.

    The system's is beside the agent's state directory: the owner of a directory may rename its
    content, and the capper does not trust the agent.
    """
    if emulated:
        return state_dir / "capper-emulated"
    return SYSTEM_CAPPER_STATE if state_dir == SYSTEM_STATE else state_dir / "capper"


def open_capper_directory(state_dir: Path, *, emulated: bool = False) -> Path:
    """The capper's own directory; JournalError if it is unusable or cannot be trusted.

    A process with all rights trusts its content, so no other user may write it. An emulated host
    has another one.
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


def has_journal(directory: Path) -> bool:
    """True if a capper that kept its journal in ``directory`` may have left limits."""
    return any(directory.glob(f"{PREFIX}*"))


def distrust_reason(directory: Path) -> str:
    """The reason if the directory of an existing journal cannot be trusted; else ""."""
    try:
        return _distrust_reason(directory, directory.lstat())
    except OSError as error:
        return f"{error.strerror}."


def _distrust_reason(directory: Path, found: os.stat_result) -> str:
    """The reason if the directory cannot be trusted, with the remedy; else "".

    The remedy is never the removal of a journal of limits that are to be restored.
    """
    user = os.geteuid()
    if found.st_uid != user and user != 0:
        owner = _user_name(found.st_uid)
        how = "Use sudo." if found.st_uid == 0 else f"Run this as {owner}."
        return f"it belongs to {owner}, and only {owner} may. {how}"
    whole = stat.S_ISDIR(found.st_mode)
    if whole and found.st_uid == user and not found.st_mode & 0o022:
        return ""
    others = "other users may write it."
    if not has_journal(directory):
        return f"{others} Remove it, and let the capper make its own."
    if not whole:
        return f"{others} It is a link to what holds a journal: put that in its place."
    place = shlex.quote(str(directory))
    return (
        f"{others} It holds a journal of limits that are to be restored: if that journal is right,"
        f" run `chown -R {user} {place} && chmod -R go-w {place}`."
    )


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


class CapperLock:
    """The right to be the capper of a host, until it is released or the process ends.

    It can be taken on a read-only disk as well: a restore must not depend on writing.
    """

    def __init__(self, place: CapperHost) -> None:
        """Take the lock; JournalError names its holder, if it is known."""
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
            f"An unknown process has the lock {path} of this host's capper: {holder.description}."
            f" Find it with `fuser -v {path}`, and end it."
        )
    if holder.pid == holder.recorded_pid:
        return (
            f"Process {holder.pid} is the one capper of this host and has the lock {path}. Leave it"
            " running, or end it."
        )
    return (
        f"Process {holder.pid} has the lock {path} of this host's capper, and has not written its"
        " pid there, as a capper does. End it, unless it has just started."
    )
