"""Who a process is: name, groups and user, read once and kept."""

from __future__ import annotations

import functools
import pwd
from collections import OrderedDict
from threading import Lock

from wattspan.model import Consumer, Group, GroupKind, PayerInfo
from wattspan.processes.groups import clean, groups_of
from wattspan.processes.procfs import Processes, Stat

LONGEST_COMMAND = 64
_COMM = 15  # the kernel cuts names here
_REMEMBERED = 4096


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
    return (*found, Group(GroupKind.USER, clean(user, LONGEST_COMMAND))) if user else found


def command_of(stat: Stat, procfs: Processes) -> str:
    """A short name: never the command line, which may hold secrets.

    Kernel threads stand in brackets, workers without the work they happen to do. A name the
    kernel has cut is completed from the first argument, if that begins with it.
    """
    if stat.kernel:
        comm = stat.comm.partition("-")[0] if stat.comm.startswith("kworker/") else stat.comm
        return clean(f"[{comm}]", LONGEST_COMMAND)
    name = stat.comm
    if len(name.encode()) >= _COMM:
        base = (procfs.first_argument(stat.pid) or "").rpartition("/")[2]
        if base.startswith(name):
            name = base
    return clean(name, LONGEST_COMMAND)


def info_of(stat: Stat, procfs: Processes, cgroup_text: str) -> PayerInfo:
    """Describe a living process."""
    user_id = procfs.user_id(stat.pid)
    user = user_name(user_id) if user_id is not None else ""
    return PayerInfo(
        Consumer(stat.pid, stat.started),
        command_of(stat, procfs),
        groups_in(cgroup_text, user),
        user,
        stat.parent or None,
    )


class HostProcesses:
    """The process directory of a host: any thread may ask.

    What was found is kept for a bounded number of processes and is read anew when the process
    has changed its name, as it does on ``exec``.
    """

    def __init__(self, procfs: Processes) -> None:
        self._procfs = procfs
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
        info = info_of(stat, self._procfs, self._procfs.cgroup(consumer.pid) or "")
        with self._lock:
            self._known[consumer] = (stat.comm, info)
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return info
