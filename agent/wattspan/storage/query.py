"""Reading the history, while an agent writes it or none does."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from typing import Any

from wattspan.model import GapReason, HwType, Provenance
from wattspan.ports import StoreError
from wattspan.storage.database import file_exists, sqlite_error_name
from wattspan.storage.deltas import SPAN, EnergyOwner, SpanName, SpanRole, SpanUsage
from wattspan.storage.rates import Weighting, select_buckets
from wattspan.storage.schema import DAY, HOUR, MIGRATIONS, MINUTE, SchemaError, supported_version

_COPY_ATTEMPTS = 5
"""How often a copy is tried: the agent begins its log anew every few minutes at most."""

_WAL_HEADER_BYTES = 32
"""Bytes of a write-ahead log that change when it begins anew: its numbers and salts."""


@dataclass(frozen=True, slots=True)
class DomainTotal:
    """One domain's energy in a stretch of time, in microjoules; its gaps in nanoseconds.

    A domain whose provenance changed is two of these.
    """

    id: str
    hw_type: HwType
    name: str
    provenance: Provenance
    method: str
    in_cover: bool
    attributed: bool
    energy: int
    consumers: int
    idle: int
    unattributed: int
    gaps: Mapping[GapReason, int]

    def plus(self, other: DomainTotal) -> DomainTotal:
        """The same domain's energy of other times."""
        return replace(
            self,
            energy=self.energy + other.energy,
            consumers=self.consumers + other.consumers,
            idle=self.idle + other.idle,
            unattributed=self.unattributed + other.unattributed,
        )


@dataclass(frozen=True, slots=True)
class HistoryExtract:
    """What the history holds of a stretch of time, widened to whole buckets.

    ``start`` and ``end`` are Unix seconds, ``steps`` the lengths of the buckets that were summed.
    Where it was asked what energy weighs, by ``reckonings``, every energy is an ``Amount``.
    """

    start: int
    end: int
    steps: tuple[int, ...]
    domains: tuple[DomainTotal, ...]
    owners: Mapping[EnergyOwner, int]
    spans: Mapping[SpanName, SpanUsage] = field(default_factory=dict)
    reckonings: tuple[Weighting, ...] = ()


@dataclass(frozen=True, slots=True)
class NoHistory:
    """The history holds nothing of that time; ``reach`` is what it does hold, if anything."""

    reach: tuple[int, int] | None


def extract_history(
    path: Path,
    start: int,
    end: int,
    kinds: Iterable[str] = (),
    reckonings: Sequence[Weighting] = (),
) -> HistoryExtract | NoHistory:
    """The sums from ``start`` to before ``end`` (Unix seconds), owners of ``kinds`` included.

    Energies are told with what they weigh by each of ``reckonings``. All sums are of one moment,
    whatever the agent writes meanwhile. StoreError if the store cannot be read.
    """
    try:
        with _connected(path) as database:
            _require_present(database, path)
            database.execute("BEGIN")
            return _extract(database, start, end, frozenset(kinds), reckonings)
    except (sqlite3.Error, ValueError, TypeError) as error:
        # A value of no known kind is as corrupt as a page of no known kind.
        raise StoreError(_sentence(error, path)) from None


_WITHIN = " OR ".join(
    f"(step = {step} AND start > :start - {step} AND start < :end)" for step in (MINUTE, HOUR, DAY)
)
"""Every bucket that has a part in the stretch, at each step by its primary key."""

_STEPS = "SELECT step, min(start), max(start) + step FROM domain_energy"

_FOUND = f"{_STEPS} WHERE {_WITHIN} GROUP BY step"
_REACH = f"{_STEPS} GROUP BY step"
_GAPS = f"""
SELECT domain, reason, sum(nanoseconds) FROM gap WHERE {_WITHIN} GROUP BY domain, reason
"""  # noqa: S608
# A cross join is never turned round: few buckets are looked up, not all of the history read.
_DOMAINS = """
SELECT key, id, hw_type, name, provenance, method, in_cover, attributed, class, energy, consumers,
       idle, unattributed
FROM domain JOIN (
    SELECT domain, class, sum(energy) AS energy, sum(consumers) AS consumers, sum(idle) AS idle,
           sum(unattributed) AS unattributed
    FROM bucket CROSS JOIN domain_energy USING (step, start) GROUP BY domain, class
) ON key = domain
ORDER BY in_cover DESC, hw_type, id, provenance, key
"""
_OWNERS = """
SELECT kind, hw_type, name, "group", rest, class, energy
FROM owner JOIN (
    SELECT owner, class, sum(energy) AS energy
    FROM bucket CROSS JOIN owner_energy USING (step, start) GROUP BY owner, class
) ON key = owner
"""
_SPAN_ENERGY = """
SELECT span, hw_type, class, sum(energy)
FROM bucket CROSS JOIN span_energy USING (step, start) GROUP BY span, hw_type, class
"""
# Floats where spans claim: a sum of integers fails where it is more than an integer holds.
_SPANS = f"""
SELECT key, role, service, name, calls, nanoseconds, tokens_in, tokens_out
FROM span JOIN (
    SELECT span, sum(calls) AS calls, total(nanoseconds) AS nanoseconds,
           total(tokens_in) AS tokens_in, total(tokens_out) AS tokens_out
    FROM span_work WHERE {_WITHIN} GROUP BY span
) ON key = span
"""  # noqa: S608


def _extract(
    database: sqlite3.Connection,
    start: int,
    end: int,
    kinds: frozenset[str],
    reckonings: Sequence[Weighting],
) -> HistoryExtract | NoHistory:
    stretch = {"start": start, "end": end}
    found = database.execute(_FOUND, stretch).fetchall()
    if not found:
        reach = database.execute(_REACH).fetchall()
        return NoHistory((min(r[1] for r in reach), max(r[2] for r in reach)) if reach else None)
    weigh = select_buckets(database, _WITHIN, stretch, reckonings)
    gaps: dict[int, dict[GapReason, int]] = {}
    for domain, reason, nanoseconds in database.execute(_GAPS, stretch):
        gaps.setdefault(domain, {})[GapReason(reason)] = nanoseconds
    domains: dict[int, DomainTotal] = {}
    for key, *row, worth, energy, consumers, idle, unattributed in database.execute(_DOMAINS):
        sums = [weigh(each, worth) for each in (energy, consumers, idle, unattributed)]
        one = _domain_total(row, sums, gaps.get(key, {}))
        domains[key] = domains[key].plus(one) if key in domains else one
    owners: dict[EnergyOwner, int] = {}
    for kind, hw_type, name, group, rest, worth, energy in (
        database.execute(_OWNERS) if kinds else ()
    ):
        if kind in kinds:
            owner = EnergyOwner(kind, HwType(hw_type), name, group, bool(rest))
            owners[owner] = owners.get(owner, 0) + weigh(energy, worth)
    return HistoryExtract(
        start=min(row[1] for row in found),
        end=max(row[2] for row in found),
        steps=tuple(sorted(row[0] for row in found)),
        domains=tuple(domains.values()),
        owners=owners,
        spans=_spans(database, stretch, weigh) if SPAN in kinds else {},
        reckonings=tuple(reckonings),
    )


def _spans(
    database: sqlite3.Connection, stretch: Mapping[str, int], weigh: Callable[[int, int], int]
) -> dict[SpanName, SpanUsage]:
    energies: dict[int, dict[HwType, int]] = {}
    for key, hw_type, worth, energy in database.execute(_SPAN_ENERGY):
        row, kind = energies.setdefault(key, {}), HwType(hw_type)
        row[kind] = row.get(kind, 0) + weigh(energy, worth)
    return {
        SpanName(SpanRole(role), service, name): SpanUsage(
            energies.get(key, {}), calls, *map(int, claims)
        )
        for key, role, service, name, calls, *claims in database.execute(_SPANS, stretch)
    }


def _domain_total(row: list[Any], sums: list[int], gaps: Mapping[GapReason, int]) -> DomainTotal:
    domain, hw_type, name, provenance, method, in_cover, attributed = row
    energy, consumers, idle, unattributed = sums
    return DomainTotal(
        id=domain,
        hw_type=HwType(hw_type),
        name=name,
        provenance=Provenance(provenance),
        method=method,
        in_cover=bool(in_cover),
        attributed=bool(attributed),
        energy=energy,
        consumers=consumers,
        idle=idle,
        unattributed=unattributed,
        gaps=gaps,
    )


# ------------------------------------------------------------------------------- the connection


@contextmanager
def _connected(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that writes nothing to the store and takes no lock that blocks its writer.

    The index of the write-ahead log, and the locks in it, are the agent's alone: its user and root
    read beside it, others read a copy. Where the agent closed the store there is no log, and who
    may not create one reads the file as it is: nobody is writing it.
    """
    if not file_exists(path):
        raise StoreError(
            f"There is no store at {path}: no agent has kept one there. Start `wattspan run`,"
            " or name the state directory of one that runs with --state-dir."
        )
    address = f"{path.absolute().as_uri()}?mode=ro"
    with ExitStack() as stack:
        try:
            database = _opened(address)
        except sqlite3.OperationalError:
            if _wal_path(path).exists():
                copy = _copied(path, Path(stack.enter_context(TemporaryDirectory())))
                if copy is None:
                    raise
                database = _opened(copy.as_uri())
            else:
                database = _opened(f"{address}&immutable=1")
        yield stack.enter_context(closing(database))


def _copied(path: Path, folder: Path) -> Path | None:
    """A copy of one moment's database in ``folder``; None if it cannot be had.

    The database is copied first, then its log: whatever a checkpoint writes to the database in
    between is in the log as well, until the log begins anew, which changes its header.
    """
    copy = folder / path.name
    for _ in range(_COPY_ATTEMPTS):
        try:
            header = _wal_header(_wal_path(path))
            copyfile(path, copy)
            copyfile(_wal_path(path), _wal_path(copy))
            if header == _wal_header(_wal_path(path)):
                return copy
        except FileNotFoundError:  # the agent has closed the store
            _wal_path(copy).unlink(missing_ok=True)
            if path.exists() and not _wal_path(path).exists():
                copyfile(path, copy)
                return copy
        except OSError:
            return None
    return None


def _wal_path(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def _wal_header(log: Path) -> bytes:
    with log.open("rb") as file:
        return file.read(_WAL_HEADER_BYTES)


def _opened(address: str) -> sqlite3.Connection:
    database = sqlite3.connect(address, uri=True, timeout=5.0, isolation_level=None)
    database.text_factory = lambda text: text.decode("utf-8", "replace")  # a spoilt name is one
    try:
        database.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    except sqlite3.Error:
        database.close()
        raise
    return database


def _require_present(database: sqlite3.Connection, path: Path) -> None:
    try:
        found = supported_version(database)
    except SchemaError as error:
        raise StoreError(
            f"Cannot read the store {path}: it {error}. Upgrade wattspan, or name another."
        ) from None
    if found < len(MIGRATIONS):
        raise StoreError(
            f"Cannot read the store {path}: it was written by an older wattspan. Restart the"
            " agent, which brings it up to date."
        )


def _sentence(error: Exception, path: Path) -> str:
    if sqlite_error_name(error) in {"SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PERM"}:
        return (
            f"Cannot read the store {path}: {error}. Run this as root or as the user of the agent."
        )
    if sqlite_error_name(error) in {"SQLITE_BUSY", "SQLITE_LOCKED"}:
        return f"Cannot read the store {path}: another program keeps it locked. Try again."
    return (
        f"Cannot read the store {path}: it is corrupt ({error}). Restart the agent, which moves"
        " it aside and begins a new one."
    )
