"""The clocks of cgroups: CPU time of all their processes, also of those that were never observed.

The clock of a cgroup includes its descendants'. Here the time of a known cgroup excludes that of
the known cgroups below it.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from wattspan.attribution.division import split
from wattspan.processes.cgroup_names import MAX_DEPTH, cgroup_paths
from wattspan.util.files import shortage_remedy

MAX_CGROUPS = 512
"""Limit of open cgroup clocks; further cgroups count with the nearest known one above."""

MAX_OF_USER = MAX_CGROUPS // 4
"""Limit of those that one user other than root has made."""

RETRY_EVERY = 256
"""Reads of the clocks after which refused cgroups may be added again."""

MAX_CGROUP_DIRECTORIES = 20_000
"""Limit of directories in one search."""

_MAX_REMEMBERED = 2048


class CgroupHierarchy(NamedTuple):
    """Location of the cgroups' clocks: below ``root``, in the paths of one controller."""

    root: Path
    unified: bool

    @property
    def name(self) -> str:
        return "cgroup v2 cpu.stat" if self.unified else "cgroup v1 cpuacct.usage"

    def text_of(self, path: str) -> str:
        """The text of ``/proc/PID/cgroup`` of a process at ``path``."""
        return f"0::{path}" if self.unified else f"1:cpuacct:{path}"

    def path_in(self, cgroup_text: str) -> str | None:
        """The path of a process in this hierarchy, cut to `MAX_DEPTH`; None outside of our view."""
        for controllers, path in cgroup_paths(cgroup_text).items():
            if (controllers == "") if self.unified else ("cpuacct" in controllers.split(",")):
                parts = path.split("/")
                outside = ".." in parts or "\n" in path
                return None if outside else "/".join(parts[: MAX_DEPTH + 1])
        return None

    def is_threaded(self, path: str) -> bool:
        """True if processes in this cgroup may have threads in others beside it.

        Version 1 does not tell: libvirt puts the main thread of a guest in ``emulator`` there.
        OSError without a free descriptor or memory.
        """
        if not self.unified:
            return path.endswith("/emulator")
        try:
            return Path(f"{self.root}{path}/cgroup.type").read_text("ascii") == "threaded\n"
        except (OSError, ValueError) as error:
            if shortage_remedy(error):
                raise
            return False


def find_hierarchy(root: Path) -> CgroupHierarchy | None:
    """The hierarchy with the better clocks: v1's ``cpuacct`` where it is mounted, else v2."""
    for name in ("cpuacct", "cpu,cpuacct", "cpuacct,cpu"):
        if _is_file(root / name / "cpuacct.usage"):
            return CgroupHierarchy(root / name, unified=False)
    for path in (root, root / "unified"):
        if _is_file(path / "cgroup.controllers"):
            return CgroupHierarchy(path, unified=True)
    return None


def _is_file(path: Path) -> bool:
    return os.path.isfile(path)  # noqa: PTH113 - False in a directory that cannot be searched


def is_host_root(hierarchy: CgroupHierarchy) -> bool:
    """True for the whole host's hierarchy, False for the part that a container is shown."""
    if hierarchy.unified:
        return not (hierarchy.root / "cgroup.type").exists()
    return (hierarchy.root / "cgroup.sane_behavior").exists()


def walk_cgroups(
    mount: str,
    most: int = MAX_CGROUP_DIRECTORIES,
    note: Callable[[OSError], object] = lambda _: None,
) -> Iterator[tuple[str, int]]:
    """Paths below ``mount`` and inodes of at most ``most`` cgroups; "" is the root.

    Those that root named come before those of users, the outer ones first. A user has a tenth at
    most: many directories of one hide none of another. ``note`` gets the errors of directories that
    are left out.
    """
    try:
        yield "", os.stat(mount).st_ino  # noqa: PTH116 - a bare string
    except OSError as error:
        note(error)
        return
    queue, of_users = deque([("", 0)]), deque[tuple[str, int]]()
    seen, held = 1, Counter[int]()
    while queue or of_users:
        path, author = (queue or of_users).popleft()
        room = min(most - seen, most // 10 - held[author] if author else most)
        if room <= 0:
            continue
        try:
            with os.scandir(mount + path) as entries:
                folders = (one for one in entries if one.is_dir(follow_symlinks=False))
                some = [
                    (f"{path}/{one.name}", author or _owner(one), one.inode())
                    for one in islice(folders, room)
                ]
        except OSError as error:
            note(error)
            continue
        seen += len(some)
        held[author] += len(some)
        for below, owner, inode in some:
            (of_users if owner else queue).append((below, owner))
            yield below, inode


def _owner(directory: os.DirEntry[str]) -> int:
    """The user who names the directories in this one; 0 if it has been removed."""
    try:
        return directory.stat(follow_symlinks=False).st_uid
    except OSError:
        return 0


class _OpenClocks:
    """Open files with the clocks of cgroups, by path, and the last value of each."""

    def __init__(self, hierarchy: CgroupHierarchy) -> None:
        self._hierarchy = hierarchy
        self._fds: dict[str, int] = {}
        self._last: dict[str, int] = {}

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def _open(self, path: str) -> bool:
        """Add the cgroup at ``path``; False if its clock is not readable.

        OSError without a free descriptor or memory, which tells nothing about the cgroup.
        """
        name = "cpu.stat" if self._hierarchy.unified else "cpuacct.usage"
        try:
            fd = os.open(f"{self._hierarchy.root}{path}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            if shortage_remedy(error):
                raise
            return False
        try:
            value = self._value(fd)
        except OSError:
            os.close(fd)
            raise
        if value is None:  # the cgroup was removed meanwhile
            os.close(fd)
            return False
        self._fds[path], self._last[path] = fd, value
        return True

    def _rises(self) -> tuple[dict[str, int], list[str]]:
        """The nanoseconds since the last call by path, and the removed cgroups."""
        rises: dict[str, int] = {}
        removed: list[str] = []
        for path, fd in self._fds.items():
            try:
                value = self._value(fd)
            except OSError:
                value = self._last[path]
            if value is None:
                removed.append(path)
                continue
            # The owner of a cgroup of v1 may reset its clock, which then begins at zero.
            rises[path] = value - (self._last[path] if value >= self._last[path] else 0)
            self._last[path] = value
        for path in removed:
            os.close(self._fds.pop(path))
            del self._last[path]
        return rises, removed

    def _value(self, fd: int) -> int | None:
        """Nanoseconds; None once the cgroup was removed (ENODEV). OSError without memory."""
        try:
            raw = os.pread(fd, 4096, 0)
            if not self._hierarchy.unified:
                return int(raw)
            for line in raw.split(b"\n"):
                if line.startswith(b"usage_usec "):
                    return int(line[11:]) * 1000
        except (OSError, ValueError) as error:
            if shortage_remedy(error):
                raise
        return None


class TotalCpuClock(_OpenClocks):
    """The CPU time of all processes together, to the nanosecond or microsecond.

    v1 has it as the clock of the root. v2 counts only ticks at its root, so there it is the sum
    over the cgroups just below, without kernel threads, which have no cgroup.
    """

    def __init__(self, hierarchy: CgroupHierarchy) -> None:
        super().__init__(hierarchy)
        self._path_in = lru_cache(_MAX_REMEMBERED)(hierarchy.path_in)
        self._sum = 0
        self.refresh()

    @property
    def covers_kernel(self) -> bool:
        return not self._hierarchy.unified

    def omits(self, cgroup_text: str) -> bool:
        """True if the sum omits a process in this cgroup: in v2, in the root or out of view."""
        return self._hierarchy.unified and self._path_in(cgroup_text) in (None, "/")

    def refresh(self) -> None:
        """Add new cgroups, without their CPU time so far."""
        names = [""]
        if self._hierarchy.unified:
            try:
                names = [entry.name for entry in os.scandir(self._hierarchy.root) if entry.is_dir()]
            except OSError:
                names = []
        for name in names:
            if f"/{name}" not in self._fds:
                with suppress(OSError):
                    self._open(f"/{name}")

    def read(self) -> int | None:
        """Nanoseconds since the beginning; None without a cgroup."""
        rises, _ = self._rises()
        self._sum += sum(rises.values())
        return self._sum if self._fds else None


class CgroupClocks(_OpenClocks):
    """The clocks of the cgroups in which processes were found."""

    def __init__(
        self, hierarchy: CgroupHierarchy, owner_of: Callable[[int], int] = lambda uid: uid
    ) -> None:
        """``owner_of`` returns the user to whom a user id belongs."""
        super().__init__(hierarchy)
        self._owner_of = owner_of
        self._makers: dict[str, int] = {}  # the user who made each cgroup
        self._above: dict[str, str | None] = {}
        self.path_in = lru_cache(_MAX_REMEMBERED)(hierarchy.path_in)
        """The path of a process by its cgroup text; None outside of our view."""
        self.text_of = hierarchy.text_of
        """The cgroup text of a path."""
        self._refused: set[str] = set()
        self._reads = 0
        if not hierarchy.unified:
            self.add("/")  # v2 shows only ticks at the root, and every process as its own child

    @property
    def name(self) -> str:
        return self._hierarchy.name

    def wanted(self, path: str) -> bool:
        """True if ``path`` is neither known nor was refused lately."""
        return path not in self._fds and path not in self._refused

    def covering(self, path: str | None) -> str | None:
        """The nearest known cgroup at or above ``path``, which includes its time; or None."""
        while path is not None and path not in self._fds:
            path = _parent(path)
        return path

    def add(self, path: str) -> bool:
        """Add a cgroup, or the domain of a threaded one; False if its clock cannot be read.

        Its earlier time stays with the cgroup above. To be called right after ``read``. Without a
        free descriptor or memory the cgroup stays wanted.
        """
        try:
            return self._add(path)
        except OSError:
            return False

    def _add(self, path: str) -> bool:
        """As ``add``, but OSError without a free descriptor or memory."""
        if path in self._fds:
            return True
        threaded, above = self._hierarchy.is_threaded(path), _parent(path)
        full = len(self._fds) >= MAX_CGROUPS or (self._hierarchy.unified and path == "/")
        if not (full or threaded) and self._open(path) and not self._is_excessive(path):
            return True
        # The clock of the domain has all threads of its processes, that of no other cgroup.
        added = threaded and above is not None and self._add(above)
        if len(self._refused) >= _MAX_REMEMBERED:
            self._refused.clear()
        self._refused.add(path)
        return added

    def _is_excessive(self, path: str) -> bool:
        """True if its maker has too many cgroups without it, which is closed again."""
        fd = self._fds[path]
        maker = self._owner_of(os.fstat(fd).st_uid)
        if maker and list(self._makers.values()).count(maker) >= MAX_OF_USER:
            os.close(fd)
            del self._fds[path], self._last[path]
            return True
        self._makers[path] = maker
        return False

    def read(self) -> tuple[Mapping[str, int], Mapping[str, str | None]]:
        """The own CPU time of each known cgroup since the last read, and the removed cgroups.

        Each removed cgroup comes with the known one above it, which inherits its excess.
        """
        if len(self._above) < len(self._fds):
            self._relink()  # once for all that were added
        self._reads += 1
        if self._reads % RETRY_EVERY == 0:
            self._refused.clear()
        change, removed = self._rises()
        own = dict(change)
        for path, amount in change.items():
            above = self._above[path]
            if above in own:
                own[above] -= amount
        if removed:
            self._makers = {path: self._makers[path] for path in self._fds}
            self._relink()
        return own, {path: self.covering(_parent(path)) for path in removed}

    def _relink(self) -> None:
        self._above = {path: self.covering(_parent(path)) for path in self._fds}


class CgroupTimes(NamedTuple):
    """The clocks of a host's cgroups, and that of all processes together; None where unknown."""

    clocks: CgroupClocks | None = None
    total: TotalCpuClock | None = None


def open_cgroup_times(root: Path, owner_of: Callable[[int], int] = lambda uid: uid) -> CgroupTimes:
    """The clocks of the hierarchy that is mounted below ``root`` now.

    ``owner_of`` is that of `CgroupClocks`. A part of a hierarchy, as of a container, has no total.
    """
    if (hierarchy := find_hierarchy(root)) is None:
        return CgroupTimes()
    total = TotalCpuClock(hierarchy) if is_host_root(hierarchy) else None
    return CgroupTimes(CgroupClocks(hierarchy, owner_of), total)


def _parent(path: str) -> str | None:
    if path in ("/", ""):
        return None
    return path.rpartition("/")[0] or "/"


class CgroupExcess:
    """Cumulative excess of each cgroup's clock over the charges of its known processes.

    An excess is the work of processes that were never observed, and the last work of exited ones. A
    deficit is carried over, because the clocks are read at different moments and a process may have
    moved to another cgroup. The settled excess is at most the sum over all cgroups, deficits
    included, so that no work is charged twice.
    """

    def __init__(self) -> None:
        self._excess: dict[str, int] = {}

    def measured(self, change: Mapping[str, int]) -> None:
        """Add the time of the clocks of cgroups."""
        for cgroup, amount in change.items():
            self._excess[cgroup] = self._excess.get(cgroup, 0) + amount

    def charged(self, cgroup: str, amount: int) -> None:
        """Subtract the charge of a known process in ``cgroup``."""
        self._excess[cgroup] = self._excess.get(cgroup, 0) - amount

    def moved(self, old: str, new: str) -> None:
        """Correct the charges of the former cgroup of a process that has moved."""
        wrong = min(-self._excess.get(old, 0), self._excess.get(new, 0))
        if wrong > 0:
            self._excess[old] += wrong
            self._excess[new] -= wrong

    def misplaced(self, cgroup: str, amount: int) -> Mapping[str, int]:
        """Move at most ``amount`` of the charges of a cgroup, as far as they are a deficit.

        Returns the parts of those whose clocks have more work than was charged.
        """
        wrong = min(amount, -self._excess.get(cgroup, 0))
        others = {one: it for one, it in self._excess.items() if it > 0} if wrong > 0 else {}
        wrong = min(wrong, sum(others.values()))
        if wrong <= 0:
            return {}
        parts = dict(zip(others, split(wrong, list(others.values())), strict=True))
        for one, part in parts.items():
            self._excess[one] -= part
        self.forgiven(cgroup, wrong)
        return parts

    def forgiven(self, cgroup: str, amount: int) -> None:
        """Cancel at most ``amount`` of the deficit of a cgroup."""
        deficit = -self._excess.get(cgroup, 0)
        if deficit > 0:
            self._excess[cgroup] += min(amount, deficit)

    def folded(self, cgroup: str, into: str | None) -> None:
        """Add the excess of a removed cgroup to the known one above it."""
        left = self._excess.pop(cgroup, 0)
        if into is not None:
            self._excess[into] = self._excess.get(into, 0) + left

    def settle(self) -> dict[str, int]:
        """Settle the due excess, and return it by cgroup."""
        open_ones = {cgroup: excess for cgroup, excess in self._excess.items() if excess > 0}
        due = min(sum(open_ones.values()), sum(self._excess.values()))
        if due <= 0:
            return {}
        parts = dict(zip(open_ones, split(due, list(open_ones.values())), strict=True))
        for cgroup, part in parts.items():
            self._excess[cgroup] -= part
        return {cgroup: part for cgroup, part in parts.items() if part}
