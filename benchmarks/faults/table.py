"""The table of faults: observations, gaps, deviation and recovery time of each."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from testbed.faults.schedule import LIMIT, Outcome

HEAD = (
    "| faults | number | deviation from the truth | longest recovery | longest without an answer "
    "| date, load |\n|---|---|---|---|---|---|"
)
PERCENT = re.compile(r"([+-][\d.]+) %")
DATE = re.compile(r"\d{4}-\d\d-\d\d")
LOAD = re.compile(r"load ([\d.]+)")


@dataclass(frozen=True)
class Row:
    """Stored fields of an outcome."""

    fault: str
    how: str
    means: str
    seen: tuple[str, ...]
    gaps: str
    deviation: str
    recovered: float | None
    wrong: tuple[str, ...]
    unanswered: float | None = None  # seconds; None if not observed

    @classmethod
    def of(cls, one: Outcome) -> Row:
        gaps = ", ".join(f"{reason} {seconds:.1f} s" for reason, seconds in one.gaps.items())
        return cls(
            one.fault.name,
            one.fault.how,
            one.fault.means,
            tuple(filter(None, [*one.seen, one.note])),
            gaps or "none",
            _deviation(one),
            one.recovered,
            tuple(one.wrong[:4]),
            round(one.unanswered, 3),
        )

    def __str__(self) -> str:
        seen = "; ".join(self.seen) or ("nothing" if self.wrong else "nothing, as expected")
        if self.unanswered is not None:
            seen += f"; at most {self.unanswered:.1f} s without an answer"
        recovered = "not" if self.recovered is None else f"{self.recovered:.1f} s"
        if self.wrong:
            recovered += f" (**failed**: {'; '.join(self.wrong[:2])})"
        cells = (self.fault, seen, self.gaps, self.deviation, recovered)
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


@dataclass(frozen=True)
class Chapter:
    """The rows of the faults of one kind, and the conditions they were found in."""

    title: str
    machine: str
    rows: tuple[Row, ...]


def _deviation(one: Outcome) -> str:
    if one.worst is None:
        return "unknown"
    worst = one.worst
    if worst.gaps > worst.seconds / 3:
        return f"{worst.told:.0f} of {worst.true:.0f} J reported, the rest in the gap"
    return f"{worst.percent:+.1f} % of {worst.true:.0f} J ({worst.domain.partition(':')[0]})"


def summary(rows: Sequence[Row]) -> str:
    """The number of survived faults, in one sentence."""
    failed = [row.fault for row in rows if row.wrong]
    times = [row.recovered for row in rows if row.recovered is not None]
    longest = f"; the longest recovery took {max(times):.1f} s of {LIMIT:g} s" if times else ""
    if failed:
        return f"{len(failed)} of {len(rows)} faults were not survived: {', '.join(failed)}."
    return f"The agent survived all {len(rows)} faults{longest}."


def load(path: Path) -> dict[str, Chapter]:
    """The chapters that were kept, by name."""
    if not path.exists():
        return {}
    return {
        name: Chapter(
            one["title"],
            one["machine"],
            tuple(
                Row(**{**row, "seen": tuple(row["seen"]), "wrong": tuple(row["wrong"])})
                for row in one["rows"]
            ),
        )
        for name, one in json.loads(path.read_text(encoding="utf-8")).items()
    }


def save(path: Path, chapters: Mapping[str, Chapter]) -> None:
    facts = {name: asdict(chapter) for name, chapter in chapters.items()}
    path.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def page(text: str, chapters: Iterable[Chapter]) -> str:
    """The page with the results between its marks."""
    begin, end = "<!-- begin faults -->", "<!-- end faults -->"
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    found = list(chapters)
    rows = [row for chapter in found for row in chapter.rows]
    places = dict.fromkeys(chapter.machine.partition(";")[0] for chapter in found)
    methods: dict[str, list[str]] = {}
    for row in rows:
        if row.how != "the whole agent":
            methods.setdefault(row.how, []).append(row.fault)
    parts = [
        summary(rows),
        "\n".join([HEAD, *map(_line, found)]),
        "Machines: " + "; ".join(places) + ".",
        "\n".join(f"- *{'; '.join(names)}*: {how}." for how, names in methods.items()),
    ]
    body = "\n\n".join(filter(None, parts))
    return f"{head}{begin}\n\n{body}\n\n{end}{tail}"


def _line(chapter: Chapter) -> str:
    """A row of the page: a chapter's faults and their extremes."""
    told = [float(one[1]) for row in chapter.rows if (one := PERCENT.match(row.deviation))]
    unanswered = [row.unanswered for row in chapter.rows if row.unanswered is not None]
    recovered = [row.recovered for row in chapter.rows if row.recovered is not None]
    date, load = DATE.search(chapter.machine), LOAD.search(chapter.machine)
    cells = (
        f"**{chapter.title}**: {'; '.join(row.fault for row in chapter.rows)}",
        str(len(chapter.rows)),
        f"{min(told):+.1f} to {max(told):+.1f} %" if told else "-",
        f"{max(recovered):.1f} s" if recovered else "-",
        f"{max(unanswered):.1f} s" if unanswered else "-",
        f"{date[0] if date else '-'}, {load[1] if load else '-'}",
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
