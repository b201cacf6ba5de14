"""The table of faults: observations, gaps, deviation and recovery time of each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from testbed.faults.schedule import LIMIT, Outcome

HEAD = (
    "| fault | observation | gaps | largest deviation from the truth | recovery after |\n"
    "|---|---|---|---|---|"
)


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

    def __str__(self) -> str:
        table = "\n".join([HEAD, *map(str, self.rows)])
        means = "\n".join(f"- **{_capital(row.fault)}.** {row.means}" for row in self.rows)
        odd = [row for row in self.rows if row.how != "the whole agent"]
        how = "".join(f"- *{_capital(row.fault)}* used another method: {row.how}.\n" for row in odd)
        parts = [f"## {self.title}", f"On {self.machine}", table, how, f"Meaning:\n\n{means}"]
        return "\n\n".join(part.strip() for part in parts if part)


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


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
    body = "\n\n".join([summary(rows), *map(str, found)])
    return f"{head}{begin}\n\n{body}\n\n{end}{tail}"
