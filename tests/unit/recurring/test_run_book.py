"""The runs of recurring jobs in a file: by user, job and GPUs, for concurrent processes."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from testbed.fixtures import entered_in

from wattspan.model import Principal
from wattspan.recurring.jobs import (
    RecurringJobTerms,
    SearchPhase,
    SearchPolicy,
    TrainingRun,
    TrialOutcome,
)
from wattspan.recurring.run_book import (
    RunBook,
    RunBookError,
    RunningProcess,
    TermsChangedError,
    UnknownRunError,
)

TERMS = RecurringJobTerms("nightly", SearchPolicy((16, 32, 64), 32, rounds=1), 0.8, True, 10)
ADA, EVE = Principal(1000), Principal(1001)
GPUS = "2 x NVIDIA H100"
HERE = RunningProcess("node7", 4711, 99)


book = entered_in(lambda folder: closing(RunBook(folder / "runs.sqlite")))


def begin(
    book: RunBook, terms: RecurringJobTerms = TERMS, owner: Principal = ADA, gpus: str = GPUS
):
    return book.begin(owner, terms, gpus, HERE, 1_700_000_000)


def reached(energy: float) -> TrainingRun:
    return TrainingRun(0, TrialOutcome.CONVERGED, energy, 3.5, 700.0, 4)


def test_runs_are_those_of_the_pruning_order(book: RunBook) -> None:
    sizes = []
    for energy in (50.0, 60.0, 40.0):
        begun = begin(book)
        sizes.append(begun.choice.batch_size)
        assert book.end(ADA, begun.key, reached(energy))
    assert sizes == [32, 16, 64]
    (job,) = book.jobs(ADA).shown
    assert (job.terms, job.gpus) == (TERMS, GPUS)
    assert job.runs[0] == TrainingRun(32, TrialOutcome.CONVERGED, 50.0, 3.5, 700.0, 4, 1)
    assert begin(book).choice.phase is SearchPhase.SAMPLING


def test_runs_outlive_the_process(book: RunBook, tmp_path: Path) -> None:
    begun = begin(book)
    book.close()
    with closing(RunBook(tmp_path / "runs.sqlite")) as again:
        assert again.end(ADA, begun.key, reached(1.0))
        assert len(again.jobs(ADA).shown[0].runs) == 1


def test_choice_is_the_same_for_the_same_runs(tmp_path: Path) -> None:
    def sizes(name: str) -> list[int]:
        with closing(RunBook(tmp_path / name)) as book:
            found = []
            for energy in (50.0, 51.0, 49.0, 50.0, 52.0, 50.0):
                begun = begin(book)
                found.append(begun.choice.batch_size)
                book.end(ADA, begun.key, reached(energy))
            return found

    assert sizes("a") == sizes("b")


def test_first_report_of_a_run_counts(book: RunBook) -> None:
    begun = begin(book)
    assert book.end(ADA, begun.key, reached(50.0))
    assert not book.end(ADA, begun.key, reached(1.0))
    assert book.jobs(ADA).shown[0].runs[0].energy == 50.0


def test_other_user_has_jobs_of_the_same_name_and_no_access(book: RunBook) -> None:
    begin(book)
    mine, theirs = begin(book), begin(book, owner=EVE)
    assert (mine.key, theirs.key) == (2, 1)  # a number shows nothing of the runs of others
    with pytest.raises(UnknownRunError):
        book.end(EVE, mine.key, reached(1.0))
    assert [len(book.jobs(owner).shown[0].runs) for owner in (ADA, EVE)] == [2, 1]
    assert book.forget(EVE, "nightly")
    assert (len(book.jobs(ADA).shown), book.jobs(EVE).shown) == (1, ())


def test_other_gpus_have_a_search_of_their_own(book: RunBook) -> None:
    book.end(ADA, begin(book).key, reached(50.0))
    assert begin(book, gpus="1 x NVIDIA A40").choice.batch_size == 32
    assert [job.gpus for job in book.jobs(ADA, "nightly").shown] == ["1 x NVIDIA A40", GPUS]


def test_changed_terms_are_refused_with_the_difference(book: RunBook) -> None:
    begin(book)
    with pytest.raises(TermsChangedError, match=r"^eta 0\.5, not 0\.7$"):
        begin(book, replace(TERMS, eta=0.7))
    assert len(book.jobs(ADA).shown[0].runs) == 1


def test_run_of_an_ended_process_is_lost_and_its_trial_is_repeated(book: RunBook) -> None:
    begun = begin(book)
    assert book.end_lost(ADA, lambda process: process == HERE) == 0
    assert book.end_lost(ADA, lambda process: False) == 1
    assert not book.end(ADA, begun.key, reached(1.0))
    assert begin(book).choice.batch_size == begun.choice.batch_size


def test_forgotten_job_starts_anew(book: RunBook) -> None:
    book.end(ADA, begin(book).key, reached(50.0))
    assert book.forget(ADA, "nightly")
    assert not book.forget(ADA, "nightly")
    assert begin(book, replace(TERMS, eta=0.7)).choice.batch_size == 32


def test_concurrent_processes_never_try_the_same_size(tmp_path: Path) -> None:
    path = tmp_path / "runs.sqlite"
    terms = replace(TERMS, policy=SearchPolicy(tuple(range(1, 21)), 10, rounds=1))

    def one(_: int) -> tuple[SearchPhase, int]:
        with closing(RunBook(path)) as book:
            choice = begin(book, terms).choice
            return choice.phase, choice.batch_size

    RunBook(path).close()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(one, range(24)))
    assert [size for phase, size in found if phase is SearchPhase.PRUNING] == [10]
    with closing(RunBook(path)) as book:
        assert len(book.jobs(ADA).shown[0].runs) == 24


def test_file_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE t (x)")
    with pytest.raises(RunBookError, match="of another program"):
        RunBook(path)


def test_file_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.sqlite"
    RunBook(path).close()
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version = 9")
    with pytest.raises(RunBookError, match="newer wattspan"):
        RunBook(path)


@pytest.mark.parametrize("content", [b"no database at all, but long enough to be read", b"\0" * 99])
def test_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "runs.sqlite"
    path.write_bytes(content)
    with pytest.raises(RunBookError, match=r"runs\.sqlite"):
        RunBook(path)


def test_new_file_is_readable_with_an_old_sqlite_and_a_typed_one_names_the_version(
    book: RunBook, tmp_path: Path
) -> None:
    begin(book)
    with closing(sqlite3.connect(tmp_path / "runs.sqlite")) as database:
        tables = database.execute("SELECT sql FROM sqlite_master WHERE sql LIKE '%STRICT%'")
        assert tables.fetchall() == []
        # The error of this schema is that of SQLite 3.34 for one STRICT.
        database.executescript(
            "PRAGMA writable_schema = ON; UPDATE sqlite_master SET sql = sql || ' STRICT STRICT'"
            " WHERE name = 'holder'"
        )
    with pytest.raises(RunBookError, match=r"Use a Python with SQLite 3\.37 or newer"):
        RunBook(tmp_path / "runs.sqlite")


def test_new_file_is_private_and_permissions_of_a_file_stay(tmp_path: Path) -> None:
    path = tmp_path / "runs.sqlite"
    RunBook(path).close()
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o660)
    RunBook(path).close()
    assert path.stat().st_mode & 0o777 == 0o660


def test_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunBookError, match="no such folder"):
        RunBook(tmp_path / "no such folder" / "runs.sqlite")


@pytest.mark.parametrize("column", ["outcome = 'odd'", "batch_size = 0"])
def test_damaged_row_is_an_error_of_the_file(book: RunBook, tmp_path: Path, column: str) -> None:
    begin(book)
    with closing(sqlite3.connect(tmp_path / "runs.sqlite")) as database:
        database.execute(f"UPDATE run SET {column}")
        database.execute("UPDATE job SET terms = x'7b7d' WHERE ? LIKE 'batch%'", (column,))
        database.commit()
    with pytest.raises(RunBookError, match="Repair or remove"):
        book.jobs(ADA)
