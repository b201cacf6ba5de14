"""Checkpoints of the ledger as bytes, and the two files with the newest checkpoint.

The format is JSON, because a person must be able to read it after a failure and because JSON keeps
a lone surrogate (an undecodable byte in a process name). The database holds it compressed: it is
written every few seconds, and the checksum of the compression detects a changed bit.

The agent publishes snapshots once or twice a second and writes the database every few seconds. An
agent killed in between would resume from a checkpoint older than its published counters: the
counters would fall, and rates would show a reset and a burst. Therefore the agent writes the
checkpoint of every snapshot to a file before it publishes the snapshot. The write goes to the page
cache, which outlives the process; without fsync a power failure may lose the last seconds.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import msgspec

from wattspan.model import (
    Checkpoint,
    Consumer,
    DomainAccount,
    EngineRow,
    Group,
    GroupRow,
    HwType,
    Microjoules,
    Payer,
    PayerInfo,
    ProcessRow,
    Reading,
    Remainder,
)


class CheckpointError(ValueError):
    """The bytes are not a checkpoint."""


class _ProcessDocument(msgspec.Struct):
    """A process: ``payer`` is pid and start time, or the cgroup of a remainder."""

    payer: tuple[int, int] | str
    command: str
    user: str
    parent: int | None
    groups: list[Group]
    energy: dict[HwType, Microjoules]
    alive: bool
    bounded: list[HwType] = []


class _OutsideSpansDocument(msgspec.Struct):
    """Energy of a service's processes outside of spans."""

    service: str
    energy: dict[HwType, Microjoules]
    owner: str = ""


@dataclass(frozen=True)
class _CheckpointDocument(Checkpoint):
    """A checkpoint as in the file. A field without a default was in those of the first release."""

    accounts: tuple[DomainAccount, ...] = field()
    readings: tuple[Reading, ...] = field()
    groups: tuple[GroupRow, ...] = field()
    processes: tuple[_ProcessDocument, ...] = field()  # type: ignore[assignment]
    other: Mapping[HwType, Microjoules] = field()
    retired: Mapping[HwType, Microjoules] = field()
    outside: tuple[_OutsideSpansDocument, ...] = ()  # type: ignore[assignment]
    engines: tuple[Any, ...] = ()  # each is read alone: one damaged row costs no other total


def _fields_of(checkpoint: Checkpoint) -> dict[str, Any]:
    return {one.name: getattr(checkpoint, one.name) for one in fields(checkpoint)}


def pack_checkpoint(checkpoint: Checkpoint, text: bytes | None = None) -> bytes:
    """Return ``checkpoint`` as bytes, without power and pending energy; ``text`` is its JSON."""
    return zlib.compress(text or checkpoint_to_json(checkpoint), 1)


def unpack_checkpoint(blob: bytes) -> Checkpoint:
    """Return the packed checkpoint. Raises CheckpointError for other bytes."""
    try:
        text = zlib.decompress(blob)
    except zlib.error as error:
        raise CheckpointError(str(error)) from None
    return checkpoint_from_json(text)


def checkpoint_to_json(checkpoint: Checkpoint) -> bytes:
    """Return the uncompressed form, which is quick enough for every publication."""
    accounts = [replace(one, power=None, pending=Microjoules(0)) for one in checkpoint.accounts]
    document = _CheckpointDocument(
        **_fields_of(checkpoint)
        | {
            "accounts": accounts,
            # Older agents refuse a fifth item; without an age, a step of the counter counts.
            "readings": [reading[:4] for reading in checkpoint.readings],
            "groups": [replace(row, power={}) for row in checkpoint.groups],
            "processes": [_process_document(row) for row in checkpoint.processes],
            "spans": [replace(row, exemplars={}) for row in checkpoint.spans],
            "engines": [
                EngineRow(*one.key, one.energy, one.tokens, one.requests, host=one.host)
                for one in checkpoint.engines
            ],
            "outside": [
                _OutsideSpansDocument(service, {kind: e}, owner)
                for (service, owner, kind), e in checkpoint.outside.items()
            ],
        }
    )
    try:
        return msgspec.json.encode(document)
    except UnicodeEncodeError:  # lone surrogates; the standard library escapes them
        return json.dumps(msgspec.to_builtins(document), separators=(",", ":")).encode("ascii")


def checkpoint_from_json(text: bytes) -> Checkpoint:
    """Return the checkpoint in ``text``. Raises CheckpointError for other bytes."""
    try:
        document = msgspec.convert(json.loads(text), _CheckpointDocument)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise CheckpointError(str(error)) from None
    outside = {
        (row.service, row.owner, kind): energy
        for row in document.outside
        for kind, energy in row.energy.items()
    }
    processes = tuple(map(_process_row, document.processes))
    engines = tuple(_engines(document.engines))
    found: dict[str, Any] = {"processes": processes, "outside": outside, "engines": engines}
    return Checkpoint(**_fields_of(document) | found)


def _engines(rows: Iterable[Any]) -> Iterator[EngineRow]:
    """The valid rows of serving engines."""
    for row in rows:
        with suppress(msgspec.ValidationError):
            yield msgspec.convert(row, EngineRow)


def _process_document(row: ProcessRow) -> _ProcessDocument:
    info, payer = row.info, row.info.payer
    return _ProcessDocument(
        payer=(payer.pid, payer.started) if isinstance(payer, Consumer) else payer.cgroup,
        command=info.command,
        user=info.user,
        parent=info.parent,
        groups=list(info.groups),
        energy=dict(row.energy),
        alive=row.alive,
        bounded=sorted(row.bounded),
    )


def _process_row(row: _ProcessDocument) -> ProcessRow:
    payer: Payer = Remainder(row.payer) if isinstance(row.payer, str) else Consumer(*row.payer)
    info = PayerInfo(payer, row.command, tuple(row.groups), row.user, row.parent)
    return ProcessRow(info, row.energy, {}, row.alive, frozenset(row.bounded))


_HEADER_BYTES = 24  # sequence, length, checksum: eight bytes each


class AlternatingCheckpointFiles:
    """Two files written alternately, so that one is complete at any end of the process."""

    def __init__(self, store: Path, log: Callable[[str], None] = lambda _: None) -> None:
        """Open the files next to the database ``store``, whose lock the caller holds. OSError."""
        self._log = log
        self._paths = [store.with_suffix(f".latest-{n}") for n in (0, 1)]
        self._files: list[int] = []
        try:
            for path in self._paths:
                self._files.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
            found = [self._read(file) for file in self._files]
        except OSError:
            self.close()
            raise
        self._sequence, self._previous = max(found, key=lambda one: one[0])
        self._failed = False
        self.written: tuple[Checkpoint | None, bytes] = None, b""  # the last one and its JSON

    def previous(self) -> Checkpoint | None:
        """Return the newest checkpoint of the previous run, or None."""
        return self._previous

    def write(self, checkpoint: Checkpoint) -> None:
        """Write the checkpoint. Logs the first of consecutive errors."""
        text = checkpoint_to_json(checkpoint)
        self.written = checkpoint, text
        sequence = self._sequence + 1
        numbers = (sequence, len(text), _checksum(sequence, text))
        header = b"".join(number.to_bytes(8, "little") for number in numbers)
        file = self._files[sequence % 2]
        try:
            written = os.pwrite(file, header + text, 0)
        except OSError as error:
            self._fail(error.strerror or str(error))
            return
        if written < _HEADER_BYTES + len(text):
            self._fail("the disk is full")
            return
        self._sequence, self._failed = sequence, False

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop())

    def _read(self, file: int) -> tuple[int, Checkpoint | None]:
        blob = os.pread(file, os.fstat(file).st_size, 0)
        sequence, length, checksum = (
            int.from_bytes(blob[at : at + 8], "little") for at in range(0, _HEADER_BYTES, 8)
        )
        text = blob[_HEADER_BYTES : _HEADER_BYTES + length]
        if not text or len(text) < length or _checksum(sequence, text) != checksum:
            return 0, None
        try:
            return sequence, checkpoint_from_json(text)
        except CheckpointError:  # of another version of wattspan
            return 0, None

    def _fail(self, cause: str) -> None:
        if not self._failed:
            self._failed = True
            self._log(
                f"Cannot write {self._paths[0].parent}: {cause}."
                " If this agent is killed, its counters fall by the energy measured meanwhile."
            )


def _checksum(sequence: int, text: bytes) -> int:
    return zlib.crc32(text, zlib.crc32(sequence.to_bytes(8, "little")))


def latest_checkpoint(one: Checkpoint | None, other: Checkpoint | None) -> Checkpoint | None:
    """Return the later of two checkpoints of one host: the one with more energy."""
    found = [checkpoint for checkpoint in (one, other) if checkpoint is not None]
    return max(found, key=lambda c: sum(account.energy for account in c.accounts), default=None)
