"""One database file, opened for writing: sound, of the present schema, and proved writable."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from wattspan.model import MILLISECOND
from wattspan.ports import Clock
from wattspan.store.quarantine import remove_companions
from wattspan.store.schema import known_version, migrate, version

_CHECK_FOR = 300 * MILLISECOND
"""A start must not wait for a large file; what the check does not reach is found when used."""

_LOG_LIMIT = 4 << 20


def connect(path: Path, clock: Clock) -> sqlite3.Connection:
    """Open or create the store's database.

    Raises sqlite3.Error for what is ruined or cannot be written, and SchemaError.
    """
    if not path.exists():
        remove_companions(path)
    _make_index_private(path)
    database = sqlite3.connect(path, timeout=1.0, isolation_level=None, check_same_thread=False)
    try:
        known_version(database)
        database.execute("PRAGMA auto_vacuum = INCREMENTAL")  # effective before the first table
        database.execute("PRAGMA journal_mode = WAL").fetchone()
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute(f"PRAGMA journal_size_limit = {_LOG_LIMIT}")
        _check(database, clock)
        migrate(database)
        _prove_writable(database)
    except BaseException:
        database.close()
        raise
    return database


def _make_index_private(path: Path) -> None:
    """Have the file with SQLite's locks (``-shm``) be its owner's alone, before SQLite opens it.

    SQLite would give the file the mode of the database, and whoever may read a file may lock it: a
    member of the group that reads the history could block every write. An earlier version's file
    may be open elsewhere, so it is replaced. The caller holds the lock of the store.
    """
    index = path.with_name(path.name + "-shm")
    try:
        if not index.lstat().st_mode & 0o077:
            return
        index.unlink()
    except FileNotFoundError:
        pass
    descriptor = os.open(index, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(b"\0")  # SQLite changes the mode of an empty file


def _check(database: sqlite3.Connection, clock: Clock) -> None:
    deadline = clock.monotonic() + _CHECK_FOR
    database.set_progress_handler(lambda: clock.monotonic() > deadline, 10_000)
    try:
        verdict = database.execute("PRAGMA quick_check(1)").fetchone()[0]
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
            raise
        verdict = "ok"
    finally:
        database.set_progress_handler(None, 0)
    if verdict != "ok":
        raise sqlite3.DatabaseError(str(verdict).replace("\n", " "))


def _prove_writable(database: sqlite3.Connection) -> None:
    """Write something that changes nothing: a full disk or a read-only file shows now."""
    found = version(database)
    database.execute("BEGIN IMMEDIATE")
    try:
        database.execute(f"PRAGMA user_version = {found}")
        database.execute("COMMIT")
    except sqlite3.Error:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise
