"""The principals of processes and connections, by user id and by the owners of cgroup directories.

A cgroup directory is root's name if root owns its parent and nobody else may write there. Subuids
count as their owner's. A process of user 65534 may be of any unmapped user: it has no principal but
that of its pod.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from math import inf
from pathlib import Path
from posixpath import normpath
from time import monotonic  # noqa: TID251 - an age on this host
from typing import NamedTuple

from wattspan.model import Group, GroupKind
from wattspan.model.consumers import SHORT_CONTAINER, Principal
from wattspan.processes.cgroup_names import (
    SLUID,
    Authors,
    CgroupNames,
    SlurmJobs,
    cgroup_paths,
    names_of,
    unknown_authors,
)
from wattspan.processes.cgroups import walk_cgroups
from wattspan.processes.procfs import ProcFs
from wattspan.util.files import shortage_remedy
from wattspan.util.text import MAX_USER, clean_label
from wattspan.util.unix_sockets import LOOK_UP_AGAIN, user_name

OVERFLOW_UID = 65534
"""The kernel's number for every user without one in this user namespace."""

FIRST_SUBUID = 65536
"""Lower user ids are users of their own; ``useradd`` assigns subuids from 100000."""

MOUNTS_INTERVAL = 10.0
"""Seconds after which hierarchies that were mounted meanwhile are found."""

_REMOVED = -1
_CGROUPS, _HOST_CGROUPS = Path("/sys/fs/cgroup"), Path("/host/sys/fs/cgroup")


class CgroupDirectories:
    """The directories of the cgroup hierarchies below ``root``, with their owners.

    ``view`` is the root of the agent's cgroup namespace, where that is a part of the unified
    hierarchy below ``root``: the kernel shows paths relative to it.
    """

    def __init__(
        self,
        root: Path = _CGROUPS,
        view: Path | None = None,
        now: Callable[[], float] = monotonic,
    ) -> None:
        self._root = str(root)
        self._view = None if view is None else str(view)
        self._now, self._again = now, -inf
        self._mounts: dict[str, str | None] = {}
        self._parts: set[str] = set()  # mounts without the mark of the root of a hierarchy
        self._paths: dict[int, str] = {}
        self.shortage: OSError | None = None
        """The last error of a walk without descriptors or memory."""

    def authors(self, controllers: str, parts: Sequence[str]) -> tuple[int, ...] | None:
        """The user who could name each directory of a path; None for a hidden hierarchy.

        -1 for a directory that has been removed, or whose path is too long for the kernel. Version
        1 shows a container a part of a hierarchy, and the paths of the host: those are hidden.
        """
        mount = self._mount(controllers)
        if mount is None or (mount in self._parts and not _exists(f"{mount}/{parts[0]}")):
            return None
        found: list[int] = []
        path, author = mount, 0
        for part in parts:
            if not author:
                author = self._author_below(path, f"{path}/{part}")
            found.append(author)
            path = f"{path}/{part}"
        return tuple(found)

    def _author_below(self, directory: str, child: str) -> int:
        try:
            above = os.stat(directory)  # noqa: PTH116 - several per process, so bare
            if above.st_uid != 0 or not above.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return above.st_uid
            return os.lstat(child).st_uid  # another writer than root may have made it
        except (OSError, ValueError):
            return _REMOVED

    def above(self, cgroup_text: str, name: str) -> Iterator[str]:
        """The visible directories ``name`` in the paths of a process."""
        for controllers, path in cgroup_paths(cgroup_text).items():
            head, found, _ = f"{path}/".partition(f"/{name}/")
            mount = self._mount(controllers)
            if found and mount is not None and ".." not in head.split("/"):
                yield f"{mount}{head}/{name}"

    @classmethod
    def of_host(cls, own: Path = _CGROUPS, host: Path = _HOST_CGROUPS) -> CgroupDirectories:
        """Those of the whole host, from a container too, if it sees them at ``host``."""
        try:
            is_same = own.stat().st_dev == host.stat().st_dev
        except OSError:
            return cls(own)
        is_part = (own / "cgroup.type").exists()  # no root of a hierarchy has a type
        return cls(host, own) if is_same and is_part else cls(own)

    def absolute(self, cgroup_text: str) -> str:
        """The text of ``/proc/PID/cgroup`` as the root of the hierarchy sees it."""
        if self._view is None or (inode := _inode(self._view)) is None:
            return cgroup_text
        own = self.path_of(inode)
        if own is None:
            return cgroup_text
        return "".join(
            f"{number}:{controllers}:{path if controllers else normpath(own.rstrip('/') + path)}\n"
            for number, (controllers, path) in enumerate(cgroup_paths(cgroup_text).items())
        )

    @property
    def is_unified(self) -> bool:
        """True if the unified hierarchy is the only one."""
        return self._mount("") == self._root

    def path_of(self, cgroup: int) -> str | None:
        """The path of a cgroup of the unified hierarchy by its id, the inode of its directory."""
        mount = self._mount("")
        if mount is None:
            return None
        path = self._paths.get(cgroup)
        if path is None or _inode(mount + path) != cgroup:
            walked = walk_cgroups(mount, note=self._note)
            self._paths = {inode: below or "/" for below, inode in walked}
            path = self._paths.get(cgroup)
        return path

    def _note(self, error: OSError) -> None:
        if shortage_remedy(error):
            self.shortage = OSError(error.errno, error.strerror)

    @property
    def mounts(self) -> dict[str, str | None]:
        """The directories of the hierarchies by controllers: another object after a change."""
        if self._now() >= self._again:
            self._again = self._now() + MOUNTS_INTERVAL
            found = {controllers: self._find(controllers) for controllers in [*self._mounts]}
            if found != self._mounts:
                self._mounts = found
        return self._mounts

    def _mount(self, controllers: str) -> str | None:
        """The directory of a hierarchy; None if the host's is not mounted here."""
        mounts = self.mounts
        if controllers not in mounts:
            mounts[controllers] = self._find(controllers)
        return mounts[controllers]

    def _find(self, controllers: str) -> str | None:
        if controllers == "":
            candidates = [self._root, f"{self._root}/unified"]
            return next((one for one in candidates if _exists(f"{one}/cgroup.controllers")), None)
        names = [controllers.removeprefix("name="), *controllers.split(",")]
        candidates = [f"{self._root}/{name}" for name in names]
        found = next((one for one in candidates if _exists(f"{one}/cgroup.procs")), None)
        if found is not None and not _exists(f"{found}/cgroup.sane_behavior"):
            self._parts.add(found)
        elif found is not None:
            self._parts.discard(found)
        return found


def _exists(path: str) -> bool:
    return os.path.exists(path)  # noqa: PTH110 - a bare string


def _inode(path: str) -> int | None:
    try:
        return os.stat(path).st_ino  # noqa: PTH116 - a bare string
    except OSError:
        return None


class _Range(NamedTuple):
    start: int
    length: int
    owner: int


def _uid_of(name: str) -> int:
    """The uid of a user, given by name or number; KeyError for an unknown name."""
    import pwd

    try:
        return pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):
        if name.isdecimal() and len(name) < 11:
            return int(name)
        raise KeyError(name) from None


class SubordinateUsers:
    """The owners of subordinate user ids, from ``/etc/subuid``.

    ``uid_of`` raises KeyError for an unknown name: its line is read again after a minute.
    """

    def __init__(
        self,
        file: Path = Path("/etc/subuid"),
        uid_of: Callable[[str], int] = _uid_of,
        now: Callable[[], float] = monotonic,
    ) -> None:
        self._file, self._uid_of, self._now = file, uid_of, now
        self._again = inf
        self._owners: dict[str, int] = {}  # by name, as the file has them now
        self._stamp: tuple[int, int] | None = None
        self._ranges: tuple[_Range, ...] = ()
        self.shortage: OSError | None = None
        """The last error of a read without descriptors or memory, which keeps what is known."""

    def owner_of(self, uid: int) -> int:
        """The user who owns ``uid``; ``uid`` itself if it is no subuid.

        A range of root's belongs to a container runtime: its first number stands for all of them,
        because they are not root.
        """
        if uid < FIRST_SUBUID:
            return uid
        self._read()
        for start, length, owner in self._ranges:
            if start <= uid < start + length:
                return owner or start
        return uid

    def _read(self) -> None:
        try:
            found = self._file.stat()
            stamp = (found.st_mtime_ns, found.st_ino)
            if stamp == self._stamp and self._now() < self._again:
                return
            text = self._file.read_text("utf-8", "replace")
        except OSError as error:
            if shortage_remedy(error):
                self.shortage = OSError(error.errno, error.strerror)
            else:
                self._stamp, self._ranges = None, ()
            return
        if stamp != self._stamp:
            self._owners.clear()
        self._stamp, self._again, ranges = stamp, inf, list[_Range]()
        for line in text.splitlines():
            try:
                ranges += self._range(line)
            except KeyError:
                self._again = self._now() + LOOK_UP_AGAIN
        self._ranges = tuple(ranges)

    def _range(self, line: str) -> Iterator[_Range]:
        """A line: the owner's name or number, the first subuid and their number. KeyError."""
        name, _, numbers = line.partition(":")
        first, _, count = numbers.partition(":")
        if all(one.isdecimal() and len(one) < 11 for one in (first, count)):
            if name not in self._owners:
                self._owners[name] = self._uid_of(name)
            yield _Range(int(first), int(count), self._owners[name])


class PrincipalResolver:
    """Finds groups and principals from user ids and cgroups. Thread-safe.

    ``pods_by_user`` separates the users of a pod from each other.
    """

    def __init__(
        self,
        directories: CgroupDirectories | None = None,
        subordinates: SubordinateUsers | None = None,
        slurm: SlurmJobs | None = None,
        *,
        pods_by_user: bool = False,
    ) -> None:
        self._directories = directories
        self._subordinates = subordinates
        self._slurm = slurm
        self._pods_by_user = pods_by_user

    @classmethod
    def of_host(cls, *, pods_by_user: bool = False) -> PrincipalResolver:
        """The resolver of this host."""
        directories = CgroupDirectories.of_host()
        slurm = SlurmJobs(ProcFs())
        return cls(directories, SubordinateUsers(), slurm, pods_by_user=pods_by_user)

    @property
    def shortages(self) -> tuple[OSError | None, ...]:
        """The last errors without descriptors or memory: another object for each."""
        parts = (self._directories, self._subordinates)
        return tuple(None if one is None else one.shortage for one in parts)

    @property
    def mounts(self) -> object:
        """Another object once groups and principals follow from other mounts."""
        return None if self._directories is None else self._directories.mounts

    def owner_of(self, uid: int) -> int:
        """The user to whom ``uid`` belongs."""
        return uid if self._subordinates is None else self._subordinates.owner_of(uid)

    def describe(
        self, cgroup_text: str, uid: int | None
    ) -> tuple[tuple[Group, ...], Principal | None]:
        """The groups of a process, its user's last, and its principal."""
        names = self._names(cgroup_text, uid, self._user_label)
        groups = tuple(self._numbered(group, cgroup_text) for group in names.groups)
        if uid is not None:
            groups = (*groups, Group(GroupKind.USER, self._user_label(uid)))
        return groups, self._principal(uid, names)

    def _numbered(self, group: Group, cgroup_text: str) -> Group:
        """The group of a Slurm job by its number, if root's daemon tells it."""
        if group.kind is not GroupKind.JOB or not SLUID.fullmatch(group.name):
            return group  # a claimed name begins with its author
        if self._slurm is None or self._directories is None:
            return group
        absolute = self._directories.absolute(cgroup_text)
        directories = self._directories.above(absolute, group.name)
        number = self._slurm.number_of(group.name, directories)
        return group if number is None else Group(GroupKind.JOB, number)

    def principal(self, cgroup_text: str, uid: int | None) -> Principal | None:
        """The principal of a process; None if the kernel proves none."""
        return self._principal(uid, self._names(cgroup_text, uid, str))

    def of_process(self, processes: ProcFs, pid: int | None) -> Principal | None:
        """The principal of a running process, of its effective user."""
        uid = None if pid is None else processes.user_id(pid)
        return self.of_connection(processes, pid, uid)

    def of_connection(
        self, processes: ProcFs, pid: int | None, uid: int | None
    ) -> Principal | None:
        """The principal of the process that connected, by its credentials of that moment."""
        text = None if pid is None else processes.cgroup(pid)
        return None if text is None else self.principal(text, uid)

    def of_socket(self, uid: int | None, cgroup: int | None) -> Principal | None:
        """The principal of the user and the cgroup of a socket; None for an unknown cgroup.

        Where version 1 hierarchies exist beside the unified one, that shows no containers.
        """
        if cgroup is None or self._directories is None or not self._directories.is_unified:
            return None
        path = self._directories.path_of(cgroup)
        if path is None:
            return None
        return self._principal(uid, names_of(f"0::{path}", self._authors(uid), str))

    def _names(self, cgroup_text: str, uid: int | None, label: Callable[[int], str]) -> CgroupNames:
        if self._directories is not None:
            cgroup_text = self._directories.absolute(cgroup_text)
        return names_of(cgroup_text, self._authors(uid), label)

    def _principal(self, uid: int | None, names: CgroupNames) -> Principal | None:
        whole = names.pod and names.verified and not self._pods_by_user
        if uid is None or (uid == OVERFLOW_UID and not whole):
            return None
        user = self.owner_of(uid)
        if names.pod and names.verified:
            return Principal(None if whole else user, pod=names.pod)
        if names.pod or names.container:
            # Names that are not verified divide the processes of one user, and join no others'.
            return Principal(user, names.container, names.pod)
        if names.claimed and user != names.author:
            # A runtime's container below a user's directory: root in it is not root of the host.
            return Principal(user, f"{names.author}/{names.claimed}")
        return Principal(user)

    def _authors(self, uid: int | None) -> Authors:
        directories = self._directories
        if directories is None:
            return unknown_authors

        def authors(controllers: str, parts: Sequence[str]) -> tuple[int, ...] | None:
            found = directories.authors(controllers, parts)
            if found is None or not any(found):
                return found
            # A directory that is gone counts as named by the user of its process.
            gone = OVERFLOW_UID if uid is None else uid
            known = (gone if one == _REMOVED else one for one in found)
            return tuple(map(self.owner_of, known))

        return authors

    def _user_label(self, uid: int) -> str:
        return clean_label(user_name(self.owner_of(uid)), MAX_USER)


def owner_label(principal: Principal | None) -> str:
    """The label ``owner`` of a principal: a user, a user and a container, or a pod.

    "" for none. No user name has a slash or colon, so labels of different kinds differ.
    """
    if principal is None:
        return ""
    if principal.pod and principal.user is None:
        return f"pod:{principal.pod}"
    user = "" if principal.user is None else clean_label(user_name(principal.user), MAX_USER)
    if principal.pod:
        return f"pod:{principal.pod}/{user}"
    if principal.container:
        return f"{user}/{clean_label(principal.container[:SHORT_CONTAINER], MAX_USER)}"
    return user
