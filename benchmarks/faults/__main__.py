"""The complete fault schedule: an agent on an emulated host under every kind of fault.

    .venv/bin/python -m benchmarks.faults [CHAPTER ...] [--short] [--docs]

``--help`` lists the chapters; the default is all. Results are printed and, except with ``--short``,
stored next to this file; ``--docs`` writes the stored results to docs/faults.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from testbed import machine
from testbed.faults import (
    clocks,
    disk,
    ends,
    fleet,
    hanging,
    hardware,
    limits,
    packages,
    processes,
    targets,
)
from testbed.faults.schedule import Fault, undergo
from testbed.faults.stage import ROOT, Stage

from benchmarks.faults.table import Chapter, Row, load, page, save

KEPT = Path(__file__).with_name("results.json")
PAGE = ROOT / "docs" / "faults.md"


@dataclass(frozen=True)
class Course:
    """Faults of one kind, and the stage they are undergone on, one after the other."""

    title: str
    faults: Sequence[Fault]
    stage: Callable[[], Stage] = Stage
    restart: bool = True  # whether the agent is killed and restarted after each


def stage_with_clock() -> Stage:
    return Stage(environ=clocks.clock_that_can_be_set(Path(tempfile.mkdtemp())))


COURSES = {
    "counters": Course("Counters of the CPUs and memory", hardware.COUNTERS),
    "gpus": Course("GPUs and their driver", hardware.GPUS),
    "starts": Course("Starts during faults", hardware.STARTS, restart=False),
    "stops": Course("Stopped and continued programs", clocks.STOPPED),
    "clocks": Course("Clocks and sleep", clocks.WALL, stage_with_clock, restart=False),
    "processes": Course(
        "Processes", processes.FAULTS, lambda: Stage(settings=processes.ROOM), restart=False
    ),
    "disk": Course("The disk and the store", disk.FAULTS, disk.DiskStage, restart=False),
    "hanging": Course("A disk that does not answer", hanging.FAULTS, hanging.HangingStage),
    "targets": Course("Export targets", targets.FAULTS, targets.TargetStage, restart=False),
    "fleet": Course("A fleet's etcd", fleet.FAULTS, fleet.FleetStage, restart=False),
    "limits": Course("Descriptors and memory", limits.FAULTS, limits.LimitStage, restart=False),
    "packages": Course("Packages", packages.FAULTS, packages.PackageStage, restart=False),
    "ends": Course("Ends and stops", ends.FAULTS, restart=False),
}


def run(name: str, only: str = "", *, short: bool) -> Chapter:
    """Undergo the faults of one course, or those whose names have some words."""
    course, where = COURSES[name], machine.describe()
    rows = []
    print(f"\n{course.title}", flush=True)
    with course.stage() as stage:
        for fault in (one for one in course.faults if only in one.name):
            outcome = undergo(stage, fault, short=short, restart=course.restart and not short)
            rows.append(Row.of(outcome))
            print(rows[-1], flush=True)
            for wrong in outcome.wrong[2:8]:
                print(f"    {wrong}", flush=True)
    return Chapter(course.title, where, tuple(rows))


def elsewhere(name: str) -> bool:
    """True if the kept rows of a chapter were found on another machine, or on another day."""
    kept = load(KEPT).get(name)
    return kept is not None and _place(kept.machine) != _place(machine.describe())


def _place(conditions: str) -> str:
    return conditions.partition(";")[0]  # without the load


def kept_with(name: str, chapter: Chapter) -> Chapter:
    """A chapter with the rows that are kept of faults that it left out."""
    fresh = {row.fault: row for row in chapter.rows}
    kept = load(KEPT).get(name)
    known = {**{row.fault: row for row in kept.rows}, **fresh} if kept else fresh
    names = [fault.name for fault in COURSES[name].faults if fault.name in known]
    return replace(chapter, rows=tuple(known[one] for one in names))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("chapters", nargs="*", metavar="CHAPTER", help=", ".join(COURSES))
    options.add_argument("--short", action="store_true", help="seconds a fault; nothing is kept")
    options.add_argument("--only", default="", metavar="WORDS", help="faults with these words")
    options.add_argument("--docs", action="store_true", help=f"write {PAGE.name}")
    chosen = options.parse_args()
    if unknown := [name for name in chosen.chapters if name not in COURSES]:
        options.error(f"no chapter {', '.join(unknown)}; there are {', '.join(COURSES)}")
    stores = not chosen.short
    mixed = [name for name in chosen.chapters if chosen.only and stores and elsewhere(name)]
    if mixed:
        options.error(
            f"the kept rows of {', '.join(mixed)} are of another machine or day; leave out --only"
        )
    wrong = []
    for name in chosen.chapters or ([] if chosen.docs else COURSES):
        chapter = run(name, chosen.only, short=chosen.short)
        wrong += [row.fault for row in chapter.rows if row.wrong]
        if stores:
            save(KEPT, {**load(KEPT), name: kept_with(name, chapter)})
    if chosen.docs:
        kept = load(KEPT)
        found = [kept[name] for name in COURSES if name in kept]
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
    if wrong:
        sys.exit(f"not survived: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
