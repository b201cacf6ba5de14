"""The next batch size of a recurring job, from its trials so far."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattspan.recurring.jobs import (
    LEAST_VARIATION,
    BatchSizeTrial,
    SearchPhase,
    SearchPolicy,
    TrialOutcome,
    choose,
    mean_costs,
    stop_cost,
    variation,
)

SIZES = (8, 16, 32, 64, 128)
POLICY = SearchPolicy(SIZES, default=32)
ONCE = SearchPolicy(SIZES, default=32, rounds=1)


def reached(size: int, cost: float) -> BatchSizeTrial:
    return BatchSizeTrial(size, TrialOutcome.CONVERGED, cost)


def tried(
    policy: SearchPolicy, costs: Mapping[int, float | TrialOutcome], runs: int
) -> list[BatchSizeTrial]:
    """The trials of runs with constant costs; an outcome costs 10 J."""
    trials: list[BatchSizeTrial] = []
    for number in range(runs):
        size = choose(policy, trials, Random(number)).batch_size
        cost = costs[size]
        trials.append(
            BatchSizeTrial(size, cost, 10.0)
            if isinstance(cost, TrialOutcome)
            else reached(size, cost)
        )
    return trials


def test_pruning_goes_outward_from_the_default() -> None:
    costs = dict.fromkeys(SIZES, 5.0)
    assert [one.batch_size for one in tried(ONCE, costs, 5)] == [32, 16, 8, 64, 128]


def test_direction_ends_at_the_first_size_that_misses_the_target() -> None:
    costs = {8: 5.0, 16: TrialOutcome.MISSED, 32: 5.0, 64: TrialOutcome.STOPPED, 128: 5.0}
    assert [one.batch_size for one in tried(ONCE, costs, 4)] == [32, 16, 64, 32]


def test_next_round_starts_from_the_cheapest_size() -> None:
    costs = {8: 9.0, 16: TrialOutcome.MISSED, 32: 5.0, 64: 4.0, 128: 4.5}
    assert [one.batch_size for one in tried(POLICY, costs, 7)] == [32, 16, 64, 128, 64, 32, 128]


def test_far_worse_size_is_not_tried_again() -> None:
    costs = {8: 9.0, 16: TrialOutcome.MISSED, 32: 5.9, 64: 2.0, 128: 4.5}
    assert [one.batch_size for one in tried(POLICY, costs, 6)] == [32, 16, 64, 128, 64, 64]


def test_default_that_misses_the_target_does_not_end_the_search() -> None:
    costs = {8: 5.0, 16: 4.0, 32: TrialOutcome.MISSED, 64: 6.0, 128: 7.0}
    trials = tried(ONCE, costs, 6)
    assert [one.batch_size for one in trials[:5]] == [32, 16, 8, 64, 128]
    assert trials[5].batch_size in {8, 16, 64, 128}


def test_lost_trial_is_repeated() -> None:
    trials = [reached(32, 5.0), BatchSizeTrial(16, TrialOutcome.LOST, 3.0)]
    assert choose(POLICY, trials, Random(0)).batch_size == 16


def test_concurrent_run_uses_the_best_known_size() -> None:
    first = choose(POLICY, (), Random(0), running=[32])
    assert (first.batch_size, first.phase) == (32, SearchPhase.CONCURRENT)
    trials = [reached(32, 5.0), reached(16, 4.0)]
    second = choose(POLICY, trials, Random(0), running=[8])
    assert (second.batch_size, second.phase) == (16, SearchPhase.CONCURRENT)


def test_trial_of_a_concurrent_run_is_not_counted_as_the_wanted_one() -> None:
    trials = [reached(32, 5.0), reached(32, 5.1)]
    choice = choose(POLICY, trials, Random(0))
    assert (choice.batch_size, choice.phase) == (16, SearchPhase.PRUNING)


def test_job_that_never_reaches_its_target_keeps_the_default() -> None:
    trials = tried(POLICY, dict.fromkeys(SIZES, TrialOutcome.MISSED), 4)
    choice = choose(POLICY, trials, Random(0))
    assert (choice.batch_size, choice.phase, choice.stop_cost) == (32, SearchPhase.FALLBACK, None)


def test_run_is_stopped_above_beta_times_the_lowest_cost() -> None:
    assert stop_cost(POLICY, [BatchSizeTrial(32, TrialOutcome.MISSED, 1.0)]) is None
    assert stop_cost(POLICY, [reached(32, 5.0), reached(16, 4.0)]) == 8.0


def test_sampling_settles_on_the_cheapest_size() -> None:
    costs = {8: 9.0, 16: 6.0, 32: 5.0, 64: 4.0, 128: 8.0}
    last = [one.batch_size for one in tried(POLICY, costs, 80)[-20:]]
    assert last.count(64) >= 18


def test_equal_costs_are_no_certainty() -> None:
    trials = [reached(size, 5.0) for size in SIZES for _ in range(50)]
    assert variation(POLICY, trials) == LEAST_VARIATION
    costs = {8: 5.0, 16: 5.0, 32: 5.0, 64: 5.0, 128: 5.0}
    assert len({one.batch_size for one in tried(POLICY, costs, 60)[10:]}) > 1


def test_stopped_run_makes_a_size_dearer_than_its_stop() -> None:
    policy = SearchPolicy((16, 32), default=32, rounds=1)
    trials = [reached(32, 5.0), reached(16, 4.9)]
    trials += [BatchSizeTrial(16, TrialOutcome.STOPPED, 9.8)] * 3
    chosen = [choose(policy, trials, Random(seed)).batch_size for seed in range(50)]
    assert chosen.count(32) == 50


def test_window_forgets_older_trials_of_a_size() -> None:
    policy = SearchPolicy(SIZES, default=32, rounds=1, window=2)
    trials = [reached(32, 9.0), reached(32, 4.0), reached(32, 2.0)]
    assert mean_costs(policy, trials) == {32: 3.0}


@pytest.mark.parametrize(
    ("terms", "text"),
    [
        ({"batch_sizes": ()}, "at least one size"),
        ({"batch_sizes": (0, 32)}, "each of 1 or more"),
        ({"batch_sizes": (32, 16)}, "ascending order"),
        ({"batch_sizes": (32, 32)}, "ascending order"),
        ({"default": 7}, "default_batch_size 7"),
        ({"beta": 1.0}, "beta_knob 1.0"),
        ({"beta": float("nan")}, "beta_knob nan"),
        ({"rounds": -1}, "must not be negative"),
        ({"window": -1}, "must not be negative"),
    ],
)
def test_invalid_policy_is_refused(terms: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SearchPolicy(**{"batch_sizes": SIZES, "default": 32, **terms})


TRIALS = st.lists(
    st.builds(
        BatchSizeTrial,
        st.sampled_from(SIZES),
        st.sampled_from(TrialOutcome),
        st.floats(1e-3, 1e12),
    ),
    max_size=40,
)


@given(TRIALS, st.integers(0, 3), st.integers(0, 3), st.integers(0, 10))
def test_any_trials_lead_to_a_known_size(
    trials: list[BatchSizeTrial], rounds: int, window: int, seed: int
) -> None:
    policy = SearchPolicy(SIZES, default=32, rounds=rounds, window=window)
    choice = choose(policy, trials, Random(seed))
    assert choice.batch_size in SIZES
    assert choice == choose(policy, trials, Random(seed))
    assert choice.stop_cost is None or choice.stop_cost > 0


def test_size_whose_window_has_only_lost_runs_is_tried_again() -> None:
    policy = SearchPolicy((16, 32), default=32, rounds=1, window=1)
    trials = [reached(32, 5.0), reached(16, 4.0), BatchSizeTrial(32, TrialOutcome.LOST, 1.0)]
    assert choose(policy, trials, Random(0)).batch_size == 32


def test_costs_of_zero_are_permitted() -> None:
    policy = SearchPolicy((16, 32), default=32, rounds=1)
    trials = [reached(32, 0.0), reached(16, 0.0), BatchSizeTrial(16, TrialOutcome.STOPPED, 0.0)]
    assert choose(policy, trials, Random(0)).batch_size in (16, 32)
