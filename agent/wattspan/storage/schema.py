"""Database schema and migrations of the store.

The history holds every joule once, at one ``step``: first in a minute, later in an hour, then in a
day. The sum over an interval is therefore a sum over rows of any step, and a roll-up counts
nothing twice.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

APPLICATION_ID = 0x77617474  # "watt"; distinguishes the store from databases of other programs

MINUTE, HOUR, DAY = 60, 3600, 86400

_FIRST = """
CREATE TABLE books (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    packed BLOB NOT NULL
) STRICT;

CREATE TABLE domain (
    key INTEGER PRIMARY KEY,
    id TEXT NOT NULL,
    hw_type TEXT NOT NULL,
    name TEXT NOT NULL,
    provenance TEXT NOT NULL,
    method TEXT NOT NULL,
    in_cover INTEGER NOT NULL,
    attributed INTEGER NOT NULL,
    UNIQUE (id, hw_type, name, provenance, method, in_cover, attributed)
) STRICT;

CREATE TABLE owner (
    key INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,
    hw_type TEXT NOT NULL,
    name TEXT NOT NULL,
    "group" TEXT NOT NULL,
    rest INTEGER NOT NULL,
    UNIQUE (kind, hw_type, name, "group", rest)
) STRICT;

CREATE TABLE domain_energy (
    step INTEGER NOT NULL,
    start INTEGER NOT NULL,
    domain INTEGER NOT NULL,
    energy INTEGER NOT NULL,
    consumers INTEGER NOT NULL,
    idle INTEGER NOT NULL,
    unattributed INTEGER NOT NULL,
    PRIMARY KEY (step, start, domain)
) STRICT, WITHOUT ROWID;

CREATE TABLE gap (
    step INTEGER NOT NULL,
    start INTEGER NOT NULL,
    domain INTEGER NOT NULL,
    reason TEXT NOT NULL,
    nanoseconds INTEGER NOT NULL,
    PRIMARY KEY (step, start, domain, reason)
) STRICT, WITHOUT ROWID;

CREATE TABLE owner_energy (
    step INTEGER NOT NULL,
    start INTEGER NOT NULL,
    owner INTEGER NOT NULL,
    energy INTEGER NOT NULL,
    PRIMARY KEY (step, start, owner)
) STRICT, WITHOUT ROWID;
"""

_SPANS = """
CREATE TABLE span (
    key INTEGER PRIMARY KEY,
    role TEXT NOT NULL,
    service TEXT NOT NULL,
    name TEXT NOT NULL,
    UNIQUE (role, service, name)
) STRICT;

CREATE TABLE span_energy (
    step INTEGER NOT NULL,
    start INTEGER NOT NULL,
    span INTEGER NOT NULL,
    hw_type TEXT NOT NULL,
    energy INTEGER NOT NULL,
    PRIMARY KEY (step, start, span, hw_type)
) STRICT, WITHOUT ROWID;

CREATE TABLE span_work (
    step INTEGER NOT NULL,
    start INTEGER NOT NULL,
    span INTEGER NOT NULL,
    calls INTEGER NOT NULL,
    nanoseconds INTEGER NOT NULL,
    tokens_in INTEGER NOT NULL,
    tokens_out INTEGER NOT NULL,
    PRIMARY KEY (step, start, span)
) STRICT, WITHOUT ROWID;
"""

_RATES = """
CREATE TABLE rate (
    kind TEXT NOT NULL,
    start INTEGER NOT NULL,
    unit TEXT NOT NULL,
    rate INTEGER,
    PRIMARY KEY (kind, start)
) STRICT, WITHOUT ROWID;
"""

MIGRATIONS: tuple[str, ...] = (_FIRST, _SPANS, _RATES)
"""The script at index ``n`` migrates version ``n`` to ``n + 1``."""


class SchemaError(Exception):
    """The file has another schema. The message is a clause without a subject."""


def schema_version(database: sqlite3.Connection) -> int:
    """Return the schema version, 0 for an empty file; SchemaError for another database."""
    found = _pragma(database, "user_version")
    if _pragma(database, "application_id") == APPLICATION_ID:
        return found
    tables = database.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
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


def _pragma(database: sqlite3.Connection, name: str) -> int:
    return int(database.execute(f"PRAGMA {name}").fetchone()[0])


MAX_NAME_LENGTH = 200
"""Limit of names in the database; the checkpoint keeps whole names."""


def database_text(name: str) -> str:
    """Return ``name`` for SQLite: escaped where it is not Unicode, and shortened."""
    return name.encode("utf-8", "backslashreplace").decode()[:MAX_NAME_LENGTH]
