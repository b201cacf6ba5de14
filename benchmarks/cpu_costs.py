"""Error of process energy where what a CPU-second costs differs by process, against known truth.

Everything is emulated in virtual time: no process runs and no hardware is read. The truth is the
energy that each process owes by the rule that its plant states (testbed/cpu_plants.py), for the
agent and its peers alike: costs of a CPU-second by process, pairs of siblings, turbo, uncore,
memory traffic, leakage. The counter has the updates and the noise of RAPL; CPU time is known up to
the last scheduler tick. The real ledger and energy history read these figures, with performance
counters and without.

The two processes 1 : 2.5 use 60 % of the CPUs, and their sum varies by 10 %. Never at rest, they
are a host like those of benchmarks/idle_baseline.py, which has one process and more laws of load.

    .venv/bin/python -m benchmarks.cpu_costs [--seeds N] [--only WORD]
"""

from __future__ import annotations

import argparse

from testbed.cpu_costs import AGENT, COUNTED, JUDGED, LEARNING, SCENARIOS, judge
from testbed.cpu_judge import RULES, Score


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, default=20)
    options.add_argument("--only", default="", help="plants and rows with this word")
    chosen = options.parse_args()
    print(
        f"Emulated in virtual time, {chosen.seeds} runs each: 95th percentile, over processes and "
        f"runs, of the error of a process's active energy over {JUDGED} s after {LEARNING} s of "
        "work.\n"
    )
    titles = ["law of the truth", "processes", "goal", AGENT, COUNTED, *RULES]
    print("| " + " | ".join(titles) + " |")
    print("|---|---|---|" + "---:|" * (len(titles) - 3))
    for scenario in SCENARIOS:
        known = [scenario.plant.name, *(row.title for row in scenario.rows)]
        if not any(chosen.only in one for one in known):
            continue
        for row, scores in judge(scenario, range(chosen.seeds)):
            cells = [row.title, row.goal, *(_judged(scores[name]) for name in (AGENT, COUNTED))]
            cells += [_error(scores[name]) for name in RULES]
            print(f"| {scenario.plant.name} | " + " | ".join(cells) + " |", flush=True)


def _judged(score: Score) -> str:
    """The error of the agent, a mark for lower bounds, and the truth inside its stated range."""
    mark = "↓" if score.lower_bounds else ""
    return f"{_error(score)}{mark}, {score.contained / len(score.errors):.0%}"


def _error(score: Score) -> str:
    return f"{score.p95:.1%}" if score.errors else "–"


if __name__ == "__main__":
    main()
