"""Cost of energy: rates per kilowatt-hour, by the time of day if needed, and totals. Pure.

All figures are integers: rates and totals in billionths of a unit, energy in microjoules. Fractions
of a billionth are carried over, so a total does not depend on the number and size of the portions.

Periods of a schedule are in local time, so an instant is first converted to it. The hour that
daylight saving time skips has no instants, and the repeated hour has its rate twice; neither needs
other rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime, tzinfo
from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from wattspan.model import MAX_RATE, DomainAccount, Microjoules, RatedEnergy, RateOrigin

KILOWATT_HOUR = 3_600_000_000_000
"""Microjoules."""

BILLION = 10**9


def billionths(rate: float) -> int | None:
    """``rate`` in billionths by its decimal digits; None if negative, above ``MAX_RATE`` or NaN.

    0.3 is 300000000, not the rounded value of the nearest binary fraction.
    """
    if not 0 <= rate <= MAX_RATE:
        return None
    return round(Fraction(repr(rate)) * BILLION)


class RateAccumulator:
    """The total cost of energy at a rate that may change or be unknown.

    ``before`` is the total of an earlier run; it is continued if its unit is the same.
    """

    __slots__ = ("_origin", "_rest", "_total", "_unit", "_unknown")

    def __init__(self, unit: str, origin: RateOrigin, before: RatedEnergy | None = None) -> None:
        self._unit, self._origin = unit, origin
        self._rest = 0  # fraction of a billionth, in microjoules times billionths
        self._total = self._unknown = 0
        if before is not None and before.unit == unit:
            self._total, self._unknown = before.total, int(before.unknown)

    def add(self, energy: int, rate: int | None) -> RatedEnergy:
        """Add ``energy`` at ``rate`` (None: unknown); returns the totals."""
        if rate is None:
            self._unknown += energy
        else:
            whole, self._rest = divmod(energy * rate + self._rest, KILOWATT_HOUR)
            self._total += whole
        return RatedEnergy(self._unit, self._origin, rate, self._total, Microjoules(self._unknown))


class CoverEnergy:
    """The energy of the cover since the last call.

    ``accounts`` are from a checkpoint; their energy was added by an earlier run.
    """

    def __init__(self, accounts: Iterable[DomainAccount] = ()) -> None:
        self._seen = {account.domain.id: int(account.counted) for account in accounts}

    def spent(self, accounts: Iterable[DomainAccount]) -> int:
        """The increase of the energy that counts; that from outside the cover never does."""
        spent = 0
        for account in accounts:
            rise = account.counted - self._seen.get(account.domain.id, 0)
            if rise > 0:
                self._seen[account.domain.id] = int(account.counted)
                spent += rise
        return spent


MINUTES_PER_DAY = 1440

EVERY_DAY = frozenset(range(7))

RatePeriod = tuple[int, int | None]
"""Seconds, and the rate during them in billionths; None if it is unknown."""


class DayOfYear(NamedTuple):
    month: int
    day: int


class Season(NamedTuple):
    """From one day of the year to another, both included; may contain the new year."""

    first: DayOfYear
    last: DayOfYear

    def contains(self, month: int, day: int) -> bool:
        here = (month, day)
        if self.first <= self.last:
            return self.first <= here <= self.last
        return here >= self.first or here <= self.last


@dataclass(frozen=True, slots=True)
class Period:
    """One rate, on certain days, from the minute ``begin`` to before the minute ``end``.

    A period whose end is not after its beginning ends on the next day; ``days`` are those on which
    it begins. ``since`` and ``until`` are included.
    """

    rate: int
    begin: int = 0
    end: int = MINUTES_PER_DAY
    days: frozenset[int] = EVERY_DAY  # Monday is 0
    season: Season | None = None
    since: date | None = None
    until: date | None = None

    @property
    def crosses_midnight(self) -> bool:
        return self.end <= self.begin

    def is_valid(self, day: date) -> bool:
        """Return True if ``day`` is not before ``since`` or after ``until``."""
        return (self.since is None or self.since <= day) and (
            self.until is None or day <= self.until
        )

    def recurs(self, weekday: int, month: int, day: int) -> bool:
        """Return True if ``days`` and ``season`` include such a day."""
        return weekday in self.days and (self.season is None or self.season.contains(month, day))

    def begins_on(self, day: date) -> bool:
        return self.recurs(day.weekday(), day.month, day.day) and self.is_valid(day)

    def contains(self, day: date, minute: int) -> bool:
        """Return True if the period is in force at this minute of this day."""
        if not self.crosses_midnight:
            return self.begin <= minute < self.end and self.begins_on(day)
        if minute >= self.begin:
            return self.begins_on(day)
        return minute < self.end and self.begins_on(date.fromordinal(day.toordinal() - 1))


@dataclass(frozen=True, slots=True)
class Schedule:
    """Periods that never overlap, and the rate outside of them; None if it is unknown."""

    zone: tzinfo
    periods: tuple[Period, ...]
    default: int | None = None

    def rate(self, seconds: int) -> int | None:
        """Return the rate at a Unix time; None if it is unknown."""
        local = datetime.fromtimestamp(seconds, self.zone)
        day, minute = local.date(), local.hour * 60 + local.minute
        for period in self.periods:
            if period.contains(day, minute):
                return period.rate
        return self.default

    def periods_between(self, start: int, end: int) -> Iterator[RatePeriod]:
        """Yield the periods of constant rate from ``start`` to ``end`` (Unix seconds), in order."""
        # Offsets of time zones are multiples of a quarter of an hour.
        minutes = {edge for period in self.periods for edge in (period.begin, period.end)}
        grain = 60 * math.gcd(15, *minutes)
        at = start
        while at < end:
            to = min(end, (at // grain + 1) * grain)
            yield to - at, self.rate(at)
            at = to


# ----------------------------------------------------------------------------------- overlaps


class PeriodOverlap(NamedTuple):
    """The numbers of two periods that are both in force at this minute of this day."""

    first: int
    second: int
    day: date
    minute: int


_CALENDAR_CYCLE_DAYS = 28 * 365 + 7  # days until weekdays and leap years repeat


def find_overlap(periods: Sequence[Period]) -> PeriodOverlap | None:
    """Return the first overlap of two periods, or None.

    Checks one calendar cycle after each first or last day of a period.
    """
    edges = {period.since.toordinal() for period in periods if period.since}
    edges |= {period.until.toordinal() + 1 for period in periods if period.until}
    last = min(edges, default=date(2028, 1, 1).toordinal())
    starts = sorted({last - _CALENDAR_CYCLE_DAYS, *edges})
    ranges = pairwise([*starts, starts[-1] + _CALENDAR_CYCLE_DAYS])
    found = (
        _overlap_in(periods, start, min(end, start + _CALENDAR_CYCLE_DAYS)) for start, end in ranges
    )
    return next((one for one in found if one is not None), None)


def _overlap_in(periods: Sequence[Period], start: int, end: int) -> PeriodOverlap | None:
    """Return the first overlap from day ``start`` to before ``end``.

    No period becomes valid or invalid in between.
    """
    first = date.fromordinal(start)
    valid = [n for n, period in enumerate(periods) if period.is_valid(first)]

    @cache
    def starting(weekday: int, month: int, day: int) -> frozenset[int]:
        return frozenset(n for n in valid if periods[n].recurs(weekday, month, day))

    seen: set[tuple[frozenset[int], frozenset[int]]] = set()
    eve = date.fromordinal(start - 1)
    before = frozenset(n for n, period in enumerate(periods) if period.begins_on(eve))
    for day in map(date.fromordinal, range(start, end)):
        now = starting(day.weekday(), day.month, day.day)
        if (before, now) not in seen:
            seen.add((before, now))
            if found := _overlapping_pair(periods, before, now, day):
                return found
        before = now
    return None


def _overlapping_pair(
    periods: Sequence[Period], before: frozenset[int], now: frozenset[int], day: date
) -> PeriodOverlap | None:
    """Return two overlapping periods of a day and their first common minute.

    ``before`` and ``now`` are the periods that began on the previous day and on this day.
    """
    today = [(n, periods[n]) for n in now]
    parts = [(p.begin, MINUTES_PER_DAY if p.crosses_midnight else p.end, n) for n, p in today]
    parts += [(0, periods[n].end, n) for n in before if periods[n].crosses_midnight]
    intervals = sorted(part for part in parts if part[0] < part[1])
    for earlier, later in pairwise(intervals):  # no interval is empty, so neighbours suffice
        if later[0] < earlier[1]:
            first, second = sorted((earlier[2], later[2]))
            return PeriodOverlap(first, second, day, later[0])
    return None
