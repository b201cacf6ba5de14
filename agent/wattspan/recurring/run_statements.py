"""The tables of a file of runs, and every statement on them.

A holder is the file (key 0), a user or pod below it, or a principal below that; triggers keep the
sums of its jobs, runs and bytes. No statement reads rows of other principals, except the one that
is next to be removed: a test checks the query plans. All hosts of a shared file can read it: every
statement works with SQLite 3.25.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from enum import StrEnum

APPLICATION_ID = 0x77726563  # "wrec"
VERSION = 2

WHOLE_FILE = 0
"""The key of the holder of everything."""

RUN_BYTES = 256
HOLDER_BYTES = 1024
JOB_BYTES = 512
"""Upper estimates of the bytes of a row with its indexes; names and terms of a job are added."""

SLICE = 100
"""Rows that one request removes of each kind, so that no request holds the lock for long."""

_LEVELS = "({}, (SELECT parent FROM holder WHERE key = {}), 0)"


def _change(holder: str, changes: str) -> str:
    return f"UPDATE holder SET {changes} WHERE key IN {_LEVELS.format(holder, holder)};"  # noqa: S608


SCHEMA = f"""
CREATE TABLE holder (
    key INTEGER PRIMARY KEY,
    parent INTEGER,
    name TEXT NOT NULL UNIQUE,
    jobs INTEGER NOT NULL DEFAULT 0,
    runs INTEGER NOT NULL DEFAULT 0,
    open INTEGER NOT NULL DEFAULT 0,
    bytes INTEGER NOT NULL DEFAULT 0,
    dropped INTEGER NOT NULL DEFAULT 0,
    last_run INTEGER NOT NULL DEFAULT 0,
    used INTEGER NOT NULL DEFAULT 0
);

CREATE TABLE job (
    key INTEGER PRIMARY KEY,
    owner INTEGER NOT NULL,
    name TEXT NOT NULL,
    gpus TEXT NOT NULL,
    terms BLOB NOT NULL,
    bytes INTEGER NOT NULL,
    runs INTEGER NOT NULL DEFAULT 0,
    newest INTEGER NOT NULL DEFAULT 0,
    forgotten INTEGER NOT NULL DEFAULT 0
);

CREATE TABLE run (
    key INTEGER PRIMARY KEY,
    owner INTEGER NOT NULL,
    number INTEGER NOT NULL,
    job INTEGER NOT NULL,
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
);

CREATE INDEX holder_by_size ON holder (parent, bytes);
CREATE INDEX holder_with_open_runs ON holder (parent) WHERE open > 0;
CREATE INDEX holder_with_jobs ON holder (parent) WHERE jobs > 0;
CREATE INDEX holder_without_runs ON holder (used) WHERE runs = 0 AND parent > 0;
CREATE UNIQUE INDEX job_by_name ON job (owner, name, gpus) WHERE forgotten = 0;
CREATE INDEX job_by_use ON job (owner, newest) WHERE forgotten = 0;
CREATE INDEX forgotten_jobs ON job (forgotten) WHERE forgotten = 1;
CREATE UNIQUE INDEX run_by_number ON run (owner, number);
CREATE INDEX run_of_job ON run (job, number);
CREATE INDEX run_open_of_owner ON run (owner, number) WHERE outcome IS NULL;
CREATE INDEX run_open_of_job ON run (job) WHERE outcome IS NULL;
CREATE INDEX run_open_by_age ON run (began) WHERE outcome IS NULL;

CREATE TRIGGER holder_added AFTER INSERT ON holder WHEN NEW.parent > 0 BEGIN
    UPDATE holder SET bytes = bytes + {HOLDER_BYTES} WHERE key IN (0, NEW.parent, NEW.key);
END;
CREATE TRIGGER holder_removed AFTER DELETE ON holder WHEN OLD.parent > 0 BEGIN
    UPDATE holder SET bytes = bytes - {HOLDER_BYTES} WHERE key IN (0, OLD.parent);
    DELETE FROM holder WHERE key = OLD.parent
        AND NOT EXISTS (SELECT 1 FROM holder WHERE parent = OLD.parent);
END;
CREATE TRIGGER job_added AFTER INSERT ON job BEGIN
    {_change("NEW.owner", "jobs = jobs + 1, bytes = bytes + NEW.bytes")}
END;
CREATE TRIGGER job_forgotten AFTER UPDATE OF forgotten ON job BEGIN
    {_change("NEW.owner", "jobs = jobs - 1")}
END;
CREATE TRIGGER job_removed AFTER DELETE ON job BEGIN
    {_change("OLD.owner", "jobs = jobs - 1 + OLD.forgotten, bytes = bytes - OLD.bytes")}
END;
CREATE TRIGGER run_added AFTER INSERT ON run BEGIN
    UPDATE job SET runs = runs + 1, newest = max(newest, NEW.number) WHERE key = NEW.job;
    {
    _change(
        "NEW.owner",
        "last_run = max(last_run, NEW.number), runs = runs + 1,"
        f" open = open + (NEW.outcome IS NULL), bytes = bytes + {RUN_BYTES},"
        " used = max(used, NEW.began)",
    )
}
END;
CREATE TRIGGER run_ended AFTER UPDATE OF outcome ON run
    WHEN OLD.outcome IS NULL AND NEW.outcome IS NOT NULL BEGIN
    {_change("NEW.owner", "open = open - 1")}
END;
CREATE TRIGGER run_removed AFTER DELETE ON run BEGIN
    UPDATE job SET runs = runs - 1 WHERE key = OLD.job;
    {
    _change(
        "OLD.owner",
        f"runs = runs - 1, open = open - (OLD.outcome IS NULL), bytes = bytes - {RUN_BYTES}",
    )
}
    DELETE FROM job WHERE key = OLD.job AND runs = 0;
END;

INSERT INTO holder (key, name) VALUES ({WHOLE_FILE}, '');
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {VERSION};
"""  # noqa: S608 - constants

MIGRATION = f"""
DROP INDEX run_of_job;
ALTER TABLE run RENAME TO run_1;
ALTER TABLE job RENAME TO job_1;
{SCHEMA}
INSERT INTO holder (parent, name) SELECT DISTINCT 0, '["uid",' || owner || ']' FROM job_1;
INSERT INTO holder (parent, name)
    SELECT holder.key, '[' || owner || ',"",""]' FROM (SELECT DISTINCT owner FROM job_1)
    JOIN holder ON holder.name = '["uid",' || owner || ']';
INSERT INTO job (key, owner, name, gpus, terms, bytes)
    SELECT job_1.key, holder.key, job_1.name, gpus, terms,
        {JOB_BYTES} + 8 * length(job_1.name) + 8 * length(gpus) + length(terms)
    FROM job_1 JOIN holder ON holder.name = '[' || owner || ',"",""]'
    WHERE EXISTS (SELECT 1 FROM run_1 WHERE job = job_1.key);
INSERT INTO run (owner, number, job, batch_size, host, pid, process_started, began, outcome,
        energy, seconds, power, epochs)
    SELECT job.owner, run_1.key, job, batch_size, host, pid, process_started, began, outcome,
        energy, seconds, power, epochs
    FROM run_1 JOIN job ON job.key = run_1.job ORDER BY run_1.key;
DROP TABLE run_1;
DROP TABLE job_1;
"""  # noqa: S608 - constants
"""From version 1, whose owners were user ids and whose runs had one sequence of numbers."""


class Statement(StrEnum):
    """All statements on the rows of a file."""

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


def statements_of(script: str) -> Iterator[str]:
    """The statements of a script one by one: sqlite3's own `executescript` would commit first."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
