"""Rates by the time of day: the period in force at an instant, and overlaps of periods. Pure.

Periods are in local time, so an instant is first converted to it. The hour that daylight saving
time skips has no instants, and the repeated hour has its rate twice; neither needs other rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime, tzinfo
from itertools import pairwise
from typing import NamedTuple

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

    def begins_on(self, day: date) -> bool:
        return (
            day.weekday() in self.days
            and (self.season is None or self.season.contains(day.month, day.day))
            and (self.since is None or self.since <= day)
            and (self.until is None or day <= self.until)
        )

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
    starting = _PeriodStarts(periods)
    seen: set[tuple[int, int]] = set()
    for first, last in _date_ranges(periods):
        before = starting.on(first - 1)
        for ordinal in range(first, last):
            now = starting.on(ordinal)
            if (before, now) not in seen:
                seen.add((before, now))
                if found := _overlapping_pair(periods, before, now):
                    one, other, minute = found
                    return PeriodOverlap(one, other, date.fromordinal(ordinal), minute)
            before = now
    return None


def _date_ranges(periods: Iterable[Period]) -> Iterator[tuple[int, int]]:
    edges = {period.since.toordinal() for period in periods if period.since}
    edges |= {period.until.toordinal() + 1 for period in periods if period.until}
    base = date(2000, 1, 1).toordinal()
    starts = sorted(
        {*edges, min(edges, default=base + _CALENDAR_CYCLE_DAYS) - _CALENDAR_CYCLE_DAYS}
    )
    for start, end in pairwise([*starts, starts[-1] + _CALENDAR_CYCLE_DAYS]):
        yield start, min(end, start + _CALENDAR_CYCLE_DAYS)


class _PeriodStarts:
    """The periods that begin on a day, as the bits of a number, computed fast for many days."""

    def __init__(self, periods: Sequence[Period]) -> None:
        self._weekdays = [
            sum(1 << n for n, period in enumerate(periods) if weekday in period.days)
            for weekday in range(7)
        ]
        self._seasons = {
            (month, day): sum(
                1 << n
                for n, period in enumerate(periods)
                if period.season is None or period.season.contains(month, day)
            )
            for month in range(1, 13)
            for day in range(1, 32)
        }
        self._dated = [(1 << n, p) for n, p in enumerate(periods) if p.since or p.until]

    def on(self, ordinal: int) -> int:
        day = date.fromordinal(ordinal)
        found = self._weekdays[day.weekday()] & self._seasons[day.month, day.day]
        for bit, period in self._dated:
            if found & bit and not period.begins_on(day):
                found ^= bit
        return found


def _overlapping_pair(
    periods: Sequence[Period], before: int, now: int
) -> tuple[int, int, int] | None:
    """Return two overlapping periods of a day and their first common minute.

    ``before`` and ``now`` are the periods that began on the previous day and on this day, as bits.
    """
    parts = [
        (period.begin, MINUTES_PER_DAY if period.crosses_midnight else period.end, n)
        for n, period in enumerate(periods)
        if now >> n & 1
    ]
    parts += [
        (0, period.end, n)
        for n, period in enumerate(periods)
        if before >> n & 1 and period.crosses_midnight and period.end
    ]
    for earlier, later in pairwise(sorted(parts)):  # no interval is empty, so neighbours suffice
        if later[0] < earlier[1]:
            return min(earlier[2], later[2]), max(earlier[2], later[2]), later[0]
    return None
