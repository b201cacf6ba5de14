"""Samples of the kernel's files about sockets and processes."""

import os
import sys
from pathlib import Path

import pytest

from wattspan.model import Consumer
from wattspan.processes.inspector import ProcessInspector, SocketOwner, TcpConnections, holds_socket

HEADER = (
    "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout "
    "inode\n"
)
# # little-endian form of 127.0.0.1:40000 connected to 127.0.0.1:4318
MINE = "   7: 0100007F:9C40 0100007F:10DE {state} 00000000:00000000 00:00000000 00000000  {rest}\n"
THEIRS = "   8: 0100007F:10DE 0100007F:9C40 01 00000000:00000000 00:00000000 00000000  0 0 999 1\n"
MAPPED = "0000000000000000FFFF00000100007F"
SIX = "00000000000000000000000001000000"
END, OTHER = ("127.0.0.1", 40000), ("127.0.0.1", 4318)

pytestmark = pytest.mark.skipif(sys.byteorder != "little", reason="samples of such a machine")


def table(root: Path, name: str, *rows: str) -> TcpConnections:
    (root / "net").mkdir(exist_ok=True)
    (root / "net" / name).write_text(HEADER + "".join(rows))
    return TcpConnections(root)


def row(state: str = "01", user: int = 1000, inode: int = 555) -> str:
    return MINE.format(
        state=state, rest=f"{user}        0 {inode} 1 0000000000000000 20 4 30 10 -1"
    )


def test_senders_end_is_found_and_not_ours(tmp_path: Path) -> None:
    assert table(tmp_path, "tcp", THEIRS, row()).owner_of(END, OTHER) == SocketOwner(1000, 555)


def test_socket_without_holder_has_no_owner(tmp_path: Path) -> None:
    waiting = table(tmp_path, "tcp", row(state="06", user=0, inode=0))
    assert waiting.owner_of(END, OTHER) is None


@pytest.mark.parametrize("end", ["127.0.0.1", "::ffff:127.0.0.1"])
def test_ipv4_connection_is_found_among_ipv6_sockets(tmp_path: Path, end: str) -> None:
    mapped = row().replace("0100007F", MAPPED)
    connections = table(tmp_path, "tcp6", mapped)
    assert connections.owner_of((end, 40000), OTHER) == SocketOwner(1000, 555)


def test_ipv6_address_is_found_without_its_zone(tmp_path: Path) -> None:
    connections = table(tmp_path, "tcp6", row().replace("0100007F", SIX))
    assert connections.owner_of(("::1%lo", 40000), ("::1", 4318)) == SocketOwner(1000, 555)


@pytest.mark.parametrize("end", [("127.0.0.1", 40001), ("10.0.0.1", 40000), ("sock", 1), ("", 0)])
def test_end_that_is_not_here_has_no_owner(tmp_path: Path, end: tuple[str, int]) -> None:
    assert table(tmp_path, "tcp", row()).owner_of(end, OTHER) is None
    assert TcpConnections(tmp_path / "nothing").owner_of(end, OTHER) is None


def test_process_holds_the_sockets_of_its_descriptors(tmp_path: Path) -> None:
    (tmp_path / "50/fd").mkdir(parents=True)
    (tmp_path / "50/fd/0").symlink_to("/dev/null")
    (tmp_path / "50/fd/3").symlink_to("socket:[555]")
    assert holds_socket(tmp_path, 50, 555)
    assert holds_socket(tmp_path, 50, 55) is False
    assert holds_socket(tmp_path, 51, 555) is False


def test_unreadable_descriptors_give_no_identity(tmp_path: Path) -> None:
    (tmp_path / "50").mkdir()
    (tmp_path / "50/fd").write_text("no folder: as good as a refusal")
    assert holds_socket(tmp_path, 50, 555) is None


STAT = "50 (app) S 7 1 1 0 -1 {flags} 1 0 0 0 5 6 0 0 20 0 3 0 98765 1 1 184 0 0 0 0 0 0 0 0\n"
STATUS = "Name:\tapp\nTgid:\t{tgid}\nPid:\t50\nUid:\t1\t2\t2\t3\nGid:\t9\t9\t9\t9\n{nspid}"


def process(root: Path, *, flags: int = 0, tgid: int = 50, nspid: str = "") -> ProcessInspector:
    (root / "50").mkdir(exist_ok=True)
    (root / "50/stat").write_text(STAT.format(flags=flags))
    (root / "50/status").write_text(STATUS.format(tgid=tgid, nspid=nspid))
    return ProcessInspector(root)


def test_process_is_read_with_all_its_users_and_pids(tmp_path: Path) -> None:
    living = process(tmp_path, nspid="NSpid:\t50\t12\t3\n").look(50)
    assert living is not None
    assert living.consumer == Consumer(50, 98765)
    assert living.born == 98765 * 10**9 // os.sysconf("SC_CLK_TCK")
    assert (living.parent, living.users, living.pids) == (7, {1, 2, 3}, (50, 12, 3))
    assert not living.copied
    assert not living.kernel


def test_kernel_without_namespaces_has_one_pid_each(tmp_path: Path) -> None:
    living = process(tmp_path).look(50)
    assert living is not None
    assert living.pids == (50,)


def test_forked_process_without_exec_is_a_copy(tmp_path: Path) -> None:
    living = process(tmp_path, flags=0x400040).look(50)
    assert living is not None
    assert living.copied


def test_thread_or_partial_process_is_not_found(tmp_path: Path) -> None:
    assert process(tmp_path, tgid=49).look(50) is None
    (tmp_path / "50/status").unlink()
    assert process(tmp_path).identify(50) == Consumer(50, 98765)
    (tmp_path / "50/status").unlink()
    assert ProcessInspector(tmp_path).look(50) is None
    assert ProcessInspector(tmp_path).look(51) is None
