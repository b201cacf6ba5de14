"""The places of a file of runs: by user, then by container; and the cost of its statements."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from wattspan.model import Principal
from wattspan.recurring.jobs import RecurringJobTerms, SearchPolicy, TrainingRun, TrialOutcome
from wattspan.recurring.run_book import (
    JOB_BYTES,
    OPEN_DAYS,
    SLICE,
    NoRoomError,
    RunBook,
    RunBookLimits,
    RunningProcess,
    Statement,
    UnknownRunError,
)

HOLDER_BYTES, RUN_BYTES = 1024, 256  # in run_book.sql
TERMS = RecurringJobTerms("nightly", SearchPolicy((16, 32, 64), 32, rounds=1), 0.8, True, 10)
ADA, EVE = Principal(1000), Principal(1001)
HERE = RunningProcess("node7", 4711, 99)
NOW = 1_700_000_000
Open = Callable[..., RunBook]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    books: list[RunBook] = []

    def opened(**limits: int) -> RunBook:
        books.append(RunBook(tmp_path / "runs.sqlite", RunBookLimits(**limits)))
        return books[-1]

    yield opened
    for book in books:
        book.close()


def ran(book: RunBook, owner: Principal, name: str = "nightly", runs: int = 1) -> None:
    for _ in range(runs):
        begun = book.begin(owner, replace(TERMS, name=name), "", HERE, NOW)
        book.end(owner, begun.key, TrainingRun(0, TrialOutcome.CONVERGED, begun.key, 1.0, 700.0))


def stored(book: RunBook, owner: Principal) -> int:
    return sum(len(job.runs) for job in book.jobs(owner).shown)


def rows(folder: Path, query: str) -> Any:
    with closing(sqlite3.connect(folder / "runs.sqlite")) as database:
        return database.execute(query).fetchall()


@pytest.mark.parametrize("statement", Statement, ids=lambda one: one.name)
def test_statement_reads_by_an_index(opened: Open, tmp_path: Path, statement: Statement) -> None:
    opened()
    with closing(sqlite3.connect(tmp_path / "runs.sqlite")) as database:
        values = [None] * statement.count("?")
        plan = [row[3] for row in database.execute(f"EXPLAIN QUERY PLAN {statement}", values)]
    reads = [step for step in plan if step.startswith(("SCAN", "SEARCH"))]
    # The scanned subquery has a LIMIT of its own.
    assert all(step.startswith("SEARCH") or step.startswith("SCAN (subquery") for step in reads)
    assert not any("rowid>" in step or "TEMP B-TREE" in step for step in plan)


def test_job_keeps_its_last_runs_and_counts_the_dropped(opened: Open) -> None:
    book = opened(runs=3)
    ran(book, ADA, runs=5)
    known = book.jobs(ADA)
    assert [one.key for one in known.shown[0].runs] == [3, 4, 5]
    assert known.dropped == 2


def test_greedy_user_keeps_no_modest_one_from_room(opened: Open) -> None:
    book = opened(size=50 * RUN_BYTES + 4 * HOLDER_BYTES)
    ran(book, EVE, runs=5)
    ran(book, ADA, runs=200)
    assert (stored(book, EVE), book.jobs(EVE).dropped) == (5, 0)
    assert 20 < stored(book, ADA) < 50
    assert book.jobs(ADA).dropped == 200 - stored(book, ADA)


@pytest.mark.slow
def test_containers_share_the_part_of_their_user(opened: Open) -> None:
    containers = [Principal(1000, f"{number:064x}") for number in range(64)]
    book = opened(jobs=64, open_runs=64, size=200 * (RUN_BYTES + HOLDER_BYTES))
    ran(book, EVE, runs=40)
    for name in ("a", "b", "c"):
        for container in containers:
            if name == "a":
                ran(book, container, name, runs=10)
                book.begin(container, replace(TERMS, name=name), "", HERE, NOW)
            else:
                with pytest.raises(NoRoomError):
                    ran(book, container, name)
    for container in containers:
        with pytest.raises(NoRoomError, match="1 runs that have not ended"):
            ran(book, container, "a")
    assert stored(book, EVE) == 40
    counts = {stored(book, container) for container in containers}
    assert max(counts) - min(counts) <= 11


def test_modest_container_has_room_beside_a_greedy_one(opened: Open) -> None:
    book, greedy, modest = opened(open_runs=8), Principal(1000, "a"), Principal(1000, "b")
    for _ in range(8):
        book.begin(greedy, TERMS, "", HERE, NOW)
    for _ in range(4):
        book.begin(modest, TERMS, "", HERE, NOW)
    for owner in (greedy, modest):
        with pytest.raises(NoRoomError):
            book.begin(owner, TERMS, "", HERE, NOW)
    book.begin(EVE, TERMS, "", HERE, NOW)


def test_shares_outlive_the_process(opened: Open) -> None:
    first = opened(open_runs=2)
    first.begin(ADA, TERMS, "", HERE, NOW)
    first.begin(ADA, TERMS, "", HERE, NOW)
    first.close()
    book = opened(open_runs=2)
    with pytest.raises(NoRoomError):
        book.begin(ADA, TERMS, "", HERE, NOW)
    book.end(ADA, 1, TrainingRun(0, TrialOutcome.MISSED))
    assert book.begin(ADA, TERMS, "", HERE, NOW).key == 3


def test_forgotten_job_is_invisible_and_goes_in_slices(opened: Open, tmp_path: Path) -> None:
    book = opened()
    ran(book, ADA, runs=SLICE + 1)
    book.begin(ADA, TERMS, "", HERE, NOW)
    assert book.forget(ADA, "nightly")
    with pytest.raises(UnknownRunError):
        book.end(ADA, SLICE + 2, TrainingRun(0, TrialOutcome.MISSED))
    assert book.jobs(ADA).shown == ()
    ran(book, ADA)
    counts = []
    for _ in range(3):
        counts += rows(tmp_path, "SELECT count(*) FROM run")
        book.tidy(NOW)
    assert counts == [(SLICE + 3,), (3,), (1,)]
    assert rows(tmp_path, "SELECT jobs, runs, open, last_run FROM holder WHERE key = 0") == [
        (1, 1, 0, SLICE + 3)
    ]


def test_principal_without_runs_is_removed_after_that_time(opened: Open, tmp_path: Path) -> None:
    book = opened()
    for owner in (ADA, EVE):
        ran(book, owner)
    book.forget(ADA, "nightly")
    book.tidy(NOW)
    book.tidy(NOW + OPEN_DAYS * 86_400)
    assert rows(tmp_path, "SELECT count(*) FROM holder") == [(5,)]
    book.tidy(NOW + OPEN_DAYS * 86_400 + 1)
    assert rows(tmp_path, "SELECT name FROM holder WHERE parent > 0") == [('[1001,"",""]',)]
    assert rows(tmp_path, "SELECT count(*) FROM holder") == [(3,)]


def test_sums_are_those_of_the_rows(opened: Open, tmp_path: Path) -> None:
    book = opened(size=100 * RUN_BYTES + 24 * HOLDER_BYTES, runs=20)
    for number in range(150):
        owner = (ADA, EVE, Principal(1000, "a"), Principal(None, pod="b"))[number % 4]
        ran(book, owner, f"job {number % 7}", runs=number % 3)
        book.begin(owner, replace(TERMS, name="open"), "", HERE, NOW)
        book.end_lost(owner, lambda process: number % 5 > 0)  # noqa: B023 - called at once
        if number % 11 == 0:
            book.forget(owner, f"job {number % 7}")
        book.tidy(NOW)
    (sums,) = rows(tmp_path, "SELECT jobs, runs, open, bytes FROM holder WHERE key = 0")
    (runs,) = rows(tmp_path, "SELECT count(*), total(outcome IS NULL) FROM run")
    (jobs,) = rows(tmp_path, "SELECT total(1 - forgotten), total(bytes) FROM job")
    ((principals,),) = rows(tmp_path, "SELECT count(*) FROM holder WHERE parent > 0")
    size = jobs[1] + runs[0] * RUN_BYTES + principals * HOLDER_BYTES
    assert sums == (jobs[0], runs[0], runs[1], size)
    levels = "SELECT sum(jobs), sum(runs), sum(open), sum(bytes) FROM holder WHERE parent {}"
    assert rows(tmp_path, levels.format("= 0")) == rows(tmp_path, levels.format("> 0")) == [sums]


VERSION_1 = """
CREATE TABLE job (
    key INTEGER PRIMARY KEY, owner INTEGER NOT NULL, name TEXT NOT NULL, gpus TEXT NOT NULL,
    terms BLOB NOT NULL, UNIQUE (owner, name, gpus)
) STRICT;
CREATE TABLE run (
    key INTEGER PRIMARY KEY, job INTEGER NOT NULL REFERENCES job (key) ON DELETE CASCADE,
    batch_size INTEGER NOT NULL, host TEXT NOT NULL, pid INTEGER NOT NULL,
    process_started INTEGER NOT NULL, began INTEGER NOT NULL, outcome TEXT,
    energy REAL NOT NULL DEFAULT 0, seconds REAL NOT NULL DEFAULT 0,
    power REAL NOT NULL DEFAULT 0, epochs INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX run_of_job ON run (job, key);
PRAGMA application_id = 0x77726563;
PRAGMA user_version = 1;
"""


def test_file_of_the_first_version_is_converted(opened: Open, tmp_path: Path) -> None:
    import msgspec

    terms = msgspec.json.encode(TERMS)
    with closing(sqlite3.connect(tmp_path / "runs.sqlite")) as database:
        database.executescript(VERSION_1)
        jobs = [(1, 1000, "nightly", "h100"), (2, 1001, "nightly", "h100"), (3, 1000, "empty", "")]
        database.executemany(
            "INSERT INTO job VALUES (?, ?, ?, ?, ?)", [(*job, terms) for job in jobs]
        )
        runs = [(1, 1, "converged"), (2, 2, None), (3, 1, None)]
        database.executemany(
            "INSERT INTO run VALUES (?, ?, 32, 'node7', 4711, 99, 1700000000, ?, 50, 1, 700, 4)",
            runs,
        )
        database.commit()
    book = opened()
    (mine,), (theirs,) = book.jobs(ADA).shown, book.jobs(EVE).shown
    assert (mine.terms, mine.gpus, theirs.runs[0].key) == (TERMS, "h100", 2)
    assert mine.runs == (
        TrainingRun(32, TrialOutcome.CONVERGED, 50.0, 1.0, 700.0, 4, 1),
        TrainingRun(32, None, 50.0, 1.0, 700.0, 4, 3),
    )
    assert book.begin(ADA, TERMS, "h100", HERE, NOW).key == 4
    assert book.end(EVE, 2, TrainingRun(0, TrialOutcome.MISSED))
    (sums,) = rows(tmp_path, "SELECT jobs, runs, open, bytes > 0 FROM holder WHERE key = 0")
    assert sums == (2, 4, 2, 1)


STEP = 100
"""Instructions of SQLite between two counts."""


def fill(path: Path, runs: int) -> None:
    """Runs of principals with 1,000 each, 100 for a job; the first jobs are forgotten."""
    RunBook(path).close()
    with closing(sqlite3.connect(path)) as database:
        count = "WITH RECURSIVE n (i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < {})"
        database.execute(
            count.format(runs // 1000)
            + " INSERT INTO holder (key, parent, name) SELECT 10 + i, 0, 'user ' || i FROM n"
        )
        database.execute(
            count.format(runs // 1000)
            + " INSERT INTO holder (key, parent, name, used) SELECT 10000 + i, 10 + i, i, 1 FROM n"
        )
        database.execute(
            count.format(runs // 100) + " INSERT INTO job (owner, name, gpus, terms, bytes)"
            f" SELECT 10000 + i / 10, 'job ' || i, '', x'7b7d', {JOB_BYTES} FROM n"
        )
        database.execute(
            count.format(runs)
            + " INSERT INTO run (owner, number, job, batch_size, host, pid, process_started, began)"
            " SELECT 10000 + i / 1000, i, 1 + i / 100, 32, 'node7', 1, 1, 1 FROM n"
        )
        database.execute("UPDATE job SET forgotten = 1 WHERE key % 2 = 1")
        database.commit()


@pytest.mark.exhaustive
def test_request_beside_a_million_runs_costs_as_much_as_beside_a_thousand(tmp_path: Path) -> None:
    steps = {}
    for runs in (1000, 1_000_000):
        path = tmp_path / f"{runs}.sqlite"
        fill(path, runs)
        counted = 0

        def count() -> int:
            nonlocal counted
            counted += 1
            return 0

        def connect(*values: Any, **named: Any) -> sqlite3.Connection:
            database = sqlite3.connect(*values, **named)
            database.set_progress_handler(count, STEP)
            return database

        limits = RunBookLimits(size=1)  # every request drops as much as it may
        with closing(RunBook(path, limits, connect)) as book:
            book.tidy(NOW)
            ran(book, ADA, runs=2)
            book.jobs(ADA)
            book.forget(ADA, "nightly")
        steps[runs] = counted * STEP
    assert steps[1_000_000] < 1.5 * steps[1000]
