"""A cgroup's clock bounds the charges in it, and reveals unobserved work."""

import errno
import os
from contextlib import suppress
from pathlib import Path

import pytest
from testbed.descriptors import no_free_descriptor

from wattspan.processes.cgroup_names import MAX_DEPTH
from wattspan.processes.cgroups import (
    MAX_OF_USER,
    RETRY_EVERY,
    CgroupClocks,
    CgroupExcess,
    CgroupHierarchy,
    TotalCpuClock,
    find_hierarchy,
    open_cgroup_times,
    walk_cgroups,
)


class Tree:
    """A cgroup tree of real files."""

    def __init__(self, root: Path, *, unified: bool) -> None:
        self.root, self.unified = root, unified

    def set(self, path: str, nanoseconds: int) -> None:
        folder = self.root / path.strip("/")
        folder.mkdir(parents=True, exist_ok=True)
        if self.unified:
            (folder / "cpu.stat").write_text(f"usage_usec {nanoseconds // 1000}\nuser_usec 1\n")
        else:
            (folder / "cpuacct.usage").write_text(f"{nanoseconds}\n")

    def empty(self, path: str) -> None:
        """Errors when reading the clock of a removed cgroup: no value."""
        name = "cpu.stat" if self.unified else "cpuacct.usage"
        (self.root / path.strip("/") / name).write_text("")

    @property
    def hierarchy(self) -> CgroupHierarchy:
        return CgroupHierarchy(self.root, self.unified)


@pytest.fixture(params=[False, True], ids=["v1", "v2"])
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Tree:
    tree = Tree(tmp_path, unified=request.param)
    for path in ("/", "/a", "/a/b", "/c"):
        tree.set(path, 1_000_000)
    return tree


def test_find_hierarchy_prefers_the_better_clocks(tmp_path: Path) -> None:
    assert find_hierarchy(tmp_path) is None
    (tmp_path / "unified").mkdir()
    (tmp_path / "unified/cgroup.controllers").write_text("")
    found = find_hierarchy(tmp_path)
    assert found.unified
    Tree(tmp_path / "cpu,cpuacct", unified=False).set("/", 0)
    assert find_hierarchy(tmp_path) == CgroupHierarchy(tmp_path / "cpu,cpuacct", unified=False)


def test_times_are_those_of_the_hierarchy_that_is_mounted_now(tmp_path: Path) -> None:
    assert open_cgroup_times(tmp_path) == (None, None)
    Tree(tmp_path, unified=True).set("/a", 0)
    (tmp_path / "cgroup.controllers").write_text("")
    clocks, total = open_cgroup_times(tmp_path)
    assert clocks.name == "cgroup v2 cpu.stat"
    assert total.read() == 0
    clocks.close()
    total.close()
    (tmp_path / "cgroup.type").write_text("domain\n")  # of a container's part
    clocks, total = open_cgroup_times(tmp_path)
    assert (clocks is None, total) == (False, None)
    clocks.close()


def test_time_of_children_is_not_counted_with_the_parent(tree: Tree) -> None:
    clocks = CgroupClocks(tree.hierarchy)
    assert clocks.add("/a")
    assert clocks.add("/a/b")
    tree.set("/a", 11_000_000)
    tree.set("/a/b", 8_000_000)
    change, gone = clocks.read()
    assert (change["/a"], change["/a/b"], gone) == (3_000_000, 7_000_000, {})


def test_clock_that_cannot_be_read_without_memory_is_not_of_a_removed_cgroup(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = CgroupClocks(tree.hierarchy)
    assert clocks.add("/a")

    def failing(*_: int) -> bytes:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    tree.set("/a", 11_000_000)
    monkeypatch.setattr(os, "pread", failing)
    change, gone = clocks.read()
    assert (change["/a"], gone) == (0, {})
    before = len(descriptors())
    assert not clocks.add("/c")
    assert len(descriptors()) == before
    monkeypatch.undo()
    assert clocks.read()[0]["/a"] == 10_000_000
    assert clocks.wanted("/c")


def test_cgroup_without_a_free_descriptor_stays_wanted(tree: Tree) -> None:
    tree.set("/a/emulator", 1_000_000)
    if tree.unified:
        (tree.root / "a/emulator/cgroup.type").write_text("threaded\n")
    clocks = CgroupClocks(tree.hierarchy)
    with no_free_descriptor(os.getpid()):
        assert not clocks.add("/c")
        assert not clocks.add("/a/emulator")
    assert clocks.wanted("/c")
    assert clocks.wanted("/a/emulator")
    assert clocks.add("/c")
    assert clocks.add("/a/emulator")
    assert clocks.covering("/a/emulator") == "/a"


def test_clock_that_its_owner_resets_takes_no_time_from_others(tree: Tree) -> None:
    """A container with a delegated cgroup of v1 may write 0 to its clock."""
    clocks, book = CgroupClocks(tree.hierarchy), CgroupExcess()
    assert clocks.add("/a")
    assert clocks.add("/a/b")
    assert clocks.add("/c")
    tree.set("/a/b", 400_000)
    tree.set("/a", 1_400_000)
    tree.set("/c", 1_700_000)  # the only unseen work
    tree.set("/", 2_100_000)
    book.measured(clocks.read()[0])
    book.charged("/a/b", 400_000)
    assert book.settle() == {"/c": 700_000}


@pytest.mark.parametrize("unified", [False, True])
def test_threaded_cgroup_counts_with_its_domain(tmp_path: Path, *, unified: bool) -> None:
    """libvirt divides the threads of a guest among cgroups; one is that of its process."""
    tree, book = Tree(tmp_path, unified=unified), CgroupExcess()
    for path in ("/vm", "/vm/emulator", "/vm/vcpu0", "/cron"):
        tree.set(path, 1_000_000)
        if unified and path.startswith("/vm/"):
            (tmp_path / path[1:] / "cgroup.type").write_text("threaded\n")
    clocks = CgroupClocks(tree.hierarchy)
    assert clocks.add("/vm/emulator")
    assert clocks.add("/cron")
    assert not clocks.wanted("/vm/emulator")
    assert clocks.covering("/vm/emulator") == "/vm"
    tree.set("/vm", 9_000_000)
    tree.set("/cron", 2_000_000)  # the only unseen work
    book.measured(clocks.read()[0])
    book.charged("/vm", 8_000_000)
    assert book.settle() == {"/cron": 1_000_000}


def test_removed_cgroup_names_its_successor(tree: Tree) -> None:
    clocks = CgroupClocks(tree.hierarchy)
    clocks.add("/a")
    clocks.add("/a/b")
    tree.empty("/a/b")
    change, gone = clocks.read()
    assert gone == {"/a/b": "/a"}
    assert "/a/b" not in change
    assert clocks.covering("/a/b") == "/a"


def test_path_outside_the_hierarchy_opens_no_file(tree: Tree) -> None:
    clocks = CgroupClocks(tree.hierarchy)
    assert clocks.path_in("0::/../../etc\n4:cpuacct:/../../etc\n") is None
    assert clocks.path_in("0::/a\n4:cpu,cpuacct:/c\n") == ("/a" if tree.unified else "/c")


def test_path_deeper_than_any_manager_nests_counts_with_one_above(tree: Tree) -> None:
    clocks = CgroupClocks(tree.hierarchy)
    clocks.add("/a")
    deep = "/a" + "/x" * 2000
    path = clocks.path_in(f"0::{deep}\n4:cpuacct:{deep}\n")
    assert path == "/a" + "/x" * (MAX_DEPTH - 1)
    assert clocks.covering(path) == "/a"


@pytest.mark.needs_root
def test_cgroups_of_users_hide_none_of_root_and_of_another_user(tmp_path: Path) -> None:
    shell = "/user.slice/user-0.slice/session-1.scope"
    modest = "/user.slice/user-2000.slice/user@2000.service"
    # Greedy users are created before and after them: a directory may be listed in either order.
    for user in (1000, 1001, 1002, 1003, 0, 2000, 1004, 1005, 1006, 1007):
        manager = tmp_path / f"user.slice/user-{user}.slice/user@{user}.service"
        manager.mkdir(parents=True)
        os.chown(manager, user, user)
        for number in range(300 if user in range(1000, 1008) else 0):
            (manager / f"{number}").mkdir()
    (tmp_path / shell[1:]).mkdir()
    (tmp_path / modest[1:] / "app.slice/one.scope").mkdir(parents=True)
    found = {path for path, _ in walk_cgroups(str(tmp_path), 300)}
    assert {shell, modest, f"{modest}/app.slice/one.scope"} <= found
    assert len(found) <= 300


def test_unreadable_cgroup_is_not_opened_again(tree: Tree) -> None:
    clocks = CgroupClocks(tree.hierarchy)
    assert clocks.wanted("/missing")
    assert not clocks.add("/missing")
    assert not clocks.wanted("/missing")


@pytest.mark.needs_root
def test_clocks_of_a_users_cgroups_leave_room_for_those_of_others(tree: Tree) -> None:
    clocks = CgroupClocks(tree.hierarchy, lambda uid: uid % 1000)
    many = [f"/a/{number}" for number in range(MAX_OF_USER + 1)]
    for number, path in enumerate(many):
        tree.set(path, 0)
        for file in (tree.root / path[1:]).iterdir():
            os.chown(file, 7 + number % 2 * 1000, 0)  # two ids of one user
    assert [clocks.add(path) for path in many] == [True] * MAX_OF_USER + [False]
    assert clocks.add("/c")
    assert not clocks.wanted(many[-1])
    tree.empty(many[0])
    for _ in range(RETRY_EVERY):
        clocks.read()
    assert clocks.wanted(many[-1])
    assert clocks.add(many[-1])
    assert many[-1] in clocks.read()[0]


def test_total_clock_is_the_sum_of_all_cgroups(tree: Tree) -> None:
    total = TotalCpuClock(tree.hierarchy)
    assert total.read() == 0
    for path in ("/", "/a", "/c"):
        tree.set(path, 4_000_000)
    # v1's root holds everything; v2's root is left out, its children are summed.
    assert total.read() == (6_000_000 if tree.unified else 3_000_000)


def test_cgroup_vanishing_during_discovery_leaks_no_descriptor(tree: Tree) -> None:
    path = "/c" if tree.unified else "/"
    tree.empty(path)
    total = TotalCpuClock(tree.hierarchy)
    for _ in range(3):
        total.refresh()
    assert [one for one in descriptors() if one.parent == tree.root / path.strip("/")] == []
    tree.set(path, 1_000_000)
    total.refresh()
    assert len([one for one in descriptors() if one.parent == tree.root / path.strip("/")]) == 1
    total.close()
    assert [one for one in descriptors() if one.is_relative_to(tree.root)] == []


def descriptors() -> list[Path]:
    """Open descriptors of this process."""
    found = []
    for one in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one that lists them
            found.append(one.readlink())
    return found


def test_unnoticed_move_is_not_charged_twice() -> None:
    book = CgroupExcess()
    book.charged("/old", 50)  # charged in the old cgroup,
    book.measured({"/old": 0, "/new": 50})  # worked in the new one
    assert book.settle() == {}
    book.moved("/old", "/new")
    book.measured({"/old": 7})
    assert book.settle() == {"/old": 7}


def test_read_skew_of_the_clocks_does_not_accumulate() -> None:
    book = CgroupExcess()
    for _ in range(1000):
        book.measured({"/": 90})
        book.charged("/", 100)
        assert book.settle() == {}
        book.measured({"/": 110})
        book.charged("/", 100)
        assert book.settle() == {}


def test_excess_of_a_removed_cgroup_moves_to_its_parent() -> None:
    book = CgroupExcess()
    book.charged("/a/b", 40)
    book.folded("/a/b", "/a")
    book.measured({"/a": 100})
    assert book.settle() == {"/a": 60}
