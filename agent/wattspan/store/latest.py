"""The newest books, kept where a killed agent cannot take them along.

The store is written every few seconds, figures are shown twice a second. An agent that is killed
between the two would go on from books older than what it had shown: its counters would fall,
which everybody who takes rates of them reads as a reset and a burst. So the books of every
snapshot are written here before anybody sees it: into the kernel's page cache, which outlives the
process; nothing is synchronised, so a host that loses its power may lose the last seconds.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from pathlib import Path

from wattspan.model import Opening
from wattspan.store.books import BooksError, from_json, to_json

_HEADER = 24  # sequence, length, checksum: eight bytes each


class Latest:
    """Two files written in turn, so that one is whole whenever the process may end."""

    def __init__(self, store: Path, log: Callable[[str], None] = lambda _: None) -> None:
        """Beside the database ``store``, whose lock the caller holds. OSError if that cannot be."""
        self._log = log
        self._paths = [store.with_suffix(f".latest-{n}") for n in (0, 1)]
        self._files: list[int] = []
        try:
            for path in self._paths:
                self._files.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
            found = [self._read(file) for file in self._files]
        except OSError:
            self.close()
            raise
        self._sequence = max(sequence for sequence, _ in found)
        self._found = max(found, key=lambda one: one[0])[1]
        self._failed = False

    def opening(self) -> Opening | None:
        """The newest books of the run before; None if there are none."""
        return self._found

    def write(self, opening: Opening) -> None:
        """Keep these books. What goes wrong is said once, and the next write tries again."""
        text = to_json(opening)
        sequence = self._sequence + 1
        numbers = (sequence, len(text), _checksum(sequence, text))
        header = b"".join(number.to_bytes(8, "little") for number in numbers)
        file = self._files[sequence % 2]
        try:
            written = os.pwrite(file, header + text, 0)
        except OSError as error:
            self._fail(error.strerror or str(error))
            return
        if written < _HEADER + len(text):
            self._fail("the disk is full")
            return
        self._sequence, self._failed = sequence, False

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop())

    def _read(self, file: int) -> tuple[int, Opening | None]:
        blob = os.pread(file, os.fstat(file).st_size, 0)
        sequence, length, checksum = (
            int.from_bytes(blob[at : at + 8], "little") for at in range(0, _HEADER, 8)
        )
        text = blob[_HEADER : _HEADER + length]
        if not text or len(text) < length or _checksum(sequence, text) != checksum:
            return 0, None
        try:
            return sequence, from_json(text)
        except BooksError:  # of another version of wattspan
            return 0, None

    def _fail(self, cause: str) -> None:
        if not self._failed:
            self._failed = True
            self._log(
                f"Cannot write {self._paths[0].parent}: {cause}."
                " Counters fall by what is measured meanwhile if this agent is killed."
            )


def _checksum(sequence: int, text: bytes) -> int:
    return zlib.crc32(text, zlib.crc32(sequence.to_bytes(8, "little")))


def furthest(one: Opening | None, other: Opening | None) -> Opening | None:
    """Of two books of one host, those that were kept longer: energies only ever rise."""
    found = [books for books in (one, other) if books is not None]
    return max(found, key=_total, default=None)


def _total(books: Opening) -> int:
    return sum(account.energy for account in books.accounts)
