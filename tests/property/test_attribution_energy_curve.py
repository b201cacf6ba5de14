"""Cumulative energy of a counter: exact sums whatever happens to the counter."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testbed.metered_curve import MeteredCurve
from testbed.simulated_host import PACKAGE

from wattspan.attribution.energy_curve import EnergyCurve
from wattspan.attribution.metering import CounterMeter
from wattspan.model import MILLISECOND, SECOND, Instant, Interval, Microjoules, Reading

START = 1000 * SECOND
ABSENCE = 10 * SECOND

# Of each tick: milliseconds since the last one, age of the reading (None: there is none),
# microjoules since the last one, and whether the counter was registered anew.
TICKS = st.lists(
    st.tuples(
        st.integers(1, 15_000),
        st.one_of(st.none(), st.integers(0, 90)),
        st.integers(0, 2 * 10**6),
        st.booleans(),
    ),
    max_size=60,
)


def replayed(
    ticks: list[tuple[int, int | None, int, bool]], limit: int
) -> tuple[MeteredCurve, int, int]:
    """The history after some ticks, and the energy and end of the intervals of a meter."""
    history, meter = MeteredCurve(PACKAGE, ABSENCE, SECOND, limit), CounterMeter(PACKAGE, ABSENCE)
    now, counter, epoch, total, last = START, 0, 0, 0, 0
    for milliseconds, age, energy, anew in ticks:
        now += milliseconds * MILLISECOND
        counter = energy if anew else counter + energy
        epoch += anew
        if age is not None:
            at = now - age * MILLISECOND
            reading = Reading(PACKAGE.id, Instant(at, at), Microjoules(counter), epoch)
            history.read(reading)
            period = meter.advance(reading)
            if isinstance(period, Interval):
                total += period.energy
            last = max(last, at)
        history.absent(Instant(now, now))
        if meter.absent(Instant(now, now)) is not None:
            last = now
    return history, total, last


@given(TICKS, st.integers(8, 64))
def test_whole_history_has_the_energy_of_all_intervals(
    ticks: list[tuple[int, int | None, int, bool]], limit: int
) -> None:
    history, total, last = replayed(ticks, limit)
    assert len(history) <= limit
    assert (history.known or 0) == last
    whole = history.between(0, 2**62)
    assert whole.energy == total
    assert whole.covered <= max(0, last - START + SECOND)


@given(TICKS, st.integers(8, 64), st.lists(st.integers(-SECOND, 900 * SECOND), min_size=2))
def test_neighbouring_periods_add_up_to_the_microjoule(
    ticks: list[tuple[int, int | None, int, bool]], limit: int, edges: list[int]
) -> None:
    history, _, _ = replayed(ticks, limit)
    ordered = [START + edge for edge in sorted(edges)]
    parts = [history.between(a, b) for a, b in pairwise(ordered)]
    whole = history.between(ordered[0], ordered[-1])
    assert sum(part.energy for part in parts) == whole.energy
    assert sum(part.covered for part in parts) == whole.covered
    for (begin, end), part in zip(pairwise(ordered), parts, strict=True):
        assert part.energy >= 0
        assert part.uncertainty >= 0
        assert 0 <= part.covered <= end - begin


@given(
    st.lists(st.tuples(st.integers(1, 5_000), st.integers(0, 2 * 10**6)), max_size=300),
    st.lists(st.integers(-SECOND, 600 * SECOND), max_size=30),
    st.integers(8, 32),
    st.integers(0, 299),
)
def test_thinning_moves_no_energy_over_edges_and_knows_what_it_moves_elsewhere(
    steps: list[tuple[int, int]], edges: list[int], limit: int, known: int
) -> None:
    """The edges become known after some of the steps, between which nothing was thinned."""
    kept: list[int] = []
    exact, thinned = EnergyCurve(PACKAGE), MeteredCurve(PACKAGE, ABSENCE, 0, limit, lambda: kept)
    now, times = START, sorted(START + edge for edge in edges)
    for number, (milliseconds, energy) in enumerate(steps):
        if number == min(known, limit - 1):
            kept = times
        for curve in (exact, thinned):
            curve.add(now, now + milliseconds * MILLISECOND, energy)
        now += milliseconds * MILLISECOND
    assert len(thinned) <= limit + 2 * len(kept)
    for begin, end in pairwise(times):
        true, found = exact.between(begin, end), thinned.between(begin, end)
        if kept:
            assert (found.energy, found.covered, found.blur) == (true.energy, true.covered, 0)
        assert abs(found.energy - true.energy) <= found.blur + 2  # both are rounded


@given(
    st.lists(st.tuples(st.integers(1, 5_000), st.integers(0, 2 * 10**6)), min_size=20),
    st.lists(st.integers(0, 100 * SECOND), max_size=5),
    st.lists(st.integers(0, 100 * SECOND), min_size=1, max_size=20),
    st.integers(8, 16),
    st.integers(0, 7),
    st.integers(8, 40),
)
def test_no_answer_for_a_reader_depends_on_edges_of_others(
    steps: list[tuple[int, int]],
    mine: list[int],
    others: list[int],
    limit: int,
    known: int,
    forgotten: int,
) -> None:
    own = sorted(START + edge for edge in mine)
    every = sorted([*own, *(START + edge for edge in others)])
    told: list[int] = []
    alone = MeteredCurve(PACKAGE, ABSENCE, SECOND, limit, lambda: own)
    beside = MeteredCurve(PACKAGE, ABSENCE, SECOND, limit, lambda: told)
    now = START
    for number, (milliseconds, energy) in enumerate(steps):
        if number == known:  # before anything is thinned
            told = every
        if number == forgotten:
            told = own
        for curve in (alone, beside):
            curve.add(now, now + milliseconds * MILLISECOND, energy)
        now += milliseconds * MILLISECOND
    whole = START, now
    assert [*alone.knots(*whole, common=True)] == [*beside.knots(*whole, common=True)]
    for begin, end in pairwise([START, *every, now]):
        assert alone.between(begin, end, own) == beside.between(begin, end, own)
        cells = begin - begin % SECOND, end - end % SECOND
        assert alone.cells_between(*cells, own) == beside.cells_between(*cells, own)


@given(TICKS)
def test_cells_have_the_energy_of_the_readings(
    ticks: list[tuple[int, int | None, int, bool]],
) -> None:
    prompt = [(late, None if age is None else 0, *rest) for late, age, *rest in ticks]
    history, _, last = replayed(prompt, 1000)
    first = next((knot[0] for knot in history.knots(0, 2**62)), 0)
    start = -(-first // SECOND) * SECOND
    end = max(start, last - last % SECOND)
    fine = history.between(start, end)
    assert history.cells_between(start, end)[::2] == (fine.energy, fine.covered)


CELLS = st.lists(
    st.lists(st.integers(0, 10**6), min_size=10, max_size=10), min_size=30, max_size=60
)


@pytest.mark.slow
@given(CELLS, st.integers(8, 20))
def test_cells_do_not_distinguish_loads_with_equal_energy_in_every_cell(
    cells: list[list[int]], limit: int
) -> None:
    """Not at any time, however the history is thinned meanwhile."""
    alike = [sorted(cell) for cell in cells]
    histories = [MeteredCurve(PACKAGE, ABSENCE, SECOND, limit) for _ in range(2)]
    counters = [0, 0]
    for number in range(len(cells)):
        for part in range(11 if not number else 10):
            at = START + number * SECOND + (part + (number > 0)) * SECOND // 10
            for i, load in enumerate((cells, alike)):
                if part or number:
                    counters[i] += load[number][part - (not number)]
                reading = Reading(PACKAGE.id, Instant(at, at), Microjoules(counters[i]))
                histories[i].read(reading)
        answers = [
            [
                history.cells_between(START + i * SECOND, START + (i + 1) * SECOND)
                for i in range(number + 1)
            ]
            for history in histories
        ]
        assert answers[0] == answers[1]
