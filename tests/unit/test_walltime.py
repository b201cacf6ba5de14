"""Unix time is brought to monotonic time by the offset that was in force then."""

import pytest

from wattspan.model import Instant
from wattspan.spans.wall_time import WallClockConverter
from wattspan.testing import ManualClock

MS = 1_000_000
SECOND = 1000 * MS
HOUR = 3600 * SECOND


class Told:
    """A clock, what is made of it, and every moment that it has shown."""

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


def test_nothing_is_converted_before_a_moment_was_seen() -> None:
    with pytest.raises(ValueError, match="not been observed"):
        WallClockConverter().monotonic(5)


def test_without_changes_every_time_converts_exactly_also_before_the_start(told: Told) -> None:
    told.tick(20)
    assert [told.error(moment) for moment in told.moments] == [0] * 20
    first = told.moments[0]
    assert told.wall.monotonic(first.wall - HOUR) == first.mono - HOUR
    assert told.wall.monotonic(first.wall + HOUR) == first.mono + HOUR


@pytest.mark.parametrize("seconds", [0.002, 0.09, 0.5, 3, 7200, -0.002, -0.5])
def test_times_on_either_side_of_a_step_keep_their_own_offset(told: Told, seconds: float) -> None:
    told.tick(50)
    told.clock.step_wall(seconds)
    told.tick(50)
    unambiguous = told.moments[:40] + told.moments[50:] if seconds < 0 else told.moments
    assert [told.error(moment) for moment in unambiguous] == [0] * len(unambiguous)


def test_a_suspended_host_loses_no_time_of_its_spans(told: Told) -> None:
    told.tick(10)
    told.clock.suspend(5 * 3600)
    told.tick(10)
    assert [told.error(moment) for moment in told.moments] == [0] * 20


def test_a_step_in_the_midst_of_a_tick_divides_that_very_tick(told: Told) -> None:
    told.tick(10)
    before = told.clock.advance(0.03)
    told.clock.step_wall(3600)
    after = told.clock.advance(0.03)
    told.clock.advance(0.04)
    told.tick(10)
    assert (told.error(before), told.error(after)) == (0, 0)


def test_a_time_that_a_step_left_out_is_the_moment_of_the_step(told: Told) -> None:
    told.tick(10)
    at = told.clock.now()
    told.clock.step_wall(3600)
    told.tick(10)
    for minutes in (1, 30, 59):
        assert abs(told.wall.monotonic(at.wall + minutes * 60 * SECOND) - at.mono) <= 100 * MS


def test_a_time_that_was_shown_twice_is_the_later_one(told: Told) -> None:
    told.tick(100)
    told.clock.step_wall(-5)
    told.tick(100)
    twice = told.moments[60]
    assert told.wall.monotonic(twice.wall) == twice.mono + 5 * SECOND


def test_a_time_whose_second_showing_is_still_to_come_is_the_first(told: Told) -> None:
    told.tick(100)
    told.clock.step_wall(-3600)
    told.tick(5)
    assert [told.error(moment) for moment in told.moments] == [0] * 105


def test_a_clock_set_forward_and_back_again_leaves_no_trace(told: Told) -> None:
    told.tick(10)
    told.clock.step_wall(3600)
    told.tick(10)
    told.clock.step_wall(-3600)
    told.tick(10)
    assert [told.error(moment) for moment in told.moments] == [0] * 30


@pytest.mark.parametrize("ppm", [20, 500, -500])
def test_a_slew_is_followed_within_a_millisecond(told: Told, ppm: int) -> None:
    told.tick(10)
    for _ in range(600):
        told.clock.step_wall(ppm * 1e-7)
        told.tick(1)
    assert max(abs(told.error(moment)) for moment in told.moments) < MS
    if abs(ppm) == 500:
        assert abs(told.error(told.moments[-1])) < MS // 2


def test_one_interrupted_look_at_the_clocks_changes_nothing(told: Told) -> None:
    told.tick(10)
    now = told.clock.now()
    told.wall.observe(now._replace(wall=now.wall + 30 * MS))
    told.tick(10)
    assert [told.error(moment) for moment in told.moments] == [0] * 20


def test_an_interrupted_first_look_is_put_right_by_the_second() -> None:
    wall, clock = WallClockConverter(), ManualClock()
    wall.observe(clock.now()._replace(wall=clock.now().wall + 30 * MS))
    moment = clock.advance(0.1)
    wall.observe(moment)
    assert wall.monotonic(moment.wall) == moment.mono


def test_any_number_of_changes_takes_bounded_room(told: Told) -> None:
    for _ in range(3000):
        told.clock.step_wall(0.2)
        told.tick(1)
    assert len(told.wall._past) <= 512
    assert told.error(told.moments[-1]) == 0
    assert told.error(told.moments[-400]) == 0


def test_one_offset_serves_a_stretch_only_where_it_holds_for_all_of_it() -> None:
    wall, clock = WallClockConverter(), ManualClock()
    wall.observe(clock.now())
    before = clock.now()
    clock.step_wall(3600)
    after = clock.advance(1.0)
    wall.observe(after)
    assert wall.offset(after.wall, after.wall) == after.wall - after.mono
    assert wall.offset(before.wall, after.wall) is None


def test_times_that_a_step_forward_left_out_are_the_moment_of_the_step() -> None:
    wall, clock = WallClockConverter(), ManualClock()
    wall.observe(clock.now())
    before = clock.advance(1.0)
    wall.observe(before)
    clock.step_wall(3600)
    after = clock.advance(1.0)
    wall.observe(after)
    left_out = before.wall + 1800 * 10**9
    assert before.mono <= wall.monotonic(left_out) <= after.mono


def test_a_time_that_no_earlier_setting_ever_showed_is_the_present_ones() -> None:
    wall, clock = WallClockConverter(), ManualClock()
    wall.observe(clock.now())
    clock.step_wall(3600)
    for _ in range(3):
        wall.observe(clock.advance(1.0))
    clock.step_wall(-3000)
    for _ in range(3):
        now = clock.advance(1.0)
        wall.observe(now)
    to_come = now.wall + 600 * 10**9  # between what was shown at first and what was shown then
    assert wall.monotonic(to_come) == now.mono + 600 * 10**9
