"""Iterations of pipelines from the spans of their ranks."""

from __future__ import annotations

from itertools import permutations

import pytest
from testbed.pipelines import WATTS, RunningPipeline, backward, forward, observation

from wattspan.model import SECOND
from wattspan.tuning.decisions.values import EnergyPoint, WorkUnit
from wattspan.tuning.pipeline.iterations import (
    MOST_AHEAD,
    AssembledIteration,
    ClockChange,
    IterationAssembly,
    IterationTimes,
    RankInstruction,
    finished,
)
from wattspan.tuning.pipeline.session import add_iteration, use_plan
from wattspan.tuning.pipeline.session_state import PipelinePolicy, begin_session


def unit(rank: int, iteration: int, late: int = 0) -> WorkUnit:
    """An iteration of 8 s every 10 s."""
    start = 10 * SECOND * iteration + late
    return WorkUnit(start, start + 8 * SECOND, rank=rank)


def instructions(rank: int, iteration: int) -> list[RankInstruction]:
    start = 10 * SECOND * iteration + rank * SECOND
    return [
        RankInstruction(rank, forward(rank, 0), start, start + SECOND),
        RankInstruction(rank, backward(rank, 0), start + 3 * SECOND, start + 5 * SECOND),
    ]


def iteration(number: int = 1) -> AssembledIteration:
    _, found = IterationAssembly().add(
        [unit(0, number), unit(1, number)], [*instructions(0, number), *instructions(1, number)]
    )
    return found[0]


ARRIVALS = [
    order
    for order in permutations([(0, 1), (1, 1), (0, 2), (1, 2)])
    if all(order.index((rank, 1)) < order.index((rank, 2)) for rank in (0, 1))
]
"""The orders in which two iterations of two ranks may arrive: each rank sends its own in order."""


@pytest.mark.parametrize("order", ARRIVALS)
def test_iterations_do_not_depend_on_the_arrival(order: tuple[tuple[int, int], ...]) -> None:
    assembly, found = IterationAssembly().add(
        [unit(0, 0), unit(1, 0)], [*instructions(0, 0), *instructions(1, 0)]
    )
    for rank, number in order:
        assembly, more = assembly.add([unit(rank, number)], instructions(rank, number))
        found += more
    assert [one.number for one in found] == [0, 1, 2]
    assert [one.start for one in found] == [0, 10 * SECOND, 20 * SECOND]
    assert {len(one.instructions) for one in found} == {4}
    assert found[0].computed == 6 * SECOND


def test_unit_of_one_rank_alone_is_ignored() -> None:
    assembly, found = IterationAssembly().add(
        [unit(0, 0), unit(0, 1), unit(1, 1)],
        [*instructions(0, 0), *instructions(0, 1), *instructions(1, 1)],
    )
    assert [one.start for one in found] == [10 * SECOND]
    assert {one.rank for one in found[0].instructions} == {0, 1}
    assert not any(assembly.instructions.values())


def test_rank_without_units_is_dropped() -> None:
    assembly, _ = IterationAssembly().add(
        [unit(0, 0), unit(1, 0)], [*instructions(0, 0), *instructions(1, 0)]
    )
    found: list[AssembledIteration] = []
    for number in range(1, MOST_AHEAD + 2):
        assert not found
        assembly, more = assembly.add([unit(0, number)], instructions(0, number))
        found += more
    assert len(found) == MOST_AHEAD + 1
    assert [one.rank for one in found[0].units] == [0]


def test_units_without_instructions_are_no_iterations() -> None:
    assembly, found = IterationAssembly().add([unit(0, 0), unit(1, 0)], [])
    assert found == ()
    assert assembly.number == 0


def test_instructions_without_a_duration_are_ignored() -> None:
    one = instructions(0, 0)[0]
    _, found = IterationAssembly().add([unit(0, 0)], [one._replace(end=one.start)])
    assert found == ()


def test_instructions_wait_for_their_unit() -> None:
    assembly, found = IterationAssembly().add([], instructions(0, 0))
    assert found == ()
    _, found = assembly.add([unit(0, 0)], [])
    assert len(found[0].instructions) == 2


def test_ranks_are_numbered_from_0() -> None:
    units = [WorkUnit(0, 10, rank=7), WorkUnit(0, 10, rank=3)]
    inside = [RankInstruction(7, forward(1, 0), 2, 4), RankInstruction(3, forward(0, 0), 1, 2)]
    _, found = IterationAssembly().add(units, inside)
    spans = finished(found[0], {}, {}).spans
    assert {(span.rank, span.instruction.stage) for span in spans} == {(0, 0), (1, 1)}


def test_clocks_are_known_if_they_did_not_change() -> None:
    one = iteration()
    early, late = ClockChange(0, 1500), ClockChange(12 * SECOND, 1400)
    assert finished(one, {0: [early], 1: [early]}, {}).clocks == (1500, 1500)
    assert finished(one, {0: [early], 1: [early, late]}, {}).clocks is None
    assert finished(one, {0: [early]}, {}).clocks is None
    assert finished(one, {0: [early], 1: [ClockChange(0, None)]}, {}).clocks is None
    assert finished(one, {0: [early], 1: [late]}, {}).clocks is None


def test_energy_is_that_of_periods_with_the_clock() -> None:
    one = iteration()
    points = [EnergyPoint(second * SECOND, 50_000_000 * second) for second in range(30)]
    clocks = {0: [ClockChange(0, 1500)], 1: [ClockChange(10 * SECOND - 1, 1500)]}
    energy = finished(one, clocks, {0: points, 1: points}).energy
    of_first = [period for period in energy if period.rank == 0]
    assert (of_first[0].start, of_first[-1].end) == (10.0, 18.0)
    assert sum(period.joules for period in of_first) == pytest.approx(400.0)
    changed = {0: [ClockChange(0, 1500)], 1: [ClockChange(9 * SECOND + 1, 1500)]}
    later = finished(one, changed, {1: points}).energy
    assert {period.rank for period in later} == {1}
    assert later[0].start == 10.0
    unknown = finished(one, {0: clocks[0]}, {0: points})
    assert unknown.energy == ()


def times(one: AssembledIteration) -> IterationTimes:
    return IterationTimes(one.start, one.end, one.computed)


def test_next_iteration_of_another_pipeline_is_no_reason_to_wait() -> None:
    one = iteration()
    following = IterationTimes(one.end - 1000, one.end + SECOND, one.end + SECOND)
    assert finished(one, {}, {}, [following]).waited == 0.0


def test_pipelines_wait_for_the_last_one() -> None:
    one = iteration()
    slower = one._replace(
        instructions=tuple(inside._replace(end=inside.end + SECOND) for inside in one.instructions)
    )
    assert finished(one, {}, {}, [times(slower)]).waited == 1.0
    assert finished(slower, {}, {}, [times(one)]).waited == 0.0
    assert finished(one, {}, {}, [times(iteration(5))]).waited == 0.0
    assert finished(one, {}, {}).waited == 0.0


def test_session_plans_from_assembled_spans() -> None:
    pipeline = RunningPipeline((0.1, 0.06, 0.1))
    state = begin_session(PipelinePolicy(1600, 800, blocking_watts=WATTS))
    assembly = IterationAssembly()
    clocks = {rank: [ClockChange(0, 1600)] for rank in range(3)}
    energy = {rank: [EnergyPoint(0, 0)] for rank in range(3)}
    for _ in range(250):
        executed = pipeline.iteration(state.decision.clocks)
        _, units, spans, *_ = observation(executed, pipeline.original)
        start, end = units[0].start, units[0].end
        for period in executed.energy:
            points = energy[period.rank]
            points[:] = [
                EnergyPoint(start, points[-1].energy),
                EnergyPoint(end, points[-1].energy + round(period.joules * 1e6)),
            ]
        assembly, found = assembly.add(units, spans)
        for one in found:
            state = add_iteration(state, finished(one, clocks, energy))
            if state.task is not None:
                state = use_plan(state, state.task.solved())
        requested = state.decision.clocks or pipeline.original
        clocks = {rank: [ClockChange(end, mhz)] for rank, mhz in enumerate(requested)}
    assert state.plan
    assert state.settings[state.plan - 1][1] < 1600
    assert state.saving > 0.05
