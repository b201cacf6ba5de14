"""Cost and carbon rates of the history: recorded rate changes, and energy with its weights.

Every figure of a report is a sum or difference of energies. `EnergyWithWeights` carries cost and
carbon through the same sums.

The store records each change of a rate with the checkpoint. Reports use the record for rates that
come from a server or file, and the configuration for others. Every function runs in the
transaction of the caller.
"""

from __future__ import annotations

import sqlite3
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from wattspan.footprint.cost import KILOWATT_HOUR, RatePeriod
from wattspan.model import Checkpoint, Footprint, RatedEnergy

DAY_SECONDS = 86400
"""Seconds of a day, a multiple of every bucket length."""


class BucketRate(NamedTuple):
    """Rate of a bucket: mean known rate, and time without a known rate.

    Both are scaled to a whole day (billionths times seconds, and seconds) to remain integers.
    """

    rate: int
    unknown: int


def bucket_rate(periods: Iterable[RatePeriod]) -> BucketRate:
    """Return the rate of a bucket with evenly distributed energy, measured in ``periods``.

    The periods may leave out unmeasured time, which has no energy. Rounding is below one unit
    where the measured time does not divide a day.
    """
    rate = unknown = measured = 0
    for length, rate_in_force in periods:
        measured += length
        if rate_in_force is None:
            unknown += length
        else:
            rate += rate_in_force * length
    if not measured:  # no measured time: the rate is unknown
        return BucketRate(0, DAY_SECONDS)
    return BucketRate(rate * DAY_SECONDS // measured, unknown * DAY_SECONDS // measured)


class EnergyWithWeights(int):
    """Microjoules with one weight for each kind; sums, differences and negation keep both."""

    weights: tuple[BucketRate, ...]

    @classmethod
    def of(cls, energy: int, rates: Iterable[BucketRate]) -> EnergyWithWeights:
        """Return ``energy`` of buckets with these rates."""
        return cls.with_weights(
            energy, tuple(BucketRate(energy * w.rate, energy * w.unknown) for w in rates)
        )

    @classmethod
    def with_weights(cls, energy: int, weights: tuple[BucketRate, ...]) -> EnergyWithWeights:
        amount = cls(energy)
        amount.weights = weights
        return amount

    def __add__(self, other: int) -> EnergyWithWeights:
        more = weights_of(other)
        if not more:
            return EnergyWithWeights.with_weights(int(self) + int(other), self.weights)
        weights = tuple(
            BucketRate(a.rate + b.rate, a.unknown + b.unknown)
            for a, b in zip(self.weights, more, strict=True)
        )
        return EnergyWithWeights.with_weights(int(self) + int(other), weights)

    __radd__ = __add__

    def __neg__(self) -> EnergyWithWeights:
        return EnergyWithWeights.with_weights(
            -int(self), tuple(BucketRate(-w.rate, -w.unknown) for w in self.weights)
        )

    def __sub__(self, other: int) -> EnergyWithWeights:
        return self + -other

    def __rsub__(self, other: int) -> EnergyWithWeights:
        return -self + other


def weights_of(energy: int) -> tuple[BucketRate, ...]:
    """Return the weights; empty for a plain int, such as the zero at the start of a sum."""
    return energy.weights if isinstance(energy, EnergyWithWeights) else ()


class RatedTotal(NamedTuple):
    """Cost or carbon of energy: billionths of a unit, and microjoules without a known rate."""

    billionths: int
    unknown: int


def rated_totals(energy: int) -> tuple[RatedTotal, ...]:
    """Return the total of ``energy`` for each requested kind, rounded."""
    return tuple(
        RatedTotal(_rounded(w.rate, DAY_SECONDS * KILOWATT_HOUR), _rounded(w.unknown, DAY_SECONDS))
        for w in weights_of(energy)
    )


def _rounded(number: int, by: int) -> int:
    return (2 * number + by) // (2 * by)


MAX_RATE_CHANGES = 100_000
"""Kept changes of a kind, newest first: eleven years of hourly prices."""

COST, CARBON = "cost", "carbon"


UNKNOWN_UNIT = "-"
"""Unit of an interval without measurement. No currency has this name."""

_UnitAndRate = tuple[str, int | None]
"""A unit and a rate."""

_NO_RATE: _UnitAndRate = ("", None)


class RateChange(NamedTuple):
    """Rate from the Unix second ``start`` on, in billionths of ``unit``; None if unknown."""

    start: int
    unit: str
    rate: int | None


def record_rates(
    database: sqlite3.Connection,
    checkpoint: Checkpoint,
    before: Checkpoint | None = None,
    limit: int = MAX_RATE_CHANGES,
) -> None:
    """Record the changed rates of ``checkpoint``; ``before`` is the last written one.

    Call this before the delta of ``checkpoint`` is added to the history: the first record marks
    earlier time as unmeasured only if the history is empty.
    """
    now = _seconds(checkpoint)
    latest = _seconds(before) if before is not None else now
    then = min(now, latest)
    # A clock that is set back a little repeats a time, whose records are replaced. One that is far
    # off, as on a board without a battery until NTP sets it, replaces none: theirs is another time.
    boot = before.boot_id if before is not None else ""
    repeated = latest if boot == checkpoint.boot_id and latest - now <= DAY_SECONDS else now
    previous_rates = dict(_rated_kinds(before.footprint)) if before is not None else {}
    for kind, rated in _rated_kinds(checkpoint.footprint):
        database.execute(
            "DELETE FROM rate WHERE kind = ? AND start > ? AND start <= ?", (kind, now, repeated)
        )
        last = database.execute(
            "SELECT unit, rate FROM rate WHERE kind = ? AND start <= ? ORDER BY start DESC LIMIT 1",
            (kind, now),
        ).fetchone()
        changes = _new_changes(rated, previous_rates.get(kind), last, then, now)
        if last is None:
            last = _NO_RATE
            if not database.execute("SELECT EXISTS (SELECT 1 FROM domain_energy)").fetchone()[0]:
                changes = [RateChange(0, UNKNOWN_UNIT, None), *changes]
        for change in changes:
            if change[1:] != last:
                _write_change(database, kind, change, limit)
                last = change[1:]


def _new_changes(
    rated: RatedEnergy | None,
    before: RatedEnergy | None,
    last: _UnitAndRate | None,
    then: int,
    now: int,
) -> list[RateChange]:
    """Return the changes at ``now``, and at ``then`` if the previous checkpoint had no rate.

    An unknown rate without energy is no change: a starting agent has not queried it yet. With
    energy, the rate is unknown from the first such checkpoint on.
    """
    if rated is None:
        return [RateChange(now, *_NO_RATE)]
    unit = rated.unit
    if before is not None and before.unit != unit:
        before = None
    lost = rated.unknown > (before.unknown if before is not None else 0)
    if rated.rate is None and not lost:
        return []
    changes = [RateChange(now, unit, rated.rate)]
    if before is not None and before.rate is None and last != (unit, None):
        changes.insert(0, RateChange(then, unit, None if lost else rated.rate))
    return changes


def _write_change(database: sqlite3.Connection, kind: str, change: RateChange, limit: int) -> None:
    database.execute(
        "INSERT INTO rate VALUES (?, ?, ?, ?)"
        " ON CONFLICT (kind, start) DO UPDATE SET unit = excluded.unit, rate = excluded.rate",
        (kind, *change),
    )
    database.execute(
        "DELETE FROM rate WHERE kind = ?1 AND start <= (SELECT start FROM rate WHERE kind = ?1"
        " ORDER BY start DESC LIMIT 1 OFFSET ?2)",
        (kind, limit),
    )


def rate_changes(database: sqlite3.Connection, kind: str, end: int) -> tuple[RateChange, ...]:
    """Return the recorded changes of ``kind`` before ``end``, in order."""
    rows = database.execute(
        "SELECT start, unit, rate FROM rate WHERE kind = ? AND start < ? ORDER BY start",
        (kind, end),
    )
    return tuple(RateChange(*row) for row in rows)


class RateHistory:
    """The rates of one unit as periods, for intervals in any order."""

    def __init__(self, changes: Sequence[RateChange], unit: str) -> None:
        self._starts = [change.start for change in changes]
        self._rates = [change.rate if change.unit == unit else None for change in changes]
        self._measured = [change.unit != UNKNOWN_UNIT for change in changes]

    def periods(self, start: int, end: int) -> Iterator[RatePeriod]:
        """Yield the periods of constant rate from ``start`` to ``end``, in order.

        Unmeasured time is left out. The rate before the first kept record is
        unknown.
        """
        at, place = start, bisect_right(self._starts, start)
        while at < end:
            to = min(end, self._starts[place]) if place < len(self._starts) else end
            if not place:
                yield to - at, None
            elif self._measured[place - 1]:
                yield to - at, self._rates[place - 1]
            at, place = to, place + 1


def _seconds(checkpoint: Checkpoint) -> int:
    return max(0, checkpoint.at.wall // 10**9)


def _rated_kinds(footprint: Footprint) -> Iterable[tuple[str, RatedEnergy | None]]:
    return ((COST, footprint.cost), (CARBON, footprint.carbon))


PeriodsBetween = Callable[[int, int], Iterable[RatePeriod]]


class Weighting(NamedTuple):
    """Rate of a kilowatt-hour over time: ``periods``, or without them the recorded rates."""

    kind: str  # "cost" or "carbon"
    unit: str
    periods: PeriodsBetween | None = None
    steady: bool = False  # at all times the same


EnergyWeigher = Callable[[int, int], int]
"""From microjoules and the class of their buckets to energy with weights."""


def select_buckets(
    database: sqlite3.Connection,
    within: str,
    interval: Mapping[str, int],
    weightings: Sequence[Weighting],
) -> EnergyWeigher:
    """Write every bucket of the interval and its class to a temporary table.

    Buckets with equal rates share a class, so that results stay small for any number of buckets.
    """
    tables = ("domain_energy", "span_energy")
    found = database.execute(
        " UNION ".join(f"SELECT DISTINCT step, start FROM {t} WHERE {within}" for t in tables),  # noqa: S608
        interval,
    ).fetchall()
    rate_periods = [_periods(database, each, interval["end"] + 2 * 86400) for each in weightings]
    classes: dict[tuple[BucketRate, ...], int] = {}
    rows: list[tuple[int, int, int]] = []
    for step, start in found:
        rates = tuple(bucket_rate(periods(start, start + step)) for periods in rate_periods)
        rows.append((step, start, classes.setdefault(rates, len(classes))))
    database.execute("PRAGMA temp_store = MEMORY")
    database.execute(
        "CREATE TEMP TABLE bucket (step INTEGER, start INTEGER, class INTEGER,"
        " PRIMARY KEY (step, start)) WITHOUT ROWID"
    )
    database.executemany("INSERT INTO bucket VALUES (?, ?, ?)", rows)
    if not weightings:
        return lambda energy, _: energy
    known = list(classes)
    return lambda energy, number: EnergyWithWeights.of(energy, known[number])


def _periods(database: sqlite3.Connection, weighting: Weighting, end: int) -> PeriodsBetween:
    if weighting.periods is not None:
        return weighting.periods
    return RateHistory(rate_changes(database, weighting.kind, end), weighting.unit).periods
