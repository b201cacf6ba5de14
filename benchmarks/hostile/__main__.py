"""The schedule of attacks: other users against an agent and a capper on an emulated host.

    .venv/bin/python -m benchmarks.hostile [--only WORDS] [--quick] [--json FILE] [--docs]

Needs root. It exits with 1 if an attack was not withstood. The result of each chapter that was run
whole, without --quick, is stored next to this file: `--only trust` is one of them. --docs writes
the stored results to docs/reference/attacks.md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from testbed import machine
from testbed.hostile import capping, intake, trust
from testbed.hostile.judge import Finding
from testbed.hostile.result import Judged
from testbed.hostile.schedule import Attack, Chapter, Terms, judged
from testbed.hostile.stage import HostileStage

from benchmarks import ROOT
from benchmarks.hostile.table import HEAD, Run, load, page, save
from wattspan.ports import WattspanError

HERE = Path(__file__).parent
PAGE = ROOT / "docs" / "reference" / "attacks.md"
CHAPTERS = [
    Chapter("attacks", HERE / "results.json", [*intake.ATTACKS, *capping.ATTACKS]),
    Chapter("trust", HERE / "trust.json", trust.ATTACKS),
]
ATTACKS = [one for chapter in CHAPTERS for one in chapter.attacks]


def chosen(only: Sequence[str]) -> list[Attack]:
    """The attacks whose name or topic has some of the words; all without words."""
    return [
        one
        for one in ATTACKS
        if not only or any(word in one.name or word == one.topic for word in only)
    ]


def run(attacks: Sequence[Attack], terms: Terms) -> Run:
    where, limited_by = machine.describe(), ""
    rows: list[Judged] = []
    print(f"On {where}\n\n{HEAD}", flush=True)
    for _, group in groupby(attacks, key=lambda one: one.stage):
        todo = list(group)
        while todo:
            with todo[0].stage() as stage:
                limited_by = stage.limited_by
                for row in on_stage(stage, todo, terms):
                    rows.append(row)
                    print(row, flush=True)
    return Run(where, limited_by, rows)


def on_stage(stage: HostileStage, todo: list[Attack], terms: Terms) -> Iterator[Judged]:
    """Run attacks, which are taken from ``todo``; no more on a stage that one has broken."""
    while todo:
        attack = todo.pop(0)
        try:
            yield judged(stage, attack, terms)
        except (OSError, RuntimeError, WattspanError, subprocess.SubprocessError) as error:
            told = f"the schedule was broken off: {str(error)[:300]}"
            yield Judged(Finding(attack.name, attack.topic, 0.0), [told])
            return


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    topics = ", ".join(dict.fromkeys(one.topic for one in ATTACKS))
    options.add_argument(
        "--only", action="append", default=[], metavar="WORDS",
        help=f"attacks with these words, or of a topic: {topics}",
    )  # fmt: skip
    options.add_argument("--quick", action="store_true", help="seconds an attack; nothing is kept")
    options.add_argument("--json", type=Path, metavar="FILE", help="write the findings")
    options.add_argument(
        "--docs", action="store_true", help=f"write {PAGE.name} and do nothing else"
    )
    options.add_argument("--seed", type=int, default=1, help="of the random choices")
    told = options.parse_args()
    if told.docs:
        text = PAGE.read_text(encoding="utf-8")
        for chapter in CHAPTERS:
            text = page(text, chapter.name, load(chapter.kept))
        PAGE.write_text(text, encoding="utf-8")
        return
    if os.geteuid() != 0:
        options.error("the attackers are other users: run this as root")
    attacks = chosen(told.only)
    if not attacks:
        options.error(f"no attack has these words: {', '.join(told.only)}")
    result = run(attacks, Terms(told.quick, told.seed))
    if told.json is not None:
        save(told.json, result)
    for chapter in CHAPTERS:
        names = {one.name for one in chapter.attacks}
        rows = [row for row in result.rows if row.finding.attack in names]
        if not told.quick and len(rows) == len(names):
            save(chapter.kept, replace(result, rows=rows))
    if failed := [row.finding.attack for row in result.rows if row.wrong]:
        sys.exit(f"not withstood: {', '.join(failed)}")


if __name__ == "__main__":
    main()
