"""A quick comparison of the tuner's core with that of another checkout, over a dozen jobs.

Both cores run over the same jobs with the same random events, so that a change of the core is
judged in minutes: steps until a setting is held, share of the oracle's saving, runs over budget.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from testbed.tuner.cells import Cell, cells
from testbed.tuner.runner import Score, Terms
from testbed.tuner.stats import mean
from testbed.tuner.trials import Task, run_task, summary

_JOBS = (
    "v100-resnet50, CV 1 %, quiet",
    "v100-resnet50, CV 1 %, mild",
    "a40-bert, CV 1 %, mild",
    "v100-bert, CV 5 %, quiet",
    "a40-resnet50, CV 5 %, quiet",
    "h100-llama, CV 5 %, mild",
    "h100-llama, CV 10 %, mild",
    "pro-qwen14b, CV 10 %, quiet",
    "rough, CV 5 %",
    "slow settling, CV 5 %",
    "later a steeper job, CV 5 %",
    "flat, CV 5 %",
)


def chosen_cells(parts: Sequence[str]) -> list[Cell]:
    """The jobs of the comparison with one of ``parts`` in their names; all without parts."""
    compared = (one for one in cells() if one.plant.name in _JOBS or one.group == "short")
    return [one for one in compared if not parts or any(part in one.plant.name for part in parts)]


def measure(chosen: Sequence[Cell], seeds: int, terms: Terms) -> dict[str, dict[str, Any]]:
    """The figures of every job under the core that this process has imported."""
    found: dict[str, dict[str, Any]] = {}
    for cell in chosen:
        began = time.process_time()
        scores: list[Score] = []
        for seed in range(seeds):
            scores += run_task(Task(cell, seed, ("wattspan",), terms))
        figures = summary(scores, terms.budget)
        figures["cpu"] = (time.process_time() - began) / seeds
        figures["minutes"] = mean([one.hours for one in scores]) * 60
        found[cell.plant.name] = figures
    return found


def row(name: str, cores: Sequence[Mapping[str, Any]]) -> str:
    """One job as a line: each figure of every core."""

    def each(text: str) -> str:
        return " | ".join(text.format(**_shown(one)) for one in cores)

    return f"{name:38} " + each(
        "{steps:>6} ({p90:>6}) {share:>5} {slow:>6}/{most:>6} over {over} held {held:>4}"
        " alarms {false_alarms} {cpu:4.2f}s"
    )


def _shown(one: Mapping[str, Any]) -> dict[str, Any]:
    def steps(value: float | None) -> str:
        return "-" if value is None or value != value else f"{value:.0f}"

    share = one["share"]
    return {
        **one,
        "steps": steps(one["commit_units"]),
        "p90": steps(one["commit_units_p90"]),
        "share": "-" if share is None else f"{share:.0%}",
        "slow": f"{one['slowdown']:.2%}",
        "most": f"{one['slowdown_most']:.2%}",
        "held": f"{one['committed']:.0%}",
    }


def main(words: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(words)
    terms = Terms(batch=options.batch, policy=dict(map(_setting, options.policy)))
    chosen = chosen_cells(options.jobs)
    if options.json:
        print(json.dumps(measure(chosen, options.seeds, terms)))
        return
    other = _other(options) if options.beside else None
    ours = measure(chosen, options.seeds, terms)
    found = [ours]
    if other is not None:
        out, _ = other.communicate()
        if other.returncode:
            sys.exit(f"the core of {options.beside} ended with status {other.returncode}")
        found.append(json.loads(out))
    print("job: steps to hold (p90), share of the oracle, slowdown mean/most, runs over budget")
    for cell in chosen:
        print(row(cell.plant.name, [one[cell.plant.name] for one in found]))


def _setting(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    return name, int(value)


def _other(options: argparse.Namespace) -> subprocess.Popen[str]:
    """The same jobs in a process that imports the core of another checkout."""
    path = os.pathsep.join([str(options.beside / "agent"), *sys.path])
    words = ["--json", f"--seeds={options.seeds}", f"--batch={options.batch}"]
    words += [f"--jobs={part}" for part in options.jobs]
    words += [f"--policy={part}" for part in options.policy]
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.tuner.compare", *words],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tuner.compare", description="A dozen jobs, quickly."
    )
    parser.add_argument("--seeds", type=int, default=10, help="runs of a job")
    parser.add_argument("--batch", type=float, default=5.0, help="seconds between span batches")
    parser.add_argument("--beside", type=Path, help="a checkout whose core runs the same jobs")
    parser.add_argument("--jobs", action="append", default=[], help="only those with this in them")
    parser.add_argument("--policy", action="append", default=[], help="FIELD=INTEGER of the policy")
    parser.add_argument("--json", action="store_true", help="print the figures alone")
    return parser


if __name__ == "__main__":
    main()
