"""The frontier and its recommendation on measured curves, with emulated noise, against the truth.

Each curve of a GPU's power limits is measured in trials by the real schedule: the time and the
energy of a unit of work of a trial have independent relative noise. The true frontier and the best
setting within a budget are those of the curve itself.

    .venv/bin/python -m benchmarks.frontier [--quick]
"""

from __future__ import annotations

import argparse
import csv
import gzip
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp
from pathlib import Path
from statistics import fmean, quantiles

import msgspec

from benchmarks.machine import describe
from wattspan.frontier.estimates import SettingEstimates
from wattspan.frontier.pareto import frontier
from wattspan.frontier.recommendation import Constraints, recommend
from wattspan.frontier.schedule import DEFAULT_LONGEST, DEFAULT_MOST, TrialSchedule
from wattspan.frontier.settings import PowerLimit, Setting
from wattspan.frontier.trials import MeasuredDevice, Study, Trial

CURVES = Path("tests/fixtures/power_limit_curves.csv.gz")
BUDGETS = (0.05, 0.1, 0.2)
NOISES = (0.005, 0.01, 0.02, 0.05)
REPEAT = 3
LONGEST_BUDGETS = 3
"""Settings are followed to a slowdown of so many budgets."""

MIN_LEVELS = 5

Curve = Mapping[Setting, tuple[float, float]]
"""Seconds and joules of a unit of work, from the highest limit down."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="one replay of each curve, not three")
    chosen = options.parse_args()
    curves = list(read_curves(CURVES))
    print(describe())
    replays = 1 if chosen.quick else 3
    print(
        f"\n{len(curves)} measured curves of power limits, {replays} replays each,"
        f" {REPEAT} repetitions; time and energy of a trial have the given relative noise. Goals:"
        " 2 % regret at most (p95), budget kept in 95 %, 90 % of the frontier recalled, 40 % of the"
        f" trials saved at 1 % regret at most. *Further trials*: up to {DEFAULT_MOST} of a setting"
        " that may keep the budget.\n"
    )
    print(
        "| noise of a trial | budget | kept | regret: mean | p95 | with further trials: kept "
        "| regret: mean | p95 | trials | frontier recalled | pruning saves | and costs, mean |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for noise in NOISES:
        results = replay(curves, noise, replays)
        for budget in BUDGETS:
            print(results.row(noise, budget))


def read_curves(path: Path) -> Iterator[Curve]:
    """The curves of tests/fixtures, with the highest limit first."""
    with gzip.open(path, "rt") as file:
        rows = list(csv.DictReader(file))
    groups: dict[tuple[str, ...], dict[float, tuple[float, float]]] = {}
    for row in rows:
        key = row["source"], row["gpu"], row["workload"], row["config"]
        limit, figures = float(row["limit_w"]), (row["time_s"], row["energy_j"])
        groups.setdefault(key, {})[limit] = float(figures[0]), float(figures[1])
    for group in groups.values():
        if len(group) >= MIN_LEVELS:
            limits = sorted(group, reverse=True)
            yield {
                Setting(PowerLimit(limit, relative=False) if number else None): group[limit]
                for number, limit in enumerate(limits)
            }


@dataclass
class Judged:
    """Recommendations of studies of one kind, for one budget."""

    regret: list[float] = field(default_factory=list)
    kept: list[bool] = field(default_factory=list)
    trials: list[int] = field(default_factory=list)

    def add(self, curve: Curve, study: Study, budget: float) -> None:
        regret, kept = judged(curve, study, budget)
        self.regret.append(regret)
        self.kept.append(kept)
        self.trials.append(len(study.trials))

    @property
    def cells(self) -> str:
        regret = f"{fmean(self.regret):.2%} | {percentile_95(self.regret):.2%}"
        return f"{fmean(self.kept):.1%} | {regret}"


@dataclass
class Results:
    """Figures of all replays."""

    whole: dict[float, Judged] = field(default_factory=lambda: defaultdict(Judged))
    short: dict[float, Judged] = field(default_factory=lambda: defaultdict(Judged))
    further: dict[float, Judged] = field(default_factory=lambda: defaultdict(Judged))
    recalled: list[float] = field(default_factory=list)

    def row(self, noise: float, budget: float) -> str:
        whole, short, further = self.whole[budget], self.short[budget], self.further[budget]
        return (
            f"| {noise:.1%} | {budget:.0%} | {short.cells} | {further.cells} "
            f"| {fmean(further.trials):.0f} | {fmean(self.recalled):.1%} "
            f"| {1 - fmean(short.trials) / fmean(whole.trials):.0%} "
            f"| {fmean(short.regret) - fmean(whole.regret):+.2%} |"
        )


def percentile_95(values: Sequence[float]) -> float:
    return quantiles(values, n=20)[-1]


def replay(curves: Sequence[Curve], noise: float, replays: int) -> Results:
    """Measure every curve several times, with pruning and without."""
    results = Results()
    for number, curve in enumerate(curves):
        truth = true_frontier(curve)
        for seed in range(replays):
            rng = random.Random(f"{number}:{seed}")
            whole = measured(curve, noise, rng, prune=False)
            found = {whole.settings[n] for n in frontier(estimates(whole))}
            results.recalled.append(len(truth & found) / len(truth))
            for budget in BUDGETS:
                longest = 1 + LONGEST_BUDGETS * budget
                short = measured(curve, noise, rng, longest=longest)
                further = measured(curve, noise, rng, longest=longest, budget=budget)
                results.whole[budget].add(curve, whole, budget)
                results.short[budget].add(curve, short, budget)
                results.further[budget].add(curve, further, budget)
    return results


def true_frontier(curve: Curve) -> set[Setting]:
    return {
        setting
        for setting, (seconds, joules) in curve.items()
        if not any(s < seconds and j < joules for s, j in curve.values())
    }


def judged(curve: Curve, study: Study, budget: float) -> tuple[float, bool]:
    """The regret in energy against the best setting in the budget, and whether it was kept.

    A recommendation beyond the budget has no regret: it counts as one that is not kept.
    """
    base = next(iter(curve.values()))[0]
    within = [joules for seconds, joules in curve.values() if seconds <= base * (1 + budget)]
    chosen = recommend(estimates(study), Constraints(max_slowdown=budget)).setting
    seconds, joules = curve[chosen]
    kept = seconds <= base * (1 + budget)
    return (joules / min(within) - 1 if kept else 0.0), kept


def estimates(study: Study) -> SettingEstimates:
    return SettingEstimates(study.settings, study.usable())


def measured(
    curve: Curve,
    noise: float,
    rng: random.Random,
    *,
    prune: bool = True,
    longest: float = DEFAULT_LONGEST,
    budget: float | None = None,
) -> Study:
    """The study of a curve by the real schedule."""
    schedule = TrialSchedule(longest, rng.getrandbits(32), budget)
    trials: list[Trial] = []
    pruned: list[tuple[Setting, str]] = []
    study = Study(
        created_unix=0.0,
        host="emulated",
        command=[],
        unit="step",
        emulated=True,
        devices=[MeasuredDevice(id="gpu", name="GPU", kind="gpu", provenance="emulated")],
        settings=list(curve),
        repeat=REPEAT,
        window_seconds=10.0,
        warm_up_seconds=0.0,
    )
    while (planned := schedule.next(study)) is not None:
        seconds, joules = curve[planned.setting]
        trials.append(
            Trial(
                setting=planned.setting,
                block=planned.block,
                started_unix=0.0,
                seconds=seconds * exp(rng.gauss(0, noise)),
                units=1.0,
                joules=joules * exp(rng.gauss(0, noise)),
            )
        )
        study = msgspec.structs.replace(study, trials=list(trials))
        if prune:
            pruned += schedule.pruned(study)
            study = msgspec.structs.replace(study, pruned=list(pruned))
    return study


if __name__ == "__main__":
    main()
