"""Files that one process has at a time: lock permissions, and identification of lock holders."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from testbed.process_rights import umask
from testbed.program import with_read_only
from testbed.waiting import eventually

from wattspan.util.files import FileLock, LockHeldError

HOLDS = """
import fcntl, sys
with open(sys.argv[1], "rb") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    print("locked", flush=True)
    sys.stdin.read()
"""
ASKS = """
import sys
from pathlib import Path
from wattspan.util.files import FileLock
from wattspan.util.files import LockHeldError
try:
    FileLock(Path(sys.argv[1]))
except LockHeldError as held:
    print(held.holder.pid, held.holder.description)
"""

TAKES = """
import sys
from pathlib import Path
from wattspan.util.files import FileLock
from wattspan.util.files import LockHeldError
def take():
    return FileLock(Path(sys.argv[1]), unwritable=sys.argv[2] == "True")
try:
    one = take()
    try:
        take()
    except LockHeldError:
        print("taken, and nobody else can")
except LockHeldError as held:
    print("held by", held.holder.pid)
except OSError as error:
    print(error.strerror)
"""


@contextmanager
def somebody_holds(path: Path, *within: str) -> Iterator[subprocess.Popen[str]]:
    """Another process has locked ``path``, which it has only read."""
    words = [*within, sys.executable, "-c", HOLDS, str(path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, text=True, **pipes) as holder:  # type: ignore[call-overload]
        assert holder.stdout.readline() == "locked\n"
        yield holder
        holder.stdin.close()


def refused(path: Path) -> LockHeldError:
    with pytest.raises(LockHeldError) as held:
        FileLock(path)
    return held.value


def ended() -> int:
    """The number of a process that has ended."""
    with subprocess.Popen(["true"]) as process:
        return process.pid


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lock"


def test_lock_file_is_private_for_any_umask(
    path: Path,
) -> None:
    with umask(0):
        FileLock(path).release()
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o666])
def test_lock_that_others_could_open_is_closed_to_them(path: Path, mode: int) -> None:
    path.touch()
    path.chmod(mode)
    FileLock(path).release()
    assert path.stat().st_mode & 0o777 == 0o600


def test_refused_lock_is_made_private(path: Path) -> None:
    path.touch()
    path.chmod(0o644)
    with somebody_holds(path):
        refused(path)
        assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.needs_root
def test_foreign_lock_file_keeps_its_mode(path: Path) -> None:
    path.touch()
    path.chmod(0o666)
    os.chown(path, 12345, 12345)
    FileLock(path).release()
    assert path.stat().st_mode & 0o777 == 0o666


def test_lock_holder_comes_from_the_kernel_not_the_file(path: Path) -> None:
    path.write_text(f"{os.getpid()}\n")
    with somebody_holds(path) as holder:
        assert refused(path).holder == (holder.pid, os.getpid())
    path.write_text("")
    with somebody_holds(path) as holder:
        assert refused(path).holder == (holder.pid, None)


def test_waiting_process_is_not_the_lock_holder(path: Path) -> None:
    lock = FileLock(path)
    with subprocess.Popen(
        ["flock", str(path), "true"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    ) as waits:
        try:
            waiting = f":{path.stat().st_ino} "
            eventually(
                lambda: any(
                    " -> " in line and waiting in line
                    for line in Path("/proc/locks").read_text().splitlines()
                ),
                "somebody waits for it",
            )
            assert refused(path).holder == (os.getpid(), os.getpid())
        finally:
            lock.release()
        assert waits.wait(60) == 0


def test_holder_that_left_the_lock_to_a_child_and_ended_is_not_named(path: Path) -> None:
    path.write_text(f"{ended()}\n")
    script = f"exec 9<{path} && flock 9 && (echo locked; read _) &"
    with subprocess.Popen(
        ["sh", "-c", f"exec 8<&0; {script.replace('read _', 'read _ <&8')}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout.readline() == "locked\n"
        assert parent.wait(60) == 0
        holder = refused(path).holder
        assert holder.pid is None
        assert "has ended" in holder.description
        parent.stdin.close()
        assert parent.stdout.read() == ""  # and so the child has ended


@pytest.mark.needs_root
def test_invisible_lock_holder_is_not_named(
    path: Path,
) -> None:
    path.write_text("1\n")
    alone = ("unshare", "--pid", "--fork", "--mount-proc")
    with somebody_holds(path):
        told = subprocess.run(
            [*alone, sys.executable, "-c", ASKS, str(path)],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
    assert told == "None process 1, whose pid is in the file, may hold it\n"


@pytest.mark.parametrize("text", ["", "nobody\n", "-1\n", "0\n", "9" * 20])
def test_invalid_pid_in_a_lock_file_is_not_shown(path: Path, text: str) -> None:
    path.write_text(text)
    with somebody_holds(path):
        holder = refused(path).holder
    assert not holder.recorded_pid or "has ended" in holder.description


def test_link_in_its_place_is_not_followed(path: Path) -> None:
    path.symlink_to(path.parent / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        FileLock(path)
    assert not (path.parent / "elsewhere").exists()


def test_lock_file_has_the_pid_of_the_current_holder(path: Path) -> None:
    path.write_text("1234567890\n")
    lock = FileLock(path)
    assert path.read_text() == f"{os.getpid()}\n"
    assert not lock.released
    lock.release()
    assert lock.released
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


# -------------------------------------------------------------------- on a disk that is read-only


def locked_read_only(path: Path, *, unwritable: bool) -> str:
    """Result of locking in an unwritable directory."""
    words = [*with_read_only(path.parent), sys.executable, "-c", TAKES, str(path), str(unwritable)]
    return subprocess.run(
        words, capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


@pytest.mark.needs_root
@pytest.mark.parametrize("mode", [0o600, 0o640])
def test_lock_that_is_there_can_be_had_on_a_read_only_disk_and_holds(path: Path, mode: int) -> None:
    path.write_text("1234567890\n")
    path.chmod(mode)
    assert locked_read_only(path, unwritable=True) == "taken, and nobody else can"
    assert path.read_text() == "1234567890\n"
    with somebody_holds(path) as holder:
        assert locked_read_only(path, unwritable=True) == f"held by {holder.pid}"


@pytest.mark.needs_root
def test_lock_that_is_not_there_cannot_be_had_on_a_read_only_disk(path: Path) -> None:
    assert locked_read_only(path, unwritable=True) == "Read-only file system"


@pytest.mark.needs_root
def test_write_lock_on_a_read_only_disk_is_refused(path: Path) -> None:
    path.touch()
    assert locked_read_only(path, unwritable=False) == "Read-only file system"
