"""The store when something is wrong: each time one sentence, and nothing measured is lost."""

import os
import random
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
from testbed.known_totals import Books, buckets, history, totals

from wattspan.config import StoreSettings as Settings
from wattspan.model import Trouble
from wattspan.ports import StoreError
from wattspan.storage.database import (
    APPLICATION_ID,
    MAX_QUARANTINED,
    MIGRATIONS,
    MINUTE,
    migrate,
    schema_version,
)
from wattspan.storage.query import extract_history
from wattspan.storage.store import Store

pytestmark = pytest.mark.slow


@pytest.fixture
def host() -> Books:
    return Books()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path: Path, host: Books, said: list[str]) -> Iterator[Store]:
    with closing(Store(tmp_path, Settings(), host.clock, log=said.append)) as opened:
        yield opened


def reopen(store: Store, host: Books, said: list[str] | None = None) -> Store:
    store.close()
    log = (said if said is not None else []).append
    return Store(store.path.parent, Settings(), host.clock, log=log)


def aside(store: Store) -> list[str]:
    return sorted(path.name for path in store.path.parent.glob("*.corrupt-*[0-9]"))


# ------------------------------------------------------------------------------------ corruption


def test_invalid_store_file_is_moved_aside(store: Store, host: Books, said: list[str]) -> None:
    store.close()
    store.path.write_bytes(b"not a database at all" * 500)
    with closing(reopen(store, host, said)) as again:
        assert again.last_checkpoint() is None
        assert again.write(host.spend({1: 1}))
        assert history(again.path) == totals(host.now())
        assert aside(again) == ["wattspan.sqlite.corrupt-1"]
        assert again.health.up
        assert again.health.failed == 1
        assert [failure.trouble for failure in again.health.failures] == [Trouble.MALFORMED]
    (sentence,) = said
    assert sentence.startswith(f"Cannot use the store {store.path}: it is corrupt (")
    assert "The agent renamed it to" in sentence


def test_moved_aside_files_are_limited_to_the_newest(store: Store, host: Books) -> None:
    for number in range(MAX_QUARANTINED + 3):
        store.close()
        store.path.write_bytes(f"ruin {number}".encode() * 1000)
        store = reopen(store, host)
    store.close()
    assert aside(store) == [f"wattspan.sqlite.corrupt-{n}" for n in (4, 5, 6)]
    newest = store.path.with_name("wattspan.sqlite.corrupt-6")
    assert newest.read_bytes().startswith(b"ruin 5")


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(4, 12))]
)
def test_damaged_bytes_anywhere_never_stop_the_agent(
    store: Store, host: Books, said: list[str], seed: int
) -> None:
    for _ in range(20):
        store.write(host.spend({pid: pid for pid in range(1, 15)}, seconds=40))
    store.close()
    chance = random.Random(seed)
    content = bytearray(store.path.read_bytes())
    for _ in range(chance.choice([1, 10, 200])):
        content[chance.randrange(len(content))] = chance.randrange(256)
    if seed % 4 == 0:
        del content[chance.randrange(len(content)) :]
    store.path.write_bytes(content)
    with closing(reopen(store, host, said)) as again:
        for _ in range(5):
            assert again.write(host.spend({1: 1}, seconds=40))
        assert again.last_checkpoint() == host.now()
        # A changed number in a row is undetectable; every other change was detected.
        if aside(again):
            assert len(said) == again.health.failed == 1


def test_store_damaged_while_open_loses_history_not_counters(
    store: Store, host: Books, said: list[str]
) -> None:
    for _ in range(5):
        store.write(host.spend({1: 1}))
    written = totals(host.now())
    store._opened.database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    with store.path.open("r+b") as file:
        file.write(os.urandom(store.path.stat().st_size))
    expected = host.spend({1: 7})
    for _ in range(3):  # SQLite may serve cached pages for some time
        assert store.write(expected)
        expected = host.spend({1: 7})
        store._detach()
    assert store.last_checkpoint() is not None
    assert aside(store) == ["wattspan.sqlite.corrupt-1"]
    with closing(reopen(store, host)) as again:
        opening = again.last_checkpoint()
        assert opening is not None
        kept = totals(opening)
        assert all(kept[key] >= value for key, value in written.items())


def test_store_deleted_while_open_is_recreated(store: Store, host: Books, said: list[str]) -> None:
    store.write(host.spend({1: 1}))
    store.path.unlink()
    assert store.write(host.spend({1: 4}))
    assert "it was deleted or replaced" in said[0]
    assert history(store.path)["package-0", "energy"] == 8 * 10**6
    with closing(reopen(store, host)) as again:
        assert totals(again.last_checkpoint()) == totals(host.now())


def test_undecodable_checkpoint_is_corruption(store: Store, host: Books, said: list[str]) -> None:
    store.write(host.spend({1: 1}))
    store.close()
    with closing(sqlite3.connect(store.path)) as database:
        database.execute("UPDATE books SET packed = x'00'")
        database.commit()
    with closing(reopen(store, host, said)) as again:
        assert again.last_checkpoint() is None
        assert aside(again) == ["wattspan.sqlite.corrupt-1"]


def test_reader_reports_a_corrupt_store(store: Store, host: Books) -> None:
    for _ in range(20):
        store.write(host.spend(dict.fromkeys(range(20), 1), seconds=60))
    store.close()
    content = bytearray(store.path.read_bytes())
    content[4096:] = os.urandom(len(content) - 4096)
    store.path.write_bytes(content)
    with pytest.raises(StoreError, match="it is corrupt"):
        extract_history(store.path, 0, 2**40)


# -------------------------------------------------------------------------------- a full disk


def test_full_disk_loses_no_energy_once_space_returns(
    store: Store, host: Books, said: list[str]
) -> None:
    assert store.write(host.spend({1: 1}))
    store._opened.database.execute("PRAGMA max_page_count = 1")  # this connection may not grow it
    lost = [store.write(host.spend(dict.fromkeys(range(500), 1), seconds=0.1)) for _ in range(5)]
    assert not any(lost)
    assert not store.health.up
    assert "the disk is full" in said[0]
    assert "keeps new energy in memory" in str(store.health.failures[0])
    host.clock.advance(60)
    assert store.write(host.spend({1: 1}))
    assert store.health.up
    assert store.health.failures == ()
    assert history(store.path) == totals(host.now())
    assert len(said) == 1


def test_failed_writes_are_retried_with_backoff(store: Store, host: Books, said: list[str]) -> None:
    store.write(host.spend({1: 1}))
    store.path.unlink()
    store.path.mkdir()  # a directory at the path makes the open fail
    tried = []
    for second in range(400):
        failed = store.health.failed
        store.write(host.spend({1: 1}, seconds=1))
        if store.health.failed > failed:
            tried.append(second)
    pauses = [later - earlier for earlier, later in pairwise(tried)]
    assert pauses[:5] == [1, 2, 4, 8, 8]
    assert set(pauses[5:]) == {8}
    assert len(said) == 2  # the missing file, and once the failure to create another
    store.path.rmdir()
    assert store.write(host.spend({1: 1}, seconds=60))
    assert totals(store.last_checkpoint()) == totals(host.now())


def test_commit_that_failed_yet_reached_the_disk_is_not_counted_twice(
    store: Store, host: Books
) -> None:
    store.write(host.spend({1: 1}))
    before = store.last_checkpoint()
    store.write(host.spend({1: 5}))
    store._last = before  # like a failure reported for the second commit
    store._fail(OSError("disk I/O error"))
    host.clock.advance(60)
    assert store.write(host.spend({1: 2}))
    assert history(store.path) == totals(host.now())


@pytest.mark.needs_root
def test_full_file_system_is_one_sentence_and_no_loss(tmp_path: Path) -> None:
    answer = _in_mount(
        tmp_path,
        "mount -t tmpfs -o size=1m tmpfs",
        """
        assert store.write(host.spend({1: 1}))
        big = state / "big"
        with contextlib.suppress(OSError), big.open("wb", 0) as file:
            while True:
                file.write(bytes(512))
        host.spend({pid: 1 for pid in range(300)})
        assert not store.write(host.now())
        print(said[0])
        big.unlink()
        host.clock.advance(60)
        assert store.write(host.spend({1: 1})), store.health
        store.close()
        assert history(store.path) == totals(host.now())
        """,
    )
    assert "the disk is full" in answer


@pytest.mark.needs_root
def test_file_system_that_is_full_at_the_start_is_refused(tmp_path: Path) -> None:
    full = "mount -t tmpfs -o size=16k tmpfs"
    answer = _in_mount(tmp_path, full, "", opens=False)
    assert "the disk is full" in answer
    assert "Free some space" in answer


# ----------------------------------------------------------------------- write failures


@pytest.mark.needs_root
def test_read_only_file_system_is_refused_with_the_remedy(tmp_path: Path) -> None:
    answer = _in_mount(tmp_path, "mount -t tmpfs -o ro tmpfs", "", opens=False)
    assert "Read-only file system" in answer or "read-only file system" in answer
    assert "state_dir in [agent]" in answer


@pytest.mark.needs_root
def test_foreign_store_directory_is_read_only(tmp_path: Path, host: Books) -> None:
    state = tmp_path / "state"
    with closing(Store(state, Settings(), host.clock)) as store:
        store.write(host.spend({1: 1}))
        running = _as_nobody(state)
    stopped = _as_nobody(state)
    for answer in (running, stopped):
        assert "permission denied" in answer
        assert f"energy {host.package}" in answer
    assert not list(state.glob("*.corrupt*"))


def test_state_directory_that_is_a_file_is_refused(tmp_path: Path, host: Books) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"Cannot open the store .*file"):
        Store(tmp_path / "file", Settings(), host.clock)


def test_store_of_a_newer_wattspan_is_left_alone(store: Store, host: Books) -> None:
    store.write(host.spend({1: 1}))
    store.close()
    with closing(sqlite3.connect(store.path)) as database:
        database.execute("PRAGMA user_version = 99")
    content = store.path.read_bytes()
    with pytest.raises(StoreError, match=r"newer wattspan .*Upgrade wattspan") as refused:
        reopen(store, host)
    assert refused.value.exit_code == 5
    with pytest.raises(StoreError, match="newer wattspan"):
        extract_history(store.path, 0, 2**40)
    assert store.path.read_bytes() == content


def test_database_of_another_program_is_left_alone(tmp_path: Path, host: Books) -> None:
    path = tmp_path / "wattspan.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE theirs (precious)")
    content = path.read_bytes()
    with pytest.raises(StoreError, match="another program"):
        Store(tmp_path, Settings(), host.clock)
    assert path.read_bytes() == content


def test_older_schema_is_brought_up_to_date_step_by_step(tmp_path: Path) -> None:
    steps = (*MIGRATIONS, "CREATE TABLE second (a)", "ALTER TABLE second ADD COLUMN b")
    with closing(sqlite3.connect(tmp_path / "s", isolation_level=None)) as database:
        migrate(database)
        database.execute("INSERT INTO books VALUES (1, x'01')")
        migrate(database, steps)
        assert schema_version(database) == len(steps)
        assert database.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
        assert database.execute("SELECT count(*) FROM books").fetchone() == (1,)
        assert [row[1] for row in database.execute("PRAGMA table_info(second)")] == ["a", "b"]


def test_failed_migration_keeps_the_previous_version(tmp_path: Path) -> None:
    steps = (*MIGRATIONS, "CREATE TABLE second (a); CREATE TABLE second (a)")
    with closing(sqlite3.connect(tmp_path / "s", isolation_level=None)) as database:
        with pytest.raises(sqlite3.OperationalError):
            migrate(database, steps)
        assert schema_version(database) == len(MIGRATIONS)
        assert not database.execute("PRAGMA table_info(second)").fetchall()


def test_log_left_by_a_deleted_database_is_not_replayed_into_the_new(
    store: Store, host: Books
) -> None:
    store.write(host.spend({1: 1}))
    wal = store.path.with_name(store.path.name + "-wal")
    saved = wal.read_bytes()
    store.close()
    store.path.unlink()
    wal.write_bytes(saved)
    with closing(reopen(store, host)) as again:
        assert again.last_checkpoint() is None
        assert buckets(again.path, MINUTE) == []


def test_store_locked_by_another_program_is_written_later(
    store: Store, host: Books, said: list[str]
) -> None:
    store.write(host.spend({1: 1}))
    store._opened.database.execute("PRAGMA busy_timeout = 1")
    with closing(sqlite3.connect(store.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert not store.write(host.spend({1: 1}))
    assert "another program holds its lock" in said[0]
    host.clock.advance(60)
    assert store.write(host.spend({1: 1}))
    assert history(store.path) == totals(host.now())


# ----------------------------------------------------------------------------------------- helpers


def _in_mount(tmp_path: Path, mount: str, body: str, *, opens: bool = True) -> str:
    """Run ``body`` in a process that has a file system of its own at ``state``."""
    state = tmp_path / "state"
    state.mkdir()
    script = f"""
import contextlib, pathlib
from testbed.known_totals import Books, history, totals
from wattspan.config import StoreSettings as Settings
from wattspan.ports import StoreError
from wattspan.storage.store import Store
host, said, state = Books(), [], pathlib.Path({str(state)!r})
try:
    store = Store(state, Settings(), host.clock, log=said.append)
except StoreError as error:
    print(error)
    raise SystemExit({int(opens)})
{textwrap.dedent(body)}
"""
    command = f'{mount} "$1" && exec "$2" -c "$3"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command, "sh", str(state), sys.executable, script],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def _as_nobody(state: Path) -> str:
    """Open the store for writing, then for reading, as a user without write permission."""
    for directory in (state, *state.parents):
        if directory.stat().st_uid == 0 and str(directory).startswith("/tmp/"):
            directory.chmod(0o755)
    script = f"""
import os, pathlib
from wattspan.config import StoreSettings as Settings
from wattspan.ports import StoreError
from wattspan.storage.store import Store
from wattspan.storage.query import extract_history
from wattspan.testing import ManualClock
os.setgroups([]); os.setgid(65534); os.setuid(65534)
state = pathlib.Path({str(state)!r})
try:
    Store(state, Settings(), ManualClock())
except StoreError as error:
    print(error)
found = extract_history(state / "wattspan.sqlite", 0, 2**40)
print("energy", next(d.energy for d in found.domains if d.id == "package-0"))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
