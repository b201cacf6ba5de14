"""Less for ranks that wait: trial, hold and release of per-rank settings."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import pytest
from testbed.tuning_plant import with_fields

from wattspan.model import SECOND, DecisionReason, Move
from wattspan.tuning.decisions.estimates import Estimates, LevelEstimate
from wattspan.tuning.decisions.phases import decide, relearn
from wattspan.tuning.decisions.rank_balancing import (
    BALANCING_DEPTH,
    BALANCING_TRIES,
    SLACK_WINDOW,
    lower_waiting_ranks,
    observe_steps,
    saves_energy,
    slack_outdated,
    step_time_certified,
)
from wattspan.tuning.decisions.ranks import STEPS, RankSlack, RankWaits, SynchronousStep
from wattspan.tuning.decisions.report import certified_levels, setting_text
from wattspan.tuning.decisions.search import (
    MAX_CANDIDATES,
    ProbePlan,
    TunerPhase,
    TunerState,
)
from wattspan.tuning.decisions.sequential_test import Cusum, Evidence
from wattspan.tuning.decisions.step import begin
from wattspan.tuning.decisions.values import KnobRange, LevelLadder, Observation, TunerPolicy

W = 1_000
TOP, BASE = 700 * W, 600 * W
RANGES = tuple(KnobRange(f"GPU-{rank}", TOP, 300 * W, rank=rank) for rank in range(3))


def step(at: float, *computed: float, lasts: float = 1.0) -> SynchronousStep:
    start = round(at * SECOND)
    own = {rank: round(one * SECOND) for rank, one in enumerate(computed)}
    return SynchronousStep(start, start + round(lasts * SECOND), 1.0, own)


def waited(steps: int, *computed: float) -> RankWaits:
    waiting = RankWaits()
    for at in range(steps):
        waiting = waiting.add(step(at, *computed))
    return waiting


def seen(slower: float, power: float, n: int = 16, deviation: float = 0.002) -> LevelEstimate:
    return LevelEstimate((), Evidence(n, slower, deviation), Evidence(n, power, deviation))


def state(**more: object) -> TunerState:
    """One cap for all is certified, and the last rank waits for a tenth of every step."""
    policy = TunerPolicy(slack=True, settle_time=2 * SECOND)
    known = Estimates(
        levels=MappingProxyType({BASE: seen(0.03, -0.1), 500 * W: seen(0.1, -0.3, 3)})
    )
    usual: dict[str, object] = {
        "phase": TunerPhase.HOLD,
        "candidate": BASE,
        "certified": BASE,
        "estimates": known,
        "slack": RankSlack(waited(STEPS, 0.9, 0.9, 0.8), BASE),
    }
    fresh = begin(policy, RANGES, now=0)
    stretches = (fresh.samples.periods[0]._replace(level=BASE),)
    samples = fresh.samples._replace(periods=stretches)
    return with_fields(fresh, samples=samples, **(usual | more))


def lowered() -> tuple[TunerState, int]:
    """The state with less for the last rank, held, of which nothing has been seen yet."""
    proposed = lower_waiting_ranks(state())
    level = proposed.evidence.slack.lowered
    assert level is not None
    stretches = (proposed.samples.periods[0]._replace(level=level),)
    tape = proposed.samples._replace(periods=stretches)
    return with_fields(proposed, candidate=level, certified=level, samples=tape), level


# ----------------------------------------------------------------------------------- the ladder


def test_per_device_level_stores_only_differences() -> None:
    ladder, level = LevelLadder.over(RANGES).with_lowered(BASE, {"GPU-0": BASE, "GPU-1": 550 * W})
    assert BASE - W < level < BASE
    assert ladder.caps(level) == {"GPU-0": BASE, "GPU-1": 550 * W}
    assert ladder.caps(BASE) == dict.fromkeys(("GPU-0", "GPU-1", "GPU-2"), BASE)
    assert (ladder.base(level), ladder.base(BASE)) == (BASE, BASE)
    assert ladder.is_in_force(level, ladder.caps(level))
    assert not ladder.is_in_force(level, ladder.caps(BASE))
    assert ladder.plain() == LevelLadder.over(RANGES)


def test_per_device_levels_are_distinct_within_capacity() -> None:
    ladder = LevelLadder.over([KnobRange("GPU-0", 1980, 1000, step=15)])
    levels = set()
    for _ in range(14):
        ladder, level = ladder.with_lowered(1500, {"GPU-0": 1400})
        levels.add(level)
    assert len(levels) == 14
    assert min(levels) > 1500 - 15
    with pytest.raises(LookupError, match="no room below 1500"):
        ladder.with_lowered(1500, {"GPU-0": 1400})


# ---------------------------------------------------------------------------------- watching


def test_waits_are_observed_during_a_hold() -> None:
    before = state(slack=RankSlack())
    after = observe_steps(before, [step(1, 0.9, 0.8), step(2, 0.9, 0.8), step(3, 0.9, 0.8)])
    assert after.evidence.slack.level == BASE
    assert after.evidence.slack.waiting.steps == 2  # the first began before it had settled
    assert observe_steps(after, [step(4, 0.9, 0.8)]).evidence.slack.waiting.steps == 3


@pytest.mark.parametrize(
    "more",
    [
        {"policy": TunerPolicy(slack=False)},
        {"phase": TunerPhase.SCREEN},
        {"candidate": 500 * W},
    ],
    ids=["not wanted", "nothing held", "another setting in force"],
)
def test_waits_are_not_observed_otherwise(more: dict[str, object]) -> None:
    before = state(**more)
    assert observe_steps(before, [step(3, 0.9, 0.8)]) is before


def test_absent_steps_have_no_effect() -> None:
    before = state()
    assert observe_steps(before, []) is before


def test_waits_at_one_setting_do_not_apply_to_another() -> None:
    after = observe_steps(state(slack=RankSlack(waited(9, 0.9, 0.5), 500 * W)), [step(3, 0.9, 0.8)])
    assert (after.evidence.slack.level, after.evidence.slack.waiting.steps) == (BASE, 1)


def test_recent_waits_decide_with_lowered_ranks() -> None:
    before, level = lowered()
    long = [step(3 + at, 0.9, 0.9, 0.85) for at in range(SLACK_WINDOW)]
    after = observe_steps(before, long)
    assert (after.evidence.slack.level, after.evidence.slack.waiting.steps) == (level, SLACK_WINDOW)
    assert observe_steps(after, [step(200, 0.9, 0.9, 0.85)]).evidence.slack.waiting.steps == 1


# ---------------------------------------------------------------------------------- proposing


def test_only_waiting_ranks_are_lowered() -> None:
    proposed = lower_waiting_ranks(state())
    assert proposed.evidence.slack.lowered is not None
    caps = proposed.search.ladder.caps(proposed.evidence.slack.lowered)
    assert caps["GPU-0"] == caps["GPU-1"] == BASE
    assert BALANCING_DEPTH * BASE <= caps["GPU-2"] < BASE
    assert (proposed.evidence.slack.critical, proposed.evidence.slack.tries) == (0, 1)
    assert 0.03 < proposed.evidence.slack.remaining[2] < 0.1


def test_ranks_are_lowered_to_their_floor_at_most() -> None:
    narrow = (*RANGES[:2], replace(RANGES[2], floor=595 * W))
    proposed = lower_waiting_ranks(state(ladder=LevelLadder.over(narrow)))
    assert proposed.evidence.slack.lowered is not None
    assert proposed.search.ladder.caps(proposed.evidence.slack.lowered)["GPU-2"] == 595 * W


@pytest.mark.parametrize(
    "more",
    [
        {"certified": None},
        {"certified": 500 * W},
        {"slack": RankSlack(waited(STEPS - 1, 0.9, 0.9, 0.8), BASE)},
        {"slack": RankSlack(waited(STEPS, 0.9, 0.9, 0.88), BASE)},
        {"slack": RankSlack(waited(STEPS, 0.9, 0.9, 0.8), BASE, tries=BALANCING_TRIES)},
        {"refined_pairs": 14},
        {"failed_candidates": MAX_CANDIDATES},
        {"cusum": Cusum(inconclusive=True)},
    ],
    ids=[
        "nothing is certified",
        "another setting was watched",
        "too few steps",
        "hardly anybody waits",
        "tried often enough",
        "just certified",
        "too much has failed",
        "something is suspicious",
    ],
)
def test_ranks_without_slack_keep_one_cap(more: dict[str, object]) -> None:
    assert lower_waiting_ranks(state(**more)) is None


def test_lowered_setting_is_not_lowered_again() -> None:
    before, level = lowered()
    slack = RankSlack(waited(STEPS, 0.9, 0.9, 0.8), level)
    assert lower_waiting_ranks(with_fields(before, slack=slack)) is None


def test_adjacent_settings_keep_one_cap() -> None:
    ranges = [replace(one, step=1) for one in RANGES]
    assert lower_waiting_ranks(state(ladder=LevelLadder.over(ranges))) is None


# ------------------------------------------------------------------------------------ judging


def test_one_cap_for_all_is_compared_with_the_original_alone() -> None:
    assert step_time_certified(state(), BASE)
    assert saves_energy(state(), BASE)


@pytest.mark.parametrize(
    ("slower", "power", "step_kept", "saves"),
    [
        (0.031, -0.15, True, True),
        (0.045, -0.15, False, True),
        (0.031, -0.1015, True, False),
        (0.034, -0.09, True, False),
    ],
    ids=["less energy in the same time", "a longer step", "hardly any saving", "more energy"],
)
def test_less_for_some_must_keep_the_step_and_pay(
    slower: float, power: float, step_kept: bool, saves: bool
) -> None:
    before, level = lowered()
    levels = {**before.estimates.levels, level: seen(slower, power, 40)}
    levels[BASE] = seen(0.03, -0.1, 40)
    after = before._replace(estimates=replace(before.estimates, levels=MappingProxyType(levels)))
    assert step_time_certified(after, level) is step_kept
    assert saves_energy(after, level) is saves


def test_few_comparisons_give_no_proof() -> None:
    before, level = lowered()
    levels = {**before.estimates.levels, level: seen(0.03, -0.2, 2)}
    after = before._replace(estimates=replace(before.estimates, levels=MappingProxyType(levels)))
    assert not step_time_certified(after, level)


# ----------------------------------------------------------------------------------- giving back


@pytest.mark.parametrize(
    ("computed", "gives_back"),
    [((0.9, 0.9, 0.85), False), ((0.9, 0.9, 0.89), True), ((0.9, 0.9), True)],
    ids=["as expected", "hardly waits", "is gone"],
)
def test_changed_waits_release_lowered_ranks(computed: tuple[float, ...], gives_back: bool) -> None:
    before, _ = lowered()
    after = observe_steps(before, [step(3 + at, *computed) for at in range(SLACK_WINDOW)])
    assert slack_outdated(after) is gives_back


def test_few_steps_release_nothing() -> None:
    before, _ = lowered()
    after = observe_steps(before, [step(3 + at, 0.9, 0.9, 0.9) for at in range(SLACK_WINDOW - 1)])
    assert not slack_outdated(after)
    assert not slack_outdated(before)


def test_common_cap_is_not_released_for_waits() -> None:
    assert not slack_outdated(state())


# -------------------------------------------------------------------------------- in the search


def changed(*, stage: TunerPhase) -> tuple[TunerState, int]:
    """Less for the last rank is in force, which waits no more."""
    before, level = lowered()
    before = with_fields(before, phase=stage, plan=ProbePlan(level, 24))
    return observe_steps(before, [step(3 + at, 0.9, 0.9, 0.9) for at in range(SLACK_WINDOW)]), level


@pytest.mark.parametrize("stage", [TunerPhase.HOLD, TunerPhase.PROVE])
def test_changed_waits_release_all_then_one_cap(stage: TunerPhase) -> None:
    before, level = changed(stage=stage)
    seen = Observation(now=200 * SECOND, in_force=before.search.ladder.caps(level))
    after = decide(before, seen)
    assert (after.decision.move, after.decision.reason) == (Move.RELEASE, DecisionReason.CHANGED)
    assert not after.decision.caps
    assert after.search.plan.level == TOP
    assert (after.search.phase, after.search.candidate, after.search.certified) == (
        TunerPhase.HOLD,
        BASE,
        BASE,
    )


def test_original_stays_during_its_comparison() -> None:
    before, _ = changed(stage=TunerPhase.HOLD)
    before = with_fields(before, plan=ProbePlan(TOP, 2))
    after = decide(before, Observation(now=200 * SECOND))
    assert (after.search.plan.level, after.search.candidate) == (TOP, BASE)
    assert not after.decision.caps


def test_waiting_rank_is_lowered_after_a_common_hold() -> None:
    before = state(plan=ProbePlan(BASE, 48), refinements=3)
    after = decide(before, Observation(now=200 * SECOND, in_force=before.search.ladder.caps(BASE)))
    assert (after.search.phase, after.decision.reason) == (
        TunerPhase.PROVE,
        DecisionReason.CERTIFYING,
    )
    assert after.search.candidate == after.evidence.slack.lowered
    assert after.search.certified == BASE


def test_next_run_starts_with_the_common_cap() -> None:
    before, level = lowered()
    certified = certified_levels(before)
    assert (certified.level, certified.levels) == (BASE, before.search.ladder.caps(level))
    assert relearn(with_fields(before, resume_level=level)).search.resume_level == BASE


def test_lowered_ranks_are_reported_with_both_settings() -> None:
    before, level = lowered()
    least = before.search.ladder.caps(level)["GPU-2"] / W
    assert setting_text(before, level) == f"600 W, {least:.0f} W where ranks wait"
