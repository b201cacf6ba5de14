"""The record of every write, restore and refusal, one JSON line each, for whoever asks later."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

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
    START = "start"
    END = "end"


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that happened; ``at`` is Unix time in nanoseconds, values are in the knob's unit.

    ``job``, ``pid`` and ``uid`` are of whoever wanted it, as the kernel proves pid and uid.
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


Hook = Callable[[Event], None]
"""Is told of every event, after it is on record: whoever sends them on."""


def no_hook(event: Event) -> None:
    """Nobody is told."""


class Audit:
    """Appends events to ``path``; what is older than ``size`` bytes is in ``path.1``, once.

    A record that cannot be written does not stop anything: the journal is what restoring needs.
    ``lost`` counts what could not be recorded, ``trouble`` says why.
    """

    def __init__(self, path: Path, size: int, hook: Hook = no_hook) -> None:
        self.path = path
        self.lost = 0
        self.trouble = ""
        self._size, self._hook = size, hook

    def record(self, event: Event) -> None:
        line = msgspec.json.encode(event) + b"\n"
        try:
            self._append(line)
            self.trouble = ""
        except OSError as error:
            self.lost += 1
            self.trouble = (
                f"Cannot record what is written to devices in {self.path}: {error.strerror}."
                " Make room there, or make it writable."
            )
        self._hook(event)

    def _append(self, line: bytes) -> None:
        descriptor = self._open()
        try:
            if (long := os.fstat(descriptor).st_size) + len(line) > self._size and long:
                os.close(descriptor)
                descriptor = -1
                self.path.replace(self.path.with_name(f"{self.path.name}.1"))
                descriptor = self._open()
            before = os.fstat(descriptor).st_size
            if os.write(descriptor, line) != len(line):
                with contextlib.suppress(OSError):  # half a line helps nobody
                    os.ftruncate(descriptor, before)
                raise OSError(errno.ENOSPC, "the disk is full")
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(self.path, flags, 0o640)
