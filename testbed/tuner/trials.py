"""Many runs of many cells over a few processes, with results by cell."""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from testbed.tuner.baselines import METHODS
from testbed.tuner.cells import Cell
from testbed.tuner.run_cache import Kept, bench_digest, core_digest
from testbed.tuner.runner import Bench, Score, Terms
from testbed.tuner.stats import clopper_pearson, mean, quantile

T = TypeVar("T")
R = TypeVar("R")

OURS = "wattspan"
TERMS = Terms()


@dataclass(frozen=True)
class Task:
    """One seed of a cell under some methods."""

    cell: Cell
    seed: int
    methods: tuple[str, ...]
    terms: Terms


class Trials:
    """Makes runs, or has them from before, in ``processes`` until ``deadline`` (monotonic)."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        processes: int = 1,
        deadline: float = math.inf,
        terms: Terms = TERMS,
    ) -> None:
        self.terms, self._processes, self._deadline = terms, processes, deadline
        self._ours = self._theirs = None
        if folder is not None:
            self._ours = Kept(folder / f"wattspan-{core_digest()}.jsonl")
            self._theirs = Kept(folder / f"others-{bench_digest()}.jsonl")

    def scores(
        self, cells: Sequence[Cell], seeds: int, methods: Sequence[str] = (OURS,)
    ) -> dict[str, dict[str, list[Score]]]:
        """Scores by cell and method, by seed: of all methods the seeds that all have."""
        found: dict[tuple[str, str, int], Score] = {}
        tasks = []
        for seed in range(seeds):
            for cell in cells:
                missing = []
                for method in methods:
                    facts = self._kept(self._key(cell, method, seed), method)
                    if facts is None:
                        missing.append(method)
                    else:
                        found[cell.plant.name, method, seed] = Score(**facts)
                if missing:
                    tasks.append(Task(cell, seed, tuple(missing), self.terms))
        for task, scores in self.each(run_task, tasks):
            for score in scores:
                found[score.plant, score.method, score.seed] = score
                self._keep(self._key(task.cell, score.method, score.seed), score)
        return {
            cell.plant.name: {
                method: [
                    found[cell.plant.name, method, seed]
                    for seed in range(seeds)
                    if all((cell.plant.name, one, seed) in found for one in methods)
                ]
                for method in methods
            }
            for cell in cells
        }

    def facts(self, function: Callable[[T], Any], tasks: Sequence[T]) -> Iterator[dict[str, Any]]:
        """Results of ``function`` for each task."""
        missing = []
        for task in tasks:
            facts = self._kept(repr(task), OURS)
            if facts is None:
                missing.append(task)
            else:
                yield facts
        for task, found in self.each(function, missing):
            if self._ours is not None:
                self._ours.put(repr(task), found.facts())
            yield found.facts()

    def each(self, function: Callable[[T], R], tasks: Sequence[T]) -> Iterator[tuple[T, R]]:
        """Results of every task within the available time."""
        if self._processes <= 1:
            for done, task in enumerate(tasks, 1):
                if time.monotonic() > self._deadline:
                    return
                yield task, function(task)
                _tell(done, len(tasks))
            return
        context, waiting = multiprocessing.get_context("fork"), deque(tasks)
        with ProcessPoolExecutor(self._processes, context, initializer=_step_back) as pool:
            running: dict[Future[R], T] = {}
            while waiting or running:
                while (
                    waiting
                    and len(running) < 3 * self._processes
                    and time.monotonic() < self._deadline
                ):
                    task = waiting.popleft()
                    running[pool.submit(function, task)] = task
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
                    _tell(len(tasks) - len(waiting) - len(running), len(tasks))

    def _key(self, cell: Cell, method: str, seed: int) -> str:
        plant, terms = cell.plant, self.terms
        more = repr(terms) if method == OURS else f"{terms.budget}"
        return f"{plant.name} {plant.units} {method} {seed} {more}"

    def _kept(self, key: str, method: str) -> Any:
        kept = self._ours if method == OURS else self._theirs
        return None if kept is None else kept.facts.get(key)

    def _keep(self, key: str, score: Score) -> None:
        kept = self._ours if score.method == OURS else self._theirs
        if kept is not None:
            kept.put(key, score.facts())


def run_task(task: Task) -> list[Score]:
    """All methods share the seed's luck."""
    bench = Bench(task.cell.plant, task.seed, task.terms)
    return [bench.ours() if one == OURS else METHODS[one](bench) for one in task.methods]


def _tell(done: int, of: int) -> None:
    if done % 200 == 0 or done == of:
        print(f"  {done} of {of} runs", file=sys.stderr, flush=True)


def _step_back() -> None:
    os.nice(10)  # other programs have priority


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
        "claim_high_held": _rate(
            score.told_high >= score.saving for score in scores if score.told_high is not None
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
