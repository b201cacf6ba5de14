"""Energy that remembers what it weighs, so that every sum of it does. Pure.

However a report divides energy, lists, folds and subtracts it, each of its figures is a sum of
energies or a difference of such: what they cost and emitted goes the same ways.

Which rates were in force when: written down whenever one changes, with the books.

A report of an earlier time takes them where the configuration does not say what held then: where
a rate is asked of somebody. Everything here happens inside the caller's transaction.

The buckets that a question is about, told apart by what energy was worth in them.
"""

from __future__ import annotations

import sqlite3
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from wattspan.attribution.cost import KILOWATT_HOUR
from wattspan.footprint.schedule import RatePeriod
from wattspan.model import Checkpoint, Footprint, RatedEnergy

DAY_SECONDS = 86400
"""Seconds; every bucket's length divides it."""


class BucketRate(NamedTuple):
    """What a bucket's energy weighs: the mean rate while one was known, and how long none was.

    In billionths times seconds, and seconds, of a day as a whole: so that both stay integers.
    """

    rate: int
    unknown: int


def bucket_rate(pieces: Iterable[RatePeriod]) -> BucketRate:
    """Of a bucket that was measured in these pieces, and whose energy is taken as spent evenly.

    They are all of it, or less: what is left out was not measured, so nothing was spent in it.
    Whole but for what is less than one where they are no divisor of a day.
    """
    rate = unknown = measured = 0
    for length, one in pieces:
        measured += length
        if one is None:
            unknown += length
        else:
            rate += one * length
    if not measured:  # then where its energy comes from is not known, and nor is its rate
        return BucketRate(0, DAY_SECONDS)
    return BucketRate(rate * DAY_SECONDS // measured, unknown * DAY_SECONDS // measured)


class EnergyWithWeights(int):
    """Microjoules, and their weights, one for each kind. Adds, subtracts and negates as both.

    It is an int to whoever does not ask.
    """

    weights: tuple[BucketRate, ...]

    @classmethod
    def of(cls, energy: int, worths: Iterable[BucketRate]) -> EnergyWithWeights:
        """So much energy, all of it spent in buckets of these worths."""
        return cls.made(
            energy, tuple(BucketRate(energy * w.rate, energy * w.unknown) for w in worths)
        )

    @classmethod
    def made(cls, energy: int, weights: tuple[BucketRate, ...]) -> EnergyWithWeights:
        amount = cls(energy)
        amount.weights = weights
        return amount

    def __add__(self, other: int) -> EnergyWithWeights:
        more = weights_of(other)
        if not more:
            return EnergyWithWeights.made(int(self) + int(other), self.weights)
        weights = tuple(
            BucketRate(mine.rate + its.rate, mine.unknown + its.unknown)
            for mine, its in zip(self.weights, more, strict=True)
        )
        return EnergyWithWeights.made(int(self) + int(other), weights)

    __radd__ = __add__

    def __neg__(self) -> EnergyWithWeights:
        return EnergyWithWeights.made(
            -int(self), tuple(BucketRate(-w.rate, -w.unknown) for w in self.weights)
        )

    def __sub__(self, other: int) -> EnergyWithWeights:
        return self + -other

    def __rsub__(self, other: int) -> EnergyWithWeights:
        return -self + other


def weights_of(energy: int) -> tuple[BucketRate, ...]:
    """None of plain energy, which is nothing's: a zero that a sum began with."""
    return energy.weights if isinstance(energy, EnergyWithWeights) else ()


class RatedTotal(NamedTuple):
    """What some energy came to: billionths of a unit, and the microjoules whose rate nobody knows.

    Whatever is less than one of these is rounded.
    """

    billionths: int
    unknown: int


def rated_totals(energy: int) -> tuple[RatedTotal, ...]:
    """What ``energy`` came to, in each kind that was asked for."""
    return tuple(
        RatedTotal(_rounded(w.rate, DAY_SECONDS * KILOWATT_HOUR), _rounded(w.unknown, DAY_SECONDS))
        for w in weights_of(energy)
    )


def _rounded(number: int, by: int) -> int:
    return (2 * number + by) // (2 * by)


MAX_RATE_CHANGES = 100_000
"""Changes that are kept of a kind; the oldest are forgotten. A price an hour is eleven years."""

COST, CARBON = "cost", "carbon"


UNKNOWN_UNIT = "-"
"""In place of a unit: nothing was measured until the next change. No currency is written so."""

_UnitAndRate = tuple[str, int | None]
"""A unit and a rate."""

_NO_RATE: _UnitAndRate = ("", None)


class RateChange(NamedTuple):
    """From this Unix second on so many billionths of a unit were in force; None: not known."""

    start: int
    unit: str
    rate: int | None


def record_rates(
    database: sqlite3.Connection,
    opening: Checkpoint,
    before: Checkpoint | None = None,
    most: int = MAX_RATE_CHANGES,
) -> None:
    """Add what the books that are about to be written say, if it is anything new.

    ``before`` are the books that were written last. To be called before what these books add to
    the history is added, for time in which nothing was measured is noted as such.
    """
    now = _seconds(opening)
    then = min(now, _seconds(before)) if before is not None else now
    earlier = dict(_kinds(before.footprint)) if before is not None else {}
    for kind, weighed in _kinds(opening.footprint):
        # A clock that was set back begins anew there: what was said of later was of another time.
        database.execute("DELETE FROM rate WHERE kind = ? AND start > ?", (kind, now))
        last = database.execute(
            "SELECT unit, rate FROM rate WHERE kind = ? ORDER BY start DESC LIMIT 1", (kind,)
        ).fetchone()
        news = _new_changes(weighed, earlier.get(kind), last, then, now)
        if last is None:
            last = _NO_RATE
            if not database.execute("SELECT EXISTS (SELECT 1 FROM domain_energy)").fetchone()[0]:
                news = [RateChange(0, UNKNOWN_UNIT, None), *news]
        for change in news:
            if change[1:] != last:
                _write_change(database, kind, change, most)
                last = change[1:]


def _new_changes(
    weighed: RatedEnergy | None,
    before: RatedEnergy | None,
    last: _UnitAndRate | None,
    then: int,
    now: int,
) -> list[RateChange]:
    """What ``weighed`` says, and of the time since the books before it if they kept silent.

    That a rate is not known says nothing while nothing is spent: an agent that begins has not
    asked yet. Once something was, none was known from where that was first seen.
    """
    if weighed is None:
        return [RateChange(now, *_NO_RATE)]
    unit = weighed.unit
    if before is not None and before.unit != unit:
        before = None
    lost = weighed.unknown > (before.unknown if before is not None else 0)
    if weighed.rate is None and not lost:
        return []
    news = [RateChange(now, unit, weighed.rate)]
    if before is not None and before.rate is None and last != (unit, None):
        news.insert(0, RateChange(then, unit, None if lost else weighed.rate))
    return news


def _write_change(database: sqlite3.Connection, kind: str, change: RateChange, most: int) -> None:
    database.execute(
        "INSERT INTO rate VALUES (?, ?, ?, ?)"
        " ON CONFLICT DO UPDATE SET unit = excluded.unit, rate = excluded.rate",
        (kind, *change),
    )
    database.execute(
        "DELETE FROM rate WHERE kind = ?1 AND start <= (SELECT start FROM rate WHERE kind = ?1"
        " ORDER BY start DESC LIMIT 1 OFFSET ?2)",
        (kind, most),
    )


def rate_changes(database: sqlite3.Connection, kind: str, end: int) -> tuple[RateChange, ...]:
    """All that is known of ``kind`` before ``end``, in order."""
    rows = database.execute(
        "SELECT start, unit, rate FROM rate WHERE kind = ? AND start < ? ORDER BY start",
        (kind, end),
    )
    return tuple(RateChange(*row) for row in rows)


class RateHistory:
    """The rates of one unit as pieces of time, for stretches that are asked for in any order."""

    def __init__(self, changes: Sequence[RateChange], unit: str) -> None:
        self._starts = [change.start for change in changes]
        self._rates = [change.rate if change.unit == unit else None for change in changes]
        self._measured = [change.unit != UNKNOWN_UNIT for change in changes]

    def pieces(self, start: int, end: int) -> Iterator[RatePeriod]:
        """The time from ``start`` to ``end`` in pieces of one rate each, in order.

        Time in which nothing was measured is left out. Before all that was written down, or is
        still kept, something may have been: no rate is known of it.
        """
        at, place = start, bisect_right(self._starts, start)
        while at < end:
            to = min(end, self._starts[place]) if place < len(self._starts) else end
            if not place:
                yield to - at, None
            elif self._measured[place - 1]:
                yield to - at, self._rates[place - 1]
            at, place = to, place + 1


def _seconds(opening: Checkpoint) -> int:
    return max(0, opening.at.wall // 10**9)


def _kinds(footprint: Footprint) -> Iterable[tuple[str, RatedEnergy | None]]:
    return ((COST, footprint.cost), (CARBON, footprint.carbon))


RatePieces = Callable[[int, int], Iterable[RatePeriod]]


class Weighting(NamedTuple):
    """What a kilowatt-hour came to when; without ``pieces`` it was what was written down then."""

    kind: str  # "cost" or "carbon"
    unit: str
    pieces: RatePieces | None = None
    steady: bool = False  # at all times the same


EnergyWeigher = Callable[[int, int], int]
"""Microjoules, and the class of buckets they were spent in, as energy that knows its weight."""


def select_buckets(
    database: sqlite3.Connection,
    within: str,
    stretch: Mapping[str, int],
    reckonings: Sequence[Weighting],
) -> EnergyWeigher:
    """Put every bucket of the stretch into a table of this connection's own, each in its class.

    Buckets in which a kilowatt-hour came to the same are of one class, so that what comes of a
    question is little, however many buckets it is about.
    """
    tables = ("domain_energy", "span_energy")
    found = database.execute(
        " UNION ".join(f"SELECT DISTINCT step, start FROM {t} WHERE {within}" for t in tables),  # noqa: S608
        stretch,
    ).fetchall()
    every = [_pieces(database, each, stretch["end"] + 2 * 86400) for each in reckonings]
    classes: dict[tuple[BucketRate, ...], int] = {}
    rows: list[tuple[int, int, int]] = []
    for step, start in found:
        worths = tuple(bucket_rate(pieces(start, start + step)) for pieces in every)
        rows.append((step, start, classes.setdefault(worths, len(classes))))
    database.execute("PRAGMA temp_store = MEMORY")
    database.execute(
        "CREATE TEMP TABLE bucket (step INTEGER, start INTEGER, class INTEGER,"
        " PRIMARY KEY (step, start)) WITHOUT ROWID"
    )
    database.executemany("INSERT INTO bucket VALUES (?, ?, ?)", rows)
    if not reckonings:
        return lambda energy, _: energy
    known = list(classes)
    return lambda energy, number: EnergyWithWeights.of(energy, known[number])


def _pieces(database: sqlite3.Connection, reckoning: Weighting, end: int) -> RatePieces:
    if reckoning.pieces is not None:
        return reckoning.pieces
    return RateHistory(rate_changes(database, reckoning.kind, end), reckoning.unit).pieces
