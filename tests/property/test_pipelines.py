"""The frontier of any pipeline: no plan beats its bound, and its own plan reaches it."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from testbed.pipelines import uniform_plan

from wattspan.tuning.pipeline.costs import ClockPoint, PipelineProfile
from wattspan.tuning.pipeline.dag import CostKey, InstructionKind, PipelineSchedule, scheduled
from wattspan.tuning.pipeline.frontier import PipelineFrontier, PipelineModel
from wattspan.tuning.pipeline.plan import RankClocks, instruction_plan

CLOCKS = (900, 1200, 1500)


@st.composite
def models(draw: st.DrawFn) -> PipelineModel:
    """Pipelines of any schedule with arbitrary times and energies, also energies that rise."""
    schedule = draw(st.sampled_from(PipelineSchedule))
    ranks = draw(st.integers(1, 3))
    stages = ranks * (draw(st.integers(1, 2)) if schedule is PipelineSchedule.INTERLEAVED else 1)
    microbatches = ranks * draw(st.integers(1, 2))
    points = {
        CostKey(stage, kind): [
            ClockPoint(mhz, draw(st.integers(1, 400)) / 1000, float(draw(st.integers(1, 200))))
            for mhz in CLOCKS
        ]
        for stage in range(stages)
        for kind in InstructionKind
    }
    dag = scheduled(schedule, stages, microbatches, ranks)
    return PipelineModel(dag, PipelineProfile(points), draw(st.sampled_from((0.0, 70.0))))


@given(models(), st.floats(0, 1))
def test_frontier_keeps_the_time_and_reaches_its_bound(found: PipelineModel, part: float) -> None:
    frontier = PipelineFrontier(found)
    seconds = frontier.shortest + part * (frontier.longest - frontier.shortest)
    point = frontier.at(seconds)
    assert found.dag.makespan(point.durations) <= seconds + 1e-6
    waiting = found.energy(0.0, seconds)
    spread = sum(one.vertices[0].cost - one.vertices[-1].cost for one in found.of_instruction)
    assert point.bound <= point.joules + 1e-6 * (1 + abs(waiting))
    assert point.joules - point.bound <= 0.03 * spread + 1e-6
    plan = instruction_plan(found, point)
    assert plan.seconds <= seconds + 1e-6


@given(models(), st.integers(0, 2**32))
def test_no_plan_beats_the_bound(found: PipelineModel, seed: int) -> None:
    frontier, chance = PipelineFrontier(found), random.Random(seed)
    for _ in range(5):
        chosen = [chance.choice(one.points) for one in found.of_instruction]
        seconds = found.dag.makespan([one.seconds for one in chosen])
        cost = sum(of.cost(one) for of, one in zip(found.of_instruction, chosen, strict=True))
        bound = frontier.at(seconds).bound
        assert found.energy(cost, seconds) >= bound - 1e-6 * (1 + abs(bound))


@given(models(), st.floats(0, 0.5), st.booleans())
def test_rank_clocks_keep_the_limit_and_are_no_worse_than_one_clock(
    found: PipelineModel, slowdown: float, straggler: bool
) -> None:
    fastest = RankClocks(found).fastest
    limit = fastest.seconds * (1 + slowdown)
    search = RankClocks(found, limit if straggler else 0.0)
    own = search.best(limit)
    assert own.seconds <= limit * (1 + 1e-6)
    assert own.joules <= uniform_plan(search, found, limit).joules
    assert own.joules >= PipelineFrontier(found).at(max(limit, own.seconds)).bound - (
        found.energy(0.0, limit) - found.energy(0.0, own.seconds) if not straggler else 0.0
    ) - 1e-6 * (1 + abs(own.joules))
