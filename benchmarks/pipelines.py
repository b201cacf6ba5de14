"""Clocks of a pipeline, planned from a measured profile, against a linear program and all clocks.

The profile is that of GPT-3 175B on A40 GPUs, by clock, from Perseus's artifact. The linear program
is solved by SciPy, which is no requirement of this project: without it, its columns are empty.

    .venv/bin/pip install scipy && .venv/bin/python -m benchmarks.pipelines [--quick]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from itertools import pairwise

from testbed.machine import describe
from testbed.measured_pipeline import (
    BLOCKING_WATTS,
    MICROBATCHES,
    PLANNED,
    SIZES,
    STAGES,
    TIMES,
    measured_profile,
    model_of,
    small_case,
)
from testbed.pipelines import uniform_plan

from wattspan.tuning.pipeline.costs import PipelineProfile
from wattspan.tuning.pipeline.frontier import PipelineFrontier, PipelineModel
from wattspan.tuning.pipeline.plan import (
    ClockPlan,
    RankClocks,
    instruction_plan,
    target_iteration,
)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="10 small cases, no 8 x 128")
    chosen = options.parse_args()
    profile = measured_profile()
    print(describe())
    print_plans(profile)
    print_frontiers(profile, SIZES[:1] if chosen.quick else SIZES)
    print_small_cases(10 if chosen.quick else 150)


# -------------------------------------------------------------------------------- what is saved


def print_plans(profile: PipelineProfile) -> None:
    model = model_of(profile, MICROBATCHES)
    frontier = PipelineFrontier(model)
    fastest = RankClocks(model).fastest
    print(
        f"\nEnergy saved in an iteration of {STAGES} stages and {MICROBATCHES} micro-batches, 1F1B,"
        f" {BLOCKING_WATTS:g} W blocking, against the highest clock"
        f" ({fastest.seconds:.3f} s, {fastest.joules / 1e3:.2f} kJ)\n"
    )
    print(
        "| iteration at most | one clock for all | a clock for each rank | for each instruction "
        "| linear program | proven bound |"
    )
    print("|---|---|---|---|---|---|")
    for slowdown in PLANNED:
        limit = fastest.seconds * (1 + slowdown)
        wait = limit if slowdown == 0.2 else 0.0
        search = RankClocks(model, wait)
        same, own = uniform_plan(search, model, limit), search.best(limit)
        each = instruction_plan(model, frontier.at(target_iteration(frontier, limit, wait)), wait)
        point = frontier.at(limit)
        optimum = linear_program(model, limit)
        cells = [
            f"+{slowdown:.0%}{' (straggler)' if wait else ''}",
            saved(same.joules, fastest),
            saved(own.joules, fastest),
            saved(each.joules, fastest),
            saved(optimum, fastest) if optimum else "",
            saved(point.bound, fastest),
        ]
        print("| " + " | ".join(cells) + " |")


def saved(joules: float, reference: ClockPlan) -> str:
    return f"{1 - joules / reference.joules:.1%}"


# ----------------------------------------------------------------------------------- frontier


def print_frontiers(profile: PipelineProfile, sizes: Sequence[tuple[int, int]]) -> None:
    print(
        f"\nThe frontier at {TIMES} iteration times: largest excess of the energy beyond blocking"
        " (goal: 1 %), and CPU time (goal: 60 s)\n"
    )
    print("| stages x micro-batches | above the linear program | above the bound | CPU |")
    print("|---|---|---|---|")
    for stages, microbatches in sizes:
        model = model_of(profile, microbatches)
        begun = time.process_time()
        frontier = PipelineFrontier(model)
        taken = time.process_time() - begun
        span = frontier.longest - frontier.shortest
        excess, gap = [], []
        for number in range(TIMES):
            seconds = frontier.shortest + span * number / (TIMES - 1)
            point = frontier.at(min(seconds, frontier.longest))
            waiting = model.energy(0.0, point.seconds)
            gap.append((point.joules - waiting) / (point.bound - waiting) - 1)
            optimum = linear_program(model, point.seconds)
            if optimum:
                excess.append((point.joules - waiting) / (optimum - waiting) - 1)
        above = f"{max(excess):.3%}" if excess else ""
        print(f"| {stages} x {microbatches} | {above} | {max(gap):.3%} | {taken:.1f} s |")


def linear_program(model: PipelineModel, seconds: float) -> float | None:
    """The least energy of an iteration of ``seconds``, by SciPy's HiGHS; None without SciPy."""
    try:
        from scipy.optimize import linprog
        from scipy.sparse import coo_array
    except ImportError:
        return None
    count = len(model.of_instruction)
    rows: list[tuple[list[tuple[int, float]], float]] = []  # start, duration, cost of each
    for number, cost in enumerate(model.of_instruction):
        start, duration, joules = number, count + number, 2 * count + number
        rows.append(([(start, 1.0), (duration, 1.0)], seconds))
        rows += (
            ([(before, 1.0), (count + before, 1.0), (start, -1.0)], 0.0)
            for before in model.dag.predecessors[number]
        )
        for (t0, c0), (t1, c1) in pairwise(cost.vertices):
            slope = (c1 - c0) / (t1 - t0)
            rows += (([(duration, slope), (joules, -1.0)], slope * t0 - c0),)
    entries = [(row, *entry) for row, (terms, _) in enumerate(rows) for entry in terms]
    at_row, at_column, values = zip(*entries, strict=True)
    matrix = coo_array((values, (at_row, at_column)), shape=(len(rows), 3 * count)).tocsr()
    bounds = [(0.0, seconds)] * count
    bounds += [(one.shortest, one.longest) for one in model.of_instruction]
    bounds += [(None, None)] * count
    found = linprog(
        [0.0] * (2 * count) + [1.0] * count,
        A_ub=matrix,
        b_ub=[most for _, most in rows],
        bounds=bounds,
        method="highs",
    )
    if not found.success:
        raise RuntimeError(f"the linear program was not solved: {found.message}")
    return model.energy(found.fun, seconds)


# -------------------------------------------------------------------------------- small cases


def print_small_cases(cases: int) -> None:
    parts = [part for number in range(cases) for part in small_case(number)]
    best = sum(part > 1 - 1e-9 for part in parts)
    print(
        f"\nA clock for each rank against all combinations, {len(parts)} plans of {cases} simulated"
        f" pipelines: at least {min(parts):.1%} of the best saving (goal: 95 %), 100 % in {best}."
    )


if __name__ == "__main__":
    main()
