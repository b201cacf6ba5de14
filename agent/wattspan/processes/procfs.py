"""The kernel's process table, read from a procfs root."""

from __future__ import annotations

import os
import re
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from wattspan.model import Consumer, Failure, Trouble
from wattspan.util.files import shortage_remedy

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
TICK = 1_000_000_000 // TICKS_PER_SECOND
"""Nanoseconds of one USER_HZ tick, the unit of a process's start time."""

_KERNEL_THREAD = 0x00200000  # PF_KTHREAD in the flags field
_EXITING = 0x00000004  # PF_EXITING
_COPIED = 0x00000040  # PF_FORKNOEXEC
_BIGGEST = 65536
_COMMAND_LINE = 16384
_STAT = 2048  # for 52 numbers and a name; a small buffer is faster
_MAX_THREADS = 512  # a list of thousands takes milliseconds

NO_PROCESSES = Failure(
    "processes",
    "the process table",
    Trouble.DENIED,
    "procfs shows no processes",
    "Mount procfs with hidepid=0, or grant CAP_SYS_PTRACE.",
)


def shortage_failure(error: OSError) -> Failure:
    """The failure of a read without descriptors or memory."""
    remedy = f"{shortage_remedy(error)}; energy of new processes goes to unattributed meanwhile."
    return Failure("processes", "the process table", Trouble.RETRY, f"{error.strerror}", remedy)


class Stat(NamedTuple):
    """The used fields of ``/proc/PID/stat``. ``started`` is in ticks since boot (field 22)."""

    pid: int
    comm: str
    parent: int
    started: int
    threads: int
    processor: int  # the CPU the main thread last ran on
    kernel: bool = False
    exiting: bool = False  # it has ended, and its parent has not reaped it
    copied: bool = False  # forked, without an exec since
    stuck: bool = False  # in uninterruptible sleep (D)


def parse_stat(raw: bytes) -> Stat:
    """Parse one ``stat`` line; ValueError if it is invalid.

    The name is in parentheses and may itself contain spaces and parentheses, so the line is split
    at the first opening and the last closing one.
    """
    opening, closing = raw.find(b"("), raw.rfind(b")")
    fields = raw[closing + 1 :].split()
    if opening < 1 or closing < opening or len(fields) < 20:
        raise ValueError("not a line of /proc/PID/stat")
    return Stat(
        pid=int(raw[:opening]),
        comm=raw[opening + 1 : closing].decode("utf-8", "replace"),
        parent=int(fields[1]),
        started=int(fields[19]),
        threads=int(fields[17]),
        processor=int(fields[36]) if len(fields) > 36 else -1,
        kernel=bool(int(fields[6]) & _KERNEL_THREAD),
        exiting=bool(int(fields[6]) & _EXITING),
        copied=bool(int(fields[6]) & _COPIED),
        stuck=fields[0] == b"D",
    )


_INITIAL_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of the kernel
_SYS_PTRACE = 19
_CAPABILITIES = re.compile(rb"^CapEff:\s*([0-9a-fA-F]{1,32})$", re.MULTILINE)
_GROUPS = re.compile(rb"^(?:Gid|Groups):(.*)$", re.MULTILINE)
_AT_ROOTS = re.compile(r"(?:[1-9][0-9]*:[^:\n]*:/\n)+(?:0::.*\n)?")
_DELETED = " (deleted)\n"


def _mount_options(mountinfo: bytes, root: str) -> dict[str, str]:
    """The options of the procfs that is mounted at ``root`` or at /proc."""
    found: dict[str, str] = {}
    for line in mountinfo.decode("utf-8", "replace").splitlines():
        mount, _, kind = line.partition(" - ")
        place, rest = mount.split(" ")[4:6], kind.split(" ")
        if place[:1] in (["/proc"], [root]) and rest[0] == "proc":
            options = ",".join((place[-1], *rest[2:])).split(",")
            found = {key: value for key, _, value in (one.partition("=") for one in options)}
    return found


class ProcFs:
    """Reads below one procfs root: None for a process that is gone or hidden, never an error.

    ``shortage`` is the last error of a read without descriptors or memory, which returns None too
    and proves nothing: each time another object.
    """

    def __init__(self, root: Path = Path("/proc")) -> None:
        self._root = str(root)
        self._last_pid: int | None = None
        self.shortage: OSError | None = None

    def pids(self) -> list[int]:
        """Every visible process; empty if the root cannot be read."""
        try:
            names = os.listdir(self._root)  # noqa: PTH208 - thousands of names, no paths
        except OSError as error:
            self._note(error)
            return []
        return [int(name) for name in names if name.isdecimal()]

    def shows_all(self) -> bool:
        """True if every process of the host is visible, as far as procfs tells.

        Not so in a pid namespace, and with ``hidepid`` unless this process has CAP_SYS_PTRACE or is
        in the mount's group.
        """
        if self.stat(1) is None or self.is_namespaced():
            return False
        options = _mount_options(self._read("self/mountinfo") or b"", self._root)
        if options.get("hidepid", "off") in ("off", "0"):
            return True
        status = self._read("self/status") or b""
        if (found := _CAPABILITIES.search(status)) and int(found[1], 16) >> _SYS_PTRACE & 1:
            return True
        groups = _GROUPS.findall(status)
        return options.get("gid", "").encode() in {
            group for line in groups for group in line.split()
        }

    def is_namespaced(self) -> bool:
        """True in a pid namespace of its own, where processes have other pids than for the kernel.

        False if it is unknown.
        """
        try:
            namespace = os.readlink(f"{self._root}/self/ns/pid")  # noqa: PTH115 - as the others
        except OSError:
            return False
        return namespace.startswith("pid:") and namespace != _INITIAL_NAMESPACE

    def last_pid(self) -> int | None:
        """The last pid of a new process or thread in this pid namespace; None if unknown.

        A changed value means new processes or threads.
        """
        if self._last_pid is None:  # opened at use, so that other users need not close it
            self._last_pid = _open(f"{self._root}/loadavg")
        if self._last_pid is None:
            return None
        try:
            return int(os.pread(self._last_pid, 256, 0).rsplit(None, 1)[-1])
        except (OSError, ValueError, IndexError):
            return None

    def pid_max(self) -> int:
        """The limit of pids; the default of the kernel if it is not readable."""
        raw = self._read("sys/kernel/pid_max")
        return int(raw) if raw is not None and raw.strip().isdigit() else 32768

    def stat(self, pid: int) -> Stat | None:
        raw = self._read(f"{pid}/stat", limit=_STAT)
        if raw is None:
            return None
        try:
            return parse_stat(raw)
        except ValueError:
            return None

    def identify(self, pid: int) -> Consumer | None:
        """The present process of ``pid``."""
        stat = self.stat(pid)
        return Consumer(pid, stat.started) if stat is not None else None

    def has_ended(self, consumer: Consumer) -> bool:
        """True if the process has ended for certain, False during a shortage."""
        before, stat = self.shortage, self.stat(consumer.pid)
        return self.shortage is before if stat is None else stat.started != consumer.started

    def cgroup(self, pid: int) -> str | None:
        """The text of ``/proc/PID/cgroup``.

        The kernel shows an ended process at the roots of version 1 hierarchies, wherever it was:
        None. In the unified one it marks a removed directory: its name without the mark.
        """
        raw = self._read(f"{pid}/cgroup")
        text = None if raw is None else raw.decode("utf-8", "replace")
        if text is None or not (_AT_ROOTS.fullmatch(text) or text.endswith(_DELETED)):
            return text
        stat = self.stat(pid)
        if stat is None or stat.exiting:
            return text.removesuffix(_DELETED) + "\n" if stat and text[0] == "0" else None
        return text

    def command_line(self, pid: int) -> bytes | None:
        """The first 16 KiB of ``/proc/PID/cmdline``. It may contain secrets."""
        return self._read(f"{pid}/cmdline", limit=_COMMAND_LINE)

    def status(self, pid: int) -> bytes | None:
        """The text of ``/proc/PID/status``."""
        return self._read(f"{pid}/status")

    def user_id(self, pid: int) -> int | None:
        """The effective user of the process: the owner of its directory."""
        try:
            return os.stat(f"{self._root}/{pid}").st_uid  # noqa: PTH116 - per process, so bare
        except OSError as error:
            self._note(error)
            return None

    def threads(self, pid: int) -> list[int]:
        """The ids of the oldest threads of a process, its pid first; empty if it is gone."""
        try:
            with os.scandir(f"{self._root}/{pid}/task") as found:
                return [int(one.name) for one in islice(found, _MAX_THREADS)]
        except OSError:
            return []

    def affinity(self, pid: int) -> frozenset[int] | None:
        """The allowed CPUs of a thread, or of the main thread of a process."""
        try:
            return frozenset(os.sched_getaffinity(pid))
        except OSError:
            return None

    def close(self) -> None:
        if self._last_pid is not None:
            os.close(self._last_pid)
            self._last_pid = None

    def _read(self, name: str, limit: int = _BIGGEST) -> bytes | None:
        try:
            fd = os.open(f"{self._root}/{name}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                return os.read(fd, limit)
            finally:
                os.close(fd)
        except OSError as error:  # ESRCH: the process ended after the open
            self._note(error)
            return None

    def _note(self, error: OSError) -> None:
        if shortage_remedy(error):
            self.shortage = OSError(error.errno, error.strerror)


def _open(path: str) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
