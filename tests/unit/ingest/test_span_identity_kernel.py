"""Samples of the kernel's files about sockets and processes."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from testbed.descriptors import no_free_descriptor

from wattspan.model import Consumer
from wattspan.processes.inspector import ProcessInspector, SocketOwner, TcpConnections
from wattspan.processes.principals import CgroupDirectories, PrincipalResolver


@pytest.mark.parametrize("end", [("127.0.0.1", 1), ("192.0.2.1", 40000), ("sock", 1), ("", 0)])
def test_end_that_is_not_here_has_no_owner(end: tuple[str, int]) -> None:
    connections = TcpConnections()
    assert connections.owner_of(end, ("127.0.0.1", 4318)) is None
    connections.close()


def test_process_holds_the_sockets_of_its_descriptors(tmp_path: Path) -> None:
    (tmp_path / "50/fd").mkdir(parents=True)
    (tmp_path / "50/fd/0").symlink_to("/dev/null")
    (tmp_path / "50/fd/3").symlink_to("socket:[555]")
    assert ProcessInspector(tmp_path).holds(50, 555)
    assert ProcessInspector(tmp_path).holds(50, 55) is False
    assert ProcessInspector(tmp_path).holds(51, 555) is False


def test_unreadable_descriptors_give_no_identity(tmp_path: Path) -> None:
    (tmp_path / "50").mkdir()
    (tmp_path / "50/fd").write_text("no folder: as good as a refusal")
    assert ProcessInspector(tmp_path).holds(50, 555) is None


STAT = "50 (app) S 7 1 1 0 -1 {flags} 1 0 0 0 5 6 0 0 20 0 3 0 98765 1 1 184 0 0 0 0 0 0 0 0\n"
STATUS = "Name:\tapp\nTgid:\t{tgid}\nPid:\t50\nUid:\t1\t2\t2\t3\nGid:\t9\t9\t9\t9\n{nspid}"


def process(root: Path, *, flags: int = 0, tgid: int = 50, nspid: str = "") -> ProcessInspector:
    (root / "50").mkdir(exist_ok=True)
    (root / "50/stat").write_text(STAT.format(flags=flags))
    (root / "50/status").write_text(STATUS.format(tgid=tgid, nspid=nspid))
    return ProcessInspector(root)


def test_process_is_read_with_all_its_users_and_pids(tmp_path: Path) -> None:
    living = process(tmp_path, nspid="NSpid:\t50\t12\t3\n").look(50)
    assert living.consumer == Consumer(50, 98765)
    assert living.born == 98765 * 10**9 // os.sysconf("SC_CLK_TCK")
    assert (living.name, living.parent) == ("app", 7)
    assert (living.users, living.pids) == ({1, 2, 3}, (50, 12, 3))
    assert not living.copied
    assert not living.kernel


def test_kernel_without_namespaces_has_one_pid_each(tmp_path: Path) -> None:
    living = process(tmp_path).look(50)
    assert living.pids == (50,)


def test_forked_process_without_exec_is_a_copy(tmp_path: Path) -> None:
    living = process(tmp_path, flags=0x400040).look(50)
    assert living.copied


def test_thread_or_partial_process_is_not_found(tmp_path: Path) -> None:
    assert process(tmp_path, tgid=49).look(50) is None
    (tmp_path / "50/status").unlink()
    assert process(tmp_path).identify(50) == Consumer(50, 98765)
    (tmp_path / "50/status").unlink()
    assert ProcessInspector(tmp_path).look(50) is None
    assert ProcessInspector(tmp_path).look(51) is None


def test_each_lookup_without_a_free_descriptor_is_a_shortage() -> None:
    inspector, own = ProcessInspector(), os.getpid()
    here = "127.0.0.1"
    lookups: list[Callable[[], object]] = [
        inspector.pids,
        lambda: inspector.look(own),
        lambda: inspector.principal(own),
        lambda: inspector.holds(own, 1),
        lambda: inspector.owner_of((here, 1), (here, 2)),
    ]
    with no_free_descriptor(own):
        for look in lookups:
            before = inspector.shortage
            assert not look()
            assert inspector.shortage is not before
    inspector.close()


def test_cgroup_of_a_socket_that_is_not_found_without_descriptors_is_a_shortage(
    tmp_path: Path,
) -> None:
    (tmp_path / "cgroup.controllers").touch()
    (tmp_path / "app.service").mkdir()
    cgroup = (tmp_path / "app.service").stat().st_ino
    principals = PrincipalResolver(CgroupDirectories(tmp_path))
    inspector, owner = ProcessInspector(principals=principals), SocketOwner(1000, 1, cgroup)
    with no_free_descriptor(os.getpid()):
        assert inspector.socket_principal(owner) is None
        assert inspector.shortage is not None
    before = inspector.shortage
    assert inspector.socket_principal(owner) is not None
    assert inspector.shortage is before
