"""Principals are proven by user ids and by the owners of cgroup directories, never by names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from testbed.descriptors import no_free_descriptor

from wattspan.model import HOST_ROOT, Group, GroupKind, Principal
from wattspan.processes.principals import (
    MOUNTS_INTERVAL,
    CgroupDirectories,
    PrincipalResolver,
    SubordinateUsers,
    owner_label,
)
from wattspan.util.unix_sockets import LOOK_UP_AGAIN, remembered_names

ID = "3f4d8c2b9a1e7f60518273645566778899aabbccddeeff00112233445566778a"
VICTIM = "b" * 64
POD = "0a1b2c3d-1111-2222-3333-444455556666"
ALICE, BOB = 70_001, 70_002  # without an entry in the table of users: labels are numbers
UNMAPPED = 65534


class Owned(CgroupDirectories):
    """Directories that belong to root, except those below the given ones."""

    def __init__(self, delegated: dict[str, int], *, hidden: bool = False) -> None:
        super().__init__(Path("/nonexistent"))
        self._delegated, self._hidden = delegated, hidden

    def authors(self, controllers: str, parts: Sequence[str]) -> tuple[int, ...] | None:
        if self._hidden:
            return None
        path, author, found = "", 0, []
        for part in parts:
            author = author or self._delegated.get(path, 0)
            found.append(author)
            path = f"{path}/{part}"
        return tuple(found)


def resolver(
    delegated: dict[str, int] | None = None, *, hidden: bool = False, pods_by_user: bool = False
) -> PrincipalResolver:
    directories = Owned(delegated or {}, hidden=hidden)
    return PrincipalResolver(directories, pods_by_user=pods_by_user)


POD_PATH = f"/kubepods.slice/kubepods-pod{POD.replace('-', '_')}.slice/cri-containerd-{ID}.scope"
MANAGER = "/user.slice/user-70001.slice/user@70001.service"

PRINCIPALS = {
    "host process": ("/system.slice/ssh.service", 0, HOST_ROOT),
    "user's session": ("/user.slice/user-70001.slice/session-3.scope", ALICE, Principal(ALICE)),
    "container root": (f"/docker/{ID}", 0, Principal(0, ID)),
    "container user": (f"/docker/{ID}", ALICE, Principal(ALICE, ID)),
    "pod root": (POD_PATH, 0, Principal(None, pod=POD)),
    "pod user": (POD_PATH, 1000, Principal(None, pod=POD)),
    "container within a container": (f"/docker/{ID}/docker/{VICTIM}", 0, Principal(0, ID)),
    "container within a pod": (f"{POD_PATH}/docker/{VICTIM}", 0, Principal(None, pod=POD)),
    "unmapped user": ("/system.slice/x.service", UNMAPPED, None),
    "unmapped user of a pod": (POD_PATH, UNMAPPED, Principal(None, pod=POD)),
    "rootless container": (f"{MANAGER}/user.slice/libpod-{ID}.scope", ALICE, Principal(ALICE)),
    "forged docker scope": (f"{MANAGER}/docker-{VICTIM}.scope", ALICE, Principal(ALICE)),
    "forged pod": (f"{MANAGER}{POD_PATH}", ALICE, Principal(ALICE)),
    "root of a runtime below a user's directory": (
        f"{MANAGER}/docker/{VICTIM}", 0, Principal(0, f"{ALICE}/{VICTIM}")),
}  # fmt: skip


@pytest.mark.parametrize(("path", "uid", "expected"), PRINCIPALS.values(), ids=PRINCIPALS.keys())
def test_principal_of_a_path_and_user(path: str, uid: int, expected: Principal | None) -> None:
    assert resolver({MANAGER: ALICE}).principal(f"0::{path}", uid) == expected


CLAIMS = {
    "container": f"{MANAGER}/docker-{VICTIM}.scope",
    "bare container": f"{MANAGER}/docker/{VICTIM}",
    "pod": f"{MANAGER}{POD_PATH}",
    "job": f"{MANAGER}/slurm/uid_5/job_7/step_0",
    "job below a daemon": f"{MANAGER}/slurmstepd.scope/job_7/step_0",
    "unit": f"{MANAGER}/app.slice/nginx.service",
    "lxc": f"{MANAGER}/lxc/web",
    "machine": f"{MANAGER}/machine-web.scope",
    "container of a container": f"/docker/{ID}/docker/{VICTIM}",
    "pod of a container": f"/docker/{ID}{POD_PATH}",
    "job of a container": f"/docker/{ID}/slurm/job_7",
    "unit of a container": "/lxc.payload.web/system.slice/nginx.service",
}


@pytest.mark.parametrize("path", CLAIMS.values(), ids=CLAIMS.keys())
def test_claimed_name_joins_no_group_of_another_owner(path: str) -> None:
    groups, _ = resolver({MANAGER: ALICE}).describe(f"0::{path}", ALICE)
    claimed = [group for group in groups if group.kind is not GroupKind.USER]
    genuine = {
        Group(GroupKind.CONTAINER, VICTIM[:12]),
        Group(GroupKind.CONTAINER, ID[:12]) if ID not in path else Group(GroupKind.CGROUP, ""),
        Group(GroupKind.POD, POD),
        Group(GroupKind.JOB, "7"),
        Group(GroupKind.UNIT, "nginx.service"),
    }
    assert claimed
    assert not genuine & set(claimed)
    assert any(group.name.startswith((f"{ALICE}/", f"{ID[:12]}/", "web/")) for group in claimed), (
        claimed
    )


def test_claims_of_two_users_differ() -> None:
    other = "/user.slice/user-70002.slice/user@70002.service"
    names = resolver({MANAGER: ALICE, other: BOB})
    of_alice, _ = names.describe(f"0::{MANAGER}/app.slice/web.service", ALICE)
    of_bob, _ = names.describe(f"0::{other}/app.slice/web.service", BOB)
    assert not set(of_alice) & set(of_bob)


def test_roots_name_in_one_hierarchy_outranks_a_claim_in_another() -> None:
    text = f"1:name=systemd:{MANAGER}/docker-{VICTIM}.scope\n2:memory:/docker/{ID}\n"
    groups, principal = resolver({MANAGER: ALICE}).describe(text, 0)
    assert Group(GroupKind.CONTAINER, ID[:12]) in groups
    assert principal == Principal(0, ID)


def test_pod_by_user_separates_users_of_a_pod() -> None:
    names = resolver(pods_by_user=True)
    assert names.principal(f"0::{POD_PATH}", 0) != names.principal(f"0::{POD_PATH}", 1000)
    assert names.principal(f"0::{POD_PATH}", UNMAPPED) is None


def test_unverified_names_divide_one_user_only() -> None:
    hidden = resolver(hidden=True)
    assert hidden.principal(f"0::{POD_PATH}", 5) == Principal(5, ID, POD)
    assert hidden.principal(f"0::{POD_PATH}", 5) != hidden.principal(f"0::{POD_PATH}", 6)
    assert not hidden.principal("0::/../../docker/" + ID, 0).is_host_root  # type: ignore[union-attr]


def test_containers_of_a_user_share_the_users_part() -> None:
    first, second = Principal(ALICE, "a"), Principal(ALICE, "b")
    assert first.path[0] == second.path[0] == Principal(ALICE).path[0]
    assert Principal(None, pod=POD).path[0] != Principal(0).path[0]
    assert len(Principal(5, pod=POD).path) == 2


def test_owner_labels_differ_for_different_principals() -> None:
    principals = [
        None,
        Principal(ALICE),
        Principal(BOB),
        Principal(ALICE, ID),
        Principal(ALICE, VICTIM),
        Principal(None, pod=POD),
        Principal(ALICE, pod=POD),
    ]
    assert len({owner_label(one) for one in principals}) == len(principals)


@pytest.fixture
def subuid(tmp_path: Path) -> Path:
    file = tmp_path / "subuid"
    file.write_text(
        f"{ALICE}:100000:65536\nroot:500000:65536\nnonsense\nx:y:z\n5:-1:3\n"
        f"{BOB}:{'9' * 5000}:1\n{BOB}:900000:{'9' * 40}\n"
    )
    return file


def test_subuids_count_as_their_owner(subuid: Path) -> None:
    users = SubordinateUsers(subuid)
    assert {users.owner_of(uid) for uid in range(100_000, 165_536, 1000)} == {ALICE}
    assert users.owner_of(165_536) == 165_536
    assert users.owner_of(1000) == 1000
    resolved = PrincipalResolver(Owned({}), users)
    assert resolved.principal("0::/x.slice", 100_999) == Principal(ALICE)


def test_subuids_of_root_are_one_principal_and_not_root(subuid: Path) -> None:
    users = SubordinateUsers(subuid)
    assert users.owner_of(500_001) == users.owner_of(565_535) == 500_000


def test_subuids_stay_known_without_a_free_descriptor(subuid: Path) -> None:
    users = SubordinateUsers(subuid)
    assert users.owner_of(100_000) == ALICE
    subuid.write_text(f"{BOB}:100000:65536\n# longer than before, so that the stamp differs\n")
    with no_free_descriptor(os.getpid()):
        assert users.owner_of(100_000) == ALICE
    assert users.shortage is not None
    assert users.owner_of(100_000) == BOB


def test_changed_file_of_subuids_is_read_again(subuid: Path) -> None:
    users = SubordinateUsers(subuid)
    assert users.owner_of(700_000) == 700_000
    subuid.write_text(f"{BOB}:700000:65536\n# longer than before, so that the stamp differs\n")
    subuid.touch()
    assert users.owner_of(700_000) == BOB
    subuid.unlink()
    assert users.owner_of(700_000) == 700_000


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "cgroup.controllers").touch()
    (tmp_path / "a/b/c").mkdir(parents=True)
    return tmp_path


@pytest.mark.needs_root
def test_authors_follow_the_owners_of_real_directories(tree: Path) -> None:
    import os

    directories = CgroupDirectories(tree)
    assert directories.authors("", ("a", "b", "c")) == (0, 0, 0)
    os.chown(tree / "a/b", ALICE, ALICE)
    assert directories.authors("", ("a", "b", "c")) == (0, 0, ALICE)
    os.chown(tree / "a/b", 0, 0)
    (tree / "a").chmod(0o777)
    os.chown(tree / "a/b", BOB, BOB)
    assert directories.authors("", ("a", "b", "c")) == (0, BOB, BOB)


def test_removed_directory_is_named_by_the_user_of_its_process(tree: Path) -> None:
    resolved = PrincipalResolver(CgroupDirectories(tree))
    gone = f"0::/gone/docker-{VICTIM}.scope"
    groups, principal = resolved.describe(gone, ALICE)
    assert principal == Principal(ALICE)
    assert Group(GroupKind.CONTAINER, VICTIM[:12]) not in groups
    unseen, _ = resolved.describe(gone, None)
    assert Group(GroupKind.CONTAINER, VICTIM[:12]) not in unseen


def test_path_longer_than_the_kernel_permits_is_a_claim(tree: Path) -> None:
    resolved = PrincipalResolver(CgroupDirectories(tree))
    deep = "/a" * 3000 + f"/docker-{VICTIM}.scope"
    assert resolved.principal(f"0::{deep}", ALICE) == Principal(ALICE)


def test_hierarchy_that_is_not_mounted_has_no_authors(tmp_path: Path) -> None:
    directories = CgroupDirectories(tmp_path)
    assert directories.authors("", ("a",)) is None
    assert directories.authors("cpu,cpuacct", ("a",)) is None
    assert directories.path_of(1) is None


@pytest.mark.parametrize("controllers", ["", "memory", "cpu,cpuacct"])
def test_hierarchy_that_is_mounted_later_has_authors(tmp_path: Path, controllers: str) -> None:
    times = [100.0]
    directories = CgroupDirectories(tmp_path, now=lambda: times[-1])
    before = PrincipalResolver(directories).mounts
    assert directories.authors(controllers, ("a",)) is None
    mount = tmp_path / controllers
    (mount / "a").mkdir(parents=True)
    (mount / ("cgroup.procs" if controllers else "cgroup.controllers")).touch()
    assert directories.authors(controllers, ("a",)) is None
    assert PrincipalResolver(directories).mounts is before
    times.append(100.0 + MOUNTS_INTERVAL)
    assert directories.authors(controllers, ("a",)) is not None
    assert PrincipalResolver(directories).mounts is not before


def test_version_1_hierarchy_of_a_container_hides_the_names_of_the_host(tmp_path: Path) -> None:
    (tmp_path / "memory/own").mkdir(parents=True)
    (tmp_path / "memory/cgroup.procs").touch()
    text = f"4:memory:/docker/{VICTIM}\n"
    groups, principal = PrincipalResolver(CgroupDirectories(tmp_path)).describe(text, ALICE)
    assert Group(GroupKind.CONTAINER, VICTIM[:12]) in groups
    assert principal == Principal(ALICE, VICTIM)
    (tmp_path / "memory/cgroup.sane_behavior").touch()  # at the root of the hierarchy only
    groups, principal = PrincipalResolver(CgroupDirectories(tmp_path)).describe(text, ALICE)
    assert Group(GroupKind.CONTAINER, f"{ALICE}/{VICTIM[:12]}") in groups
    assert principal == Principal(ALICE)


def test_cgroup_of_a_socket_is_found_by_its_inode(tree: Path) -> None:
    directories = CgroupDirectories(tree)
    assert directories.path_of((tree / "a/b").stat().st_ino) == "/a/b"
    (tree / "new").mkdir()
    inode = (tree / "new").stat().st_ino
    assert directories.path_of(inode) == "/new"
    (tree / "new").rmdir()
    assert directories.path_of(inode) != "/new"
    resolved = PrincipalResolver(directories)
    assert resolved.of_socket(ALICE, (tree / "a").stat().st_ino) == Principal(ALICE)
    assert resolved.of_socket(ALICE, None) is None
    assert resolved.of_socket(ALICE, 2**63) is None


# ------------------------------------------------------------ the namespace of a container

POD_NAME = "0b7e5a2c-8d7b-4d5e-9f53-1f6f0f3c2a11"
OTHER_POD = "6f1c0000-8d7b-4d5e-9f53-1f6f0f3c2a11"


def slices(pod: str, container: str) -> str:
    burstable = "kubepods.slice/kubepods-burstable.slice"
    name = f"kubepods-burstable-pod{pod.replace('-', '_')}.slice"
    return f"{burstable}/{name}/cri-containerd-{container}.scope"


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """The hierarchy of a node with two pods, which the agent's container sees at /host/sys."""
    (tmp_path / "cgroup.controllers").touch()
    for path in (slices(POD_NAME, VICTIM), slices(OTHER_POD, "ab" * 32), "system.slice/k.service"):
        (tmp_path / path).mkdir(parents=True)
    (tmp_path / slices(POD_NAME, VICTIM) / "cgroup.type").touch()
    return tmp_path


@pytest.mark.needs_root
def test_agent_in_a_container_knows_the_pods_of_the_node(node: Path) -> None:
    resolved = PrincipalResolver(CgroupDirectories.of_host(node / slices(POD_NAME, VICTIM), node))
    above = "/../../../.."
    assert resolved.principal("0::/", 1000) == Principal(None, pod=POD_NAME)
    other = f"0::{above}/{slices(OTHER_POD, 'ab' * 32)}\n"
    assert resolved.principal(other, 1000) == Principal(None, pod=OTHER_POD)
    sidecar = f"0::/../cri-containerd-{'cd' * 32}.scope\n"
    (node / slices(POD_NAME, "cd" * 32)).mkdir()
    assert resolved.principal(sidecar, 0) == Principal(None, pod=POD_NAME)
    groups, principal = resolved.describe(f"0::{above}/system.slice/k.service\n", 0)
    assert principal == Principal(0)
    assert Group(GroupKind.UNIT, "k.service") in groups


@pytest.mark.needs_root
def test_name_that_a_user_of_another_pod_chose_is_a_claim(node: Path) -> None:
    import os

    resolved = PrincipalResolver(CgroupDirectories.of_host(node / slices(POD_NAME, VICTIM), node))
    delegated = node / "user.slice" / f"kubepods-burstable-pod{POD_NAME.replace('-', '_')}.slice"
    delegated.mkdir(parents=True)
    os.chown(node / "user.slice", ALICE, ALICE)
    text = f"0::/../../../../user.slice/{delegated.name}"
    assert resolved.principal(text, ALICE) == Principal(ALICE)


def test_whole_hierarchy_or_no_view_of_the_host_leaves_paths_as_they_are(node: Path) -> None:
    (node / slices(POD_NAME, VICTIM) / "cgroup.type").unlink()
    text = "0::/../x\n"
    for own in (node / slices(POD_NAME, VICTIM), node / "missing"):
        assert CgroupDirectories.of_host(own, node).absolute(text) == text
    assert CgroupDirectories(node, node / "missing").absolute(text) == text
    (elsewhere := node / "elsewhere").mkdir()
    assert CgroupDirectories(elsewhere, node).absolute(text) == text


def test_other_hierarchies_are_not_relative_to_the_view(node: Path) -> None:
    directories = CgroupDirectories(node, node / "system.slice")
    found = directories.absolute("1:cpu:/a\n0::/k.service\n")
    assert found == "0::/system.slice/k.service\n1:cpu:/a\n"


# ------------------------------------------------------- directories of users that answer late


class LateDirectory:
    """A directory of users, such as LDAP, that answers from a time on, or until one."""

    def __init__(self) -> None:
        self.answers, self.time, self.asked = False, 0.0, 0

    def uid_of(self, name: str) -> int:
        self.asked += 1
        if not self.answers:
            raise KeyError(name)
        return {"alice": ALICE, "bob": BOB}[name]

    def name_of(self, uid: int) -> str:
        self.asked += 1
        if not self.answers:
            raise KeyError(uid)
        return {ALICE: "alice", BOB: "bob"}[uid]

    def now(self) -> float:
        return self.time


def test_user_without_a_name_is_looked_up_again() -> None:
    directory = LateDirectory()
    name_of = remembered_names(directory.name_of, directory.now)
    assert [name_of(ALICE), name_of(ALICE)] == [str(ALICE)] * 2
    assert directory.asked == 1
    directory.answers, directory.time = True, LOOK_UP_AGAIN
    assert name_of(ALICE) == "alice"
    directory.answers, directory.time = False, 10 * LOOK_UP_AGAIN
    assert name_of(ALICE) == "alice"
    assert directory.asked == 2


def test_owner_of_subuids_who_was_unknown_is_looked_up_again(tmp_path: Path) -> None:
    file, directory = tmp_path / "subuid", LateDirectory()
    file.write_text("alice:500000:65536\ngone:600000:65536\n")
    users = SubordinateUsers(file, directory.uid_of, directory.now)
    assert users.owner_of(500_000) == 500_000
    directory.answers = True
    assert users.owner_of(500_000) == 500_000
    assert directory.asked == 2
    directory.time = LOOK_UP_AGAIN
    assert users.owner_of(500_000) == ALICE
    directory.answers, directory.time = False, 10 * LOOK_UP_AGAIN
    assert users.owner_of(500_000) == ALICE
