"""The reference page of the fuzz targets: what they assert, their latest run and its findings."""

from __future__ import annotations

import csv
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"
HEAD = """# Fuzz targets

Every parser of external bytes has one function in `tests/fuzz/`. [Fuzz the
parsers](../how-to/fuzz.md) describes how to run the targets and how to add one. Each target asserts
that no exception except the declared one leaves the parser, that no input takes a minute or a GiB,
and the property in the third column. Hypothesis runs the targets in
`tests/property/test_fuzz_targets.py`, atheris with guidance by coverage in
`tests/flow/test_fuzz_coverage.py` and `make fuzz`; `tests/property/test_fuzz_linear.py` asserts
that a text four times as long takes less than sixteen times as long. This page is generated from
the targets (`make docs`).

CPU, executions and edges are of 22 November 2026 (`cdi-specification` and `resource-slices`: 29
November), with atheris 3.0.0 and CPython 3.11.7 on two busy x86-64 cores. *Edges* are branches of
the agent's code, the exporters', h11's, tomllib's and grpclib's that inputs took. Such a short run
shows that the targets reach into the parsers, and does not show the absence of further defects.
"""
FINDINGS = """
## Findings

Each has a test in `tests/unit/project/test_fuzz_findings.py`, and an input in
`tests/fuzz/corpus/` if one reproduces it.

| input | defect | present behaviour |
|---|---|---|"""


def page() -> str:
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    sys.path.insert(0, str(TESTS))  # the tests are no installed package
    from fuzz.registry import targets

    with (TESTS / "fuzz" / "latest_run.csv").open(encoding="utf-8", newline="") as file:
        run = {row["target"]: row for row in csv.DictReader(file)}
    yield HEAD
    yield "| target | source of the bytes | property | CPU | executions | edges |"
    yield "|---|---|---|---:|---:|---:|"
    for name, one in targets().items():
        yield f"| `{name}` | {one.whose} | {one.holds} | {_figures(run.get(name))} |"
    yield FINDINGS
    for each in tomllib.loads((TESTS / "fuzz" / "findings.toml").read_text("utf-8"))["finding"]:
        yield f"| {each['input']} | {each['defect']} | {each['now']} |"


def _figures(row: dict[str, str] | None) -> str:
    if row is None:
        return "not yet run | |"
    return f"{row['cpu_seconds']} s | {int(row['executions']):,} | {int(row['edges']):,}"
