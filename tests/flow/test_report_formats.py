"""``wattspan report --format`` and ``--output``: the same rows in every format."""

import csv
import io
import json
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from testbed.known_totals import Books, an_hour_ago

from wattspan.cli import cli
from wattspan.cli.report import export
from wattspan.clock import SystemClock
from wattspan.config import StoreSettings as Settings
from wattspan.model import InferenceRow, Microjoules
from wattspan.storage.store import Store
from wattspan.testing import ManualClock

Report = Callable[..., Result]


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A store with ten minutes of a host with processes, written an hour ago."""
    folder = tmp_path / "state"
    folder.mkdir()
    host = an_hour_ago()
    with closing(Store(folder, Settings(), host.clock)) as store:
        for _ in range(10):
            store.write(host.spend({1: 10, 2: 5, 3: 1}, seconds=60))
    return folder


@pytest.fixture
def report(state: Path) -> Report:
    def run(*arguments: str) -> Result:
        return CliRunner().invoke(cli, ["report", "--state-dir", str(state), *arguments])

    return run


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line, parse_float=Decimal) for line in text.splitlines()]


@pytest.mark.parametrize("by", ["process", "group", "kind", "domain", "span", "model", "user"])
def test_every_format_has_the_same_rows(tmp_path: Path, report: Report, by: str) -> None:
    path = tmp_path / "r.parquet"
    lines = objects(report("--by", by, "--format", "jsonl").stdout)
    cells = list(csv.DictReader(io.StringIO(report("--by", by, "--format", "csv").stdout)))
    assert report("--by", by, "--format", "parquet", "--output", str(path)).exit_code == 0
    table = pq.read_table(path).to_pylist()
    assert lines
    assert [list(row) for row in lines] == [list(row) for row in cells] == [list(r) for r in table]
    for line, cell, row in zip(lines, cells, table, strict=True):
        assert {k: "" if v is None else str(v) for k, v in line.items()} == cell
        for name, value in line.items():
            same = float(value) if isinstance(value, Decimal) else value
            assert row[name] == same, name


@pytest.mark.parametrize(("flag", "form"), [("--json", "json"), ("--csv", "csv")])
def test_short_forms_are_the_same(report: Report, flag: str, form: str) -> None:
    assert report(flag).stdout == report("--format", form).stdout


def test_energies_in_parquet_are_whole_microjoules(tmp_path: Path, report: Report) -> None:
    path = tmp_path / "r.parquet"
    report("--output", str(path))
    schema = pq.read_schema(path)
    assert schema.field("energy_uj").type == pa.int64()
    assert schema.field("name").type == pa.string()
    facts = json.loads(report("--json").stdout)
    totals = [r["energy_uj"] for r in pq.read_table(path).to_pylist() if r["role"] == "total"]
    assert sum(totals) == facts["total"]["energy_microjoules"]


@pytest.mark.parametrize("form", ["json", "jsonl", "csv"])
def test_output_file_equals_the_printed_report(tmp_path: Path, report: Report, form: str) -> None:
    path = tmp_path / f"r.{form}"
    done = report("--output", str(path))
    assert (done.exit_code, done.stdout) == (0, "")
    printed = report("--format", form).stdout
    assert path.read_text() == printed


def test_counts_of_requests_in_parquet_are_integers(tmp_path: Path) -> None:
    host = an_hour_ago()
    energy = {"input": Microjoules(3), "output": Microjoules(4)}
    divisions = {"model": 5, "tokens": 2}
    row = InferenceRow("llm", "tiny", energy, {"input": 9, "output": 8}, divisions, ())
    with closing(Store(tmp_path, Settings(), host.clock)) as store:
        store.write(replace(host.spend({1: 10}), inference=(row,)))
    path = tmp_path / "r.parquet"
    arguments = ["report", "--state-dir", str(tmp_path), "--by", "model", "--output", str(path)]
    assert CliRunner().invoke(cli, arguments).exit_code == 0
    schema = pq.read_schema(path)
    for name in ("requests", "divided_by_model", "divided_by_tokens"):
        assert schema.field(name).type == pa.int64(), name
    first, *_ = pq.read_table(path).to_pylist()
    assert (first["requests"], first["divided_by_model"], first["divided_by_tokens"]) == (7, 5, 2)


def test_table_can_be_written_to_a_file(tmp_path: Path, report: Report) -> None:
    report("--output", str(tmp_path / "r.txt"))
    assert "unattributed" in (tmp_path / "r.txt").read_text()


def test_file_is_replaced_whole_or_not_at_all(
    tmp_path: Path, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.csv"
    path.write_text("before")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    done = report("--output", str(path))
    assert done.exit_code == 1
    assert f"Cannot write {path}: no space left on device" in done.stderr
    assert path.read_text() == "before"
    monkeypatch.undo()
    assert report("--output", str(path)).exit_code == 0
    assert path.read_text().startswith("kind,role")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.csv", "state"]


def test_pipe_is_written_to_and_not_replaced(tmp_path: Path, report: Report) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert report("--format", "csv", "--output", str(pipe)).exit_code == 0
        assert os.read(reader, 9) == b"kind,role"
    finally:
        os.close(reader)


def test_link_is_followed_and_stays(tmp_path: Path, report: Report) -> None:
    path, link = tmp_path / "r.csv", tmp_path / "newest.csv"
    path.touch()
    link.symlink_to(path)
    report("--output", str(link))
    assert link.is_symlink()
    assert path.read_text().startswith("kind,role")


def test_report_cells_are_never_formulas(tmp_path: Path) -> None:
    host = Books(ManualClock(wall=SystemClock().now().wall - 1800 * 10**9))
    opening = host.spend({1: 1})
    info = replace(opening.processes[0].info, command="=HYPERLINK(1)")
    evil = replace(opening, processes=(replace(opening.processes[0], info=info),))
    with closing(Store(tmp_path, Settings(), host.clock)) as store:
        store.write(evil)
    base = ["report", "--state-dir", str(tmp_path), "--format"]
    table = io.StringIO(CliRunner().invoke(cli, [*base, "csv"]).stdout)
    assert "'=HYPERLINK(1)" in {row["name"] for row in csv.DictReader(table)}
    lines = objects(CliRunner().invoke(cli, [*base, "jsonl"]).stdout)
    assert "=HYPERLINK(1)" in {row["name"] for row in lines}


def test_spans_of_an_emulated_host_are_labelled(tmp_path: Path) -> None:
    host = an_hour_ago(emulated=True)
    with closing(Store(tmp_path, Settings(), host.clock, emulated=True)) as store:
        store.write(host.spend({1: 10}, seconds=60))
    base = ["report", "--state-dir", str(tmp_path), "--by"]
    for by in ("span", "process", "domain"):
        printed = CliRunner().invoke(cli, [*base, by, "--format", "jsonl"]).stdout
        assert "emulated" in {row["provenance"] for row in objects(printed)}


def test_missing_pyarrow_error_names_the_remedy(
    tmp_path: Path, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "has_pyarrow", lambda: False)
    done = report("--output", str(tmp_path / "r.parquet"))
    assert done.exit_code == 1
    assert " install pyarrow`" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "r.parquet").exists()
