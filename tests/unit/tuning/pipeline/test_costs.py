"""Costs of instructions: convex function, profiles of several files, and refused profiles."""

from __future__ import annotations

import pytest
from testbed.pipelines import BACKWARD, FORWARD

from wattspan.tuning.pipeline.costs import (
    ClockPoint,
    HullVertex,
    InstructionCost,
    PipelineProfile,
    ProfileRow,
    profile_of,
    savings_per_second,
)
from wattspan.tuning.pipeline.dag import BadPipelineError, CostKey

# Costs beyond 10 W: 90, 60, 65, 50, 30 and 40 J.
POINTS = [
    ClockPoint(1600, 1.0, 100.0),
    ClockPoint(1500, 2.0, 80.0),
    ClockPoint(1400, 2.5, 90.0),
    ClockPoint(1300, 3.0, 80.0),
    ClockPoint(1200, 4.0, 70.0),
    ClockPoint(1100, 5.0, 90.0),
]
COST = InstructionCost(POINTS, blocking_watts=10.0)


def test_convex_function_keeps_the_corners_that_nothing_beats() -> None:
    assert COST.vertices == (HullVertex(1.0, 90.0), HullVertex(2.0, 60.0), HullVertex(4.0, 30.0))
    assert (COST.shortest, COST.longest) == (1.0, 4.0)
    assert savings_per_second(COST) == [30.0, 15.0]


def test_least_cost_is_linear_between_corners_and_constant_beyond() -> None:
    assert [COST.least_cost(one) for one in (0.5, 1.0, 1.5, 3.0, 4.0, 9.0)] == [
        90.0,
        90.0,
        75.0,
        45.0,
        30.0,
        30.0,
    ]


def test_cheapest_point_is_a_measured_clock_within_the_time() -> None:
    assert COST.cheapest_point(3.5).mhz == 1300  # not a corner, yet a clock
    assert COST.cheapest_point(9.0).mhz == 1200
    assert COST.cheapest_point(0.1).mhz == 1600


def rows(joules: float, seconds: float = 1.0, iteration: int | None = None) -> list[ProfileRow]:
    return [
        ProfileRow(CostKey(0, kind), ClockPoint(mhz, seconds * 1600 / mhz, energy), iteration)
        for kind in (FORWARD, BACKWARD)
        for mhz, energy in ((1600, joules), (800, joules / 2))
    ]


def test_energies_of_files_are_scaled_to_their_mean_at_the_highest_clock() -> None:
    found = profile_of([rows(100.0), rows(120.0)])
    assert [one.joules for one in found.points[CostKey(0, FORWARD)]] == pytest.approx([55.0, 110.0])
    assert found.clocks == (800, 1600)


def test_first_iterations_are_left_out_of_the_median() -> None:
    measured = [
        row for number in range(5) for row in rows(100.0, 9.0 if number < 2 else 1.0, number)
    ]
    point = profile_of([measured]).points[CostKey(0, FORWARD)][-1]
    assert point == ClockPoint(1600, 1.0, 100.0)


def test_profile_of_first_iterations_only_is_refused() -> None:
    with pytest.raises(BadPipelineError, match="no instructions"):
        profile_of([rows(100.0, iteration=1)])
    with pytest.raises(BadPipelineError, match="no profile"):
        profile_of([])


def test_profiles_with_other_clocks_are_refused_by_number() -> None:
    other = [row._replace(point=row.point._replace(mhz=row.point.mhz + 5)) for row in rows(1.0)]
    with pytest.raises(BadPipelineError, match="Profile 2 has 1 stages and 2 clocks"):
        profile_of([rows(1.0), other])


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ({(0, FORWARD), (0, BACKWARD)}, "Stage 0 of 2 is missing"),
        ({(1, BACKWARD)}, "The backward of stage 1 is missing"),
    ],
)
def test_incomplete_profile_is_refused_by_the_missing_part(
    missing: set[tuple[int, object]], message: str
) -> None:
    points = {
        CostKey(stage, kind): POINTS
        for stage in range(2)
        for kind in (FORWARD, BACKWARD)
        if (stage, kind) not in missing
    }
    with pytest.raises(BadPipelineError, match=message):
        PipelineProfile(points)


def test_missing_clock_is_refused_by_its_frequency() -> None:
    points = {CostKey(0, FORWARD): POINTS, CostKey(0, BACKWARD): POINTS[1:]}
    with pytest.raises(BadPipelineError, match="backward of stage 0 was not measured at 1600 MHz"):
        PipelineProfile(points)
