"""Cost and carbon: energy is counted once, and totals never fall."""

from __future__ import annotations

from dataclasses import replace
from datetime import date, datetime, timedelta
from zoneinfo import ZoneInfo

from hypothesis import given
from hypothesis import strategies as st
from testbed.snapshots import CPU, account

from wattspan.footprint.cost import (
    BILLION,
    KILOWATT_HOUR,
    MINUTES_PER_DAY,
    CoverEnergy,
    DayOfYear,
    Period,
    RateAccumulator,
    Schedule,
    Season,
    billionths,
    find_overlap,
)
from wattspan.model import MAX_RATE, DomainAccount, Microjoules, RateOrigin

ENERGIES = st.integers(0, 10**13)
RATES = st.none() | st.integers(0, MAX_RATE * BILLION)


def scale() -> RateAccumulator:
    return RateAccumulator("EUR", RateOrigin.CONSTANT)


# ----------------------------------------------------------------------------------- weighing


@given(st.lists(st.tuples(ENERGIES, RATES), min_size=1))
def test_energy_is_counted_once_in_total_or_unknown(
    spent: list[tuple[int, int | None]],
) -> None:
    scales = scale()
    for energy, rate in spent:
        weighed = scales.add(energy, rate)
    exact = sum(energy * rate for energy, rate in spent if rate is not None)
    assert weighed.total == exact // KILOWATT_HOUR
    assert weighed.unknown == sum(energy for energy, rate in spent if rate is None)


@given(st.lists(st.tuples(ENERGIES, RATES), min_size=1))
def test_totals_never_fall(spent: list[tuple[int, int | None]]) -> None:
    scales, before = scale(), scale().add(0, None)
    for energy, rate in spent:
        now = scales.add(energy, rate)
        assert (now.total, now.unknown) >= (before.total, before.unknown)
        assert now.total >= before.total
        assert now.unknown >= before.unknown
        before = now


@given(st.lists(ENERGIES, min_size=1), st.integers(0, MAX_RATE * BILLION))
def test_cost_of_portions_is_the_cost_of_the_whole(portions: list[int], rate: int) -> None:
    in_portions, at_once = scale(), scale()
    for energy in portions:
        last = in_portions.add(energy, rate)
    assert last == at_once.add(sum(portions), rate)


@given(
    st.lists(st.tuples(ENERGIES, RATES), min_size=1),
    st.lists(st.tuples(ENERGIES, RATES), min_size=1),
)
def test_restart_loses_less_than_a_billionth(
    before: list[tuple[int, int | None]], after: list[tuple[int, int | None]]
) -> None:
    unbroken, first = scale(), scale()
    for energy, rate in before:
        closed = first.add(energy, rate)
    second = RateAccumulator("EUR", RateOrigin.SCHEDULE, closed)
    for energy, rate in before + after:
        whole = unbroken.add(energy, rate)
    for energy, rate in after:
        resumed = second.add(energy, rate)
    assert 0 <= whole.total - resumed.total <= 1
    assert resumed.unknown == whole.unknown
    assert resumed.origin is RateOrigin.SCHEDULE


@given(st.floats())
def test_rate_in_billionths_is_exact_or_unknown(rate: float) -> None:
    found = billionths(rate)
    if found is None:
        assert not 0 <= rate <= MAX_RATE
    else:
        assert abs(found - rate * BILLION) <= 0.5 + rate * BILLION * 1e-15


@given(st.integers(0, MAX_RATE), st.integers(0, 999))
def test_rate_of_three_decimals_is_exact(whole: int, thousandths: int) -> None:
    written = float(f"{min(whole, MAX_RATE - 1)}.{thousandths:03}")
    assert billionths(written) == min(whole, MAX_RATE - 1) * BILLION + thousandths * 10**6


# ---------------------------------------------------------------------------------- the cover


@st.composite
def books(draw: st.DrawFn) -> list[list[DomainAccount]]:
    """Snapshots' accounts: energies that only rise, domains that come, and join or leave it."""
    turns: list[list[DomainAccount]] = []
    energy = {"a": 0, "b": 0, "c": 0}
    for _ in range(draw(st.integers(1, 8))):
        row = []
        for name in energy:
            energy[name] += draw(st.integers(0, 1000))
            if draw(st.booleans()):
                whole = account(name, CPU, name, None, (0, 0, 0))
                domain = replace(whole.domain, resource=None, in_cover=draw(st.booleans()))
                row.append(replace(whole, domain=domain, energy=Microjoules(energy[name])))
        turns.append(row)
    return turns


@given(books())
def test_cover_counts_each_increase_once(
    turns: list[list[DomainAccount]],
) -> None:
    cover = CoverEnergy()
    rises = [cover.spent(turn) for turn in turns]
    assert min(rises) >= 0
    last = {one.domain.id: one.energy for turn in turns for one in turn}
    assert sum(rises) <= sum(last.values())
    assert cover.spent(turns[-1]) == 0


@given(st.lists(st.lists(st.integers(0, 1000), min_size=2, max_size=2), min_size=1))
def test_steady_cover_is_counted_to_the_microjoule(rises: list[list[int]]) -> None:
    cover, totals, found = CoverEnergy(), [0, 0], 0
    for one, other in rises:
        totals = [totals[0] + one, totals[1] + other]
        found += cover.spent(
            [
                replace(account(name, CPU, name, None, (0, 0, 0)), energy=Microjoules(total))
                for name, total in zip("ab", totals, strict=True)
            ]
        )
    assert found == sum(totals)


# ----------------------------------------------------------------------------------- schedules

MINUTES = st.integers(0, MINUTES_PER_DAY - 1)
DATES = st.dates(date(2020, 1, 1), date(2030, 12, 31))
DAYS_OF_YEAR = st.dates(date(2000, 1, 1), date(2000, 12, 31)).map(
    lambda day: DayOfYear(day.month, day.day)
)


@st.composite
def periods(draw: st.DrawFn) -> Period:
    begin, end = draw(st.lists(MINUTES, min_size=2, max_size=2, unique=True))
    since, until = sorted((draw(DATES), draw(DATES)))
    return Period(
        rate=draw(st.integers(0, 10**9)),
        begin=begin,
        end=draw(st.sampled_from([end, MINUTES_PER_DAY])),
        days=draw(st.frozensets(st.integers(0, 6), min_size=1)),
        season=draw(st.none() | st.builds(Season, DAYS_OF_YEAR, DAYS_OF_YEAR)),
        since=draw(st.sampled_from([None, since])),
        until=draw(st.sampled_from([None, until])),
    )


@given(st.lists(periods(), min_size=2, max_size=3), DATES, MINUTES)
def test_accepted_periods_never_overlap(some: list[Period], day: date, minute: int) -> None:
    holding = [n for n, period in enumerate(some) if period.contains(day, minute)]
    found = find_overlap(some)
    if len(holding) > 1:
        assert found is not None
    if found is not None:  # the message is correct
        assert some[found.first].contains(found.day, found.minute)
        assert some[found.second].contains(found.day, found.minute)
        assert found.first < found.second


@given(
    st.sampled_from(["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu"]),
    periods(),
    st.integers(1_500_000_000 // 60, 1_900_000_000 // 60),
    st.integers(1, 2880),
)
def test_pieces_equal_the_rates_of_each_minute(
    zone: str, period: Period, start: int, minutes: int
) -> None:
    schedule = Schedule(ZoneInfo(zone), (period,), None)
    at = start * 60
    for seconds, rate in schedule.periods_between(at, at + minutes * 60):
        for second in range(at, at + seconds, 60):
            assert schedule.rate(second) == rate
        at += seconds
    assert at == (start + minutes) * 60


@given(
    st.integers(0, MINUTES_PER_DAY - 60),
    st.integers(1, 60),
    st.dates(date(2024, 1, 1), date(2026, 12, 31)),
)
def test_pieces_add_up_to_the_length_of_the_day(begin: int, length: int, day: date) -> None:
    zone = ZoneInfo("Europe/Berlin")
    midnight = datetime(day.year, day.month, day.day, tzinfo=zone)
    after = day + timedelta(1)
    next_midnight = datetime(after.year, after.month, after.day, tzinfo=zone)
    start, end = int(midnight.timestamp()), int(next_midnight.timestamp())
    schedule = Schedule(zone, (Period(1, begin, begin + length),), 0)
    pieces = list(schedule.periods_between(start, end))
    assert sum(seconds for seconds, _ in pieces) == end - start
    held = sum(seconds for seconds, rate in pieces if rate)
    assert (end - start != 86400) or held == 60 * length
