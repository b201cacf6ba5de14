"""Control of a pipeline: spans, clocks that are read back, and energies that arrive late."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from testbed.pipelines import (
    WATTS,
    EnergyCounters,
    RunningPipeline,
    nanoseconds,
    observation,
)

from wattspan.model import SECOND
from wattspan.tuning.decisions.values import EnergyPoint
from wattspan.tuning.pipeline.control import (
    ENERGY_PATIENCE,
    PipelineControl,
    PipelineObservation,
    RemoteRank,
)
from wattspan.tuning.pipeline.iterations import ClockChange
from wattspan.tuning.pipeline.session import use_plan
from wattspan.tuning.pipeline.session_state import PipelinePhase, PipelinePolicy, begin_session

POLICY = PipelinePolicy(1600, 800, blocking_watts=WATTS)


def control() -> PipelineControl:
    return PipelineControl(begin_session(POLICY))


def step(one: PipelineControl, observation: PipelineObservation) -> PipelineControl:
    """The control of a job's only pipeline after one step."""
    return one.receive(observation).decide(())


@pytest.mark.exhaustive
def test_control_reaches_a_plan_with_late_energies() -> None:
    pipeline, counters = RunningPipeline((0.1, 0.06, 0.1)), EnergyCounters(3)
    one = control()
    energy = dict(counters.points)
    clocks: tuple[int, ...] = pipeline.original
    for _ in range(400):
        executed = pipeline.iteration(clocks)
        # The energy of the iteration before arrives with the spans of this one.
        one = step(one, observation(executed, clocks)._replace(energy=energy))
        energy = counters.add(executed)
        if one.session.task is not None:
            plan = one.session.task.solved()
            one = replace(one, session=use_plan(one.session, plan))
        clocks = one.session.decision.clocks or pipeline.original
    assert one.session.phase is PipelinePhase.HOLD
    assert one.session.plan
    assert one.session.settings[one.session.plan - 1][1] < 1600
    assert one.session.account.slowdown(one.session.lost) <= 0.05


def test_iteration_in_which_clocks_changed_has_unknown_ones() -> None:
    pipeline = RunningPipeline()
    one = control()
    for _ in range(3):
        one = step(one, observation(pipeline.iteration(), pipeline.original))
    assert len(one.session.seen) == 2  # the clocks before the first step are not known
    one = step(one, observation(pipeline.iteration(), (1600, 1500, 1600)))
    assert len(one.session.seen) == 2
    one = step(one, observation(pipeline.iteration(), pipeline.original))
    assert len(one.session.seen) == 2
    one = step(one, observation(pipeline.iteration(), pipeline.original))
    assert len(one.session.seen) == 3


def test_unknown_clocks_are_not_the_original_ones() -> None:
    pipeline = RunningPipeline()
    one = control()
    for _ in range(3):
        one = step(one, observation(pipeline.iteration(), (1600, None, 1600)))
    assert one.session.seen == ()
    assert one.session.account.units == 3


@pytest.mark.parametrize("delayed", [0, 1])
def test_energy_is_used_once(delayed: int) -> None:
    pipeline, counters = RunningPipeline(), EnergyCounters(3)
    one = control()
    waiting = [dict(counters.points)] * (1 + delayed)
    executed = []
    for _ in range(6):
        executed.append(pipeline.iteration())
        waiting.append(counters.add(executed[-1]))
        energy = waiting.pop(0) if delayed else waiting.pop()
        one = step(one, observation(executed[-1], pipeline.original)._replace(energy=energy))
    used = [period for seen in one.session.seen for period in seen.energy if period.rank == 1]
    assert all(before.end <= after.start for before, after in pairwise(used))
    assert len({(period.start, period.end) for period in used}) == len(used)
    assert len(used) >= 3


def test_iteration_waits_for_its_energy() -> None:
    pipeline, counters = RunningPipeline(), EnergyCounters(3)
    early, executed = dict(counters.points), pipeline.iteration()
    one = step(control(), observation(executed, pipeline.original)._replace(energy=early))
    assert (one.charged, len(one.waiting)) == ((), 1)
    late = PipelineObservation(one.stepped + SECOND, energy=counters.add(executed))
    assert [found.iteration.number for found in step(one, late).charged] == [0]
    without = step(one, PipelineObservation(one.stepped + ENERGY_PATIENCE + 1))
    assert [found.iteration.number for found in without.charged] == [0]


def test_control_keeps_the_iterations_of_its_last_step() -> None:
    pipeline = RunningPipeline()
    one = step(control(), observation(pipeline.iteration(), pipeline.original))
    assert [found.iteration.number for found in one.charged] == [0]
    assert step(one, PipelineObservation(one.stepped + 1)).charged == ()


def test_other_pipelines_make_this_one_wait() -> None:
    pipeline = RunningPipeline()
    other = step(control(), observation(pipeline.iteration(longer=2.0), pipeline.original))
    again = RunningPipeline()
    executed = again.iteration()
    one = control().receive(observation(executed, again.original)).decide([other.times()])
    assert one.session.account.elapsed == pytest.approx(nanoseconds(2 * executed.seconds))


def test_clocks_and_energies_of_a_remote_rank_are_those_that_its_host_tells() -> None:
    changes = ClockChange(10, 1600), ClockChange(20, None), ClockChange(30, 1500)
    points = EnergyPoint(15, 1), EnergyPoint(25, 2)
    one = control().receive(PipelineObservation(40, remote={7: RemoteRank(changes, points)}))
    assert (one.clocks[7], one.energy[7]) == (changes, points)
    # Later records repeat some changes, with times that differ a little.
    later = ClockChange(21, None), ClockChange(31, 1500), ClockChange(50, 1600)
    one = one.receive(PipelineObservation(60, remote={7: RemoteRank(later, (EnergyPoint(35, 3),))}))
    assert one.clocks[7] == (changes[0], changes[1], *later)
    assert one.energy[7] == (*points, EnergyPoint(35, 3))
    one = one.receive(PipelineObservation(70, remote={7: RemoteRank()}))
    assert one.clocks[7] == (changes[0], changes[1], *later)
