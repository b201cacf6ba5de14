"""Safe reading of files that an operator names, whole replacement, lock files, documentation pages.

The kernel releases a lock when its holder ends, so there are no stale locks. Any user who can read
a file can lock it, therefore only its owner can read a lock file.
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
"""Default limit of the size of a file, in bytes."""

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_NULL_DEVICE = os.makedev(1, 3)

INSTALLED_PAGES = Path("/usr/share/doc/wattspan")
"""Here the Debian package installs README.md, docs/ and others, as in the repository."""

PUBLIC_ADDRESS = ""
"""Prefix of the paths of the repository on the Web, with a slash at its end; "" until there is one.

Messages on hosts without the package name it, and `make docs` writes it to the alerts. It is
`Documentation` of `[project.urls]` in pyproject.toml.
"""

_PAGE = re.compile(r"(?<![\w/.-])docs/[\w./-]+\.md\b")


_SHORTAGES: dict[int | None, str] = {
    errno.EMFILE: "Raise the agent's limit of open files (LimitNOFILE=)",
    errno.ENFILE: "Raise the host's limit of open files (fs.file-max)",
    errno.ENOMEM: "Free memory, or raise the agent's limit (MemoryMax=)",
}
"""Errors of a reader without descriptors or memory, and their remedies."""


def shortage_remedy(error: BaseException) -> str | None:
    """The remedy, a clause, of a shortage of descriptors or memory; None for another error.

    A read that fails by a shortage tells nothing about its file.
    """
    number = errno.ENOMEM if isinstance(error, MemoryError) else getattr(error, "errno", None)
    return _SHORTAGES.get(number)


def located_pages(text: str, folder: Path = INSTALLED_PAGES, public: str = PUBLIC_ADDRESS) -> str:
    """``text`` with the place of each page, such as ``docs/tutorial.md``, that it names.

    The place is the installed file, else the public address, else the path in the repository.
    """

    def place(named: re.Match[str]) -> str:
        file = folder / named[0]
        return str(file) if file.exists() else f"{public}{named[0]}"

    return _PAGE.sub(place, text)


class UnsuitableFileError(OSError):
    """The path is not a regular file, or the file is too large."""


class RegularFile(NamedTuple):
    """The whole content of a file and its status."""

    content: bytes
    status: os.stat_result


def read_regular(path: Path | str, most: int = MAX_FILE_BYTES) -> RegularFile:
    """Return the file at ``path`` without blocking, at most ``most`` bytes.

    OSError if the file is not readable; UnsuitableFileError if it is not a regular file or larger.
    ``/dev/null`` counts as an empty file.
    """
    # Checked before the open as well, because opening a device may have an effect.
    _require_regular(Path(path).stat())
    # O_NONBLOCK: a named pipe may have replaced the file since the check.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        _require_regular(status)
        content = file.read(most + 1)
    if len(content) > most:
        size = f"{most >> 20} MiB" if most >= 1 << 20 else f"{most} bytes"
        raise UnsuitableFileError(errno.EFBIG, f"it is larger than {size}")
    return RegularFile(content, status)


def file_text(path: Path) -> str:
    """The text of a small file of the kernel or system, without spaces around; "" without one."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _require_regular(status: os.stat_result) -> None:
    is_null = stat.S_ISCHR(status.st_mode) and status.st_rdev == _NULL_DEVICE
    if not stat.S_ISREG(status.st_mode) and not is_null:
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise UnsuitableFileError(errno.EINVAL, f"it is {kind}, and a regular file is needed")


def make_directory(directory: Path) -> None:
    """Make a directory that only its user and group may enter; an existing one stays. OSError."""
    directory.mkdir(mode=0o750, parents=True, exist_ok=True)


def replace_file(
    path: Path, content: bytes, draft: Path, mode: int = 0o644, *, exact: bool = False
) -> None:
    """Replace the file at ``path`` as a whole by ``content``, which is written to ``draft`` first.

    The umask may remove permissions of ``mode``, unless it is ``exact``. Whenever the process or
    the power ends, the file is the one before or the one after, once ``synchronize_directory`` has
    been called. OSError: the file is the one before, without a draft.
    """
    with contextlib.suppress(FileNotFoundError):
        draft.unlink()  # of an interrupted attempt
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(draft, flags, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if exact:
                os.fchmod(descriptor, mode)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def synchronize_directory(directory: Path) -> None:
    """Have the names of all files in ``directory`` on disk. OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_LOCKS, _MOUNTS = Path("/proc/locks"), Path("/proc/self/mountinfo")


class LockHolder(NamedTuple):
    """The holder of a lock: ``pid`` according to the kernel, if known.

    ``recorded_pid`` is the last process that wrote its pid to the file. It may have ended since.
    """

    pid: int | None
    recorded_pid: int | None

    @property
    def description(self) -> str:
        """Clause about the recorded pid, for a holder that the kernel does not report."""
        if self.recorded_pid is None:
            return "the file contains no pid"
        state = "may hold it" if process_exists(self.recorded_pid) else "has ended"
        return f"process {self.recorded_pid}, whose pid is in the file, {state}"


class LockHeldError(Exception):
    """Another process holds the lock."""

    def __init__(self, path: Path, holder: LockHolder) -> None:
        super().__init__(f"{path} is locked by {holder}")
        self.holder = holder


class FileLock:
    """An exclusive lock of a file, until its release or the end of the process."""

    def __init__(self, path: Path, *, unwritable: bool = False) -> None:
        """Take the lock. LockHeldError if another process holds it; OSError.

        With ``unwritable``, an existing file on a read-only disk is locked as well.
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
        with contextlib.suppress(OSError):  # a full disk: the lock is held without a pid
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode("ascii"), 0)

    @property
    def released(self) -> bool:
        return self._descriptor < 0

    def is_at(self, path: Path) -> bool:
        """True if ``path`` still names the locked file: another one could be locked as well."""
        try:
            return os.path.samestat(path.lstat(), os.fstat(self._descriptor))
        except OSError:
            return False

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
        with contextlib.suppress(OSError):  # a file system without modes
            os.fchmod(descriptor, 0o600)
    return descriptor


def lock_holder(path: Path) -> LockHolder | None:
    """Return the holder of a lock that the caller need not be able to open; None if it is free.

    The recorded pid is the kernel's. A holder of another pid namespace looks like none.
    """
    try:
        descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        pid = _lock_owner(descriptor)
    except (OSError, ValueError, IndexError):  # an unknown format of the kernel
        return None
    finally:
        os.close(descriptor)
    return None if pid is None else LockHolder(pid, pid)


def _holder(descriptor: int) -> LockHolder:
    text = os.pread(descriptor, 20, 0).strip()
    recorded = int(text) if text.isdigit() and int(text) > 0 else None
    pid = None
    with contextlib.suppress(OSError, ValueError, IndexError):  # an unknown format of the kernel
        pid = _lock_owner(descriptor)
    return LockHolder(pid, recorded)


def _lock_owner(descriptor: int) -> int | None:
    """Return the living process that holds the lock of an open file, according to the kernel.

    A process that has ended may have passed the lock to a child.
    """
    file = f"{_device(descriptor)}:{os.fstat(descriptor).st_ino}"
    for line in _LOCKS.read_text(encoding="ascii").splitlines():
        words = (
            line.split()
        )  # 1: FLOCK ADVISORY WRITE PID DEVICE:INODE 0 EOF; a waiting process: 1: ->
        if words[1] == "FLOCK" and words[5] == file and process_exists(pid := int(words[4])):
            return pid
    return None


def _device(descriptor: int) -> str:
    """Return the device of an open file as in the kernel's list of locks.

    stat reports another device on file systems with one per volume (btrfs).
    """
    info = Path(f"/proc/self/fdinfo/{descriptor}").read_text(encoding="ascii")
    mount = re.search(r"^mnt_id:\s*(\d+)$", info, re.MULTILINE)
    for line in _MOUNTS.read_bytes().splitlines():
        number, _, device, *_ = line.split()
        if mount is not None and number.decode() == mount[1]:
            major, minor = map(int, device.split(b":"))
            return f"{major:02x}:{minor:02x}"
    return ""


def process_exists(pid: int) -> bool:
    """Return True if the process exists, of any user."""
    if pid <= 0:  # a process of another pid namespace
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:  # it exists and belongs to another user
        return True
    except (OSError, OverflowError):
        return False
    return True
