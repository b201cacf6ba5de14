"""Energy cost in a report follows the energy: every sum of it, to the last bit."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from wattspan.footprint.cost import KILOWATT_HOUR
from wattspan.model import Checkpoint, Footprint, Instant, Microjoules, RatedEnergy, RateOrigin
from wattspan.storage.database import HOUR, MINUTE, migrate
from wattspan.storage.rates import (
    DAY_SECONDS,
    UNKNOWN_UNIT,
    BucketRate,
    EnergyWithWeights,
    RateChange,
    RatedTotal,
    RateHistory,
    bucket_rate,
    rate_changes,
    rated_totals,
    record_rates,
    weights_of,
)

RATES = st.none() | st.integers(0, 10**15)
WORTHS = st.builds(BucketRate, st.integers(0, 10**15 * DAY_SECONDS), st.integers(0, DAY_SECONDS))


@st.composite
def amounts(draw: st.DrawFn) -> EnergyWithWeights:
    return EnergyWithWeights.of(draw(st.integers(0, 10**15)), (draw(WORTHS), draw(WORTHS)))


@given(st.lists(amounts(), min_size=1))
def test_cost_of_a_sum_equals_its_parts(parts: list[EnergyWithWeights]) -> None:
    whole = sum(parts)
    assert whole == sum(int(part) for part in parts)
    for kind in (0, 1):
        assert weights_of(whole)[kind] == BucketRate(
            sum(part.weights[kind].rate for part in parts),
            sum(part.weights[kind].unknown for part in parts),
        )


@given(amounts(), amounts())
def test_difference_and_its_subtrahend_weigh_the_minuend(
    one: EnergyWithWeights, other: EnergyWithWeights
) -> None:
    left = one - other
    assert left == int(one) - int(other)
    assert (left + other).weights == one.weights
    assert (-left).weights == (other - one).weights
    assert (0 - one).weights == (-one).weights
    assert (one - 0).weights == (0 + one).weights == one.weights


@given(st.lists(st.tuples(st.integers(1, HOUR), RATES), min_size=1, max_size=5))
def test_bucket_rate_is_the_mean_of_known_rates(
    pieces: list[tuple[int, int | None]],
) -> None:
    measured = sum(length for length, _ in pieces)
    known = sum(length * rate for length, rate in pieces if rate is not None)
    unknown = sum(length for length, rate in pieces if rate is None)
    assert bucket_rate(pieces) == BucketRate(
        known * DAY_SECONDS // measured, unknown * DAY_SECONDS // measured
    )


@given(st.lists(st.tuples(st.integers(1, 4), RATES), min_size=1, max_size=5))
def test_complete_bucket_has_no_rounding_loss(
    some: list[tuple[int, int | None]],
) -> None:
    for bucket in (MINUTE, HOUR, DAY_SECONDS):
        rest = bucket - sum(length for length, _ in some)
        mean = sum((Fraction(n * rate, bucket) for n, rate in some if rate is not None), Fraction())
        unknown = sum(length for length, rate in some if rate is None) + rest
        assert bucket_rate([*some, (rest, None)]) == BucketRate(
            int(mean * DAY_SECONDS), unknown * (DAY_SECONDS // bucket)
        )
        assert (mean * DAY_SECONDS).denominator == 1


def test_kilowatt_hour_at_a_rate_weighs_the_rate() -> None:
    hour = bucket_rate([(1800, 4), (900, 8), (900, None)])
    assert rated_totals(EnergyWithWeights.of(KILOWATT_HOUR, (hour,))) == (
        RatedTotal(4, KILOWATT_HOUR // 4),
    )
    assert rated_totals(5) == ()


def test_unmeasured_bucket_has_unknown_energy() -> None:
    assert rated_totals(EnergyWithWeights.of(KILOWATT_HOUR, (bucket_rate([]),))) == (
        RatedTotal(0, KILOWATT_HOUR),
    )


# ----------------------------------------------------------------------------- recorded rates


@contextmanager
def database() -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as fresh:
        migrate(fresh)
        yield fresh


def books(seconds: int, rate: int | None, unit: str = "EUR", unknown: int = 6) -> Checkpoint:
    """Without a rate, and with nothing before: unpriced energy was spent."""
    weighed = RatedEnergy(unit, RateOrigin.METRIC, rate, 5, Microjoules(unknown))
    return Checkpoint(Instant(0, seconds * 10**9), "boot", footprint=Footprint(cost=weighed))


def unpriced(seconds: int) -> Checkpoint:
    """No rate source is configured."""
    return Checkpoint(Instant(0, seconds * 10**9), "boot")


def measured_before(store: sqlite3.Connection) -> None:
    store.execute("INSERT OR IGNORE INTO domain_energy VALUES (60, 0, 1, 1, 0, 0, 0, 0)")


def told(store: sqlite3.Connection, *written: Checkpoint) -> tuple[RateChange, ...]:
    """Stored form of these, in order."""
    before: Checkpoint | None = None
    for opening in written:
        record_rates(store, opening, before)
        measured_before(store)
        before = opening
    return rate_changes(store, "cost", 10**9)


def pieces(
    found: tuple[RateChange, ...], start: int, end: int, unit: str = "EUR"
) -> list[tuple[int, int | None]]:
    return list(RateHistory(found, unit).periods(start, end))


NOTHING = RateChange(0, UNKNOWN_UNIT, None)


@given(st.lists(st.tuples(st.integers(1, 100), RATES), min_size=1, max_size=20))
def test_stored_rate_is_the_rate_in_force(
    turns: list[tuple[int, int | None]],
) -> None:
    at, expected = 1000, dict[int, int | None]()
    with database() as store:
        measured_before(store)
        for seconds, rate in turns:
            record_rates(store, books(at, rate))
            expected |= dict.fromkeys(range(at, at + seconds), rate)
            at += seconds
        history = RateHistory(rate_changes(store, "cost", at), "EUR")
    found = dict[int, int | None]()
    start = 990
    for seconds, rate in history.periods(start, at):
        found |= dict.fromkeys(range(start, start + seconds), rate)
        start += seconds
    assert start == at
    assert found == dict.fromkeys(range(990, 1000), None) | expected


def test_new_agent_lacks_no_rate_before_its_first_energy() -> None:
    with database() as store:
        found = told(store, books(1003, None, unknown=0), books(1008, 7, unknown=0))
    assert found == (NOTHING, RateChange(1003, "EUR", 7))
    assert bucket_rate(pieces(found, 960, 1020)) == BucketRate(7 * DAY_SECONDS, 0)


def test_day_rate_covers_time_since_the_first_measurement() -> None:
    evening = 18 * HOUR
    with database() as store:
        found = told(store, books(evening, 7, unknown=0))
    assert bucket_rate(pieces(found, 0, DAY_SECONDS)) == BucketRate(7 * DAY_SECONDS, 0)


def test_energy_before_the_first_rate_stays_unpriced() -> None:
    with database() as store:
        found = told(
            store,
            books(18 * HOUR, None, unknown=0),
            books(18 * HOUR + 5, None, unknown=9),
            books(21 * HOUR, 8, unknown=99),
        )
    assert found == (NOTHING, RateChange(18 * HOUR, "EUR", None), RateChange(21 * HOUR, "EUR", 8))
    assert bucket_rate(pieces(found, 0, DAY_SECONDS)) == BucketRate(
        4 * DAY_SECONDS, DAY_SECONDS // 2
    )


def test_energy_before_any_configured_rate_stays_unpriced() -> None:
    with database() as store:
        found = told(store, unpriced(12 * HOUR), books(18 * HOUR, 8, unknown=0))
    assert pieces(found, 0, DAY_SECONDS) == [(6 * HOUR, None), (6 * HOUR, 8)]


def test_time_before_the_first_stored_rate_stays_unpriced() -> None:
    with database() as store:
        measured_before(store)
        found = told(store, books(12 * HOUR, 8, unknown=0))
    assert pieces(found, 0, DAY_SECONDS) == [(12 * HOUR, None), (12 * HOUR, 8)]


def test_restart_without_unpriced_energy_changes_no_rate() -> None:
    with database() as store:
        found = told(store, books(10, 5), books(20, None), books(25, 5))
    assert found == (NOTHING, RateChange(10, "EUR", 5))


def test_rate_before_the_first_energy_applies_from_the_gap() -> None:
    with database() as store:
        found = told(store, unpriced(10), books(20, None, unknown=0), books(25, 5, unknown=0))
    assert found == (NOTHING, RateChange(10, "", None), RateChange(20, "EUR", 5))


def test_unpriced_energy_starts_at_the_first_unknown_rate() -> None:
    with database() as store:
        known, silent = books(10, 5), books(20, None)
        found = told(store, known, silent, books(25, None, unknown=7), books(30, None, unknown=8))
    assert found == (NOTHING, RateChange(10, "EUR", 5), RateChange(20, "EUR", None))


def test_unpriced_energy_is_kept_when_the_rate_returns() -> None:
    with database() as store:
        found = told(store, books(10, 5), books(20, None), books(25, 5, unknown=7))
    assert pieces(found, 10, 30) == [(10, 5), (5, None), (5, 5)]


def test_unknown_rate_of_another_currency_is_separate() -> None:
    with database() as store:
        found = told(store, books(10, 5, unknown=9), books(20, None, unit="CHF", unknown=1))
    assert found == (NOTHING, RateChange(10, "EUR", 5), RateChange(20, "CHF", None))


def test_clock_set_back_without_a_rate_restarts_there() -> None:
    with database() as store:
        found = told(store, books(10, 5), books(90, None), books(25, None, unknown=7))
    assert found == (NOTHING, RateChange(10, "EUR", 5), RateChange(25, "EUR", None))


def test_rate_changes_are_stored_and_bounded() -> None:
    with database() as store:
        for second in range(10):
            record_rates(store, books(second, second // 2), limit=3)
        assert rate_changes(store, "cost", 100) == (
            RateChange(4, "EUR", 2),
            RateChange(6, "EUR", 3),
            RateChange(8, "EUR", 4),
        )
        assert rate_changes(store, "carbon", 100) == (NOTHING._replace(unit=""),)


def test_loss_of_the_rate_is_a_change() -> None:
    with database() as store:
        record_rates(store, books(10, 5))
        record_rates(store, unpriced(20))
        record_rates(store, unpriced(30))
        record_rates(store, books(40, 5, unit="CHF"))
        assert rate_changes(store, "cost", 100) == (
            NOTHING,
            RateChange(10, "EUR", 5),
            RateChange(20, "", None),
            RateChange(40, "CHF", 5),
        )
        found = pieces(rate_changes(store, "cost", 100), 15, 50, "CHF")
        assert found == [(5, None), (20, None), (10, 5)]


def test_clock_set_back_restarts_the_rates_there() -> None:
    with database() as store:
        found = told(store, books(100, 1), books(200, 2), books(150, 3))
    assert found == (NOTHING, RateChange(100, "EUR", 1), RateChange(150, "EUR", 3))


def test_unchanged_rate_is_known_from_the_clock_step() -> None:
    with database() as store:
        found = told(store, books(200, 1), books(150, 1))
    assert found == (NOTHING, RateChange(150, "EUR", 1))


def test_clock_that_is_far_off_keeps_the_rates_of_other_times() -> None:
    """A board without a battery starts in the past, a clock in local time some hours off."""
    at = 10 * DAY_SECONDS
    for step, boot in ((9 * DAY_SECONDS, "boot"), (8 * HOUR, "next")):
        off, right = (replace(books(*one), boot_id=boot) for one in ((at - step, 9), (at + 9, 7)))
        with database() as store:
            found = told(store, books(at - HOUR, 5), books(at, 7), off, right)
        assert pieces(found, at - HOUR, at + HOUR) == [(HOUR, 5), (HOUR, 7)]
