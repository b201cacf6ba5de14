"""Selection of a report's format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click
import pytest

from wattspan.cli.report.export import choose_format, report_rows
from wattspan.cli.report.table import report_lines
from wattspan.model import HwType, Provenance
from wattspan.storage.breakdown import break_down
from wattspan.storage.query import DomainTotal, HistoryExtract


def by_name(name: str, form: str | None = None) -> str:
    return choose_format(form, Path(name))


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("week.csv", "csv"),
        ("week.CSV", "csv"),
        ("week.jsonl", "jsonl"),
        ("week.parquet", "parquet"),
        ("week.txt", "table"),
        ("week", "table"),
        ("/dev/stdout", "table"),
    ],
)
def test_format_is_chosen_by_the_suffix(name: str, form: str) -> None:
    assert by_name(name) == form


def test_unknown_suffix_is_refused_with_the_formats() -> None:
    with pytest.raises(click.UsageError, match=r"table, json, jsonl, csv, parquet") as refused:
        by_name("week.xlsx")
    assert "week.xlsx: .xlsx is no format" in str(refused.value)


def test_explicit_format_overrides_the_suffix() -> None:
    assert by_name("week.xlsx", "csv") == "csv"


def test_table_names_energy_without_a_baseline() -> None:
    package = DomainTotal(
        "rapl:package-0", HwType.CPU, "package-0", Provenance.MEASURED, "cpu-time", True, True, {},
        100_000_000, 20_000_000, 0, 80_000_000, 75_000_000,
    )  # fmt: skip
    extract = HistoryExtract(0, 60, (60,), (package,), {})
    breakdown = break_down(extract, ("process",), limit=0)
    (line,) = breakdown.unattributed
    assert line.total == 80_000_000
    lines = list(report_lines(Path("store.db"), "domain", extract, breakdown, "J"))
    assert "  rapl:package-0: 75.00" in lines
    assert any("(baseline_unknown)" in line for line in lines)
    (row,) = report_rows("domain", extract, breakdown)
    assert row["baseline_unknown_uj"] == 75_000_000
    known = replace(extract, domains=(replace(package, withheld=0),))
    assert not [
        line
        for line in report_lines(Path("store.db"), "domain", known, breakdown, "J")
        if "baseline" in line
    ]
