"""Frontier and plans of pipelines, against known optima and all combinations of clocks."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from testbed.measured_pipeline import PLANNED, measured_profile, model_of, small_case
from testbed.pipelines import FORWARD, model, profile, uniform_plan

from wattspan.tuning.pipeline.dag import BadPipelineError, PipelineSchedule, scheduled
from wattspan.tuning.pipeline.frontier import CriticalFlow, PipelineFrontier, PipelineModel
from wattspan.tuning.pipeline.plan import (
    MAX_RANKS,
    RankClocks,
    instruction_plan,
    rank_orders,
    target_iteration,
)


@pytest.fixture(scope="module")
def measured() -> tuple[PipelineModel, PipelineFrontier]:
    """8 stages, 32 micro-batches, 1F1B, by the profile of real GPUs."""
    found = model_of(measured_profile(), 32)
    return found, PipelineFrontier(found)


def saving(joules: float, found: PipelineModel) -> float:
    return 100 * (1 - joules / RankClocks(found).fastest.joules)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_optimum_of_the_measured_profile_is_that_of_the_linear_program(
    measured: tuple[PipelineModel, PipelineFrontier],
) -> None:
    found, frontier = measured
    fastest = RankClocks(found).fastest
    for slowdown, (_, _, optimum) in PLANNED.items():
        point = frontier.at(fastest.seconds * (1 + slowdown))
        assert saving(point.joules, found) == pytest.approx(optimum, abs=0.06)
        assert 0 <= point.joules / point.bound - 1 < 0.001


@pytest.mark.exhaustive
def test_rank_clocks_of_the_measured_profile_save_what_was_computed_before(
    measured: tuple[PipelineModel, PipelineFrontier],
) -> None:
    found, _ = measured
    search = RankClocks(found)
    limit = search.fastest.seconds * 1.01
    same, own = uniform_plan(search, found, limit), search.best(limit)
    uniform, fixed, _ = PLANNED[0.01]
    assert saving(same.joules, found) == pytest.approx(uniform, abs=0.06)
    assert saving(own.joules, found) >= fixed
    assert own.seconds <= limit
    assert search.evaluated(own.clocks) == own


@pytest.mark.exhaustive
def test_instruction_clocks_keep_the_iteration_time(
    measured: tuple[PipelineModel, PipelineFrontier],
) -> None:
    found, frontier = measured
    limit = RankClocks(found).fastest.seconds * 1.05
    point = frontier.at(limit)
    plan = instruction_plan(found, point)
    assert plan.seconds <= limit
    assert plan.joules >= point.bound
    assert saving(plan.joules, found) > 20


def test_frontier_without_choice_is_one_point() -> None:
    one_clock = PipelineModel(
        scheduled(PipelineSchedule.GPIPE, 2, 3), profile([0.1, 0.1], clocks=[1600]), 70.0
    )
    frontier = PipelineFrontier(one_clock)
    assert frontier.shortest == frontier.longest == pytest.approx(1.2)
    assert frontier.at(2.0).durations == pytest.approx(
        [0.1 if one.kind is FORWARD else 0.2 for one in one_clock.dag.instructions]
    )


def test_frontier_corners_are_a_convex_falling_cost() -> None:
    found = model()
    frontier = PipelineFrontier(found)
    times = frontier.iteration_times
    costs = [frontier.at(one).joules - found.energy(0.0, one) for one in times]
    slopes = [
        (after - before) / (t1 - t0)
        for (t0, before), (t1, after) in pairwise(zip(times, costs, strict=True))
    ]
    assert all(one < 0 for one in slopes)
    assert all(later >= one - 0.5 for one, later in pairwise(slopes))  # W: units of flow


def test_large_frontier_is_thinned_and_keeps_its_ends() -> None:
    whole = PipelineFrontier(model())
    thinned = PipelineFrontier(model(), most_numbers=400)
    assert len(thinned.iteration_times) < len(whole.iteration_times)
    assert (thinned.shortest, thinned.longest) == (whole.shortest, whole.longest)


def test_iteration_below_the_shortest_is_refused() -> None:
    frontier = PipelineFrontier(model())
    with pytest.raises(BadPipelineError, match="the shortest is"):
        frontier.at(frontier.shortest * 0.99)


def test_limit_below_the_highest_clock_is_refused() -> None:
    search = RankClocks(model())
    with pytest.raises(BadPipelineError, match="No clock keeps"):
        search.best(search.fastest.seconds * 0.99)


def test_unknown_clock_is_refused() -> None:
    with pytest.raises(BadPipelineError, match="no clock of 1 MHz"):
        RankClocks(model()).evaluated([1600, 1, 1600])


def test_search_of_too_many_ranks_is_refused() -> None:
    with pytest.raises(BadPipelineError, match=f"for {MAX_RANKS} at most"):
        RankClocks(model([0.1] * (MAX_RANKS + 1), 2))


@pytest.mark.parametrize("watts", [-1.0, math.nan, math.inf])
def test_invalid_blocking_power_is_refused(watts: float) -> None:
    with pytest.raises(BadPipelineError, match="blocking power"):
        PipelineModel(scheduled(PipelineSchedule.GPIPE, 1, 1), profile([0.1]), watts)


def test_profile_of_other_stages_is_refused() -> None:
    with pytest.raises(BadPipelineError, match="2 stages and the pipeline 3"):
        PipelineModel(scheduled(PipelineSchedule.GPIPE, 3, 1), profile([0.1, 0.1]), 70.0)


def test_plan_beside_a_straggler_is_for_the_shorter_of_both_times() -> None:
    frontier = PipelineFrontier(model())
    middle = (frontier.shortest + frontier.longest) / 2
    assert target_iteration(frontier, 1.0, middle) == middle
    assert target_iteration(frontier, 1.0, 2 * frontier.longest) == frontier.longest


def test_cheapest_iteration_has_the_least_energy_within_the_limit() -> None:
    frontier = PipelineFrontier(model())
    cheapest = frontier.cheapest(math.inf)
    least = min(frontier.at(one).joules for one in frontier.iteration_times)
    assert frontier.at(cheapest).joules == pytest.approx(least, rel=1e-3)
    assert frontier.cheapest(frontier.shortest) == frontier.shortest


def test_rank_clocks_wait_at_blocking_power_for_a_straggler() -> None:
    found = model()
    alone, beside = RankClocks(found).fastest, RankClocks(found, 5.0).fastest
    waited = found.blocking_watts * found.dag.rank_count * (5.0 - alone.seconds)
    assert beside.joules == pytest.approx(alone.joules + waited)
    assert beside.seconds == alone.seconds


def test_orders_of_a_plan_name_every_instruction_of_a_rank() -> None:
    found = model([0.1, 0.1], 2)
    assert rank_orders(found, [1600, 1200])[1] == [
        ("forward", 1200),
        ("backward", 1200),
        ("forward", 1200),
        ("backward", 1200),
    ]
    each = list(range(8))
    named = [mhz for order in rank_orders(found, each) for _, mhz in order]
    assert sorted(named) == each


@pytest.mark.parametrize("number", [12, 105, 3])
def test_rank_clocks_save_95_percent_of_the_best_combination(number: int) -> None:
    assert min(small_case(number)) >= 0.95


def test_coarse_flow_has_the_same_ends_and_a_valid_bound() -> None:
    found = model()
    coarse = CriticalFlow(found.dag, found.costs, watts=200.0)
    exact = PipelineFrontier(found)
    states = [(state.iteration / 1e9, coarse.bound) for state in coarse.shortened()]
    assert states[0][0] == pytest.approx(exact.longest)
    assert states[-1][0] == pytest.approx(exact.shortest)
    assert len(states) < len(exact.iteration_times)
    for seconds, (fixed, slope) in states:
        cost = exact.at(seconds).joules - found.energy(0.0, seconds)
        assert fixed + slope * seconds <= cost + 1e-6
