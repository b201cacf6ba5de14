"""What `wattspan doctor` finds, as values, and how it reads at three in the morning."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from wattspan.util.text import printable


class Severity(StrEnum):
    """How bad it is. The words stand on the line, so colour is not needed to read them."""

    OK = "ok"
    NOTE = "note"
    WARN = "warn"
    FAIL = "FAIL"


COLOURS = {
    Severity.OK: "green",
    Severity.NOTE: "bright_black",
    Severity.WARN: "yellow",
    Severity.FAIL: "red",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at: what, what is the matter with it, and what to do about it."""

    mark: Severity
    what: str
    detail: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class DiagnosisSection:
    title: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything that was looked at. ``readable`` is how many counters gave a figure."""

    sections: tuple[DiagnosisSection, ...]
    readable: int
    emulated: bool = False

    @property
    def worst(self) -> Severity:
        marks = [finding.mark for section in self.sections for finding in section.findings]
        return max(marks, key=list(Severity).index, default=Severity.OK)

    def count(self, mark: Severity) -> int:
        return sum(f.mark is mark for section in self.sections for f in section.findings)

    def plain(self) -> dict[str, Any]:
        """As facts for JSON."""
        return {
            "readable_counters": self.readable,
            "worst": self.worst.lower(),
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


NO_COUNTER_ADVICE = (
    "No energy counter can be read here. `wattspan demo` shows everything on an emulated host; "
    "[sources.estimate] with enabled = true and tdp_watts estimates from load, and says so."
)


@dataclass(frozen=True, slots=True)
class DiagnosisLine:
    """One line of the report; ``mark`` is set where a mark is to be coloured."""

    text: str
    mark: Severity | None = None
    heading: bool = False


_INDENT = 8


def diagnosis_lines(diagnosis: Diagnosis, width: int) -> Iterator[DiagnosisLine]:
    """The report, at most ``width`` wide where words allow it."""
    for section in diagnosis.sections:
        yield DiagnosisLine(section.title, heading=True)
        column = _column(section, width)
        for finding in section.findings:
            yield from _finding(finding, column, width)
        yield DiagnosisLine("")
    yield from (DiagnosisLine(text) for text in _summary(diagnosis, width))


def _column(section: DiagnosisSection, width: int) -> int:
    """Where the details of a section begin: behind the longest name that is not too long."""
    names = [len(f.what) for f in section.findings if f.detail and len(f.what) <= width // 3]
    return _INDENT + max(names, default=0) + 2


def _finding(finding: Finding, column: int, width: int) -> Iterator[DiagnosisLine]:
    head = f"{printable(finding.what):{max(0, column - _INDENT - 2)}}"
    if finding.detail and len(head) <= max(0, column - _INDENT - 2):
        text = f"{head}  {printable(finding.detail)}"
        wrapped = textwrap.wrap(text, width - _INDENT, subsequent_indent=" " * (column - _INDENT))
    else:  # a long name, a path most of the time: the detail continues it
        joined = ": ".join(printable(part) for part in (finding.what, finding.detail) if part)
        wrapped = textwrap.wrap(joined, width - _INDENT, break_long_words=False)
    first, *rest = wrapped or [""]
    yield DiagnosisLine(f"  {finding.mark:<4}  {first}", finding.mark)
    for text in rest:
        yield DiagnosisLine(" " * _INDENT + text)
    if finding.remedy:
        for text in textwrap.wrap(
            f"-> {printable(finding.remedy)}",
            width - _INDENT,
            subsequent_indent="   ",
            break_long_words=False,
        ):
            yield DiagnosisLine(" " * _INDENT + text)


def _summary(diagnosis: Diagnosis, width: int) -> list[str]:
    readable = diagnosis.readable
    counters = "1 counter" if readable == 1 else f"{readable} counters"
    kind = " of an emulated host" if diagnosis.emulated else ""
    failed, warned = diagnosis.count(Severity.FAIL), diagnosis.count(Severity.WARN)
    trouble = [f"{n} {word}" for n, word in ((failed, "failed"), (warned, "to look at")) if n]
    told = f"{counters}{kind} can be read; {', '.join(trouble) or 'nothing to do'}."
    return textwrap.wrap(told if readable else f"{told} {NO_COUNTER_ADVICE}", width)
