"""A recurring job: its terms, its runs, and the choice of its next batch size. Pure.

Runs on other GPUs have a history of their own, because their costs are others.

The cost of a run is ``eta * energy + (1 - eta) * power * time`` to the target metric, in joules,
where ``power`` is the highest power of its devices (You, Chung and Chowdhury, "Zeus", NSDI 2023).

Two phases: *pruning* tries the sizes outward from a centre, first the smaller ones, then the larger
ones; a direction ends at the first size whose run misses the target or costs too much. The next
round starts from the cheapest size, among the sizes that remain. *Sampling* (Gaussian Thompson
sampling) then draws the mean cost of each remaining size from its posterior and takes the lowest.

The state is the list of trials alone, so a lost or repeated report cannot make it inconsistent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from random import Random
from statistics import NormalDist, fmean
from typing import Annotated, Any

import msgspec

LEAST_VARIATION = 0.02
"""Lower bound of the coefficient of variation of costs: equal costs are no proof of certainty."""

PRIOR_VARIATION, PRIOR_WEIGHT = 0.1, 2.0
"""The coefficient of variation that is assumed before costs repeat, and its weight in costs."""

FAR_WORSE = 1.5
"""A size whose cost is this many times the lowest one is not tried in the next round."""

_NORMAL = NormalDist()


class TrialOutcome(StrEnum):
    """The end of a trial."""

    CONVERGED = "converged"
    STOPPED = "stopped"  # its cost exceeded the limit: its true cost is higher
    MISSED = "missed"  # the target was not reached in the permitted epochs
    LOST = "lost"  # the process ended without a report


@dataclass(frozen=True, slots=True)
class BatchSizeTrial:
    """One run that has ended; ``cost`` is in joules, up to the end of the run."""

    batch_size: int
    outcome: TrialOutcome
    cost: float


@dataclass(frozen=True, slots=True)
class SearchPolicy:
    """The terms of a search; ``batch_sizes`` are in ascending order.

    A run is stopped when its cost exceeds ``beta`` times the lowest cost so far. ``window`` is the
    number of last trials of a size that count, 0 for all. ``seed`` makes the choices reproducible.
    """

    batch_sizes: tuple[int, ...]
    default: int
    beta: float = 2.0
    rounds: int = 2
    window: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise ValueError("batch_sizes needs at least one size, each of 1 or more")
        if list(self.batch_sizes) != sorted(set(self.batch_sizes)):
            raise ValueError("batch_sizes must be in ascending order, each size once")
        if self.default not in self.batch_sizes:
            raise ValueError(f"default_batch_size {self.default} is not in batch_sizes")
        if not self.beta > 1:
            raise ValueError(f"beta_knob {self.beta} must be above 1")
        if self.rounds < 0 or self.window < 0:
            raise ValueError("num_pruning_rounds and window_size must not be negative")


class SearchPhase(StrEnum):
    """The reason of a choice."""

    PRUNING = "pruning"
    SAMPLING = "sampling"
    CONCURRENT = "concurrent"  # another run does the next trial
    FALLBACK = "fallback"  # no size has reached the target


@dataclass(frozen=True, slots=True)
class BatchSizeChoice:
    """The batch size of the next run; above ``stop_cost`` it is stopped (None: no limit)."""

    batch_size: int
    phase: SearchPhase
    stop_cost: float | None


def choose(
    policy: SearchPolicy, trials: Sequence[BatchSizeTrial], rng: Random, running: Iterable[int] = ()
) -> BatchSizeChoice:
    """The batch size of the next run, while runs of the sizes ``running`` have not ended."""
    stop = stop_cost(policy, trials)
    wanted, survivors = _prune(policy, trials)
    if wanted is not None:
        if wanted not in running:
            return BatchSizeChoice(wanted, SearchPhase.PRUNING, stop)
        return BatchSizeChoice(_best(policy, trials), SearchPhase.CONCURRENT, stop)
    if not survivors:
        return BatchSizeChoice(policy.default, SearchPhase.FALLBACK, None)
    spread, by_size = variation(policy, trials), recent_trials(policy, trials)
    means = {size: _draw(by_size[size], spread, rng) for size in survivors}
    return BatchSizeChoice(min(means, key=means.__getitem__), SearchPhase.SAMPLING, stop)


def is_pruning(policy: SearchPolicy, trials: Sequence[BatchSizeTrial]) -> bool:
    """True if some sizes have to be tried yet."""
    return _prune(policy, trials)[0] is not None


def stop_cost(policy: SearchPolicy, trials: Iterable[BatchSizeTrial]) -> float | None:
    """The cost above which a run is stopped; None before the first run with the target metric."""
    reached = [one.cost for one in trials if one.outcome is TrialOutcome.CONVERGED]
    return policy.beta * min(reached) if reached else None


def mean_costs(policy: SearchPolicy, trials: Sequence[BatchSizeTrial]) -> dict[int, float]:
    """The mean cost of the runs of each size that reached the target, of its last trials."""
    found: dict[int, float] = {}
    for size, recent in recent_trials(policy, trials).items():
        costs = [one.cost for one in recent if _converged(one)]
        if costs:
            found[size] = fmean(costs)
    return found


# ---------------------------------------------------------------------------------------- pruning


def _prune(
    policy: SearchPolicy, trials: Sequence[BatchSizeTrial]
) -> tuple[int | None, tuple[int, ...]]:
    """Replay the pruning rounds over the trials: the next size to try, or None, and the survivors.

    A trial of another size than the wanted one was a concurrent run: it does not count here.
    """
    left, survivors, centre = list(trials), policy.batch_sizes, policy.default
    for _ in range(policy.rounds):
        kept: dict[int, float] = {}
        for direction in outward(survivors, centre):
            for size in direction:
                trial = _take(left, size)
                if trial is None:
                    return size, survivors
                if not _converged(trial):
                    break
                kept[size] = trial.cost
        if not kept:
            return None, ()
        most = FAR_WORSE * min(kept.values())
        survivors = tuple(sorted(size for size, cost in kept.items() if cost <= most))
        centre = min(kept, key=kept.__getitem__)
    return None, survivors


def outward(sizes: Sequence[int], centre: int) -> tuple[Sequence[int], ...]:
    """The sizes by direction: the centre, the smaller ones downward, the larger ones upward."""
    below = [size for size in reversed(sizes) if size < centre]
    return [centre], below, [size for size in sizes if size > centre]


def _take(left: list[BatchSizeTrial], size: int) -> BatchSizeTrial | None:
    """Remove and return the next conclusive trial of a size, with all trials before it."""
    for at, trial in enumerate(left):
        if trial.batch_size == size and trial.outcome is not TrialOutcome.LOST:
            del left[: at + 1]
            return trial
    return None


# --------------------------------------------------------------------------------------- sampling


def _draw(recent: Sequence[BatchSizeTrial], spread: float, rng: Random) -> float:
    """A draw from the posterior of the mean cost of a size, from its last trials."""
    costs = _costs(recent, spread)
    if not costs:  # all of its trials are outside of the window
        return -math.inf
    mean = fmean(costs)
    deviation = mean * spread
    return rng.gauss(mean, deviation / math.sqrt(len(costs)))


def variation(policy: SearchPolicy, trials: Sequence[BatchSizeTrial]) -> float:
    """The coefficient of variation of costs, pooled over all sizes.

    One size has few trials; equal costs of two of them would be taken for certainty.
    """
    squares, freedom = PRIOR_WEIGHT * PRIOR_VARIATION**2, PRIOR_WEIGHT
    for recent in recent_trials(policy, trials).values():
        costs = [one.cost for one in recent if _converged(one)]
        if len(costs) > 1 and (mean := fmean(costs)) > 0:
            squares += sum((cost / mean - 1) ** 2 for cost in costs)
            freedom += len(costs) - 1
    return max(LEAST_VARIATION, math.sqrt(squares / freedom))


def _costs(recent: Sequence[BatchSizeTrial], spread: float) -> list[float]:
    """The costs of a size; that of a stopped run is its expectation above the stop."""
    ended = [one for one in recent if one.outcome is not TrialOutcome.LOST]
    known = [one.cost for one in ended if _converged(one)]
    mean = fmean(known) if known else None
    return known + [
        _expected_above(one.cost, one.cost if mean is None else mean, spread)
        for one in ended
        if not _converged(one)
    ]


def _expected_above(bound: float, mean: float, variation: float) -> float:
    """The mean of a normal variable above ``bound`` (the inverse Mills ratio)."""
    deviation = mean * variation
    if deviation <= 0:
        return max(bound, mean)
    at = (bound - mean) / deviation
    beyond = 1 - _NORMAL.cdf(at)
    if beyond < 1e-9:  # far beyond: the excess is about deviation / at
        return bound + deviation / at
    return mean + deviation * _NORMAL.pdf(at) / beyond


# ----------------------------------------------------------------------------------- common parts


def _converged(trial: BatchSizeTrial) -> bool:
    return trial.outcome is TrialOutcome.CONVERGED


def recent_trials(
    policy: SearchPolicy, trials: Iterable[BatchSizeTrial]
) -> dict[int, list[BatchSizeTrial]]:
    """The last trials of each size of the policy that count, in one pass over the trials."""
    found: dict[int, list[BatchSizeTrial]] = {size: [] for size in policy.batch_sizes}
    for one in trials:
        found[one.batch_size].append(one)
    return {size: own[-policy.window :] for size, own in found.items()}


def _best(policy: SearchPolicy, trials: Sequence[BatchSizeTrial]) -> int:
    """The size with the lowest known cost; the default before any is known."""
    means: Mapping[int, float] = mean_costs(policy, trials)
    return min(means, key=means.__getitem__, default=policy.default)


# --------------------------------------------------------------------------------- terms and runs

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
    """The ended runs as trials; one that has cost nothing was not measured, and tells nothing."""
    costs = [terms.cost(one.energy, one.seconds, one.power) for one in runs]
    return [
        BatchSizeTrial(one.batch_size, one.outcome if cost > 0 else TrialOutcome.LOST, cost)
        for one, cost in zip(runs, costs, strict=True)
        if one.outcome is not None
    ]


_OUTLIVED = 3
"""Later runs that end, for each open one, after which an open run counts as killed."""


def next_run(terms: RecurringJobTerms, runs: Sequence[TrainingRun], rng: Random) -> BatchSizeChoice:
    """The batch size of the next run, beside those that have not ended.

    Nobody can look for the process of a run on another host, and a killed one reports nothing. So a
    run that many later ones have outlived keeps no other from its batch size.
    """
    ended = [one.outcome is not None for one in runs]
    most = _OUTLIVED * ended.count(False)
    running = {
        one.batch_size for at, one in enumerate(runs) if not ended[at] and sum(ended[at:]) < most
    }
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
    if best == policy.default:
        return math.inf
    reached = Counter(one.batch_size for one in trials if _converged(one))
    error = math.sqrt(1 / max(1, reached[best]) + 1 / max(1, reached[policy.default]))
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
    count = Counter((one.batch_size, one.outcome) for one in runs)
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
                "reached": count[size, TrialOutcome.CONVERGED],
                "running": count[size, None],
                "lost": count[size, TrialOutcome.LOST],
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
