"""The record of writes, restores, refusals and commands, one JSON line each.

No peer can remove the history by asking often: rows of writes and refusals are limited by user, the
record is rotated in generations, and rows of operators outlive all of them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from wattspan.http.rate_limiter import RateLimiter
from wattspan.model import SECOND, Knob, ModelEnum
from wattspan.ports import CapsError, Clock
from wattspan.util.peer_credentials import PeerCredentials


class AuditAction(ModelEnum):
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
    SNAPSHOT = "snapshot"  # a cap that is in force, restated at the beginning of a file
    START = "start"
    END = "end"


class AuditEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that happened; ``at`` is Unix time in nanoseconds, values are in the knob's unit.

    ``job``, ``pid`` and ``uid`` are of whoever wanted it, as the kernel proves pid and uid. For a
    ceiling, ``old`` and ``new`` are milliwatts, ``uid`` is its owner's and ``ttl`` nanoseconds.
    ``original`` is the limit that a restore gives back.
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
    told = (boot_id, event.knob, event.device, event.original, event.new)
    return hashlib.blake2b(repr(told).encode(), digest_size=16).hexdigest()


GENERATIONS: Final = 8
"""Files of the record: the newest, and those with the suffixes .1 to .7."""
PROTECTED_SUFFIX: Final = ".kept"
"""Suffix of the file with the protected rows of files that were removed; it is one file more."""

ROW_BURST: Final = 60
_ROW_SECONDS: Final = 5
"""How often a user's writes to one knob have a row each, once that many had one."""
MERGE_PERIOD: Final = 10 * SECOND
"""How long other writes wait for the row that they have together."""
_MAX_REASON_LENGTH: Final = 300
"""Characters of the reason of a write that are on record."""

_ROUTINE: Final = frozenset({AuditAction.WRITE, AuditAction.RESTORE})
_UNPROTECTED: Final = _ROUTINE | {AuditAction.REFUSE, AuditAction.SNAPSHOT}

AuditHook = Callable[[AuditEvent], None]
"""Is told of every event, after it is on record: whoever sends them on."""


def ignore_event(event: AuditEvent) -> None:
    """Nobody is told."""


REFUSAL_DIVISOR: Final = 4
"""Refusals take one part in so many of the record: whoever is refused cannot fill it."""
_REFUSAL_MARK: Final = b'"deed":"refuse"'  # in no text: quotation marks are escaped there


@dataclass(slots=True)
class _PendingRow:
    """Writes of one user to one knob that have no row yet."""

    since: int
    first: AuditEvent
    last: AuditEvent
    count: int = 1


class AuditRowLimiter:
    """Puts events on record; of one user's many writes to one knob it makes few rows.

    A write without a row of its own waits for ``PERIOD`` at most, and is then part of one row that
    has the first old value and the last new one. The rows of one knob keep their order.
    """

    def __init__(self, clock: Clock, record: Callable[[AuditEvent], None]) -> None:
        self._clock, self._record = clock, record
        self._pace = RateLimiter(1, ROW_BURST)
        self._waiting: dict[Hashable, dict[int | None, _PendingRow]] = {}

    def record(self, event: AuditEvent) -> None:
        """Record ``event`` now, or later together with others."""
        knob = (event.knob, event.device)
        if event.deed in _ROUTINE:
            event = replace(event, why=event.why[:_MAX_REASON_LENGTH])
            now = self._clock.monotonic()
            waits = event.uid in self._waiting.get(knob, {})
            if waits or not self._pace.admits((event.uid, *knob), now // _ROW_SECONDS):
                self._wait(self._waiting.setdefault(knob, {}), event, now)
                return
        for each in list(self._waiting) if event.deed is AuditAction.END else [knob]:
            self._flush(each)
        self._record(event)

    def turn(self) -> None:
        """Record what has waited long enough."""
        now = self._clock.monotonic()
        for knob, users in list(self._waiting.items()):
            if any(now - one.since >= MERGE_PERIOD for one in users.values()):
                self._flush(knob)

    def close(self) -> None:
        """Record what waits."""
        for knob in list(self._waiting):
            self._flush(knob)

    def _wait(self, users: dict[int | None, _PendingRow], event: AuditEvent, now: int) -> None:
        waiting = users.pop(event.uid, None)  # and to the end, behind the other users' last writes
        if waiting is None:
            waiting = _PendingRow(now, event, event)
        else:
            waiting.last, waiting.count = event, waiting.count + 1
        users[event.uid] = waiting

    def _flush(self, knob: Hashable) -> None:
        for one in self._waiting.pop(knob, {}).values():
            event = one.last
            if one.count > 1:
                why = f"{one.count} writes and restores of this user; the last: {event.why}"
                event = replace(event, old=one.first.old, why=why)
            self._record(event)


REFUSAL_ROWS: Final = 10
"""Refusals of one user that have a row each, in one period; the others share one row."""
REFUSAL_PERIOD: Final = 60 * SECOND


@dataclass(slots=True)
class _RefusalPeriod:
    since: int
    listed: int = 0
    more: int = 0


class RefusalLog:
    """Puts refusals on record, by whoever's connection they came."""

    def __init__(self, clock: Clock, record: Callable[[AuditEvent], None]) -> None:
        self._clock, self._record = clock, record
        self._told: dict[int, str] = {}
        self._periods: dict[int | None, _RefusalPeriod] = {}

    def refused(self, holder: int, peer: PeerCredentials, job: str, error: CapsError) -> None:
        """A tuner that asks the same again every second is on record once."""
        if self._told.get(holder) == str(error):
            return
        self._told[holder] = str(error)
        now = self._clock.now()
        self.turn()
        period = self._periods.setdefault(peer.uid, _RefusalPeriod(now.mono))
        if period.listed == REFUSAL_ROWS:
            period.more += 1
            return
        period.listed += 1
        self._record(
            AuditEvent(
                at=now.wall,
                deed=AuditAction.REFUSE,
                device=error.device,
                why=str(error),
                job=job,
                pid=peer.pid,
                uid=peer.uid,
            )
        )

    def granted(self, holder: int) -> None:
        """What ``holder`` asked for was carried out, or it has gone: a refusal is news again."""
        self._told.pop(holder, None)

    def turn(self) -> None:
        """Tell of the rest of every period that is over."""
        now = self._clock.monotonic()
        for uid, period in list(self._periods.items()):
            if now - period.since >= REFUSAL_PERIOD:
                self._close(uid)

    def close(self) -> None:
        """Tell of the rest."""
        for uid in list(self._periods):
            self._close(uid)

    def _close(self, uid: int | None) -> None:
        more = self._periods.pop(uid).more
        if more:
            why = f"{more} more requests of this user were refused; they have no rows."
            self._record(
                AuditEvent(at=self._clock.now().wall, deed=AuditAction.REFUSE, why=why, uid=uid)
            )


class AuditLog:
    """Appends events to ``path``, and rotates it: older files are ``path.1`` and so on.

    A file has at most ``size`` bytes. Of a file that is removed, the rows of operators and the
    first row of each job and device go to ``path.kept``. Each new file begins with the caps that
    are ``outstanding``, so that the newest file tells every original that is to be restored.

    Refusals that would take more than their part are counted, and told in one row of the next
    file, or at the end. A record that cannot be written does not stop anything: the journal is
    what restoring needs. ``lost`` counts what could not be recorded, ``trouble`` says why.
    """

    def __init__(
        self,
        path: Path,
        size: int,
        hook: AuditHook = ignore_event,
        *,
        outstanding: Callable[[], Iterable[AuditEvent]] = tuple,
    ) -> None:
        self.path = path
        self.lost = 0
        self.trouble = ""
        self.outstanding = outstanding
        self.size, self._hook = size, hook
        self._refusals: int | None = None
        """Bytes of the file that are refusals; None if they have not been counted yet."""
        self._left_out = 0

    def record(self, event: AuditEvent) -> None:
        line = msgspec.json.encode(event) + b"\n"
        if event.deed is AuditAction.REFUSE and not self._has_room(line):
            self._left_out += 1
            return
        if event.deed is AuditAction.END:
            self._tell_left_out(event.at)
        self._write(event, line)

    # --------------------------------------------------------------------------- inner workings

    def _write(self, event: AuditEvent, line: bytes) -> None:
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
                self._refusals = sum(len(one) for one in file if _REFUSAL_MARK in one)
        return self._refusals + len(line) <= self.size // REFUSAL_DIVISOR

    def _tell_left_out(self, at: int) -> None:
        if self._left_out:
            why = (
                f"{self._left_out} refusals have no rows: they may take 1/{REFUSAL_DIVISOR} "
                "of the record."
            )
            self._left_out = 0
            event = AuditEvent(at=at, deed=AuditAction.REFUSE, why=why)
            self._write(event, msgspec.json.encode(event) + b"\n")

    def _append(self, line: bytes) -> bool:
        """Whether the file was rotated first."""
        rotated = False
        descriptor = self._open()
        try:
            if (long := os.fstat(descriptor).st_size) + len(line) > self.size and long:
                os.close(descriptor)
                descriptor = -1
                self._rotate()
                descriptor = self._open()
                self._refusals, rotated = 0, True
                self._restate(descriptor)
            _append_all(descriptor, line)
            if self._refusals is not None and _REFUSAL_MARK in line:
                self._refusals += len(line)
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return rotated

    def _restate(self, descriptor: int) -> None:
        """Begin a new file with the caps in force."""
        events = [replace(event, deed=AuditAction.SNAPSHOT) for event in self.outstanding()]
        _append_all(descriptor, b"".join(msgspec.json.encode(event) + b"\n" for event in events))

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
        draft = kept.with_name(f"{kept.name}.new")
        descriptor = self._open(draft, os.O_TRUNC)
        try:
            _append_all(descriptor, b"".join(lines))
        finally:
            os.close(descriptor)
        draft.replace(kept)

    def _open(self, path: Path | None = None, extra: int = os.O_APPEND) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | extra
        return os.open(path or self.path, flags, 0o640)


def _append_all(descriptor: int, data: bytes) -> None:
    """Append all of ``data``, or nothing. OSError."""
    before = os.fstat(descriptor).st_size
    if os.write(descriptor, data) != len(data):
        with contextlib.suppress(OSError):  # half a line helps nobody
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
