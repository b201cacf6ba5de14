"""The runs of recurring jobs in an SQLite file, by principal, job and GPUs.

The agent keeps one such file; a job that moves between hosts may use one of its own on a shared
disk. Every change is one transaction, so that concurrent runs never choose the same trial. Users
share the places, and the containers of a user share those of the user.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec

from wattspan.model import Principal
from wattspan.model.consumers import principal_text
from wattspan.recurring.jobs import (
    MAX_RUNS,
    BatchSizeChoice,
    JobRuns,
    RecurringJobTerms,
    TrainingRun,
    TrialOutcome,
    next_run,
)

MAX_NAME_LENGTH = 200
MAX_SHOWN = 32
"""Jobs that one request shows."""

OPEN_DAYS = 90
"""A run that has not ended after this time is lost."""

LOCK_TIMEOUT = 10.0
"""Seconds to wait for another process that writes the file."""

APPLICATION_ID = 0x77726563  # "wrec"
VERSION = 2

_TABLES, _PART = Path(__file__).with_name("run_book.sql"), r"^-- part: .*\n"
"""The script that makes the tables, in three parts, and the comment between them."""

WHOLE_FILE = 0
"""The key of the holder of everything."""

JOB_BYTES = 512
"""Upper estimate of the bytes of a job with its indexes, without its names and terms."""

SLICE = 100
"""Rows that one request removes of each kind, so that no request holds the lock for long."""


class Statement(StrEnum):
    """All statements on the rows of a file, which ``run_book.sql`` makes.

    None reads rows of other principals, except the one that is next to be removed: a test checks
    the query plans.
    """

    HOLDER = "SELECT key, parent, jobs, open, last_run, dropped FROM holder WHERE name = ?"
    ADD_HOLDER = "INSERT INTO holder (parent, name) VALUES (?, ?)"
    SHARING_JOBS = (
        "SELECT count(*) FROM"
        " (SELECT 1 FROM holder WHERE parent = ? AND jobs > 0 AND key <> ? LIMIT ?)"
    )
    SHARING_OPEN = (
        "SELECT count(*) FROM"
        " (SELECT 1 FROM holder WHERE parent = ? AND open > 0 AND key <> ? LIMIT ?)"
    )
    BYTES = "SELECT bytes FROM holder WHERE key = ?"
    LARGEST = "SELECT key, runs FROM holder WHERE parent = ? ORDER BY bytes DESC LIMIT 1"
    COUNT_DROPPED = "UPDATE holder SET dropped = dropped + ? WHERE key = ?"
    REMOVE_HOLDER = "DELETE FROM holder WHERE key = ?"
    REMOVE_IDLE_HOLDERS = (
        "DELETE FROM holder WHERE key IN (SELECT key FROM holder"
        " WHERE runs = 0 AND parent > 0 AND used < ? ORDER BY used LIMIT ?)"
    )
    JOB = (
        "SELECT key, terms, runs FROM job"
        " WHERE owner = ? AND name = ? AND gpus = ? AND forgotten = 0"
    )
    ADD_JOB = "INSERT INTO job (owner, name, gpus, terms, bytes) VALUES (?, ?, ?, ?, ?)"
    NEWEST_JOBS = (
        "SELECT key, gpus, terms FROM job"
        " WHERE owner = ? AND forgotten = 0 ORDER BY newest DESC LIMIT ?"
    )
    JOBS_OF_NAME = (
        "SELECT key, gpus, terms FROM job"
        " WHERE owner = ? AND name = ? AND forgotten = 0 ORDER BY gpus LIMIT ?"
    )
    COUNT_JOBS_OF_NAME = "SELECT count(*) FROM job WHERE owner = ? AND name = ? AND forgotten = 0"
    FORGET_OPEN_RUNS = (
        "UPDATE run SET outcome = 'lost' WHERE outcome IS NULL AND job IN"
        " (SELECT key FROM job WHERE owner = ? AND name = ? AND forgotten = 0)"
    )
    FORGET_JOBS = "UPDATE job SET forgotten = 1 WHERE owner = ? AND name = ? AND forgotten = 0"
    FORGOTTEN_JOB = "SELECT key FROM job WHERE forgotten = 1 LIMIT 1"
    ADD_RUN = (
        "INSERT INTO run (owner, number, job, batch_size, host, pid, process_started, began)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
    )
    RUNS = (
        "SELECT batch_size, outcome, energy, seconds, power, epochs, number FROM run"
        " WHERE job = ? ORDER BY number DESC LIMIT ?"
    )
    RUN = (
        "SELECT run.key, outcome FROM run JOIN job ON job.key = run.job"
        " WHERE run.owner = ? AND number = ? AND forgotten = 0"
    )
    END_RUN = (
        "UPDATE run SET outcome = ?, energy = ?, seconds = ?, power = ?, epochs = ? WHERE key = ?"
    )
    OPEN_RUNS = (
        "SELECT key, host, pid, process_started FROM run"
        " WHERE owner = ? AND outcome IS NULL ORDER BY number LIMIT ?"
    )
    LOSE_RUN = "UPDATE run SET outcome = 'lost' WHERE key = ? AND outcome IS NULL"
    EXPIRE_RUNS = (
        "UPDATE run SET outcome = 'lost' WHERE key IN (SELECT key FROM run"
        " WHERE outcome IS NULL AND began < ? ORDER BY began LIMIT ?)"
    )
    REMOVE_OLDEST_OF_JOB = (
        "DELETE FROM run WHERE key IN (SELECT key FROM run WHERE job = ? ORDER BY number LIMIT ?)"
    )
    REMOVE_OLDEST_OF_OWNER = (
        "DELETE FROM run WHERE key IN (SELECT key FROM run WHERE owner = ? ORDER BY number LIMIT ?)"
    )


class RunBookLimits(NamedTuple):
    """Limits of a file. Beyond ``size`` bytes the largest holder loses its oldest runs."""

    jobs: int = 1000  # of a user, by name and GPUs
    open_runs: int = 256  # of a user
    runs: int = MAX_RUNS  # of a job
    size: int = 256 * 2**20  # a million runs


def run_book_path(state_dir: Path, *, emulated: bool) -> Path:
    """The agent's file in its state directory; emulated hosts have their own."""
    return state_dir / f"recurring{'-emulated' if emulated else ''}.sqlite"


class RunBookError(Exception):
    """The file is not usable; the text names it, the cause and the remedy."""


class TermsChangedError(ValueError):
    """A job of this name exists with other terms."""


class UnknownRunError(LookupError):
    """The user has no such run."""


class NoRoomError(Exception):
    """The principal has as many jobs or open runs as it may; the text says how many."""


@dataclass(frozen=True, slots=True)
class RunningProcess:
    """The process of a run: its host, its pid there, and its start time in clock ticks."""

    host: str
    pid: int
    started: int


class BegunRun(NamedTuple):
    """A run that has begun, and its batch size. ``key`` numbers the runs of its principal."""

    key: int
    choice: BatchSizeChoice


class _Holder(NamedTuple):
    """A principal in the file."""

    key: int
    parent: int
    jobs: int
    open: int
    last_run: int
    dropped: int


@dataclass(frozen=True, slots=True)
class KnownJobs:
    """Jobs of a principal; ``hidden`` further ones are not shown.

    ``dropped`` runs of the principal have made room for newer ones.
    """

    shown: tuple[JobRuns, ...] = ()
    hidden: int = 0
    dropped: int = 0


class RunBook:
    """Jobs and runs in one file. For one thread; several processes may open the same file."""

    def __init__(
        self,
        path: Path,
        limits: RunBookLimits = RunBookLimits(),  # noqa: B008 - immutable
        connect: Callable[..., sqlite3.Connection] = sqlite3.connect,
    ) -> None:
        """Open the file, or create it for its owner alone. RunBookError."""
        self._path, self._limits = path, limits
        try:
            # SQLite gives its own permissions to the journal, too.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._database = connect(path, timeout=LOCK_TIMEOUT, isolation_level=None)
        except (OSError, sqlite3.Error) as error:
            raise self._error(error) from None
        try:
            self._prepare()
        except sqlite3.Error as error:
            self._database.close()
            raise self._error(error) from None
        except BaseException:
            self._database.close()
            raise

    def close(self) -> None:
        self._database.close()

    def begin(
        self,
        owner: Principal,
        terms: RecurringJobTerms,
        gpus: str,
        process: RunningProcess,
        wall: int,
    ) -> BegunRun:
        """Begin a run of a job at the Unix time ``wall`` in seconds, and choose its batch size.

        A new job is created. TermsChangedError, NoRoomError, RunBookError.
        """
        with self._transaction():
            holder = self._holder(owner) or self._add_holder(owner)
            job, stored = self._job(holder, terms, gpus)
            if holder.open >= self._share(holder, Statement.SHARING_OPEN, self._limits.open_runs):
                raise NoRoomError(f"{holder.open} runs that have not ended")
            runs = self._runs(job)
            # Each choice has numbers of its own, and is the same when it is computed again.
            last = runs[-1].key if runs else 0
            rng = Random(f"{terms.policy.seed}/{terms.name}/{last}")  # noqa: S311
            choice = next_run(terms, runs, rng)
            number, ran = holder.last_run + 1, (process.host, process.pid, process.started)
            values = (holder.key, number, job, choice.batch_size, *ran, wall)
            self._database.execute(Statement.ADD_RUN, values)
            if (excess := stored + 1 - self._limits.runs) > 0:
                self._drop(holder.key, Statement.REMOVE_OLDEST_OF_JOB, job, min(excess, SLICE))
            self._make_room()
        return BegunRun(number, choice)

    def end(self, owner: Principal, key: int, ended: TrainingRun) -> bool:
        """Record the end of a run; False if it had ended already: the first report counts.

        The batch size remains that of its begin. UnknownRunError, RunBookError.
        """
        with self._transaction():
            holder = self._holder(owner)
            row = holder and self._one(Statement.RUN, (holder.key, key))
            if row is None:
                raise UnknownRunError(f"run {key}")
            if row[1] is not None:
                return False
            figures = ended.energy, ended.seconds, ended.power, ended.epochs
            self._database.execute(Statement.END_RUN, (ended.outcome, *figures, row[0]))
        return True

    def end_lost(self, owner: Principal, lives: Callable[[RunningProcess], bool]) -> int:
        """End the runs whose processes have ended without a report; returns their number.

        No other process waits for the calls of ``lives``.
        """
        with self._guarded():
            holder = self._holder(owner)
            rows = (
                self._all(Statement.OPEN_RUNS, (holder.key, self._limits.open_runs))
                if holder is not None and holder.open
                else []
            )
        lost = [(key,) for key, *process in rows if not lives(RunningProcess(*process))]
        if lost:
            with self._transaction():
                self._database.executemany(Statement.LOSE_RUN, lost)
        return len(lost)

    def tidy(self, wall: int) -> None:
        """Remove a slice of forgotten runs, and end a slice of those open for too long.

        Also remove principals without runs after that time: their numbers then begin anew.
        """
        expired = (wall - OPEN_DAYS * 86_400, SLICE)
        with self._transaction():
            self._database.execute(Statement.EXPIRE_RUNS, expired)
            self._database.execute(Statement.REMOVE_IDLE_HOLDERS, expired)
            if (row := self._one(Statement.FORGOTTEN_JOB)) is not None:
                self._database.execute(Statement.REMOVE_OLDEST_OF_JOB, (row[0], SLICE))

    def terms(self, owner: Principal, name: str, gpus: str) -> RecurringJobTerms | None:
        """The terms of a job; None for an unknown one."""
        with self._guarded():
            holder = self._holder(owner)
            row = holder and self._one(Statement.JOB, (holder.key, name, gpus))
            return None if row is None else _decoded(row[1])

    def jobs(self, owner: Principal, name: str | None = None) -> KnownJobs:
        """The jobs of a principal with the newest runs, or those of one name, with their runs."""
        with self._guarded():
            holder = self._holder(owner)
            if holder is None:
                return KnownJobs()
            if name is None:
                count = holder.jobs
                rows = self._all(Statement.NEWEST_JOBS, (holder.key, MAX_SHOWN))
            else:
                (count,) = self._one(Statement.COUNT_JOBS_OF_NAME, (holder.key, name)) or (0,)
                rows = self._all(Statement.JOBS_OF_NAME, (holder.key, name, MAX_SHOWN))
            found = [
                JobRuns(_decoded(terms), gpus, tuple(self._runs(key))) for key, gpus, terms in rows
            ]
        found.sort(key=lambda job: (job.terms.name, job.gpus))
        return KnownJobs(tuple(found), count - len(found), holder.dropped)

    def forget(self, owner: Principal, name: str) -> bool:
        """Forget all runs of a job on all GPUs; False if there are none.

        Calls of `tidy` remove them from the file.
        """
        with self._transaction():
            holder = self._holder(owner)
            if holder is None:
                return False
            self._database.execute(Statement.FORGET_OPEN_RUNS, (holder.key, name))
            forgotten = self._database.execute(Statement.FORGET_JOBS, (holder.key, name))
        return forgotten.rowcount > 0

    # ------------------------------------------------------------------------------- details

    def _prepare(self) -> None:
        """Create the tables of a new file, or bring those of an earlier version up to date."""
        if self._version() != VERSION:
            self._database.execute("BEGIN IMMEDIATE")
            # Another process may have done it meanwhile.
            if (version := self._version()) != VERSION:
                parts = re.split(_PART, _TABLES.read_text("utf-8"), flags=re.MULTILINE)
                script = parts[1] if version is None else "".join(parts)
                for statement in statements_of(script):
                    self._database.execute(statement)
            self._database.execute("COMMIT")
        # A file that is larger than its rows explain does not grow further.
        (page,) = self._database.execute("PRAGMA page_size").fetchone()
        pages = 2 * max(self._limits.size, 2**20) // page
        self._database.execute(f"PRAGMA max_page_count = {pages}")

    def _version(self) -> int | None:
        """The version of the tables; None without any. RunBookError."""
        (application,) = self._database.execute("PRAGMA application_id").fetchone()
        (version,) = self._database.execute("PRAGMA user_version").fetchone()
        if application == APPLICATION_ID and version in (1, VERSION):
            return int(version)
        if self._database.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is None:
            return None
        if application != APPLICATION_ID:
            raise RunBookError(
                f"{self._path} is an SQLite file of another program. Choose another path."
            )
        raise RunBookError(
            f"{self._path} was written by a newer wattspan (schema {version}; this version "
            f"supports {VERSION}). Upgrade wattspan."
        )

    def _holder(self, owner: Principal) -> _Holder | None:
        row = self._one(Statement.HOLDER, (principal_text(owner),))
        return None if row is None else _Holder(*row)

    def _add_holder(self, owner: Principal) -> _Holder:
        user = json.dumps(owner.path[0], separators=(",", ":"))
        row = self._one(Statement.HOLDER, (user,))
        parent = row[0] if row else self._insert(Statement.ADD_HOLDER, (WHOLE_FILE, user))
        key = self._insert(Statement.ADD_HOLDER, (parent, principal_text(owner)))
        return _Holder(key, parent, 0, 0, 0, 0)

    def _share(self, holder: _Holder, others: Statement, most: int) -> int:
        """The part of ``most`` places of a user that this principal may take."""
        (sharing,) = self._one(others, (holder.parent, holder.key, most)) or (0,)
        return most // (1 + int(sharing))

    def _job(self, holder: _Holder, terms: RecurringJobTerms, gpus: str) -> tuple[int, int]:
        """The key of a job, and its stored runs."""
        row = self._one(Statement.JOB, (holder.key, terms.name, gpus))
        if row is not None:
            if difference := _decoded(row[1]).difference(terms):
                raise TermsChangedError(difference)
            return int(row[0]), int(row[2])
        if holder.jobs >= self._share(holder, Statement.SHARING_JOBS, self._limits.jobs):
            raise NoRoomError(f"{holder.jobs} recurring jobs")
        encoded = msgspec.json.encode(terms)
        size = JOB_BYTES + 8 * len(terms.name) + 8 * len(gpus) + len(encoded)
        values = (holder.key, terms.name, gpus, encoded, size)
        return self._insert(Statement.ADD_JOB, values), 0

    def _runs(self, job: int) -> list[TrainingRun]:
        rows = self._all(Statement.RUNS, (job, self._limits.runs))
        return [
            TrainingRun(size, None if outcome is None else TrialOutcome(outcome), *figures)
            for size, outcome, *figures in reversed(rows)
        ]

    def _make_room(self) -> None:
        """Drop the oldest runs of the largest principal of the largest user, up to a slice."""
        for _ in range(SLICE):
            (size,) = self._one(Statement.BYTES, (WHOLE_FILE,)) or (0,)
            if size <= self._limits.size:
                return
            (user, _) = self._one(Statement.LARGEST, (WHOLE_FILE,)) or (0, 0)
            (key, runs) = self._one(Statement.LARGEST, (user,)) or (0, 0)
            self._drop(key, Statement.REMOVE_OLDEST_OF_OWNER, key, 1)
            if runs <= 1:
                self._database.execute(Statement.REMOVE_HOLDER, (key,))

    def _drop(self, holder: int, statement: Statement, of: int, most: int) -> None:
        dropped = self._database.execute(statement, (of, most)).rowcount
        self._database.execute(Statement.COUNT_DROPPED, (dropped, holder))

    def _one(self, query: Statement, values: Sequence[object] = ()) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = self._database.execute(query, values).fetchone()
        return row

    def _all(self, query: Statement, values: Sequence[object]) -> list[tuple[Any, ...]]:
        return self._database.execute(query, values).fetchall()

    def _insert(self, statement: Statement, values: Sequence[object]) -> int:
        key = self._database.execute(statement, values).lastrowid
        assert key is not None  # noqa: S101 - a row was inserted
        return key

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._guarded():
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """RunBookError for errors of the database, and for contents that are no jobs or runs."""
        try:
            yield
        except (TermsChangedError, UnknownRunError, NoRoomError):
            raise
        except (sqlite3.Error, ValueError) as error:  # msgspec's errors are ValueErrors
            raise self._error(error) from None

    def _error(self, error: Exception) -> RunBookError:
        cause = error.strerror if isinstance(error, OSError) else error
        remedy = "Repair or remove the file; its jobs then start anew."
        if 'near "STRICT": syntax error' in str(error):  # of files by earlier versions
            cause = f"SQLite {sqlite3.sqlite_version} cannot read its typed tables"
            remedy = "Use a Python with SQLite 3.37 or newer, or another file."
        return RunBookError(f"{self._path}: {cause}. {remedy}")


def _decoded(terms: bytes) -> RecurringJobTerms:
    return msgspec.json.decode(terms, type=RecurringJobTerms)


def statements_of(script: str) -> Iterator[str]:
    """The statements of a script one by one: sqlite3's own `executescript` would commit first."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
