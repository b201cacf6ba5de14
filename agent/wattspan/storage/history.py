"""Rows of the energy history: insertion, roll-up to coarser buckets, and retention.

Every function runs in the transaction of the caller. After a rollback the caller calls
``forget_keys``, because keys of that transaction may not exist.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass

from wattspan.model import Domain
from wattspan.storage.deltas import PROCESS, CheckpointDelta, EnergyOwner
from wattspan.storage.schema import DAY, HOUR, MINUTE, database_text
from wattspan.storage.span_history import SpanHistoryWriter

_MAX_CACHED_KEYS = 20_000
_BUCKETS_PER_DELETION = 48  # coarse buckets, so that no write takes long
_COARSER = {MINUTE: HOUR, HOUR: DAY}


@dataclass(frozen=True, slots=True)
class HistoryRetention:
    """Limits: buckets of each step, names in a bucket, bytes of the file."""

    minutes: int
    hours: int
    days: int
    processes: int
    groups: int
    spans: int
    bytes: int


class HistoryWriter:
    """Writer of the history of one database."""

    def __init__(self, database: sqlite3.Connection, bounds: HistoryRetention) -> None:
        self._database = database
        self._bounds = bounds
        self._domains: dict[Domain, int] = {}
        self._owners: dict[EnergyOwner, int] = {}
        self._spans = SpanHistoryWriter(database, bounds.spans)
        self._minute: int | None = None
        self._hour: int | None = None

    def add(self, delta: CheckpointDelta) -> bool:
        """Add ``delta`` to its minute. True if a minute ended and the limits were applied.

        After a backward step of the clock, energy is added to existing minutes; a forward step
        leaves a hole.
        """
        minute = max(0, delta.wall // 10**9) // MINUTE * MINUTE
        self._add_domains(minute, delta)
        self._add_owners(minute, delta)
        self._spans.add(MINUTE, minute, delta.spans)
        if minute == self._minute:
            return False
        if self._minute is not None:
            self._fold(MINUTE, self._minute)
        self._keep_bounds(minute // HOUR)
        self._minute = minute
        return True

    def forget_keys(self) -> None:
        self._domains.clear()
        self._owners.clear()
        self._spans.forget_keys()

    # -------------------------------------------------------------------------------- adding

    def _add_domains(self, minute: int, delta: CheckpointDelta) -> None:
        self._database.executemany(
            "INSERT INTO domain_energy VALUES (?, ?, ?, ?, ?, ?, ?)"
            " ON CONFLICT DO UPDATE SET energy = energy + excluded.energy,"
            " consumers = consumers + excluded.consumers, idle = idle + excluded.idle,"
            " unattributed = unattributed + excluded.unattributed",
            [
                (
                    MINUTE,
                    minute,
                    self._domain_key(spent.domain),
                    spent.energy,
                    spent.consumers,
                    spent.idle,
                    spent.unattributed,
                )
                for spent in delta.domains
            ],
        )
        self._database.executemany(
            "INSERT INTO gap VALUES (?, ?, ?, ?, ?)"
            " ON CONFLICT DO UPDATE SET nanoseconds = nanoseconds + excluded.nanoseconds",
            [
                (MINUTE, minute, self._domain_key(spent.domain), reason, nanoseconds)
                for spent in delta.domains
                for reason, nanoseconds in spent.gaps.items()
            ],
        )

    def _add_owners(self, minute: int, delta: CheckpointDelta) -> None:
        self._database.executemany(
            "INSERT INTO owner_energy VALUES (?, ?, ?, ?)"
            " ON CONFLICT DO UPDATE SET energy = energy + excluded.energy",
            sorted(
                (MINUTE, minute, self._owner_key(owner), energy)
                for owner, energy in delta.owners.items()
            ),
        )

    def _domain_key(self, domain: Domain) -> int:
        """Return the key of ``domain``; another provenance or cover makes another row."""
        key = self._domains.get(domain)
        if key is None:
            key = self._domains[domain] = self._key(
                "domain",
                database_text(domain.id),
                domain.hw_type,
                database_text(domain.name),
                domain.provenance,
                domain.method,
                int(domain.in_cover),
                int(domain.resource is not None),
            )
        return key

    def _owner_key(self, owner: EnergyOwner) -> int:
        key = self._owners.get(owner)
        if key is None:
            if len(self._owners) >= _MAX_CACHED_KEYS:
                self._owners.clear()
            key = self._owners[owner] = self._key(
                "owner",
                owner.kind,
                owner.hw_type,
                database_text(owner.name),
                database_text(owner.group),
                int(owner.rest),
            )
        return key

    def _key(self, table: str, *values: str | int) -> int:
        columns = _IDENTITY[table]
        found = self._database.execute(
            f"SELECT key FROM {table} WHERE ({columns}) = ({_placeholders(values)})",  # noqa: S608
            values,
        ).fetchone()
        if found is None:
            found = self._database.execute(
                f"INSERT INTO {table} ({columns}) VALUES ({_placeholders(values)}) RETURNING key",  # noqa: S608
                values,
            ).fetchone()
        return int(found[0])

    # ------------------------------------------------------------------------------- keeping few

    def _keep_bounds(self, hour: int) -> None:
        if hour != self._hour:
            self._roll_up(MINUTE, self._bounds.minutes)
            rolled = self._roll_up(HOUR, self._bounds.hours)
            forgot = self._forget_days(self._bounds.days)
            if rolled or forgot:
                self._purge_names()
            self._hour = hour
        if self._bytes() > self._bounds.bytes:
            self._shed()

    def _roll_up(self, step: int, keep: int) -> bool:
        """Roll up all but the newest ``keep`` buckets and those in the same coarser bucket."""
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
        here = (coarser, start, step, start, start + coarser)
        self._database.execute(
            "INSERT INTO domain_energy SELECT ?, ?, domain, sum(energy), sum(consumers),"
            " sum(idle), sum(unattributed) FROM domain_energy"
            " WHERE step = ? AND start >= ? AND start < ? GROUP BY domain"
            " ON CONFLICT DO UPDATE SET energy = energy + excluded.energy,"
            " consumers = consumers + excluded.consumers, idle = idle + excluded.idle,"
            " unattributed = unattributed + excluded.unattributed",
            here,
        )
        self._database.execute(
            "INSERT INTO gap SELECT ?, ?, domain, reason, sum(nanoseconds) FROM gap"
            " WHERE step = ? AND start >= ? AND start < ? GROUP BY domain, reason"
            " ON CONFLICT DO UPDATE SET nanoseconds = nanoseconds + excluded.nanoseconds",
            here,
        )
        self._database.execute(
            "INSERT INTO owner_energy SELECT ?, ?, owner, sum(energy) FROM owner_energy"
            " WHERE step = ? AND start >= ? AND start < ? GROUP BY owner"
            " ON CONFLICT DO UPDATE SET energy = energy + excluded.energy",
            here,
        )
        self._spans.roll(step, start, coarser)
        self._delete(step, start, start + coarser)
        self._fold(coarser, start)

    def _fold(self, step: int, start: int) -> None:
        """Add the energy of all but the largest owners of a bucket to the rest of their kind."""
        self._spans.fold(step, start)
        rows = self._database.execute(
            'SELECT key, kind, hw_type, energy FROM owner_energy JOIN owner ON key = "owner"'
            " WHERE step = ? AND start = ? AND NOT rest ORDER BY kind, hw_type, energy DESC, key",
            (step, start),
        ).fetchall()
        seen: dict[tuple[str, str], int] = {}
        rest: dict[tuple[str, str], int] = {}
        small: list[tuple[int, int, int]] = []
        for key, kind, hw_type, energy in rows:
            rank = seen[kind, hw_type] = seen.get((kind, hw_type), 0) + 1
            if rank > (self._bounds.processes if kind == PROCESS else self._bounds.groups):
                rest[kind, hw_type] = rest.get((kind, hw_type), 0) + energy
                small.append((step, start, key))
        self._database.executemany(
            "DELETE FROM owner_energy WHERE step = ? AND start = ? AND owner = ?", small
        )
        self._database.executemany(
            "INSERT INTO owner_energy VALUES (?, ?, ?, ?)"
            " ON CONFLICT DO UPDATE SET energy = energy + excluded.energy",
            [
                (step, start, self._key("owner", kind, hw_type, "", "", 1), energy)
                for (kind, hw_type), energy in rest.items()
            ],
        )

    def _forget_days(self, keep: int) -> bool:
        edge, oldest = self._newest(DAY, keep), self._oldest(DAY)
        if edge is None or oldest is None or oldest >= edge:
            return False
        self._delete(DAY, oldest, edge)
        return True

    def _shed(self) -> None:
        """Free space: roll up the oldest buckets, and at last delete the oldest days."""
        self._purge_names()
        for _ in range(_BUCKETS_PER_DELETION):
            if self._bytes() <= self._bounds.bytes * 9 // 10:
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
        """Delete the names that no row uses."""
        self._database.execute(
            "DELETE FROM owner WHERE key NOT IN (SELECT owner FROM owner_energy)"
        )
        self._owners.clear()
        self._spans.purge_names()

    # ---------------------------------------------------------------------------------- asking

    def _newest(self, step: int, nth: int) -> int | None:
        """Return the start of the ``nth`` newest bucket; None if there are fewer."""
        return self._start(
            "SELECT DISTINCT start FROM domain_energy WHERE step = ?"
            " ORDER BY start DESC LIMIT 1 OFFSET ?",
            (step, nth - 1),
        )

    def _oldest(self, step: int) -> int | None:
        return self._start("SELECT min(start) FROM domain_energy WHERE step = ?", (step,))

    def _start(self, query: str, values: Iterable[int]) -> int | None:
        row = self._database.execute(query, tuple(values)).fetchone()
        if row is None or row[0] is None:
            return None
        if not isinstance(row[0], int):
            raise sqlite3.DatabaseError(f"{row[0]!r} is not the start of a bucket")
        return row[0]

    def _delete(self, step: int, start: int, end: int) -> None:
        for table in ("domain_energy", "gap", "owner_energy"):
            self._database.execute(
                f"DELETE FROM {table} WHERE step = ? AND start >= ? AND start < ?",  # noqa: S608
                (step, start, end),
            )
        self._spans.delete(step, start, end)

    def _bytes(self) -> int:
        """Return the bytes of used pages; free pages return to the file system gradually."""
        pages, free, size = (
            int(self._database.execute(f"PRAGMA {name}").fetchone()[0])
            for name in ("page_count", "freelist_count", "page_size")
        )
        return (pages - free) * size


_IDENTITY = {
    "domain": "id, hw_type, name, provenance, method, in_cover, attributed",
    "owner": 'kind, hw_type, name, "group", rest',
}


def _placeholders(values: tuple[str | int, ...]) -> str:
    return ", ".join("?" * len(values))
