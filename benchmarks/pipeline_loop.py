"""Sessions of running pipelines in virtual time: slowdown, and saving against the best clocks.

    .venv/bin/python -m benchmarks.pipeline_loop [--runs 300] [--seconds 50]

A run is kept in build/pipeline_loop.jsonl and not repeated while the code is the same, so that
``--seconds`` can divide the work. The best clocks are one for each rank, searched with the true
costs within the same budget, and measured with the noise of the same run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from testbed.machine import describe
from testbed.measured_pipeline import BLOCKING_WATTS, STAGES, measured_profile, small_model
from testbed.tuner.stats import clopper_pearson

from benchmarks.pipeline_plant import (
    PipelineLoad,
    Straggler,
    fixed_run,
    interpolated,
    run,
)
from wattspan.tuning.pipeline.costs import ClockPoint, PipelineProfile
from wattspan.tuning.pipeline.dag import PipelineSchedule, scheduled
from wattspan.tuning.pipeline.frontier import PipelineModel
from wattspan.tuning.pipeline.plan import RankClocks

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "build/pipeline_loop.jsonl"
CODE = (
    "agent/wattspan/tuning/pipeline/*.py",
    "agent/wattspan/tuning/decisions/*.py",
    "benchmarks/pipeline_plant.py",
    "testbed/measured_pipeline.py",
)
KEYS = ("code", "group", "iterations", "seed")
BUDGET = 0.01
STEP = 15
FIXED_ITERATIONS = 200
SIMULATED, LONG = "simulated", "simulated, long"
MEASURED, STRAGGLING = "A40 GPT-3", "simulated, with a straggler"


class Group(NamedTuple):
    """Runs of one kind; the part ``runs`` of the number of runs."""

    name: str
    iterations: int
    runs: float
    straggler: Straggler | None = None


GROUPS = (
    Group(SIMULATED, 1000, 1.0),
    Group(STRAGGLING, 1000, 0.05, Straggler(500, 800, 1.2)),
    Group(MEASURED, 3000, 0.01),
    Group(LONG, 3000, 0.05),
)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--runs", type=int, default=300)
    options.add_argument("--seconds", type=float, default=float("inf"), help="start no run later")
    chosen = options.parse_args()
    begun = time.monotonic()
    digest, known = code_digest(), kept()
    KEPT.parent.mkdir(exist_ok=True)
    complete = True
    with KEPT.open("a", encoding="utf-8") as file:
        for group in GROUPS:
            for seed in range(round(group.runs * chosen.runs)):
                key = digest, group.name, group.iterations, seed
                if key in known:
                    continue
                if time.monotonic() - begun > chosen.seconds:
                    complete = False
                    break
                facts = dict(zip(KEYS, key, strict=True)) | measured(group, seed)
                known[key] = facts
                file.write(json.dumps(facts) + "\n")
                file.flush()
    print(describe())
    print_table([one for key, one in known.items() if key[0] == digest])
    if not complete:
        print("\nIncomplete: runs are missing.")


def measured(group: Group, seed: int) -> dict[str, Any]:
    load = measured_load() if group.name == MEASURED else simulated_load(seed)
    found = run(load, BUDGET, group.iterations, seed, group.straggler)
    slowdown, saving = fixed_run(load, best_clocks(load), FIXED_ITERATIONS, seed)
    return {**found._asdict(), "best_slowdown": slowdown, "best_saving": saving}


@cache
def measured_load() -> PipelineLoad:
    """GPT-3 175B on A40 GPUs with few micro-batches: an iteration of 6 s."""
    dag = scheduled(PipelineSchedule.ONE_F_ONE_B, STAGES, STAGES)
    return PipelineLoad(MEASURED, dag, measured_profile(), BLOCKING_WATTS)


def simulated_load(number: int) -> PipelineLoad:
    """A simulated pipeline with clocks in steps of a GPU."""
    model = small_model(number)
    clocks = range(model.clocks[-1], model.clocks[0] - 1, -STEP)
    points = {}
    for key, cost in model.costs.items():
        known = sorted(cost.points)
        points[key] = [
            ClockPoint(mhz, seconds, seconds * watts)
            for mhz in clocks
            for seconds, watts in (interpolated(known, mhz),)
        ]
    return PipelineLoad(SIMULATED, model.dag, PipelineProfile(points), BLOCKING_WATTS)


def best_clocks(load: PipelineLoad) -> tuple[int, ...]:
    search = RankClocks(PipelineModel(load.dag, load.profile, load.blocking_watts))
    return search.best(search.fastest.seconds * (1 + BUDGET)).clocks


def print_table(results: list[dict[str, Any]]) -> None:
    print(
        f"\nSlowdown (budget: {BUDGET:.0%}) and saving of whole runs in virtual time; share of the"
        " best clocks' saving\n"
    )
    print(
        "| pipelines | runs x iterations | above the budget (95 % bound) | slowdown, mean / most"
        " | saving | share, mean / least |"
    )
    print("|---|---|---|---|---|---|")
    for group in GROUPS:
        known = group.name, group.iterations
        of = [one for one in results if (one["group"], one["iterations"]) == known]
        if of:
            print("| " + " | ".join(row(group, of)) + " |")
    late = [one for one in results if one["group"] == STRAGGLING]
    if late:
        print(
            f"\nBeside a straggler for 300 iterations, {len(late)} runs had its clocks for"
            f" {fmean(one['followed'] for one in late):.0f} of them on average, and for"
            f" {sum(one['late'] for one in late)} after its end was received."
        )


def row(group: Group, of: list[dict[str, Any]]) -> Iterator[str]:
    over = sum(one["slowdown"] > BUDGET for one in of)
    saving, best = (fmean(one[name] for one in of) for name in ("saving", "best_saving"))
    yield group.name
    yield f"{len(of)} x {group.iterations}"
    bound = clopper_pearson(over, len(of), one_sided=True)[1]
    yield f"{over}/{len(of)} ({percent(bound, 2)})"
    yield " / ".join(
        percent(figure, 2)
        for figure in (fmean(one["slowdown"] for one in of), max(one["slowdown"] for one in of))
    )
    yield percent(saving, 1)
    if group.straggler is not None:
        yield ""  # the best clocks do not know of the straggler
    else:
        least = min(one["saving"] / one["best_saving"] for one in of)
        yield f"{percent(saving / best, 0)} / {percent(least, 0)}"


def percent(value: float, digits: int) -> str:
    return f"{100 * value:.{digits}f}%"


def code_digest() -> str:
    digest = hashlib.sha256()
    for pattern in CODE:
        for path in sorted(ROOT.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def kept() -> dict[tuple[Any, ...], dict[str, Any]]:
    if not KEPT.exists():
        return {}
    lines = KEPT.read_text(encoding="utf-8").splitlines()
    return {tuple(one[key] for key in KEYS): one for one in map(json.loads, lines)}


if __name__ == "__main__":
    main()
