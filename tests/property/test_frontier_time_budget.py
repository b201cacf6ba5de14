"""Invariants of a study with a time budget, for any curve, failures and budget."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from testbed.studies import power_settings, study, trial

from wattspan.frontier.schedule import TrialSchedule
from wattspan.frontier.statistics import LogPoint, expected_gain
from wattspan.frontier.trials import Setting, Study, Trial

LEVELS = power_settings(100, 90, 80, 70, 60)
FOREVER = 1e9

figures = st.floats(0.5, 3.0)
curves = st.lists(st.tuples(figures, figures), min_size=len(LEVELS), max_size=len(LEVELS))
seeds = st.integers(0, 1000)
logs = st.floats(-3.0, 3.0)
errors = st.floats(0.0, 2.0)


def carried_out(
    schedule: TrialSchedule,
    begun: Study,
    curve: list[tuple[float, float]],
    seed: int,
    failing: frozenset[int] = frozenset(),
    noise: float = 0.02,
) -> Study:
    """The study to its end; checks each choice."""
    rng, now = random.Random(seed), begun
    while (planned := schedule.next(now)) is not None:
        assert planned == schedule.next(now)
        assert schedule.remaining(now) > 0
        number = LEVELS.index(planned.setting)
        failed = {one.setting for one in now.trials[schedule.resumed :] if one.failure}
        if number:
            assert planned.setting not in failed
            assert planned.setting not in {setting for setting, _ in now.pruned}
            assert (LEVELS[0], planned.block) in {(one.setting, one.block) for one in now.trials}
        assert 0 <= planned.block < now.repeat
        seconds, joules = curve[number]
        done = trial(
            planned.setting,
            planned.block,
            seconds * (1 + rng.uniform(-noise, noise)),
            joules * (1 + rng.uniform(-noise, noise)),
        )
        if number in failing:
            done = Trial(
                setting=planned.setting, block=planned.block, started_unix=0.0, failure="exit 1"
            )
        done = msgspec.structs.replace(done, elapsed_seconds=rng.uniform(15.0, 90.0))
        now = msgspec.structs.replace(now, trials=[*now.trials, done])
        now = msgspec.structs.replace(now, pruned=[*now.pruned, *schedule.pruned(now)])
    assert schedule.remaining(now) == 0
    return now


def counts(done: Study) -> Counter[tuple[Setting, int]]:
    return Counter((one.setting, one.block) for one in done.trials)


@settings(max_examples=12)
@given(curves, seeds, st.floats(0.0, 1500.0), st.frozensets(st.integers(0, 4), max_size=2))
def test_budget_is_exceeded_by_less_than_one_trial(
    curve: list[tuple[float, float]], seed: int, budget: float, failing: frozenset[int]
) -> None:
    schedule = TrialSchedule(seed=seed, time_budget=budget)
    done = carried_out(schedule, study(LEVELS), curve, seed, failing)
    assert sum(one.elapsed_seconds for one in done.trials[:-1]) <= budget


@settings(max_examples=8)
@given(curves, seeds)
def test_unlimited_budget_measures_every_setting_as_often_as_none(
    curve: list[tuple[float, float]], seed: int
) -> None:
    """The trials of settings that are not pruned are those of the random order."""
    never = TrialSchedule(seed=seed, longest=1e6, time_budget=FOREVER)
    done = carried_out(never, study(LEVELS), curve, seed)
    out = {setting for setting, _ in done.pruned}
    kept = {pair: 1 for pair in ((one, block) for one in LEVELS for block in range(3))
            if pair[0] not in out}  # fmt: skip
    found = counts(done)
    assert {pair: found[pair] for pair in kept} == kept
    assert max(found.values()) == 1


@settings(max_examples=8)
@given(curves, seeds, st.integers(1, 14))
def test_resumed_study_measures_every_kept_setting_once_a_block(
    curve: list[tuple[float, float]], seed: int, cut: int
) -> None:
    schedule = TrialSchedule(seed=seed, time_budget=FOREVER)
    whole = carried_out(schedule, study(LEVELS), curve, seed, noise=0.0)
    begun = msgspec.structs.replace(study(LEVELS), trials=whole.trials[:cut])
    begun = msgspec.structs.replace(begun, pruned=schedule.pruned(begun))
    resumed = TrialSchedule(seed=seed, time_budget=FOREVER, resumed=cut)
    done = carried_out(resumed, begun, curve, seed, noise=0.0)
    out = {setting for setting, _ in done.pruned}
    kept = [(one, block) for one in LEVELS if one not in out for block in range(3)]
    found = counts(done)
    assert [found[pair] for pair in kept] == [1] * len(kept)
    assert max(found.values()) == 1
    assert done.trials[: len(begun.trials)] == begun.trials


@given(
    st.lists(st.tuples(logs, logs), max_size=6), st.tuples(logs, logs), errors, errors,
    st.tuples(logs, logs),
)  # fmt: skip
def test_uncertainty_never_lowers_the_expected_gain(
    others: list[tuple[float, float]],
    mean: tuple[float, float],
    time_error: float,
    energy_error: float,
    reference: tuple[float, float],
) -> None:
    points = [LogPoint(*one) for one in others]
    bound = LogPoint(*reference)
    certain = expected_gain(LogPoint(*mean), points, bound)
    gain = expected_gain(LogPoint(*mean), points, bound, LogPoint(time_error, energy_error))
    assert gain >= certain - 1e-9
