"""Tells root of the host from root of a container that has the capper's socket mounted.

User 0 of a container without a user namespace is user 0 of the kernel, so the credentials of a
connection do not separate them. The cgroup of the process does: a container runtime names it, and
root of the container cannot leave it. A sandboxed capper does not see the process in ``/proc``, so
the process is looked up in the files of the cgroups instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from wattspan.ports import Clock
from wattspan.processes.cgroups import CgroupHierarchy, is_host_root, walk_cgroups
from wattspan.processes.principals import (
    CgroupDirectories,
    PrincipalResolver,
    SubordinateUsers,
)
from wattspan.processes.procfs import ProcFs
from wattspan.sharing.pools import RateLimiter
from wattspan.util.unix_sockets import PeerCredentials

MAX_SEARCHES = 5
"""Searches of all cgroups a second: each takes some milliseconds of the capper's only thread."""

_CONTROLLERS = ("name=systemd", "memory", "pids")
"""Hierarchies of version 1 of which container runtimes use each."""

_INSIDE = (
    "Root of a container is not root of this host: ask from the host, or name root in [caps] users "
    "if containers that have this socket may set limits."
)
_UNPROVEN = (
    "The kernel does not show the control group of your process, so it may be a container's: ask "
    "from a process that waits for its answer."
)
_BUSY = "Too many connections of root a second; try again."


class HostRoot:
    """Judges peers of user 0. For one thread.

    Where the hierarchies of cgroups are not those of the whole host, as in a container, nothing
    can be told, and every user 0 that reaches the socket counts.
    """

    def __init__(
        self,
        clock: Clock,
        processes: ProcFs | None = None,
        cgroups: Path = Path("/sys/fs/cgroup"),
    ) -> None:
        self._clock, self._processes = clock, processes or ProcFs()
        self._resolver = PrincipalResolver(CgroupDirectories(cgroups), SubordinateUsers())
        self._cgroups = cgroups
        self._searches = RateLimiter(MAX_SEARCHES, MAX_SEARCHES)

    def refusal(self, peer: PeerCredentials) -> str | None:
        """The reason why a peer of user 0 is not root of this host; None if it is."""
        hierarchies = dict(_hierarchies(self._cgroups))  # some may be mounted late
        if not hierarchies:
            return None
        if peer.pid is None:
            return _UNPROVEN
        text = self._processes.cgroup(peer.pid)
        if text is None:
            if not self._searches.admits(0, self._clock.monotonic()):
                return _BUSY
            text = _searched(peer.pid, hierarchies)
        if text is None:
            return _UNPROVEN
        principal = self._resolver.principal(text, 0)
        if principal is None:
            return _UNPROVEN
        if principal.is_host_root:
            return None
        own = self._processes.cgroup(os.getpid())
        mine = own is not None and principal == self._resolver.principal(own, 0)
        return None if mine else _INSIDE


def _searched(pid: int, hierarchies: Mapping[str, Path]) -> str | None:
    """The text of ``/proc/PID/cgroup`` by the files of the cgroups."""
    lines = []
    for number, (controllers, mount) in enumerate(hierarchies.items()):
        path = _path_of(pid, mount)
        if path is None:
            return None
        lines.append(f"{number}:{controllers}:{path}\n")
    return "".join(lines)


def _hierarchies(root: Path) -> Iterator[tuple[str, Path]]:
    """The hierarchies of the whole host, by their controllers; none in a container's view."""
    if (root / "cgroup.controllers").is_file():
        found: Mapping[str, Path] = {"": root}
    else:
        found = {one: root / one.removeprefix("name=") for one in _CONTROLLERS}
    for controllers, mount in found.items():
        mounted = (mount / "cgroup.procs").is_file()
        if mounted and is_host_root(CgroupHierarchy(mount, unified=controllers == "")):
            yield controllers, mount


def _path_of(pid: int, mount: Path) -> str | None:
    """The path of the cgroup of a process below ``mount``; None if it is in none that is seen."""
    wanted = b"%d" % pid
    for path, _ in walk_cgroups(str(mount)):
        with suppress(OSError):
            # One that runs threads in cgroups of their own cannot be read, and has no own process.
            if wanted in Path(f"{mount}{path}/cgroup.procs").read_bytes().split():
                return path or "/"
    return None
