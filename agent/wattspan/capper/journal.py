"""The journal: the original limit of every written knob, on disk before the write.

Two copies per boot, each replaced whole: written under another name, synchronized, renamed, and
the directory synchronized. A device is written only after both copies are on disk. Whenever the
process or the power ends, each copy is the one before or the one after.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
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
from wattspan.util.files import replace_file, synchronize_directory

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
