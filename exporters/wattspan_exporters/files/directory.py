"""The directory of the files, accessed without following links, and file names, sorted by time."""

from __future__ import annotations

import fcntl
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

PART_SUFFIX = ".part"
"""The suffix of a file that is being written or waits to be finished."""

SUFFIXES = ("jsonl", "csv", "jsonl.gz", "csv.gz", "parquet")


class FileName(NamedTuple):
    """``wattspan-20260131T080000.123456Z-node7.jsonl``: the time of the first row, and the host."""

    microseconds: int  # Unix time of the first row
    host: str
    suffix: str

    def __str__(self) -> str:
        seconds, fraction = divmod(self.microseconds, 10**6)
        begun = datetime.fromtimestamp(seconds, UTC)
        return f"wattspan-{begun:%Y%m%dT%H%M%S}.{fraction:06d}Z-{self.host}.{self.suffix}"

    @property
    def part(self) -> str:
        return f"{self}{PART_SUFFIX}"

    @property
    def draft(self) -> str:
        """The name of the file while it is made; an incomplete draft is removed."""
        return f".{self}.draft"

    @property
    def csv(self) -> bool:
        """True if the part is CSV; the parts of all other formats are JSON Lines."""
        return self.suffix.startswith("csv")

    def later(self) -> FileName:
        return self._replace(microseconds=self.microseconds + 1)


def host_component(host: str, *, emulated: bool) -> str:
    """A host name for file names, without characters special to shells and paths."""
    word = re.sub(r"[^A-Za-z0-9.-]+", "_", host).strip("._-")[:64] or "host"
    return f"emulated-{word}" if emulated and not word.startswith("emulated") else word


def parse_file_name(text: str, host: str) -> tuple[FileName, bool] | None:
    """The name, and whether it is a part's; None for other files."""
    suffixes = "|".join(map(re.escape, SUFFIXES))
    match = re.fullmatch(
        rf"wattspan-(\d{{8}}T\d{{6}})\.(\d{{6}})Z-{re.escape(host)}\.({suffixes})({PART_SUFFIX})?",
        text,
        re.ASCII,
    )
    if match is None:
        return None
    try:
        begun = datetime.strptime(f"{match[1]}+0000", "%Y%m%dT%H%M%S%z")
    except ValueError:
        return None
    name = FileName(int(begun.timestamp()) * 10**6 + int(match[2]), host, match[3])
    return name, match[4] is not None


FILE_MODE = 0o640
"""The mode of every file: command names are confidential."""

_CREATE_FLAGS = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class ExportFile(NamedTuple):
    """A file of this host in the directory."""

    name: FileName
    is_part: bool
    size: int

    @property
    def entry(self) -> str:
        return self.name.part if self.is_part else str(self.name)


class ExportDirectory:
    """An open directory. Every method may raise OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> ExportDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def moved(self) -> bool:
        """True if the directory at the path was replaced, removed or mounted over."""
        try:
            there = os.stat(self.path)  # noqa: PTH116 - compared with fstat
        except OSError:
            return True
        return not os.path.samestat(there, os.fstat(self._fd))

    def create(self, entry: str) -> int:
        """Create a file for reading and appending; FileExistsError, also for a link."""
        fd = os.open(entry, os.O_RDWR | os.O_APPEND | _CREATE_FLAGS, FILE_MODE, dir_fd=self._fd)
        os.fchmod(fd, FILE_MODE)  # whatever the umask is
        return fd

    def reopen(self, entry: str) -> int | None:
        """Open and lock a part to finish it; None if it is foreign or in use."""
        flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with suppress(FileNotFoundError):
            if not self._ours(entry):
                return None
            fd = os.open(entry, flags, dir_fd=self._fd)
            try:
                lock_file(fd)
            except OSError:
                os.close(fd)
                return None
            return fd
        return None

    def idle(self, part: ExportFile) -> bool:
        """True if no process writes or finishes the part."""
        fd = self.reopen(part.entry)
        if fd is not None:
            os.close(fd)
        return fd is not None

    def exists(self, entry: str) -> bool:
        try:
            os.stat(entry, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def remove(self, entry: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(entry, dir_fd=self._fd)

    def sync(self) -> None:
        os.fsync(self._fd)

    def files(self, host: str) -> list[ExportFile]:
        """The agent's files and parts of this host, the oldest first."""
        return sorted(self._files(host))

    def _files(self, host: str) -> Iterator[ExportFile]:
        for entry in os.listdir(self._fd):  # noqa: PTH208 - of a descriptor
            named = parse_file_name(entry, host)
            if named is not None and (status := self._ours(entry)) is not None:
                yield ExportFile(*named, status.st_size)

    def _ours(self, entry: str) -> os.stat_result | None:
        """The status of a regular file of this user without further links; None for others."""
        try:
            status = os.stat(entry, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return None
        ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        return status if ours and status.st_nlink == 1 else None

    @contextmanager
    def replacing(self, name: FileName) -> Iterator[int]:
        """A new file that gets its name once it is complete and synced, or is removed."""
        self.remove(name.draft)  # of an interrupted attempt
        fd = self.create(name.draft)
        try:
            yield fd
            os.fsync(fd)
            self.rename(name.draft, str(name))
        except BaseException:
            with suppress(OSError):
                self.remove(name.draft)
            raise
        finally:
            os.close(fd)
        self.sync()


def lock_file(fd: int) -> None:
    """Lock the file until it is closed; BlockingIOError if it is locked."""
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def unused_name(folder: ExportDirectory, name: FileName) -> FileName:
    """The first unused name from ``name`` on."""
    while folder.exists(str(name)) or folder.exists(name.part):
        name = name.later()
    return name
