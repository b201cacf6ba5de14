"""Decisions of the tuner about a job, from the first unit to the last."""

from __future__ import annotations

from dataclasses import replace

import pytest
from testbed.saved_state import saved
from testbed.tuning_plant import (
    FLOOR,
    GPU,
    QUICK,
    RANGES,
    TOP,
    Plant,
    Run,
    gentle,
    with_fields,
)

from wattspan.model import SECOND, Decision, DecisionReason, Knob, Move
from wattspan.tuning.decisions.estimates import LevelEstimate
from wattspan.tuning.decisions.report import certified_levels, report
from wattspan.tuning.decisions.search import (
    fitted_curve,
    searches_without_result,
)
from wattspan.tuning.decisions.step import begin, step
from wattspan.tuning.decisions.values import (
    CertifiedLevels,
    KnobRange,
    Objective,
    Observation,
    WorkloadKind,
    WorkUnit,
)


def held(decision: Decision) -> bool:
    return decision.move is Move.HOLD


def declined(decision: Decision) -> bool:
    return decision.move is Move.DECLINE and decision.reason is not DecisionReason.NO_SIGNAL


@saved
def holding() -> Run:
    """A tuner that holds its first certified setting."""
    run = Run(Plant())
    run.until(held)
    return run


# ------------------------------------------------------------------------------------- a search


def test_job_ends_capped_within_its_budget() -> None:
    run = holding()
    run.on(6_000)
    figures = report(run.state)
    time, power = gentle(run.plant.level if run.plant.level != TOP else figures.tried[-1].setting)
    assert 1.02 < time < 1.05
    assert figures.held_slowdown == pytest.approx(time - 1, abs=0.006)
    assert figures.held_bound <= 0.05
    assert figures.saving == pytest.approx(1 - time * power, rel=0.03)
    assert figures.slowdown_bound is not None
    assert 0 < figures.slowdown < figures.slowdown_bound < 0.05
    assert figures.saved is not None
    assert figures.saved_high is not None
    assert 0 < figures.saved_low <= figures.saved <= figures.saved_high
    assert figures.lost is not None
    assert figures.allowance is not None
    assert 0 < figures.exploration <= figures.lost < figures.allowance
    assert figures.committed
    assert figures.pairs >= 12


def test_search_learns_screens_certifies_and_holds() -> None:
    run = holding()
    assert run.reasons == [
        DecisionReason.BASELINE,
        DecisionReason.SCREENING,
        DecisionReason.CERTIFYING,
        DecisionReason.CERTIFIED,
    ]


def test_hold_explanation_has_its_figures() -> None:
    decision = holding().decisions[-1]
    assert decision.sentence.startswith("Hold ")
    assert "% slower (95 % bound" in decision.sentence
    assert "of a 5 % budget" in decision.sentence
    assert decision.sentence.endswith("pairs.")
    assert decision.caps == {GPU: decision.shown["setting"]}
    assert decision.shown["bound"] < 0.05


def test_certified_level_is_stored_and_proved_first() -> None:
    run = Run(Plant())
    assert certified_levels(begin(QUICK, RANGES, now=0)) is None
    run.until(held)
    assert run.state is not None
    known = certified_levels(run.state)
    assert known.level == run.state.search.certified
    again = Run(Plant(seed=1), state=begin(QUICK, RANGES, now=0, remembered=known))
    again.until(held)
    assert DecisionReason.SCREENING not in again.reasons
    assert DecisionReason.RECERTIFYING in again.reasons
    assert again.state.search.certified == known.level


@pytest.mark.parametrize("level", [TOP, TOP + 5_000])
def test_stored_level_out_of_range_is_ignored(level: int) -> None:
    known = CertifiedLevels(level, level, 0.03, 0.1, 12)
    assert begin(QUICK, RANGES, now=0, remembered=known).search.resume_level is None


def test_held_level_is_compared_with_the_original_now_and_then() -> None:
    run = holding()
    sentinel = run.until(lambda one: one.reason is DecisionReason.SENTINEL)
    assert sentinel.move is Move.PROBE
    assert not sentinel.caps
    assert run.until(held).caps
    run.plant.metered = False
    run.until(lambda one: one.reason is DecisionReason.SENTINEL)
    assert run.until(held).caps


@pytest.mark.slow
def test_noisy_job_is_certified_too_if_later() -> None:
    quiet, noisy = Run(Plant()), Run(Plant(cv=0.06))
    quiet.until(held)
    noisy.until(held)
    first, second = report(quiet.state), report(noisy.state)
    assert first.committed < second.committed
    assert noisy.state.estimates.noise == pytest.approx(0.06, rel=0.5)


def test_lower_level_is_tried_with_more_evidence() -> None:
    run = Run(Plant(cv=0.03))
    first = run.until(held).caps[GPU]
    run.until(lambda one: one.reason is DecisionReason.CERTIFYING)
    assert run.state.search.refinements == 1
    assert run.state.search.candidate < first


def test_lower_level_with_a_negligible_gain_is_not_tried() -> None:
    level = holding().decisions[-1].caps[GPU]
    for floor in (level - 1_000, level):
        run = Run(Plant(), ranges=(KnobRange(GPU, TOP, floor),))
        run.until(held)
        run.on(600)
        assert (run.state.search.certified, run.state.search.refinements) == (level, 0)


def test_several_devices_get_one_level_within_each_ones_range() -> None:
    ranges = (KnobRange(GPU, TOP, FLOOR), KnobRange("GPU-2", 300_000, 290_000))
    state = begin(QUICK, ranges, now=0)
    assert state.search.ladder.caps(350_000) == {GPU: 350_000}
    assert state.search.ladder.caps(250_000) == {GPU: 250_000, "GPU-2": 290_000}


def test_units_of_several_ranks_are_steps_of_one_job() -> None:
    run = Run(Plant(ranks=3))
    run.until(held)
    one = holding()
    assert run.state.account.units == pytest.approx(one.state.account.units, rel=0.3)


# ------------------------------------------------------------------------------- not worth it


@pytest.mark.parametrize(
    ("plant", "reason"),
    [
        (Plant(curve=lambda _: (1.0, 1.0)), DecisionReason.INERT),
        (Plant(curve=lambda level: (1 + 2 * (TOP - level) / TOP, 1.0)), DecisionReason.NO_SAVING),
        (
            Plant(curve=lambda level: (1.08 if level > 340_000 else 1.0, 0.99), draw=TOP + 9_000),
            DecisionReason.NOT_MONOTONE,
        ),
        (Plant(cv=0.9), DecisionReason.TOO_NOISY),
        (Plant(metered=False), DecisionReason.NO_SIGNAL),
    ],
)
def test_untunable_job_is_declined_with_the_reason(plant: Plant, reason: DecisionReason) -> None:
    # Without published curves of the knob, so that more levels are tried.
    run = Run(plant, replace(QUICK, knob=Knob.CPU_POWER))
    plant.curve = plant.curve if reason is not DecisionReason.NOT_MONOTONE else _bumpy
    decision = run.until(lambda one: one.move is Move.DECLINE and "Keep" in one.sentence)
    assert decision.reason is reason
    assert decision.sentence.startswith("Keep the original setting: ")
    assert plant.level == TOP or run.plant.observe(decision).in_force == {}


@pytest.mark.parametrize("apply", [True, False])
@pytest.mark.parametrize("knob", [Knob.GPU_POWER, Knob.CPU_POWER])
def test_job_below_its_lowest_cap_is_declined_without_a_trial(knob: Knob, apply: bool) -> None:
    run = Run(Plant(draw=200_000), replace(QUICK, knob=knob, apply=apply))
    decision = run.until(declined)
    assert decision.reason is DecisionReason.NOT_BINDING
    assert decision.sentence == (
        "Keep the original setting: the job draws less than the lowest permitted cap, 200 W at "
        "most of 240 W."
    )
    assert not any(one.caps for one in run.decisions)


@pytest.mark.parametrize(
    ("plant", "knob"),
    [
        (Plant(draw=230_000), Knob.GPU_POWER),  # short peaks may exceed the lowest cap
        (Plant(draw=100_000, drawn=False), Knob.GPU_POWER),
        (Plant(draw=100_000), Knob.GPU_CLOCK),
    ],
)
def test_job_that_may_exceed_its_lowest_setting_is_tried(plant: Plant, knob: Knob) -> None:
    run = Run(plant, replace(QUICK, knob=knob))
    assert run.until(lambda one: bool(one.caps)).reason is DecisionReason.SCREENING


@pytest.mark.parametrize(
    ("plant", "spent"),
    [
        (Plant(draw=200_000), 0),
        (Plant(curve=lambda _: (1.0, 1.0)), 0),  # inert
        (Plant(curve=lambda level: (1 + 2 * (TOP - level) / TOP, 1.0)), 1),
    ],
)
def test_next_tuner_of_a_run_has_the_error_that_is_left(plant: Plant, spent: int) -> None:
    run = Run(plant)
    run.until(declined)
    assert run.state is not None
    searches = searches_without_result(run.state)
    after = begin(replace(QUICK, knob=Knob.GPU_CLOCK), RANGES, now=0, searches=searches)
    assert searches == spent
    assert after.error == with_fields(begin(QUICK, RANGES, now=0), retries=spent).error


def _bumpy(level: float) -> tuple[float, float]:
    """Slower by 4 % at the first step down, and faster again below."""
    return (1.0, 1.0) if level == TOP else (1.04, 0.97) if level > 370_000 else (1.0, 0.9)


def test_job_without_units_is_reported() -> None:
    decision = Run(Plant(silent=True)).on(5)
    assert decision.reason is DecisionReason.NO_SIGNAL
    assert not decision.caps


@pytest.mark.parametrize(
    ("policy", "ranges"),
    [
        (QUICK, (KnobRange(GPU, TOP, TOP),)),
        (QUICK, ()),
        (replace(QUICK, max_slowdown=0.0), RANGES),
    ],
)
def test_trials_stop_without_range(policy: object, ranges: tuple[KnobRange, ...]) -> None:
    run = Run(Plant(), policy, ranges)  # type: ignore[arg-type]
    assert run.until(declined).reason is DecisionReason.NO_ROOM


def test_declined_level_is_reviewed_later() -> None:
    run = Run(Plant(curve=lambda _: (1.0, 1.0)), replace(QUICK, dwell=20 * SECOND))
    run.until(lambda one: one.reason is DecisionReason.INERT)
    run.plant.curve = gentle
    assert run.until(held).caps


# --------------------------------------------------------------------------------- other aims


def test_advice_mode_describes_the_trial_without_a_request() -> None:
    run = Run(Plant(), replace(QUICK, apply=False))
    decision = run.until(lambda one: one.reason is DecisionReason.ADVICE)
    run.on(200)
    assert decision.move is Move.DECLINE
    assert "334 W" in decision.sentence
    assert "noise" in decision.sentence
    assert "minutes" in decision.sentence
    assert all(not one.caps for one in run.decisions)


def test_time_objective_holds_no_slower_setting() -> None:
    run = Run(
        Plant(curve=lambda level: (1.0, max(level / TOP, 0.8)), cv=0.002),
        replace(QUICK, objective=Objective.TIME),
    )
    assert run.until(held).shown["bound"] <= 0.005


def test_cost_weighs_time_against_energy() -> None:
    def costs(eta: float) -> int:
        policy = replace(QUICK, objective=Objective.COST, eta=eta, max_power=TOP, max_slowdown=0.1)
        run = Run(Plant(curve=lambda at: (1 + 0.9 * (1 - at / TOP) ** 2, at / TOP)), policy)
        return run.until(held).caps[GPU]

    assert costs(1.0) < costs(0.3)


def test_clock_search_starts_at_the_maximum_in_megahertz() -> None:
    def clocked(level: float) -> tuple[float, float]:
        depth = max(1_980 - level, 0) / 1_980 if level < TOP else 0.0
        return 1 + 0.1 * depth, 1 - depth

    ranges = (KnobRange(GPU, 1_980, 1_200, 15),)
    plant = Plant(curve=clocked)
    run = Run(plant, replace(QUICK, knob=Knob.GPU_CLOCK), ranges)
    decision = run.until(lambda one: one.reason is DecisionReason.SCREENING)
    assert decision.caps[GPU] == pytest.approx(0.94 * 1_980, abs=15)
    assert "MHz" in decision.sentence


def test_descent_without_power_samples_starts_near_the_original() -> None:
    """Without published curves of the knob."""
    run = Run(Plant(drawn=False), replace(QUICK, knob=Knob.CPU_POWER))
    assert run.until(lambda one: bool(one.caps)).caps[GPU] == pytest.approx(0.94 * TOP, abs=1_000)


def test_caps_above_the_draw_are_skipped() -> None:
    run = Run(Plant(draw=300_000), replace(QUICK, knob=Knob.CPU_POWER))
    assert run.until(lambda one: bool(one.caps)).caps[GPU] == pytest.approx(309_000, abs=1_000)


# ---------------------------------------------------------------------------------- deciding


def test_decisions_are_pure_and_deterministic_by_seed() -> None:
    one, other = Run(Plant(cv=0.02)), Run(Plant(cv=0.02))
    one.on(1_500)
    for _ in range(15):
        other.on(100)
        before = other.state
        assert before is not None
        assert report(before) == report(before)
        assert other.state is before
    assert one.decisions == other.decisions


def test_job_that_ends_is_released() -> None:
    run = holding()
    assert run.state is not None
    state, decision = step(run.state, Observation(now=10**15, ended=True))
    assert (decision.move, decision.reason) == (Move.RELEASE, DecisionReason.ENDED)
    assert step(state, Observation(now=10**15 + 1))[1] is decision


def test_job_that_ends_early_was_too_short() -> None:
    run = Run(Plant())
    run.on(20)
    assert run.state is not None
    decision = step(run.state, Observation(now=10**12, ended=True))[1]
    assert decision.reason is DecisionReason.TOO_SHORT


def test_policy_distinguishes_requests_and_steps() -> None:
    state = begin(replace(QUICK, kind=WorkloadKind.REQUESTS), RANGES, now=0)
    state, decision = step(state, Observation(now=SECOND))
    assert decision.reason is DecisionReason.NO_SIGNAL
    assert state.latency_limit is None


def test_too_few_requests_permit_no_comparison() -> None:
    state = begin(replace(QUICK, kind=WorkloadKind.REQUESTS), RANGES, now=0)
    first = Observation(now=700 * SECOND, units=(WorkUnit(0, SECOND),))
    state, decision = step(state, first)
    assert (decision.reason, decision.caps) == (DecisionReason.TOO_NOISY, {})
    assert "too few requests arrive" in decision.sentence
    assert step(state, replace(first, now=701 * SECOND, units=()))[1] is decision


def test_level_without_a_comparison_is_no_point_of_the_curve() -> None:
    state = holding().state
    levels = {**state.estimates.levels, FLOOR: LevelEstimate()}
    more = state._replace(estimates=replace(state.estimates, levels=levels))
    assert fitted_curve(more) == fitted_curve(state)
