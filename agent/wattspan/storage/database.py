"""What SQLite's errors mean to an operator, and which of them mean that the file is ruined.

Where the stores are.

One agent a store.

Where a ruined file goes: aside, whole, and not for ever.

One database file, opened for writing: sound, of the present schema, and proved writable.
"""

from __future__ import annotations

import errno
import os
import re
import sqlite3
from pathlib import Path

from wattspan.model import MILLISECOND, Failure, Trouble
from wattspan.ports import Clock, StoreError
from wattspan.storage import async_writer
from wattspan.storage.checkpoints import CheckpointError
from wattspan.storage.schema import migrate, schema_version, supported_version
from wattspan.util.files import FileLock, LockHeldError

STORE_SOURCE = "store"

DAMAGE_ERRORS = (sqlite3.Error, CheckpointError, UnicodeDecodeError)
"""What a damaged file can raise. The last is sqlite3's, when an error's own text is damaged."""

BUFFERED_MEANWHILE = (
    "What is measured meanwhile is kept in memory and written as soon as that works."
)

_TRANSIENT_CODES = {
    "SQLITE_BUSY",
    "SQLITE_LOCKED",
    "SQLITE_FULL",
    "SQLITE_IOERR",
    "SQLITE_READONLY",
    "SQLITE_CANTOPEN",
    "SQLITE_NOMEM",
    "SQLITE_PERM",
    "SQLITE_INTERRUPT",
    "SQLITE_PROTOCOL",
}


def sqlite_error_name(error: BaseException) -> str:
    """SQLite's name of the primary error code, "" if the error carries none."""
    name = str(getattr(error, "sqlite_errorname", None) or "")
    return "_".join(name.split("_")[:2])


def is_corruption(error: BaseException) -> bool:
    """Whether the file itself is broken, so that only a new one helps.

    Nothing here violates a constraint, misses a table or reads text that is no text unless
    the file was damaged; so all that is not known to pass counts as damage.
    """
    if isinstance(error, CheckpointError | UnicodeDecodeError):
        return True
    if isinstance(error, sqlite3.ProgrammingError | sqlite3.InterfaceError):
        return False
    return (
        isinstance(error, sqlite3.DatabaseError)
        and sqlite_error_name(error) not in _TRANSIENT_CODES
    )


def store_failure(error: BaseException, path: Path, doing: str, meanwhile: str = "") -> Failure:
    """``error`` as a sentence about the store at ``path``; ``meanwhile`` ends its remedy."""
    said = sqlite_error_name(error)
    cause, remedy, trouble = str(error), "", Trouble.RETRY
    if isinstance(error, OSError):
        cause = error.strerror or cause
    full = said == "SQLITE_FULL" or _errno(error) in {errno.ENOSPC, errno.EDQUOT}
    if full or (said == "SQLITE_IOERR" and _is_disk_full(path.parent)):
        cause, remedy = "the disk is full", f"Free some space for {path.parent}."
    elif said in {"SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM"} or (
        _errno(error) in {errno.EACCES, errno.EPERM, errno.EROFS}
    ):
        trouble = Trouble.DENIED
        remedy = (
            f"Make {path.parent} writable for the user of the agent, or choose another with"
            " state_dir in [agent]."
        )
    elif said in {"SQLITE_BUSY", "SQLITE_LOCKED"}:
        cause, remedy = "another program keeps it locked", "End that program."
    elif said == "SQLITE_IOERR":
        remedy = async_writer.DISK_REMEDY
    remedy = " ".join(part for part in (remedy, meanwhile) if part)
    return Failure(
        STORE_SOURCE,
        f"the store {path}",
        trouble,
        cause[:1].lower() + cause[1:],
        remedy,
        verb=doing,
    )


def store_hang_failure(path: Path) -> Failure:
    """The disk of the store at ``path`` neither takes what is written nor refuses it."""
    return async_writer.hang_failure(STORE_SOURCE, f"the store {path}", BUFFERED_MEANWHILE)


def _is_disk_full(directory: Path) -> bool:
    """SQLite calls it an I/O error when the log's index, 32 KiB at a time, finds no room."""
    try:
        found = os.statvfs(directory)
    except OSError:
        return False
    return found.f_bavail * found.f_frsize < 1 << 16


def _errno(error: BaseException) -> int | None:
    return error.errno if isinstance(error, OSError) else None


_MEASURED, _EMULATED = "wattspan.sqlite", "wattspan-emulated.sqlite"


def store_path(state_dir: Path, *, emulated: bool = False) -> Path:
    """The database in ``state_dir``: an emulated host's joules are kept apart from true ones."""
    return state_dir / (_EMULATED if emulated else _MEASURED)


def file_exists(path: Path) -> bool:
    """Whether there is such a file; StoreError if one may not even look."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except PermissionError as error:
        raise StoreError(
            f"Cannot read {path}: {error.strerror}. Run this as root or as the user of the agent."
        ) from None
    return True


def lock_store(path: Path) -> FileLock:
    """The right to write one store. StoreError names the process that has it, if it is known."""
    try:
        return FileLock(path)
    except LockHeldError as error:
        holder = error.holder
    if holder.pid is None:
        cause = f"it is not known which process has its lock ({holder.doubt})"
        remedy = f"Find it with `fuser -v {path}`, and end it."
    elif holder.pid == holder.noted:
        cause = f"process {holder.pid} is writing it"
        remedy = "Stop that agent, or give this one a state_dir of its own."
    else:
        cause = f"process {holder.pid} has its lock {path}, and has not written its number there"
        remedy = "End it, unless it is an agent that has just begun."
    raise StoreError(
        Failure(
            STORE_SOURCE,
            f"the store {path.with_suffix('')}",
            Trouble.RETRY,
            cause,
            remedy,
            verb="open",
        )
    )


MAX_QUARANTINED = 3

_COMPANIONS = ("-wal", "-shm")


def quarantine_database(path: Path) -> Path:
    """Rename the database at ``path`` to ``NAME.corrupt-<n>`` and return that.

    Its write-ahead log goes with it, so that a person may still recover it. Only the newest few
    are kept.
    """
    numbers = sorted(_quarantine_numbers(path))
    aside = _quarantine_path(path, numbers[-1] + 1 if numbers else 1)
    path.rename(aside)
    wal = _with_suffix(path, "-wal")
    if wal.exists():
        wal.rename(_with_suffix(aside, "-wal"))
    _with_suffix(path, "-shm").unlink(missing_ok=True)
    for number in numbers[: len(numbers) + 1 - MAX_QUARANTINED]:
        for old in (
            _quarantine_path(path, number),
            _with_suffix(_quarantine_path(path, number), "-wal"),
        ):
            old.unlink(missing_ok=True)
    return aside


def remove_companions(path: Path) -> None:
    """Remove what is left of a database whose main file somebody deleted.

    A log without its database would be replayed into the new one.
    """
    for suffix in _COMPANIONS:
        _with_suffix(path, suffix).unlink(missing_ok=True)


def _quarantine_numbers(path: Path) -> list[int]:
    pattern = re.compile(re.escape(path.name) + r"\.corrupt-(\d+)")
    found = (pattern.fullmatch(entry.name) for entry in path.parent.iterdir())
    return [int(match[1]) for match in found if match is not None]


def _quarantine_path(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.corrupt-{number}")


def _with_suffix(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


_CHECK_TIMEOUT = 300 * MILLISECOND
"""A start must not wait for a large file; what the check does not reach is found when used."""

_WAL_LIMIT_BYTES = 4 << 20


def connect(path: Path, clock: Clock) -> sqlite3.Connection:
    """Open or create the store's database.

    Raises sqlite3.Error for what is ruined or cannot be written, and SchemaError.
    """
    if not path.exists():
        remove_companions(path)
    _make_index_private(path)
    database = sqlite3.connect(path, timeout=1.0, isolation_level=None, check_same_thread=False)
    try:
        supported_version(database)
        database.execute("PRAGMA auto_vacuum = INCREMENTAL")  # effective before the first table
        database.execute("PRAGMA journal_mode = WAL").fetchone()
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute(f"PRAGMA journal_size_limit = {_WAL_LIMIT_BYTES}")
        _check_integrity(database, clock)
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


def _check_integrity(database: sqlite3.Connection, clock: Clock) -> None:
    deadline = clock.monotonic() + _CHECK_TIMEOUT
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
    found = schema_version(database)
    database.execute("BEGIN IMMEDIATE")
    try:
        database.execute(f"PRAGMA user_version = {found}")
        database.execute("COMMIT")
    except sqlite3.Error:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise
