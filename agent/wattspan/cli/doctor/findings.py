"""Findings of ``wattspan doctor``, as values, as JSON and as text."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from wattspan.model import Domain
from wattspan.util.text import printable

if TYPE_CHECKING:
    from rich.console import Group


class Severity(StrEnum):
    """The mark of a finding, in ascending order."""

    OK = "ok"
    NOTE = "note"
    WARN = "warn"
    FAIL = "fail"


_STYLES = {
    Severity.OK: "green",
    Severity.NOTE: "bright_black",
    Severity.WARN: "yellow",
    Severity.FAIL: "red",
}


class Finding(Struct, frozen=True, forbid_unknown_fields=True):
    """One examined thing: its name, its state and, if needed, a remedy."""

    mark: Severity
    what: str
    detail: str = ""
    remedy: str = ""


@cache
def catalogue() -> dict[str, Finding]:
    """The findings of ``findings.toml`` by code, with the names of facts in their texts."""
    declarations = Path(__file__).with_name("findings.toml").read_bytes()
    return msgspec.toml.decode(declarations, type=dict[str, Finding])


def declared(code: str, **facts: object) -> Finding:
    """The finding of the catalogue with ``code`` and the ``facts`` that its texts name."""
    entry = catalogue()[code]
    texts = (entry.what, entry.detail, entry.remedy)
    return Finding(entry.mark, *(text.format_map(facts) for text in texts))


ok = partial(Finding, Severity.OK)
note = partial(Finding, Severity.NOTE)
warning = partial(Finding, Severity.WARN)
failure = partial(Finding, Severity.FAIL)


class Diagnosis(Struct, frozen=True):
    """All findings by section, and the measured domains.

    ``readable`` is the number of counters that could be read.
    """

    sections: dict[str, list[Finding]]
    readable: int
    emulated: bool = False
    domains: tuple[Domain, ...] = ()

    @property
    def marks(self) -> list[Severity]:
        return [finding.mark for findings in self.sections.values() for finding in findings]

    def plain(self) -> dict[str, Any]:
        """The JSON output."""
        return {
            "readable_counters": self.readable,
            "worst": max(self.marks, key=list(Severity).index, default=Severity.OK),
            "sections": [
                {"title": title, "findings": msgspec.to_builtins(findings)}
                for title, findings in self.sections.items()
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
        for title, findings in diagnosis.sections.items():
            yield Text(title, style="bold")
            table = Table.grid(padding=(0, 2, 0, 0))
            table.add_column(min_width=6)
            table.add_column(max_width=name_width, overflow="fold")
            table.add_column(overflow="fold")
            for finding in findings:
                mark = "FAIL" if finding.mark is Severity.FAIL else finding.mark
                remedy = f"\n-> {printable(finding.remedy)}" if finding.remedy else ""
                table.add_row(
                    Text(f"  {mark}", style=_STYLES[finding.mark]),
                    Text(printable(finding.what)),
                    Text(printable(finding.detail) + remedy),
                )
            yield table
            yield Text()
        yield Text(diagnosis.summary())

    return Group(*rows())
