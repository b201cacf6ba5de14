"""Reading the files that an operator names: the configuration, tokens, certificates, tariffs.

One process at a time: files that are locked, and who has the lock.

The kernel lets go of a lock however its holder ends, so there is no stale one. But whoever may as
much as read a file may lock it, and wait for it: so it is its owner's alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from pathlib import Path
from typing import NamedTuple

MAX_FILE_BYTES = 1 << 20
"""Bytes of a file, unless its kind needs more."""

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_NULL_DEVICE = os.makedev(1, 3)


class UnsuitableFileError(OSError):
    """The path leads to something else than a file of the kind that is needed."""


class RegularFile(NamedTuple):
    """The whole content of a file, and what the kernel says of the file that was read."""

    content: bytes
    status: os.stat_result


def read_regular(path: Path | str, most: int = MAX_FILE_BYTES) -> RegularFile:
    """The file at ``path``; reading it never blocks and never takes more than ``most`` bytes.

    OSError if the file cannot be read; UnfitFileError if it is no regular file or is larger.
    ``/dev/null`` is an empty file: it stands for none.
    """
    # Before it is opened as well: opening a device may act on it.
    _require_regular(Path(path).stat())
    # O_NONBLOCK: the file may have been replaced by a named pipe since.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        _require_regular(status)
        content = file.read(most + 1)
    if len(content) > most:
        size = f"{most >> 20} MiB" if most >= 1 << 20 else f"{most} bytes"
        raise UnsuitableFileError(errno.EFBIG, f"it is larger than {size}")
    return RegularFile(content, status)


def _require_regular(status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    is_null = stat.S_ISCHR(status.st_mode) and status.st_rdev == _NULL_DEVICE
    if not stat.S_ISREG(status.st_mode) and not is_null:
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise UnsuitableFileError(errno.EINVAL, f"it is {kind}, and a regular file is needed")


_LOCKS, _MOUNTS = Path("/proc/locks"), Path("/proc/self/mountinfo")


class LockHolder(NamedTuple):
    """Who has a lock: ``pid``, if the kernel tells.

    ``noted`` is the process that left its number in the file. It was the last to do so, and may
    have ended since.
    """

    pid: int | None
    recorded_pid: int | None

    @property
    def description(self) -> str:
        """What is to be said of the number in the file where the kernel tells nothing."""
        if self.recorded_pid is None:
            return "no number is in it"
        said = "may be it" if process_exists(self.recorded_pid) else "has ended"
        return f"process {self.recorded_pid}, whose number is in it, {said}"


class LockHeldError(Exception):
    """Somebody has the lock."""

    def __init__(self, path: Path, holder: LockHolder) -> None:
        super().__init__(f"{path} is locked by {holder}")
        self.holder = holder


class FileLock:
    """The right to what a file stands for, until it is released or the process ends."""

    def __init__(self, path: Path, *, unwritable: bool = False) -> None:
        """Take it; HeldError if somebody has it, OSError if nobody can.

        ``unwritable``: one that is there already will do on a disk that is read-only, too.
        """
        self._descriptor = _open(path, unwritable=unwritable)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(self._descriptor)
            self.release()
            raise LockHeldError(path, holder) from None
        except OSError:
            self.release()
            raise
        with contextlib.suppress(OSError):  # a full disk: then it has no name, and holds
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode("ascii"), 0)

    @property
    def released(self) -> bool:
        return self._descriptor < 0

    def release(self) -> None:
        os.close(self._descriptor)
        self._descriptor = -1


def _open(path: Path, *, unwritable: bool) -> int:
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags | os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        if not unwritable or error.errno != errno.EROFS:
            raise
        try:
            return os.open(path, flags | os.O_RDONLY)
        except FileNotFoundError:
            raise error from None
    found = os.fstat(descriptor)
    if found.st_uid == os.geteuid() and found.st_mode & 0o077:
        with contextlib.suppress(OSError):  # a file system that knows no modes
            os.fchmod(descriptor, 0o600)
    return descriptor


def _holder(descriptor: int) -> LockHolder:
    told = os.pread(descriptor, 20, 0).strip()
    noted = int(told) if told.isdigit() and int(told) > 0 else None
    pid = None
    with contextlib.suppress(OSError, ValueError, IndexError):  # a kernel that tells otherwise
        pid = _lock_owner(descriptor)
    return LockHolder(pid, noted)


def _lock_owner(descriptor: int) -> int | None:
    """The process that the kernel says has locked an open file, if it lives.

    One that has ended may have left the lock to a child.
    """
    file = f"{_device(descriptor)}:{os.fstat(descriptor).st_ino}"
    for line in _LOCKS.read_text(encoding="ascii").splitlines():
        words = line.split()  # 1: FLOCK ADVISORY WRITE PID DEVICE:INODE 0 EOF; one who waits: 1: ->
        if words[1] == "FLOCK" and words[5] == file and process_exists(pid := int(words[4])):
            return pid
    return None


def _device(descriptor: int) -> str:
    """The device of an open file as the kernel's list of locks names it.

    On file systems that have one for each volume (btrfs), stat tells another.
    """
    told = Path(f"/proc/self/fdinfo/{descriptor}").read_text(encoding="ascii")
    mount = re.search(r"^mnt_id:\s*(\d+)$", told, re.MULTILINE)
    for line in _MOUNTS.read_bytes().splitlines():
        number, _, device, *_ = line.split()
        if mount is not None and number.decode() == mount[1]:
            major, minor = map(int, device.split(b":"))
            return f"{major:02x}:{minor:02x}"
    return ""


def process_exists(pid: int) -> bool:
    """Whether the process exists, of whichever user."""
    if pid <= 0:  # of a namespace that we do not see into
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:  # there is, and it is not ours to send it anything
        return True
    except (OSError, OverflowError):
        return False
    return True
