"""Identity of a process: name, user and groups, read once and kept.

Container, pod, job and unit come from the paths of the process's cgroups. A container is named by
the first twelve characters of its id, as the listings of all runtimes show it.
"""

from __future__ import annotations

import functools
import pwd
import re
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from threading import Lock

from wattspan.model import Consumer, Group, GroupKind, NamePolicy, PayerInfo, ProcessRow
from wattspan.processes.procfs import ProcessReader, Stat
from wattspan.processes.scripts import interpreter_of, script_of
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


MAX_COMMAND = 64
UNNAMED = "process"
"""Name of every process if names are not to be shown."""

_COMM = 15  # the kernel cuts names here
_TITLE = re.compile(r"[\s:=]")
_MAX_REMEMBERED = 4096


@functools.lru_cache(maxsize=1024)
def user_name(user_id: int) -> str:
    """The name of a user, or the number where there is no name for it."""
    try:
        return pwd.getpwuid(user_id).pw_name
    except KeyError:
        return str(user_id)


@functools.lru_cache(maxsize=2048)
def groups_in(cgroup_text: str, user: str) -> tuple[Group, ...]:
    """The groups of a cgroup and, last, the user's; the same object for the same text."""
    found = groups_of(cgroup_text)
    return (*found, Group(GroupKind.USER, clean_label(user, MAX_COMMAND))) if user else found


def command_of(
    stat: Stat,
    procfs: ProcessReader,
    names: NamePolicy = NamePolicy.COMMAND,
    known: str | None = None,
) -> str:
    """A short name: never the command line, which may hold secrets.

    Names of kernel threads are in brackets, those of workers without their present work. A name cut
    by the kernel is completed from the first argument, if that begins with it. ``known`` is the
    name from an earlier read: reading the command line of a process that hangs in the kernel hangs
    too, so it is not read meanwhile.
    """
    if names is NamePolicy.NONE:
        return UNNAMED
    if stat.kernel:
        comm = stat.comm.partition("-")[0] if stat.comm.startswith("kworker/") else stat.comm
        return clean_label(f"[{comm}]", MAX_COMMAND)
    is_cut = len(stat.comm.encode()) >= _COMM
    if stat.stuck:
        return known if known is not None else clean_label(stat.comm, MAX_COMMAND)
    line = procfs.command_line(stat.pid) or b"" if is_cut or names is NamePolicy.SCRIPT else b""
    script = script_of(stat.comm, line, MAX_COMMAND) if names is NamePolicy.SCRIPT else None
    return script or clean_label(
        _untruncated(stat.comm, line) if is_cut else stat.comm, MAX_COMMAND
    )


def _untruncated(comm: str, line: bytes) -> str:
    """A name cut by the kernel, completed if the first argument is the path of its program.

    Some programs write a title over their command line, arguments included, into one word: of such
    a word only the part before the first space, colon or equals sign counts.
    """
    first = line.partition(b"\0")[0].decode("utf-8", "replace")
    base = _TITLE.split(first, maxsplit=1)[0].rpartition("/")[2]
    return base if base.startswith(comm) else comm


def info_of(
    stat: Stat,
    procfs: ProcessReader,
    cgroup_text: str,
    names: NamePolicy = NamePolicy.COMMAND,
    known: str | None = None,
) -> PayerInfo:
    """Describe a running process; ``known`` is its name from an earlier read."""
    user_id = procfs.user_id(stat.pid)
    user = user_name(user_id) if user_id is not None else ""
    return PayerInfo(
        Consumer(stat.pid, stat.started),
        command_of(stat, procfs, names, known),
        groups_in(cgroup_text, user),
        user,
        stat.parent or None,
    )


def info_of_exited(
    consumer: Consumer, comm: str, cgroup_text: str, user: str, parent: int, names: NamePolicy
) -> PayerInfo:
    """Describe a process that is gone, by what it left; its command line went with it."""
    return PayerInfo(
        consumer,
        UNNAMED if names is NamePolicy.NONE else clean_label(comm, MAX_COMMAND),
        groups_in(cgroup_text, user),
        user,
        parent or None,
    )


class HostProcesses:
    """The process directory of a host. Thread-safe.

    Results are cached for a bounded number of processes and are read anew when a process has
    changed its name, as it does on ``exec``.
    """

    def __init__(self, procfs: ProcessReader, names: NamePolicy = NamePolicy.COMMAND) -> None:
        self._procfs, self._names = procfs, names
        self._lock = Lock()
        self._known: OrderedDict[Consumer, tuple[str, PayerInfo]] = OrderedDict()

    def identify(self, pid: int) -> Consumer | None:
        stat = self._procfs.stat(pid)
        return Consumer(pid, stat.started) if stat is not None else None

    def describe(self, consumer: Consumer) -> PayerInfo | None:
        stat = self._procfs.stat(consumer.pid)
        if stat is None or stat.started != consumer.started:
            return None
        with self._lock:
            known = self._known.get(consumer)
            if known is not None and known[0] == stat.comm:
                return known[1]
        text = self._procfs.cgroup(consumer.pid) or ""
        info = info_of(stat, self._procfs, text, self._names)
        if stat.stuck:
            return info  # its name may be but the half of it
        with self._lock:
            self._known[consumer] = (stat.comm, info)
            while len(self._known) > _MAX_REMEMBERED:
                self._known.popitem(last=False)
        return info

    def rename(self, rows: Iterable[ProcessRow]) -> tuple[ProcessRow, ...]:
        """Rows from books that another policy may have named, under the names of this one."""
        return tuple(replace(row, info=self._renamed(row.info)) for row in rows)

    def _renamed(self, info: PayerInfo) -> PayerInfo:
        if not isinstance(info.payer, Consumer):
            return info
        now = self.describe(info.payer)
        if now is not None:
            return replace(info, command=now.command)
        if self._names is NamePolicy.NONE:
            return replace(info, command=UNNAMED)
        if self._names is NamePolicy.COMMAND:
            return replace(info, command=interpreter_of(info.command))
        return info
