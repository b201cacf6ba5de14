"""Selection of a report's format."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from wattspan.cli.report.export import choose_format


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
