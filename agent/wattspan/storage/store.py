"""The store: the ledger's books and their history, in one file that only one agent writes."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from wattspan.config import StoreSettings as StoreSettings
from wattspan.model import SECOND, Checkpoint, Failure, SourceHealth, Trouble
from wattspan.ports import Clock, StoreError
from wattspan.storage import database
from wattspan.storage.checkpoints import pack_checkpoint, unpack_checkpoint
from wattspan.storage.database import (
    BUFFERED_MEANWHILE,
    DAMAGE_ERRORS,
    STORE_SOURCE,
    connect,
    is_corruption,
    lock_store,
    store_failure,
    store_path,
)
from wattspan.storage.deltas import delta_between
from wattspan.storage.history import HistoryRetention, HistoryWriter
from wattspan.storage.rates import record_rates
from wattspan.storage.schema import DAY, HOUR, MINUTE, SchemaError
from wattspan.util.files import FileLock

_FIRST_RETRY = SECOND
_LAST_RETRY = 8 * SECOND
"""So that a disk which works again is written to within ten seconds."""
_VACUUM_PAGES = 512


class Store:
    """Open for writing. One thread writes; any thread may ask for its health.

    What could not be written is never queued: the next write is the difference between the books
    as they are then and as they were last written, however long ago that was.
    """

    def __init__(
        self, path: Path, settings: StoreSettings, clock: Clock, log: Callable[[str], None]
    ) -> None:
        """Use :meth:`open`."""
        self._path = path
        self._clock = clock
        self._log = log
        self._bounds = _retention(settings)
        self._guard = threading.Lock()
        self._writes = self._failed = self._took = 0
        self._failure: Failure | None = None
        self._ruin: Failure | None = None
        self._retry_at: int | None = None
        self._retry_after: int = _FIRST_RETRY
        self._last: Checkpoint | None = None
        self._opened: _OpenDatabase | None = None
        self._lock = _take_lock(path)
        try:
            self._begin()
        except BaseException as error:
            self._detach()
            self._lock.release()
            if isinstance(error, SchemaError):
                remedy = "Upgrade wattspan, or move the file away to begin a new one."
                raise StoreError(
                    Failure(
                        STORE_SOURCE,
                        f"the store {path}",
                        Trouble.MALFORMED,
                        f"it {error}",
                        remedy,
                        verb="use",
                    )
                ) from None
            if isinstance(error, sqlite3.Error | OSError):
                raise StoreError(store_failure(error, path, "open")) from None
            raise

    @classmethod
    def open(
        cls,
        state_dir: Path,
        settings: StoreSettings,
        clock: Clock,
        *,
        emulated: bool = False,
        log: Callable[[str], None] = lambda _: None,
    ) -> Store:
        """Open the store in ``state_dir``, or create it.

        An emulated host has a file of its own, so that its joules never mix with true ones.
        A ruined file is moved aside with a sentence to ``log``. StoreError if the store is in
        use, cannot be written to, or was written by a newer wattspan.
        """
        return cls(store_path(state_dir, emulated=emulated), settings, clock, log)

    @property
    def path(self) -> Path:
        return self._path

    def opening(self) -> Checkpoint | None:
        """The books as they were last written, by this run or an earlier one; None: never."""
        return self._last

    def resume(self, opening: Checkpoint) -> None:
        """Go on from books that were kept elsewhere, if the file has none.

        So its history begins there, and not with everything that was ever spent.
        """
        if self._last is None:
            self._last = opening

    def begin_anew(self) -> None:
        """Take what was spent up to now out of no later books: the next are the first of others.

        The history stays. StoreError if that cannot be written.
        """
        with self._guard:
            try:
                if self._opened is None:
                    self._attach()
                assert self._opened is not None  # noqa: S101 - attached, or raised
                self._opened.database.execute("DELETE FROM books")
            except (*DAMAGE_ERRORS, OSError, SchemaError) as error:
                raise StoreError(store_failure(error, self._path, "write")) from None
            self._last = None

    def write(self, opening: Checkpoint) -> bool:
        """Add what was spent since the last write to the history, and keep the books, at once.

        True if they are in the file now. False after a failure, which :attr:`health` describes
        and after which writes are refused for a growing while; nothing is lost by that.
        """
        with self._guard:
            began = self._clock.monotonic()
            if self._lock.released or self._is_stale(opening):
                return False
            if self._retry_at is not None and began < self._retry_at:
                return False
            try:
                self._write(opening)
            except (*DAMAGE_ERRORS, OSError, SchemaError) as error:
                self._fail(error)
                return False
            self._last = opening
            self._writes += 1
            self._took = self._clock.monotonic() - began
            self._failure, self._retry_at, self._retry_after = None, None, _FIRST_RETRY
            return True

    @property
    def health(self) -> SourceHealth:
        """Whether the last write succeeded; a file moved aside in this run is told all along."""
        now, ruin = self._failure, self._ruin
        return SourceHealth(
            source=STORE_SOURCE,
            up=now is None,
            reads=self._writes,
            failed=self._failed,
            failures=tuple(one for one in (now, ruin) if one is not None),
            read_nanoseconds=self._took,
        )

    def close(self) -> None:
        """Let go of the file. Write the last books before."""
        with self._guard:
            if not self._lock.released:
                self._detach()
                self._lock.release()

    # -------------------------------------------------------------------------------- writing

    def _is_stale(self, opening: Checkpoint) -> bool:
        last = self._last
        return last is not None and (
            opening.boot_id == last.boot_id and opening.at.mono <= last.at.mono
        )

    def _write(self, opening: Checkpoint) -> None:
        """Write to the file that is at the path now: a new one, if the old is gone or ruined."""
        if self._opened is not None and self._opened.inode != _inode(self._path):
            self._detach()
            self._report_loss("it was deleted or replaced", "A new one was begun.")
        try:
            self._commit(opening)
        except DAMAGE_ERRORS as error:
            if not is_corruption(error):
                raise
            self._replace(error)
            self._commit(opening)

    def _commit(self, opening: Checkpoint) -> None:
        if self._opened is None:
            self._attach()
        assert self._opened is not None  # noqa: S101 - attached, or raised
        database, history = self._opened.database, self._opened.history
        delta, packed = delta_between(self._last, opening), pack_checkpoint(opening)
        database.execute("BEGIN IMMEDIATE")
        try:
            record_rates(database, opening, self._last)
            finished = history.add(delta)
            database.execute(
                "INSERT INTO books VALUES (1, ?)"
                " ON CONFLICT DO UPDATE SET packed = excluded.packed",
                (packed,),
            )
            database.execute("COMMIT")
        except BaseException:
            history.forget_keys()
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise
        if finished:  # a minute is over: give some free pages back
            database.execute(f"PRAGMA incremental_vacuum({_VACUUM_PAGES})").fetchall()

    def _fail(self, error: Exception) -> None:
        self._failed += 1
        first = self._failure is None
        self._failure = store_failure(error, self._path, "write", BUFFERED_MEANWHILE)
        self._retry_at = self._clock.monotonic() + self._retry_after
        self._retry_after = min(2 * self._retry_after, _LAST_RETRY)
        self._detach()
        if first:
            self._log(str(self._failure))

    # ------------------------------------------------------------------------------- the file

    def _begin(self) -> None:
        try:
            self._attach()
        except DAMAGE_ERRORS as error:
            if not is_corruption(error):
                raise
            self._replace(error)

    def _attach(self) -> None:
        """Open the file, and take its books for the last written if it has any.

        So it never matters whether a commit that failed did reach the disk.
        """
        database = connect(self._path, self._clock)
        try:
            found = database.execute("SELECT packed FROM books").fetchone()
            self._last = self._last if found is None else unpack_checkpoint(found[0])
            history = HistoryWriter(database, self._bounds)
            self._opened = _OpenDatabase(database, history, _inode(self._path))
        except BaseException:
            database.close()
            raise

    def _detach(self) -> None:
        if self._opened is not None:
            with contextlib.suppress(sqlite3.Error):
                self._opened.database.close()
            self._opened = None

    def _replace(self, error: Exception) -> None:
        """Move a ruined file aside and begin a new one."""
        self._detach()
        aside = database.quarantine_database(self._path)
        self._report_loss(
            f"it is corrupt ({error})",
            f"It was moved to {aside}, from which `sqlite3 {aside.name} .recover` may save its"
            " history, and a new one was begun.",
        )
        self._attach()

    def _report_loss(self, cause: str, remedy: str) -> None:
        self._failed += 1
        self._ruin = Failure(
            STORE_SOURCE, f"the store {self._path}", Trouble.MALFORMED, cause, remedy, verb="use"
        )
        self._log(str(self._ruin))


class _OpenDatabase(NamedTuple):
    database: sqlite3.Connection
    history: HistoryWriter
    inode: int | None


def _take_lock(path: Path) -> FileLock:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return lock_store(path.with_name(path.name + ".lock"))
    except OSError as error:
        raise StoreError(store_failure(error, path, "open")) from None


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def _retention(settings: StoreSettings) -> HistoryRetention:
    def buckets(duration: int, step: int) -> int:
        return max(1, duration // (step * SECOND))

    return HistoryRetention(
        minutes=buckets(settings.minutes, MINUTE),
        hours=buckets(settings.hours, HOUR),
        days=buckets(settings.days, DAY),
        processes=settings.processes,
        groups=settings.groups,
        spans=settings.spans,
        bytes=settings.max_size,
    )
