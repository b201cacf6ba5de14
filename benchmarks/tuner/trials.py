"""Many runs of many cells, over a few processes; what came of them, cell by cell."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, TypeVar

from benchmarks.tuner.baselines import METHODS
from benchmarks.tuner.cells import Cell
from benchmarks.tuner.runner import Bench, Score, Terms
from benchmarks.tuner.stats import clopper_pearson, mean, quantile

T = TypeVar("T")
R = TypeVar("R")

OURS = "wattspan"
TERMS = Terms()
_BATCH = 10  # seeds a process does at once


@dataclass(frozen=True)
class Task:
    """Some seeds of a cell under some methods."""

    cell: Cell
    seeds: range
    methods: tuple[str, ...]
    terms: Terms


def run_task(task: Task) -> list[Score]:
    """All methods share each seed's luck."""
    return [
        bench.ours() if method == OURS else METHODS[method](bench)
        for bench in (Bench(task.cell.plant, seed, task.terms) for seed in task.seeds)
        for method in task.methods
    ]


def run(
    cells: Sequence[Cell],
    seeds: int,
    methods: Sequence[str] = (OURS,),
    *,
    terms: Terms = TERMS,
    processes: int = 1,
    few: int | None = None,
) -> dict[str, dict[str, list[Score]]]:
    """Scores by cell and method. Methods other than ours get the first ``few`` seeds."""
    tasks = list(_tasks(cells, seeds, methods, terms, few))
    found: dict[str, dict[str, list[Score]]] = {
        cell.plant.name: {method: [] for method in methods} for cell in cells
    }
    for done, scores in enumerate(each(run_task, tasks, processes), 1):
        for score in scores:
            found[score.plant][score.method].append(score)
        if done % 20 == 0 or done == len(tasks):
            print(f"  {done} of {len(tasks)} batches", file=sys.stderr)
    for by_method in found.values():
        for scores in by_method.values():
            scores.sort(key=lambda one: one.seed)
    return found


def _tasks(
    cells: Sequence[Cell], seeds: int, methods: Sequence[str], terms: Terms, few: int | None
) -> Iterator[Task]:
    for begin in range(0, seeds, _BATCH):
        some = range(begin, min(begin + _BATCH, seeds))
        chosen = tuple(one for one in methods if one == OURS or few is None or begin < few)
        for cell in cells if chosen else ():
            yield Task(cell, some, chosen, terms)


def each(function: Callable[[T], R], tasks: Sequence[T], processes: int) -> Iterator[R]:
    """What comes of every task, in no order."""
    if processes <= 1:
        yield from map(function, tasks)
        return
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, context, initializer=_step_back) as pool:
        for future in as_completed([pool.submit(function, task) for task in tasks]):
            yield future.result()


def _step_back() -> None:
    os.nice(10)  # whoever works beside goes first


def summary(scores: Sequence[Score], budget: float) -> dict[str, Any]:
    """One cell and method in figures; rates with their 95 % interval."""
    over = sum(score.slowdown > budget for score in scores)
    count = len(scores)
    low, high = clopper_pearson(over, count)
    oracle = mean([score.oracle for score in scores])
    saving = mean([score.saving for score in scores])
    commits = [score.commit_units for score in scores if score.commit_units is not None]
    seconds = [score.commit_seconds for score in scores if score.commit_seconds is not None]
    return {
        "runs": count,
        "over": over,
        "over_low": low,
        "over_high": high,
        "over_bound": clopper_pearson(over, count, one_sided=True)[1],
        "slowdown": mean([score.slowdown for score in scores]),
        "slowdown_most": max(score.slowdown for score in scores),
        "slowdowns": [quantile([s.slowdown for s in scores], part) for part in (0.05, 0.5, 0.95)],
        "savings": [quantile([s.saving for s in scores], part) for part in (0.05, 0.5, 0.95)],
        "worst_ten_minutes": quantile([score.worst for score in scores], 0.5),
        "worst_ten_minutes_p99": quantile([score.worst for score in scores], 0.99),
        "saving": saving,
        "saving_least": min(score.saving for score in scores),
        "oracle": oracle,
        "share": saving / oracle if oracle > 0.002 else None,
        "committed": len(commits) / count,
        "commit_units": quantile(commits, 0.5),
        "commit_units_p90": quantile(commits, 0.9),
        "commit_seconds": quantile(seconds, 0.5),
        "exploration": mean([score.exploration for score in scores]),
        "held_slowdown": mean([score.held_slowdown or 0.0 for score in scores]),
        "releases": _counted(score.releases for score in scores),
        "declines": _counted(score.declines for score in scores),
        "last": _counted({score.last: 1} for score in scores),
        "false_alarms": sum(score.alarms for score in scores),
        "hours": sum(score.hours for score in scores),
        "writes": mean([score.writes for score in scores]),
        "bound_held": _rate(
            score.told_bound >= score.slowdown for score in scores if score.told_bound is not None
        ),
        "claim_held": _rate(
            score.told_low <= score.saving for score in scores if score.told_low is not None
        ),
        "claims": sum((score.told_low or 0.0) > 0 for score in scores),
        "false_claims": sum(
            (score.told_low or 0.0) > max(score.saving, 0.0) + 1e-9 for score in scores
        ),
    }


def _counted(many: Iterable[dict[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in many:
        for key, count in one.items():
            found[key] = found.get(key, 0) + count
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _rate(held: Iterable[bool]) -> float | None:
    seen = list(held)
    return sum(seen) / len(seen) if seen else None
