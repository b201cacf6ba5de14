"""The energy of one counter over time: knots, gaps, thinning, edges of windows, uncertainty."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, pairwise
from math import ceil, hypot

import pytest
from testbed.metered_curve import MeteredCurve
from testbed.simulated_host import GPU, PACKAGE

from wattspan.attribution.energy_curve import MAX_KNOTS, CurveEnergy, EnergyCurve
from wattspan.model import MILLISECOND, SECOND, Domain, Instant, Microjoules, Nanoseconds, Reading

TICK = 100 * MILLISECOND
ABSENCE = 10 * SECOND
START = 1000 * SECOND


def at(mono: int) -> Instant:
    return Instant(mono, mono)


def history(
    energies: list[int],
    domain: Domain = PACKAGE,
    limit: int = 4096,
    tick: int = TICK,
    stale: Callable[[int], int | None] = lambda _: None,
) -> MeteredCurve:
    """A history whose readings, one each tick, rise by ``energies``.

    ``stale`` tells the largest age of the value of a reading by its number.
    """
    made, counter = MeteredCurve(domain, ABSENCE, SECOND, limit), 5
    for i, energy in enumerate([0, *energies]):
        counter += energy
        age = stale(i)
        old = None if age is None else Nanoseconds(age)
        made.read(Reading(domain.id, at(START + i * tick), Microjoules(counter), 0, old))
    return made


def test_history_without_readings_knows_nothing() -> None:
    empty = MeteredCurve(PACKAGE, ABSENCE)
    assert empty.known is None
    assert empty.between(0, SECOND) == CurveEnergy(Microjoules(0), Microjoules(0), 0)
    assert [*empty.knots(0, SECOND)] == []


def test_first_reading_covers_no_time() -> None:
    first = history([])
    assert first.known == START
    assert first.between(START - SECOND, START + SECOND) == (0, 0, 0, 0)


def test_energy_between_readings_rises_evenly() -> None:
    one = history([1000, 3000])
    assert one.between(START + TICK // 2, START + TICK).energy == 500
    assert one.between(START, START + 2 * TICK)[::2] == (4000, 2 * TICK)
    assert one.known == START + 2 * TICK


def test_time_outside_the_readings_is_not_covered() -> None:
    spent = history([1000, 1000]).between(START - TICK, START + 3 * TICK)
    assert (spent.energy, spent.covered) == (2000, 2 * TICK)


def test_energies_of_neighbouring_periods_add_up_exactly() -> None:
    source = random.Random(19)
    one = history([source.randrange(10**7) for _ in range(300)])
    edges = sorted(START + source.randrange(-TICK, 301 * TICK) for _ in range(200))
    parts = [one.between(a, b).energy for a, b in pairwise(edges)]
    assert sum(parts) == one.between(edges[0], edges[-1]).energy


def test_wrapped_counter_goes_on() -> None:
    one = MeteredCurve(PACKAGE, ABSENCE)
    one.read(Reading(PACKAGE.id, at(START), Microjoules(PACKAGE.modulus - 10)))
    one.read(Reading(PACKAGE.id, at(START + TICK), Microjoules(20)))
    assert one.between(START, START + TICK).energy == 30


def test_reset_counter_leaves_a_gap() -> None:
    one = history([1000])
    one.read(Reading(PACKAGE.id, at(START + 2 * TICK), Microjoules(0), epoch=1))
    one.read(Reading(PACKAGE.id, at(START + 3 * TICK), Microjoules(700), epoch=1))
    assert one.between(START, START + 3 * TICK)[::2] == (1700, 2 * TICK)


def test_absent_counter_leaves_one_gap_until_it_returns() -> None:
    one = history([1000])
    silent = START + TICK
    for i in range(1, 300):
        one.absent(at(silent + i * TICK))
    assert len(one) == 3
    assert one.known == silent + 299 * TICK
    one.read(Reading(PACKAGE.id, at(silent + 300 * TICK), Microjoules(10**6)))
    one.read(Reading(PACKAGE.id, at(silent + 301 * TICK), Microjoules(10**6 + 50)))
    assert len(one) == 4
    assert one.between(START, silent + 301 * TICK)[::2] == (1050, 2 * TICK)


def test_reading_from_before_the_end_of_a_gap_shortens_no_time() -> None:
    one = history([1000])
    gone = START + TICK + ABSENCE + SECOND
    one.absent(at(gone))
    for before, counter in ((30, 2000), (20, 2100), (-10, 2400)):  # milliseconds before its end
        one.read(Reading(PACKAGE.id, at(gone - before * MILLISECOND), Microjoules(counter)))
    assert one.known == gone + 10 * MILLISECOND
    spent = one.between(START, gone + 10 * MILLISECOND)
    assert (spent.energy, spent.covered) == (1000 + 400, TICK + 10 * MILLISECOND)


def test_old_readings_are_thinned_and_keep_the_total() -> None:
    energies = [1000 + i % 7 for i in range(20_000)]  # 33 minutes
    one = history(energies, limit=1024)
    assert len(one) <= 1024
    end = START + len(energies) * TICK
    assert one.between(START, end)[::2] == (sum(energies), len(energies) * TICK)
    recent = end - 20 * SECOND
    assert one.between(recent, end).energy == sum(energies[-200:])
    middle = one.between(START + 600 * SECOND, end)
    assert middle.energy == pytest.approx(sum(energies[6000:]), rel=0.01)


@pytest.mark.parametrize("load", ["idle", "work", "turns"])
@pytest.mark.parametrize("registered", [True, False])
def test_window_has_the_energy_of_an_immediate_read_minutes_later(
    load: str, registered: bool
) -> None:
    rng, edges, at_once = random.Random(1), list[int](), list[tuple[int, int, CurveEnergy]]()
    one = MeteredCurve(PACKAGE, ABSENCE, SECOND, edges=lambda: sorted(edges))
    energies = {"idle": (6, 6), "work": (1, 60), "turns": (0, 80)}[load]
    for i in range(9000):
        power = energies[i // 7 % 2] if load == "turns" else rng.randint(*energies)
        one.add(START + i * TICK, START + (i + 1) * TICK, power * 500_000)
        if i % 10 == 9:
            begin = START + i * TICK - rng.randrange(8 * TICK, 9 * TICK)
            at_once.append((begin, begin + SECOND // 2, one.between(begin, begin + SECOND // 2)))
            edges += at_once[-1][:2] if registered else ()
    late = [(before, one.between(begin, end)) for begin, end, before in at_once]
    for before, after in late:
        assert abs(after.energy - before.energy) <= after.blur <= after.uncertainty
        assert after.energy == before.energy or not registered
    assert any(after.blur for _, after in late) is (load != "idle" and not registered)


def test_edges_that_are_forgotten_are_thinned() -> None:
    edges = [START + 3 * TICK + TICK // 3]
    one = MeteredCurve(PACKAGE, ABSENCE, limit=64, edges=lambda: edges)
    for i in range(4000):
        one.add(START + i * TICK, START + (i + 1) * TICK, 10_000 * (i % 2))
    assert one.between(START, edges[0])[::2] == (13_333, edges[0] - START)
    forgotten = edges.pop()
    for i in range(4000, 4100):
        one.add(START + i * TICK, START + (i + 1) * TICK, 10_000)
    assert one.between(START, forgotten).energy != 13_333
    assert len(one) <= 64


def test_edges_outside_of_the_readings_keep_no_knots() -> None:
    far = [0, START, START + 2**40 * TICK, 2**64 - 1]
    one = MeteredCurve(PACKAGE, ABSENCE, limit=64, edges=lambda: far)
    for i in range(1000):
        one.add(START + i * TICK, START + (i + 1) * TICK, 10_000)
    assert len(one) <= 64


def test_one_step_of_thinning_examines_few_knots_whatever_the_number_of_edges() -> None:
    edges = [START + 2 * i * TICK + 1 for i in range(16_384)]
    one, spent = EnergyCurve(PACKAGE, SECOND), random.Random(3)
    for i in range(40_000):
        one.add(START + i * TICK, START + (i + 1) * TICK, spent.randrange(10**6))
    before, steps = one.between(START, edges[40]), 0
    while True:
        size = len(one)
        if not one.thin(edges):
            break
        assert size - len(one) <= 1024  # a lock is held for less than 5 ms
        steps += 1
    assert steps >= 40
    assert len(one) <= 2 * len(edges) + MAX_KNOTS
    after = one.between(START, edges[40])  # the powers beside the edge are known less exactly
    assert after == before._replace(uncertainty=after.uncertainty)
    assert [*one.knots(START, START + 99 * TICK)] != [
        *one.knots(START, START + 99 * TICK, common=True)
    ]


def test_cells_around_an_edge_keep_their_energy() -> None:
    edges = [START + 2 * SECOND + TICK // 3]
    one = MeteredCurve(PACKAGE, ABSENCE, SECOND, 64, lambda: edges)
    for i in range(40_000):
        one.add(START + i * TICK, START + (i + 1) * TICK, 10_000 * (i // 10 % 2))
    assert one.cells_between(START + 2 * SECOND, START + 3 * SECOND) == (0, 0, SECOND, 0)
    blurred = one.cells_between(START + 8 * SECOND, START + 9 * SECOND)
    assert blurred.energy <= blurred.blur


def test_history_of_readings_without_age_stays_within_its_limit() -> None:
    assert len(history([5] * 5000, limit=16, tick=MILLISECOND)) <= 16


def test_cells_have_the_energy_between_their_edges() -> None:
    one = history([1000 + i for i in range(95)])
    assert one.cells_between(START, START + SECOND)[::2] == (sum(range(1000, 1010)), SECOND)
    assert one.cells_between(START - SECOND, START + 20 * SECOND)[::2] == (
        sum(range(1000, 1090)),
        9 * SECOND,
    )
    assert MeteredCurve(PACKAGE, ABSENCE, SECOND).cells_between(0, SECOND) == (0, 0, 0, 0)


def test_history_without_cells_has_none() -> None:
    one = MeteredCurve(PACKAGE, ABSENCE)
    for i in range(30):
        one.read(Reading(PACKAGE.id, at(START + i * TICK), Microjoules(i)))
    assert one.cells_between(START, START + SECOND) == (0, 0, 0, 0)


def test_cells_within_one_interval_share_its_energy() -> None:
    one = history([90_000] * 4, tick=9 * SECOND)
    assert one.cells_between(START + SECOND, START + 4 * SECOND)[::2] == (30_000, 3 * SECOND)
    assert one.cells_between(START, START + 36 * SECOND)[::2] == (360_000, 36 * SECOND)


def test_history_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="room for 8 knots, not 7"):
        EnergyCurve(PACKAGE, limit=7)


def test_redefined_domain_changes_the_uncertainty() -> None:
    one = history([1000] * 4)
    before = one.between(START + TICK, START + 2 * TICK).uncertainty
    one.domain = replace(PACKAGE, resolution=20 * MILLISECOND)
    assert one.between(START + TICK, START + 2 * TICK).uncertainty > before


def test_knots_surround_a_period() -> None:
    one = history([10, 20, 30, 40])
    inside = [*one.knots(START + TICK + 1, START + 2 * TICK + 1)]
    assert [(time - START) // TICK for time, _, _ in inside] == [1, 2, 3]
    assert [energy for _, energy, _ in inside] == [10, 30, 60]
    assert len([*one.knots(START - SECOND, START + SECOND)]) == 5


@pytest.mark.parametrize("period", [20, 37, 100, 250, 700, 1000])
@pytest.mark.parametrize("length", [30, 50, 100, 500, 1000])
def test_stated_uncertainty_contains_the_truth_in_95_percent(period: int, length: int) -> None:
    """A GPU that alternates between 629 and 182 W, read at the edges of its 100 ms counter."""
    board = replace(GPU, resolution=TICK)
    source = random.Random(period * length)
    truth = [0]  # microjoules at each millisecond
    for i in range(30_000):
        truth.append(truth[-1] + (629_000 if i % period < 0.6 * period else 182_000))
    energies = [b - a for a, b in pairwise(truth[::100])]
    one = history(energies, board, stale=lambda _: 4 * MILLISECOND)
    errors = []
    for _ in range(400):
        begin = source.randrange(1000, 28_000)
        start, end = START + begin * MILLISECOND, START + (begin + length) * MILLISECOND
        spent = one.between(start, end)
        true = truth[begin + length] - truth[begin]
        errors.append(abs(spent.energy - true) <= spent.uncertainty)
    assert sum(errors) >= 0.95 * len(errors)


def test_energy_of_a_step_that_came_late_is_within_the_stated() -> None:
    """Between two readings the counter did not move, and then it moved twice."""
    board = replace(GPU, resolution=TICK)
    one = history([700, 700, 0, 1400, 700, 700], board, stale=lambda i: 9 if i < 3 else None)
    for first, last in combinations(range(7), 2):
        spent = one.between(START + first * TICK, START + last * TICK)
        assert abs(spent.energy - 700 * (last - first)) <= spent.uncertainty


@pytest.mark.parametrize("known", [[(10, 90)], [(0, 100)], [(20, 30), (60, 61), (70, 100)], []])
def test_age_of_readings_counts_where_they_are(known: list[tuple[int, int]]) -> None:
    """An edge is uncertain by the older one of the two readings around it, then and later."""
    board, power = replace(GPU, resolution=TICK), 300_000  # microjoules a millisecond

    def is_known(i: int) -> bool:
        return any(first <= i < end for first, end in known)

    one = history(
        [100 * power] * 100, board, stale=lambda i: 4 * MILLISECOND if is_known(i) else None
    )

    def error(i: int) -> int:
        return power * (4 if is_known(i - 1) and is_known(i) else 100)

    for first, last in combinations(range(1, 100, 3), 2):
        spent = one.between(START + first * TICK, START + last * TICK)
        assert spent.uncertainty == ceil(hypot(error(first), error(last)))


def test_energy_up_to_a_time_is_known_within_the_history_only() -> None:
    history = MeteredCurve(GPU, 10 * SECOND)
    assert history.up_to(0) is None
    for second in (1, 2, 3):
        history.read(Reading(GPU.id, Instant(second * SECOND, 0), Microjoules(second * 1_000_000)))
    assert history.up_to(SECOND - 1) is None
    assert history.up_to(5 * SECOND // 2) == (1_500_000, 3 * SECOND // 2)
    assert history.up_to(3 * SECOND + 1) is None


def test_curve_is_crowded_until_it_is_thinned() -> None:
    curve = EnergyCurve(PACKAGE, limit=8)
    for i in range(20):
        curve.add(START + i * TICK, START + (i + 1) * TICK, 5)
    assert curve.crowded
    before = curve.between(START, START + 20 * TICK).energy
    while curve.thin():
        pass
    assert not curve.crowded
    assert len(curve) < 20
    assert curve.between(START, START + 20 * TICK).energy == before
