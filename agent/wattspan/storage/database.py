"""The SQLite file of the store: schema, path, lock, opening, integrity, quarantine, error texts."""

from __future__ import annotations

import errno
import os
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from wattspan.model import MILLISECOND, Failure, Trouble
from wattspan.ports import Clock, StoreError
from wattspan.storage import async_writer
from wattspan.storage.checkpoints import CheckpointError
from wattspan.util.files import FileLock, LockHeldError

STORE_SOURCE = "store"

APPLICATION_ID = 0x77617474  # "watt"; distinguishes the store from databases of other programs

MINUTE, HOUR, DAY = 60, 3600, 86400

_SCHEMA = Path(__file__).with_name("schema.sql").read_text("utf-8")
_TYPED = tuple(re.split(r"^-- migration .*\n", _SCHEMA, flags=re.MULTILINE)[1:])

UNTYPED_MIGRATIONS = tuple(re.sub(r"\) STRICT\b,?", ")", script) for script in _TYPED)
"""For SQLite before 3.37: Enterprise Linux 8 has 3.26, and 9 has 3.34. Other statements of the
store need 3.25."""

MIGRATIONS = _TYPED if sqlite3.sqlite_version_info >= (3, 37) else UNTYPED_MIGRATIONS
"""The script at index ``n`` migrates version ``n`` to ``n + 1``."""


class SchemaError(Exception):
    """The file has another schema. The message is a clause without a subject."""


def schema_version(database: sqlite3.Connection) -> int:
    """Return the schema version, 0 for an empty file; SchemaError for another database."""
    found = pragma(database, "user_version")
    if pragma(database, "application_id") == APPLICATION_ID:
        return found
    tables = database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if found or tables:
        raise SchemaError("is an SQLite database of another program")
    return 0


def supported_version(database: sqlite3.Connection) -> int:
    """Return the schema version; SchemaError if it is newer than this program."""
    found = schema_version(database)
    if found > len(MIGRATIONS):
        raise SchemaError(
            f"was written by a newer wattspan (schema {found}; this version"
            f" supports {len(MIGRATIONS)})"
        )
    return found


def migrate(database: sqlite3.Connection, migrations: Sequence[str] = MIGRATIONS) -> None:
    """Migrate the schema to the current version, each step in one transaction."""
    present = schema_version(database)
    for number, script in enumerate(migrations[present:], start=present + 1):
        try:
            database.executescript(
                f"BEGIN IMMEDIATE; {script};"
                f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {number};"
                "COMMIT;"
            )
        except sqlite3.Error:
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise


def pragma(database: sqlite3.Connection, name: str) -> int:
    return int(database.execute(f"PRAGMA {name}").fetchone()[0])


@contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """Write in one transaction, which an error rolls back."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise


MAX_NAME_LENGTH = 200
"""Limit of names in the database; the checkpoint keeps whole names."""


def database_text(name: str) -> str:
    """Return ``name`` for SQLite: escaped where it is not Unicode, and shortened."""
    return name.encode("utf-8", "backslashreplace").decode()[:MAX_NAME_LENGTH]


DAMAGE_ERRORS = (sqlite3.Error, CheckpointError, UnicodeDecodeError)
"""Errors of a damaged file. sqlite3 raises the last one if an error text is damaged."""

BUFFERED_MEANWHILE = "The agent keeps new energy in memory and writes it after recovery."

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
    """Return SQLite's name of the primary error code; "" without one."""
    name = str(getattr(error, "sqlite_errorname", None) or "")
    return "_".join(name.split("_")[:2])


def newer_sqlite_needed(error: BaseException) -> str:
    """The cause if SQLite before 3.37 reads typed tables, which it calls malformed; else ""."""
    if 'near "STRICT": syntax error' not in str(error):
        return ""
    return f"its tables need SQLite 3.37 or newer, and this Python has {sqlite3.sqlite_version}"


def is_corruption(error: BaseException) -> bool:
    """Return True if the file is corrupt, so that only a new one helps.

    The store violates no constraint, misses no table and reads no invalid text unless the file
    is damaged; therefore every error that is not known as transient counts as damage.
    """
    if isinstance(error, CheckpointError | UnicodeDecodeError):
        return True
    if isinstance(error, sqlite3.ProgrammingError | sqlite3.InterfaceError):
        return False
    return (
        isinstance(error, sqlite3.DatabaseError)
        and not newer_sqlite_needed(error)
        and sqlite_error_name(error) not in _TRANSIENT_CODES
    )


def store_failure(error: BaseException, path: Path, doing: str, meanwhile: str = "") -> Failure:
    """Return ``error`` as a failure of the store at ``path``; ``meanwhile`` ends its remedy."""
    name = sqlite_error_name(error)
    cause, remedy, trouble = str(error), "", Trouble.RETRY
    if isinstance(error, OSError):
        cause = error.strerror or cause
    full = name == "SQLITE_FULL" or _errno(error) in {errno.ENOSPC, errno.EDQUOT}
    if full or (name == "SQLITE_IOERR" and _is_disk_full(path.parent)):
        cause, remedy = "the disk is full", f"Free some space for {path.parent}."
    elif name in {"SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM"} or (
        _errno(error) in {errno.EACCES, errno.EPERM, errno.EROFS}
    ):
        trouble = Trouble.DENIED
        remedy = (
            f"Make {path.parent} writable for the user of the agent, or set another directory as"
            " state_dir in [agent]."
        )
    elif name in {"SQLITE_BUSY", "SQLITE_LOCKED"}:
        cause, remedy = "another program holds its lock", "End that program."
    elif newer := newer_sqlite_needed(error):
        cause, remedy = newer, "Use such a Python, or move the file away to start a new one."
    elif name == "SQLITE_IOERR":
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
    """Return the failure of a hanging disk of the store at ``path``."""
    return async_writer.hang_failure(STORE_SOURCE, f"the store {path}", BUFFERED_MEANWHILE)


def _is_disk_full(directory: Path) -> bool:
    """SQLite reports an I/O error if the index of the log, 32 KiB at a time, finds no space."""
    try:
        found = os.statvfs(directory)
    except OSError:
        return False
    return found.f_bavail * found.f_frsize < 1 << 16


def _errno(error: BaseException) -> int | None:
    return error.errno if isinstance(error, OSError) else None


_MEASURED, _EMULATED = "wattspan.sqlite", "wattspan-emulated.sqlite"


def store_path(state_dir: Path, *, emulated: bool = False) -> Path:
    """Return the database in ``state_dir``; emulated hosts have their own."""
    return state_dir / (_EMULATED if emulated else _MEASURED)


def file_exists(path: Path) -> bool:
    """Return True if the file exists; StoreError without permission to check."""
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
    """Take the lock of a store. StoreError names the process that holds it, if known."""
    try:
        return FileLock(path)
    except LockHeldError as error:
        holder = error.holder
    if holder.pid is None:
        cause = f"an unknown process holds its lock ({holder.description})"
        remedy = f"Find it with `fuser -v {path}`, and end it."
    elif holder.pid == holder.recorded_pid:
        cause = f"process {holder.pid} is writing it"
        remedy = "Stop that agent, or set another state_dir for this one."
    else:
        cause = f"process {holder.pid} holds its lock {path} and has not written its pid there"
        remedy = "End it, unless it is an agent that has just started."
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


def quarantine_database(path: Path) -> Path:
    """Rename the database at ``path`` to ``NAME.corrupt-<n>`` and return the new path.

    Its write-ahead log is renamed too, for recovery by hand. Only the newest few are kept.
    """
    numbers = sorted(_quarantine_numbers(path))
    aside = _quarantine_path(path, numbers[-1] + 1 if numbers else 1)
    path.rename(aside)
    wal = companion(path, "-wal")
    if wal.exists():
        wal.rename(companion(aside, "-wal"))
    companion(path, "-shm").unlink(missing_ok=True)
    for number in numbers[: len(numbers) + 1 - MAX_QUARANTINED]:
        old = _quarantine_path(path, number)
        old.unlink(missing_ok=True)
        companion(old, "-wal").unlink(missing_ok=True)
    return aside


def remove_companions(path: Path) -> None:
    """Remove the companion files of a database whose main file was deleted.

    SQLite would replay a log without its database into the new one.
    """
    for suffix in ("-wal", "-shm"):
        companion(path, suffix).unlink(missing_ok=True)


def _quarantine_numbers(path: Path) -> list[int]:
    pattern = re.compile(re.escape(path.name) + r"\.corrupt-(\d+)")
    found = (pattern.fullmatch(entry.name) for entry in path.parent.iterdir())
    return [int(match[1]) for match in found if match is not None]


def _quarantine_path(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.corrupt-{number}")


def companion(path: Path, suffix: str) -> Path:
    """Return a file of SQLite next to the database: ``-wal`` or ``-shm``."""
    return path.with_name(path.name + suffix)


_CHECK_TIMEOUT = 300 * MILLISECOND
"""Time limit of the check at start; damage in the unchecked rest shows in use."""

_CACHE_KIB = 512
"""Pages of the database in memory: those of the newest minute. The kernel caches the others."""

_WAL_LIMIT_BYTES = 4 << 20


def connect(path: Path, clock: Clock) -> sqlite3.Connection:
    """Open or create the database of the store.

    Raises sqlite3.Error for a corrupt or read-only file, and SchemaError.
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
        database.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        _check_integrity(database, clock)
        migrate(database)
        _prove_writable(database)
    except BaseException:
        database.close()
        raise
    return database


def _make_index_private(path: Path) -> None:
    """Restrict SQLite's lock file (``-shm``) to its owner before SQLite opens it.

    SQLite would give the file the mode of the database, and read permission allows locking: a
    member of the group that reads the history could block every write. A file of an earlier
    version may be open elsewhere, so it is replaced. The caller holds the lock of the store.
    """
    index = companion(path, "-shm")
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
    """Write the schema version again, to detect a full disk or a read-only file."""
    found = schema_version(database)
    with transaction(database):
        database.execute(f"PRAGMA user_version = {found}")
