"""Intervals and gaps between readings, and checks of values."""

from dataclasses import replace

import pytest
from testbed.simulated_host import PACKAGE

from wattspan.attribution.division import split
from wattspan.attribution.metering import CounterMeter, energy_between
from wattspan.model import (
    SECOND,
    Attribution,
    Gap,
    GapReason,
    Instant,
    Interval,
    Microjoules,
    Nanoseconds,
    PayerInfo,
    Provenance,
    Reading,
    Remainder,
    Snapshot,
)

TOP = PACKAGE.modulus or 0


def reading(seconds: float, counter: int, epoch: int = 0) -> Reading:
    return Reading(PACKAGE.id, Instant(round(seconds * SECOND), 0), Microjoules(counter), epoch)


def reason(stretch: Interval | Gap) -> GapReason | None:
    return stretch.reason if isinstance(stretch, Gap) else None


@pytest.mark.parametrize(
    ("earlier", "later", "expected"),
    [
        pytest.param(reading(0, 5), reading(1, 100_000_005), None, id="counting"),
        pytest.param(reading(0, TOP - 5), reading(1, 10), None, id="wrapping"),
        pytest.param(reading(0, 9**9), reading(1, 0, 1), GapReason.LOST, id="registered anew"),
        pytest.param(reading(0, TOP // 2), reading(1, 0), GapReason.RESET, id="reset"),
        pytest.param(reading(0, 0), reading(1, 10**9), GapReason.IMPLAUSIBLE, id="a jump up"),
        pytest.param(reading(0, 0), reading(200, 10), GapReason.MISSED, id="may have lapped"),
        pytest.param(
            reading(0, 3 * TOP), reading(1, 5), GapReason.RESET, id="above its own modulus"
        ),
    ],
)
def test_energy_between_two_readings_is_an_interval_or_a_gap(
    earlier: Reading, later: Reading, expected: GapReason | None
) -> None:
    assert reason(energy_between(PACKAGE, earlier, later)) is expected


def test_stepping_counter_may_include_earlier_energy() -> None:
    slow = replace(PACKAGE, resolution=SECOND // 10)
    burst = 400 * 10**6 * 2 // 10  # two steps' worth at the ceiling, within a millisecond
    assert reason(energy_between(slow, reading(0, 0), reading(0.001, burst))) is None
    assert (
        reason(energy_between(PACKAGE, reading(0, 0), reading(0.001, burst)))
        is GapReason.IMPLAUSIBLE
    )


def test_readings_out_of_order_raise() -> None:
    with pytest.raises(ValueError, match="out of order"):
        energy_between(PACKAGE, reading(1, 0), reading(1, 0))


def test_meter_ignores_a_reading_that_is_not_newer() -> None:
    meter = CounterMeter(PACKAGE, SECOND)
    assert meter.advance(reading(1, 0)) is None
    assert meter.advance(reading(1, 7)) is None
    assert meter.last == reading(1, 0)


@pytest.mark.parametrize("by", [-300, -990, 300])
@pytest.mark.parametrize("glitches", [range(5, 6), range(5, 98, 5), range(5, 98, 2)], ids=str)
def test_value_of_a_moment_is_no_energy(glitches: range, by: int) -> None:
    meter, end, booked = CounterMeter(PACKAGE, 10 * SECOND), Instant(0, 0), 0
    counters = [1000 + 6 * at + (by if at in glitches else 0) for at in range(101)]  # 6 W
    for at, joules in enumerate(counters):
        found = meter.advance(reading(at, joules * 10**6))
        if found is not None:
            assert found.start == end
            end = found.end
            booked += found.energy if isinstance(found, Interval) else 0
    assert booked == (max(counters) - counters[0]) * 10**6


def test_counter_that_restarts_counts_from_there() -> None:
    meter = CounterMeter(PACKAGE, 10 * SECOND)
    counters = (900, 950, 50, 100, 150, 1000)
    found = [meter.advance(reading(at, one * 10**6)) for at, one in enumerate(counters)]
    assert [reason(one) for one in found if one] == [
        None, GapReason.RESET, None, None, GapReason.IMPLAUSIBLE,
    ]  # fmt: skip


def test_reset_of_a_young_counter_counts_from_there() -> None:
    meter = CounterMeter(PACKAGE, 10 * SECOND)
    found = [meter.advance(reading(at, j * 10**6)) for at, j in enumerate((0, 3, 6, 4, 8))]
    assert [one and (reason(one) or one.energy // 10**6) for one in found] == [
        None, 3, 3, GapReason.RESET, 4,
    ]  # fmt: skip


def test_absence_needs_a_reading_and_elapsed_time() -> None:
    meter = CounterMeter(PACKAGE, SECOND)
    assert meter.absent(Instant(99 * SECOND, 0)) is None
    meter.advance(reading(0, 0))
    assert meter.absent(Instant(SECOND, 0)) is None
    assert reason(meter.absent(Instant(2 * SECOND, 0)) or pytest.fail("no gap")) is GapReason.ABSENT
    assert meter.absent(Instant(2 * SECOND, 0)) is None
    assert meter.last is None
    assert meter.advance(reading(2, 5)) is None
    assert meter.last == reading(2, 5)


def test_rest_is_no_absence_unless_the_domain_is_suspended() -> None:
    meter = CounterMeter(PACKAGE, SECOND)
    meter.advance(reading(0, 0))
    resting = replace(PACKAGE, rest=Nanoseconds(SECOND))
    meter.redefine(resting)
    assert meter.absent(Instant(2 * SECOND, 0)) is None
    meter.redefine(replace(resting, suspended=True))
    gap = meter.absent(Instant(2 * SECOND, 0))
    assert reason(gap or pytest.fail("no gap")) is GapReason.SUSPEND


def test_first_reading_is_awaited_from_the_time_at_which_it_is_expected() -> None:
    meter = CounterMeter(PACKAGE, SECOND)
    expected, patient, late, first = (Instant(second * SECOND, 0) for second in (1, 2, 3, 4))
    meter.expect(expected)
    assert meter.absent(patient) is None
    assert not meter.silent
    assert meter.absent(late) == Gap(PACKAGE.id, expected, late, GapReason.ABSENT)
    assert meter.silent
    assert meter.advance(reading(4, 0)) == Gap(PACKAGE.id, late, first, GapReason.ABSENT)
    assert not meter.silent


def test_meter_expects_nothing_of_a_domain_without_a_counter() -> None:
    meter = CounterMeter(PACKAGE, SECOND)
    meter.expect(Instant(SECOND, 0))
    meter.expect(None)
    assert meter.absent(Instant(99 * SECOND, 0)) is None


@pytest.mark.parametrize("weights", [[], [0, 0], [3, -1]])
def test_split_without_weight_raises(weights: list[int]) -> None:
    with pytest.raises(ValueError, match="weights"):
        split(10, weights)


def test_split_gives_ties_to_the_earlier_weight() -> None:
    assert split(5, [1, 1, 1]) == [2, 2, 1]


# ------------------------------------------------------------------- the values' own promises


def test_attribution_that_does_not_add_up_raises() -> None:
    interval = Interval("d", Instant(0, 0), Instant(1, 0), Microjoules(10))
    with pytest.raises(ValueError, match="10 uJ were divided into 9 uJ"):
        Attribution(interval, (), Microjoules(4), Microjoules(5))


def test_attributed_domain_outside_the_cover_raises() -> None:
    with pytest.raises(ValueError, match="only a member of the cover"):
        replace(PACKAGE, in_cover=False)


def test_worse_provenance_wins() -> None:
    assert Provenance.MEASURED.worse(Provenance.ESTIMATED) is Provenance.ESTIMATED
    assert Provenance.EMULATED.worse(Provenance.MEASURED) is Provenance.EMULATED


def test_payer_without_groups_has_no_group_name() -> None:
    assert PayerInfo(Remainder("/x"), "x").group == ""


def test_account_of_an_unknown_domain_raises() -> None:
    with pytest.raises(KeyError, match="nobody"):
        Snapshot(Instant(0, 0), 1, "h").account("nobody")
