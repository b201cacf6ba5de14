"""Root of the host and root of containers, at the capper's socket."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from wattspan.capper.host_root import MAX_SEARCHES, HostRoot
from wattspan.model import SECOND
from wattspan.processes.procfs import ProcFs
from wattspan.testing import ManualClock
from wattspan.util.unix_sockets import PeerCredentials

CONTAINER = f"system.slice/docker-{'ab' * 32}.scope"
POD = "kubepods.slice/kubepods-pod0b7e5a2c_8d7b_4d5e_9f53_1f6f0f3c2a11.slice"
SHELL = "user.slice/user-0.slice/session-1.scope"
PID = 4711


class Tree:
    """The cgroups of a host of version 2, or of version 1, and what its procfs shows."""

    def __init__(self, folder: Path, *, unified: bool = True, whole: bool = True) -> None:
        self.root, self.proc, self.clock = folder / "cgroup", folder / "proc", ManualClock()
        names = ["."] if unified else ["systemd", "memory", "pids"]
        self.mounts = [self.root / name for name in names]
        for mount in self.mounts:
            mount.mkdir(parents=True)
            (mount / "cgroup.procs").write_text("1\n2\n")
            mark = "cgroup.controllers" if unified else "cgroup.sane_behavior"
            if whole or unified:
                (mark_at := mount / mark).write_text("")
                assert mark_at.is_file()
            if unified and not whole:
                (mount / "cgroup.type").write_text("domain\n")

    def put(self, pid: int, *paths: str) -> Tree:
        """Put a process into the cgroup at a path of each hierarchy."""
        for mount, path in zip(self.mounts, paths * len(self.mounts), strict=False):
            (mount / path).mkdir(parents=True, exist_ok=True)
            (mount / path / "cgroup.procs").write_text(f"17\n{pid}\n")
        return self

    def show(self, pid: int, path: str) -> Tree:
        """Let procfs show the cgroup of a process."""
        (self.proc / str(pid)).mkdir(parents=True)
        (self.proc / str(pid) / "cgroup").write_text(f"0::/{path}\n")
        return self

    def refusal(self, pid: int | None = PID) -> str | None:
        judge = HostRoot(self.clock, ProcFs(self.proc), self.root)
        return judge.refusal(PeerCredentials(pid, 0))


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("path", [CONTAINER, f"{CONTAINER}/init", f"{POD}/crio-{'cd' * 32}.scope"])
def test_root_of_a_container_is_refused(tmp_path: Path, path: str, unified: bool) -> None:
    refusal = Tree(tmp_path, unified=unified).put(PID, path).refusal()
    assert refusal is not None
    assert "Root of a container is not root of this host" in refusal


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("path", [".", SHELL, "system.slice/wattspan.service"])
def test_root_of_the_host_is_accepted(tmp_path: Path, path: str, unified: bool) -> None:
    assert Tree(tmp_path, unified=unified).put(PID, path).refusal() is None


def test_container_of_one_hierarchy_is_enough_to_be_refused(tmp_path: Path) -> None:
    tree = Tree(tmp_path, unified=False).put(PID, SHELL, f"docker/{'ab' * 32}", SHELL)
    assert tree.refusal() is not None


def test_procfs_that_shows_the_process_is_read_first(tmp_path: Path) -> None:
    assert Tree(tmp_path).show(PID, SHELL).refusal() is None
    assert Tree(tmp_path / "other").show(PID, CONTAINER).refusal() is not None


@pytest.mark.parametrize("pid", [PID, None])
def test_process_in_no_known_group_proves_nothing(tmp_path: Path, pid: int | None) -> None:
    refusal = Tree(tmp_path).refusal(pid)
    assert refusal is not None
    assert "it may be a container's" in refusal


def test_capper_and_its_client_in_one_container(tmp_path: Path) -> None:
    tree = Tree(tmp_path).show(os.getpid(), CONTAINER).put(PID, CONTAINER)
    assert tree.refusal() is None


@pytest.mark.parametrize("unified", [True, False])
def test_view_of_a_container_proves_nothing_against_a_peer(tmp_path: Path, unified: bool) -> None:
    assert Tree(tmp_path, unified=unified, whole=False).refusal() is None


def test_root_of_a_container_is_refused_once_the_hierarchy_is_mounted(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "later").put(PID, CONTAINER)
    mount = tmp_path / "mount"
    judge, peer = HostRoot(tree.clock, ProcFs(tree.proc), mount), PeerCredentials(PID, 0)
    assert judge.refusal(peer) is None
    tree.root.rename(mount)
    refusal = judge.refusal(peer)
    assert refusal is not None
    assert "Root of a container is not root of this host" in refusal


def test_searches_are_limited(tmp_path: Path) -> None:
    tree = Tree(tmp_path).put(PID, SHELL)
    judge = HostRoot(tree.clock, ProcFs(tree.proc), tree.root)
    peer = PeerCredentials(PID, 0)
    found = [judge.refusal(peer) for _ in range(MAX_SEARCHES + 1)]
    assert found[:-1] == [None] * MAX_SEARCHES
    assert found[-1] is not None
    assert "try again" in found[-1]
    tree.clock.advance(ns=SECOND)
    assert judge.refusal(peer) is None


def test_group_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    tree = Tree(tmp_path).put(PID, SHELL)
    threaded = tree.root / "system.slice" / "threaded"
    (threaded / "cgroup.procs").mkdir(parents=True)
    assert tree.refusal() is None


def test_peer_that_has_ended_proves_nothing(tmp_path: Path) -> None:
    tree = Tree(tmp_path, unified=False)
    (tree.proc / str(PID)).mkdir(parents=True)
    (tree.proc / str(PID) / "cgroup").write_text("9:memory:/\n4:pids:/\n1:name=systemd:/\n")
    ended = f"{PID} (sh) Z 1 1 1 0 -1 4194564 0 0 0 0 0 0 0 0 20 0 1 0 42 0 0\n"
    (tree.proc / str(PID) / "stat").write_text(ended)
    refusal = tree.refusal()
    assert refusal is not None
    assert "it may be a container's" in refusal
    (tree.proc / str(PID) / "stat").write_text(ended.replace("4194564", "4194560"))
    assert tree.refusal() is None
