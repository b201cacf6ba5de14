"""The terms of a recurring job, its runs, and the worth of a search."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from wattspan.recurring.jobs import (
    BatchSizeChoice,
    BatchSizeTrial,
    JobRuns,
    NamedTerms,
    Prospect,
    RecurringJobTerms,
    SearchPhase,
    SearchPolicy,
    SearchVerdict,
    TrainingRun,
    TrialOutcome,
    job_facts,
    mean_energies,
    next_run,
    prospect,
    trials_of,
    verdict_sentence,
)

POLICY = SearchPolicy((16, 32, 64), default=32, rounds=1)
TERMS = RecurringJobTerms("nightly", POLICY, 0.8, True, max_epochs=10)


def run(
    size: int, energy: float, outcome: TrialOutcome | None = TrialOutcome.CONVERGED
) -> TrainingRun:
    """A run whose cost is its energy: its devices draw the highest power all the time."""
    return TrainingRun(size, outcome, energy, energy / 100, 100.0, 3)


def test_cost_weighs_energy_and_time() -> None:
    terms = replace(TERMS, eta=0.75)
    assert terms.cost(energy=400.0, seconds=10.0, power=200.0) == 300 + 500
    assert replace(TERMS, eta=1.0).cost(400.0, 10.0, 200.0) == 400


@pytest.mark.parametrize(
    ("higher", "metric", "reached"),
    [(True, 0.8, True), (True, 0.79, False), (False, 0.8, True), (False, 0.81, False)],
)
def test_target_is_reached_in_its_direction(higher: bool, metric: float, reached: bool) -> None:
    assert replace(TERMS, higher_is_better=higher).reaches(metric) is reached


@pytest.mark.parametrize("higher", [True, False])
def test_nan_does_not_reach_the_target(higher: bool) -> None:
    assert not replace(TERMS, higher_is_better=higher).reaches(float("nan"))


def test_difference_of_terms_names_each_one() -> None:
    other = replace(TERMS, eta=0.7, policy=replace(POLICY, default=64))
    assert TERMS.difference(other) == "eta 0.5, not 0.7; default 32, not 64"
    assert TERMS.difference(replace(TERMS)) == ""


@pytest.mark.parametrize(
    ("terms", "text"),
    [
        ({"name": ""}, "needs a name"),
        ({"target_metric": float("nan")}, "target_metric nan"),
        ({"target_metric": float("inf")}, "target_metric inf"),
        ({"max_epochs": 0}, "max_epochs 0"),
        ({"eta": 1.01}, "eta_knob 1.01"),
        ({"eta": float("nan")}, "eta_knob nan"),
    ],
)
def test_invalid_terms_are_refused(terms: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        replace(TERMS, **terms)


@pytest.mark.parametrize(
    ("terms", "text"),
    [
        ({"batch_sizes": (32, 2**31)}, "batch_sizes is above"),
        ({"batch_sizes": range(1, 258)}, "the number of batch_sizes is above 256"),
        ({"max_epochs": 2**31}, "max_epochs is above"),
        ({"num_pruning_rounds": 2**31}, "num_pruning_rounds is above"),
        ({"num_pruning_rounds": 251}, "batch_sizes times num_pruning_rounds is above 500"),
        ({"window_size": 10**400}, "window_size is above"),
        ({"seed": -(2**31)}, "seed is above"),
        ({"target_metric": -1e16}, "target_metric is above"),
        ({"beta_knob": float("inf")}, "beta_knob is above"),
    ],
)
def test_terms_out_of_range_are_refused(terms: dict, text: str) -> None:
    usual = {"batch_sizes": (16, 32), "default_batch_size": 32, "target_metric": 0.8}
    usual |= {"higher_is_better_metric": True, "max_epochs": 10}
    with pytest.raises(ValueError, match=text):
        NamedTerms(**{**usual, **terms}).terms("nightly")  # type: ignore[arg-type]


def test_ended_runs_are_trials() -> None:
    runs = [run(32, 50.0), run(16, 9.0, None), run(16, 70.0, TrialOutcome.STOPPED)]
    assert trials_of(TERMS, runs) == [
        BatchSizeTrial(32, TrialOutcome.CONVERGED, 50.0),
        BatchSizeTrial(16, TrialOutcome.STOPPED, 70.0),
    ]


def test_run_without_a_cost_stops_no_other_and_is_no_reference() -> None:
    free = run(32, 0.0)
    assert next_run(TERMS, [free], Random(0)) == BatchSizeChoice(32, SearchPhase.PRUNING, None)
    found = prospect(TERMS, [free, run(32, 50.0), free])
    assert (found.verdict, found.best, found.spent) == (SearchVerdict.NOT_WORTH, 32, 0.0)


def test_next_run_does_not_repeat_a_running_trial_unless_many_runs_outlived_it() -> None:
    runs = [run(32, 50.0), run(16, 9.0, None), run(32, 50.0), run(32, 50.0)]
    assert next_run(TERMS, runs, Random(0)).phase is SearchPhase.CONCURRENT
    choice = next_run(TERMS, [*runs, run(32, 50.0)], Random(0))
    assert (choice.batch_size, choice.phase) == (16, SearchPhase.PRUNING)


def test_prospect_without_a_result_is_unknown() -> None:
    assert prospect(TERMS, []) == Prospect(SearchVerdict.UNKNOWN)
    missed = [run(32, 50.0, TrialOutcome.MISSED)]
    assert prospect(TERMS, missed).verdict is SearchVerdict.UNKNOWN


def test_prospect_of_a_default_that_misses_names_the_best() -> None:
    found = prospect(TERMS, [run(32, 50.0, TrialOutcome.MISSED), run(16, 40.0)])
    assert (found.verdict, found.best) == (SearchVerdict.DEFAULT_MISSES, 16)


def test_prospect_counts_the_runs_until_the_search_has_paid() -> None:
    runs = [run(32, 100.0), run(16, 170.0), run(64, 60.0)]
    found = prospect(TERMS, runs)
    assert (found.verdict, found.best, found.break_even) == (SearchVerdict.PAYS, 64, 1)
    assert (found.spent, found.saving) == (pytest.approx(30.0), pytest.approx(0.4))
    assert found.complete
    later = prospect(TERMS, [*runs, run(64, 60.0)])
    assert (later.verdict, later.break_even) == (SearchVerdict.PAID, 0)


def test_small_or_doubtful_saving_is_not_worth_a_search() -> None:
    runs = [run(32, 100.0), run(16, 170.0), run(64, 90.0)]
    found = prospect(TERMS, runs)
    assert (found.verdict, found.break_even) == (SearchVerdict.NOT_WORTH, None)
    assert found.spent == pytest.approx(60.0)


def test_default_that_is_best_is_not_worth_a_search() -> None:
    runs = [run(32, 100.0), run(16, 120.0), run(64, 110.0)]
    assert prospect(TERMS, runs).verdict is SearchVerdict.NOT_WORTH


def test_prospect_is_incomplete_before_all_sizes_are_tried() -> None:
    assert not prospect(TERMS, [run(32, 100.0)]).complete


def test_mean_energy_is_that_of_runs_with_the_target_in_the_window() -> None:
    windowed = replace(TERMS, policy=replace(POLICY, window=2))
    runs = [run(32, 90.0), run(32, 50.0), run(32, 5.0, TrialOutcome.STOPPED), run(32, 70.0)]
    assert mean_energies(TERMS, runs) == {32: 70.0}
    assert mean_energies(windowed, runs) == {32: 60.0}


def test_facts_have_the_terms_and_the_runs_of_each_size() -> None:
    open_run = replace(run(64, 0.0, None), key=7)
    runs = run(32, 100.0), run(64, 60.0), run(16, 9.0, TrialOutcome.LOST), open_run
    facts = job_facts(JobRuns(TERMS, "1 GPU", runs))
    assert [facts[one] for one in ("runs", "running", "newest_run", "phase")] == [
        4,
        1,
        7,
        "pruning",
    ]
    kinds = "batch_size", "runs", "reached", "running", "lost"
    assert [tuple(map(one.get, kinds)) for one in facts["sizes"]] == [
        (16, 1, 0, 0, 1), (32, 1, 1, 0, 0), (64, 1, 1, 1, 0),
    ]  # fmt: skip
    assert NamedTerms(**facts["terms"]).terms("nightly") == TERMS


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (Prospect(SearchVerdict.UNKNOWN), "No run has reached the target metric yet."),
        (
            Prospect(SearchVerdict.DEFAULT_MISSES, 16),
            "The default batch size 32 has not reached the target metric; the best known size is 16"
            "; the trials of some sizes are not finished yet.",
        ),
        (
            Prospect(SearchVerdict.NOT_WORTH, 32, complete=True),
            "No size is clearly cheaper than the default 32: a search is not worth its cost.",
        ),
        (
            Prospect(SearchVerdict.PAYS, 64, 5.0, 0.2, 1, complete=True),
            "Batch size 64 costs 20% less than the default 32; the search pays for itself after"
            " about 1 more run.",
        ),
        (
            Prospect(SearchVerdict.PAID, 64, -5.0, 0.2, 0, complete=True),
            "Batch size 64 costs 20% less than the default 32; the search has paid for itself.",
        ),
    ],
)
def test_verdict_is_a_sentence(found: Prospect, sentence: str) -> None:
    assert verdict_sentence(TERMS, found) == sentence
