"""Another user with read permission cannot block the store, and reads it completely."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from testbed.known_totals import Books, J
from testbed.local_user import as_user, holding, interpreter
from testbed.process_rights import umask

from wattspan.config import StoreSettings as Settings
from wattspan.storage.query import HistoryExtract, extract_history
from wattspan.storage.store import Store
from wattspan.testing import ManualClock

pytestmark = pytest.mark.needs_root

MEMBER = 54321
"""A user, and the group of that number, which may read the store."""

LOCKING = """
import fcntl, os, sys
held = []
for path in sys.argv[1:]:
    try:
        held.append(os.open(path, os.O_RDONLY))
    except OSError:
        continue
    for start, length in ((120, 9), (1 << 30, 512)):  # SQLite's bytes in -shm and in the database
        try:
            fcntl.lockf(held[-1], fcntl.LOCK_SH | fcntl.LOCK_NB, length, start)
        except OSError:
            pass
print("held", flush=True)
sys.stdin.read()
"""
"""Takes every lock that a user who may only read the files can take."""


@pytest.fixture
def state_dir() -> Iterator[Path]:
    """Like systemd creates it (StateDirectoryMode=0750, UMask=0027), for the member's group."""
    folder = Path(tempfile.mkdtemp(prefix="wattspan-"))
    before = os.umask(0o027)
    try:
        os.chown(folder, 0, MEMBER)
        folder.chmod(0o2750)
        yield folder
    finally:
        os.umask(before)
        shutil.rmtree(folder)


@pytest.fixture
def host() -> Books:
    return Books(ManualClock())


def files(state_dir: Path) -> list[Path]:
    return [state_dir / f"wattspan.sqlite{suffix}" for suffix in ("", "-wal", "-shm")]


@contextmanager
def locked_by_the_member(state_dir: Path) -> Iterator[None]:
    with holding([*as_user(MEMBER), *interpreter(), LOCKING, *map(str, files(state_dir))]):
        yield


@pytest.fixture
def member(state_dir: Path, host: Books) -> Iterator[Callable[[], str]]:
    """Reads the energy of the devices in a process of the member, or returns the failure.

    The process begins before this one opens the store: SQLite would share the open index with it.
    """
    temporary = Path(tempfile.mkdtemp(prefix="wattspan-"))
    os.chown(temporary, MEMBER, MEMBER)
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if not pid:
        ours.close()
        os.setgroups([])
        os.setgid(MEMBER)
        os.setuid(MEMBER)
        tempfile.tempdir = str(temporary)
        while theirs.recv(1):
            try:
                answer = spent(state_dir, host)
            except Exception as error:  # noqa: BLE001 - the test reads it
                answer = f"{type(error).__name__}: {error}"
            theirs.sendall(answer.encode())
        os._exit(0)
    theirs.close()

    def ask() -> str:
        ours.sendall(b"?")
        return ours.recv(65536).decode()

    with ours:
        yield ask
        assert list(temporary.iterdir()) == []  # no copy is left
    os.waitpid(pid, 0)
    shutil.rmtree(temporary)


def spent(state_dir: Path, host: Books) -> str:
    """The energy of all devices that are not part of another."""
    now = host.clock.now().wall // 10**9
    found = extract_history(state_dir / "wattspan.sqlite", 0, now + 86_400)
    assert isinstance(found, HistoryExtract)
    return str(sum(domain.energy for domain in found.domains if domain.in_cover))


def test_reader_of_the_group_cannot_block_the_store(state_dir: Path, host: Books) -> None:
    with closing(Store(state_dir, Settings(), host.clock)) as store:
        assert store.write(host.spend({1: 10}))
        with locked_by_the_member(state_dir):
            assert store.write(host.spend({1: 10})), store.health.failures
            store.close()
            with closing(Store(state_dir, Settings(), host.clock)) as next_store:
                assert next_store.write(host.spend({1: 10})), next_store.health.failures


def test_index_of_an_earlier_version_that_the_group_has_open_is_replaced(
    state_dir: Path, host: Books
) -> None:
    with closing(Store(state_dir, Settings(), host.clock)) as store:
        store.write(host.spend({1: 10}))
    index = files(state_dir)[2]
    index.write_bytes(bytes(32768))
    index.chmod(0o640)
    with (
        locked_by_the_member(state_dir),
        closing(Store(state_dir, Settings(), host.clock)) as store,
    ):
        assert store.write(host.spend({1: 10})), store.health.failures
        assert index.stat().st_mode & 0o077 == 0


def test_others_may_not_enter_a_new_state_directory(tmp_path: Path, host: Books) -> None:
    with umask(0o022):
        Store(tmp_path / "state", Settings(), host.clock).close()
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o750


def test_group_reader_sees_the_latest_write(
    state_dir: Path, host: Books, member: Callable[[], str]
) -> None:
    with closing(Store(state_dir, Settings(), host.clock)) as store:
        store.write(host.spend({1: 10}))
        store.write(host.spend({1: 10}))
        own = spent(state_dir, host)
        assert int(own) > J
        assert (
            files(state_dir)[1].stat().st_size > 0
        )  # the change is in the WAL, not in the database
        assert member() == own
    assert member() == own


def test_reader_without_permission_is_reported(
    state_dir: Path, host: Books, member: Callable[[], str]
) -> None:
    with closing(Store(state_dir, Settings(), host.clock)) as store:
        store.write(host.spend({1: 10}))
        for path in files(state_dir):
            path.chmod(0o600)
        said = member()
        assert "Cannot read the store" in said
        assert "Run this as root or as the user of the agent" in said
