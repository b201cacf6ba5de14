"""The findings as JSON and as a table."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from testbed.hostile.judge import MEGABYTE, Finding, Service, worst_service
from testbed.hostile.result import Judged

HEAD = (
    "| attack | wedged | killed | largest size | remains | others: p99, longest "
    "| others: not served | result |\n|---|---|---|---|---|---|---|---|"
)
SUMMARY = (
    "| attacks | withstood | largest size | others: p99 | others: not served | notes |\n"
    "|---|---|---|---|---|---|"
)
SHARE = re.compile(r"([\d.]+) % of [\d,]+ J to the victim")
TAKEN = re.compile(r"([\d.]+) J to the attacker")
SETTLED = re.compile(r"settled in ([\d.]+) s")
P99 = re.compile(r"p99 ([\d.]+) s of 400")


@dataclass(frozen=True)
class Run:
    """All findings of one run, and how they were obtained."""

    machine: str
    limited_by: str
    rows: Sequence[Judged]

    def __str__(self) -> str:
        failed = [row.finding.attack for row in self.rows if row.wrong]
        summary = f"{len(self.rows) - len(failed)} of {len(self.rows)} attacks were withstood."
        limit = f"The agent's memory limit of 384 MiB is imposed by: {self.limited_by}."
        kinds = [[*rows] for _, rows in groupby(self.rows, key=lambda row: row.finding.topic)]
        table = "\n".join([SUMMARY, *map(_line, kinds)])
        parts = [summary, f"On {self.machine} {limit}", table, _trust(self.rows)]
        return "\n\n".join(filter(None, parts))


def _line(rows: Sequence[Judged]) -> str:
    """A row of the page: the attacks of a kind and their extremes."""
    found = [row.finding for row in rows]
    kind, named = found[0].topic, len(found) > 1
    names = [one.attack for one in found]
    notes = [f"{one.attack}: {one.note}" if named else one.note for one in found if one.note]
    if kind == "trust":  # each attack is run between users, and again between containers
        names, notes = [*dict.fromkeys(name.rpartition(", ")[0] for name in names)], []
    p99 = max(worst_service(one.others)[1].p99 for one in found)
    services = [each for one in found for each in one.others.values()]
    lost = sum(one.refused + one.unanswered for one in services)
    wrong = [f"**failed**: {row.finding.attack}" for row in rows if row.wrong]
    cells = (
        f"**{kind}**: {'; '.join(names)}",
        f"{len(rows) - len(wrong)} of {len(rows)}",
        f"{max(one.peak for one in found) / MEGABYTE:.0f} MB",
        f"{p99:.2f} s" if math.isfinite(p99) else "never",
        f"{lost:,} of {sum(one.requests for one in services):,}",
        "; ".join([*wrong, *notes]),
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _trust(rows: Sequence[Judged]) -> str:
    """The extremes of the victim's energy and of the time until its spans settle."""
    notes = "\n".join(row.finding.note for row in rows if row.finding.topic == "trust")
    shares = [float(one) for one in SHARE.findall(notes)]
    settled = [float(one) for one in SETTLED.findall(notes)]
    p99 = [float(one) for one in P99.findall(notes)]
    if not (shares and settled and p99):
        return ""
    return (
        f"The victim got at least {min(shares):.1f} % of its energy, and the attackers "
        f"{max(float(one) for one in TAKEN.findall(notes)):.0f} J of it; its spans settled after "
        f"{max(settled):.1f} s at most, of 400 spans 99 % after {max(p99):.2f} s at most."
    )


def save(path: Path, run: Run) -> None:
    facts = {
        "machine": run.machine,
        "limited_by": run.limited_by,
        "rows": [{**asdict(row.finding), "wrong": list(row.wrong)} for row in run.rows],
    }
    text = json.dumps(_finite(facts), indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def load(path: Path) -> Run:
    told = json.loads(path.read_text(encoding="utf-8"))
    return Run(told["machine"], told["limited_by"], [_judged(row) for row in told["rows"]])


def _judged(row: Mapping[str, Any]) -> Judged:
    others = {
        kind: Service(**{name: math.inf if value is None else value for name, value in one.items()})
        for kind, one in row["others"].items()
    }
    facts = {name: value for name, value in row.items() if name not in {"wrong", "others"}}
    return Judged(Finding(**facts, others=others), row["wrong"])


def page(text: str, chapter: str, run: Run) -> str:
    """The page with the run of a chapter between its marks."""
    begin, end = f"<!-- begin {chapter} -->", f"<!-- end {chapter} -->"
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    return f"{head}{begin}\n\n{run}\n\n{end}{tail}"


def _finite(facts: Any) -> Any:
    """JSON has no infinity: it is null."""
    if isinstance(facts, dict):
        return {key: _finite(value) for key, value in facts.items()}
    if isinstance(facts, list | tuple):
        return [_finite(one) for one in facts]
    return None if isinstance(facts, float) and math.isinf(facts) else facts
