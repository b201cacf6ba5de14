"""Container, pod, job, unit and cgroup of a process, from the text of ``/proc/PID/cgroup``.

The name of a container is the first twelve characters of its id, as in the listings of all
runtimes.
"""

from __future__ import annotations

import re

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
    """Path by controllers (``""`` is the unified hierarchy), the unified and systemd's first.

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
    """The innermost container: a container in a container is the one that runs the process."""
    for part in reversed(parts):
        if _INNER_CONTAINER.match(part):
            continue
        for pattern in _CONTAINER:
            match = pattern.fullmatch(part)
            if match is not None:
                return match["id"][:_SHORT_ID]
    match = _LXC.search(path)
    if match is not None:
        return _unescape(match["name"])
    for part in parts:
        match = _NSPAWN.fullmatch(part)
        if match is not None:
            return _unescape(match["name"])
    return None


def _pod(parts: list[str]) -> str | None:
    for part in parts:
        for piece in part.split(":"):
            match = _POD.fullmatch(piece)
            if match is not None:
                return match["uid"].replace("_", "-")
    return None


def _job(parts: list[str]) -> str | None:
    """Slurm's job, below its own daemon's scope or its v1 directory."""
    for at, part in enumerate(parts):
        match = _JOB.fullmatch(part)
        if match is not None and any(_STEPD.fullmatch(above) for above in parts[:at]):
            return match["job"]
    return None


def _unit(parts: list[str]) -> str | None:
    """The innermost unit of systemd: of the user's own manager where there is one.

    Where a unit runs containers or jobs in cgroups of its own below it, it is still the unit.
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
