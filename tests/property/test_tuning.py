"""For any behaviour of a job, the tuner stays within its bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from testbed.tuning_plant import FLOOR, GPU, QUICK, TOP, Plant, Run, SharedRun, with_fields

from wattspan.model import SECOND, DecisionReason, Move
from wattspan.tuning.decisions.budget import allowance
from wattspan.tuning.decisions.phases import plan_ends
from wattspan.tuning.decisions.report import report
from wattspan.tuning.decisions.search import MAX_CANDIDATES, TunerPhase, closed_account
from wattspan.tuning.decisions.sequential_test import evidence
from wattspan.tuning.decisions.step import begin, step
from wattspan.tuning.decisions.values import (
    EnergyPoint,
    KnobRange,
    LevelLadder,
    Observation,
    WorkUnit,
)

RUNS = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
FEW = settings(RUNS, max_examples=settings().max_examples // 5)  # five in `make test`


def curve(costs: Sequence[float], powers: Sequence[float], level: float) -> tuple[float, float]:
    """Any curve at all: straight lines between the drawn points."""
    if level >= TOP:
        return 1.0, 1.0
    place = (TOP - level) / (TOP - FLOOR) * (len(costs) - 1)
    at = min(int(place), len(costs) - 2)
    part = place - at
    return (
        costs[at] + part * (costs[at + 1] - costs[at]),
        powers[at] + part * (powers[at + 1] - powers[at]),
    )


plants = st.builds(
    lambda costs, powers, cv, seed, step: Plant(
        curve=lambda level: curve([1.0, *costs], [1.0, *powers], level),
        cv=cv,
        seed=seed,
        step=step,
    ),
    st.lists(st.floats(0.95, 1.6), min_size=3, max_size=3),
    st.lists(st.floats(0.5, 1.1), min_size=3, max_size=3),
    st.floats(0.0, 0.1),
    st.integers(0, 2**31),
    st.floats(0.1, 2.0),
)


@RUNS
@given(
    plants,
    st.integers(1, 900),
    st.sampled_from([DecisionReason.THROTTLED, DecisionReason.SHARED, DecisionReason.MIG]),
)
def test_veto_releases_within_one_step(plant: Plant, turns: int, veto: DecisionReason) -> None:
    run = Run(plant)
    run.on(turns)
    plant.vetoes = frozenset({veto})
    assert not run.on(1).caps


@pytest.mark.slow
@FEW
@given(plants)
def test_caps_and_the_cost_of_exploration_are_within_their_bounds(plant: Plant) -> None:
    """The cost by the tuner's own account, at any time until a long hold."""
    run = Run(plant)
    for _ in range(60):
        run.on(10)
        figures = report(run.state)
        if figures.lost is not None and figures.allowance is not None:
            # One probe may turn out dearer than anything that was known of the curve.
            assert figures.lost <= figures.allowance + 30 * SECOND
    for decision in run.decisions:
        assert all(FLOOR <= cap < TOP for cap in decision.caps.values())
        assert decision.caps.keys() <= {GPU}
        assert decision.move in (Move.PROBE, Move.HOLD) or not decision.caps


@RUNS
@given(plants, st.integers(1, 600))
def test_decision_steps_are_pure_and_repeatable(plant: Plant, turns: int) -> None:
    run = Run(plant)
    run.on(turns)
    assert run.state is not None
    seen = plant.observe(run.decisions[-1])
    first, second = step(run.state, seen), step(run.state, seen)
    assert first[1] == second[1]
    assert first[0].account == second[0].account
    assert report(run.state) == report(run.state)


@RUNS
@given(
    st.lists(
        st.tuples(
            st.integers(0, 10**10),  # of time
            st.lists(st.tuples(st.integers(-(10**9), 10**9), st.integers(1, 10**10)), max_size=5),
            st.integers(0, 10**9),
            st.integers(FLOOR - 50_000, TOP + 50_000),
            st.booleans(),
            st.booleans(),
        ),
        max_size=60,
    )
)
def test_tuner_survives_invalid_observations(steps: list[tuple[object, ...]]) -> None:
    state = begin(QUICK, (KnobRange(GPU, TOP, FLOOR),), now=0)
    now = energy = 0
    for passed, units, spent, level, obeyed, turn in steps:
        now += passed  # type: ignore[operator]
        energy += spent  # type: ignore[operator]
        arrived = [
            WorkUnit(now + offset - lasts, now + offset, 1)
            for offset, lasts in units  # type: ignore[attr-defined]
        ]
        seen = Observation(
            now=now,
            units=tuple(sorted(arrived, key=lambda unit: unit.end)),
            energy=(EnergyPoint(now, energy),),
            in_force={} if obeyed else {GPU: level},  # type: ignore[dict-item]
            since=now,
            may_explore=bool(turn),
        )
        state, decision = step(state, seen)
        assert all(FLOOR <= cap < TOP for cap in decision.caps.values())
        assert decision.sentence.endswith(".")
    report(state)


@given(
    st.lists(
        st.tuples(st.integers(100_000, 700_000), st.integers(0, 700_000)), min_size=1, max_size=8
    ),
    st.floats(0, 1_000_000),
)
def test_level_keeps_every_device_within_its_range(
    bounds: list[tuple[int, int]], wanted: float
) -> None:
    ranges = [
        KnobRange(str(at), original, min(floor, original))
        for at, (original, floor) in enumerate(bounds)
    ]
    ladder = LevelLadder.over(ranges)
    caps = ladder.caps(ladder.level(wanted))
    for one in ranges:
        assert one.floor <= caps.get(one.device, one.original) <= one.original


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "pairs", "variance", "tails"), [(7, 80, 0.001, 0.0), (11, 60, 0.008, 0.05)]
)
def test_bound_that_is_watched_all_the_time_is_broken_as_seldom_as_promised(
    seed: int, pairs: int, variance: float, tails: float
) -> None:
    """Optional stopping: the mean is at the budget, and one looks after every pair.

    The part ``tails`` of the values has ten times the deviation.
    """
    random, error, broken, runs = Random(seed), 0.05, 0, 300
    for _ in range(runs):
        values: list[float] = []
        for _ in range(pairs):
            wild = 10 if tails and random.random() < tails else 1
            values.append(random.gauss(0.05, 0.01 * wild))
            if len(values) >= 12 and evidence(values, variance).upper(error) <= 0.05:
                broken += 1
                break
    assert broken / runs <= error + 2.5 * math.sqrt(error * (1 - error) / runs)


@pytest.mark.slow
def test_job_at_the_budget_is_rarely_certified() -> None:
    """Every cap costs exactly the budget; nothing may be held."""
    held = 0
    for seed in range(20):
        plant = Plant(curve=lambda at: (1.0, 1.0) if at >= TOP else (1.05, 0.8), cv=0.02, seed=seed)
        run = Run(plant, replace(QUICK, dwell=3_600 * SECOND))
        run.on(800)
        held += any(one.move is Move.HOLD for one in run.decisions)
    assert held <= 3


@pytest.mark.slow
def test_budget_holds_with_the_costliest_probe() -> None:
    plant = Plant(curve=lambda at: (1 + 2.5 * (TOP - at) / TOP, 0.9), cv=0.02)
    run = Run(plant)
    run.on(1_500)
    assert run.state.search.phase is TunerPhase.REST
    figures = report(run.state)
    assert figures.lost <= allowance(0.05, run.state.account.elapsed)


@given(st.floats(0.5, 0.999), st.integers(0, 200))
def test_searches_in_a_row_share_the_declared_error(confidence: float, last: int) -> None:
    """All candidates of all searches together: the union bound."""
    state = begin(replace(QUICK, confidence=confidence), (KnobRange(GPU, TOP, FLOOR),), now=0)
    spent = [MAX_CANDIDATES * with_fields(state, retries=one).error for one in range(last + 1)]
    assert math.fsum(spent) <= (1 - confidence) * (1 + 1e-9)


@RUNS
@given(plants, st.integers(50, 600))
def test_next_tuner_of_a_run_continues_its_account(plant: Plant, turns: int) -> None:
    run = Run(plant)
    run.on(turns)
    assert run.state is not None
    before = report(run.state)
    again = begin(QUICK, (KnobRange(GPU, TOP, FLOOR),), now=0, account=closed_account(run.state))
    after = report(again)
    assert (after.allowance, after.units) == (before.allowance, before.units)
    if before.lost is not None and before.slowdown_bound is not None:
        assert after.lost == pytest.approx(before.lost, abs=2)
        assert after.slowdown_bound == pytest.approx(before.slowdown_bound, abs=1e-6)


@RUNS
@given(plants, st.integers(1, 600))
def test_blocks_end_by_the_clock_only_while_the_setting_is_in_force(
    plant: Plant, turns: int
) -> None:
    run = Run(plant)
    run.on(turns)
    assert run.state is not None
    ends = plan_ends(run.state)
    if ends is not None:
        samples = run.state.samples
        assert samples.level == run.state.search.plan.level
        assert ends >= samples.periods[-1].since + run.state.policy.settle_time


# ----------------------------------------------------------------------------------- tenants

budgets = st.floats(0.0, 0.2)
shared_runs = st.builds(
    lambda jobs: SharedRun(
        [plant for plant, _ in jobs], [replace(QUICK, max_slowdown=budget) for _, budget in jobs]
    ),
    st.lists(st.tuples(plants, budgets), min_size=2, max_size=3),
)


@pytest.mark.slow
@FEW
@given(shared_runs)
def test_setting_of_a_shared_device_is_certified_for_every_tenant(run: SharedRun) -> None:
    certified = None
    for _ in range(700):
        decision = run.on(1)
        assert all(FLOOR <= cap < TOP for cap in decision.caps.values())
        level = run.states[0].search.certified
        if level is not None and level != certified:
            for state in run.states:
                time = state.estimates.at(level).time
                assert time.n >= state.policy.least_pairs
                assert time.upper(state.error) <= state.budget
        certified = level
        for state in run.states:
            figures = report(state)
            if figures.lost is not None and figures.allowance is not None:
                # One probe may turn out dearer than anything that was known of the curve.
                assert figures.lost <= figures.allowance + 30 * SECOND
