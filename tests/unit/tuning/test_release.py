"""Release of a cap, and the following decisions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from testbed.saved_state import saved
from testbed.tuning_plant import GPU, QUICK, TOP, Plant, Run, gentle, with_fields

from wattspan.model import SECOND, Decision, DecisionReason, Knob, Move
from wattspan.tuning.decisions.estimates import MAX_REACH, LevelEstimate
from wattspan.tuning.decisions.phases import _certified
from wattspan.tuning.decisions.report import report
from wattspan.tuning.decisions.search import TunerPhase, comparison_blocks, free_blocks, reach
from wattspan.tuning.decisions.sequential_test import Evidence
from wattspan.tuning.decisions.values import Observation

DWELL = replace(QUICK, dwell=60 * SECOND)


def held(decision: Decision) -> bool:
    return decision.move is Move.HOLD


def released(decision: Decision) -> bool:
    return decision.move is Move.RELEASE


def held_at(plant: Plant) -> Run:
    run = Run(plant, DWELL)
    run.until(held)
    return run


@saved
def holding() -> Run:
    return held_at(Plant())


@pytest.mark.parametrize(
    "veto",
    [
        DecisionReason.THROTTLED,
        DecisionReason.SHARED,
        DecisionReason.FOREIGN_WRITER,
        DecisionReason.MIG,
        DecisionReason.NO_CAPPER,
    ],
)
def test_veto_releases_within_one_step(veto: DecisionReason) -> None:
    run = holding()
    run.plant.vetoes = frozenset({veto})
    decision = run.on(1)
    assert (decision.move, decision.reason, dict(decision.caps)) == (Move.RELEASE, veto, {})
    run.on(30)
    assert not run.decisions[-1].caps


def test_veto_without_a_cap_declines() -> None:
    run = Run(Plant(vetoes=frozenset({DecisionReason.MIG})))
    decision = run.on(40)
    assert (decision.move, decision.reason) == (Move.DECLINE, DecisionReason.MIG)
    run.plant.vetoes = frozenset()
    assert run.until(held).caps


def test_veto_requires_a_new_proof_of_the_certified_level() -> None:
    run = holding()
    level = run.decisions[-1].caps[GPU]
    run.plant.vetoes = frozenset({DecisionReason.THROTTLED})
    run.on(1)
    run.plant.vetoes = frozenset()
    assert run.until(lambda one: bool(one.caps)).caps[GPU] == level
    assert run.decisions[-1].reason is DecisionReason.RECERTIFYING
    assert (
        DecisionReason.SCREENING not in run.reasons[run.reasons.index(DecisionReason.THROTTLED) :]
    )


def test_rest_doubles_with_each_release_of_an_hour() -> None:
    run = holding()
    waits = []
    for _ in range(3):
        run.until(lambda one: bool(one.caps))
        run.plant.vetoes = frozenset({DecisionReason.THROTTLED})
        run.on(1)
        run.plant.vetoes = frozenset()
        waits.append(run.state.search.rest_until / SECOND - run.plant.now)
    assert waits == [60, 120, 240]


def test_pause_releases_and_work_that_returns_is_tuned_again() -> None:
    run = holding()
    run.plant.silent = True
    run.until(released, turns=200)
    assert run.decisions[-1].reason is DecisionReason.PAUSED
    run.on(3_600)
    assert run.decisions[-1].reason is DecisionReason.PAUSED
    run.plant.silent = False
    assert run.until(held).caps


@pytest.mark.parametrize("phase", [TunerPhase.SCREEN, TunerPhase.PROVE])
def test_job_that_falls_silent_in_a_search_is_released(phase: TunerPhase) -> None:
    run = Run(Plant(), DWELL)
    run.until(
        lambda one: bool(one.caps) and run.state is not None and run.state.search.phase is phase
    )
    run.plant.silent = True
    run.until(released, turns=400)
    assert run.decisions[-1].reason is DecisionReason.PAUSED
    run.on(3_600)
    assert not run.decisions[-1].caps


def test_device_that_does_not_obey_is_left_alone() -> None:
    run = Run(Plant(obeys=False), DWELL)
    run.until(released)
    assert run.decisions[-1].reason is DecisionReason.FOREIGN_WRITER


def test_trial_waits_for_another_job() -> None:
    run = Run(Plant(may=False))
    run.until(lambda one: one.reason is DecisionReason.WAITING)
    assert run.state.exploring
    run.on(50)
    assert all(not one.caps for one in run.decisions)
    run.plant.may = True
    run.until(lambda one: bool(one.caps))
    run.plant.may = False
    assert run.on(2).reason is DecisionReason.WAITING
    run.plant.may = True
    run.until(held)
    run.plant.may = False
    run.on(3)
    assert run.decisions[-1].move is Move.HOLD
    assert not run.state.exploring


def test_level_that_becomes_too_slow_is_released_and_a_softer_one_found() -> None:
    run = holding()
    level = run.decisions[-1].caps[GPU]
    run.plant.curve = lambda at: (1 + 3 * (gentle(at)[0] - 1), gentle(at)[1])
    sentinels = sum(one.reason is DecisionReason.SENTINEL for one in run.decisions)
    run.until(released)
    assert run.decisions[-1].reason in (DecisionReason.OVER_BUDGET, DecisionReason.CHANGED)
    assert sum(one.reason is DecisionReason.SENTINEL for one in run.decisions) - sentinels <= 5
    softer = run.until(held)
    assert softer.caps[GPU] > level


def test_changed_job_is_released_and_proved_again() -> None:
    run = holding()
    run.on(2_000)
    run.plant.step *= 1.6
    run.until(released)
    assert run.decisions[-1].reason is DecisionReason.CHANGED
    assert run.until(held).caps
    figures = report(run.state)
    assert figures.slowdown < 0.05
    assert figures.saved > 0


def test_false_spans_are_judged_by_the_gaps_between_them() -> None:
    plant = Plant(
        curve=lambda at: (1.0, gentle(at)[1]),
        gap=lambda at: 0.5 * (gentle(at)[0] - 1) * 1.5,
    )
    run = Run(plant, DWELL)
    level = run.until(held).caps[GPU]
    assert run.state.estimates.at(level).misleading
    assert 1.5 * (gentle(level)[0] - 1) < 0.05


def test_long_steps_without_gaps_are_not_compared() -> None:
    run = held_at(Plant(gap=lambda _: 0.0))
    before = run.state.estimates.at(run.decisions[-1].caps[GPU]).time.n
    run.plant.silent = True
    run.on(40)
    run.plant.silent = False
    run.on(60)
    assert run.state.estimates.at(run.state.chosen).time.n <= before + 1


def test_work_that_varies_is_counted() -> None:
    run = Run(Plant(work=lambda at: 1 + at % 5), DWELL)
    level = run.until(held).caps[GPU]
    assert gentle(level)[0] < 1.05
    assert level < TOP


def costing(level: int, slower: float) -> Callable[[float], tuple[float, float]]:
    """A job that a level slows down by so much, and others in proportion to their depth."""

    def curve(at: float) -> tuple[float, float]:
        depth = max(TOP - at, 0.0) / (TOP - level)
        return 1 + slower * depth**1.5, gentle(at)[1]

    return curve


def test_short_neighbour_load_does_not_release() -> None:
    run = holding()
    run.on(1_000)
    for _ in range(12):
        run.plant.step *= 1.3
        run.on(25)
        run.plant.step /= 1.3
        run.on(60)
    assert DecisionReason.OVER_BUDGET not in run.reasons
    assert run.until(held).caps


def test_failed_candidate_is_replaced_by_a_higher_one() -> None:
    run = Run(Plant(), DWELL)
    level = run.until(lambda one: one.reason is DecisionReason.CERTIFYING).caps[GPU]
    run.plant.curve = costing(level, 0.054)
    decision = run.until(held)
    assert decision.caps[GPU] > level
    assert run.state.search.failed_candidates >= 1
    assert not any(one.move is Move.RELEASE for one in run.decisions)


def test_much_too_slow_candidate_is_released() -> None:
    run = Run(Plant(), DWELL)
    level = run.until(lambda one: one.reason is DecisionReason.CERTIFYING).caps[GPU]
    run.plant.curve = costing(level, 0.25)
    assert run.until(released, turns=600).reason is DecisionReason.OVER_BUDGET


@pytest.mark.parametrize(
    "lowered", [(1.056, 0.75), (1.03, 0.95)], ids=["too-slow", "saves-less-than-the-certified"]
)
def test_lower_candidate_that_fails_leaves_the_one_that_was_certified(
    lowered: tuple[float, float],
) -> None:
    run = held_at(Plant(cv=0.03))
    level = run.decisions[-1].caps[GPU]
    lower = run.until(lambda one: one.reason is DecisionReason.CERTIFYING and bool(one.caps)).caps[
        GPU
    ]
    assert lower < level
    usual = run.plant.curve
    run.plant.curve = lambda at: lowered if at <= lower else usual(at)
    assert run.until(held).caps[GPU] == level
    run.plant.may = False
    run.until(held)


def test_three_candidates_that_fail_end_the_search() -> None:
    run = Run(Plant(), DWELL)
    while (
        run.on(1).move is not Move.DECLINE or run.decisions[-1].reason is DecisionReason.NO_SIGNAL
    ):
        state = run.state
        assert state is not None
        if state.search.candidate is not None:
            run.plant.curve = costing(state.search.candidate, 0.054)
    assert run.decisions[-1].reason is DecisionReason.TOO_NOISY
    assert not any(held(one) for one in run.decisions)


def test_way_down_ends_where_energy_rises_again() -> None:
    def shallow(at: float) -> tuple[float, float]:
        return (1.0, 1.0) if at >= TOP else (1.025, 0.8) if at > 370_000 else (1.036, 0.95)

    run = Run(Plant(curve=shallow, cv=0.002), replace(DWELL, knob=Knob.CPU_POWER, block_units=40))
    run.until(lambda one: one.reason is DecisionReason.CERTIFYING)
    assert len(run.state.estimates.levels) == 2
    assert run.until(held).caps[GPU] > 370_000


def test_setting_without_savings_is_not_held() -> None:
    run = Run(Plant(), DWELL)
    run.until(lambda one: one.reason is DecisionReason.CERTIFYING)
    run.plant.curve = lambda at: (gentle(at)[0], 1.0)
    decision = run.until(lambda one: one.move is Move.DECLINE)
    assert decision.reason is DecisionReason.NO_SAVING
    assert not any(held(one) for one in run.decisions)


def test_certified_level_without_savings_is_followed_by_a_lower_one() -> None:
    run = Run(Plant(cv=0.002), DWELL)
    run.until(lambda one: one.reason is DecisionReason.CERTIFYING)
    level = TOP - 8_000
    shallow = LevelEstimate(time=Evidence(12, 0.001, 0.001), power=Evidence(12, -0.001, 0.001))
    estimates = replace(run.state.estimates, levels={**run.state.estimates.levels, level: shallow})
    before = with_fields(run.state, estimates=estimates, candidate=level)
    after = _certified(before, Observation(now=run.state.search.requested_at), level)
    assert after.search.phase is TunerPhase.PROVE
    assert after.search.candidate < level
    assert after.search.refinements == 1
    last = _certified(
        with_fields(before, refinements=3), Observation(now=run.state.search.requested_at), level
    )
    assert last.decision.reason is DecisionReason.NO_SAVING


def test_blocks_of_a_comparison_follow_settling_time_and_noise() -> None:
    run = Run(Plant(cv=0.002), DWELL)
    run.until(held)
    slow = run.state._replace(policy=replace(run.state.policy, settle_time=60 * SECOND))
    assert comparison_blocks(slow) == (3, MAX_REACH)
    assert comparison_blocks(with_fields(slow, certified=None)) == (1, 2)
    assert comparison_blocks(run.state) == (1, 2)
    assert comparison_blocks(with_fields(run.state, certified=None)) == (1, 1)
    noisy = run.state._replace(estimates=replace(run.state.estimates, variance=0.01))
    assert comparison_blocks(noisy) == (1, 4)
    assert (free_blocks(run.state), reach(run.state)) == (1, 2)
    assert (free_blocks(noisy), reach(noisy)) == (4, 6)
