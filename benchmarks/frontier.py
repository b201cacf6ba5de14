"""The frontier and its recommendation on measured curves, with emulated noise, against the truth.

Each curve of a GPU's power limits is measured in trials by the real schedule: the time and the
energy of a unit of work of a trial have independent relative noise. The true frontier and the best
setting within a budget are those of the curve itself.

    .venv/bin/python -m benchmarks.frontier [--replays N] [--tolerances]
    .venv/bin/python -m benchmarks.frontier --time-budget [--replays N]
"""

from __future__ import annotations

import argparse
import csv
import gzip
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log
from pathlib import Path
from statistics import fmean, quantiles

import msgspec
from testbed.studies import hypervolume

from wattspan.frontier.estimates import SettingEstimates, frontier
from wattspan.frontier.recommendation import DEFAULT_TOLERANCE, Constraints, recommend
from wattspan.frontier.schedule import DEFAULT_LONGEST, TrialSchedule
from wattspan.frontier.statistics import LogPoint
from wattspan.frontier.trials import MeasuredDevice, PowerLimit, Setting, Study, Trial

CURVES = Path("tests/fixtures/power_limit_curves.csv.gz")
BUDGETS = (0.05, 0.1, 0.2)
ORDER_NOISE = 0.01
WINDOW = 10.0  # seconds of a trial
NOISES = (0.005, 0.01, 0.02, 0.05)
REPEAT = 3
SHARES = (1 / 6, 1 / 3, 1 / 2)
"""Of the time of all trials, for the comparison of orders."""

BATCH_SIZES = 4
"""Of a workload with many, for settings of two knobs."""

REFERENCE = LogPoint(log(DEFAULT_LONGEST), log(DEFAULT_LONGEST))

TOLERANCES = (0.0, 0.005, 0.01, 0.02, 0.05)
"""Of the second table."""

MIN_LEVELS = 5

Curve = Mapping[Setting, tuple[float, float]]
"""Seconds and joules of a unit of work, from the highest limit down."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--replays", type=int, default=3, help="of each curve")
    options.add_argument("--time-budget", action="store_true", help="compare the orders of trials")
    options.add_argument("--tolerances", action="store_true", help="also by `--tolerance`")
    arguments = options.parse_args()
    replays, curves = arguments.replays, list(read_curves(CURVES))
    if arguments.time_budget:
        compare_orders(curves, replays)
        return
    print(
        f"Truth: {len(curves)} measured curves of power limits, replayed {replays} times with noise"
        " of each trial. The study knows the budget: kept, regret (p95), trials saved.\n"
    )
    print(f"| noise | budget of {' | '.join(f'{one:.0%}' for one in BUDGETS)} | recalled |")
    print("|---" * (2 + len(BUDGETS)) + "|")
    everything = {noise: replay(curves, noise, replays) for noise in NOISES}
    for noise, results in everything.items():
        cells = [*map(results.cell, BUDGETS), f"{fmean(results.recalled):.1%}"]
        print(f"| {noise:.1%} | {' | '.join(cells)} |")
    if not arguments.tolerances:
        return
    print(
        "\nWhole studies, a budget of 5 %, by `recommend --tolerance`: budget kept, and"
        " regret (p95).\n"
    )
    print(f"| noise of a trial | {' | '.join(map(str, TOLERANCES))} |")
    print(f"|---{'|---' * len(TOLERANCES)}|")
    for noise, results in everything.items():
        shorts = [results.tolerances[one].short for one in TOLERANCES]
        print(f"| {noise:.1%} | {' | '.join(shorts)} |")


class RandomOrder(TrialSchedule):
    """The settings of each block in random order, the baseline first; no descent."""

    def _order(self, study: Study, block: int, settings: Sequence[Setting]) -> Sequence[Setting]:
        shuffled = super()._order(study, block + 1, settings)
        return sorted(shuffled, key=lambda one: one != study.baseline)


def by_gain(seed: int, trials: int) -> TrialSchedule:
    return TrialSchedule(seed=seed, time_budget=WINDOW * trials)


def random_order(seed: int, trials: int) -> TrialSchedule:
    return RandomOrder(seed=seed)


def descent_first(seed: int, trials: int) -> TrialSchedule:
    return TrialSchedule(seed=seed)


ORDERS = (by_gain, random_order, descent_first)
"""Each by a seed and the number of trials."""


def compare_orders(curves: Sequence[Curve], replays: int) -> None:
    """Print the hypervolume that each order of the trials reaches in parts of the full time."""
    grids = list(read_grids(CURVES))
    print(
        f"Truth: {len(curves)} measured curves and {len(grids)} grids with batch sizes, replayed"
        f" with {ORDER_NOISE:.0%} noise. Mean part of all settings' hypervolume in a part of the"
        " full time: by gain (`run --time-budget`), in random order, by descent first.\n"
    )
    print(f"| settings | {' | '.join(f'{share:.0%}' for share in SHARES)} |")
    print("|---" * (1 + len(SHARES)) + "|")
    for name, kind in (("curves", curves), ("grids", grids)):
        cells = []
        for share in SHARES:
            found = [order_ratios(kind, ORDER_NOISE, share, replays, order) for order in ORDERS]
            cells.append(", ".join(f"{fmean(one):.1%}" for one in found))
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def order_ratios(
    curves: Sequence[Curve],
    noise: float,
    share: float,
    replays: int,
    order: Callable[[int, int], TrialSchedule],
) -> list[float]:
    """The reached parts of the hypervolume of each curve and replay."""
    found = []
    for number, curve in enumerate(curves):
        trials = round(share * REPEAT * len(curve))
        for seed in range(replays):
            rng = random.Random(f"{number}:{seed}")
            schedule = order(rng.getrandbits(32), trials)
            found.append(reached(curve, carried_out(curve, noise, rng, schedule, limit=trials)))
    return found


def reached(curve: Curve, study: Study) -> float:
    """The true hypervolume of the settings that no other one beats by the estimates."""
    model = estimates(study)
    points = {n: (model.time.value(n).value, model.energy.value(n).value) for n in model.measured}
    chosen = [
        study.settings[n]
        for n, (time, energy) in points.items()
        if not any(t < time and e < energy for t, e in points.values())
    ]
    true = _log_points(curve)
    part = hypervolume([true[one] for one in chosen], REFERENCE)
    return part / hypervolume(true.values(), REFERENCE)


def _log_points(curve: Curve) -> dict[Setting, LogPoint]:
    seconds, joules = next(iter(curve.values()))
    return {one: LogPoint(log(t / seconds), log(e / joules)) for one, (t, e) in curve.items()}


def read_curves(path: Path) -> Iterator[Curve]:
    """The curves of tests/fixtures, with the highest limit first."""
    for group in _read_groups(path).values():
        if len(group) >= MIN_LEVELS:
            yield {
                Setting(PowerLimit(limit, relative=False) if number else None): group[limit]
                for number, limit in enumerate(sorted(group, reverse=True))
            }


def read_grids(path: Path) -> Iterator[Curve]:
    """Power limits and batch sizes of the workloads that were measured at several of both."""
    by_workload: dict[tuple[str, ...], dict[int, dict[float, tuple[float, float]]]] = {}
    for (*workload, config), group in _read_groups(path).items():
        size, _, optimizer = config.partition("-")
        if size.startswith("bs"):
            batches = by_workload.setdefault((*workload, optimizer), {})
            batches[int(size.removeprefix("bs"))] = group
    for batches in by_workload.values():
        sizes = sorted(batches)
        chosen = sizes[:: -(-len(sizes) // BATCH_SIZES)]
        limits = sorted(set.intersection(*(set(batches[size]) for size in chosen)), reverse=True)
        if len(limits) >= MIN_LEVELS:
            yield {
                Setting(
                    PowerLimit(limit, relative=False) if number else None,
                    parameters=(("batch", str(size)),),
                ): batches[size][limit]
                for size in chosen
                for number, limit in enumerate(limits)
            }


def _read_groups(path: Path) -> dict[tuple[str, ...], dict[float, tuple[float, float]]]:
    """The time and energy by power limit, of each source, GPU, workload and configuration."""
    with gzip.open(path, "rt") as file:
        rows = list(csv.DictReader(file))
    groups: dict[tuple[str, ...], dict[float, tuple[float, float]]] = {}
    for row in rows:
        key = row["source"], row["gpu"], row["workload"], row["config"]
        limit, figures = float(row["limit_w"]), (row["time_s"], row["energy_j"])
        groups.setdefault(key, {})[limit] = float(figures[0]), float(figures[1])
    return groups


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
    def short(self) -> str:
        return f"{self.kept:.1%}, {percentile_95(self.regret):.1%}"


@dataclass
class Results:
    """Figures of all replays."""

    whole: dict[float, Judged] = field(default_factory=lambda: defaultdict(Judged))
    focused: dict[float, Judged] = field(default_factory=lambda: defaultdict(Judged))
    tolerances: dict[float, Judged] = field(default_factory=lambda: defaultdict(Judged))
    recalled: list[float] = field(default_factory=list)

    def cell(self, budget: float) -> str:
        whole, focused = self.whole[budget], self.focused[budget]
        saved = 1 - fmean(focused.trials) / fmean(whole.trials)
        return f"{focused.kept:.1%}, {percentile_95(focused.regret):.2%}, {saved:.0%}"


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
    return carried_out(curve, noise, rng, schedule, prune=prune)


def carried_out(
    curve: Curve,
    noise: float,
    rng: random.Random,
    schedule: TrialSchedule,
    *,
    prune: bool = True,
    limit: int | None = None,
) -> Study:
    """The study of a curve by ``schedule``, to its end or for ``limit`` trials."""
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
        window_seconds=WINDOW,
        warm_up_seconds=0.0,
    )
    while (planned := schedule.next(study)) is not None and len(trials) != limit:
        seconds, joules = curve[planned.setting]
        trials.append(
            Trial(
                setting=planned.setting,
                block=planned.block,
                started_unix=0.0,
                seconds=seconds * exp(rng.gauss(0, noise)),
                units=1.0,
                joules=joules * exp(rng.gauss(0, noise)),
                elapsed_seconds=WINDOW,
            )
        )
        study = msgspec.structs.replace(study, trials=list(trials))
        if prune:
            pruned += schedule.pruned(study)
            study = msgspec.structs.replace(study, pruned=list(pruned))
    return study


if __name__ == "__main__":
    main()
