"""Parts: files that are being written, their repair after a crash, and their conversion to files.

Repair keeps complete rows and drops a torn one. A finished file appears under its name at once,
complete and synced.
"""

from __future__ import annotations

import csv
import gzip
import io
import os
import subprocess
from contextlib import suppress
from typing import NamedTuple

import msgspec

from wattspan.ports import WattspanError
from wattspan.util.child_process import module_command
from wattspan.util.tabular import NO_PYARROW, has_pyarrow
from wattspan_exporters.files.directory import ExportDirectory, FileName, lock_file, unused_name
from wattspan_exporters.files.rows import EncodedRows


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
    size, records, record, quotes, width = 0, 0, b"", 0, 0
    for line in part:
        record += line
        quotes += line.count(b'"')
        if quotes % 2 and len(record) < _MAX_ROW_BYTES:
            continue
        cells = _cell_count(record)
        if not cells or (width and cells != width):
            break
        width = cells
        size, records, record = size + len(record), records + 1, b""
    torn = record.count(b"\n") + (not record.endswith(b"\n")) if record else 0
    torn += sum(1 for _ in part)
    if records < 2:
        return CompleteRows(0, 0, torn if records else max(0, torn - 1))
    return CompleteRows(records - 1, size, torn)


def _cell_count(record: bytes) -> int:
    """The number of cells; 0 for an incomplete record."""
    if not record.endswith(b"\n") or b"\0" in record:
        return 0
    try:
        (cells,) = csv.reader([record.decode()], strict=True)
    except (ValueError, csv.Error):
        return 0
    return len(cells)


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
    command = module_command("wattspan_exporters.files.convert", str(draft))
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
