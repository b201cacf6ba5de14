"""Journal entries, and the checksummed lines in which a journal file stores them.

Each line is one JSON object, ``{"check": CHECKSUM, "record": RECORD}``. A record names its boot,
its generation and the number of records of that generation, so each line can be trusted or
discarded without the other lines. The checksum is BLAKE2b with 128 bits: a CRC-32 would accept one
random line in 2**32, and the cost of either is far below that of the fsync.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

from wattspan.model import CapKey, Knob, ModelEnum

VERSION: Final = 2
ALL_DEVICES: Final = "*"
"""In place of a device: every device of that knob."""


class EntrySource(ModelEnum):
    """Origin of an entry; decides how a deviating device is treated."""

    RECORDED = "recorded"  # written by the capper of this boot, read from an intact journal
    SALVAGED = "salvaged"  # read from a damaged journal or from the audit log
    EARLIER = "earlier"  # written in an earlier boot
    LOST = "lost"  # nothing is known; the device must not be written


class JournalEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One knob that we have written, or are about to.

    ``original`` is what stood before and comes back; None for a knob that cannot be read, which
    is reset instead. ``value`` is ours. Until ``written``, it may not have reached the device
    yet, and what stands there may be ``before``: an earlier value of ours. ``foreign`` is what
    somebody else put there since: then the knob is theirs. Of a lost entry it is the limit that
    the device had when the loss was found. ``imposed`` is the
    limit of a fixed cap or of a power budget: it stays in force when the capper ends.
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
    entries: list[JournalEntry]
    version: int = 1


@dataclass(frozen=True, slots=True)
class JournalCopy:
    """Contents of one journal file: its valid records; ``intact`` if nothing is missing."""

    records: tuple[JournalRecord, ...]
    intact: bool


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


def decode_journal(data: bytes) -> JournalCopy:
    """The valid records of one journal file."""
    lines = data.split(b"\n")
    found = [_record(line) for line in lines[:-1]]
    records = tuple(record for record in found if record is not None)
    generations = {(one.boot_id, one.generation, one.of) for one in records}
    intact = (
        not lines[-1]
        and None not in found
        and len(generations) == 1
        and len({one.entry.key for one in records}) == len(records) == records[0].of
    )
    return JournalCopy(records, intact)


def decode_journal_version_1(data: bytes) -> tuple[str, list[JournalEntry]]:
    """Boot and entries of a journal without checksums; ValueError if it is malformed."""
    told = msgspec.json.decode(data, type=_JournalVersion1)
    if told.version != 1:
        raise ValueError(f"unsupported journal version {told.version}")
    return told.boot_id, told.entries


def _record(line: bytes) -> JournalRecord | None:
    try:
        told = msgspec.json.decode(line, type=_JournalLine)
        text = bytes(told.record)
        if told.check != line_checksum(text):
            return None
        record = msgspec.json.decode(text, type=JournalRecord)
    except (ValueError, RecursionError):
        return None
    return record if record.version == VERSION else None
