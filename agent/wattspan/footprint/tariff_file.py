"""Tariff files: conversion to a schedule, or a report of all faults."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, tzinfo
from pathlib import Path
from typing import Annotated
from zoneinfo import ZoneInfo

import msgspec

from wattspan.config.loading import TomlFile, read_toml
from wattspan.footprint.cost import (
    EVERY_DAY,
    MINUTES_PER_DAY,
    DayOfYear,
    Period,
    Schedule,
    Season,
    billionths,
    find_overlap,
)
from wattspan.model import MAX_RATE
from wattspan.model.settings import SettingError, Table, about, convert, quoted
from wattspan.ports import ConfigError

MAX_PERIODS = 200

_WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_HINT = "leave out periods with a negative price: their rate counts as unknown"


class PeriodRow(Table, frozen=True, rename={"begin": "from", "end": "to"}):
    """One `[[period]]`.

    Keys:
        rate: Price or intensity of a kilowatt-hour.
        begin: Time of day of its beginning.
        end: Time of day of its end.
        days: Days or ranges of days of the week.
        season: First and last day of the year.
        since: First day.
        until: Last day.
    """

    rate: Annotated[float, about(least=0, most=MAX_RATE, hint=_HINT)]
    begin: str = "00:00"
    end: str = "24:00"
    days: tuple[str, ...] = ()
    season: tuple[str, ...] = ()
    since: str = ""
    until: str = ""


class TariffTable(Table, frozen=True):
    """The whole file.

    Keys:
        zone: Time zone, such as "Europe/Berlin".
        otherwise: Rate outside of all periods.
        period: Periods.
    """

    zone: str
    otherwise: Annotated[float | None, about(least=0, most=MAX_RATE, hint=_HINT)] = None
    period: tuple[PeriodRow, ...] = ()


def read_schedule(path: Path) -> Schedule:
    """Return the schedule in the file at ``path``; ConfigError has a line for each fault."""
    try:
        file = read_toml(path)
    except ConfigError as error:
        if not isinstance(error.__context__, FileNotFoundError | NotADirectoryError):
            raise
        raise ConfigError(
            f"Cannot read the tariff {path}: there is no such file. Write one, or name another."
        ) from error
    return build_schedule(file)


def build_schedule(file: TomlFile) -> Schedule:
    """Return the schedule of ``file``; ConfigError has a line for each fault with its place."""
    try:
        # Dates and times of TOML become text.
        table = convert(msgspec.to_builtins(file.values), TariffTable, "tariff")
    except SettingError as error:
        raise ConfigError(
            "\n".join(f"{file.place(key)}: {sentence}" for key, sentence in error.faults)
        ) from None
    faults = list(_size_faults(file, table))
    zone = _zone(table.zone, file, faults)
    periods: list[Period] = []
    for number, row in enumerate(table.period):
        try:
            periods.append(_period(row))
        except ValueError as error:
            faults.append(f"{file.place(f'period[{number}]')}: period[{number}]: {error}.")
    if not faults:
        faults += _overlap_faults(file, periods)
    if faults or zone is None:
        raise ConfigError("\n".join(faults))
    otherwise = None if table.otherwise is None else billionths(table.otherwise)
    return Schedule(zone, tuple(periods), otherwise)


# --------------------------------------------------------------------------------- one period


def _period(row: PeriodRow) -> Period:
    rate = billionths(row.rate)
    assert rate is not None  # noqa: S101 - within its bounds
    begin, end = _minute(row.begin), _minute(row.end)
    if begin == MINUTES_PER_DAY:
        raise ValueError('a period cannot begin at "24:00"; write from = "00:00"')
    if begin == end:
        raise ValueError(f"from and to are both {quoted(row.begin)}; leave out both")
    since, until = _date(row.since), _date(row.until)
    if since and until and until < since:
        raise ValueError(f"until = {until} is before since = {since}")
    return Period(
        rate=rate,
        begin=begin,
        end=end,
        days=frozenset(_days(row.days)) or EVERY_DAY,
        season=_season(row.season),
        since=since,
        until=until,
    )


def _minute(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,2}):([0-9]{2})(?::00)?", text)
    minute = (
        int(match[1]) * 60 + int(match[2]) if match and int(match[2]) < 60 else MINUTES_PER_DAY + 1
    )
    if minute > MINUTES_PER_DAY:
        raise ValueError(f'{quoted(text)} is not a time of day such as "07:00" or "24:00"')
    return minute


def _days(texts: Iterable[str]) -> Iterator[int]:
    for text in texts:
        ends = text.lower().split("-")
        if len(ends) > 2 or not set(ends) <= set(_WEEKDAYS):
            raise ValueError(f'{quoted(text)} is not a day such as "sat", nor days, "mon-fri"')
        first, last = _WEEKDAYS.index(ends[0]), _WEEKDAYS.index(ends[-1])
        yield from ((first + n) % 7 for n in range((last - first) % 7 + 1))


def _season(texts: tuple[str, ...]) -> Season | None:
    if not texts:
        return None
    if len(texts) != 2:
        raise ValueError('a season has a first and a last day: season = ["10-01", "03-31"]')
    return Season(*map(_day_of_year, texts))


def _day_of_year(text: str) -> DayOfYear:
    try:
        if re.fullmatch(r"[0-9]{2}-[0-9]{2}", text):
            day = date.fromisoformat(f"2000-{text}")  # a leap year
            return DayOfYear(day.month, day.day)
    except ValueError:
        pass
    raise ValueError(f'{quoted(text)} is not a day of the year, month first, such as "03-31"')


def _date(text: str) -> date | None:
    try:
        day = date.fromisoformat(text) if text else None
    except ValueError:
        day = date.max
    if day is not None and not 1970 <= day.year < 2200:
        raise ValueError(f"{quoted(text)} is not a day such as 2026-01-31")
    return day


# ---------------------------------------------------------------------------------- the whole


def _zone(name: str, file: TomlFile, faults: list[str]) -> tzinfo | None:
    try:
        return ZoneInfo(name)
    except (ValueError, OSError, LookupError):
        remedy = "write a zone such as"
        faults.append(
            f"{file.place('zone')}: Bad value for 'zone': {quoted(name)} is not a time zone of "
            f'this host; {remedy} "Europe/Berlin", and install tzdata if that is unknown as well.'
        )
        return None


def _size_faults(file: TomlFile, table: TariffTable) -> Iterator[str]:
    if len(table.period) > MAX_PERIODS:
        yield f"{file.path}: {len(table.period)} periods exceed the limit of {MAX_PERIODS}."
    if not table.period and table.otherwise is None:
        yield f"{file.path}: the file sets no rate. Write a [[period]], or otherwise = 0.30."


def _overlap_faults(file: TomlFile, periods: list[Period]) -> Iterator[str]:
    found = find_overlap(periods)
    if found is None:
        return
    lines: Mapping[int, str] = {n: file.place(f"period[{n}]") for n in (found.first, found.second)}
    at = f"{found.minute // 60:02}:{found.minute % 60:02} on {found.day:%a %Y-%m-%d}"
    yield (
        f"{lines[found.second]}: period[{found.second}] overlaps period[{found.first}] at "
        f"{lines[found.first]}: both apply at {at}. Let one end where the other begins."
    )
