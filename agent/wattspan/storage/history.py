"""Rows of the energy history: insertion, roll-up to coarser buckets, and retention.

Every function runs in the transaction of the caller. After a rollback the caller calls
``forget_keys``, because keys of that transaction may not exist.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from wattspan.config import StoreSettings
from wattspan.model import SECOND, Domain
from wattspan.storage.database import DAY, HOUR, MINUTE, database_text, pragma
from wattspan.storage.deltas import (
    MAX_STORED_INTEGER,
    REST_OF_MODELS,
    REST_OF_SPANS,
    CheckpointDelta,
    EnergyOwner,
    SpanName,
    SpanUsage,
    UsageRole,
)

_MAX_CACHED_KEYS = 20_000  # of one minute
_BUCKETS_PER_DELETION = 48  # coarse buckets, so that no write takes long
_COARSER = {MINUTE: HOUR, HOUR: DAY}

_Named = Domain | EnergyOwner | SpanName
"""The kinds of names with a key: domains, owners and span names."""


class _BucketTable:
    """SQL of a table whose rows are sums of one bucket.

    ``names`` are the columns that identify a row within a bucket, ``sums`` the summed columns.
    Sums of ``claimed`` figures are limited to `MAX_STORED_INTEGER`, because applications choose
    them: a plain sum may exceed an SQLite integer.
    """

    def __init__(self, name: str, names: str, sums: str, *, claimed: bool = False) -> None:
        columns = sums.split(", ")
        added = ", ".join(
            f"{c} = min({MAX_STORED_INTEGER}, {c} + excluded.{c})"
            if claimed
            else f"{c} = {c} + excluded.{c}"
            for c in columns
        )
        added = f"ON CONFLICT (step, start, {names}) DO UPDATE SET {added}"
        width = 2 + len(names.split(", ")) + len(columns)
        selected = sums if claimed else ", ".join(f"sum({c})" for c in columns)
        grouping = "" if claimed else f" GROUP BY {names}"
        others = "".join(f", {c}" for c in names.split(", ")[1:])
        row = f"step = ? AND start = ? AND {names.split(', ', maxsplit=1)[0]} = ?"
        # ruff: noqa: S608 - the names of tables and columns are constants
        self.add = f"INSERT INTO {name} VALUES ({_placeholders(width)}) {added}"
        self.roll_up = (
            f"INSERT INTO {name} SELECT ?, ?, {names}, {selected} FROM {name}"
            f" WHERE step = ? AND start >= ? AND start < ?{grouping} {added}"
        )
        self.move = (
            f"INSERT INTO {name} SELECT step, start, ?{others}, {sums} FROM {name} WHERE {row}"
            f" {added}"
        )
        self.delete_row = f"DELETE FROM {name} WHERE {row}"
        self.delete_buckets = f"DELETE FROM {name} WHERE step = ? AND start >= ? AND start < ?"


def _placeholders(count: int) -> str:
    return ", ".join("?" * count)


_DOMAIN_ENERGY = _BucketTable(
    "domain_energy", "domain", "energy, consumers, idle, unattributed, withheld"
)
_GAP = _BucketTable("gap", "domain, reason", "nanoseconds")
_OWNER_ENERGY = _BucketTable("owner_energy", "owner", "energy")
_SPAN_ENERGY = _BucketTable("span_energy", "span, hw_type", "energy")
_SPAN_SPLIT = _BucketTable("span_split", "span, basis", "static, dynamic")
_SPAN_WORK = _BucketTable(
    "span_work", "span", "calls, nanoseconds, tokens_in, tokens_out", claimed=True
)
_REQUEST_DIVISION = _BucketTable("request_division", "span, division", "requests")
_REQUEST_HOST = _BucketTable(
    "request_host", "span, part", "energy, requests, tokens_out", claimed=True
)
_USAGE_ROWS: Mapping[_BucketTable, Callable[[SpanUsage], Iterable[tuple[object, ...]]]] = {
    _SPAN_ENERGY: lambda usage: usage.energy.items(),
    _SPAN_SPLIT: lambda usage: ((basis, *split) for basis, split in usage.splits.items()),
    _SPAN_WORK: lambda u: ((u.calls, u.nanoseconds, u.tokens_in, u.tokens_out),),
    _REQUEST_DIVISION: lambda usage: usage.divisions.items(),
    _REQUEST_HOST: lambda usage: ((part, *each) for part, each in usage.host.items()),
}
"""The tables of spans, and the rows of a usage in each."""

_TABLES = (_DOMAIN_ENERGY, _GAP, _OWNER_ENERGY, *_USAGE_ROWS)

_SMALL_OWNERS = """
SELECT key, kind, hw_type FROM (
    SELECT key, kind, hw_type,
           row_number() OVER (PARTITION BY kind, hw_type ORDER BY energy DESC, key) AS place
    FROM owner_energy JOIN owner ON key = "owner"
    WHERE step = :step AND start = :start AND NOT rest
) WHERE place > CASE kind WHEN 'process' THEN :processes ELSE :groups END
"""
_SMALL_SPANS = """
SELECT key, role FROM (
    SELECT key, role,
           row_number() OVER (PARTITION BY role ORDER BY energy DESC, calls DESC, key) AS place
    FROM span_work JOIN span ON key = span
    LEFT JOIN (
        SELECT span AS spender, sum(energy) AS energy FROM span_energy
        WHERE step = :step AND start = :start GROUP BY span
    ) ON spender = key
    WHERE step = :step AND start = :start AND role != 'rest'
) WHERE place > :spans
"""
_SPAN_RESTS = {
    UsageRole.NAMED: REST_OF_SPANS,
    UsageRole.OUTSIDE: SpanName(UsageRole.OUTSIDE, "other"),
    UsageRole.MODEL: REST_OF_MODELS,
}


class HistoryWriter:
    """Writer of the history of one database."""

    def __init__(self, database: sqlite3.Connection, settings: StoreSettings) -> None:
        self._database = database
        self._settings = settings
        self._keys: dict[_Named, int] = {}  # of the names in this minute
        self._earlier_keys: dict[_Named, int] = {}  # of those in the minute before
        self._minute: int | None = None
        self._hour: int | None = None

    def add(self, delta: CheckpointDelta) -> bool:
        """Add ``delta`` to its minute. True if a minute ended and the limits were applied.

        After a backward step of the clock, energy is added to existing minutes; a forward step
        leaves a hole.
        """
        minute = max(0, delta.wall // 10**9) // MINUTE * MINUTE
        self._add_rows(minute, delta)
        if minute == self._minute:
            return False
        if self._minute is not None:
            self._fold(MINUTE, self._minute)
        self._apply_retention(minute // HOUR)
        self._minute = minute
        # Names of ended containers and commands would fill the cache for days.
        self._keys, self._earlier_keys = {}, self._keys
        return True

    @property
    def cached_keys(self) -> int:
        """The number of names whose keys are in memory."""
        return len(self._keys) + len(self._earlier_keys)

    def forget_keys(self) -> None:
        self._keys.clear()
        self._earlier_keys.clear()

    def _add_rows(self, minute: int, delta: CheckpointDelta) -> None:
        at, key, insert = (MINUTE, minute), self._key, self._database.executemany
        insert(
            _DOMAIN_ENERGY.add,
            [
                (*at, key(d.domain), d.energy, d.consumers, d.idle, d.unattributed, d.withheld)
                for d in delta.domains
            ],
        )
        insert(
            _GAP.add,
            [(*at, key(d.domain), *gap) for d in delta.domains for gap in d.gaps.items()],
        )
        insert(
            _OWNER_ENERGY.add,
            sorted((*at, key(owner), energy) for owner, energy in delta.owners.items()),
        )
        for table, rows in _USAGE_ROWS.items():
            insert(
                table.add,
                [
                    (*at, key(name), *row)
                    for name, usage in delta.spans.items()
                    for row in rows(usage)
                ],
            )

    def _key(self, named: _Named) -> int:
        key = self._keys.get(named)
        if key is None:
            if len(self._keys) >= _MAX_CACHED_KEYS:
                self._keys.clear()
            key = self._earlier_keys.get(named) or self._stored_key(named)
            self._keys[named] = key
        return key

    def _stored_key(self, named: _Named) -> int:
        """Return the key of a row; a new provenance or cover of a domain makes a new row."""
        values: tuple[str | int, ...]
        if isinstance(named, Domain):
            table, columns = "domain", "id, hw_type, name, provenance, method, in_cover, attributed"
            values = (
                database_text(named.id),
                named.hw_type,
                database_text(named.name),
                named.provenance,
                named.method,
                int(named.in_cover),
                int(named.resource is not None),
            )
        else:
            table, columns = "span", "role, service, name, owner"
            if isinstance(named, EnergyOwner):
                table, columns = "owner", 'kind, hw_type, name, "group", rest'
            values = tuple(
                database_text(value) if isinstance(value, str) else int(value) for value in named
            )
        marks = _placeholders(len(values))
        found = self._database.execute(
            f"SELECT key FROM {table} WHERE ({columns}) = ({marks})", values
        ).fetchone()
        if found is not None:
            return int(found[0])
        insertion = f"INSERT INTO {table} ({columns}) VALUES ({marks})"
        return self._database.execute(insertion, values).lastrowid or 0

    # ------------------------------------------------------------------------------- retention

    def _apply_retention(self, hour: int) -> None:
        if hour != self._hour:
            self._roll_up(MINUTE, self._settings.minutes)
            rolled = self._roll_up(HOUR, self._settings.hours)
            deleted = self._delete_old_days(self._settings.days)
            if rolled or deleted:
                self._purge_names()
            self._hour = hour
        if self._bytes() > self._settings.max_size:
            self._shed()

    def _roll_up(self, step: int, keep: int) -> bool:
        """Roll up all but the newest buckets and those in the same coarser bucket.

        The newest buckets are those of ``keep`` nanoseconds without holes.
        """
        edge = self._newest(step, keep)
        if edge is None:
            return False
        coarser = _COARSER[step]
        rolled = False
        while (oldest := self._oldest(step)) is not None and oldest < edge // coarser * coarser:
            self._roll_bucket(step, oldest // coarser * coarser)
            if self._oldest(step) == oldest:
                raise sqlite3.DatabaseError("rows that were deleted are still there")
            rolled = True
        return rolled

    def _roll_bucket(self, step: int, start: int) -> None:
        """Move all rows of one coarser bucket into it. The sums do not change."""
        coarser = _COARSER[step]
        for table in _TABLES:
            self._database.execute(table.roll_up, (coarser, start, step, start, start + coarser))
        self._delete(step, start, start + coarser)
        self._fold(coarser, start)

    def _fold(self, step: int, start: int) -> None:
        """Add all but the largest owners and spans of a bucket to the rest of their kind."""
        settings = self._settings
        bucket = {
            "step": step,
            "start": start,
            "processes": settings.processes,
            "groups": settings.groups,
            "spans": settings.spans,
        }
        owners: dict[EnergyOwner, list[int]] = defaultdict(list)
        for key, kind, hw_type in self._database.execute(_SMALL_OWNERS, bucket):
            owners[EnergyOwner.others(kind, hw_type)].append(key)
        for owner, small in owners.items():
            self._merge((_OWNER_ENERGY,), step, start, small, self._key(owner))
        spans: dict[SpanName, list[int]] = defaultdict(list)
        for key, role in self._database.execute(_SMALL_SPANS, bucket):
            spans[_SPAN_RESTS[role]].append(key)
        for span, small in spans.items():
            self._merge(_USAGE_ROWS, step, start, small, self._key(span))

    def _merge(
        self, tables: Iterable[_BucketTable], step: int, start: int, keys: list[int], into: int
    ) -> None:
        """Add the rows of ``keys`` in a bucket to those of the key ``into``."""
        rows = [(step, start, key) for key in keys if key != into]
        for table in tables:
            self._database.executemany(table.move, [(into, *row) for row in rows])
            self._database.executemany(table.delete_row, rows)

    def _delete_old_days(self, keep: int) -> bool:
        edge, oldest = self._newest(DAY, keep), self._oldest(DAY)
        if edge is None or oldest is None or oldest >= edge:
            return False
        self._delete(DAY, oldest, edge)
        return True

    def _shed(self) -> None:
        """Free space: roll up the oldest buckets, and at last delete the oldest days."""
        self._purge_names()
        for _ in range(_BUCKETS_PER_DELETION):
            if self._bytes() <= self._settings.max_size * 9 // 10:
                return
            if (minute := self._oldest(MINUTE)) is not None:
                self._roll_bucket(MINUTE, minute // HOUR * HOUR)
            elif (hour := self._oldest(HOUR)) is not None:
                self._roll_bucket(HOUR, hour // DAY * DAY)
            elif (day := self._oldest(DAY)) is not None:
                self._delete(DAY, day, day + DAY)
            else:
                return
        self._purge_names()

    def _purge_names(self) -> None:
        """Delete the names of owners and spans that no row uses."""
        self._database.execute(
            "DELETE FROM owner WHERE key NOT IN (SELECT owner FROM owner_energy)"
        )
        self._database.execute(
            "DELETE FROM span WHERE key NOT IN"
            " (SELECT span FROM span_energy UNION SELECT span FROM span_split"
            " UNION SELECT span FROM span_work)"
        )
        self.forget_keys()

    def _newest(self, step: int, keep: int) -> int | None:
        """Return the start of the oldest kept bucket; None if there are fewer."""
        return self._start(
            "SELECT DISTINCT start FROM domain_energy WHERE step = ?"
            " ORDER BY start DESC LIMIT 1 OFFSET ?",
            (step, max(0, keep // (step * SECOND) - 1)),
        )

    def _oldest(self, step: int) -> int | None:
        return self._start("SELECT min(start) FROM domain_energy WHERE step = ?", (step,))

    def _start(self, query: str, values: tuple[int, ...]) -> int | None:
        row = self._database.execute(query, values).fetchone()
        if row is None or row[0] is None:
            return None
        if not isinstance(row[0], int):
            raise sqlite3.DatabaseError(f"{row[0]!r} is not the start of a bucket")
        return row[0]

    def _delete(self, step: int, start: int, end: int) -> None:
        for table in _TABLES:
            self._database.execute(table.delete_buckets, (step, start, end))

    def _bytes(self) -> int:
        """Return the bytes of used pages; free pages return to the file system gradually."""
        used = pragma(self._database, "page_count") - pragma(self._database, "freelist_count")
        return used * pragma(self._database, "page_size")
