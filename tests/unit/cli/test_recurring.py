"""``wattspan recurring`` with a file of runs, as a shell script uses it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from testbed.process_rights import without_root

from wattspan.cli import cli
from wattspan.recurring.run_book import MAX_SHOWN

TERMS = ("--batch-sizes", "16,64,32", "--default", "32", "--target", "0.8", "--max-epochs", "10")
END = ("--joules", "5000", "--seconds", "10", "--power", "700", "--epochs", "3")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "runs.sqlite"


def run(store: Path, *arguments: str) -> Result:
    result = CliRunner().invoke(cli, ["recurring", *arguments, "--store", str(store)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def refused(store: Path, *arguments: str) -> str:
    """The message of a command that fails."""
    result = run(store, *arguments)
    assert result.exit_code == 1
    return result.stderr


def facts(store: Path, *arguments: str) -> Any:
    return json.loads(run(store, *arguments, "--json").output)


def test_next_prints_the_batch_size_alone(store: Path) -> None:
    assert run(store, "next", "nightly", *TERMS).output == "32\n"


def test_reported_runs_lead_to_the_next_sizes(store: Path) -> None:
    sizes = []
    for outcome in ("reached", "missed", "reached"):
        terms = TERMS if not sizes else ()
        sizes.append(run(store, "next", "nightly", *terms).output.strip())
        assert run(store, "report", "nightly", outcome, *END).output == "Recorded.\n"
    assert sizes == ["32", "16", "64"]
    text = run(store, "status").output
    assert "nightly: 3 runs, pruning" in text
    assert "batch size" in text
    assert "5.00 kJ" in text
    assert "not worth its cost" in text


def test_status_as_json_has_the_sizes(store: Path) -> None:
    begun = facts(store, "next", "nightly", *TERMS)
    ended = facts(store, "report", "nightly", "reached", *END, "--run", str(begun["run"]))
    assert ended["recorded"]
    (job,) = facts(store, "status", "nightly")["jobs"]
    assert job["sizes"][1] == {
        "batch_size": 32,
        "runs": 1,
        "reached": 1,
        "running": 0,
        "lost": 0,
        "cost_joules": 6000.0,
        "energy_joules": 5000.0,
    }


def test_runs_in_the_head_of_a_status_are_those_of_its_rows(store: Path) -> None:
    run(store, "next", "nightly", *TERMS)
    run(store, "report", "nightly", "reached", *END)
    size = run(store, "next", "nightly").output.strip()
    head, titles, *rows = run(store, "status", "nightly").output.splitlines()
    assert f"2 runs (1 running with batch size {size}), pruning: " in head
    assert titles.split() == ["batch", "size", "runs", "reached", "cost/run", "energy/run"]
    counts = [int(row.split()[1]) for row in rows if row.split()[0].isdigit()]
    assert sum(counts) == 2
    assert any(row.startswith("The cost is 0.5 x energy + 0.5 x time") for row in rows)
    assert "not been tried" not in rows[-1]


def test_status_of_one_run_is_singular(store: Path) -> None:
    run(store, "next", "nightly", *TERMS, "--eta", "1")
    text = run(store, "status", "nightly").output
    assert "nightly: 1 run (1 running with batch size 32), pruning" in text
    assert "The cost is" not in text


def test_status_counts_the_jobs_that_it_does_not_show(store: Path) -> None:
    for number in range(MAX_SHOWN + 2):
        run(store, "next", f"job {number}", *TERMS)
    assert "2 further jobs have older runs" in run(store, "status").output
    assert "further" not in run(store, "status", "job 0").output


def test_second_report_of_a_run_does_not_count(store: Path) -> None:
    begun = facts(store, "next", "nightly", *TERMS)
    number = ("--run", str(begun["run"]))
    run(store, "report", "nightly", "reached", *END, *number)
    assert "recorded before" in run(store, "report", "nightly", "missed", *END, *number).output
    assert "no open run" in refused(store, "report", "nightly", "reached", *END)


def test_forgotten_job_is_gone(store: Path) -> None:
    run(store, "next", "nightly", *TERMS)
    assert run(store, "forget", "nightly").output == "The runs of nightly are deleted.\n"
    assert "no recurring jobs yet" in run(store, "status").output
    assert "no recurring job of that name" in refused(store, "forget", "nightly")


@pytest.mark.parametrize(
    "words", [("status",), ("status", "nightly"), ("forget", "nightly"),
              ("report", "nightly", "reached", *END)]
)  # fmt: skip
def test_file_of_runs_that_does_not_exist_is_named_and_not_made(
    store: Path, words: tuple[str, ...]
) -> None:
    assert f"There is no file {store}" in refused(store, *words)
    assert not store.exists()


def test_file_of_runs_that_cannot_be_reached_names_its_cause(tmp_path: Path) -> None:
    with without_root():
        for path in (tmp_path / ("x" * 300), tmp_path / "runs.sqlite"):
            assert str(path) in (message := refused(path, "status"))
            assert "There is no file" not in message


def test_next_without_terms_needs_an_earlier_run(store: Path) -> None:
    assert "no runs on these GPUs" in refused(store, "next", "nightly")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--default", "32"), "give all of them or none"),
        (("--batch-sizes", "16,x", *TERMS[2:]), "'16,x' are no numbers"),
    ],
)
def test_wrong_terms_are_bad_usage(store: Path, arguments: tuple, text: str) -> None:
    result = run(store, "next", "nightly", *arguments)
    assert result.exit_code == 2
    assert text in result.output


def test_terms_that_make_no_sense_are_refused(store: Path) -> None:
    assert "default_batch_size 5" in refused(
        store, "next", "nightly", "--batch-sizes", "16,32", "--default", "5", *TERMS[4:]
    )
