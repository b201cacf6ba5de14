"""Profiles of running pipelines: durations from spans, powers by regression."""

from __future__ import annotations

import pytest
from testbed.pipelines import BACKWARD, FORWARD, WATTS, RunningPipeline, forward

from wattspan.tuning.pipeline.dag import CostKey
from wattspan.tuning.pipeline.frontier import PipelineModel
from wattspan.tuning.pipeline.iterations import (
    STRAGGLER_ITERATIONS,
    InstructionSpan,
    PipelineIteration,
    RankEnergy,
    StragglerWatch,
)
from wattspan.tuning.pipeline.online_profile import OnlineProfile
from wattspan.tuning.pipeline.session_state import (
    IterationRun,
    PipelinePolicy,
    PlanComparison,
    plan_run,
)


def at_clocks(pipeline: RunningPipeline, *clocks: tuple[int, ...]) -> OnlineProfile:
    profile = OnlineProfile()
    for one in clocks:
        profile = profile.add(pipeline.iteration(one))
    return profile


def modelled(
    pipeline: RunningPipeline, profile: OnlineProfile, watts: float | None
) -> PipelineModel:
    model = profile.model(pipeline.dag, 15, watts)
    assert model is not None
    return model


def test_model_has_the_measured_durations_and_energies() -> None:
    pipeline = RunningPipeline()
    model = modelled(pipeline, at_clocks(pipeline, (1600,) * 3, (1300,) * 3), WATTS)
    for stage, base in enumerate((0.1, 0.08, 0.1)):
        for kind, passes in ((FORWARD, 1), (BACKWARD, 2)):
            for mhz in (1600, 1300):
                point = model.costs[CostKey(stage, kind)].by_clock[mhz]
                seconds = passes * base * 1600 / mhz
                assert point.seconds == pytest.approx(seconds)
                watts = WATTS + 200 * (mhz / 1600) ** 3
                assert point.joules == pytest.approx(seconds * watts, rel=1e-6)


def test_model_interpolates_between_measured_clocks() -> None:
    pipeline = RunningPipeline()
    model = modelled(pipeline, at_clocks(pipeline, (1600,) * 3, (1300,) * 3), WATTS)
    assert len(model.clocks) == 5
    cost = model.costs[CostKey(0, FORWARD)]
    times = [cost.by_clock[mhz].seconds for mhz in model.clocks]
    assert times == sorted(times, reverse=True)


def test_unmeasured_lower_clock_of_a_rank_saves_nothing() -> None:
    pipeline = RunningPipeline()
    model = modelled(pipeline, at_clocks(pipeline, (1600,) * 3, (1600, 1200, 1600)), WATTS)
    known, unknown = (model.costs[CostKey(stage, FORWARD)].by_clock for stage in (1, 0))
    assert known[1200].joules < known[1600].joules
    assert unknown[1200].seconds == pytest.approx(unknown[1600].seconds * 1600 / 1200)
    assert unknown[1200].joules == pytest.approx(unknown[1600].joules)


def test_wanted_clocks_are_in_the_model() -> None:
    pipeline = RunningPipeline()
    profile = at_clocks(pipeline, (1600,) * 3, (1300,) * 3)
    model = profile.model(pipeline.dag, 15, WATTS, (1333, 900, 1700))
    assert 1333 in model.clocks
    assert (min(model.clocks), max(model.clocks)) == (1300, 1600)


def test_regression_separates_forwards_backwards_and_waiting() -> None:
    spans = tuple(
        InstructionSpan(2, 0, forward(0, number)._replace(kind=kind), start, end)
        for number, (kind, start, end) in enumerate(
            [(FORWARD, 0.0, 1.0), (BACKWARD, 2.0, 4.0), (FORWARD, 6.0, 7.0), (BACKWARD, 7.0, 9.0)]
        )
    )
    watts = {None: 50.0, FORWARD: 200.0, BACKWARD: 300.0}
    times = [
        (0.0, 1.0, FORWARD),
        (1.0, 2.0, None),
        (2.0, 4.0, BACKWARD),
        (4.0, 6.0, None),
        (6.0, 7.0, FORWARD),
        (7.0, 9.0, BACKWARD),
    ]
    periods = []
    for start, end in ((0.0, 1.5), (1.5, 3.0), (3.0, 4.5), (4.5, 6.5), (6.5, 8.0), (8.0, 9.0)):
        joules = sum(
            watts[kind] * max(0.0, min(end, after) - max(start, before))
            for before, after, kind in times
        )
        periods.append(RankEnergy(0, start, end, joules))
    profile = OnlineProfile().add(PipelineIteration(spans, (1000,), tuple(periods)))
    waiting, powers = profile.powers(None)
    assert waiting == pytest.approx(50.0, rel=0.02)
    assert powers[0, 1000][FORWARD] == pytest.approx(200.0, rel=0.02)
    assert powers[0, 1000][BACKWARD] == pytest.approx(300.0, rel=0.02)


def test_energy_of_whole_iterations_gives_equal_powers() -> None:
    pipeline = RunningPipeline()
    profile = at_clocks(pipeline, (1600,) * 3)
    _, powers = profile.powers(WATTS)
    for rank in range(3):
        assert powers[rank, 1600][FORWARD] == pytest.approx(270.0)
        assert powers[rank, 1600][BACKWARD] == pytest.approx(270.0)


def test_period_that_began_in_the_iteration_before_counts_its_spans() -> None:
    one = InstructionSpan(2, 0, forward(0, 0), 0.0, 1.0)
    two = InstructionSpan(3, 0, forward(0, 0), 1.0, 2.0)
    profile = OnlineProfile().add(PipelineIteration((one,), (1000,)))
    period = RankEnergy(0, 0.5, 1.5, 100.0)
    _, powers = profile.add(PipelineIteration((two,), (1000,), (period,))).powers(0.0)
    assert powers[0, 1000][FORWARD] == pytest.approx(100.0)


def test_period_that_began_in_an_unknown_iteration_is_not_used() -> None:
    pipeline = RunningPipeline()
    first, unknown, last = (pipeline.iteration(reported=known) for known in (True, False, True))
    early = RankEnergy(1, unknown.spans[0].start, last.spans[0].end, 1e6)
    profile = OnlineProfile().add(first).add(unknown)
    with_early = profile.add(last._replace(energy=(early, *last.energy)))
    assert with_early.powers(WATTS) == profile.add(last).powers(WATTS)


def test_periods_without_instructions_have_no_power() -> None:
    one = InstructionSpan(2, 0, forward(0, 0), 0.0, 1.0)
    period = RankEnergy(0, 2.0, 3.0, 50.0)
    profile = OnlineProfile().add(PipelineIteration((one,), (1000,), (period,)))
    assert profile.powers(None) == (0.0, {})


def test_less_energy_than_that_of_waiting_is_no_power() -> None:
    one = InstructionSpan(2, 0, forward(0, 0), 0.0, 1.0)
    period = RankEnergy(0, 0.0, 2.0, 100.0)
    profile = OnlineProfile().add(PipelineIteration((one,), (1000,), (period,)))
    _, powers = profile.powers(200.0)
    assert powers[0, 1000][FORWARD] == 0.0


def test_unknown_clocks_and_energies_give_no_model() -> None:
    pipeline = RunningPipeline()
    unknown = OnlineProfile().add(pipeline.iteration(reported=False))
    assert unknown == OnlineProfile()
    unmetered = OnlineProfile().add(pipeline.iteration(metered=False))
    assert unmetered.model(pipeline.dag, 15) is None
    assert unmetered.executions(CostKey(0, FORWARD), 1600) == 4
    assert unmetered.executions(CostKey(0, FORWARD), 1500) == 0


def test_power_of_an_iteration_needs_every_rank() -> None:
    one = RunningPipeline().iteration()
    assert one.watts(3) == pytest.approx(
        sum(energy.joules / (energy.end - energy.start) for energy in one.energy)
    )
    assert one._replace(energy=one.energy[:2]).watts(3) is None


def test_profiled_clocks_are_multiples_of_the_step_above_the_floor() -> None:
    clocks = PipelinePolicy(1740, 1000, 15).clocks[1:]
    assert clocks[0] == 1665
    assert clocks == tuple(sorted(clocks, reverse=True))
    assert all(mhz % 15 == 0 and 1000 <= mhz < 1740 for mhz in clocks)
    assert PipelinePolicy(100, 10, 60).clocks == (100, 60)


# -------------------------------------------------------------------------------- stragglers


def waiting(part: float, partner: str = "") -> PipelineIteration:
    """An iteration after which all ranks wait for this part of its time."""
    one = RunningPipeline().iteration()
    lasted = one.seconds * (1 + part)
    return one._replace(waited=part * one.seconds, partner=partner, lasted=lasted)


def test_straggler_needs_20_iterations_in_a_row() -> None:
    watch = StragglerWatch()
    for number in range(STRAGGLER_ITERATIONS - 1):
        watch = watch.add(waiting(0.2 + 0.001 * number))
    assert watch.straggler is None
    seconds = waiting(0.0).seconds
    assert watch.add(waiting(0.2)).straggler == pytest.approx(1.2 * seconds)
    assert watch.add(waiting(0.01)).times == ()


def test_planned_iteration_waits_less_for_the_straggler() -> None:
    watch = StragglerWatch()
    assert len(watch.add(waiting(0.01), planned=True).times) == 1
    assert watch.add(waiting(0.002), planned=True).times == ()


def test_straggler_of_another_host_and_the_usual_time_are_the_latest() -> None:
    watch = StragglerWatch()
    for part in (0.9, 0.1, 0.2, 0.3, 0.4, 0.5):
        watch = watch.add(waiting(part, f"{part} of b"))
    assert watch.partner == "0.5 of b"
    assert watch.usual == pytest.approx(1.3 * waiting(0.0).seconds)


# -------------------------------------------------------------------------------- comparisons


def test_comparison_uses_the_runs_before_and_after() -> None:
    comparison = PlanComparison().compare(IterationRun().add(1.0, 100.0))
    assert comparison.times == ()
    assert comparison.drifted(IterationRun().add(2.718281828, 100.0)) == pytest.approx(1.0)
    assert PlanComparison().drifted(IterationRun().add(1.0, None)) == 0.0
    comparison = comparison.hold(IterationRun().add(1.1, 80.0))
    comparison = comparison.compare(IterationRun().add(1.21, 100.0))
    assert comparison.slower(0.01).mean == pytest.approx(0.0, abs=1e-9)
    assert comparison.energy(0.01).mean == pytest.approx(-0.2231, abs=1e-3)
    comparison = comparison.hold(IterationRun().add(1.21, None))
    comparison = comparison.compare(IterationRun().add(1.21, 0.0))
    assert comparison.slower(0.01).n == 2
    assert comparison.energy(0.01).n == 1


def test_runs_at_a_plan_become_longer() -> None:
    lengths = [plan_run(number) for number in range(8)]
    assert lengths == sorted(lengths)
    assert lengths[0] == 8
    assert lengths[-1] == lengths[-2] == 128
