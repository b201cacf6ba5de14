"""The store: checkpoint and energy history in one SQLite file with one writing agent."""

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
"""Longest retry delay: a recovered disk gets a write within ten seconds."""
_VACUUM_PAGES = 512


class Store:
    """The open store. One thread writes; any thread may read ``health``.

    The store queues nothing: each write is the difference between the current checkpoint and
    the last one written, whatever time passed in between.
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
                remedy = "Upgrade wattspan, or move the file away to start a new one."
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

        An emulated host has its own file, so that emulated and measured energy never mix. A
        corrupt file is renamed and reported to ``log``. StoreError if the store is in use, not
        writable, or of a newer version of wattspan.
        """
        return cls(store_path(state_dir, emulated=emulated), settings, clock, log)

    @property
    def path(self) -> Path:
        return self._path

    def opening(self) -> Checkpoint | None:
        """Return the last written checkpoint, of this or an earlier run, or None."""
        return self._last

    def resume(self, opening: Checkpoint) -> None:
        """Continue from a checkpoint of another file, if the database has none.

        The history then starts there and does not count all earlier energy as new.
        """
        if self._last is None:
            self._last = opening

    def begin_anew(self) -> None:
        """Forget the last checkpoint: the next one starts a new series. The history stays.

        StoreError if the write fails.
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
        """Add the energy since the last write to the history, and write the checkpoint.

        Both are one transaction. True on success. False after a failure, which :attr:`health`
        describes; writes then pause with backoff, and no energy is lost.
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
        """Result of the last write, and every corrupt file renamed in this run."""
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
        """Close the file. Write the last checkpoint before."""
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
        """Write to the file at the path; create a new one if it is missing or corrupt."""
        if self._opened is not None and self._opened.inode != _inode(self._path):
            self._detach()
            self._report_loss("it was deleted or replaced", "The agent created a new one.")
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
        if finished:  # the minute is complete: release some free pages
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
        """Open the file; its checkpoint, if any, becomes the last written one.

        A failed commit that nevertheless reached the disk is thereby counted once.
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
        """Rename a corrupt file and create a new one."""
        self._detach()
        aside = database.quarantine_database(self._path)
        self._report_loss(
            f"it is corrupt ({error})",
            f"The agent renamed it to {aside} and created a new one;"
            f" `sqlite3 {aside.name} .recover` may recover its history.",
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
