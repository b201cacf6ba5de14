"""``wattspan report --by span``: joules a call and a token, and every joule in its place."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from testbed.joined_spans import CPU, GPU, joined
from testbed.known_totals import Books, J, an_hour_ago

from wattspan.cli import cli
from wattspan.config import StoreSettings as Settings
from wattspan.spans.aggregator import SpanAggregator
from wattspan.storage.store import Store

Report = Callable[..., Result]
TURNS = 10


host = pytest.fixture(an_hour_ago)


@pytest.fixture
def report(tmp_path: Path, host: Books) -> Report:
    def run(*arguments: str) -> Result:
        arguments = ("report", "--state-dir", str(tmp_path), "--by", "span", *arguments)
        return CliRunner().invoke(cli, arguments)

    return run


def write(state_dir: Path, host: Books, chats: int = 4, early: int = 0) -> None:
    """Ten minutes of a language model and a shop, and of a process that sends no spans."""
    totals = SpanAggregator(100)
    with closing(Store(state_dir, Settings(), host.clock)) as store:
        for turn in range(TURNS):
            host.spend({1: 100, 2: 50, 3: 10}, seconds=60)
            chat = joined("chat", {CPU: J, GPU: 9 * J}, service="llm", tokens=(128, 32))
            pay = joined("POST /pay", {CPU: 2500, GPU: 0})
            totals.add([*[chat] * chats, *[pay] * 40], host.clock.now())
            totals.outside("llm", CPU, 3 * J)
            totals.outside("shop", CPU, J if turn else early)
            shown = totals.accounts()
            store.write(replace(host.now(), spans=shown.rows, outside=shown.outside))


def test_each_name_has_its_calls_its_joules_and_its_tokens(
    tmp_path: Path, host: Books, report: Report
) -> None:
    write(tmp_path, host)
    lines = json.loads(report("--json").stdout)["lines"]
    chat, pay, *_ = lines
    assert (chat["kind"], chat["role"], chat["group"], chat["name"]) == (
        "span", "named", "llm", "chat",
    )  # fmt: skip
    assert chat["calls"] == 4 * TURNS
    assert chat["seconds"] == 4 * TURNS
    assert chat["energy_microjoules_by_type"] == {"cpu": 40 * J, "gpu": 360 * J}
    assert chat["tokens"] == {"input": 128 * 40, "output": 32 * 40}
    assert chat["joules_per_call"] == 10.0
    assert chat["joules_per_output_token"] == 10 / 32
    assert chat["joules_per_token"] == 10 / 160
    assert (pay["group"], pay["name"], pay["joules_per_call"]) == ("shop", "POST /pay", 0.0025)
    assert pay["joules_per_token"] is None


@pytest.mark.parametrize("chats", [4, 400])
@pytest.mark.parametrize("limit", ["0", "1"])
@pytest.mark.parametrize("only", [(), ("--hw-type", "gpu"), ("--hw-type", "cpu")])
def test_lines_sum_to_the_total_even_if_spans_spent_more_than_this_time_did(
    tmp_path: Path, host: Books, report: Report, chats: int, limit: str, only: tuple[str, ...]
) -> None:
    """A span's joules stand where it ended, and may have been spent before."""
    write(tmp_path, host, chats)
    facts = json.loads(report("--json", "--limit", limit, *only).stdout)
    lines = facts["lines"]
    assert sum(x["energy_microjoules"] for x in lines) == facts["total"]["energy_microjoules"]
    before = [x for x in lines if x["role"] == "earlier"]
    assert bool(before) == (chats == 400)
    assert all(x["energy_microjoules"] < 0 for x in before)


def test_spans_beyond_the_limit_are_one_row_with_calls(
    tmp_path: Path, host: Books, report: Report
) -> None:
    write(tmp_path, host)
    lines = json.loads(report("--json", "--limit", "1").stdout)["lines"]
    other = next(line for line in lines if line["role"] == "other")
    assert (other["name"], other["calls"]) == ("other spans", 40 * TURNS)
    outside = [line["group"] for line in lines if line["name"] == "outside spans"]
    assert outside == ["llm", "other"]


def test_table_is_for_people(tmp_path: Path, host: Books, report: Report) -> None:
    write(tmp_path, host)
    lines = report().stdout.splitlines()

    def cells(text: str) -> list[str]:
        (found,) = [line for line in lines if text in line]
        return found.split()

    heading = next(line for line in lines if line.startswith("service"))
    assert heading.split() == [
        *("service", "span", "calls", "cpu", "gpu", "total", "share"),
        *("J/call", "time", "tokens", "in", "out", "J/token"),
    ]
    assert cells("chat") == [
        *("llm", "chat", "40", "≥", "0.040", "≥", "0.360", "≥", "0.400", "12%"),
        *("≥", "10.0", "J", "40.0", "s", "5120", "1280", "≥", "312", "mJ"),
    ]
    assert cells("POST /pay")[-5:] == ["≥", "2.50", "mJ", "6m", "40s"]
    assert "without spans" in "\n".join(lines)


def test_token_columns_are_absent_without_tokens(
    tmp_path: Path, host: Books, report: Report
) -> None:
    write(tmp_path, host, chats=0)
    assert "tokens in" not in report().stdout


def test_csv_has_a_row_for_each_line(tmp_path: Path, host: Books, report: Report) -> None:
    write(tmp_path, host)
    rows = list(csv.DictReader(io.StringIO(report("--csv").stdout)))
    assert (rows[0]["service"], rows[0]["span"], rows[0]["calls"]) == ("llm", "chat", "40")
    assert (rows[0]["tokens_output"], rows[0]["gpu_uj"]) == ("1280", str(360 * J))
    *parts, total = rows
    assert sum(int(row["energy_uj"]) for row in parts) == int(total["energy_uj"])


def test_report_without_spans_has_a_message(tmp_path: Path, host: Books, report: Report) -> None:
    with closing(Store(tmp_path, Settings(), host.clock)) as store:
        store.write(host.spend({1: 10}))
    out = report().stdout
    assert "No span with known energy ended in this time" in out
    assert "unattributed" in out
    assert json.loads(report("--json").stdout)["lines"]


def test_span_cannot_command_the_terminal(tmp_path: Path, host: Books, report: Report) -> None:
    totals = SpanAggregator(10)
    totals.add([joined("evil\x1b[31m\n", {CPU: J})], host.clock.now())
    with closing(Store(tmp_path, Settings(), host.clock)) as store:
        store.write(replace(host.spend({1: 10}), spans=totals.accounts().rows))
    assert "\x1b" not in report().stdout
