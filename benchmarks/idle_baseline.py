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
    SCENARIOS,
    Run,
    run,
    wandering,
)

SHOWN = ((30, 40), (60, 70))  # seconds


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, default=9)
    options.add_argument("--quick", action="store_true", help="three seeds")
    chosen = options.parse_args()
    seeds = range(3 if chosen.quick else chosen.seeds)
    first, *others = LAWS
    print(
        f"Emulated, {len(seeds)} runs each: error of the energy of processes, "
        f"median (largest), beside a load of {MEAN_LOAD:.0%} of {CPUS} CPUs. Truth: a {first} of "
        f"power over load, or another law ({', '.join(others)}: range).\n"
    )
    periods = [f"{start} to {end} s" for start, end in SHOWN]
    titles = [f"{first}: idle power known after", *periods, f"other laws: {periods[-1]}"]
    print(f"| load | {' | '.join(titles)} |")
    print("|---|" + "---|" * len(titles))
    rows = [(name, scenario, False) for name, scenario in SCENARIOS.items()]
    rows.append(("variation of 5 %, idle states", wandering(0.05), True))
    for name, scenario, idle_states in rows:
        straight, *curved = [
            [run(scenario, law, seconds=120, seed=seed, idle_states=idle_states) for seed in seeds]
            for law in LAWS.values()
        ]
        cells = [_known(straight)]
        for period in SHOWN:
            errors = [one.error(*period) for one in straight]
            cells.append(f"{statistics.median(errors):+.1%} ({max(map(abs, errors)):.1%})")
        errors = [one.error(*SHOWN[-1]) for runs in curved for one in runs]
        cells.append(f"{min(errors):+.1%} to {max(errors):+.1%}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def _known(runs: Sequence[Run]) -> str:
    known = [one.known_after for one in runs if one.known_after is not None]
    after = f"{statistics.median(known):.0f} s" if known else "never"
    return f"{after} in {len(known)} of {len(runs)}" if 0 < len(known) < len(runs) else after


if __name__ == "__main__":
    main()
