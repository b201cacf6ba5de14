"""The audit log: one JSON line for each write, restore, refusal and command.

No peer can remove the history by frequent requests: rows of writes and refusals are limited by
user, the log is rotated in generations, and rows of operators outlive all of them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from wattspan.model import SECOND, Knob, ModelEnum
from wattspan.ports import Clock
from wattspan.sharing.pools import RateLimiter
from wattspan.util.files import replace_file


class AuditAction(ModelEnum):
    """The kind of an event."""

    WRITE = "write"
    RESTORE = "restore"
    REFUSE = "refuse"
    FOREIGN = "foreign"  # another program has set the knob, which is left to it
    VOID = "void"  # an entry that does not apply any more
    RESET = "reset"  # the device or its driver returned without the setting
    FAIL = "fail"  # a device failed
    CEILING = "ceiling"  # a ceiling was set
    LIFT = "lift"  # a ceiling was lifted
    LAPSE = "lapse"  # the time to live of a ceiling ended
    COMMAND = "command"  # a peer restored everything, or accepted foreign limits
    SNAPSHOT = "snapshot"  # a cap that is in force, restated at the beginning of a file
    START = "start"
    END = "end"


class AuditEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One row; ``at`` is Unix time in nanoseconds, values are in the knob's unit.

    ``job``, ``pid`` and ``uid`` are the requesting peer's, pid and uid as the kernel reports them.
    Of a ceiling, ``old`` and ``new`` are milliwatts, ``uid`` is its owner's, ``ttl`` nanoseconds.
    ``original`` is the limit that a restore writes.
    """

    at: int
    deed: AuditAction
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


def row_checksum(boot_id: str, event: AuditEvent) -> str:
    """Proves the boot and the values of a row, so that lost journal entries can be recovered."""
    fields = (boot_id, event.knob, event.device, event.original, event.new)
    return hashlib.blake2b(repr(fields).encode(), digest_size=16).hexdigest()


GENERATIONS: Final = 8
"""Files of the log: the newest, and those with the suffixes .1 to .7."""
PROTECTED_SUFFIX: Final = ".kept"
"""Suffix of one more file, with the protected rows of removed files."""

ROW_BURST: Final = 60
_ROW_SECONDS: Final = 5
"""Interval of the rows of one user's writes to one knob, after a burst of rows."""
MERGE_PERIOD: Final = 10 * SECOND
"""Delay of the common row of the other writes."""
REFUSAL_ROWS: Final = 10
_REFUSAL_SECONDS: Final = 6
"""Interval of the rows of one user's refusals, after a burst of rows."""
REFUSAL_PERIOD: Final = 60 * SECOND
"""Delay of the common row of the other refusals."""
_MAX_REASON_LENGTH: Final = 300
"""Characters of the reason of a write that are recorded."""

_ROUTINE: Final = frozenset({AuditAction.WRITE, AuditAction.RESTORE})
_UNPROTECTED: Final = _ROUTINE | {AuditAction.REFUSE, AuditAction.SNAPSHOT}

REFUSAL_DIVISOR: Final = 4
"""Refusals take this part of a file, so that a refused peer cannot fill the log."""
_REFUSAL_MARK: Final = b'"deed":"refuse"'  # in no text: quotation marks are escaped there


@dataclass(slots=True)
class _PendingRow:
    """Writes of one user to one knob, or refusals of one user, that have no row yet."""

    until: int
    first: AuditEvent
    last: AuditEvent
    count: int = 1


class _RowLimit(NamedTuple):
    """A burst of rows and one each ``seconds``; the others share a row after ``period``."""

    rate: RateLimiter
    seconds: int
    period: int


class AuditRowLimiter:
    """Records events; merges the many writes of one user to one knob, or refusals, into few rows.

    A write without a row of its own waits for ``MERGE_PERIOD`` at most, and is then part of one
    row with the first old value and the last new one. The rows of one knob keep their order.
    Refusals of one user wait for ``REFUSAL_PERIOD`` at most, and are counted in one row.
    """

    def __init__(self, clock: Clock, record: Callable[[AuditEvent], None]) -> None:
        self._clock, self._record = clock, record
        writes = _RowLimit(RateLimiter(1, ROW_BURST), _ROW_SECONDS, MERGE_PERIOD)
        refusals = _RowLimit(RateLimiter(1, REFUSAL_ROWS), _REFUSAL_SECONDS, REFUSAL_PERIOD)
        self._limits = dict.fromkeys(_ROUTINE, writes) | {AuditAction.REFUSE: refusals}
        self._pending: dict[Hashable, dict[int | None, _PendingRow]] = {}

    def record(self, event: AuditEvent) -> None:
        """Record ``event`` now, or later together with others."""
        self.turn()
        now, subject = self._clock.monotonic(), self._subject(event)
        if event.deed in _ROUTINE:
            event = replace(event, why=event.why[:_MAX_REASON_LENGTH])
        if (limit := self._limits.get(event.deed)) is not None:
            waits = event.uid in self._pending.get(subject, {})
            if waits or not limit.rate.admits((event.uid, subject), now // limit.seconds):
                self._merge(self._pending.setdefault(subject, {}), event, now + limit.period)
                return
        for each in list(self._pending) if event.deed is AuditAction.END else [subject]:
            self._flush(each)
        self._record(event)

    def turn(self) -> None:
        """Record the rows that have waited long enough."""
        now = self._clock.monotonic()
        for subject, users in list(self._pending.items()):
            if any(now >= one.until for one in users.values()):
                self._flush(subject)

    def close(self) -> None:
        """Record all waiting rows."""
        for subject in list(self._pending):
            self._flush(subject)

    @staticmethod
    def _subject(event: AuditEvent) -> Hashable:
        """The rows of one subject keep their order."""
        if event.deed is AuditAction.REFUSE:
            return event.deed, event.uid
        return event.knob, event.device

    @staticmethod
    def _merge(users: dict[int | None, _PendingRow], event: AuditEvent, until: int) -> None:
        pending = users.pop(event.uid, None)  # and to the end, behind the other users' last writes
        users[event.uid] = (
            _PendingRow(until, event, event)
            if pending is None
            else _PendingRow(pending.until, pending.first, event, pending.count + 1)
        )

    def _flush(self, subject: Hashable) -> None:
        for pending in self._pending.pop(subject, {}).values():
            event = pending.last
            if pending.count > 1:
                refused = event.deed is AuditAction.REFUSE
                kind = "more refusals" if refused else "writes and restores"
                why = f"{pending.count} {kind} of this user; the last: {event.why}"
                event = replace(event, old=pending.first.old, why=why)
            self._record(event)


class AuditLog:
    """Appends events to ``path``, and rotates it: older files are ``path.1`` and so on.

    A file has at most ``size`` bytes. Of a removed file, the rows of operators and the first row
    of each job and device go to ``path.kept``. Each new file begins with the caps that are
    ``outstanding``, so that the newest file has every original that is to be restored.

    Refusals beyond their part of a file are counted in one row of the next file, or at the end. A
    log that cannot be written stops nothing, since restoring needs only the journal; ``trouble``
    has the cause.
    """

    def __init__(
        self,
        path: Path,
        size: int,
        *,
        outstanding: Callable[[], Iterable[AuditEvent]] = tuple,
    ) -> None:
        self.path = path
        self.trouble = ""
        self._outstanding = outstanding
        self.size = size
        self._unlisted = 0

    def record(self, event: AuditEvent) -> None:
        """Append one row, unless it is a refusal without room."""
        line = msgspec.json.encode(event) + b"\n"
        if event.deed is AuditAction.REFUSE and not self._has_room(line):
            self._unlisted += 1
            return
        if event.deed is AuditAction.END:
            self._record_unlisted(event.at)
        self._write(event.at, line)

    # --------------------------------------------------------------------------- inner workings

    def _write(self, at: int, line: bytes) -> None:
        rotated = False
        try:
            rotated = self._append(line)
            self.trouble = ""
        except OSError as error:
            self.trouble = (
                f"Cannot write the audit log {self.path}: {error.strerror}. Make room there, or"
                " make it writable."
            )
        if rotated:
            self._record_unlisted(at)

    def _has_room(self, line: bytes) -> bool:
        """True if the refusals of this file, with this one, are within their part of it."""
        refused = 0
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            refused = sum(len(one) for one in file if _REFUSAL_MARK in one)
        return refused + len(line) <= self.size // REFUSAL_DIVISOR

    def _record_unlisted(self, at: int) -> None:
        if self._unlisted:
            why = (
                f"{self._unlisted} refusals have no rows: they may take 1/{REFUSAL_DIVISOR} "
                "of the record."
            )
            self._unlisted = 0
            event = AuditEvent(at=at, deed=AuditAction.REFUSE, why=why)
            self._write(at, msgspec.json.encode(event) + b"\n")

    def _append(self, line: bytes) -> bool:
        """True if the file was rotated first. A new file begins with the caps in force."""
        size = self.path.lstat().st_size if self.path.exists() else 0
        rotated = size > 0 and size + len(line) > self.size
        if rotated:
            self._rotate()
            caps = [replace(event, deed=AuditAction.SNAPSHOT) for event in self._outstanding()]
            line = b"".join(msgspec.json.encode(event) + b"\n" for event in caps) + line
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self.path, flags, 0o640)
        try:
            _append_all(descriptor, line)
        finally:
            os.close(descriptor)
        return rotated

    def _rotate(self) -> None:
        """Give each file the next number, and keep the protected rows of the last one."""
        oldest = self._generation(GENERATIONS - 1)
        with contextlib.suppress(OSError):  # the new rows matter more than those that go
            self._keep(oldest)
        for number in reversed(range(1, GENERATIONS)):
            with contextlib.suppress(FileNotFoundError):
                self._generation(number - 1).replace(self._generation(number))

    def _generation(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}") if number else self.path

    def _keep(self, removed: Path) -> None:
        if not removed.exists():
            return
        kept = self.path.with_name(f"{self.path.name}{PROTECTED_SUFFIX}")
        earlier = kept.read_bytes().splitlines(keepends=True) if kept.exists() else []
        with removed.open("rb") as file:
            lines = _protected_rows([*earlier, *file], self.size)
        replace_file(kept, b"".join(lines), kept.with_name(f"{kept.name}.new"), 0o640)


def _append_all(descriptor: int, data: bytes) -> None:
    """Append all of ``data``, or nothing. OSError."""
    before = os.fstat(descriptor).st_size
    if os.write(descriptor, data) != len(data):
        with contextlib.suppress(OSError):  # half a line is useless
            os.ftruncate(descriptor, before)
        raise OSError(errno.ENOSPC, "the disk is full")


def _protected_rows(lines: Iterable[bytes], size: int) -> list[bytes]:
    """The rows of operators, and the first row of each job and device; each half of ``size``."""
    operators: list[bytes] = []
    firsts: dict[tuple[str, str], bytes] = {}
    for line in lines:
        try:
            event = msgspec.json.decode(line, type=AuditEvent)
        except (ValueError, RecursionError):
            continue
        if event.deed is AuditAction.WRITE:
            firsts.setdefault((event.job, event.device), line)
        elif event.deed not in _UNPROTECTED:
            operators.append(line)
    return _newest_rows(operators, size // 2) + _newest_rows(list(firsts.values()), size // 2)


def _newest_rows(lines: Sequence[bytes], size: int) -> list[bytes]:
    """The last lines that take at most ``size`` bytes together."""
    newest: list[bytes] = []
    for line in reversed(lines):
        size -= len(line)
        if size < 0:
            break
        newest.append(line)
    return newest[::-1]
