"""The history's rows about spans: adding to them, rolling them up, keeping them few.

Everything here happens in the transactions of :mod:`wattspan.storage.history`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping

from wattspan.storage.deltas import MAX_STORED_INTEGER, REST_OF_SPANS, SpanName, SpanRole, SpanUsage
from wattspan.storage.schema import database_text

_MAX_CACHED_KEYS = 20_000

_ADD_ENERGY = """
INSERT INTO span_energy VALUES (?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET energy = energy + excluded.energy
"""
_ADDED = f"""
ON CONFLICT DO UPDATE SET calls = calls + excluded.calls,
    nanoseconds = min({MAX_STORED_INTEGER}, nanoseconds + excluded.nanoseconds),
    tokens_in = min({MAX_STORED_INTEGER}, tokens_in + excluded.tokens_in),
    tokens_out = min({MAX_STORED_INTEGER}, tokens_out + excluded.tokens_out)
"""
_ADD_WORK = f"INSERT INTO span_work VALUES (?, ?, ?, ?, ?, ?, ?) {_ADDED}"  # noqa: S608

_ROLL_ENERGY = """
INSERT INTO span_energy SELECT ?, ?, span, hw_type, sum(energy) FROM span_energy
WHERE step = ? AND start >= ? AND start < ? GROUP BY span, hw_type
ON CONFLICT DO UPDATE SET energy = energy + excluded.energy
"""
# One claim after another is added, for the sum of a column can be more than an integer holds.
_ROLL_WORK = f"""
INSERT INTO span_work SELECT ?, ?, span, calls, nanoseconds, tokens_in, tokens_out FROM span_work
WHERE step = ? AND start >= ? AND start < ? {_ADDED}
"""  # noqa: S608

_SMALL = """
SELECT key FROM span_work JOIN span ON key = span
LEFT JOIN (
    SELECT span AS spender, sum(energy) AS energy FROM span_energy
    WHERE step = :step AND start = :start GROUP BY span
) ON spender = key
WHERE step = :step AND start = :start AND role = :role
ORDER BY energy DESC, calls DESC, key LIMIT -1 OFFSET :limit
"""
_UNUSED = """
DELETE FROM span WHERE key NOT IN (SELECT span FROM span_energy UNION SELECT span FROM span_work)
"""


class SpanHistoryWriter:
    """The rows of one database; at most ``limit`` names of a role in a finished bucket."""

    def __init__(self, database: sqlite3.Connection, limit: int) -> None:
        self._database = database
        self._limit = limit
        self._keys: dict[SpanName, int] = {}

    def add(self, step: int, start: int, spans: Mapping[SpanName, SpanUsage]) -> None:
        """Add what was spent to a bucket."""
        keys = {name: self._key(name) for name in spans}
        self._database.executemany(
            _ADD_ENERGY,
            [
                (step, start, keys[name], kind, energy)
                for name, use in spans.items()
                for kind, energy in use.energy.items()
            ],
        )
        self._database.executemany(
            _ADD_WORK,
            [
                (step, start, keys[name], u.calls, u.nanoseconds, u.tokens_in, u.tokens_out)
                for name, u in spans.items()
            ],
        )

    def roll(self, step: int, start: int, coarser: int) -> None:
        """Copy the rows of one coarser bucket into it; ``delete`` is to follow."""
        here = (coarser, start, step, start, start + coarser)
        self._database.execute(_ROLL_ENERGY, here)
        self._database.execute(_ROLL_WORK, here)

    def fold(self, step: int, start: int) -> None:
        """Give what all but the greatest names of a bucket hold to the rest."""
        for role, rest in (
            (SpanRole.NAMED, REST_OF_SPANS),
            (SpanRole.OUTSIDE, SpanName(SpanRole.OUTSIDE, "other")),
        ):
            where = {"step": step, "start": start, "role": role, "limit": self._limit}
            small = [key for (key,) in self._database.execute(_SMALL, where)]
            into = self._key(rest) if small else 0
            for key in small:
                if key != into:
                    self._merge(step, start, key, into)

    def delete(self, step: int, start: int, end: int) -> None:
        for table in ("span_energy", "span_work"):
            self._database.execute(
                f"DELETE FROM {table} WHERE step = ? AND start >= ? AND start < ?",  # noqa: S608
                (step, start, end),
            )

    def purge_names(self) -> None:
        """Forget the names that no row bears any more."""
        self._database.execute(_UNUSED)
        self.forget_keys()

    def forget_keys(self) -> None:
        self._keys.clear()

    def _merge(self, step: int, start: int, key: int, into: int) -> None:
        where = (step, start, key)
        moved: Iterable[tuple[object, ...]] = self._database.execute(
            "SELECT hw_type, energy FROM span_energy WHERE step = ? AND start = ? AND span = ?",
            where,
        ).fetchall()
        self._database.executemany(_ADD_ENERGY, [(step, start, into, *row) for row in moved])
        moved = self._database.execute(
            "SELECT calls, nanoseconds, tokens_in, tokens_out FROM span_work"
            " WHERE step = ? AND start = ? AND span = ?",
            where,
        ).fetchall()
        self._database.executemany(_ADD_WORK, [(step, start, into, *row) for row in moved])
        for table in ("span_energy", "span_work"):
            self._database.execute(
                f"DELETE FROM {table} WHERE step = ? AND start = ? AND span = ?",  # noqa: S608
                where,
            )

    def _key(self, name: SpanName) -> int:
        key = self._keys.get(name)
        if key is None:
            if len(self._keys) >= _MAX_CACHED_KEYS:
                self._keys.clear()
            key = self._keys[name] = self._known(name) or self._new(name)
        return key

    def _known(self, name: SpanName) -> int | None:
        found = self._database.execute(
            "SELECT key FROM span WHERE (role, service, name) = (?, ?, ?)", _database_name(name)
        ).fetchone()
        return None if found is None else int(found[0])

    def _new(self, name: SpanName) -> int:
        made = self._database.execute(
            "INSERT INTO span (role, service, name) VALUES (?, ?, ?) RETURNING key",
            _database_name(name),
        )
        return int(made.fetchone()[0])


def _database_name(name: SpanName) -> tuple[str, str, str]:
    return name.role, database_text(name.service), database_text(name.name)
