"""Published trainings, replayed for a rule that chooses batch sizes."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean, variance
from typing import NamedTuple

from wattspan.recurring.jobs import (
    BatchSizeChoice,
    BatchSizeTrial,
    SearchPhase,
    SearchPolicy,
    TrialOutcome,
    outward,
    stop_cost,
)

FIXTURES = Path(__file__).resolve().parents[1] / "tests" / "fixtures"
ETA = 0.5
LAST = 5
DEFAULTS = {
    "cifar100/shufflenetv2": 1024,
    "movielens-1m/ncf": 1024,
    "sentiment140/bert_base_uncased": 128,
}
"""Assumed default batch sizes."""

MAX_EPOCHS = {
    "cifar100/shufflenetv2": 100,
    "movielens-1m/ncf": 100,
    "sentiment140/bert_base_uncased": 10,
}
COMPUTED = {
    ("V100", "cifar100/shufflenetv2"): 0.74,
    ("V100", "movielens-1m/ncf"): 0.64,
    ("V100", "sentiment140/bert_base_uncased"): 0.21,
    ("A40", "cifar100/shufflenetv2"): 0.67,
    ("A40", "movielens-1m/ncf"): 0.60,
    ("A40", "sentiment140/bert_base_uncased"): 0.21,
}
"""Saved energy of the last five runs, joint with the power limit, computed from the same traces."""


class Arm(NamedTuple):
    """One batch size: cost and joules of an epoch, joules at the highest limit, epochs of runs."""

    cost: float
    joules: float
    uncapped: float
    epochs: tuple[int | None, ...]


class Replay(NamedTuple):
    """The mean results of the replays of one job with one rule.

    Costs are relative to the least expected cost; ``saved`` is the part of the default's energy
    that the last runs saved, ``failures`` the mean number of runs without the target.
    """

    last: float
    all: float
    failures: float
    saved: float


Rule = Callable[[SearchPolicy, Sequence[BatchSizeTrial], Random], BatchSizeChoice]


@dataclass(frozen=True)
class Job:
    """A recurring job on one GPU."""

    gpu: str
    name: str
    arms: Mapping[int, Arm]

    @property
    def policy(self) -> SearchPolicy:
        sizes = tuple(sorted(self.arms))
        default = DEFAULTS[self.name]
        return SearchPolicy(sizes, default if default in sizes else sizes[-1])

    def expected(self, size: int) -> float:
        """The mean cost of a run that reaches the target; infinite if none does."""
        reached = self._reached(size)
        return self.arms[size].cost * fmean(reached) if reached else math.inf

    @property
    def oracle(self) -> float:
        return min(map(self.expected, self.arms))

    @property
    def usual_joules(self) -> float:
        """The energy of a run with the default size at the highest limit."""
        default = self.policy.default
        return self.arms[default].uncapped * fmean(self._reached(default))

    def _reached(self, size: int) -> list[int]:
        most = MAX_EPOCHS[self.name]
        return [one for one in self.arms[size].epochs if one is not None and one <= most]

    def run(self, choice: BatchSizeChoice, rng: Random) -> tuple[BatchSizeTrial, float]:
        """A run of the chosen size, and its joules."""
        arm, most = self.arms[choice.batch_size], MAX_EPOCHS[self.name]
        needed = rng.choice(arm.epochs)
        epochs = min(most, needed if needed is not None else most)
        outcome = (
            TrialOutcome.CONVERGED if needed is not None and needed <= most else TrialOutcome.MISSED
        )
        if choice.stop_cost is not None and arm.cost * epochs > choice.stop_cost:
            # The optimizer looks after each epoch.
            epochs, outcome = int(choice.stop_cost // arm.cost) + 1, TrialOutcome.STOPPED
        return BatchSizeTrial(choice.batch_size, outcome, arm.cost * epochs), arm.joules * epochs

    def replay(self, rule: Rule, seeds: int, runs: int) -> Replay:
        found = [self._search(rule, Random(seed), runs) for seed in range(seeds)]
        return Replay(*map(fmean, zip(*found, strict=True)))

    def _search(self, rule: Rule, rng: Random, runs: int) -> Replay:
        trials: list[BatchSizeTrial] = []
        joules: list[float] = []
        for _ in range(runs):
            trial, spent = self.run(rule(self.policy, trials, rng), rng)
            trials.append(trial)
            joules.append(spent)
        costs = [trial.cost / self.oracle for trial in trials]
        return Replay(
            fmean(costs[-LAST:]),
            fmean(costs),
            sum(trial.outcome is not TrialOutcome.CONVERGED for trial in trials),
            1 - fmean(joules[-LAST:]) / self.usual_joules,
        )


def jobs() -> Iterator[Job]:
    """The jobs of the traces, on each GPU."""
    epochs: dict[tuple[str, int], tuple[int | None, ...]] = {}
    with (FIXTURES / "recurring_targets.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            words = row["epochs"].split()
            counts = tuple(None if word == "nan" else int(word) for word in words)
            epochs[row["job"], int(row["batch_size"])] = counts
    points: dict[tuple[str, str], dict[int, dict[int, tuple[float, float]]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    with (FIXTURES / "recurring_epochs.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            figures = float(row["seconds"]), float(row["joules"])
            sizes = points[row["gpu"], row["job"]]
            sizes[int(row["batch_size"])][int(row["limit_w"])] = figures
    highest = {
        gpu: max(limit for (one, _), sizes in points.items() if one == gpu
                 for limits in sizes.values() for limit in limits)
        for gpu, _ in points
    }  # fmt: skip
    for (gpu, name), sizes in points.items():
        arms = {
            size: _arm(limits, highest[gpu], epochs[name, size]) for size, limits in sizes.items()
        }
        yield Job(gpu, name, arms)


def _arm(
    limits: Mapping[int, tuple[float, float]], power: float, epochs: tuple[int | None, ...]
) -> Arm:
    """The batch size at the power limit with the least cost."""
    cost, joules = min(
        (ETA * joules + (1 - ETA) * power * seconds, joules) for seconds, joules in limits.values()
    )
    return Arm(cost, joules, limits[max(limits)][1], epochs)


# ------------------------------------------------------------------------------------ Zeus's rules


def zeus(policy: SearchPolicy, trials: Sequence[BatchSizeTrial], rng: Random) -> BatchSizeChoice:
    """The published rules, written from their description; Zeus itself is not run."""
    stop = stop_cost(policy, trials)
    left, survivors, centre = list(trials), policy.batch_sizes, policy.default
    for _ in range(policy.rounds):
        kept: dict[int, float] = {}
        for direction in outward(survivors, centre):
            for size in direction:
                if not left:
                    return BatchSizeChoice(size, SearchPhase.PRUNING, stop)
                trial = left.pop(0)
                if trial.outcome is not TrialOutcome.CONVERGED:
                    break
                kept[size] = trial.cost
        survivors = tuple(sorted(kept)) or (policy.default,)
        centre = min(kept, key=kept.__getitem__, default=policy.default)
    drawn = {}
    for size in survivors:
        costs = [one.cost for one in trials if one.batch_size == size]
        spread = math.sqrt(variance(costs) / len(costs)) if len(costs) > 1 else 0.0
        drawn[size] = rng.gauss(fmean(costs), spread)
    return BatchSizeChoice(min(drawn, key=drawn.__getitem__), SearchPhase.SAMPLING, stop)
