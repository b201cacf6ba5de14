"""The record of every write, restore and refusal, one JSON line each, for whoever asks later."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from wattspan.model import Knob, Word


class Deed(Word):
    """What was done, or was not."""

    WRITE = "write"
    RESTORE = "restore"
    REFUSE = "refuse"
    FOREIGN = "foreign"  # somebody else has written; we let go
    VOID = "void"  # what an earlier boot left is not true any more
    FAIL = "fail"  # a device did not do what it was told
    CEILING = "ceiling"  # a ceiling was set
    LIFT = "lift"  # a ceiling was lifted
    LAPSE = "lapse"  # the time of a ceiling is up
    COMMAND = "command"  # a peer had everything restored, or foreign limits accepted
    START = "start"
    END = "end"


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that happened; ``at`` is Unix time in nanoseconds, values are in the knob's unit.

    ``job``, ``pid`` and ``uid`` are of whoever wanted it, as the kernel proves pid and uid. For a
    ceiling, ``old`` and ``new`` are milliwatts, ``uid`` is its owner's and ``ttl`` nanoseconds.
    ``original`` is the limit that a restore gives back.
    """

    at: int
    deed: Deed
    knob: Knob | None = None
    device: str = ""
    name: str = ""
    old: int | None = None
    new: int | None = None
    why: str = ""
    job: str = ""
    pid: int | None = None
    uid: int | None = None
    ttl: int | None = None
    original: int | None = None
    check: str = ""  # row_checksum


def row_checksum(boot_id: str, event: Event) -> str:
    """Proves the boot and the values of a row, so that lost journal entries can be recovered."""
    told = (boot_id, event.knob, event.device, event.original, event.new)
    return hashlib.blake2b(repr(told).encode(), digest_size=16).hexdigest()


Hook = Callable[[Event], None]
"""Is told of every event, after it is on record: whoever sends them on."""


def no_hook(event: Event) -> None:
    """Nobody is told."""


PART: Final = 4
"""Refusals take one part in so many of the record: whoever is refused cannot fill it."""
_REFUSAL: Final = b'"deed":"refuse"'  # in no text: quotation marks are escaped there


class Audit:
    """Appends events to ``path``; what is older than ``size`` bytes is in ``path.1``, once.

    Refusals that would take more than their part are counted, and told in one row of the next
    file, or at the end. A record that cannot be written does not stop anything: the journal is
    what restoring needs. ``lost`` counts what could not be recorded, ``trouble`` says why.
    """

    def __init__(self, path: Path, size: int, hook: Hook = no_hook) -> None:
        self.path = path
        self.lost = 0
        self.trouble = ""
        self.size, self._hook = size, hook
        self._refusals: int | None = None
        """Bytes of the file that are refusals; None if they have not been counted yet."""
        self._left_out = 0

    def record(self, event: Event) -> None:
        line = msgspec.json.encode(event) + b"\n"
        if event.deed is Deed.REFUSE and not self._has_room(line):
            self._left_out += 1
            return
        if event.deed is Deed.END:
            self._tell_left_out(event.at)
        self._write(event, line)

    # --------------------------------------------------------------------------- inner workings

    def _write(self, event: Event, line: bytes) -> None:
        try:
            rotated = self._append(line)
            self.trouble = ""
        except OSError as error:
            self.lost += 1
            self.trouble = (
                f"Cannot record what is written to devices in {self.path}: {error.strerror}."
                " Make room there, or make it writable."
            )
            rotated = False
        self._hook(event)
        if rotated:
            self._tell_left_out(event.at)

    def _has_room(self, line: bytes) -> bool:
        """Whether the refusals of this file, and this one, are within their part of it."""
        try:
            there = self.path.stat().st_size
        except OSError:
            there = 0
        if self._refusals is None or there < self._refusals:  # somebody has removed or emptied it
            self._refusals = 0
            with contextlib.suppress(OSError), self.path.open("rb") as file:
                self._refusals = sum(len(one) for one in file if _REFUSAL in one)
        return self._refusals + len(line) <= self.size // PART

    def _tell_left_out(self, at: int) -> None:
        if self._left_out:
            why = f"{self._left_out} refusals have no rows: they may take 1/{PART} of the record."
            self._left_out = 0
            event = Event(at=at, deed=Deed.REFUSE, why=why)
            self._write(event, msgspec.json.encode(event) + b"\n")

    def _append(self, line: bytes) -> bool:
        """Whether the file was rotated first."""
        rotated = False
        descriptor = self._open()
        try:
            if (long := os.fstat(descriptor).st_size) + len(line) > self.size and long:
                os.close(descriptor)
                descriptor = -1
                self.path.replace(self.path.with_name(f"{self.path.name}.1"))
                descriptor = self._open()
                self._refusals, rotated = 0, True
            before = os.fstat(descriptor).st_size
            if os.write(descriptor, line) != len(line):
                with contextlib.suppress(OSError):  # half a line helps nobody
                    os.ftruncate(descriptor, before)
                raise OSError(errno.ENOSPC, "the disk is full")
            if self._refusals is not None and _REFUSAL in line:
                self._refusals += len(line)
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return rotated

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(self.path, flags, 0o640)
