"""An unprivileged reader of api.sock receives data of complete time cells only."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from testbed.constant_history import PACKAGE
from testbed.secret_load import INTERVAL, ROOT, VictimPast, joules, told

from wattspan.api.energy import TimeGrid
from wattspan.model import SECOND

CELLS = 6
PER_CELL = SECOND // INTERVAL
LENGTH = CELLS * SECOND
SECRETS = st.lists(
    st.lists(st.integers(0, 10**6), min_size=PER_CELL, max_size=PER_CELL),
    min_size=CELLS,
    max_size=CELLS,
)
MOMENTS = st.integers(0, LENGTH + SECOND)


@settings(max_examples=60)
@given(SECRETS, st.booleans(), MOMENTS, MOMENTS, st.data())
def test_queries_do_not_distinguish_loads_with_equal_energy_in_every_cell(
    secret: list[list[int]], at_once: bool, one: int, other: int, data: st.DataObject
) -> None:
    """Not while cells settle, and not while they are forgotten."""
    alike = [sorted(cell, reverse=True) for cell in secret]
    until = data.draw(st.integers(0, LENGTH // INTERVAL)) * INTERVAL
    horizon = data.draw(st.integers(0, until // INTERVAL)) * INTERVAL
    answers = []
    for cells in (secret, alike):
        past = VictimPast(
            until=until, horizon=horizon, energies=[e for cell in cells for e in cell]
        )
        start, end = min(one, other), max(one, other)
        answer = told(past, start, end, resolution=SECOND, at_once=at_once)
        answers.append(answer)
    assert answers[0] == answers[1]


@settings(max_examples=60)
@given(SECRETS, MOMENTS, MOMENTS, MOMENTS)
def test_neighbouring_windows_add_up(secret: list[list[int]], a: int, b: int, c: int) -> None:
    past = VictimPast(until=LENGTH, energies=[e for cell in secret for e in cell])
    start, middle, end = sorted((a, b, c))
    grid = TimeGrid(SECOND)

    def spent(start: int, end: int) -> int:
        return sum(grid.device(past, PACKAGE, start, end).energy.values())

    assert abs(spent(start, middle) + spent(middle, end) - spent(start, end)) <= 4  # microjoules


@settings(max_examples=40)
@given(SECRETS, MOMENTS, MOMENTS)
def test_reported_uncertainty_covers_the_truth(
    secret: list[list[int]], one: int, other: int
) -> None:
    past = VictimPast(until=LENGTH, energies=[e for cell in secret for e in cell])
    start, end = sorted((min(one, LENGTH), min(other, LENGTH)))
    answer = told(past, start, end, resolution=SECOND)["devices"][0]
    exact = joules(told(past, start, end, resolution=SECOND, peer=ROOT))
    if end > start:
        assert answer["joules"] is not None
        assert abs(answer["joules"] - exact) <= answer["uncertainty_joules"] + 1e-5
