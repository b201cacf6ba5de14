"""A recurring job: its terms, its runs, and the comparison of the default size with the best. Pure.

Runs on other GPUs have a history of their own, because their costs are others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from random import Random
from statistics import fmean
from typing import Annotated, Any

import msgspec

from wattspan.recurring.search import (
    BatchSizeChoice,
    BatchSizeTrial,
    SearchPolicy,
    TrialOutcome,
    choose,
    is_pruning,
    mean_costs,
    variation,
)

LEAST_SAVING = 0.02
"""The least relative saving of a run for which a search is worth its cost."""

MAX_RUNS = 1000
"""The last runs of a job on some GPUs, which decide about the next one."""

MAX_PRUNING_RUNS = MAX_RUNS // 2
"""Runs of the pruning phase at most, so that ``MAX_RUNS`` hold all of them."""

MAX_SIZES = 256
MAX_WHOLE = 2**31 - 1
"""Batch sizes, epochs, rounds, windows and the seed (from minus that) are at most this."""

MAX_FIGURE = 1e15
"""Joules, seconds, watts, the target metric and factors are at most this."""


@dataclass(frozen=True, slots=True)
class RecurringJobTerms:
    """The terms of a job; equal terms and GPUs share the runs of its name.

    ``eta`` is the weight of energy in the cost, 1 - ``eta`` that of time.
    """

    name: str
    policy: SearchPolicy
    target_metric: float
    higher_is_better: bool
    max_epochs: int
    eta: float = 0.5

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("job needs a name")
        if not math.isfinite(self.target_metric):
            raise ValueError(f"target_metric {self.target_metric} is not a finite number")
        if self.max_epochs < 1:
            raise ValueError(f"max_epochs {self.max_epochs} must be 1 or more")
        if not 0 <= self.eta <= 1:
            raise ValueError(f"eta_knob {self.eta} is not between 0 and 1")

    def reaches(self, metric: float) -> bool:
        """True if ``metric`` meets the target; NaN does not."""
        if self.higher_is_better:
            return metric >= self.target_metric
        return metric <= self.target_metric

    def cost(self, energy: float, seconds: float, power: float) -> float:
        """The cost in joules of a run; ``power`` is the highest power of its devices in watts."""
        return self.eta * energy + (1 - self.eta) * power * seconds

    def difference(self, other: RecurringJobTerms) -> str:
        """A text of the terms in which ``other`` differs: ``"eta 0.5, not 0.7"``; "" if equal."""
        mine, theirs = _flat(self), _flat(other)
        return "; ".join(
            f"{name} {mine[name]}, not {theirs[name]}"
            for name in mine
            if mine[name] != theirs[name]
        )


class NamedTerms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The terms of a job by the names of Zeus, as users give them."""

    batch_sizes: Annotated[list[int], msgspec.Meta(min_length=1, max_length=MAX_SIZES)]
    default_batch_size: int
    target_metric: float
    higher_is_better_metric: bool
    max_epochs: int
    eta_knob: float = 0.5
    beta_knob: float = 2.0
    num_pruning_rounds: int = 2
    window_size: int = 0
    seed: int = 0

    def terms(self, job: str) -> RecurringJobTerms:
        """The terms of ``job``. ValueError for terms that make no sense."""
        sizes, rounds = tuple(sorted(set(self.batch_sizes))), self.num_pruning_rounds
        for name, value, most in (
            ("batch_sizes", max(sizes, default=0), MAX_WHOLE),
            ("max_epochs", self.max_epochs, MAX_WHOLE),
            ("num_pruning_rounds", rounds, MAX_WHOLE),
            ("window_size", self.window_size, MAX_WHOLE),
            ("seed", abs(self.seed), MAX_WHOLE),
            ("target_metric", abs(self.target_metric), MAX_FIGURE),
            ("beta_knob", abs(self.beta_knob), MAX_FIGURE),
            ("the number of batch_sizes", len(sizes), MAX_SIZES),
            ("batch_sizes times num_pruning_rounds", len(sizes) * rounds, MAX_PRUNING_RUNS),
        ):
            if value > most:
                raise ValueError(f"{name} is above {most:g}")
        search = self.default_batch_size, self.beta_knob, rounds, self.window_size, self.seed
        target = self.target_metric, self.higher_is_better_metric
        policy = SearchPolicy(sizes, *search)
        return RecurringJobTerms(job, policy, *target, self.max_epochs, self.eta_knob)


def _flat(terms: RecurringJobTerms) -> dict[str, object]:
    own = {one.name: getattr(terms, one.name) for one in fields(terms) if one.name != "policy"}
    return own | {one.name: getattr(terms.policy, one.name) for one in fields(terms.policy)}


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """One run of a job; ``outcome`` is None until it has ended.

    ``energy`` is that of the GPUs in joules, ``seconds`` the time, up to its end. ``power`` is the
    highest power of the GPUs in watts.
    """

    batch_size: int
    outcome: TrialOutcome | None = None
    energy: float = 0.0
    seconds: float = 0.0
    power: float = 0.0
    epochs: int = 0
    key: int = 0  # in the file of runs


@dataclass(frozen=True, slots=True)
class JobRuns:
    """A job on some GPUs with all its runs, oldest first."""

    terms: RecurringJobTerms
    gpus: str
    runs: tuple[TrainingRun, ...]


def trials_of(terms: RecurringJobTerms, runs: Sequence[TrainingRun]) -> list[BatchSizeTrial]:
    """The ended runs as trials."""
    return [
        BatchSizeTrial(one.batch_size, one.outcome, terms.cost(one.energy, one.seconds, one.power))
        for one in runs
        if one.outcome is not None
    ]


def next_run(terms: RecurringJobTerms, runs: Sequence[TrainingRun], rng: Random) -> BatchSizeChoice:
    """The batch size of the next run, beside those that have not ended."""
    running = [one.batch_size for one in runs if one.outcome is None]
    return choose(terms.policy, trials_of(terms, runs), rng, running)


class SearchVerdict(StrEnum):
    """The worth of a search for the batch size."""

    UNKNOWN = "unknown"  # no run has reached the target metric
    DEFAULT_MISSES = "default_misses"  # the default size has not reached it, another has
    NOT_WORTH = "not_worth"  # no size is clearly cheaper than the default
    PAYS = "pays"  # after ``break_even`` further runs
    PAID = "paid"  # all runs together cost less than with the default size


@dataclass(frozen=True, slots=True)
class Prospect:
    """The default batch size compared with the best known one.

    ``spent`` is the cost of the runs so far above that of as many runs with the default size, in
    joules; negative if they cost less. ``saving`` is the saved part of the cost of each further
    run, and ``break_even`` the number of further runs after which the search has paid for itself.
    ``complete`` is true once every size was tried or pruned.
    """

    verdict: SearchVerdict
    best: int | None = None
    spent: float = 0.0
    saving: float = 0.0
    break_even: int | None = None
    complete: bool = False


def prospect(terms: RecurringJobTerms, runs: Sequence[TrainingRun]) -> Prospect:
    """Compare the default size with the best known one."""
    policy, trials = terms.policy, trials_of(terms, runs)
    means = mean_costs(policy, trials)
    complete = not is_pruning(policy, trials)
    if not means:
        return Prospect(SearchVerdict.UNKNOWN, complete=complete)
    best = min(means, key=means.__getitem__)
    usual = means.get(policy.default)
    if usual is None:
        return Prospect(SearchVerdict.DEFAULT_MISSES, best, complete=complete)
    spent = sum(one.cost - usual for one in trials if one.outcome is not TrialOutcome.LOST)
    saving = 1 - means[best] / usual
    if saving < max(LEAST_SAVING, _doubt(policy, trials, best)):
        return Prospect(SearchVerdict.NOT_WORTH, best, spent, max(0.0, saving), None, complete)
    further = max(0, math.ceil(spent / (usual * saving)))
    verdict = SearchVerdict.PAYS if further else SearchVerdict.PAID
    return Prospect(verdict, best, spent, saving, further, complete)


def _doubt(policy: SearchPolicy, trials: Sequence[BatchSizeTrial], best: int) -> float:
    """Two standard errors of the relative difference of the best and the default size."""

    def count(size: int) -> int:
        return sum(
            one.batch_size == size and one.outcome is TrialOutcome.CONVERGED for one in trials
        )

    if best == policy.default:
        return math.inf
    error = math.sqrt(1 / max(1, count(best)) + 1 / max(1, count(policy.default)))
    return 2 * variation(policy, trials) * error


def mean_energies(terms: RecurringJobTerms, runs: Sequence[TrainingRun]) -> dict[int, float]:
    """The mean energy in joules of the runs of each size that reached the target."""
    by_size: dict[int, list[float]] = {}
    for one in runs:
        if one.outcome is TrialOutcome.CONVERGED:
            by_size.setdefault(one.batch_size, []).append(one.energy)
    return {size: fmean(own[-terms.policy.window :]) for size, own in by_size.items()}


# ------------------------------------------------------------------------------------------- facts


def job_facts(job: JobRuns) -> dict[str, Any]:
    """The terms of a job, its runs by batch size, and the worth of the search."""
    terms, runs = job.terms, job.runs
    policy, trials = terms.policy, trials_of(terms, runs)
    costs, found = mean_costs(policy, trials), prospect(terms, runs)
    energies = mean_energies(terms, runs)
    tried = Counter(one.batch_size for one in trials)
    lost = Counter(one.batch_size for one in trials if one.outcome is TrialOutcome.LOST)
    running = Counter(one.batch_size for one in runs if one.outcome is None)
    reached = Counter(one.batch_size for one in trials if one.outcome is TrialOutcome.CONVERGED)
    return {
        "job": terms.name,
        "gpus": job.gpus,
        "terms": terms_facts(terms),
        "phase": "pruning" if is_pruning(policy, trials) else "sampling",
        "runs": len(runs),
        "running": sum(one.outcome is None for one in runs),
        "newest_run": max((one.key for one in runs if one.outcome is None), default=None),
        "sizes": [
            {
                "batch_size": size,
                "runs": tried[size],
                "reached": reached[size],
                "running": running[size],
                "lost": lost[size],
                "cost_joules": costs.get(size),
                "energy_joules": energies.get(size),
            }
            for size in policy.batch_sizes
        ],
        "verdict": found.verdict,
        "best": found.best,
        "saving": found.saving,
        "spent_joules": found.spent,
        "break_even_runs": found.break_even,
        "sentence": verdict_sentence(terms, found),
    }


def terms_facts(terms: RecurringJobTerms) -> dict[str, Any]:
    """The terms with the names that ``BatchSizeOptimizer`` gives them."""
    policy = terms.policy
    search = policy.beta, policy.rounds, policy.window, policy.seed
    target = terms.target_metric, terms.higher_is_better, terms.max_epochs, terms.eta
    named = NamedTerms(list(policy.batch_sizes), policy.default, *target, *search)
    return msgspec.structs.asdict(named)


def verdict_sentence(terms: RecurringJobTerms, found: Prospect) -> str:
    """The worth of the search in one sentence."""
    if found.verdict is SearchVerdict.UNKNOWN:
        return "No run has reached the target metric yet."
    default, more = terms.policy.default, found.break_even
    saves = f"Batch size {found.best} costs {found.saving:.0%} less than the default {default}"
    sentences = {
        SearchVerdict.DEFAULT_MISSES: f"The default batch size {default} has not reached the target"
        f" metric; the best known size is {found.best}",
        SearchVerdict.NOT_WORTH: f"No size is clearly cheaper than the default {default}: a search"
        " is not worth its cost",
        SearchVerdict.PAYS: f"{saves}; the search pays for itself after about {more} more"
        f" run{'s' * (more != 1)}",
        SearchVerdict.PAID: f"{saves}; the search has paid for itself",
    }
    unfinished = "" if found.complete else "; the trials of some sizes are not finished yet"
    return f"{sentences[found.verdict]}{unfinished}."
