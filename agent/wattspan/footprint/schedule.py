"""A rate by the time of day: which period holds at an instant, and whether two ever do. Pure.

Periods are meant in local time, so an instant is first what the clock on the wall shows then.
In the night in which clocks go forward the hour that is left out has no instants, and in that in
which they go back the hour that comes twice holds twice: nothing else needs to be known of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime, tzinfo
from itertools import pairwise
from typing import NamedTuple

MINUTES_PER_DAY = 1440
"""Minutes."""

EVERY_DAY = frozenset(range(7))

RatePeriod = tuple[int, int | None]
"""So many seconds at one rate in billionths; None: it is not known."""


class DayOfYear(NamedTuple):
    month: int
    day: int


class Season(NamedTuple):
    """From one day of the year to another, both included; it may go over the new year."""

    first: DayOfYear
    last: DayOfYear

    def contains(self, month: int, day: int) -> bool:
        here = (month, day)
        if self.first <= self.last:
            return self.first <= here <= self.last
        return here >= self.first or here <= self.last


@dataclass(frozen=True, slots=True)
class Period:
    """One rate, on certain days, from one minute of the day to before another.

    A period whose end is not after its beginning ends on the next day; its days are those on
    which it begins. ``since`` and ``until`` are included.
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
        """Whether it does at this minute of this day."""
        if not self.crosses_midnight:
            return self.begin <= minute < self.end and self.begins_on(day)
        if minute >= self.begin:
            return self.begins_on(day)
        return minute < self.end and self.begins_on(date.fromordinal(day.toordinal() - 1))


@dataclass(frozen=True, slots=True)
class Schedule:
    """Periods of which never two hold at once, and what holds when none does, if anything."""

    zone: tzinfo
    periods: tuple[Period, ...]
    default: int | None = None

    def rate(self, seconds: int) -> int | None:
        """What holds at a Unix time; None: nobody said."""
        local = datetime.fromtimestamp(seconds, self.zone)
        day, minute = local.date(), local.hour * 60 + local.minute
        for period in self.periods:
            if period.contains(day, minute):
                return period.rate
        return self.default

    def periods_between(self, start: int, end: int) -> Iterator[RatePeriod]:
        """The time from ``start`` to ``end`` in pieces of one rate each, in order."""
        # Every zone's clock is a multiple of a quarter of an hour from that of every other.
        minutes = {edge for period in self.periods for edge in (period.begin, period.end)}
        grain = 60 * math.gcd(15, *minutes)
        at = start
        while at < end:
            to = min(end, (at // grain + 1) * grain)
            yield to - at, self.rate(at)
            at = to


# ------------------------------------------------------------------------- two that hold at once


class PeriodOverlap(NamedTuple):
    """Two periods, by their numbers, that both hold at this minute of this day."""

    first: int
    second: int
    day: date
    minute: int


_CALENDAR_CYCLE_DAYS = 28 * 365 + 7  # days, after which weekdays and leap years are the same again


def find_overlap(periods: Sequence[Period]) -> PeriodOverlap | None:
    """The first time at which two periods hold at once; None: never.

    Every day on which anything is new is looked at: after each day that a period names as its
    first or last, as many as there are different ones.
    """
    starting = _PeriodStarts(periods)
    seen: set[tuple[int, int]] = set()
    for first, last in _stretches(periods):
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


def _stretches(periods: Iterable[Period]) -> Iterator[tuple[int, int]]:
    edges = {period.since.toordinal() for period in periods if period.since}
    edges |= {period.until.toordinal() + 1 for period in periods if period.until}
    base = date(2000, 1, 1).toordinal()
    starts = sorted(
        {*edges, min(edges, default=base + _CALENDAR_CYCLE_DAYS) - _CALENDAR_CYCLE_DAYS}
    )
    for start, end in pairwise([*starts, starts[-1] + _CALENDAR_CYCLE_DAYS]):
        yield start, min(end, start + _CALENDAR_CYCLE_DAYS)


class _PeriodStarts:
    """Which periods begin on a day, as the bits of a number: for many days, quickly."""

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
    """Two that hold at once on a day, and from when; by those that began on it and before it."""
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
    for earlier, later in pairwise(sorted(parts)):  # none is empty, so neighbours suffice
        if later[0] < earlier[1]:
            return min(earlier[2], later[2]), max(earlier[2], later[2]), later[0]
    return None
