"""Queries of the history, with or without a writing agent."""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from msgspec import Struct

from wattspan.model import (
    Certainty,
    GapReason,
    GroupKind,
    HwType,
    Provenance,
    StaticBasis,
    StaticSplit,
    consumers_certainty,
    energy_certainty,
)
from wattspan.ports import StoreError
from wattspan.storage.database import (
    DAY,
    HOUR,
    MIGRATIONS,
    MINUTE,
    SchemaError,
    companion,
    file_exists,
    newer_sqlite_needed,
    sqlite_error_name,
    supported_version,
)
from wattspan.storage.deltas import (
    MODEL,
    SPAN,
    EnergyOwner,
    HostPart,
    SpanName,
    SpanUsage,
    UsageRole,
)
from wattspan.storage.rates import Weighting, select_buckets

_COPY_ATTEMPTS = 5
"""Attempts of a copy: the agent restarts its log at most every few minutes."""

_WAL_HEADER_BYTES = 32
"""Bytes of a write-ahead log that change at its restart: its numbers and salts."""


@dataclass(frozen=True, slots=True)
class DomainTotal:
    """Energy of one domain in an interval, in microjoules; its gaps in nanoseconds.

    A domain with a changed provenance has two totals.
    """

    id: str
    hw_type: HwType
    name: str
    provenance: Provenance
    method: str
    in_cover: bool
    attributed: bool
    gaps: Mapping[GapReason, int]
    energy: int
    consumers: int
    idle: int
    unattributed: int
    withheld: int  # the part of ``unattributed`` without a known baseline

    @property
    def certainty(self) -> Certainty:
        """The certainty of ``energy``."""
        return energy_certainty(self.energy, self.gaps)

    @property
    def consumers_certainty(self) -> Certainty:
        return consumers_certainty(self.certainty, self.gaps, self.withheld)

    @property
    def idle_certainty(self) -> Certainty:
        """The certainty of ``idle``: energy without a known baseline may be idle energy."""
        bounded = self.certainty is Certainty.KNOWN and bool(self.withheld)
        return Certainty.LOWER_BOUND if bounded else self.certainty


@dataclass(frozen=True, slots=True)
class HistoryExtract:
    """Sums of the history over an interval, widened to whole buckets.

    ``start`` and ``end`` are Unix seconds, ``steps`` the lengths of the summed buckets. With
    ``weightings``, every energy is an ``EnergyWithWeights``.
    """

    start: int
    end: int
    steps: tuple[int, ...]
    domains: tuple[DomainTotal, ...]
    owners: Mapping[EnergyOwner, int]
    spans: Mapping[SpanName, SpanUsage] = field(default_factory=dict)
    weightings: tuple[Weighting, ...] = ()


@dataclass(frozen=True, slots=True)
class NoHistory:
    """The history has no data of the interval; ``reach`` is its whole range, or None."""

    reach: tuple[int, int] | None


def extract_history(
    path: Path,
    start: int,
    end: int,
    kinds: Iterable[str] = (),
    weightings: Sequence[Weighting] = (),
) -> HistoryExtract | NoHistory:
    """Return the sums from ``start`` to before ``end`` (Unix seconds), with owners of ``kinds``.

    Energies carry their weight by each of ``weightings``. All sums are of one transaction.
    StoreError if the store is not readable.
    """
    try:
        with _open_read_only(path) as database:
            _require_current_schema(database, path)
            database.execute("BEGIN")
            return _extract(database, start, end, frozenset(kinds), weightings)
    except (sqlite3.Error, ValueError, TypeError) as error:
        # An unknown value is a sign of corruption, as a malformed page is.
        raise _store_error(error, path) from None


_WITHIN = " OR ".join(
    f"(step = {step} AND start > :start - {step} AND start < :end)" for step in (MINUTE, HOUR, DAY)
)
"""Condition for every bucket that overlaps the interval, by primary key."""

_STEPS = "SELECT step, min(start), max(start) + step FROM domain_energy"

_FOUND = f"{_STEPS} WHERE {_WITHIN} GROUP BY step"
_REACH = f"{_STEPS} GROUP BY step"
_GAPS = f"""
SELECT domain, reason, sum(nanoseconds) FROM gap WHERE {_WITHIN} GROUP BY domain, reason
"""  # noqa: S608
# SQLite keeps the order of a cross join: it looks up few buckets instead of the whole history.
_DOMAINS = """
SELECT key, id, hw_type, name, provenance, method, in_cover, attributed, class, energy, consumers,
       idle, unattributed, withheld
FROM domain JOIN (
    SELECT domain, class, sum(energy) AS energy, sum(consumers) AS consumers, sum(idle) AS idle,
           sum(unattributed) AS unattributed, sum(withheld) AS withheld
    FROM bucket CROSS JOIN domain_energy USING (step, start) GROUP BY domain, class
) ON key = domain
ORDER BY in_cover DESC, hw_type, id, provenance, key
"""
_PARTS = ("energy", "consumers", "idle", "unattributed", "withheld")
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
_SPAN_SPLITS = f"""
SELECT span, basis, sum(static), sum(dynamic) FROM span_split WHERE {_WITHIN} GROUP BY span, basis
"""  # noqa: S608
_REQUEST_DIVISIONS = f"""
SELECT span, division, sum(requests) FROM request_division WHERE {_WITHIN} GROUP BY span, division
"""  # noqa: S608
# total() returns floats: the sum of claimed integers may exceed an SQLite integer.
_REQUEST_HOSTS = f"""
SELECT span, part, sum(energy), sum(requests), total(tokens_out)
FROM request_host WHERE {_WITHIN} GROUP BY span, part
"""  # noqa: S608
_SPANS = f"""
SELECT key, role, service, name, owner, calls, nanoseconds, tokens_in, tokens_out
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
    weightings: Sequence[Weighting],
) -> HistoryExtract | NoHistory:
    interval = {"start": start, "end": end}
    found = database.execute(_FOUND, interval).fetchall()
    if not found:
        reach = database.execute(_REACH).fetchall()
        return NoHistory((min(r[1] for r in reach), max(r[2] for r in reach)) if reach else None)
    weigh = select_buckets(database, _WITHIN, interval, weightings)
    gaps: dict[int, dict[GapReason, int]] = {}
    for domain, reason, nanoseconds in database.execute(_GAPS, interval):
        gaps.setdefault(domain, {})[GapReason(reason)] = nanoseconds
    names: dict[int, list[Any]] = {}
    sums: dict[int, list[int]] = {}
    for row in database.execute(_DOMAINS):
        key, *name, rate_class = row[: -len(_PARTS)]
        parts = row[-len(_PARTS) :]
        before = sums.get(key, [0] * len(parts))
        names[key] = name
        sums[key] = [a + weigh(b, rate_class) for a, b in zip(before, parts, strict=True)]
    owners = Counter[EnergyOwner]()
    for kind, hw_type, name, group, rest, rate_class, energy in (
        database.execute(_OWNERS) if kinds else ()
    ):
        if kind in kinds:
            owner = EnergyOwner(kind, HwType(hw_type), name, group, bool(rest))
            owners[owner] += weigh(energy, rate_class)
    return HistoryExtract(
        start=min(row[1] for row in found),
        end=max(row[2] for row in found),
        steps=tuple(sorted(row[0] for row in found)),
        domains=tuple(_domain_total(names[key], gaps.get(key, {}), sums[key]) for key in names),
        owners=owners,
        spans=_spans(database, interval, weigh) if kinds & {SPAN, MODEL} else {},
        weightings=tuple(weightings),
    )


def _spans(
    database: sqlite3.Connection, interval: Mapping[str, int], weigh: Callable[[int, int], int]
) -> dict[SpanName, SpanUsage]:
    splits: dict[int, dict[StaticBasis, StaticSplit]] = defaultdict(dict)
    for key, basis, static, dynamic in database.execute(_SPAN_SPLITS, interval):
        splits[key][StaticBasis(basis)] = StaticSplit(static, dynamic)
    energies: dict[int, Counter[HwType]] = defaultdict(Counter)
    for key, hw_type, rate_class, energy in database.execute(_SPAN_ENERGY):
        energies[key][HwType(hw_type)] += weigh(energy, rate_class)
    divisions: dict[int, dict[str, int]] = defaultdict(dict)
    for key, division, requests in database.execute(_REQUEST_DIVISIONS, interval):
        divisions[key][division] = requests
    hosts: dict[int, dict[str, HostPart]] = defaultdict(dict)
    for key, part, energy, requests, tokens in database.execute(_REQUEST_HOSTS, interval):
        hosts[key][part] = HostPart(energy, requests, int(tokens))
    return {
        SpanName(UsageRole(role), service, name, owner): SpanUsage(
            energies.get(key, {}),
            calls,
            int(time),
            int(read),
            int(made),
            splits.get(key, {}),
            divisions.get(key, {}),
            hosts.get(key, {}),
        )
        for key, role, service, name, owner, calls, time, read, made in database.execute(
            _SPANS, interval
        )
    }


def _domain_total(
    name: Sequence[Any], gaps: Mapping[GapReason, int], sums: Sequence[int]
) -> DomainTotal:
    domain, hw_type, title, provenance, method, *flags = name
    kind, in_cover, attributed = HwType(hw_type), *map(bool, flags)
    return DomainTotal(
        domain, kind, title, Provenance(provenance), method, in_cover, attributed, gaps, *sums
    )


# ------------------------------------------------------------------------------- the connection


@contextmanager
def _open_read_only(path: Path) -> Iterator[sqlite3.Connection]:
    """Yield a read-only connection that never blocks the writer.

    Only the agent's user and root can open the index of the write-ahead log, with its locks; other
    users read a copy. A closed store has no log; a user without permission to create one reads
    the file as immutable.
    """
    if not file_exists(path):
        raise StoreError(
            f"There is no store at {path}. Start `wattspan run`, or name the state directory of a"
            " running agent with --state-dir."
        )
    address = f"{path.absolute().as_uri()}?mode=ro"
    with ExitStack() as stack:
        try:
            database = _connect(address)
        except sqlite3.OperationalError:
            if companion(path, "-wal").exists():
                copy = _copy_database(path, Path(stack.enter_context(TemporaryDirectory())))
                if copy is None:
                    raise
                database = _connect(copy.as_uri())
            else:
                database = _connect(f"{address}&immutable=1")
        yield stack.enter_context(closing(database))


def _copy_database(path: Path, folder: Path) -> Path | None:
    """Return a consistent copy of the database in ``folder``; None if that fails.

    The copy of the log follows the copy of the database: the log contains everything that
    SQLite writes to the database in between, until a restart of the log, which changes its header.
    """
    copy = folder / path.name
    for _ in range(_COPY_ATTEMPTS):
        try:
            header = _wal_header(companion(path, "-wal"))
            copyfile(path, copy)
            copyfile(companion(path, "-wal"), companion(copy, "-wal"))
            if header == _wal_header(companion(path, "-wal")):
                return copy
        except FileNotFoundError:  # the agent has closed the store
            companion(copy, "-wal").unlink(missing_ok=True)
            if path.exists() and not companion(path, "-wal").exists():
                copyfile(path, copy)
                return copy
        except OSError:
            return None
    return None


def _wal_header(log: Path) -> bytes:
    with log.open("rb") as file:
        return file.read(_WAL_HEADER_BYTES)


def _connect(address: str) -> sqlite3.Connection:
    database = sqlite3.connect(address, uri=True, timeout=5.0, isolation_level=None)
    database.text_factory = lambda text: text.decode("utf-8", "replace")  # for damaged names
    try:
        database.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.Error:
        database.close()
        raise
    return database


def _require_current_schema(database: sqlite3.Connection, path: Path) -> None:
    try:
        found = supported_version(database)
    except SchemaError as error:
        raise StoreError(
            f"Cannot read the store {path}: it {error}. Upgrade wattspan, or name another."
        ) from None
    if found < len(MIGRATIONS):
        raise StoreError(
            f"Cannot read the store {path}: it was written by an older wattspan. Restart the"
            " agent, which migrates it."
        )


def _store_error(error: Exception, path: Path) -> StoreError:
    if sqlite_error_name(error) in {"SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PERM"}:
        cause = f"{error}. Run this as root or as the user of the agent"
    elif sqlite_error_name(error) in {"SQLITE_BUSY", "SQLITE_LOCKED"}:
        cause = "another program holds its lock. Try again"
    elif newer := newer_sqlite_needed(error):
        cause = f"{newer}. Use such a Python"
    else:
        cause = (
            f"it is corrupt ({error}). Restart the agent, which renames it and creates a new one"
        )
    return StoreError(f"Cannot read the store {path}: {cause}.")


def own_extract(extract: HistoryExtract, user: str) -> HistoryExtract:
    """``extract`` for one user: the host's totals, and the row of ``user``.

    The rows of others become the rest of their kind, so that every kind has the same sum. A stored
    name of a command, unit or span is no proof of its user, so these rows are others' too.
    """
    owners = Counter[EnergyOwner]()
    for owner, energy in extract.owners.items():
        own = owner.kind == GroupKind.USER and owner.name == user and not owner.rest
        owners[owner if own else EnergyOwner(owner.kind, owner.hw_type, "", "", True)] += energy
    return replace(extract, owners=owners, spans={})


class _Owned(Struct, frozen=True):
    owner: EnergyOwner
    microjoules: int


class _SharedExtract(Struct, frozen=True):
    start: int
    end: int
    steps: tuple[int, ...]
    domains: tuple[DomainTotal, ...]
    owners: list[_Owned]


class _SharedAnswer(Struct, frozen=True):
    """``extract`` is None without data in the interval, ``reach`` without any data."""

    extract: _SharedExtract | None = None
    reach: tuple[int, int] | None = None


def extract_to_json(found: HistoryExtract | NoHistory) -> Any:
    """JSON values of an extract without spans and weights."""
    if isinstance(found, NoHistory):
        return msgspec.to_builtins(_SharedAnswer(reach=found.reach))
    owners = [_Owned(owner, energy) for owner, energy in found.owners.items()]
    shared = _SharedExtract(found.start, found.end, found.steps, found.domains, owners)
    return msgspec.to_builtins(_SharedAnswer(shared))


def extract_from_json(facts: Any) -> HistoryExtract | NoHistory:
    """The extract of ``extract_to_json``; ValueError for other facts."""
    answer = msgspec.convert(facts, _SharedAnswer)
    if answer.extract is None:
        return NoHistory(answer.reach)
    shared = answer.extract
    return HistoryExtract(
        shared.start,
        shared.end,
        shared.steps,
        shared.domains,
        {one.owner: one.microjoules for one in shared.owners},
    )
