"""The spool: waiting requests on disk, in a folder of segments, so that a restart loses nothing.

A segment is a file of records, appended one after the other. A record is a header of 24 bytes and
a request. The header is six 32-bit numbers: a magic word, the length of the request, its number of
spans, its CRC-32, the CRC-32 of these four, and the number of settled spans, the only one that is
overwritten later. A truncated or half-written record fails a check and ends its segment.

A request is written when it begins to wait and marked when it was sent, by plain writes. These
survive the end of the agent, however it ends. They are synced (fsync) only when the agent stops: a
power failure may lose the writes of the last seconds, or restore requests that had been sent. A
failing disk is logged once, and requests wait in memory until it works again. One thread does all
this, because a hanging disk blocks its callers.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from wattspan.otlp.transport import describe_os_error
from wattspan.util.files import FileLock, LockHeldError

_MAGIC = 0x4E505357  # "WSPN"
_CHECKED = struct.Struct("<IIII")
_HEADER = struct.Struct("<IIIIII")
_SETTLED = struct.Struct("<I")


@dataclass(eq=False, slots=True)
class SpooledRequest:
    """A waiting record at ``offset`` of a segment; its first ``settled`` spans are done."""

    segment: SpoolSegment
    offset: int
    size: int
    spans: int
    checksum: int
    settled: int = 0

    def read(self) -> bytes | None:
        """The complete request; None if it is unreadable."""
        return self.segment.read(self.offset, self.size, self.checksum)

    def settle(self, spans: int) -> None:
        """Mark the first ``spans`` as done, so that they do not return after a restart."""
        self.settled = spans
        self.segment.settle(self.offset, spans, done=spans >= self.spans)


class SpoolSegment:
    """One file. ``emptied`` is called when its last record is done.

    For one thread; another one may read.
    """

    def __init__(self, path: Path, emptied: Callable[[SpoolSegment], None]) -> None:
        self.path = path
        self.end = 0
        self.waiting = 0
        self._descriptor = -1
        self._lock = threading.Lock()  # held while the descriptor must not change
        self._emptied = emptied

    def create(self) -> None:
        """Create the file, which must not exist; OSError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(self.path, flags, 0o600)

    @property
    def _file(self) -> int:
        """The descriptor. The file is opened on demand, because there may be many segments."""
        with self._lock:
            return self._opened()

    def _opened(self) -> int:
        if self._descriptor < 0:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        return self._descriptor

    def recover(self) -> tuple[list[SpooledRequest], int]:
        """The waiting records of an earlier run, oldest first, and the number of damaged bytes."""
        found: list[SpooledRequest] = []
        file = self._file
        length = os.fstat(file).st_size
        while len(header := os.pread(file, _HEADER.size, self.end)) == _HEADER.size:
            magic, size, spans, checksum, check, settled = _HEADER.unpack(header)
            begin = self.end + _HEADER.size
            valid = magic == _MAGIC and zlib.crc32(header[: _CHECKED.size]) == check
            if not valid or begin + size > length:
                break
            if settled < spans:
                found.append(SpooledRequest(self, self.end, size, spans, checksum, settled))
            self.end = begin + size
        self.waiting = len(found)
        return found, length - self.end

    def append(self, body: bytes, spans: int, settled: int = 0) -> SpooledRequest:
        """Append a record. On OSError the file is as before."""
        checksum = zlib.crc32(body)
        checked = _CHECKED.pack(_MAGIC, len(body), spans, checksum)
        header = _HEADER.pack(_MAGIC, len(body), spans, checksum, zlib.crc32(checked), settled)
        offset = self.end
        try:
            self._write(offset, header + body)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, offset)
            raise
        self.end = offset + len(header) + len(body)
        self.waiting += 1
        return SpooledRequest(self, offset, len(body), spans, checksum, settled)

    def _write(self, offset: int, content: bytes) -> None:
        rest = memoryview(content)
        while rest:
            written = os.pwrite(self._file, rest, offset)
            rest, offset = rest[written:], offset + written

    def read(self, offset: int, size: int, checksum: int) -> bytes | None:
        """The request of a record; None if it is not the one that was written."""
        try:
            with self._lock:  # a hanging write does not hold it: waiting requests can be sent
                body = os.pread(self._opened(), size, offset + _HEADER.size)
        except OSError:
            return None
        return body if len(body) == size and zlib.crc32(body) == checksum else None

    def settle(self, offset: int, spans: int, *, done: bool) -> None:
        with contextlib.suppress(OSError):  # then the spans return after a restart
            os.pwrite(self._file, _SETTLED.pack(spans), offset + _HEADER.size - _SETTLED.size)
        if done:
            self.waiting -= 1
            if not self.waiting:
                self._emptied(self)

    def reset(self) -> None:
        """Truncate the file once nothing in it waits.

        Bytes that are truncated before the kernel writes them never reach the disk.
        """
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, 0)
            self.end = 0

    def remove(self) -> None:
        self.close()
        with contextlib.suppress(OSError):
            self.path.unlink()

    def close(self, *, durably: bool = False) -> None:
        """Close the file until it is needed again."""
        if durably:
            with contextlib.suppress(OSError):
                os.fsync(self._file)
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor = -1


_SUFFIX = ".spans"
_SEGMENTS = 16
"""Segments of a full spool; the spool may exceed its limit on disk by one of them."""


class Spool:
    """Stores requests in ``folder``. Raises nothing; blocks as long as the disk does."""

    def __init__(self, folder: Path, limit: int, log: Callable[[str], None]) -> None:
        """``limit`` is the size of the queue, which determines the size of the segments."""
        self.folder = folder
        self._log = log
        self._segment_size = max(1, limit // _SEGMENTS)
        self._segments: list[SpoolSegment] = []
        self._writing: SpoolSegment | None = None
        self._next = 1
        self._failing = False
        self._lock = self._lock_folder()

    def _lock_folder(self) -> FileLock | None:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return FileLock(self.folder / "lock")
        except LockHeldError:
            cause, remedy = "another agent uses it", "Give each agent a state_dir of its own."
        except OSError as error:
            cause, remedy = describe_os_error(error), "Make it writable for the agent."
        self._log(
            f"Cannot keep waiting spans in {self.folder}: {cause}. They wait in memory, and do "
            f"not outlive a restart. {remedy}"
        )
        return None

    def restored(self) -> Iterable[SpooledRequest]:
        """The records of an earlier run, oldest first. Called once, before ``keep``."""
        if self._lock is None:
            return
        for path in self._earlier():
            try:
                segment = SpoolSegment(path, self._emptied)
                records, damaged = segment.recover()
            except OSError as error:
                self._log(f"Cannot read spans that waited in {path}: {describe_os_error(error)}.")
                continue
            segment.close()
            if damaged:
                self._log(f"The last {damaged} bytes of {path} are damaged; their spans are lost.")
            if records:
                self._segments.append(segment)
                yield from records
            else:
                segment.remove()

    def _earlier(self) -> list[Path]:
        try:
            named = {
                int(path.stem): path
                for path in self.folder.glob(f"*{_SUFFIX}")
                if path.stem.isascii() and path.stem.isdecimal()
            }
        except OSError:
            return []
        self._next = max(named, default=0) + 1
        return [named[number] for number in sorted(named)]

    def keep(self, body: bytes, spans: int, settled: int = 0) -> SpooledRequest | None:
        """Store a request, the first spans of which are settled; None if the disk fails."""
        if self._lock is None:
            return None
        try:
            record = self._current_segment(len(body)).append(body, spans, settled)
        except OSError as error:
            if not self._failing:
                self._failing = True
                self._log(
                    f"Cannot write waiting spans to {self.folder}: {describe_os_error(error)}. "
                    "They wait in memory, and do not outlive a restart, until there is room "
                    "on that disk."
                )
            return None
        self._failing = False
        return record

    def _current_segment(self, size: int) -> SpoolSegment:
        """The segment for a request of ``size`` bytes; a full one is followed by another."""
        writing = self._writing
        if writing is None or (writing.end and writing.end + size > self._segment_size):
            writing = SpoolSegment(self.folder / f"{self._next:012}{_SUFFIX}", self._emptied)
            self._next += 1
            writing.create()
            if self._writing is not None:
                self._writing.close()
            self._segments.append(writing)
            self._writing = writing
        return writing

    def _emptied(self, segment: SpoolSegment) -> None:
        if segment is self._writing:
            segment.reset()
        else:
            self._segments.remove(segment)
            segment.remove()

    def close(self) -> None:
        """Sync the waiting records, and remove the segments without any."""
        self._writing = None
        for segment in list(self._segments):
            if segment.waiting:
                segment.close(durably=True)
            else:
                segment.remove()
        self._segments.clear()
        if self._lock is not None:
            self._lock.release()
        self._lock = None
