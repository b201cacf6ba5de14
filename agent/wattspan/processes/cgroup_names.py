"""Names in the text of ``/proc/PID/cgroup``: containers, pods, jobs and units, and their author.

Container runtimes, Kubernetes, Slurm and systemd name cgroup directories as root. A user who owns a
directory names those below it as he likes, and so does the root of a container: such a name is a
claim. The label of a claim begins with its author, so that it joins no group of another owner. The
name of a container is the first twelve characters of its id, as in the listings of all runtimes.

Each pattern of a name matches whole path segments: a unit such as ``incus-lxc.service`` is no
container ``service``. Names that are valid only below a certain directory are matched with it.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from wattspan.model import Group, GroupKind
from wattspan.model.consumers import SHORT_CONTAINER
from wattspan.processes.procfs import ProcFs
from wattspan.util.text import MAX_LABEL, clean_label


class Guest(NamedTuple):
    """A container or virtual machine: its complete name, and the short one of listings."""

    kind: GroupKind
    name: str
    short: str


_HEX = r"[0-9a-f]{64}"
_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_BUILD = r"[0-9a-z]{25}"  # a step of a build of BuildKit
_HANDLE = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){4}(?:[0-9a-f]{8})?"  # Concourse and Cloud Foundry
_SEGMENT = r"[^/]+"

_Patterns = Mapping[int, re.Pattern[str]]


def _patterns(*patterns: str) -> _Patterns:
    """Patterns of the end of a path by their number of segments; the last group is a name."""
    by_depth: dict[int, list[str]] = {}
    for pattern in patterns:
        depth = pattern.replace("[^/", "").count("/") + 1
        by_depth.setdefault(depth, []).append(pattern)
    return {depth: re.compile("|".join(those)) for depth, those in by_depth.items()}


# docker-<id>.scope, cri-containerd-<id>.scope, libpod-payload-<id>; crio-conmon-<id>.scope is the
# monitor of a container
_SCOPE = rf"(?!(?:[\w.]+-)*conmon-)(?!kata_)[\w.]+(?:-[\w.]+)*-({_HEX})(?:\.scope)?"
_CONTAINERS = _patterns(
    _SCOPE,
    # cri-containerd:<namespace>:<id> as some managers write it; <slice>:cri-containerd:<id>
    rf"[^/]*:[^/:]+:({_HEX}|{_BUILD})",
    rf"({_HEX})",  # cgroupfs drivers: the bare id
    rf"lxc\.(?:payload|monitor)\.({_SEGMENT})",
    rf"systemd-nspawn@({_SEGMENT})\.service",
    rf"(?:lxc-[0-9]+-)?({_SEGMENT})\.libvirt-lxc",
    rf"lxc(?:\.payload|\.monitor)?/({_SEGMENT})",  # v1, Proxmox, and libvirt's libvirt/lxc
    rf"machine(?:-{_SEGMENT})?\.slice/machine-(?:lxc-[0-9]+-)?({_SEGMENT})\.scope",
    # nspawn with --slice=
    rf"(?!machine[-.]){_SEGMENT}\.slice/machine-({_SEGMENT})\.scope/(?:payload|supervisor)",
    # nspawn with --register=no
    rf"machine(?:-{_SEGMENT})?\.slice/(?!machine-)({_SEGMENT})\.scope/(?:payload|supervisor)",
    rf"buildkit/({_BUILD})",
    rf"mesos/({_UUID})",
    rf"garden/({_HANDLE})",
    rf"garden/(?:good|bad)/({_HANDLE})",
    rf"ecs/{_SEGMENT}/([0-9a-f]{{32}}-[0-9]{{1,20}})",  # a task of Amazon ECS
)
_VMS = _patterns(
    # libvirt with and without machined; of a user's session and of an embedded driver as well
    rf"machine-(?:qemu|ch)-(?:embed-[0-9a-f]{{8}}-)?[0-9]+-({_SEGMENT})\.scope",
    rf"machine-(?:qemu|ch)-[a-z_][\w.]*-[0-9]+-({_SEGMENT})\.scope",
    rf"machine-(?:qemu|ch)-({_SEGMENT})\.scope",
    rf"(?:(?:qemu|ch)-[0-9]+-)?({_SEGMENT})\.libvirt-(?:qemu|ch)",
    rf"libvirt/qemu/({_SEGMENT})",
    r"qemu\.slice/([0-9]+)\.scope",  # Proxmox
    r"firecracker(?:-v?[0-9][\w.-]*)?/([A-Za-z0-9-]{1,64})",  # its jailer
    rf"systemd-vmspawn@({_SEGMENT})\.service",
    rf"sd-vmspawn-[0-9]+-({_SEGMENT})\.scope",  # started by hand
    rf"kata_({_HEX})",
    rf"kata_overhead/({_HEX})",  # its QEMU; v1 has the threads of virtual CPUs in the pod
)
_UNIT_OF_CONTAINER = re.compile(_SCOPE)

_KUBEPODS = re.compile(r"(?:.+-)?kubepods(?:\.slice)?")
_POD = re.compile(
    r"(?:(?P<slice>(?:[\w.-]+-)?kubepods(?:-(?:besteffort|burstable|guaranteed))?)-)?"
    r"pod(?P<uid>[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?"
)

SLUID = re.compile(r"s[0-9A-HJKMNP-TV-Z]{13}")
"""Slurm's name of a run of a job, since 26.05."""

MAX_DEPTH = 32
"""Directories of a path, the outermost first, that count: a user may nest thousands of them."""

_PBS = r"[0-9]+(?:\[[0-9]*\])?(?:\.[\w.-]+)?"
_JOBS = _patterns(
    # Slurm: v2, also of one of several slurmd; v1
    rf"(?:{_SEGMENT}_)?slurmstepd\.scope/job_([0-9]+)",
    rf"(?:{_SEGMENT}_)?slurmstepd\.scope/({SLUID.pattern})",
    rf"slurm(?:_{_SEGMENT})?/uid_[0-9]+/job_([0-9]+)",
    rf"slurm(?:_{_SEGMENT})?/job_([0-9]+)",
    # OpenPBS and PBS Professional; Torque
    rf"pbs_jobs\.service/jobs/({_PBS})",
    rf"{_SEGMENT}\.service/jobid/({_PBS})",  # with any cgroup_prefix
    rf"(?:pbspro|torque)/({_PBS})",
    rf"pbspro\.slice/pbspro-({_PBS})\.slice",
    rf"lsf/{_SEGMENT}/job\.([0-9]+(?:\[[0-9]+\])?)(?:\.[0-9]+)*",
    # OAR 2 and 3
    rf"oar/{_SEGMENT}_([0-9]+)",
    rf"oar\.slice/{_SEGMENT}_([0-9]+)\.scope",
    r"oar\.slice/oar-u?[0-9]+\.slice/oar-u?[0-9]+-j([0-9]+)\.slice",
    # HTCondor names the slot, also one for backfill, and reuses it for the next job
    rf"condor_{_SEGMENT}_((?:slot|backfill)[0-9]+(?:_[0-9]+)?(?:@{_SEGMENT})?)",
    # Hadoop YARN, by the application: the prefix is a setting of the cluster
    r"container_(?:e[0-9]+_)?([0-9]{10,}_[0-9]{4,})_[0-9]{2,}_[0-9]{6,}",
    # Grid Engine: job and task
    r"(?:UGE|AGE|SGE|uge|age|sge)/([0-9]+\.[0-9]+)",
    r"sge-shepherd-([0-9]+)(?:-[0-9]+)?\.(?:slice|scope)",
    # Its successor Cluster Scheduler, with any name of its slice; then its parallel jobs
    rf"(?P<slice>{_SEGMENT})-jobs\.slice/(?P=slice)\.([0-9]+(?:\.[0-9]+)?)\.scope",
    rf"(?P<above>{_SEGMENT})-jobs-([0-9]+(?:\.[0-9]+)?)\.slice/(?P=above)\.{_SEGMENT}\.scope",
    # Flux, below the user manager of its instance's owner and slices of it, such as app.slice
    *(
        rf"user@[0-9]+\.service/{slices}(?:imp-)?shell-[0-9]+-(f[1-9A-HJ-NP-Za-km-z]+)\.service"
        for slices in itertools.accumulate([f"{_SEGMENT}\\.slice/"] * 4, initial="")
    ),
    # Nomad: allocation and task, with any cgroup_parent
    rf"{_SEGMENT}\.slice/(?:share|reserve)\.slice/({_UUID}\.{_SEGMENT})\.scope",
    rf"{_SEGMENT}\.slice/({_UUID}\.{_SEGMENT})\.scope",
    rf"nomad/({_UUID}[.-]{_SEGMENT}?)(?:\.scope)?",
    rf"nomad/{_SEGMENT}/({_UUID}[.-]{_SEGMENT}?)(?:\.scope)?",
)

_UNIT = re.compile(r"[^/]+\.(?:service|scope|socket|mount|swap|timer|path)")
_USER_MANAGER = re.compile(r"(?:user@[0-9]+|capsule@[^/]+)\.service")
_OF_MANAGER = re.compile(r"user\.slice/user-([0-9]{1,10})\.slice/user@\1\.service/")
_SYSTEM_ROOT = re.compile(r"(?:system\.slice|init\.scope|user\.slice/user-[0-9]+\.slice)(?:/.*)?")
_ESCAPE = r"\\x[0-9a-fA-F]{2}"


def guest_in(parts: Sequence[str], at: int) -> Guest | None:
    """The container or virtual machine that a directory is for."""
    for kind, patterns in ((GroupKind.VM, _VMS), (GroupKind.CONTAINER, _CONTAINERS)):
        if name := _name_in(patterns, parts, at):
            return Guest(kind, name, name[:SHORT_CONTAINER] if re.fullmatch(_HEX, name) else name)
    return None


def _name_in(patterns: _Patterns, parts: Sequence[str], at: int) -> str:
    """The name in the end of a path; "" if no pattern matches."""
    for depth, pattern in patterns.items():
        if depth <= at + 1:
            # An escaped slash separates no directories.
            whole = (unescaped(part).replace("/", "\0") for part in parts[at + 1 - depth : at + 1])
            match = pattern.fullmatch("/".join(whole))
            if match is not None:
                return match[match.lastindex or 0]
    return ""


def pod_in(parts: Sequence[str], at: int) -> str:
    """The uid of the Kubernetes pod that a directory is for; "" if there is none."""
    for piece in parts[at].split(":"):
        match = _POD.fullmatch(piece)
        if match is not None and (match["slice"] or _is_of_kubelet(parts, at)):
            return match["uid"].replace("_", "-")
    return ""


def _is_of_kubelet(parts: Sequence[str], at: int) -> bool:
    """True below ``kubepods`` and ``kubepods/burstable`` of the cgroupfs driver.

    An agent in a pod sees paths relative to its own: another pod is known by its containers.
    """
    if any(map(_KUBEPODS.fullmatch, parts[:at])):
        return True
    relative = "/".join(parts[:at]) in {"", "besteffort", "burstable"}
    return relative and at + 1 < len(parts) and guest_in(parts, at + 1) is not None


def unit_in(parts: Sequence[str], at: int) -> str:
    """The systemd unit that a directory is for, except the scopes of containers; "" for none."""
    part = parts[at]
    return (
        unescaped(part) if _UNIT.fullmatch(part) and not _UNIT_OF_CONTAINER.fullmatch(part) else ""
    )


def system_root_in(parts: Sequence[str], at: int) -> str:
    """The directory in which another systemd runs, if ``parts[at]`` is at its top; else "".

    The units of a system below a unit or other directory, as of a container that no pattern
    knows, are not the host's.
    """
    above = [part for part in parts[:at] if not part.endswith(".slice")]
    if not above or not _SYSTEM_ROOT.fullmatch("/".join(parts[at : at + 2])):
        return ""
    name = next(filter(_UNIT.fullmatch, reversed(above)), above[-1])
    return "" if _USER_MANAGER.fullmatch(name) else unescaped(name)


def unescaped(name: str) -> str:
    r"""Undo systemd's ``\x2d``."""
    if "\\" not in name:
        return name

    def plain(run: re.Match[str]) -> str:
        return bytes.fromhex(run[0].replace("\\x", "")).decode("utf-8", "replace")

    return re.sub(rf"(?:{_ESCAPE})+", plain, name)


# -------------------------------------------------------------------------------- names of a path


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
        parts = tuple(part for part in path.split("/") if part and part != ".")[:MAX_DEPTH]
        if len(path) > len(bare):
            bare = path
        if parts:
            outside = tuple(part for part in parts if part != "..")
            # ".." is above the root of the agent's cgroup namespace.
            named = authors(controllers, parts) if outside == parts else None
            told = named if named is not None or authors is unknown_authors else _told(outside)
            author = next(filter(None, told or ()), None)
            names = _path_names(outside, told, "" if author is None else label(author))
            found.append(names._replace(verified=named is not None))
    return _merged(found, bare)


def _told(parts: tuple[str, ...]) -> tuple[int, ...]:
    """The authors by a path whose directories are hidden: a user's manager is theirs."""
    match = _OF_MANAGER.match("/".join(parts))
    return (0,) * 3 + (int(match[1]) if match else 0,) * (len(parts) - 3)


def _merged(found: list[_PathNames], bare: str) -> CgroupNames:
    """The names of all hierarchies together."""
    groups: dict[GroupKind, str] = {}
    for one in found:
        groups.update({kind: name for kind, name in one.proven.items() if kind not in groups})
    for one in found:
        groups.update({kind: name for kind, name in one.claims.items() if kind not in groups})
        # A hierarchy that the inner runtime does not use shows the outer container alone.
        inner, outer = one.claims.get(GroupKind.CONTAINER, ""), groups.get(GroupKind.CONTAINER)
        if inner.startswith(f"{outer}/"):
            groups[GroupKind.CONTAINER] = inner
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
        if (job := _name_in(_JOBS, parts, at)) and GroupKind.JOB not in {**proven, **claims}:
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
        for parts in [tuple(filter(None, path.split("/")))[:MAX_DEPTH]]
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


# ------------------------------------------------------------------------- numbers of Slurm jobs

MAX_STEPS = 64
_MAX_JOBS = 4096
_DAEMON = "slurmstepd"
_TITLE = re.compile(rb"slurmstepd: \[(?P<job>[0-9]{1,10})(?![0-9])")


class SlurmJobs:
    """Finds the numbers of jobs whose cgroup directories are SLUIDs, each once. Thread-safe.

    The daemon of each step, ``slurmstepd``, has the number in its title (``slurmstepd:
    [4711.batch]``). It runs as root in a directory that jobs cannot enter. A job's environment
    names a number too, but the job may write there what it likes: it is not read.
    """

    def __init__(self, processes: ProcFs) -> None:
        self._processes = processes
        self._numbers: dict[str, str] = {}
        self._misses: dict[str, int] = {}

    def number_of(self, sluid: str, directories: Iterable[str]) -> str | None:
        """The number of a job by one of its cgroup directories; None if no daemon names it.

        A job without one is searched at the first, second, fourth call and so on.
        """
        known = self._numbers.get(sluid)
        if known is not None:
            return known
        misses = self._misses.get(sluid, 0) + 1
        if misses & (misses - 1) == 0:
            found = (self._titled(pid) for path in directories for pid in _daemons(path))
            known = next(filter(None, found), None)
        if len(self._numbers) + len(self._misses) >= _MAX_JOBS:
            self._numbers.clear()
            self._misses.clear()
        if known is None:
            self._misses[sluid] = misses
        else:
            self._numbers[sluid] = known
            self._misses.pop(sluid, None)
        return known

    def _titled(self, pid: int) -> str | None:
        """The number in the title of a daemon; None for another process."""
        stat = self._processes.stat(pid)
        if stat is None or stat.comm != _DAEMON or self._processes.user_id(pid) != 0:
            return None
        line = self._processes.command_line(pid) or b""
        match = _TITLE.match(line)
        return match["job"].decode() if match is not None else None


def _daemons(job: str) -> Iterator[int]:
    """The processes that Slurm keeps apart from the tasks of each step."""
    try:
        with os.scandir(job) as entries:
            steps = [entry.name for entry in entries if entry.name.startswith("step_")]
    except OSError:
        return
    for step in islice(sorted(steps), MAX_STEPS):
        try:
            text = Path(job, step, "slurm", "cgroup.procs").read_text("ascii")
        except (OSError, ValueError):
            continue
        yield from (int(line) for line in text.split() if line.isdecimal())
