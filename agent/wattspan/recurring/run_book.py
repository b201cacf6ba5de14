"""The runs of recurring jobs in an SQLite file, by user, job and GPUs.

The agent keeps one such file; a job that moves between hosts may use one of its own on a shared
disk. Every change is one transaction, so that concurrent runs never choose the same trial.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from wattspan.recurring.jobs import (
    MAX_RUNS,
    JobRuns,
    RecurringJobTerms,
    TrainingRun,
    next_run,
)
from wattspan.recurring.search import BatchSizeChoice, TrialOutcome

APPLICATION_ID = 0x77726563  # "wrec"
VERSION = 1

MAX_JOBS = 1000
"""Jobs of one user, by name and GPUs."""

MAX_NAME_LENGTH = 200
LOCK_TIMEOUT = 10.0
"""Seconds to wait for another process that writes the file."""

_SCHEMA = f"""
CREATE TABLE job (
    key INTEGER PRIMARY KEY,
    owner INTEGER NOT NULL,
    name TEXT NOT NULL,
    gpus TEXT NOT NULL,
    terms BLOB NOT NULL,
    UNIQUE (owner, name, gpus)
) STRICT;

CREATE TABLE run (
    key INTEGER PRIMARY KEY,
    job INTEGER NOT NULL REFERENCES job (key) ON DELETE CASCADE,
    batch_size INTEGER NOT NULL,
    host TEXT NOT NULL,
    pid INTEGER NOT NULL,
    process_started INTEGER NOT NULL,
    began INTEGER NOT NULL,
    outcome TEXT,
    energy REAL NOT NULL DEFAULT 0,
    seconds REAL NOT NULL DEFAULT 0,
    power REAL NOT NULL DEFAULT 0,
    epochs INTEGER NOT NULL DEFAULT 0
) STRICT;

CREATE INDEX run_of_job ON run (job, key);

PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {VERSION};
"""


def run_book_path(state_dir: Path, *, emulated: bool) -> Path:
    """The agent's file in its state directory; emulated hosts have their own."""
    return state_dir / f"recurring{'-emulated' if emulated else ''}.sqlite"


class RunBookError(Exception):
    """The file is not usable; the text names it, the cause and the remedy."""


class TermsChangedError(ValueError):
    """A job of this name exists with other terms."""


class UnknownRunError(LookupError):
    """The user has no such run."""


class TooManyJobsError(Exception):
    """The user has no room for a further job."""


@dataclass(frozen=True, slots=True)
class RunningProcess:
    """The process of a run: its host, its pid there, and its start time in clock ticks."""

    host: str
    pid: int
    started: int


@dataclass(frozen=True, slots=True)
class BegunRun:
    """A run that has begun, and its batch size."""

    key: int
    choice: BatchSizeChoice


class RunBook:
    """Jobs and runs in one file. For one thread; several processes may open the same file."""

    def __init__(self, path: Path) -> None:
        """Open the file, or create it for its owner alone. RunBookError."""
        self._path = path
        try:
            # SQLite gives its own permissions to the journal, too.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise self._error(error) from None
        try:
            self._database = sqlite3.connect(path, timeout=LOCK_TIMEOUT, isolation_level=None)
        except sqlite3.Error as error:
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
        self, owner: int, terms: RecurringJobTerms, gpus: str, process: RunningProcess, wall: int
    ) -> BegunRun:
        """Begin a run of a job at the Unix time ``wall`` in seconds, and choose its batch size.

        A new job is created. TermsChangedError, TooManyJobsError, RunBookError.
        """
        with self._transaction():
            key = self._job_key(owner, terms, gpus)
            runs = self._runs(key)
            # Each choice has numbers of its own, and is the same when it is computed again.
            last = runs[-1].key if runs else 0
            rng = Random(f"{terms.policy.seed}/{terms.name}/{last}")  # noqa: S311
            choice = next_run(terms, runs, rng)
            run = self._insert(
                "INSERT INTO run (job, batch_size, host, pid, process_started, began)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                (key, choice.batch_size, process.host, process.pid, process.started, wall),
            )
        return BegunRun(run, choice)

    def end(self, owner: int, key: int, ended: TrainingRun) -> bool:
        """Record the end of a run; False if it had ended already: the first report counts.

        The batch size remains that of its begin. UnknownRunError, RunBookError.
        """
        with self._transaction():
            row = self._one(
                "SELECT outcome FROM run JOIN job ON job.key = run.job"
                " WHERE run.key = ? AND owner = ?",
                (key, owner),
            )
            if row is None:
                raise UnknownRunError(f"run {key}")
            if row[0] is not None:
                return False
            self._database.execute(
                "UPDATE run SET outcome = ?, energy = ?, seconds = ?, power = ?, epochs = ?"
                " WHERE key = ?",
                (ended.outcome, ended.energy, ended.seconds, ended.power, ended.epochs, key),
            )
        return True

    def end_lost(self, lives: Callable[[RunningProcess], bool]) -> int:
        """End the runs whose processes have ended without a report; returns their number."""
        with self._transaction():
            rows = self._database.execute(
                "SELECT key, host, pid, process_started FROM run WHERE outcome IS NULL"
            ).fetchall()
            lost = [
                (TrialOutcome.LOST, key)
                for key, *process in rows
                if not lives(RunningProcess(*process))
            ]
            self._database.executemany("UPDATE run SET outcome = ? WHERE key = ?", lost)
        return len(lost)

    def jobs(self, owner: int, name: str | None = None) -> list[JobRuns]:
        """The jobs of a user, or those of one name, with their runs."""
        with self._guarded():
            rows = self._database.execute(
                "SELECT key, gpus, terms FROM job"
                " WHERE owner = ? AND (name = ? OR ? IS NULL) ORDER BY name, gpus",
                (owner, name, name),
            ).fetchall()
            return [
                JobRuns(
                    msgspec.json.decode(terms, type=RecurringJobTerms), gpus, tuple(self._runs(key))
                )
                for key, gpus, terms in rows
            ]

    def forget(self, owner: int, name: str) -> bool:
        """Delete all runs of a job on all GPUs; False if there are none."""
        with self._transaction():
            deleted = self._database.execute(
                "DELETE FROM job WHERE owner = ? AND name = ?", (owner, name)
            )
        return deleted.rowcount > 0

    # ------------------------------------------------------------------------------- details

    def _prepare(self) -> None:
        """Create the tables of a new file."""
        self._database.execute("PRAGMA foreign_keys = ON")
        with closing(self._database.cursor()) as cursor:
            (application,) = cursor.execute("PRAGMA application_id").fetchone()
            (version,) = cursor.execute("PRAGMA user_version").fetchone()
            (tables,) = cursor.execute("SELECT count(*) FROM sqlite_schema").fetchone()
            if tables and application != APPLICATION_ID:
                raise RunBookError(
                    f"{self._path} is an SQLite file of another program. Choose another path."
                )
            if version > VERSION:
                raise RunBookError(
                    f"{self._path} was written by a newer wattspan (schema {version}; this version "
                    f"supports {VERSION}). Upgrade wattspan."
                )
            if not tables:
                cursor.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")

    def _job_key(self, owner: int, terms: RecurringJobTerms, gpus: str) -> int:
        row = self._one(
            "SELECT key, terms FROM job WHERE owner = ? AND name = ? AND gpus = ?",
            (owner, terms.name, gpus),
        )
        if row is not None:
            known = msgspec.json.decode(row[1], type=RecurringJobTerms)
            if difference := known.difference(terms):
                raise TermsChangedError(difference)
            return int(row[0])
        (count,) = self._one("SELECT count(*) FROM job WHERE owner = ?", (owner,)) or (0,)
        if count >= MAX_JOBS:
            raise TooManyJobsError(f"{count} jobs")
        return self._insert(
            "INSERT INTO job (owner, name, gpus, terms) VALUES (?, ?, ?, ?)",
            (owner, terms.name, gpus, msgspec.json.encode(terms)),
        )

    def _runs(self, job: int) -> list[TrainingRun]:
        rows = self._database.execute(
            "SELECT batch_size, outcome, energy, seconds, power, epochs, key FROM run"
            " WHERE job = ? ORDER BY key DESC LIMIT ?",
            (job, MAX_RUNS),
        ).fetchall()
        return [
            TrainingRun(size, None if outcome is None else TrialOutcome(outcome), *figures)
            for size, outcome, *figures in reversed(rows)
        ]

    def _one(self, query: str, values: Sequence[object]) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = self._database.execute(query, values).fetchone()
        return row

    def _insert(self, statement: str, values: Sequence[object]) -> int:
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
        except (TermsChangedError, UnknownRunError, TooManyJobsError):
            raise
        except (sqlite3.Error, ValueError) as error:  # msgspec's errors are ValueErrors
            raise self._error(error) from None

    def _error(self, error: Exception) -> RunBookError:
        cause = error.strerror if isinstance(error, OSError) else error
        return RunBookError(
            f"{self._path}: {cause}. Repair or remove the file; its jobs then start anew."
        )
