"""Conversion of Unix time under steps, slews and suspends."""

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from wattspan.model import Instant
from wattspan.spans.wall_time import WallClockConverter

MS = 1_000_000
SECOND = 1000 * MS
TICK = 100 * MS

amounts = st.one_of(
    st.integers(-2 * MS, 2 * MS),
    st.integers(-SECOND, SECOND),
    st.integers(-10, 10).map(lambda hours: hours * 3600 * SECOND),
)


class Stretch(NamedTuple):
    """The offset changes by ``jump`` and then by ``slew`` nanoseconds a tick, for ``ticks``."""

    jump: int
    slew: int
    ticks: int
    late: int  # position of the change in its first tick


stretches = st.lists(
    st.builds(
        Stretch, amounts, st.integers(-50_000, 50_000), st.integers(5, 40), st.integers(0, TICK - 1)
    ),
    min_size=1,
    max_size=6,
)


def lived(course: list[Stretch]) -> tuple[WallClockConverter, list[Instant], list[int]]:
    """Observations, times between them, and the jumps of the offset."""
    wall, moments, jumps = WallClockConverter(), [], []
    mono, offset = 50 * SECOND, 10**18
    wall.observe(Instant(mono, mono + offset))
    for jump, slew, ticks, late in course:
        moments.append(Instant(mono + late // 2, mono + late // 2 + offset))
        offset += jump
        jumps.append(mono + late)
        moments.append(Instant(mono + late, mono + late + offset))
        for _ in range(ticks):
            mono += TICK
            wall.observe(Instant(mono, mono + offset))
            moments.append(Instant(mono - TICK // 1000, mono - TICK // 1000 + offset))
            offset += slew
    mono += TICK
    wall.observe(Instant(mono, mono + offset))
    return wall, moments, jumps


@given(stretches)
def test_converted_time_is_a_moment_with_that_wall_time(course: list[Stretch]) -> None:
    """Within 1.5 ms: the residue of a slew, and a jump too small to be distinguished from one.

    Within the tick of a jump the order of the two clocks is unknown, so the tolerance is one tick.
    """
    wall, moments, jumps = lived(course)
    for moment in moments:
        found = wall.monotonic(moment.wall)
        jumped = any(abs(moment.mono - jump) <= TICK for jump in jumps)
        if abs(found - moment.mono) <= (TICK if jumped else 1.5 * MS):
            continue
        # The wall showed this time twice, and the other showing is the later one, as far as
        # can be known of when exactly, within the tick of a jump, the other began.
        assert found > moment.mono
        assert any(
            abs(found - other.mono) < 2 * TICK and abs(other.wall - moment.wall) < 2 * TICK
            for other in moments
            if other.mono > moment.mono
        ) or any(abs(found - jump) <= 2 * TICK for jump in jumps)


@given(stretches, st.integers(-(2**62), 2**62))
def test_all_times_are_convertible(course: list[Stretch], unix: int) -> None:
    wall, _, _ = lived(course)
    assert isinstance(wall.monotonic(unix), int)


@given(stretches)
def test_times_of_the_newest_tick_are_exact(course: list[Stretch]) -> None:
    wall, moments, _ = lived(course)
    newest = moments[-1]
    assert abs(wall.monotonic(newest.wall) - newest.mono) <= 1.5 * MS
