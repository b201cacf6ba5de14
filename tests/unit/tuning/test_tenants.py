"""One search for several jobs on one device: every tenant's budget holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from testbed.tuning_plant import QUICK, TOP, Plant, SharedRun

from wattspan.model import Decision, DecisionReason, Move
from wattspan.tuning.decisions import tenants
from wattspan.tuning.decisions.report import report
from wattspan.tuning.decisions.search import TunerPhase


def curve(slope: float) -> Callable[[float], tuple[float, float]]:
    """Time and power: ``slope`` times as much slower as the power is less."""

    def at(level: float) -> tuple[float, float]:
        depth = max(TOP - level, 0.0) / TOP
        return 1 + slope * (depth / 0.3) ** 1.5, 1 - depth

    return at


def held(decision: Decision) -> bool:
    return decision.move is Move.HOLD


def two(slope: float = 0.1, *, budget: float = 0.05, **other: object) -> SharedRun:
    """A tenant of 10 % slowdown at 280 W with 5 % budget, and one of another slope and budget."""
    plants = [Plant(), Plant(curve=curve(slope), seed=5, **other)]  # type: ignore[arg-type]
    return SharedRun(plants, [QUICK, replace(QUICK, max_slowdown=budget)])


def certified_level(run: SharedRun) -> int:
    assert run.state.search.certified is not None
    return run.state.search.certified


@pytest.mark.parametrize(("slope", "budget"), [(0.1, 0.05), (0.2, 0.1), (0.3, 0.05), (0.01, 0.05)])
def test_certified_setting_keeps_the_budget_of_every_tenant(slope: float, budget: float) -> None:
    run = two(slope, budget=budget)
    run.until(held)
    level = certified_level(run)
    assert level < TOP
    for plant, state in zip(run.plants, run.states, strict=True):
        assert plant.curve(level)[0] - 1 <= state.policy.max_slowdown
        time = state.estimates.at(level).time
        assert time.n >= state.policy.least_pairs
        assert time.upper(state.error) <= state.budget
    run.on(500)
    for state in run.states:
        figures = report(state)
        assert figures.slowdown_bound <= state.policy.max_slowdown


def test_sensitive_tenant_determines_the_setting() -> None:
    alone, shared = SharedRun([Plant()], [QUICK]), two(0.3)
    alone.until(held)
    shared.until(held)
    assert certified_level(shared) > certified_level(alone) + 10_000


def test_tenant_without_budget_leaves_the_original_setting() -> None:
    run = two(budget=0.0)
    run.until(lambda decision: decision.reason is DecisionReason.NO_ROOM)
    assert run.plants[0].level == TOP


def test_search_waits_for_the_first_units_of_every_tenant() -> None:
    run = two(silent=True)
    run.on(200)
    assert run.reasons == [DecisionReason.NO_SIGNAL]
    run.plants[1].silent = False
    run.until(held)


def test_tenant_that_falls_silent_ends_the_cap() -> None:
    run = two()
    run.until(held)
    run.plants[1].silent = True
    run.until(lambda decision: decision.reason is DecisionReason.PAUSED, 200)
    assert not run.on(1).caps


def test_tenant_that_becomes_too_slow_ends_the_cap() -> None:
    run = two()
    run.until(held)
    run.plants[1].curve = curve(1.0)
    run.until(lambda decision: decision.move is Move.RELEASE)
    assert run.reasons[-1] in (DecisionReason.OVER_BUDGET, DecisionReason.CHANGED)
    assert not run.on(1).caps


def test_tenant_too_noisy_to_compare_declines_the_device() -> None:
    run = two(cv=0.6)
    run.until(lambda decision: decision.reason is DecisionReason.TOO_NOISY)
    assert run.plants[0].level == TOP


def test_tenants_follow_the_search_of_the_leader() -> None:
    run = two()
    for _ in range(300):
        run.on(1)
        leader, other = run.states
        following = tenants.follow(other, leader)
        assert (following.search.plan, following.search.phase) == (
            leader.search.plan,
            leader.search.phase,
        )
    assert run.states[0].search.phase in (TunerPhase.PROVE, TunerPhase.HOLD, TunerPhase.SCREEN)


def test_tenants_with_steps_of_very_different_length_are_tuned() -> None:
    run = two(step=3.0)
    run.until(held, 20_000)
    for state in run.states:
        assert state.estimates.at(certified_level(run)).time.n >= state.policy.least_pairs
