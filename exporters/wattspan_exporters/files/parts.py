"""Parts: files that are being written, their repair after a crash, and their conversion to files.

Repair keeps complete rows and drops a torn one. A finished file appears under its name at once,
complete and synced.
"""

from __future__ import annotations

import csv
import fcntl
import gzip
import io
import os
import re
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from wattspan.ports import WattspanError
from wattspan.util.process import module_command
from wattspan.util.text import NO_PYARROW, has_pyarrow
from wattspan_exporters.files.rows import OTHER_ATTRIBUTES, EncodedRows

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
        os.fchmod(fd, FILE_MODE)  # independent of the umask
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


class PartFile:
    """The part that is being written; the rows of a snapshot are appended in full or not at all."""

    def __init__(self, folder: ExportDirectory, name: FileName, header: bytes, begun: int) -> None:
        """Create the file; OSError. ``begun`` is monotonic."""
        self.folder = folder
        self.name, self.fd = _create(folder, name)
        self.begun = begun
        self.size = 0
        self.rows = 0
        self._header = header

    @property
    def lost(self) -> bool:
        """True if the file was removed."""
        return os.fstat(self.fd).st_nlink == 0

    def append(self, rows: EncodedRows) -> None:
        """Append ``rows``. On OSError the file is as before."""
        data = rows.data if self.size else self._header + rows.data
        if os.fstat(self.fd).st_size != self.size:  # the rest of a failed write
            os.ftruncate(self.fd, self.size)
        try:
            _write(self.fd, data)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self.fd, self.size)
            raise
        self.size += len(data)
        self.rows += rows.lines

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _create(folder: ExportDirectory, name: FileName) -> tuple[FileName, int]:
    """A new, locked part."""
    while True:
        name = unused_name(folder, name)
        try:
            fd = folder.create(name.part)
        except FileExistsError:  # another agent was faster
            continue
        try:
            lock_file(fd)
        except OSError:  # another agent checks it, or the file system has no locks
            os.close(fd)
            folder.remove(name.part)
            raise
        return name, fd


def _write(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


_MAX_ROW_BYTES = 64 * 1024
"""Bytes of a CSV record; every cell is bounded, so a longer record is invalid."""


class CompleteRows(NamedTuple):
    """The complete rows of a part, their size in bytes, and the torn rows after them."""

    rows: int
    size: int
    torn: int


def trim_part(name: FileName, fd: int) -> CompleteRows:
    """Truncate a part to its complete rows, a part without any to 0 bytes; OSError."""
    with os.fdopen(os.dup(fd), "rb") as part:
        part.seek(0)
        whole = (_csv if name.csv else _json_lines)(part)
    if whole.size != os.fstat(fd).st_size:
        os.ftruncate(fd, whole.size)
    return whole


def _json_lines(part: io.BufferedReader) -> CompleteRows:
    size = rows = 0
    for line in part:
        if not _is_object(line):
            return CompleteRows(rows, size, 1 + sum(1 for _ in part))
        size += len(line)
        rows += 1
    return CompleteRows(rows, size, 0)


def _is_object(line: bytes) -> bool:
    if not line.endswith(b"}\n"):
        return False
    try:
        msgspec.json.decode(line)
    except msgspec.DecodeError:
        return False
    return True


def _csv(part: io.BufferedReader) -> CompleteRows:
    """A record ends with the line that closes its quotes; the header is no row.

    Rows have as many cells as the header: older versions wrote fewer.
    """
    size, records, record, quotes = 0, 0, b"", 0
    header: list[str] = []
    for line in part:
        record += line
        quotes += line.count(b'"')
        if quotes % 2 and len(record) < _MAX_ROW_BYTES:
            continue
        cells = _cells(record)
        if not cells or (header and not _fits(header, cells)):
            break
        header = header or cells
        size, records, record = size + len(record), records + 1, b""
    torn = record.count(b"\n") + (not record.endswith(b"\n")) if record else 0
    torn += sum(1 for _ in part)
    if records < 2:
        return CompleteRows(0, 0, torn if records else max(0, torn - 1))
    return CompleteRows(records - 1, size, torn)


def _cells(record: bytes) -> list[str]:
    """The cells; empty for an incomplete record."""
    if not record.endswith(b"\n") or b"\0" in record:
        return []
    try:
        (cells,) = csv.reader([record.decode()], strict=True)
    except (ValueError, csv.Error):
        return []
    return cells


def _fits(header: list[str], cells: list[str]) -> bool:
    """True for a row of the file.

    A row that was torn inside the doubled quotes of its last cell has all cells if a line break
    follows, but its attributes are not a JSON object.
    """
    if len(cells) != len(header):
        return False
    attributes = header[-1] == OTHER_ATTRIBUTES and cells[-1]
    return not attributes or _is_object(f"{attributes}\n".encode())


_CHUNK_BYTES = 1 << 20
_GZIP_LEVEL = 6
_CONVERSION_TIMEOUT = 300.0
"""Seconds for a conversion to Parquet; a part of 64 MiB takes a few."""


class PartConversionError(WattspanError):
    """A part could not be converted; it is unchanged."""


def finish_part(folder: ExportDirectory, name: FileName, fd: int) -> bool:
    """Make the file of the part ``fd``; False for a part without rows, which is removed.

    On OSError or PartConversionError the part is unchanged.
    """
    if os.fstat(fd).st_size == 0:
        folder.remove(name.part)
        return False
    if name.suffix in ("jsonl", "csv"):
        os.fsync(fd)
        free = unused_name(folder, name) if folder.exists(str(name)) else name
        folder.rename(name.part, str(free))
    elif folder.exists(str(name)):  # finished, but interrupted before the part was removed
        folder.remove(name.part)
    else:
        with folder.replacing(name) as draft:
            if name.suffix == "parquet":
                _to_parquet(fd, draft)
            else:
                _to_gzip(fd, draft)
        folder.remove(name.part)
    folder.sync()
    return True


def _to_gzip(part: int, draft: int) -> None:
    os.lseek(part, 0, os.SEEK_SET)
    with (
        os.fdopen(os.dup(draft), "wb") as out,
        gzip.GzipFile("", "wb", _GZIP_LEVEL, out, mtime=0) as packed,
    ):
        while chunk := os.read(part, _CHUNK_BYTES):
            packed.write(chunk)


def _to_parquet(part: int, draft: int) -> None:
    """Convert in a child process, which frees the memory of pyarrow with its end.

    The child inherits the part with its lock, so no other agent finishes it meanwhile, even if
    this agent is killed.
    """
    if not has_pyarrow():
        raise PartConversionError(NO_PYARROW)
    os.lseek(part, 0, os.SEEK_SET)
    command = module_command("wattspan_exporters.files.rows", str(draft))
    try:
        done = subprocess.run(  # noqa: S603 - own interpreter and module
            command,
            stdin=part,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(draft,),
            timeout=_CONVERSION_TIMEOUT,
            check=False,
            start_new_session=True,
            cwd="/",
        )
    except subprocess.TimeoutExpired:
        raise PartConversionError(
            f"The conversion to Parquet took over {_CONVERSION_TIMEOUT:g} s."
        ) from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        with suppress(OSError):
            os.ftruncate(draft, 0)
        why = lines[-1][:300] if lines else f"exit status {done.returncode}"
        raise PartConversionError(f"The conversion to Parquet failed: {why}.")
