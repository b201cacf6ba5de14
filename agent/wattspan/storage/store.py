"""The store: checkpoint and energy history in one SQLite file with one writing agent.

The files of the newest checkpoint next to it survive any end of the process.

`DeferredStore` handles a store that is not available at the start of the agent, because another
process holds it or its disk is read-only. The agent then counts from zero and never adds the totals
of an earlier run later: a jump of a counter would look like a burst of energy. The history is
complete in both cases.
"""

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
from wattspan.storage.async_writer import HANG_AFTER, AsyncWriter
from wattspan.storage.checkpoints import (
    AlternatingCheckpointFiles,
    latest_checkpoint,
    pack_checkpoint,
    unpack_checkpoint,
)
from wattspan.storage.database import (
    BUFFERED_MEANWHILE,
    DAMAGE_ERRORS,
    STORE_SOURCE,
    SchemaError,
    connect,
    is_corruption,
    lock_store,
    quarantine_database,
    store_failure,
    store_hang_failure,
    store_path,
    transaction,
)
from wattspan.storage.deltas import delta_between
from wattspan.storage.history import HistoryWriter
from wattspan.storage.rates import record_rates
from wattspan.util.files import FileLock, make_directory
from wattspan.util.throttle import RetryBackoff

_FIRST_RETRY = SECOND
_LAST_RETRY = 8 * SECOND
"""Longest retry delay: a recovered disk gets a write within ten seconds."""
_VACUUM_PAGES = 512


class Store:
    """The open store. One thread calls `write`, another one `write_latest`.

    The store queues no history: each write is the difference between the current checkpoint and
    the last one written, for any time in between.
    """

    def __init__(
        self,
        state_dir: Path,
        settings: StoreSettings,
        clock: Clock,
        *,
        emulated: bool = False,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Open the store in ``state_dir``, or create it.

        An emulated host has its own file, so that emulated and measured energy never mix. A
        corrupt file is renamed and reported to ``log``. StoreError if the store is in use, not
        writable, or of a newer version of wattspan.
        """
        self.path = path = store_path(state_dir, emulated=emulated)
        self._clock = clock
        self._log = log
        self._settings = settings
        self._guard = threading.Lock()
        self._writes = self._failed = self._write_nanoseconds = 0
        self._failure: Failure | None = None
        self._loss: Failure | None = None
        self._backoff = RetryBackoff(_FIRST_RETRY, _LAST_RETRY)
        self._last: Checkpoint | None = None
        self._opened: _OpenDatabase | None = None
        self._lock = _take_lock(path)
        try:
            self._begin()
            self._latest = AlternatingCheckpointFiles(path, log)
        except BaseException as error:
            self._detach()
            self._lock.release()
            if isinstance(error, SchemaError):
                remedy = "Upgrade wattspan, or move the file away to start a new one."
                raise StoreError(_unusable_failure(path, f"it {error}", remedy)) from None
            if isinstance(error, sqlite3.Error | OSError):
                raise StoreError(store_failure(error, path, "open")) from None
            raise
        self._writer = AsyncWriter(self._latest.write, clock)
        self.previous = latest_checkpoint(self._last, self._latest.previous())
        """The last checkpoint of the previous run; None in the first run."""
        if self._last is None:
            # The history starts there and does not count all earlier energy as new.
            self._last = self.previous

    def last_checkpoint(self) -> Checkpoint | None:
        """Return the last written checkpoint, of this or an earlier run, or None."""
        return self._last

    def start_new_series(self, since: Checkpoint | None) -> None:
        """Ignore earlier runs: count from ``since``, or from the next checkpoint.

        The history stays. StoreError if the write fails.
        """
        with self._guard:
            try:
                (self._opened or self._attach()).database.execute("DELETE FROM books")
            except (*DAMAGE_ERRORS, OSError, SchemaError) as error:
                raise StoreError(store_failure(error, self.path, "write")) from None
            self._last = since

    def write(self, checkpoint: Checkpoint) -> bool:
        """Add the energy since the last write to the history, and write the checkpoint.

        Both are one transaction. True on success. False after a failure, which :attr:`health`
        describes; writes then pause with backoff, and no energy is lost.
        """
        with self._guard:
            start = self._clock.monotonic()
            if (
                self._lock.released
                or self._is_stale(checkpoint)
                or (self._failure is not None and not self._backoff.is_due(start))
            ):
                return False
            try:
                self._write(checkpoint)
            except (*DAMAGE_ERRORS, OSError, SchemaError) as error:
                self._fail(error)
                return False
            self._last = checkpoint
            self._writes += 1
            self._write_nanoseconds = self._clock.monotonic() - start
            self._failure = None
            self._backoff.reset()
            return True

    def write_latest(self, checkpoint: Checkpoint) -> None:
        """Write the checkpoint of a snapshot before its publication. Never raises.

        The call waits for a hanging disk only shortly; the write completes later.
        """
        self._writer.submit_and_wait(checkpoint)

    @property
    def health(self) -> SourceHealth:
        """Result of the last write, a hanging disk, and every corrupt file renamed in this run."""
        hangs = self._writer.overdue() >= HANG_AFTER
        failures = (store_hang_failure(self.path) if hangs else None, self._failure, self._loss)
        return SourceHealth(
            source=STORE_SOURCE,
            up=self._failure is None and not hangs,
            reads=self._writes,
            failed=self._failed,
            failures=tuple(one for one in failures if one is not None),
            read_nanoseconds=self._write_nanoseconds,
        )

    def close(self) -> None:
        """Close the files. Write the last checkpoint before."""
        if self._writer.close():
            self._latest.close()
        with self._guard:
            if not self._lock.released:
                self._detach()
                self._lock.release()

    # -------------------------------------------------------------------------------- writing

    def _is_stale(self, checkpoint: Checkpoint) -> bool:
        last = self._last
        return last is not None and (
            checkpoint.boot_id == last.boot_id and checkpoint.at.mono <= last.at.mono
        )

    def _write(self, checkpoint: Checkpoint) -> None:
        """Write to the file at the path; create a new one if it is missing or corrupt."""
        if self._opened is not None and self._opened.inode != _inode(self.path):
            self._detach()
            self._report_loss("it was deleted or replaced", "The agent created a new one.")
        try:
            self._commit(checkpoint)
        except DAMAGE_ERRORS as error:
            if not is_corruption(error):
                raise
            self._replace(error)
            self._commit(checkpoint)

    def _commit(self, checkpoint: Checkpoint) -> None:
        database, history, _ = self._opened or self._attach()
        latest, text = self._latest.written
        packed = pack_checkpoint(checkpoint, text if latest is checkpoint else None)
        delta = delta_between(self._last, checkpoint)
        try:
            with transaction(database):
                record_rates(database, checkpoint, self._last)
                finished = history.add(delta)
                database.execute(
                    "INSERT INTO books VALUES (1, ?)"
                    " ON CONFLICT (id) DO UPDATE SET packed = excluded.packed",
                    (packed,),
                )
        except BaseException:
            history.forget_keys()
            raise
        if finished:  # the minute is complete: release some free pages
            database.execute(f"PRAGMA incremental_vacuum({_VACUUM_PAGES})").fetchall()

    def _fail(self, error: Exception) -> None:
        self._failed += 1
        first = self._failure is None
        self._failure = store_failure(error, self.path, "write", BUFFERED_MEANWHILE)
        self._backoff.failed(self._clock.monotonic())
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

    def _attach(self) -> _OpenDatabase:
        """Open the file; its checkpoint, if any, becomes the last written one.

        A failed commit that nevertheless reached the disk is thereby counted once.
        """
        database = connect(self.path, self._clock)
        try:
            found = database.execute("SELECT packed FROM books").fetchone()
            self._last = self._last if found is None else unpack_checkpoint(found[0])
            history = HistoryWriter(database, self._settings)
            self._opened = opened = _OpenDatabase(database, history, _inode(self.path))
        except BaseException:
            database.close()
            raise
        return opened

    def _detach(self) -> None:
        if self._opened is not None:
            with contextlib.suppress(sqlite3.Error):
                self._opened.database.close()
            self._opened = None

    def _replace(self, error: Exception) -> None:
        """Rename a corrupt file and create a new one."""
        self._detach()
        aside = quarantine_database(self.path)
        self._report_loss(
            f"it is corrupt ({error})",
            f"The agent renamed it to {aside} and created a new one;"
            f" `sqlite3 {aside.name} .recover` may recover its history.",
        )
        self._attach()

    def _report_loss(self, cause: str, remedy: str) -> None:
        self._failed += 1
        self._loss = _unusable_failure(self.path, cause, remedy)
        self._log(str(self._loss))


class _OpenDatabase(NamedTuple):
    database: sqlite3.Connection
    history: HistoryWriter
    inode: int | None


def _unusable_failure(path: Path, cause: str, remedy: str) -> Failure:
    return Failure(STORE_SOURCE, f"the store {path}", Trouble.MALFORMED, cause, remedy, verb="use")


def _take_lock(path: Path) -> FileLock:
    try:
        make_directory(path.parent)
        return lock_store(path.with_name(path.name + ".lock"))
    except OSError as error:
        raise StoreError(store_failure(error, path, "open")) from None


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


class DeferredStore:
    """Tries to open the store at every write until that succeeds."""

    def __init__(
        self,
        open_store: Callable[[], Store],
        refusal: StoreError,
        log: Callable[[str], None],
        *,
        closing: Checkpoint | None = None,
    ) -> None:
        """``open_store`` opens the store or raises StoreError; ``refusal`` is the first such error.

        ``closing`` is a checkpoint from which this agent continues; its energy is not written
        again.
        """
        self._open_store = open_store
        self._log = log
        self._closing = closing
        self._store: Store | None = None
        self._closed = False
        self._first: Checkpoint | None = None
        self._failure, self._failed = _open_failure(refusal), 1

    previous = None
    """The last checkpoint of the previous run: unknown without the store."""

    @property
    def health(self) -> SourceHealth:
        store = self._store
        if store is not None:
            return store.health
        return SourceHealth(STORE_SOURCE, False, 0, self._failed, (self._failure,))

    def write_latest(self, checkpoint: Checkpoint) -> None:
        """Write the checkpoint once the store is open; see `Store.write_latest`."""
        store = self._store
        if store is not None:
            store.write_latest(checkpoint)

    def write(self, checkpoint: Checkpoint) -> bool:
        """Write to the history; False until the store is open."""
        if self._first is None:
            self._first = checkpoint
        if self._store is None and not self._closed:
            self._store = self._try_open(checkpoint, self._first)
        return self._store is not None and self._store.write(checkpoint)

    def close(self) -> None:
        self._closed = True
        if self._store is not None:
            self._store.close()

    def _try_open(self, checkpoint: Checkpoint, first: Checkpoint) -> Store | None:
        """Return the store if it opens now."""
        store: Store | None = None
        try:
            store = self._open_store()
            # Energy that another agent of this host wrote meanwhile must not be written again.
            overlapping = store.previous is not None and store.previous.at.wall >= first.at.wall
            store.start_new_series(checkpoint if overlapping else self._closing)
        except StoreError as error:
            self._failure, self._failed = _open_failure(error), self._failed + 1
            if store is not None:
                store.close()
            return None
        since = "from now on" if overlapping else "since this agent began"
        self._log(f"The store is open now. Its history covers the time {since}.")
        return store


def _open_failure(error: StoreError) -> Failure:
    return error.failure or Failure(
        STORE_SOURCE, "the store", Trouble.RETRY, str(error), verb="open"
    )
