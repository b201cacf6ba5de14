"""Conversion of Unix time to monotonic time."""

import pytest

from wattspan.model import Instant
from wattspan.spans.values import Span, SpanColumns
from wattspan.spans.wall_time import WallClockConverter
from wattspan.testing import ManualClock

MS = 1_000_000
SECOND = 1000 * MS
HOUR = 3600 * SECOND


class Told:
    """A clock, its converter, and all its observed times."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.wall = WallClockConverter()
        self.moments: list[Instant] = []
        self.tick(0)

    def tick(self, count: int = 10) -> None:
        """Observe, then let ticks of 100 ms go by, noting a moment in the midst of each."""
        self.wall.observe(self.clock.now())
        for _ in range(count):
            self.moments.append(self.clock.advance(0.05))
            self.clock.advance(0.05)
            self.wall.observe(self.clock.now())

    def error(self, moment: Instant) -> int:
        return self.wall.monotonic(moment.wall) - moment.mono


@pytest.fixture
def told() -> Told:
    return Told()


def test_conversion_before_an_observation_raises() -> None:
    with pytest.raises(ValueError, match="not been observed"):
        WallClockConverter().monotonic(5)


def test_conversion_is_exact_without_changes(told: Told) -> None:
    told.tick(20)
    assert [told.error(moment) for moment in told.moments] == [0] * 20
    first = told.moments[0]
    assert told.wall.monotonic(first.wall - HOUR) == first.mono - HOUR
    assert told.wall.monotonic(first.wall + HOUR) == first.mono + HOUR


@pytest.mark.parametrize("seconds", [0.002, 0.09, 0.5, 3, 7200, -0.002, -0.5])
def test_times_before_and_after_a_step_have_their_offsets(told: Told, seconds: float) -> None:
    told.tick(50)
    told.clock.step_wall(seconds)
    told.tick(50)
    unambiguous = told.moments[:40] + told.moments[50:] if seconds < 0 else told.moments
    assert [told.error(moment) for moment in unambiguous] == [0] * len(unambiguous)
    first = told.moments[0]
    assert told.wall.monotonic(first.wall - HOUR) == first.mono - HOUR


def test_conversion_is_exact_around_a_suspend(told: Told) -> None:
    told.tick(10)
    told.clock.suspend(5 * 3600)
    told.tick(10)
    assert [told.error(moment) for moment in told.moments] == [0] * 20


def test_step_between_observations_divides_their_period(told: Told) -> None:
    told.tick(10)
    before = told.clock.advance(0.03)
    told.clock.step_wall(3600)
    after = told.clock.advance(0.03)
    told.clock.advance(0.04)
    told.tick(10)
    assert (told.error(before), told.error(after)) == (0, 0)


def test_time_skipped_by_a_step_is_the_moment_of_the_step(told: Told) -> None:
    told.tick(10)
    at = told.clock.now()
    told.clock.step_wall(3600)
    told.tick(10)
    for minutes in (1, 30, 59):
        assert abs(told.wall.monotonic(at.wall + minutes * 60 * SECOND) - at.mono) <= 100 * MS


def test_repeated_time_is_the_later_one(told: Told) -> None:
    told.tick(100)
    told.clock.step_wall(-5)
    told.tick(100)
    twice = told.moments[60]
    assert told.wall.monotonic(twice.wall) == twice.mono + 5 * SECOND


def test_repeated_time_is_the_first_until_the_second_is_observed(told: Told) -> None:
    told.tick(100)
    told.clock.step_wall(-3600)
    told.tick(5)
    assert [told.error(moment) for moment in told.moments] == [0] * 105


def test_step_forward_and_back_has_no_lasting_effect(told: Told) -> None:
    told.tick(10)
    told.clock.step_wall(3600)
    told.tick(10)
    told.clock.step_wall(-3600)
    told.tick(10)
    assert [told.error(moment) for moment in told.moments] == [0] * 30


@pytest.mark.parametrize("ppm", [20, 500, -500])
def test_slew_is_followed_within_a_millisecond(told: Told, ppm: int) -> None:
    told.tick(10)
    for _ in range(600):
        told.clock.step_wall(ppm * 1e-7)
        told.tick(1)
    assert max(abs(told.error(moment)) for moment in told.moments) < MS
    if abs(ppm) == 500:
        assert abs(told.error(told.moments[-1])) < MS // 2


def test_interrupted_observation_has_no_effect(told: Told) -> None:
    told.tick(10)
    now = told.clock.now()
    told.wall.observe(now._replace(wall=now.wall + 30 * MS))
    told.tick(10)
    assert [told.error(moment) for moment in told.moments] == [0] * 20


def test_interrupted_first_observation_is_corrected_by_the_second() -> None:
    wall, clock = WallClockConverter(), ManualClock()
    wall.observe(clock.now()._replace(wall=clock.now().wall + 30 * MS))
    moment = clock.advance(0.1)
    wall.observe(moment)
    assert wall.monotonic(moment.wall) == moment.mono


def test_number_of_remembered_offsets_is_limited(told: Told) -> None:
    for _ in range(3000):
        told.clock.step_wall(0.2)
        told.tick(1)
    assert len(told.wall._past) <= 512
    assert told.error(told.moments[-1]) == 0
    assert told.error(told.moments[-400]) == 0


def test_offset_of_a_period_is_known_if_constant(told: Told) -> None:
    before = told.clock.now()
    told.clock.step_wall(3600)
    after = told.clock.advance(1.0)
    told.wall.observe(after)
    assert told.wall.offset(after.wall, after.wall) == after.wall - after.mono
    assert told.wall.offset(before.wall, after.wall) is None
    for first in (after, before):
        spans = SpanColumns.of([Span(b"", b"", b"", "", "work", first.wall, after.wall)])
        found = told.wall.spans(spans)
        assert (found.start[0], found.end[0]) == (first.mono, after.mono)


def test_time_outside_all_past_offsets_uses_the_present_one(told: Told) -> None:
    for seconds in (3600, -3000):
        told.clock.step_wall(seconds)
        told.tick(30)
    now = told.clock.now()
    to_come = now.wall + 600 * SECOND  # between the first and the last observation
    assert told.wall.monotonic(to_come) == now.mono + 600 * SECOND
