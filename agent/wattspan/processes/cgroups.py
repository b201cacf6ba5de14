"""Cgroups of processes: their containers, pods, jobs and units, and their CPU clocks.

Groups are found in the text of ``/proc/PID/cgroup``. The name of a container is the first twelve
characters of its id, as in the listings of all runtimes.

The clock of a cgroup includes all its processes, also those that were never observed, and its
descendants'. Here the time of a known cgroup excludes that of the known cgroups below it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import lru_cache
from itertools import dropwhile, islice
from pathlib import Path
from typing import NamedTuple

from wattspan.attribution.division import split
from wattspan.model import Group, GroupKind
from wattspan.util.text import clean_label

MAX_LABEL = 128
_SHORT_ID = 12

_HEX = r"(?P<id>[0-9a-f]{64})"
_CONTAINER = (
    # docker-<id>.scope, cri-containerd-<id>.scope, crio-<id>.scope, libpod-<id>.scope
    re.compile(rf"(?:docker|cri-containerd|crio|libpod|nerdctl|buildkit)-{_HEX}(?:\.scope)?"),
    # cri-containerd:<namespace>:<id> as some managers write it; <pod slice>:cri-containerd:<id>
    re.compile(rf"[^/]*:[^/:]+:{_HEX}"),
    re.compile(_HEX),  # cgroupfs drivers: the bare id
)
_INNER_CONTAINER = re.compile(r"(?:conmon-|crio-conmon-|libpod-conmon-)")
_POD = re.compile(
    r"(?:(?:[\w.]+-)?kubepods(?:-(?:besteffort|burstable|guaranteed))?-)?"
    r"pod(?P<uid>[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?"
)
_JOB = re.compile(r"job_(?P<job>[0-9]+)")
_STEPD = re.compile(r"(?:[^/]+_)?slurmstepd\.scope|slurm(?:_[^/]+)?")
_UNIT = re.compile(r"[^/]+\.(?:service|scope|socket|mount|swap|timer|path)")
_LXC = re.compile(r"lxc(?:\.payload|\.monitor)?[./](?P<name>[^/]+)")
_NSPAWN = re.compile(r"(?:machine-|systemd-nspawn@)(?P<name>.+?)\.(?:scope|service)")
_ESCAPE = re.compile(r"\\x([0-9a-fA-F]{2})")


def groups_of(cgroup_text: str) -> tuple[Group, ...]:
    """The groups in the text of ``/proc/PID/cgroup``: at most one of a kind, most specific first.

    Every hierarchy is searched, since on a hybrid host each manager uses another one; the first
    match of a kind counts. A process in no known kind of group belongs to its bare path, unless
    that is the root.
    """
    found: dict[GroupKind, str] = {}
    bare = ""
    for path in cgroup_paths(cgroup_text).values():
        for group in _in_path(path):
            found.setdefault(group.kind, group.name)
        if len(path) > len(bare):
            bare = path
    if not found and bare.strip("/"):
        found[GroupKind.CGROUP] = _label(bare)
    return tuple(Group(kind, found[kind]) for kind in GroupKind if kind in found)


def cgroup_paths(cgroup_text: str) -> dict[str, str]:
    """Path by controllers (``""`` is the unified hierarchy), the unified one and systemd's first.

    A path may contain colons and unescaped newlines: a line that does not begin with a hierarchy
    number continues the one before.
    """
    paths: dict[str, str] = {}
    last: str | None = None
    for line in cgroup_text.split("\n"):
        match = re.match(r"(\d+):([^:/]*):(/.*)?$", line)
        if match is not None:
            last = match[2]
            paths[last] = match[3] or "/"
        elif last is not None and line:
            paths[last] += "\n" + line
    order = {"": 0, "name=systemd": 1}
    return dict(sorted(paths.items(), key=lambda item: order.get(item[0], 2)))


def _in_path(path: str) -> list[Group]:
    parts = [part for part in path.split("/") if part and part not in (".", "..")]
    groups = [
        (GroupKind.CONTAINER, _container(path, parts)),
        (GroupKind.POD, _pod(parts)),
        (GroupKind.JOB, _job(parts)),
        (GroupKind.UNIT, _unit(parts)),
    ]
    return [Group(kind, _label(name)) for kind, name in groups if name]


def _container(path: str, parts: list[str]) -> str | None:
    """The innermost container, which runs the process."""
    for part in reversed(parts):
        if _INNER_CONTAINER.match(part):
            continue
        for pattern in _CONTAINER:
            match = pattern.fullmatch(part)
            if match is not None:
                return match["id"][:_SHORT_ID]
    if match := _LXC.search(path):
        return _unescape(match["name"])
    machines = (_NSPAWN.fullmatch(part) for part in parts)
    return next((_unescape(match["name"]) for match in machines if match is not None), None)


def _pod(parts: list[str]) -> str | None:
    pieces = (_POD.fullmatch(piece) for part in parts for piece in part.split(":"))
    return next((match["uid"].replace("_", "-") for match in pieces if match is not None), None)


def _job(parts: list[str]) -> str | None:
    """The job of Slurm, below the scope or the v1 directory of its daemon."""
    below = dropwhile(lambda part: not _STEPD.fullmatch(part), parts)
    jobs = (_JOB.fullmatch(part) for part in islice(below, 1, None))
    return next((match["job"] for match in jobs if match is not None), None)


def _unit(parts: list[str]) -> str | None:
    """The innermost unit of systemd, also above containers and jobs that the unit runs.

    Units of the user's own manager are innermost.
    """
    units = [part for part in parts if _UNIT.fullmatch(part)]
    own = [part for part in units if not any(p.fullmatch(part) for p in _CONTAINER[:1])]
    return _unescape(own[-1]) if own else None


def _unescape(name: str) -> str:
    r"""Undo systemd's ``\x2d``."""

    def plain(run: re.Match[str]) -> str:
        return bytes.fromhex(run[0].replace("\\x", "")).decode("utf-8", "replace")

    return re.sub(rf"(?:{_ESCAPE.pattern.replace('(', '(?:', 1)})+", plain, name)


def _label(name: str) -> str:
    return clean_label(name, MAX_LABEL)


MAX_CGROUPS = 512
"""Limit of open cgroup clocks; further cgroups count with the nearest known one above."""

_MAX_REMEMBERED = 2048


class CgroupHierarchy(NamedTuple):
    """Location of the cgroups' clocks: below ``root``, in the paths of one controller."""

    root: Path
    unified: bool

    @property
    def name(self) -> str:
        return "cgroup v2 cpu.stat" if self.unified else "cgroup v1 cpuacct.usage"

    def path_in(self, cgroup_text: str) -> str | None:
        """The path of a process in this hierarchy; None for one outside of our view."""
        for controllers, path in cgroup_paths(cgroup_text).items():
            if (controllers == "") if self.unified else ("cpuacct" in controllers.split(",")):
                return None if ".." in path.split("/") or "\n" in path else path
        return None


def find_hierarchy(root: Path) -> CgroupHierarchy | None:
    """The hierarchy with the better clocks: v1's ``cpuacct`` where it is mounted, else v2."""
    for name in ("cpuacct", "cpu,cpuacct", "cpuacct,cpu"):
        if (root / name / "cpuacct.usage").is_file():
            return CgroupHierarchy(root / name, unified=False)
    for path in (root, root / "unified"):
        if (path / "cgroup.controllers").is_file():
            return CgroupHierarchy(path, unified=True)
    return None


def is_host_root(hierarchy: CgroupHierarchy) -> bool:
    """True for the whole host's hierarchy, False for the part that a container is shown."""
    if hierarchy.unified:
        return not (hierarchy.root / "cgroup.type").exists()
    return (hierarchy.root / "cgroup.sane_behavior").exists()


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
        """Add the cgroup at ``path``; False if its clock is not readable."""
        name = "cpu.stat" if self._hierarchy.unified else "cpuacct.usage"
        try:
            fd = os.open(f"{self._hierarchy.root}{path}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, ValueError):
            return False
        value = self._value(fd)
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
            value = self._value(fd)
            if value is None:
                removed.append(path)
                continue
            rises[path] = value - self._last[path]
            self._last[path] = value
        for path in removed:
            os.close(self._fds.pop(path))
            del self._last[path]
        return rises, removed

    def _value(self, fd: int) -> int | None:
        """Nanoseconds; None once the cgroup was removed (ENODEV)."""
        try:
            raw = os.pread(fd, 4096, 0)
            if not self._hierarchy.unified:
                return int(raw)
            for line in raw.split(b"\n"):
                if line.startswith(b"usage_usec "):
                    return int(line[11:]) * 1000
        except (OSError, ValueError):
            return None
        return None


class TotalCpuClock(_OpenClocks):
    """The CPU time of all processes together, to the nanosecond or microsecond.

    v1 has it as the clock of the root. v2 counts only ticks at its root, so there it is the sum
    over the cgroups just below, without kernel threads, which have no cgroup.
    """

    def __init__(self, hierarchy: CgroupHierarchy) -> None:
        super().__init__(hierarchy)
        self._sum = 0
        self.refresh()

    @property
    def covers_kernel(self) -> bool:
        return not self._hierarchy.unified

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
                self._open(f"/{name}")

    def read(self) -> int | None:
        """Nanoseconds since the beginning; None without a cgroup."""
        rises, _ = self._rises()
        self._sum += sum(rises.values())
        return self._sum if self._fds else None


class CgroupClocks(_OpenClocks):
    """The clocks of the cgroups in which processes were found."""

    def __init__(self, hierarchy: CgroupHierarchy) -> None:
        super().__init__(hierarchy)
        self._above: dict[str, str | None] = {}
        self.path_in = lru_cache(_MAX_REMEMBERED)(hierarchy.path_in)
        """The path of a process by its cgroup text; None outside of our view."""
        self._refused: set[str] = set()
        if not hierarchy.unified:
            self.add("/")  # v2 shows only ticks at the root, and every process as its own child

    @property
    def name(self) -> str:
        return self._hierarchy.name

    def wanted(self, path: str) -> bool:
        """True if ``path`` is neither known nor refused."""
        return path not in self._fds and path not in self._refused

    def covering(self, path: str | None) -> str | None:
        """The nearest known cgroup at or above ``path``, which includes its time; or None."""
        while path is not None and path not in self._fds:
            path = _parent(path)
        return path

    def add(self, path: str) -> bool:
        """Add a cgroup; False if its clock cannot be read.

        Its earlier time stays with the cgroup above. To be called right after ``read``.
        """
        if path in self._fds:
            return True
        full = len(self._fds) >= MAX_CGROUPS or (self._hierarchy.unified and path == "/")
        if full or not self._open(path):
            if len(self._refused) >= _MAX_REMEMBERED:
                self._refused.clear()
            self._refused.add(path)
            return False
        self._relink()
        return True

    def read(self) -> tuple[Mapping[str, int], Mapping[str, str | None]]:
        """The own CPU time of each known cgroup since the last read, and the removed cgroups.

        Each removed cgroup comes with the known one above it, which inherits its excess.
        """
        change, removed = self._rises()
        own = dict(change)
        for path, amount in change.items():
            above = self._above[path]
            if above in own:
                own[above] -= amount
        if removed:
            self._relink()
        return own, {path: self.covering(_parent(path)) for path in removed}

    def _relink(self) -> None:
        self._above = {path: self.covering(_parent(path)) for path in self._fds}


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
