"""The lock and the links by which the cappers of one host exclude and find each other."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from testbed.process_rights import umask, without_root

from wattspan.capper.host_directory import (
    HostClaim,
    HostDirectory,
    HostDirectoryError,
    HostHeldError,
)
from wattspan.capper.protocol import CapperAddress, CapperClient
from wattspan.ports import CapsError
from wattspan.testing import ManualClock

ROUNDS = 20
RACE = """
import os, signal, sys
from pathlib import Path
from wattspan.capper.host_directory import HostClaim, HostDirectory, HostHeldError

path = Path(sys.argv[1])

def compete(number, gate, result):
    os.read(gate, 1)  # until every competitor is there
    try:
        claim = HostClaim(path)
    except HostHeldError:
        os.write(result, b"0")
        os._exit(0)
    claim.publish(path / f"socket-{number}", path)
    os.write(result, b"1")
    signal.pause()

for turn in range(int(sys.argv[2])):
    gate, start = os.pipe()
    told, result = os.pipe()
    children = {}
    for number in range(4):
        if (child := os.fork()) == 0:
            compete(number, gate, result)
        children[child] = number
    os.write(start, b"1111")
    answers = b"".join(os.read(told, 1) for _ in children)
    address = HostDirectory(path).address()
    holder = HostDirectory(path).holder_text
    winner = next(child for child in children if f"Process {child} " in holder)
    assert answers.count(b"1") == 1, answers
    assert address.path.name == f"socket-{children[winner]}", (address, holder)
    for child in children:
        os.kill(child, signal.SIGKILL)  # the link stays, and is stale
        os.waitpid(child, 0)
    for one in (gate, start, told, result):
        os.close(one)
print("one each time")
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "host"


@pytest.fixture
def claim(path: Path) -> Iterator[HostClaim]:
    claim = HostClaim(path)
    claim.publish(path.parent / "one.sock", path.parent / "journal")
    yield claim
    claim.release()


def test_second_capper_is_refused_and_learns_who_serves(claim: HostClaim, path: Path) -> None:
    with pytest.raises(HostHeldError) as refused:
        HostClaim(path)
    socket_path = path.parent / "one.sock"
    assert f"Process {os.getpid()} is the capper of this host, answers on {socket_path}" in str(
        refused.value
    )
    assert str(refused.value) == HostDirectory(path).holder_text


def test_link_points_to_the_serving_capper_until_its_end(claim: HostClaim, path: Path) -> None:
    host = HostDirectory(path)
    assert host.address() == CapperAddress(path.parent / "one.sock", os.geteuid())
    claim.release()
    claim.release()
    assert (host.address(), host.holder_text) == (None, "")
    following = HostClaim(path)
    assert following.former_journal == path.parent / "journal"
    following.release()


@pytest.mark.slow
def test_one_of_several_simultaneous_starts_succeeds_each_time(path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RACE, str(path), str(ROUNDS)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout == "one each time\n", done.stderr


def symlinked(path: Path) -> None:
    (path.parent / "elsewhere").mkdir()
    path.symlink_to(path.parent / "elsewhere")


def writable(path: Path) -> None:
    path.mkdir()
    path.chmod(0o775)


def world_writable(path: Path) -> None:
    path.mkdir()
    path.chmod(0o1777)


def foreign(path: Path) -> None:
    path.mkdir()
    os.chown(path, 12_345, 12_345)


@pytest.mark.parametrize(
    "spoil",
    [
        symlinked,
        writable,
        world_writable,
        Path.touch,
        os.mkfifo,
        pytest.param(foreign, marks=pytest.mark.needs_root),
    ],
)
def test_untrusted_directory_is_refused_by_capper_and_client(
    spoil: Callable[[Path], None], path: Path
) -> None:
    spoil(path)
    before = sorted(path.parent.rglob("*"))
    with pytest.raises(HostDirectoryError, match=r"trusted\. Run|Remove it"):
        HostClaim(path)
    host = HostDirectory(path)
    assert host.fault()
    assert host.address() is None
    assert sorted(path.parent.rglob("*")) == before  # nothing was written


def test_missing_directory_is_no_fault_and_no_capper(path: Path) -> None:
    host = HostDirectory(path)
    assert (host.fault(), host.address(), host.holder_text) == ("", None, "")


def test_directory_is_visible_to_every_user_in_spite_of_the_umask(path: Path) -> None:
    with umask(0o077):
        HostClaim(path).release()
    assert path.stat().st_mode & 0o777 == 0o755
    assert (path / "host.lock").stat().st_mode & 0o777 == 0o600


def test_lock_that_is_a_link_to_elsewhere_is_refused(path: Path) -> None:
    path.mkdir(mode=0o755)
    (path / "host.lock").symlink_to(path.parent / "victim")
    with pytest.raises(HostDirectoryError, match="Cannot take the lock"):
        HostClaim(path)
    assert not (path.parent / "victim").exists()


def test_stale_or_foreign_link_is_replaced_and_its_target_untouched(path: Path) -> None:
    path.mkdir(mode=0o755)
    victim = path.parent / "victim"
    victim.write_text("untouched")
    for name in ("current", "journal", "current.new", "journal.new"):
        (path / name).symlink_to(victim)
    claim = HostClaim(path)
    claim.publish(path / "own.sock", path)
    assert HostDirectory(path).address() == CapperAddress(path / "own.sock", os.geteuid())
    claim.release()
    assert victim.read_text() == "untouched"


def test_link_that_cannot_be_written_is_an_error_with_a_remedy(path: Path) -> None:
    (path / "current" / "full").mkdir(parents=True)
    claim = HostClaim(path)
    with pytest.raises(HostDirectoryError, match="Cannot write the link to this capper"):
        claim.publish(path / "own.sock", path)
    claim.release()


@pytest.mark.parametrize("kind", ["file", "relative", "directory"])
def test_link_of_another_kind_names_no_capper(kind: str, path: Path) -> None:
    path.mkdir(mode=0o755)
    match kind:
        case "file":
            (path / "current").write_text("/run/capper.sock")
        case "relative":
            (path / "current").symlink_to("capper.sock")
        case _:
            (path / "current").mkdir()
    assert HostDirectory(path).address() is None


@pytest.mark.needs_root
def test_link_of_another_user_names_no_capper(claim: HostClaim, path: Path) -> None:
    os.chown(path / "current", 12_345, 12_345, follow_symlinks=False)
    assert HostDirectory(path).address() is None


@pytest.mark.parametrize("removed", ["current", "host.lock", "directory", "replaced"])
def test_capper_renews_what_was_removed(removed: str, claim: HostClaim, path: Path) -> None:
    match removed:
        case "directory":
            path.rename(path.parent / "away")
        case "replaced":
            (path / "current").unlink()
            (path / "current").symlink_to("/elsewhere")
        case _:
            (path / removed).unlink()
    claim.keep()
    assert HostDirectory(path).address() == CapperAddress(path.parent / "one.sock", os.geteuid())
    with pytest.raises(HostHeldError):
        HostClaim(path)


def test_capper_learns_that_another_one_took_its_place(claim: HostClaim, path: Path) -> None:
    (path / "host.lock").unlink()
    other = HostClaim(path)
    other.publish(path / "other.sock", path)
    with pytest.raises(HostHeldError):
        claim.keep()
    claim.release()
    assert HostDirectory(path).address() == CapperAddress(path / "other.sock", os.geteuid())
    other.release()


# ------------------------------------------------------------------------------------ clients


@pytest.fixture
def sockets() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="wattspan-") as folder:
        yield Path(folder)


def connected(*places: CapperAddress) -> str:
    """The client's error: no listener in these tests answers."""
    client = CapperClient(lambda: places, ManualClock(), who="test", timeout=0.05)
    try:
        client.rows()
    except CapsError as error:
        return str(error)
    finally:
        client.close()
    return ""


def test_client_passes_over_sockets_without_a_listener(sockets: Path) -> None:
    dead, living = sockets / "dead", sockets / "living"
    with socket.socket(socket.AF_UNIX) as ended:
        ended.bind(str(dead))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(living))
        listener.listen()
        error = connected(*map(CapperAddress, (sockets / "none", dead, living)))
    assert error.startswith(f"No capper answers on {living}: it takes too long")


def test_client_names_the_first_socket_if_none_listens(sockets: Path) -> None:
    error = connected(CapperAddress(sockets / "first"), CapperAddress(sockets / "second"))
    assert error.startswith(f"No capper answers on {sockets / 'first'}: there is none.")


@pytest.mark.needs_root
def test_process_of_an_unexpected_user_behind_the_link_is_no_capper(sockets: Path) -> None:
    path = sockets / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        with without_root(12_345):  # the kernel reports the user at the time of listen()
            listener.listen()
        error = connected(CapperAddress(path, owner=0))
    assert "a process of user 12345 listens there" in error
