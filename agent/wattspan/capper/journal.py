"""What stood before we wrote, on disk before we write: so that whoever comes next can give it back.

Two copies of each boot, each replaced whole: written under another name, synchronized, renamed, and
the directory synchronized. A device is written only after both copies are on disk. Whatever moment
the power or the process ends at, each copy is the one before or the one after.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shlex
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from wattspan.capper.journal_records import EntrySource as EntrySource
from wattspan.capper.journal_records import JournalEntry as JournalEntry
from wattspan.capper.journal_records import encode_journal
from wattspan.capper.journal_recovery import (
    COPIES,
    PREFIX,
    AuditedWrites,
    RecoveredEntries,
    audited_writes,
    recover_entries,
)
from wattspan.model import CapKey
from wattspan.ports import WattspanError

_DRAFT = "journal.draft"
_OLD_DRAFTS = f"{PREFIX}*.new"
"""Drafts of earlier releases, one for each boot."""


class JournalError(WattspanError):
    """It cannot be written down; so it must not be done."""

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
        """Read what is there; ``audit`` is the audit log that a damaged journal is completed from.

        ``stamp`` is a clock that never goes back within a boot. It keeps generations increasing
        while there is no file, so that a file of long ago is never taken for the newest.
        """
        self._directory, self.boot_id, self._stamp = directory, boot_id, stamp
        self._paths = tuple(
            directory / f"{PREFIX}{_safe_file_name(boot_id)}{suffix}" for suffix in COPIES
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
            self._synchronize()
            self._remove_outdated()
        except OSError as error:
            self._on_disk = None  # who knows
            raise JournalError(
                f"Cannot write the journal {self.path}: {error.strerror}; no cap is set that is"
                " not written down. Make room there, or make it writable."
            ) from None
        self._saved = generation
        self.entries = dict(entries)
        self._on_disk = dict(entries)

    def _replace(self, text: bytes) -> None:
        for path in self._paths:
            self._replace_copy(path, text)

    def _replace_copy(self, path: Path, text: bytes) -> None:
        draft = self._directory / _DRAFT
        descriptor = os.open(
            draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644
        )
        try:
            while text:
                text = text[os.write(descriptor, text) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        draft.replace(path)

    def _synchronize(self) -> None:
        descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _remove_outdated(self) -> None:
        """Remove files whose entries have just been saved in this boot's journal."""
        for path in self._outdated:
            path.unlink(missing_ok=True)
        self._outdated = []

    def _tidy(self, damaged: list[Path]) -> None:
        """Remove drafts that a killed process left, and keep a copy of each damaged file."""
        for draft in (self._directory / _DRAFT, *self._directory.glob(_OLD_DRAFTS)):
            with contextlib.suppress(OSError):
                draft.unlink()
        for path in damaged:
            with contextlib.suppress(OSError):
                path.with_name(f"damaged-{path.name}").write_bytes(path.read_bytes())


def read_journal(directory: Path, boot_id: str, audit: Path | None = None) -> RecoveredEntries:
    """Entries of the journals in ``directory`` and of the audit log; nothing is changed."""

    def claims(boot: str) -> AuditedWrites:
        return audited_writes(_audit_lines(audit), boot) if audit is not None else {}

    return recover_entries(directory, boot_id, _safe_file_name(boot_id), claims)


def _audit_lines(audit: Path) -> Iterator[bytes]:
    for path in (audit.with_name(f"{audit.name}.1"), audit):
        with contextlib.suppress(OSError), path.open("rb") as file:
            yield from file


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


SYSTEM_STATE = Path("/var/lib/wattspan")
SYSTEM_CAPPER_STATE = Path("/var/lib/wattspan-capper")


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


def _safe_file_name(boot_id: str) -> str:
    return "".join(c if c.isalnum() or c == "-" else "_" for c in boot_id)[:100] or "unknown"
