"""Findings of ``wattspan doctor``, as values, as JSON and as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from wattspan.util.text import printable

if TYPE_CHECKING:
    from rich.console import Group


class Severity(StrEnum):
    """The mark of a finding, in ascending order."""

    OK = "ok"
    NOTE = "note"
    WARN = "warn"
    FAIL = "FAIL"


_STYLES = {
    Severity.OK: "green",
    Severity.NOTE: "bright_black",
    Severity.WARN: "yellow",
    Severity.FAIL: "red",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One examined thing: its name, its state and, if needed, a remedy."""

    mark: Severity
    what: str
    detail: str = ""
    remedy: str = ""


def ok(what: str, detail: str = "") -> Finding:
    return Finding(Severity.OK, what, detail)


def note(what: str, detail: str = "", remedy: str = "") -> Finding:
    return Finding(Severity.NOTE, what, detail, remedy)


def warning(what: str, detail: str = "", remedy: str = "") -> Finding:
    return Finding(Severity.WARN, what, detail, remedy)


def failure(what: str, detail: str = "", remedy: str = "") -> Finding:
    return Finding(Severity.FAIL, what, detail, remedy)


@dataclass(frozen=True, slots=True)
class DiagnosisSection:
    title: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings. ``readable`` is the number of counters that could be read."""

    sections: tuple[DiagnosisSection, ...]
    readable: int
    emulated: bool = False

    @property
    def marks(self) -> list[Severity]:
        return [finding.mark for section in self.sections for finding in section.findings]

    def plain(self) -> dict[str, Any]:
        """The JSON output."""
        worst = max(self.marks, key=list(Severity).index, default=Severity.OK)
        return {
            "readable_counters": self.readable,
            "worst": worst.lower(),
            "sections": [
                {
                    "title": section.title,
                    "findings": [
                        asdict(finding) | {"mark": finding.mark.lower()}
                        for finding in section.findings
                    ],
                }
                for section in self.sections
            ],
        }

    def summary(self) -> str:
        counters = "1 counter" if self.readable == 1 else f"{self.readable} counters"
        kind = " of an emulated host" if self.emulated else ""
        counts = {"failed": Severity.FAIL, "to look at": Severity.WARN}
        problems = [f"{n} {word}" for word, mark in counts.items() if (n := self.marks.count(mark))]
        text = f"{counters}{kind} can be read; {', '.join(problems) or 'nothing to do'}."
        return text if self.readable else f"{text} {NO_COUNTER_ADVICE}"


NO_COUNTER_ADVICE = (
    "No energy counter can be read here. `wattspan demo` shows all functions on an emulated host; "
    "[sources.estimate] with enabled = true and tdp_watts estimates energy from load."
)


def render(diagnosis: Diagnosis, name_width: int | None = None) -> Group:
    """The report; names longer than ``name_width`` are folded."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    def rows() -> Iterator[Table | Text]:
        for section in diagnosis.sections:
            yield Text(section.title, style="bold")
            table = Table.grid(padding=(0, 2, 0, 0))
            table.add_column(min_width=6)
            table.add_column(max_width=name_width, overflow="fold")
            table.add_column(overflow="fold")
            for finding in section.findings:
                remedy = f"\n-> {printable(finding.remedy)}" if finding.remedy else ""
                table.add_row(
                    Text(f"  {finding.mark}", style=_STYLES[finding.mark]),
                    Text(printable(finding.what)),
                    Text(printable(finding.detail) + remedy),
                )
            yield table
            yield Text()
        yield Text(diagnosis.summary())

    return Group(*rows())
