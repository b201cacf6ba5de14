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
    TrackingState,
    begin_tracking,
    track,
)

TTFT = LatencyObjective(True, 400 * MILLISECOND, 0.01)
TBT = LatencyObjective(False, 100 * MILLISECOND, 0.01)
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


def lowered() -> TrackingState:
    """A server at a lower setting than the original, with an alarm."""
    state = begin_tracking(TrackingPolicy((TTFT, TBT), SETTINGS), 0)
    for second in range(100):
        start, now = second * SECOND, (second + 1) * SECOND
        requests = [RequestTimes(start, now, 50 * MILLISECOND, MILLISECOND)] * 8
        sample = LoadSample(start, now, 8.0, 8, 8)
        state = track(state, LoadObservation(now, sample, requests))
    assert state.alarm is not None
    return state


LOWERED = lowered()
latencies = st.one_of(st.none(), st.integers(1, 800).map(lambda one: one * MILLISECOND))
ended = st.lists(
    st.builds(
        RequestTimes,
        st.integers(-5 * SECOND, 101 * SECOND),
        st.sampled_from([101 * SECOND, 102 * SECOND]),
        latencies,
        latencies,
        st.none(),
        st.integers(0, 50),
        st.booleans(),
        st.integers(1, 40),
    ),
    max_size=8,
)


@given(ended)
def test_requests_with_a_number_count_as_so_many(requests: list[RequestTimes]) -> None:
    requests.sort(key=lambda one: one.end)
    each = [one._replace(number=1) for one in requests for _ in range(one.number)]
    sample = LoadSample(100 * SECOND, 102 * SECOND, 8.0, 8, 8)
    both = [
        track(LOWERED, LoadObservation(102 * SECOND, sample, some)) for some in (requests, each)
    ]
    assert both[0] == both[1]
