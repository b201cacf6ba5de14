"""CPU clocks of cgroups, and their excess over the processes known in them.

A cgroup's clock includes all its processes, also those that were never observed, and its
descendants'; the measure here is each known cgroup's time less that of the known cgroups directly
below it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from wattspan.attribution.settlement import split
from wattspan.processes.containers import cgroup_paths

MAX_CGROUPS = 512
"""Largest number of open cgroup clocks; the rest count with the nearest one above them."""

_MAX_REMEMBERED = 2048


class CgroupHierarchy(NamedTuple):
    """Location of the cgroups' clocks: below ``root``, in the paths of one controller."""

    root: Path
    unified: bool

    @property
    def name(self) -> str:
        return "cgroup v2 cpu.stat" if self.unified else "cgroup v1 cpuacct.usage"

    def path_in(self, cgroup_text: str) -> str | None:
        """A process's path in this hierarchy; None if it has none, or one outside of our view."""
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


class TotalCpuClock:
    """The work of all processes together, to the nanosecond or microsecond.

    v1 has it as the root's clock. v2 counts only ticks at its root, so there it is the sum over
    the cgroups just below, and does not cover kernel threads, which have no cgroup.
    """

    def __init__(self, hierarchy: CgroupHierarchy) -> None:
        self._hierarchy = hierarchy
        self._fds: dict[str, int] = {}
        self._last: dict[str, int] = {}
        self._sum = 0
        self.refresh()

    @property
    def covers_kernel(self) -> bool:
        return not self._hierarchy.unified

    def refresh(self) -> None:
        """Find cgroups that were made since; what they did so far is left out."""
        root = self._hierarchy.root
        names = [""]
        if self._hierarchy.unified:
            try:
                names = [entry.name for entry in os.scandir(root) if entry.is_dir()]
            except OSError:
                names = []
        for name in names:
            if name not in self._fds:
                fd = _open_clock(self._hierarchy, f"/{name}")
                if fd is None:
                    continue
                value = _clock_value(self._hierarchy, fd)
                if value is None:  # it was removed meanwhile
                    os.close(fd)
                    continue
                self._fds[name], self._last[name] = fd, value

    def read(self) -> int | None:
        """Nanoseconds since the beginning; None if there is nothing to sum."""
        for name, fd in list(self._fds.items()):
            value = _clock_value(self._hierarchy, fd)
            if value is None:
                os.close(self._fds.pop(name))
                del self._last[name]
                continue
            self._sum += value - self._last[name]
            self._last[name] = value
        return self._sum if self._fds else None

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()


class CgroupClocks:
    """Persistent descriptors on the clocks of the cgroups in which processes were found."""

    def __init__(self, hierarchy: CgroupHierarchy) -> None:
        self._hierarchy = hierarchy
        self._fds: dict[str, int] = {}
        self._last: dict[str, int] = {}
        self._above: dict[str, str | None] = {}
        self._paths: dict[str, str | None] = {}  # by text: there are few, with frequent lookups
        self._refused: set[str] = set()
        if not hierarchy.unified:
            self.add("/")  # v2 shows only ticks at the root, and every process as its own child

    @property
    def name(self) -> str:
        return self._hierarchy.name

    def path_in(self, cgroup_text: str) -> str | None:
        """The path of a process's cgroup in this hierarchy; None: outside of our view."""
        try:
            return self._paths[cgroup_text]
        except KeyError:
            if len(self._paths) >= _MAX_REMEMBERED:
                self._paths.clear()
            path = self._paths[cgroup_text] = self._hierarchy.path_in(cgroup_text)
            return path

    def wanted(self, path: str) -> bool:
        """True if ``path`` is worth adding: it is not known, and was not refused before."""
        return path not in self._fds and path not in self._refused

    def covering(self, path: str | None) -> str | None:
        """The known cgroup that ``path`` counts with: itself, or the nearest above; or none."""
        while path is not None:
            if path in self._fds:
                return path
            path = _ancestors(path)
        return None

    def add(self, path: str) -> bool:
        """Know one more cgroup from now on; False if its clock cannot be read.

        What it did before is left with the one above. To be called right after ``read``.
        """
        if path in self._fds:
            return True
        if len(self._fds) >= MAX_CGROUPS or (self._hierarchy.unified and path == "/"):
            return self._refuse(path)
        fd = _open_clock(self._hierarchy, path)
        if fd is None:
            return self._refuse(path)
        value = _clock_value(self._hierarchy, fd)
        if value is None:
            os.close(fd)
            return self._refuse(path)
        self._fds[path], self._last[path] = fd, value
        self._relink()
        return True

    def read(self) -> tuple[Mapping[str, int], Mapping[str, str | None]]:
        """The own CPU time of each known cgroup since the last read, and the removed cgroups.

        Removed cgroups come with the cgroup they counted with, which inherits their excess.
        """
        change: dict[str, int] = {}
        dead: list[str] = []
        for path, fd in self._fds.items():
            value = _clock_value(self._hierarchy, fd)
            if value is None:
                dead.append(path)
                continue
            change[path] = value - self._last[path]
            self._last[path] = value
        own = dict(change)
        for path, amount in change.items():
            above = self._above[path]
            if above in own:
                own[above] -= amount
        for path in dead:
            os.close(self._fds.pop(path))
            del self._last[path]
        if dead:
            self._relink()
        return own, {path: self.covering(_ancestors(path)) for path in dead}

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def _refuse(self, path: str) -> bool:
        if len(self._refused) >= _MAX_REMEMBERED:
            self._refused.clear()
        self._refused.add(path)
        return False

    def _relink(self) -> None:
        self._above = {path: self.covering(_ancestors(path)) for path in self._fds}


def _open_clock(hierarchy: CgroupHierarchy, path: str) -> int | None:
    name = "cpu.stat" if hierarchy.unified else "cpuacct.usage"
    try:
        return os.open(f"{hierarchy.root}{path}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None


def _clock_value(hierarchy: CgroupHierarchy, fd: int) -> int | None:
    """Nanoseconds; None once the cgroup was removed (ENODEV)."""
    try:
        raw = os.pread(fd, 4096, 0)
        if not hierarchy.unified:
            return int(raw)
        for line in raw.split(b"\n"):
            if line.startswith(b"usage_usec "):
                return int(line[11:]) * 1000
    except (OSError, ValueError):
        return None
    return None


def _ancestors(path: str) -> str | None:
    if path in ("/", ""):
        return None
    return path.rpartition("/")[0] or "/"


class CgroupExcess:
    """Cumulative excess of each cgroup's clock over the charges of its known processes.

    An excess is work of processes that were never observed, and of the last moments of those that
    ended. A deficit is carried as debt: the clocks are not read at one moment, and a process may
    have moved from one cgroup to another unnoticed. All excess together is therefore settled only
    as far as it is not matched by debt elsewhere, so that nothing is charged twice.
    """

    def __init__(self) -> None:
        self._excess: dict[str, int] = {}

    def measured(self, change: Mapping[str, int]) -> None:
        """The cgroups' clocks went on by this much."""
        for cgroup, amount in change.items():
            self._excess[cgroup] = self._excess.get(cgroup, 0) + amount

    def charged(self, cgroup: str, amount: int) -> None:
        """A known process in ``cgroup`` was charged."""
        self._excess[cgroup] = self._excess.get(cgroup, 0) - amount

    def moved(self, old: str, new: str) -> None:
        """A process turned out to have moved: what was charged to the wrong one is set right."""
        wrong = min(-self._excess.get(old, 0), self._excess.get(new, 0))
        if wrong > 0:
            self._excess[old] += wrong
            self._excess[new] -= wrong

    def folded(self, cgroup: str, into: str | None) -> None:
        """A cgroup was removed: from now on its like counts with the one above."""
        left = self._excess.pop(cgroup, 0)
        if into is not None:
            self._excess[into] = self._excess.get(into, 0) + left

    def settle(self) -> dict[str, int]:
        """The excess of each cgroup that is due now, and is settled by this."""
        open_ones = {cgroup: excess for cgroup, excess in self._excess.items() if excess > 0}
        due = min(sum(open_ones.values()), sum(self._excess.values()))
        if due <= 0:
            return {}
        parts = dict(zip(open_ones, split(due, list(open_ones.values())), strict=True))
        for cgroup, part in parts.items():
            self._excess[cgroup] -= part
        return {cgroup: part for cgroup, part in parts.items() if part}
