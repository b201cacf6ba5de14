"""The tables, and how an older file becomes a present one.

Every joule of the history stands once, at one ``step``: in its minute until the minute is old,
then in its hour, then in its day. So a sum over a stretch of time is a sum over rows, whatever
their step, and no roll-up can count anything twice.

Names as the database takes them.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

APPLICATION_ID = 0x77617474  # "watt", so that nobody mistakes another program's file for ours

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
"""The script at index ``n`` makes version ``n + 1`` of version ``n``."""


class SchemaError(Exception):
    """The file is sound, and not for us: the message is a clause without a subject."""


def schema_version(database: sqlite3.Connection) -> int:
    """The version of a store's schema, 0 for an empty file; SchemaError if it is no store."""
    found = _pragma(database, "user_version")
    if _pragma(database, "application_id") == APPLICATION_ID:
        return found
    tables = database.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
    if found or tables:
        raise SchemaError("is an SQLite database of another program")
    return 0


def supported_version(database: sqlite3.Connection) -> int:
    """The version, if it is not newer than this program; SchemaError if it is."""
    found = schema_version(database)
    if found > len(MIGRATIONS):
        raise SchemaError(
            f"was written by a newer wattspan (its schema is {found}, this one knows"
            f" {len(MIGRATIONS)})"
        )
    return found


def migrate(database: sqlite3.Connection, migrations: Sequence[str] = MIGRATIONS) -> None:
    """Bring the schema to the present version, each step whole or not at all."""
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
"""Names are cut here; the books keep them whole."""


def database_text(name: str) -> str:
    """``name`` as SQLite takes it: what is not Unicode is written as an escape."""
    return name.encode("utf-8", "backslashreplace").decode()[:MAX_NAME_LENGTH]
