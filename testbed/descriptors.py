"""File descriptors of a process: none is free while a block runs, or until others are permitted.

Also its sockets: the kernel drops events of processes for it.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import struct
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from testbed.waiting import eventually

_ENOUGH = 1024
_LISTINGS = 50


def forbid_descriptors(pid: int) -> None:
    """Let a process have no descriptor but those that it has.

    Another process is listed only while all of its threads sleep: one that is preempted may have a
    file open that it closes a moment later, or a connection that its peer has closed already.
    """
    listing = _used if pid == os.getpid() else _used_at_rest
    used = eventually(lambda: listing(pid), f"process {pid} is at rest")
    for _ in range(_LISTINGS):  # a file that is just being read has one for a moment
        used &= eventually(lambda: listing(pid), f"process {pid} is at rest")
    lowest = next(number for number in range(len(used) + 1) if number not in used)
    _limit(pid, lowest)


def _used(pid: int) -> set[int]:
    listed = list(Path(f"/proc/{pid}/fd").iterdir())
    return {int(one.name) for one in listed if one.is_symlink()}  # without that of the listing


def _used_at_rest(pid: int) -> set[int] | None:
    """Return the descriptors in use, or None where a thread ran meanwhile."""
    before = _sleeping_threads(pid)
    used = _used(pid)
    return used if before is not None and before == _sleeping_threads(pid) else None


def _sleeping_threads(pid: int) -> dict[str, str] | None:
    """Return the context switches of each thread, or None where one does not sleep."""
    threads = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            lines = (task / "status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):  # the thread has ended
            return None
        fields = dict(line.split(":\t") for line in lines)
        if not fields["State"].startswith("S"):
            return None
        threads[task.name] = fields["voluntary_ctxt_switches"]
    return threads


def permit_descriptors(pid: int) -> None:
    _limit(pid, _ENOUGH)


@contextmanager
def no_free_descriptor(pid: int) -> Iterator[None]:
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    forbid_descriptors(pid)
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def drop_process_events(pid: int) -> bool:
    """Let the kernel drop events for a process, which need not run; False if it receives none."""
    links = list(_connectors(pid))
    for link in links:
        with closing(link):
            before, size = _drops(link), link.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
            os.kill(pid, signal.SIGSTOP)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 0)
            try:
                while _drops(link) == before:
                    os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)
            finally:
                link.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, size // 2)
                os.kill(pid, signal.SIGCONT)
    return bool(links)


_SO_RCVBUFFORCE, _SO_MEMINFO, _PIDFD_GETFD, _NETLINK_CONNECTOR = 33, 55, 438, "11"


def _drops(link: socket.socket) -> int:
    return struct.unpack("9I", link.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, 36))[8]


def _connectors(pid: int) -> Iterator[socket.socket]:
    """The process connectors of a process, opened here too."""
    rows = [line.split() for line in Path("/proc/net/netlink").read_text().splitlines()]
    inodes = {f"socket:[{row[9]}]" for row in rows if row[1] == _NETLINK_CONNECTOR}
    holder = os.pidfd_open(pid)
    for one in _used(pid):
        if str(Path(f"/proc/{pid}/fd/{one}").readlink()) in inodes:
            found = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, holder, one, 0)
            if found < 0:
                raise OSError(ctypes.get_errno(), "pidfd_getfd")
            yield socket.socket(fileno=found)
    os.close(holder)


def _limit(pid: int, number: int) -> None:
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(number, hard), hard))
