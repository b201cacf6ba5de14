"""The frontier and its recommendation on measured curves, with emulated noise, against the truth.

Each curve of a GPU's power limits is measured in trials by the real schedule: the time and the
energy of a unit of work of a trial have independent relative noise. The true frontier and the best
setting within a budget are those of the curve itself.

    .venv/bin/python -m benchmarks.frontier [--replays N]
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
from wattspan.frontier.recommendation import DEFAULT_TOLERANCE, Constraints, recommend
from wattspan.frontier.schedule import TrialSchedule
from wattspan.frontier.settings import PowerLimit, Setting
from wattspan.frontier.trials import MeasuredDevice, Study, Trial

CURVES = Path("tests/fixtures/power_limit_curves.csv.gz")
BUDGETS = (0.05, 0.1, 0.2)
NOISES = (0.005, 0.01, 0.02, 0.05)
REPEAT = 3
TOLERANCES = (0.0, 0.005, 0.01, 0.02, 0.05)
"""Of the second table."""

MIN_LEVELS = 5

Curve = Mapping[Setting, tuple[float, float]]
"""Seconds and joules of a unit of work, from the highest limit down."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--replays", type=int, default=3, help="of each curve")
    replays = options.parse_args().replays
    curves = list(read_curves(CURVES))
    print(describe())
    print(
        f"\n{len(curves)} measured curves of power limits, {replays} replays each,"
        f" {REPEAT} repetitions; time and energy of a trial have the given relative noise. Goals:"
        " regret of 2 % at most (p95), budget kept in 95 %, 90 % of the frontier recalled, 40 % of"
        " the trials saved at 1 % more regret at most. *Whole study*: without pruning, the budget"
        " is given afterwards. *With the budget*: `run --max-slowdown`. *Excess*: the time beyond"
        " the budget, of the recommendations that break it (mean, largest).\n"
    )
    print(
        "| noise of a trial | budget | whole study: kept | regret: mean | p95 | with the budget:"
        " kept | regret: mean | p95 | excess | trials saved | frontier recalled | pruned without"
        " a budget |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    everything = {noise: replay(curves, noise, replays) for noise in NOISES}
    for noise, results in everything.items():
        for budget in BUDGETS:
            print(results.row(noise, budget))
    print(
        "\nThe same whole studies, a budget of 5 %, by `recommend --tolerance`: budget kept, and"
        " regret (p95).\n"
    )
    print(f"| noise of a trial | {' | '.join(map(str, TOLERANCES))} |")
    print(f"|---{'|---' * len(TOLERANCES)}|")
    for noise, results in everything.items():
        cells = [results.tolerances[one] for one in TOLERANCES]
        print(f"| {noise:.1%} | {' | '.join(one.short for one in cells)} |")


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
    excess: list[float] = field(default_factory=list)
    trials: list[int] = field(default_factory=list)

    def add(
        self, curve: Curve, study: Study, budget: float, tolerance: float = DEFAULT_TOLERANCE
    ) -> None:
        regret, excess = judged(curve, study, budget, tolerance)
        self.regret.append(regret)
        if excess > 0:
            self.excess.append(excess)
        self.trials.append(len(study.trials))

    @property
    def kept(self) -> float:
        return 1 - len(self.excess) / len(self.regret)

    @property
    def cells(self) -> str:
        return f"{self.kept:.1%} | {fmean(self.regret):.2%} | {percentile_95(self.regret):.2%}"

    @property
    def short(self) -> str:
        return f"{self.kept:.1%}, {percentile_95(self.regret):.1%}"

    @property
    def beyond(self) -> str:
        if not self.excess:
            return "–"
        return f"{fmean(self.excess):.1%}, {max(self.excess):.1%}"


@dataclass
class Results:
    """Figures of all replays."""

    whole: dict[float, Judged] = field(default_factory=lambda: defaultdict(Judged))
    focused: dict[float, Judged] = field(default_factory=lambda: defaultdict(Judged))
    tolerances: dict[float, Judged] = field(default_factory=lambda: defaultdict(Judged))
    recalled: list[float] = field(default_factory=list)
    saved: list[float] = field(default_factory=list)

    def row(self, noise: float, budget: float) -> str:
        whole, focused = self.whole[budget], self.focused[budget]
        return (
            f"| {noise:.1%} | {budget:.0%} | {whole.cells} | {focused.cells} | {focused.beyond} "
            f"| {1 - fmean(focused.trials) / fmean(whole.trials):.0%} | {fmean(self.recalled):.1%} "
            f"| {fmean(self.saved):.0%} |"
        )


def percentile_95(values: Sequence[float]) -> float:
    return quantiles(values, n=20)[-1]


def replay(curves: Sequence[Curve], noise: float, replays: int) -> Results:
    """Measure every curve several times, with pruning, with a known budget, and without both."""
    results = Results()
    for number, curve in enumerate(curves):
        truth = true_frontier(curve)
        for seed in range(replays):
            rng = random.Random(f"{number}:{seed}")
            whole = measured(curve, noise, rng, prune=False)
            pruned = measured(curve, noise, rng)
            results.saved.append(1 - len(pruned.trials) / len(whole.trials))
            found = {pruned.settings[n] for n in frontier(estimates(pruned))}
            results.recalled.append(len(truth & found) / len(truth))
            for budget in BUDGETS:
                focused = measured(curve, noise, rng, budget=budget)
                results.whole[budget].add(curve, whole, budget)
                results.focused[budget].add(curve, focused, budget)
            for tolerance in TOLERANCES:
                results.tolerances[tolerance].add(curve, whole, BUDGETS[0], tolerance)
    return results


def true_frontier(curve: Curve) -> set[Setting]:
    return {
        setting
        for setting, (seconds, joules) in curve.items()
        if not any(s < seconds and j < joules for s, j in curve.values())
    }


def judged(curve: Curve, study: Study, budget: float, tolerance: float) -> tuple[float, float]:
    """The regret in energy against the best setting in the budget, and the excess of time.

    A recommendation beyond the budget has no regret.
    """
    limit = next(iter(curve.values()))[0] * (1 + budget)
    within = [joules for seconds, joules in curve.values() if seconds <= limit]
    constraints = Constraints(max_slowdown=budget, tolerance=tolerance)
    seconds, joules = curve[recommend(estimates(study), constraints).setting]
    excess = seconds / limit - 1
    return (joules / min(within) - 1 if excess <= 0 else 0.0), excess


def estimates(study: Study) -> SettingEstimates:
    return SettingEstimates(study.settings, study.usable())


def measured(
    curve: Curve,
    noise: float,
    rng: random.Random,
    *,
    prune: bool = True,
    budget: float | None = None,
) -> Study:
    """The study of a curve by the real schedule."""
    schedule = TrialSchedule(seed=rng.getrandbits(32), max_slowdown=budget)
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
