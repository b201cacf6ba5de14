"""Names in the text of ``/proc/PID/cgroup``: containers, pods, jobs and units, and their author.

Container runtimes, Kubernetes, Slurm and systemd name cgroup directories as root. A user who owns a
directory names those below it as he likes, and so does the root of a container: such a name is a
claim. The label of a claim begins with its author, so that it joins no group of another owner. The
name of a container is the first twelve characters of its id, as in the listings of all runtimes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from wattspan.model import Group, GroupKind
from wattspan.processes.cgroup_patterns import guest_in, job_in, pod_in, system_root_in, unit_in
from wattspan.util.text import clean_label

MAX_LABEL = 128


class CgroupNames(NamedTuple):
    """The groups of a process, and the names that prove its principal.

    ``container`` is complete and named by root, "" without one; ``pod`` likewise. A directory in
    which another systemd runs is one too. ``claimed`` is the outermost container that the user
    ``author`` named. ``verified`` is False if the owners of
    the directories are unknown.
    """

    groups: tuple[Group, ...] = ()
    container: str = ""
    pod: str = ""
    claimed: str = ""
    author: int = 0
    verified: bool = True


Authors = Callable[[str, Sequence[str]], tuple[int, ...] | None]
"""The users who named the directories of a path, by the hierarchy's controllers; 0 is root.

None if the hierarchy is not visible. The path is given by its parts.
"""


def unknown_authors(_: str, __: Sequence[str]) -> None:
    """The authors of names where no cgroup directory is visible."""


def names_of(
    cgroup_text: str, authors: Authors = unknown_authors, label: Callable[[int], str] = str
) -> CgroupNames:
    """The names in the text of ``/proc/PID/cgroup``; ``label`` is the name of a user.

    Every hierarchy is searched, since on a hybrid host each manager uses another one. At most one
    group of a kind is found, most specific first: root's names come before claims, then the first
    hierarchy counts. A process in no known kind of group belongs to its bare path, unless that is
    the root.
    """
    found: list[_PathNames] = []
    bare = ""
    for controllers, path in cgroup_paths(cgroup_text).items():
        parts = tuple(part for part in path.split("/") if part and part != ".")
        if len(path) > len(bare):
            bare = path
        if ".." in parts:  # above the root of the agent's cgroup namespace
            outside = tuple(part for part in parts if part != "..")
            found.append(_path_names(outside, None, ""))
        elif parts:
            named = authors(controllers, parts)
            author = next(filter(None, named or ()), None)
            found.append(_path_names(parts, named, "" if author is None else label(author)))
    return _merged(found, bare)


def _merged(found: list[_PathNames], bare: str) -> CgroupNames:
    """The names of all hierarchies together."""
    groups: dict[GroupKind, str] = {}
    for one in found:
        groups.update({kind: name for kind, name in one.proven.items() if kind not in groups})
    for one in found:
        groups.update({kind: name for kind, name in one.claims.items() if kind not in groups})
    if not groups and bare.strip("/"):
        groups[GroupKind.CGROUP] = _label(bare)
    return CgroupNames(
        tuple(Group(kind, groups[kind]) for kind in GroupKind if kind in groups),
        next((one.container for one in found if one.container), ""),
        next((one.pod for one in found if one.pod), ""),
        next((one.claimed for one in found if one.claimed), ""),
        max((one.author for one in found), default=0),
        all(one.verified for one in found),
    )


class _PathNames(NamedTuple):
    """The names of one path: group names by kind, and the fields of CgroupNames."""

    proven: dict[GroupKind, str]
    claims: dict[GroupKind, str]
    container: str
    pod: str
    claimed: str
    author: int
    verified: bool


@lru_cache(maxsize=2048)
def _path_names(
    parts: tuple[str, ...], authors: tuple[int, ...] | None, author_label: str
) -> _PathNames:
    """The names of one path, from the outermost to the innermost."""
    proven: dict[GroupKind, str] = {}
    claims: dict[GroupKind, str] = {}
    container = pod = claimed = scope = ""
    author = 0
    for at in range(len(parts)):
        if not scope and authors is not None and authors[at]:
            author, scope = authors[at], f"{author_label}/"
        if not scope and (root := system_root_in(parts, at)):
            proven[GroupKind.CONTAINER] = _label(root)
            container, scope = root, f"{root}/"
        groups = claims if scope else proven
        if (found := pod_in(parts, at)) and GroupKind.POD not in {**proven, **claims}:
            groups[GroupKind.POD] = _label(scope + found)
            pod = pod if scope else found
        if (job := job_in(parts, at)) and GroupKind.JOB not in {**proven, **claims}:
            groups[GroupKind.JOB] = _label(scope + job)
        if unit := unit_in(parts, at):
            # The innermost unit, also above containers and jobs that it runs.
            _innermost(proven, claims, GroupKind.UNIT, scope, unit)
        if guest := guest_in(parts, at):
            _innermost(proven, claims, guest.kind, scope, guest.short)
            if not scope:
                container, scope = guest.name, f"{guest.short}/"
            elif not container and not claimed:
                claimed = guest.name
    return _PathNames(proven, claims, container, pod, claimed, author, authors is not None)


def _innermost(
    proven: dict[GroupKind, str],
    claims: dict[GroupKind, str],
    kind: GroupKind,
    scope: str,
    name: str,
) -> None:
    """Replace the group of a kind, which was named farther outside."""
    proven.pop(kind, None)
    (claims if scope else proven)[kind] = _label(scope + name)


@lru_cache(maxsize=2048)
def container_ids(cgroup_text: str) -> frozenset[str]:
    """The complete names of all containers, nested and claimed ones too, that a process is in."""
    return frozenset(
        guest.name
        for path in cgroup_paths(cgroup_text).values()
        for parts in [tuple(filter(None, path.split("/")))]
        for at in range(len(parts))
        if (guest := guest_in(parts, at)) is not None
    )


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


def _label(name: str) -> str:
    return clean_label(name, MAX_LABEL)
