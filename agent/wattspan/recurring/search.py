"""The choice of the next batch size of a recurring job, from the trials so far. Pure.

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from statistics import NormalDist, fmean

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


@dataclass(frozen=True, slots=True)
class _Pruned:
    """The result of the pruning phase: the next size to try, or None, and the survivors."""

    wanted: int | None
    survivors: tuple[int, ...]


def choose(
    policy: SearchPolicy, trials: Sequence[BatchSizeTrial], rng: Random, running: Iterable[int] = ()
) -> BatchSizeChoice:
    """The batch size of the next run, while runs of the sizes ``running`` have not ended."""
    stop = stop_cost(policy, trials)
    pruned = _prune(policy, trials)
    if pruned.wanted is not None:
        if pruned.wanted not in running:
            return BatchSizeChoice(pruned.wanted, SearchPhase.PRUNING, stop)
        return BatchSizeChoice(_best(policy, trials), SearchPhase.CONCURRENT, stop)
    if not pruned.survivors:
        return BatchSizeChoice(policy.default, SearchPhase.FALLBACK, None)
    spread, by_size = variation(policy, trials), recent_trials(policy, trials)
    means = {size: _draw(by_size[size], spread, rng) for size in pruned.survivors}
    return BatchSizeChoice(min(means, key=means.__getitem__), SearchPhase.SAMPLING, stop)


def is_pruning(policy: SearchPolicy, trials: Sequence[BatchSizeTrial]) -> bool:
    """True if some sizes have to be tried yet."""
    return _prune(policy, trials).wanted is not None


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


def _prune(policy: SearchPolicy, trials: Sequence[BatchSizeTrial]) -> _Pruned:
    """Replay the pruning rounds over the trials in their order.

    A trial of another size than the wanted one was a concurrent run: it does not count here.
    """
    left, survivors, centre = list(trials), policy.batch_sizes, policy.default
    for _ in range(policy.rounds):
        kept: dict[int, float] = {}
        for direction in outward(survivors, centre):
            for size in direction:
                trial = _take(left, size)
                if trial is None:
                    return _Pruned(size, survivors)
                if not _converged(trial):
                    break
                kept[size] = trial.cost
        if not kept:
            return _Pruned(None, ())
        most = FAR_WORSE * min(kept.values())
        survivors = tuple(sorted(size for size, cost in kept.items() if cost <= most))
        centre = min(kept, key=kept.__getitem__)
    return _Pruned(None, survivors)


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
