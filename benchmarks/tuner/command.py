"""The bench's command line: run it, store its results, and write them into the documentation."""

from __future__ import annotations

import argparse
import csv
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from testbed.machine import describe
from testbed.tuner import calibration
from testbed.tuner.baselines import Selector, swept
from testbed.tuner.cells import Cell, cells, quick
from testbed.tuner.run_cache import FOLDER, core_digest
from testbed.tuner.runner import Bench, Terms, drive
from testbed.tuner.stats import clopper_pearson, quantile
from testbed.tuner.trials import OURS, Trials, summary

from benchmarks.__main__ import placed
from benchmarks.tuner import plots, results, tables

BASELINES = ("sweep, lowest limit", "sweep, least energy", "static 80%")
LENGTHS = (2_000, 5_000, 10_000, 24_000, 48_000)
EXAMPLE = "a40-resnet50, CV 5 %, mild"
_PLACES = (*range(20, 2_000, 20), *range(2_000, 24_000, 100))
PAGE = Path(__file__).resolve().parents[2] / "docs" / "autotune.md"
JOBS = results.PATH.with_name("jobs.csv")


def main(words: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(words)
    began = time.monotonic()
    chosen = [one for one in cells() if not options.cells or _named(one, options.cells)]
    if options.quick:
        chosen = quick()
    if not chosen:
        sys.exit(f"no cell has {' or '.join(options.cells)!r} in its name; --list names them")
    if options.list:
        print("\n".join(cell.plant.name for cell in chosen))
        return
    wanted = options.what or (["table"] if options.quick else list(PARTS))
    for what in wanted if not options.docs else ():
        print(f"{what}: {describe()}", file=sys.stderr)
        PARTS[what](chosen, options)
        print(f"{what} is done after {time.monotonic() - began:.0f} s", file=sys.stderr)
    if options.docs:
        found = results.load(options.out)
        write_docs(found)
        plots.draw(found)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tuner", description="The tuner over whole jobs."
    )
    parser.add_argument("what", nargs="*", metavar="WHAT", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="six cells, 40 runs each")
    parser.add_argument("--cells", nargs="*", default=[], help="only those with this in their name")
    parser.add_argument("--seeds", type=int, help="runs a cell (300; 40 with --quick)")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--minutes", type=float, help="stop then, with the runs that were made")
    parser.add_argument("--anew", action="store_true", help="make even runs that were made before")
    parser.add_argument("--turn", type=float, default=0.5, help="seconds between looks")
    parser.add_argument("--only-ours", action="store_true", help="no baselines")
    parser.add_argument("--list", action="store_true", help="name the cells")
    parser.add_argument("--keep", action="store_true", help="write results.json")
    parser.add_argument("--out", type=Path, default=results.PATH)
    parser.add_argument(
        "--docs", action="store_true", help="only write docs/autotune.md and jobs.csv"
    )
    return parser


def _named(cell: Cell, parts: Sequence[str]) -> bool:
    return any(part in cell.plant.name for part in parts)


def _seeds(options: argparse.Namespace, usual: int = 300) -> int:
    return int(options.seeds or (40 if options.quick else usual))


def _trials(options: argparse.Namespace, terms: Terms | None = None) -> Trials:
    return Trials(
        None if options.anew else FOLDER,
        processes=options.processes,
        deadline=time.monotonic() + 60 * options.minutes if options.minutes else math.inf,
        terms=terms or Terms(turn=options.turn),
    )


def _table(chosen: Sequence[Cell], options: argparse.Namespace) -> None:
    trials = _trials(options)
    terms = trials.terms
    methods = (OURS,) if options.only_ours else (OURS, *BASELINES)
    found = trials.scores(chosen, _seeds(options), methods)
    if not all(found[cell.plant.name][OURS] for cell in chosen):
        sys.exit("there was not even time for one run of every cell")
    facts = {
        "machine": describe(),
        "core": core_digest(),
        "budget": terms.budget,
        "turn": terms.turn,
        "cells": [
            {
                "name": cell.plant.name,
                "group": cell.group,
                "goal": cell.goal,
                "steps_goal": cell.steps_goal,
                "null": cell.null,
                "hours": cell.plant.units * cell.plant.step / 3600,
                "methods": {
                    method: summary(scores, terms.budget)
                    for method, scores in found[cell.plant.name].items()
                },
            }
            for cell in chosen
        ],
    }
    made = {"table": facts}
    print(tables.goals(made))
    print(f"\n{tables.groups(made)}")
    if options.keep:
        results.save("table", facts, options.out)


def _lengths(chosen: Sequence[Cell], options: argparse.Namespace) -> None:
    trials = _trials(options)
    wanted = ("a40-resnet50, CV 5 %, quiet", "h100-llama, CV 5 %, mild")
    facts = []
    for cell in cells():
        if cell.plant.name not in wanted:
            continue
        for units in LENGTHS:
            name = f"{cell.plant.name}, {units}"
            longer = replace(cell, plant=replace(cell.plant, name=name, units=units))
            found = trials.scores([longer], _seeds(options, 100), (OURS, *BASELINES[:2]))
            if not found[name][OURS]:
                continue
            facts.append(
                {
                    "cell": cell.plant.name,
                    "units": units,
                    "methods": {m: summary(s, trials.terms.budget) for m, s in found[name].items()},
                }
            )
    print(results.text(facts))
    if options.keep:
        results.save("lengths", facts, options.out)


def _batches(chosen: Sequence[Cell], options: argparse.Namespace) -> None:
    cell = next(one for one in cells() if one.plant.name == EXAMPLE)
    facts = []
    for batch in (1.0, 5.0, 15.0):
        trials = _trials(options, replace(Terms(turn=options.turn), batch=batch))
        scores = trials.scores([cell], _seeds(options, 100))[cell.plant.name][OURS]
        if scores:
            methods = {OURS: summary(scores, trials.terms.budget)}
            facts.append({"cell": cell.plant.name, "batch": batch, "methods": methods})
    print(results.text(facts))
    if options.keep:
        results.save("batches", facts, options.out)


def _calibration(chosen: Sequence[Cell], options: argparse.Namespace) -> None:
    runs = _seeds(options)
    found = list(_trials(options).facts(calibration.run_task, list(calibration.tasks(runs))))
    certified = [calibration.Certification(**one) for one in found if "held" in one]
    detected = [calibration.Detection(**one) for one in found if "hidden" in one]
    facts = {"certification": _certification(certified), "detection": _detection(detected)}
    print(results.text(facts))
    if options.keep:
        for section, rows in facts.items():
            results.save(section, rows, options.out)


def _example(chosen: Sequence[Cell], options: argparse.Namespace) -> None:
    """One run in full: settings by time, and the slowdown so far."""
    cell = next(one for one in cells() if one.plant.name == EXAMPLE)
    bench = Bench(cell.plant, 0, Terms(turn=options.turn))
    base = bench.truth.base_ends
    lines = {}
    for name, job in (
        (OURS, drive(cell.plant, bench.luck, 0, bench.terms)[0]),
        (BASELINES[0], swept(bench, Selector.SLOWDOWN)[0]),
    ):
        lines[name] = {
            "set": [(0.0, cell.plant.curve.original), *((at / 3600, w) for at, w in job.log)],
            "slow": [(job.ends[at] / 3600, job.ends[at] / base[at] - 1) for at in _PLACES],
        }
    facts = {"cell": cell.plant.name, "budget": bench.terms.budget, "lines": lines}
    facts["oracle"] = bench.truth.oracle(bench.terms.budget)[0]
    if options.keep:
        results.save("example", facts, options.out)


def _zeus(chosen: Sequence[Cell], options: argparse.Namespace) -> None:
    """The real package on the same jobs, in the environment of the example applications."""
    # Only this part needs the packages of the tests.
    from testbed.tuner.zeus_optimizer import on_plants

    budget, seeds = Terms().budget, _seeds(options)
    scores = on_plants([cell.plant.name for cell in chosen], seeds, budget)
    facts = {name: summary(found, budget) for name, found in scores.items()}
    for name, one in facts.items():
        print(f"{name}: {one['over']} of {one['runs']} over, {one['slowdown']:.1%} slower")
    if options.keep:
        results.save("zeus", facts, options.out)


def _certification(found: Sequence[calibration.Certification]) -> list[dict[str, Any]]:
    rows = []
    for key in sorted({(one.slowdown, one.cv, one.remembered) for one in found}):
        same = [one for one in found if (one.slowdown, one.cv, one.remembered) == key]
        held = sum(one.held for one in same)
        rows.append(
            {
                "slowdown": key[0],
                "cv": key[1],
                "remembered": key[2],
                "runs": len(same),
                "held": held,
                "bound": clopper_pearson(held, len(same), one_sided=True)[1],
                "low": clopper_pearson(held, len(same))[0],
                "high": clopper_pearson(held, len(same))[1],
            }
        )
    return rows


def _detection(found: Sequence[calibration.Detection]) -> list[dict[str, Any]]:
    rows = []
    for key in sorted({(one.slowdown, one.hidden, one.cv) for one in found}):
        same = [one for one in found if (one.slowdown, one.hidden, one.cv) == key]
        jumped = [one for one in same if one.committed]
        released = [one for one in jumped if one.units is not None]
        sentinels = [one.sentinels or 0 for one in released]
        units = [one.units or 0 for one in released]
        seconds = [one.seconds or 0.0 for one in released]
        rows.append(
            {
                "slowdown": key[0],
                "hidden": key[1],
                "cv": key[2],
                "runs": len(jumped),
                "released": len(released),
                "early": sum(one.early for one in same),
                "sentinels": quantile(sentinels, 0.5),
                "sentinels_p90": quantile(sentinels, 0.9),
                "units": quantile(units, 0.5),
                "units_p90": quantile(units, 0.9),
                "seconds": quantile(seconds, 0.5),
                "seconds_p90": quantile(seconds, 0.9),
            }
        )
    return rows


PARTS = {
    "table": _table,
    "calibration": _calibration,
    "lengths": _lengths,
    "batches": _batches,
    "example": _example,
    "zeus": _zeus,
}


def write_docs(found: results.Results) -> None:
    """Every table of docs/autotune.md, and the figures of every job, from stored results."""
    page = PAGE.read_text(encoding="utf-8")
    for name, text in parts(found).items():
        page = placed(page, name, text)
    PAGE.write_text(page, encoding="utf-8")
    if "table" in found:
        write_jobs(tables.jobs(found))


def write_jobs(rows: Sequence[dict[str, Any]], path: Path = JOBS) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        columns = dict.fromkeys(column for row in rows for column in row)
        writer = csv.DictWriter(file, list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def parts(found: results.Results) -> dict[str, str]:
    """The tables by the names of their places."""
    return {
        f"tuner-{one.__name__}": one(found)
        for one in (tables.machine, tables.groups, tables.goals)
        if "table" in found
    }
