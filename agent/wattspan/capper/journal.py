"""The capper's journal: its entries, their lines on disk, and their recovery.

The journal has the original limit of every written knob, on disk before the write: two copies per
boot, each replaced whole (written under another name, synchronized, renamed, the directory
synchronized). A device is written only after both copies are on disk. Whenever the process or the
power ends, each copy is the one before or the one after. So any copy of the newest generation is
sufficient, and so is the generation before it, whose successor was still being saved.

Each line is one JSON object, ``{"check": CHECKSUM, "record": RECORD}``. A record names its boot,
its generation and the number of records of that generation, so each line can be trusted or
discarded without the other lines. The checksum is BLAKE2b with 128 bits: a CRC-32 would accept one
random line in 2**32, and the cost of either is far below that of the fsync.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from msgspec.structs import replace

from wattspan.capper.audit import AuditAction, AuditEvent, row_checksum
from wattspan.model import CapKey, DevicePresence, Knob, ModelEnum
from wattspan.ports import WattspanError
from wattspan.util.files import replace_file, synchronize_directory

PREFIX, COPIES, FIRST_VERSION = "journal-", (".a.jsonl", ".b.jsonl"), ".json"
_DRAFT = "journal.draft"
_OLD_DRAFTS = f"{PREFIX}*.new"
"""Drafts of earlier releases, one for each boot."""
VERSION: Final = 2
ALL_DEVICES: Final = "*"
"""In place of a device: every device of that knob."""


class JournalError(WattspanError):
    """A limit cannot be recorded, so it must not be set."""

    exit_code = 6


class EntrySource(ModelEnum):
    """Origin of an entry; decides how a deviating device is treated."""

    RECORDED = "recorded"  # written by the capper of this boot, read from an intact journal
    SALVAGED = "salvaged"  # read from a damaged journal or from the audit log
    EARLIER = "earlier"  # written in an earlier boot
    LOST = "lost"  # nothing is known; the device must not be written


class JournalEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One knob that the capper has written, or is about to write.

    ``original`` is the setting to restore; None for a knob that cannot be read, which is reset.
    ``value`` is the capper's. Until ``written``, it may not have reached the device yet, which
    then shows ``before``, an earlier value of the capper. ``foreign`` is the setting of another
    program, to which the knob is left; of a lost entry, the limit when the loss was found.
    ``imposed`` is the limit of a fixed cap or of a power budget, which stays when the capper ends.
    ``presence`` is the device's at the last write, later at an orderly end and every hour.
    """

    knob: Knob
    device: str
    name: str = ""
    original: int | None = None
    default: int | None = None
    minimum: int | None = None
    maximum: int | None = None
    value: int | None = None
    before: int | None = None
    written: bool = False
    foreign: int | None = None
    since: int = 0  # Unix time in nanoseconds
    imposed: int | None = None
    source: EntrySource = EntrySource.RECORDED
    presence: DevicePresence = DevicePresence()

    @property
    def key(self) -> CapKey:
        return CapKey(self.knob, self.device)

    @property
    def lost(self) -> bool:
        """True if the original limit is unknown."""
        return self.source is EntrySource.LOST

    @property
    def left_alone(self) -> bool:
        """True if the capper must not write this knob."""
        return self.foreign is not None or self.lost


class JournalRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of one generation. ``after`` is the generation that this one replaced."""

    version: int
    boot_id: str
    generation: int
    after: int
    of: int  # number of records in this generation
    entry: JournalEntry


class _JournalLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    check: str
    record: msgspec.Raw


class _JournalVersion1(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The journal of releases before checksums."""

    boot_id: str
    entries: tuple[JournalEntry, ...]
    version: Literal[1] = 1


def line_checksum(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def encode_journal(
    boot_id: str, generation: int, after: int, entries: Iterable[JournalEntry]
) -> bytes:
    """The text of one journal file."""
    listed = list(entries)
    lines = bytearray()
    for entry in listed:
        record = JournalRecord(
            version=VERSION,
            boot_id=boot_id,
            generation=generation,
            after=after,
            of=len(listed),
            entry=entry,
        )
        text = msgspec.json.encode(record)
        lines += msgspec.json.encode(_JournalLine(line_checksum(text), msgspec.Raw(text))) + b"\n"
    return bytes(lines)


def _decode_line(line: bytes) -> JournalRecord | None:
    try:
        found = msgspec.json.decode(line, type=_JournalLine)
        text = bytes(found.record)
        if found.check != line_checksum(text):
            return None
        record = msgspec.json.decode(text, type=JournalRecord)
    except (ValueError, RecursionError):
        return None
    return record if record.version == VERSION else None


_OPENING = frozenset({AuditAction.WRITE, AuditAction.SNAPSHOT})
_CLOSING = frozenset(
    {AuditAction.RESTORE, AuditAction.FOREIGN, AuditAction.VOID, AuditAction.RESET}
)

AuditedWrites = Mapping[CapKey, JournalEntry | None]
"""The last write of each knob that the audit log has; None if a later row ends it."""


@dataclass(slots=True)
class RecoveredEntries:
    """Entries that the journal files of a directory still hold."""

    entries: dict[CapKey, JournalEntry] = field(default_factory=dict)
    newest: int = 0
    """The newest generation of this boot."""
    damaged: list[Path] = field(default_factory=list)
    outdated: list[Path] = field(default_factory=list)
    """Files of earlier boots and earlier releases, to be removed once ``entries`` is saved."""
    complete: bool = True
    """False if entries are missing. Then each knob has a lost entry for every device."""
    current: bool = True
    """True if both copies hold exactly ``entries``."""


@dataclass(frozen=True, slots=True)
class _JournalFile:
    """One journal file: its valid records; ``intact`` if nothing is missing.

    ``old`` are its entries if it is of a release without checksums.
    """

    path: Path
    boot_id: str
    records: tuple[JournalRecord, ...] = ()
    old: tuple[JournalEntry, ...] = ()
    intact: bool = False

    @property
    def is_copy(self) -> bool:
        return not self.path.name.endswith(FIRST_VERSION)

    @property
    def generation(self) -> int:
        return max((record.generation for record in self.records), default=0)


def read_journal(directory: Path, boot_id: str, audit: Path | None = None) -> RecoveredEntries:
    """Entries of every journal in ``directory``, of this boot and of earlier ones of the same host.

    Nothing is changed. The audit log is read only for a boot with a damaged journal.
    """
    found = RecoveredEntries()
    name = safe_file_name(boot_id)
    boots: dict[str, list[_JournalFile]] = {}
    for file in _files(directory, boot_id):
        if _emulated_host(file.boot_id) == _emulated_host(boot_id):
            boots.setdefault(file.boot_id, []).append(file)
            if not file.intact:
                found.damaged.append(file.path)
        if not file.path.name.startswith(f"{PREFIX}{name}.") or not file.is_copy:
            found.outdated.append(file.path)
    own = boots.pop(boot_id, [])
    for boot, files in sorted(boots.items()):
        entries, complete = _merged(files, partial(_audited_writes_in, audit, boot))
        found.complete &= complete
        for key, entry in entries.items():
            if entry.lost:
                found.entries[key] = entry
            elif not entry.left_alone:
                found.entries[key] = replace(entry, source=EntrySource.EARLIER)
    if own:
        entries, complete = _merged(own, partial(_audited_writes_in, audit, boot_id))
        found.complete &= complete
        found.entries |= entries
        found.newest = max(file.generation for file in own)
    same = len(own) == len(COPIES) and len({file.generation for file in own}) == 1
    found.current = not found.damaged and not found.outdated and (same or not own)
    if not found.complete:
        for knob in Knob:
            lost = JournalEntry(
                knob=knob, device=ALL_DEVICES, name="every device", source=EntrySource.LOST
            )
            found.entries[lost.key] = lost
    return found


def boot_ids(directory: Path) -> frozenset[str]:
    """The boots of the journals in ``directory``."""
    return frozenset(file.boot_id for file in _files(directory, ""))


def audited_writes(lines: Iterable[bytes], boot_id: str) -> AuditedWrites:
    """The last writes of ``boot_id`` in the audit rows.

    A row that cannot be verified is damaged, or is of another boot or an earlier release. It may
    hide anything, so no row before it is used.
    """
    claims: dict[CapKey, JournalEntry | None] = {}
    for line in lines:
        try:
            row = msgspec.json.decode(line, type=AuditEvent)
        except (ValueError, RecursionError):
            claims.clear()
            continue
        if row.knob is None or row.deed not in _OPENING | _CLOSING:
            continue
        if row.check != row_checksum(boot_id, row):
            claims.clear()
            continue
        claims[CapKey(row.knob, row.device)] = _audited_entry(row, row.knob)
    return claims


# ----------------------------------------------------------------------------------- the journal

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

    def row(
        self,
        action: AuditAction,
        entry: JournalEntry,
        old: int | None,
        new: int | None,
        *,
        at: int,
        **cause: Any,
    ) -> AuditEvent:
        """The row of the audit log on an ``action`` at a Unix time, in nanoseconds."""
        event = AuditEvent(
            at=at,
            deed=action,
            knob=entry.knob,
            device=entry.device,
            name=entry.name,
            old=old,
            new=new,
            original=entry.original,
            **cause,
        )
        return replace(event, check=row_checksum(self.boot_id, event))

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


# ------------------------------------------------------------------------------ inner workings


def _audited_writes_in(audit: Path | None, boot_id: str) -> AuditedWrites:
    """The last writes of ``boot_id`` in the two newest files of the audit log."""
    lines: list[bytes] = []
    for path in () if audit is None else (audit.with_name(f"{audit.name}.1"), audit):
        with contextlib.suppress(OSError):
            lines += path.read_bytes().splitlines(keepends=True)
    return audited_writes(lines, boot_id)


def _files(directory: Path, boot_id: str) -> Iterator[_JournalFile]:
    for path in sorted(directory.glob(f"{PREFIX}*")):
        for suffix in (*COPIES, FIRST_VERSION):
            name = path.name.removeprefix(PREFIX).removesuffix(suffix)
            if path.name.endswith(suffix):
                yield _file(path, boot_id if name == safe_file_name(boot_id) else name)


def _file(path: Path, boot_id: str) -> _JournalFile:
    """``boot_id`` is from the file's name; the file's contents take precedence."""
    try:
        data = path.read_bytes()
        if path.name.endswith(FIRST_VERSION):
            first = msgspec.json.decode(data, type=_JournalVersion1)
            return _JournalFile(path, first.boot_id, old=first.entries, intact=True)
    except (OSError, ValueError, RecursionError):
        return _JournalFile(path, boot_id)
    *lines, rest = data.split(b"\n")
    records = tuple(record for line in lines if (record := _decode_line(line)) is not None)
    generations = {(one.boot_id, one.generation, one.of) for one in records}
    intact = (
        not rest
        and len(generations) == 1
        and len({one.entry.key for one in records}) == len(records) == len(lines) == records[0].of
    )
    return _JournalFile(path, records[0].boot_id if records else boot_id, records, intact=intact)


def _emulated_host(boot_id: str) -> str:
    """The name of an emulated host, which follows the boot's id; "" for the true one."""
    return boot_id.partition(" ")[2]


def _merged(
    files: Sequence[_JournalFile], claims: Callable[[], AuditedWrites]
) -> tuple[dict[CapKey, JournalEntry], bool]:
    """The entries of one boot, and True if they are complete."""
    copies = [file for file in files if file.is_copy]
    # Entries without a checksum: a device that deviates from them is not proof of a foreign write.
    old = {one.key: _salvaged(one) for file in files for one in file.old}
    if not copies and all(file.intact for file in files):
        return old, True
    newest = max((file.generation for file in copies), default=0)
    records = sorted(
        (record for file in copies for record in file.records), key=lambda one: one.generation
    )
    last = [record for record in records if record.generation == newest]
    entries = {record.entry.key: record.entry for record in last}
    missing = last[0].of - len(entries) if last else -1
    if not missing and _agree(copies, last[0]):
        return old | entries, True
    writes = claims()
    whole = _predecessor(copies, last) if missing else entries
    if whole is not None and _corroborated(whole, writes):
        return old | whole, True
    salvaged = {one.entry.key: _salvaged(one.entry) for one in records if one.generation < newest}
    salvaged |= {key: _salvaged(entry) for key, entry in entries.items()}
    audited = {key: entry for key, entry in writes.items() if entry is not None}
    found = len(audited.keys() - entries.keys())
    return old | audited | salvaged, 0 < missing == found


def _agree(files: Sequence[_JournalFile], last: JournalRecord) -> bool:
    """True if both copies are of the newest generation, or one is of the generation before."""
    generations = {file.generation for file in files}
    return len(files) == len(COPIES) and generations <= {last.generation, last.after} - {0}


def _predecessor(
    files: Sequence[_JournalFile], last: Sequence[JournalRecord]
) -> dict[CapKey, JournalEntry] | None:
    """The generation before ``last``, if a copy of it is intact: ``last`` was being saved."""
    for file in files:
        if last and file.intact and file.generation == last[0].after:
            return {record.entry.key: _salvaged(record.entry) for record in file.records}
    return None


def _corroborated(entries: Mapping[CapKey, JournalEntry], claims: AuditedWrites) -> bool:
    """True if the audit log agrees with ``entries`` on every write."""
    for key, entry in entries.items():
        if not entry.written or entry.left_alone:
            continue
        if key not in claims:
            return False
        claim = claims[key]
        if claim is not None and claim.value not in (entry.value, entry.before):
            return False
    return all(key in entries for key, claim in claims.items() if claim is not None)


def _audited_entry(row: AuditEvent, knob: Knob) -> JournalEntry | None:
    if row.deed not in _OPENING:
        return None
    return JournalEntry(
        knob=knob,
        device=row.device,
        name=row.name,
        original=row.original,
        value=row.new,
        written=True,
        since=row.at,
        source=EntrySource.SALVAGED,
    )


def _salvaged(entry: JournalEntry) -> JournalEntry:
    return entry if entry.left_alone else replace(entry, source=EntrySource.SALVAGED)


def safe_file_name(boot_id: str) -> str:
    return "".join(c if c.isalnum() or c == "-" else "_" for c in boot_id)[:100] or "unknown"
