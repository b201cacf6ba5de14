"""The findings as JSON and as a table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.hostile.judge import MEGABYTE, Finding, Service, worst_service

HEAD = (
    "| attack | wedged | killed | largest size | remains | others: p99, longest "
    "| others: not served | result |\n|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Judged:
    """A finding and its defect."""

    finding: Finding
    wrong: Sequence[str]

    def __str__(self) -> str:
        one = self.finding
        _, worst = worst_service(one.others)
        requests = sum(found.requests for found in one.others.values())
        lost = sum(found.refused + found.unanswered for found in one.others.values())
        longest = max((found.worst for found in one.others.values()), default=0.0)
        result = f"**failed**: {'; '.join(self.wrong)}" if self.wrong else "withstood"
        cells = (
            one.attack,
            "yes" if one.wedged else "no",
            "yes" if one.killed else "no",
            f"{one.peak / MEGABYTE:.0f} MB" if one.peak else "unknown",
            f"{one.growth:+.0f} MB" if one.after else "unknown",
            f"{_seconds(worst.p99)}, {_seconds(longest)}",
            f"{lost} of {requests:,}",
            f"{result}{f' ({one.note})' if one.note else ''}",
        )
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if math.isfinite(seconds) else "never"


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
        return "\n\n".join([summary, f"On {self.machine} {limit}", table(self.rows)])


def table(rows: Sequence[Judged]) -> str:
    return "\n".join([HEAD, *map(str, rows)])


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


def _finite(facts: Any) -> Any:
    """JSON has no infinity: it is null."""
    if isinstance(facts, dict):
        return {key: _finite(value) for key, value in facts.items()}
    if isinstance(facts, list | tuple):
        return [_finite(one) for one in facts]
    return None if isinstance(facts, float) and math.isinf(facts) else facts


def page(text: str, chapter: str, run: Run) -> str:
    """The page with the run of a chapter between its marks."""
    begin, end = f"<!-- begin {chapter} -->", f"<!-- end {chapter} -->"
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    return f"{head}{begin}\n\n{run}\n\n{end}{tail}"
