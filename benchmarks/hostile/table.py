"""The findings as JSON and as a table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from testbed.hostile.judge import Finding, Service
from testbed.hostile.result import Judged

HEAD = (
    "| attack | wedged | killed | largest size | remains | others: p99, longest "
    "| others: not served | result |\n|---|---|---|---|---|---|---|---|"
)


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


def table(rows: Sequence[Judged]) -> str:
    return "\n".join([HEAD, *map(str, rows)])


def _finite(facts: Any) -> Any:
    """JSON has no infinity: it is null."""
    if isinstance(facts, dict):
        return {key: _finite(value) for key, value in facts.items()}
    if isinstance(facts, list | tuple):
        return [_finite(one) for one in facts]
    return None if isinstance(facts, float) and math.isinf(facts) else facts
