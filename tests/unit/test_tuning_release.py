"""When a cap is given back, and what comes after."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.tuning_plant import GPU, QUICK, TOP, Plant, Run, gentle
from wattspan.model import SECOND, Decision, Move, Reason
from wattspan.tuning import report

DWELL = replace(QUICK, dwell=60 * SECOND)


def held(decision: Decision) -> bool:
    return decision.move is Move.HOLD


def released(decision: Decision) -> bool:
    return decision.move is Move.RELEASE


def holding(plant: Plant | None = None) -> Run:
    run = Run(plant or Plant(), DWELL)
    run.until(held)
    return run


@pytest.mark.parametrize(
    "veto", [Reason.THROTTLED, Reason.SHARED, Reason.FOREIGN_WRITER, Reason.MIG, Reason.NO_CAPPER]
)
def test_a_veto_releases_within_one_step(veto: Reason) -> None:
    run = holding()
    run.plant.vetoes = frozenset({veto})
    decision = run.on(1)
    assert (decision.move, decision.reason, dict(decision.caps)) == (Move.RELEASE, veto, {})
    run.on(30)
    assert not run.decisions[-1].caps


def test_a_veto_without_a_cap_declines() -> None:
    run = Run(Plant(vetoes=frozenset({Reason.PROFILE})))
    decision = run.on(40)
    assert (decision.move, decision.reason) == (Move.DECLINE, Reason.PROFILE)
    run.plant.vetoes = frozenset()
    assert run.until(held).caps


def test_after_a_veto_the_certified_level_is_proved_anew() -> None:
    run = holding()
    level = run.decisions[-1].caps[GPU]
    run.plant.vetoes = frozenset({Reason.THROTTLED})
    run.on(1)
    run.plant.vetoes = frozenset()
    assert run.until(lambda one: bool(one.caps)).caps[GPU] == level
    assert run.decisions[-1].reason is Reason.RECERTIFYING
    assert Reason.SCREENING not in run.reasons[run.reasons.index(Reason.THROTTLED) :]


def test_the_rest_doubles_with_each_release_of_an_hour() -> None:
    run = holding()
    waits = []
    for _ in range(3):
        run.until(lambda one: bool(one.caps))
        run.plant.vetoes = frozenset({Reason.THROTTLED})
        run.on(1)
        run.plant.vetoes = frozenset()
        assert run.state is not None
        waits.append(run.state.until / SECOND - run.plant.now)
    assert waits == [60, 120, 240]


def test_a_pause_releases_and_work_that_returns_is_tuned_again() -> None:
    run = holding()
    run.plant.silent = True
    run.until(released, turns=200)
    assert run.decisions[-1].reason is Reason.PAUSED
    run.on(3_600)
    assert run.decisions[-1].reason is Reason.PAUSED
    run.plant.silent = False
    assert run.until(held).caps


def test_a_device_that_does_not_obey_is_left_alone() -> None:
    run = Run(Plant(obeys=False), DWELL)
    run.until(released)
    assert run.decisions[-1].reason is Reason.FOREIGN_WRITER


def test_another_jobs_turn_is_waited_for() -> None:
    run = Run(Plant(may=False))
    run.until(lambda one: one.reason is Reason.WAITING)
    assert report(run.state).exploring
    run.on(50)
    assert all(not one.caps for one in run.decisions)
    run.plant.may = True
    run.until(lambda one: bool(one.caps))
    run.plant.may = False
    assert run.on(2).reason is Reason.WAITING
    run.plant.may = True
    run.until(held)
    run.plant.may = False
    run.on(3)
    assert run.decisions[-1].move is Move.HOLD
    assert not report(run.state).exploring


def test_a_level_that_becomes_too_slow_is_released_and_a_softer_one_found() -> None:
    run = holding()
    level = run.decisions[-1].caps[GPU]
    run.plant.curve = lambda at: (1 + 3 * (gentle(at)[0] - 1), gentle(at)[1])
    sentinels = sum(one.reason is Reason.SENTINEL for one in run.decisions)
    run.until(released)
    assert run.decisions[-1].reason in (Reason.OVER_BUDGET, Reason.CHANGED)
    assert sum(one.reason is Reason.SENTINEL for one in run.decisions) - sentinels <= 5
    softer = run.until(held)
    assert softer.caps[GPU] > level


def test_a_job_that_becomes_another_one_is_released_and_proved_anew() -> None:
    run = holding()
    run.on(2_000)
    run.plant.step *= 1.6
    run.until(released)
    assert run.decisions[-1].reason is Reason.CHANGED
    assert run.until(held).caps
    told = report(run.state)
    assert told.slowdown is not None
    assert told.slowdown < 0.05
    assert told.saved is not None
    assert told.saved > 0


def test_spans_that_lie_are_judged_by_what_lies_between_them() -> None:
    plant = Plant(
        curve=lambda at: (1.0, gentle(at)[1]),
        gap=lambda at: 0.5 * (gentle(at)[0] - 1) * 1.5,
    )
    run = Run(plant, DWELL)
    level = run.until(held).caps[GPU]
    assert run.state is not None
    assert run.state.known.at(level).lying
    assert 1.5 * (gentle(level)[0] - 1) < 0.05


def test_long_steps_between_which_nothing_is_known_are_not_compared() -> None:
    run = holding(Plant(gap=lambda _: 0.0))
    assert run.state is not None
    before = run.state.known.at(run.decisions[-1].caps[GPU]).time.n
    run.plant.silent = True
    run.on(40)
    run.plant.silent = False
    run.on(60)
    assert run.state.known.at(run.state.chosen).time.n <= before + 1


def test_work_that_varies_is_counted() -> None:
    run = Run(Plant(work=lambda at: 1 + at % 5), DWELL)
    level = run.until(held).caps[GPU]
    assert gentle(level)[0] < 1.05
    assert level < TOP
