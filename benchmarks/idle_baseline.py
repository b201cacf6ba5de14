"""Error of process energy on a CPU that never rests, from the start of the agent.

Everything is emulated in virtual time: no process runs and no counter is read. A socket of eight
CPUs is loaded to 60 % on average, from the first second. Its power over load is a straight line,
the curve of Fan et al. (see wattspan.attribution.power_curve), or one of two laws that the agent's
regression does not contain: a saturating one, and one with clocks that rise with load. The counter
is updated every millisecond; CPU time is known up to the last scheduler tick, 4 ms, of each
running thread, and is read 2 ms after the counter. The real ledger divides the energy.

    .venv/bin/python -m benchmarks.idle_baseline [--seeds N] [--quick]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

from testbed.idle_baseline import (
    CPUS,
    LAWS,
    MEAN_LOAD,
    PERIODS,
    SCENARIOS,
    Run,
    resting,
    run,
    steady,
    wandering,
)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, default=9)
    options.add_argument("--quick", action="store_true", help="three seeds")
    chosen = options.parse_args()
    seeds = range(3 if chosen.quick else chosen.seeds)
    print(
        f"Emulated in virtual time, {len(seeds)} runs each: median and range of the error of the "
        f"energy of processes, beside a load of {MEAN_LOAD:.0%} of {CPUS} CPUs from the start.\n"
    )
    titles = [f"{start} to {end} s" for start, end in PERIODS]
    print(f"| load | power over load | idle power known after | {' | '.join(titles)} |")
    print("|---|---|---|" + "---|" * len(titles))
    for name, scenario in SCENARIOS.items():
        for law_name, law in LAWS.items():
            runs = [run(scenario, law, seconds=120, seed=seed) for seed in seeds]
            print(_row(name, law_name, runs), flush=True)
    for law_name, law in LAWS.items():
        runs = [
            run(wandering(0.05), law, seconds=120, seed=seed, idle_states=True) for seed in seeds
        ]
        print(_row("variation of 5 %, idle states read", law_name, runs), flush=True)
    for law_name, law in LAWS.items():
        runs = []
        for seed in seeds:
            before = run(resting, law, seconds=40, seed=seed).checkpoint
            runs.append(run(steady, law, seconds=120, seed=100 + seed, checkpoint=before))
        print(_row("no variation, idle power remembered", law_name, runs), flush=True)


def _row(name: str, law: str, runs: Sequence[Run]) -> str:
    known = [one.known_after for one in runs if one.known_after is not None]
    after = f"{statistics.median(known):.0f} s" if known else "never"
    if known and len(known) < len(runs):
        after += f" in {len(known)} of {len(runs)}"
    cells = []
    for period in PERIODS:
        errors = [one.error(*period) for one in runs]
        low, middle, high = min(errors), statistics.median(errors), max(errors)
        cells.append(f"{middle:+.1%} ({low:+.1%} to {high:+.1%})")
    return f"| {name} | {law} | {after} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
