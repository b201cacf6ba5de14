"""Load tracking: properties that hold for every sequence of loads, latencies and settings."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from wattspan.model import MILLISECOND, SECOND
from wattspan.tuning.decisions.load import LoadSample, bin_bound, load_bin
from wattspan.tuning.decisions.load_cells import (
    LatencyObjective,
    LoadCells,
    MissTally,
    RequestTimes,
    gates,
)
from wattspan.tuning.decisions.load_tracking import (
    LoadObservation,
    TrackingPolicy,
    begin_tracking,
    track,
)

TTFT = LatencyObjective(True, 400 * MILLISECOND, 0.01)
SETTINGS = (1980, 1590, 1185)

stretches = st.lists(
    st.tuples(
        st.integers(1, 60),  # seconds
        st.integers(0, 8),  # requests a second
        st.integers(1, 800),  # milliseconds to the first token
        st.booleans(),  # in force
    ),
    max_size=6,
)


@given(stretches)
def test_new_setting_is_reached_by_one_step_a_minute_at_most(
    parts: list[tuple[int, int, int, bool]],
) -> None:
    """Only the setting of before the latest rise, if certified, may be in force again at once."""
    state = begin_tracking(TrackingPolicy((TTFT,), SETTINGS), 0)
    now, lowered, before_rise = 0, None, 0
    for seconds, rate, ttft, in_force in parts:
        for _ in range(seconds):
            start, now = now, now + SECOND
            requests = [RequestTimes(start, now, ttft * MILLISECOND)] * rate
            sample = LoadSample(start, now, float(rate), rate, rate)
            before = state.setting
            state = track(state, LoadObservation(now, sample, requests, (), in_force))
            assert 0 <= state.setting < len(SETTINGS)
            if state.setting < before:
                before_rise = before
            elif state.setting > before:
                again = state.setting <= min(before_rise, state.cells.lowest(state.bin))
                stepped = lowered is None or now - lowered >= 60 * SECOND
                assert again or (state.setting == before + 1 and stepped)
                lowered = now
            assert state.totals.misses[0] <= state.totals.counted[0]


@given(st.floats(0, 1e6))
def test_load_is_within_the_bound_of_its_bin(load: float) -> None:
    number = load_bin(load)
    assert load <= bin_bound(number) * (1 + 1e-6)
    assert number == 0 or load > bin_bound(number - 1) * (1 - 1e-6)


tallies = st.lists(
    st.tuples(st.integers(0, 8), st.integers(0, 3), st.integers(1, 400), st.integers(0, 3)),
    max_size=20,
)


@given(tallies)
def test_evidence_never_counts_for_a_higher_load(
    added: list[tuple[int, int, int, int]],
) -> None:
    cells = LoadCells(gates((TTFT,), by_length=False))
    for number, setting, requests, misses in added:
        missed = min(requests, misses)
        cells = cells.add_tally(number, setting, MissTally(((requests, missed, missed),)))
    highest: dict[int, int] = {}
    for number, setting, _, _ in added:
        highest[setting] = max(highest.get(setting, 0), number)
    lowest = [cells.lowest(number) for number in range(10)]
    assert lowest == sorted(lowest, reverse=True)
    for number, setting in enumerate(lowest):
        assert setting == 0 or highest[setting] >= number
