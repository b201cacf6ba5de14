"""Reading a ring that a stranger writes, in shared memory, while it is being written.

The ring is read by ``pread`` and never mapped: whatever its owner does to it, a read is a read,
and a page that is not there is zeros. A record is believed if it bears the number that is
expected in its place *and* two reads in a row agree on all of its bytes; so a record half
written, or overwritten meanwhile, is never taken for one.
"""

from __future__ import annotations

import fcntl
import os
import stat

from wattspan.sdk.ring import ENDED, READ_FORMAT, RECORD_SIZE, STARTED
from wattspan.spans.values import SpanEnd, SpanStart

MAX_RING_RECORDS = 1 << 16
"""The most records a ring may hold: what reading it may cost is ours to bound."""

_FIRST, _CHUNK = 16, 512  # records a read: to see whether there are any, and then
_NUMBER = RECORD_SIZE - 8  # where the number stands in a record
_MAX_SKIP = 1 << 40  # no process writes as many records between two looks at its ring
_NO_PARENT = bytes(8)

RingRecord = SpanStart | SpanEnd


class RingError(ValueError):
    """What was handed over is no ring, or what stands in it is no feed."""


class RingReader:
    """The agent's end of one ring; owns the descriptor once it is made."""

    def __init__(self, descriptor: int, count: int) -> None:
        """A sealed memfd of ``count`` records.

        RingError if it is anything else; then the descriptor stays the caller's.
        """
        if not 1 <= count <= MAX_RING_RECORDS:
            raise RingError(f"a ring of {count} records")
        try:
            about = os.fstat(descriptor)
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError as error:
            raise RingError(f"no memfd: {error}") from None
        if not stat.S_ISREG(about.st_mode) or about.st_size < count * RECORD_SIZE:
            raise RingError(f"{about.st_size} bytes are no ring of {count} records")
        if not seals & fcntl.F_SEAL_SHRINK:
            raise RingError("not sealed against shrinking")
        self._descriptor = descriptor
        self._count = count
        self._next = 1
        self._hole = 0

    def close(self) -> None:
        os.close(self._descriptor)

    def drain(
        self, most: int = MAX_RING_RECORDS, *, last: bool = False
    ) -> tuple[list[RingRecord], int]:
        """The records not read yet, about ``most`` of them, and how many were lost.

        A number that was taken and not written yet is waited for once, until the next time; or
        not at all if this is the ``last``.
        """
        records: list[RingRecord] = []
        lost, size = 0, _FIRST
        # As often as it takes to go round, and a bit; a writer faster than us is left for later.
        for _ in range(2 * self._count // _CHUNK + 16):
            begun = self._next
            lost += self._read(size, records)
            if self._next == begun:
                skipped = self._stuck(last=last)
                lost += skipped
                if not skipped:
                    break
            if len(records) >= most:
                break
            size = _CHUNK
        return records, lost

    def _read(self, size: int, records: list[RingRecord]) -> int:
        """Take what is there of the next ``size`` records; returns how many cannot be used."""
        once = self._bytes(size)
        if _number(once, 0) != self._next:
            return 0
        again = self._bytes(size)
        if once != again:
            once = once[: _common_prefix(once, again) * RECORD_SIZE]
        new, number, useless = tuple.__new__, self._next, 0
        for id_, parent, at, cpu, thread, kind, written in READ_FORMAT.iter_unpack(once):
            if written != number:
                break
            number += 1
            if kind == STARTED:
                known = b"" if parent == _NO_PARENT else parent
                records.append(new(SpanStart, (id_, known, at, thread, cpu)))
            elif kind == ENDED:
                records.append(new(SpanEnd, (id_, at, thread, cpu)))
            else:
                useless += 1
        self._next = number
        return useless

    def _stuck(self, *, last: bool) -> int:
        """The next record is not there: go on behind it if there is more; returns what is lost."""
        ahead = self._bytes(_FIRST)
        numbers = [_number(ahead, slot) for slot in range(len(ahead) // RECORD_SIZE)]
        if numbers[0] > self._next:
            return self._leap(numbers[0])
        written = (n for n, number in enumerate(numbers) if n and number == self._next + n)
        hole = next(written, 0)
        if hole and not last and self._hole != self._next:
            self._hole = self._next
            return 0
        self._next += hole
        return hole

    def _leap(self, number: int) -> int:
        """The writer has lapped us, and ``number`` stands in our place; returns what is lost."""
        if number - self._next > _MAX_SKIP or (number - self._next) % self._count:
            raise RingError(f"record {number} stands in the place of {self._next}")
        # The oldest there is will be overwritten next, so not quite the oldest.
        first = number - self._count + 1 + self._count // 8
        lost, self._next = first - self._next, first
        return lost

    def _bytes(self, size: int) -> bytes:
        """The next ``size`` slots, or as many as there are before the end of the ring."""
        slot = self._next % self._count
        wanted = min(size, self._count - slot) * RECORD_SIZE
        read = os.pread(self._descriptor, wanted, slot * RECORD_SIZE)
        if len(read) != wanted:
            raise RingError("the ring was cut off")
        return read


def _number(slots: bytes, slot: int) -> int:
    return int.from_bytes(slots[slot * RECORD_SIZE + _NUMBER : (slot + 1) * RECORD_SIZE])


def _common_prefix(once: bytes, again: bytes) -> int:
    """How many records are the same in both, from the first on."""
    least, most = 0, len(once) // RECORD_SIZE
    while least < most:
        middle = (least + most + 1) // 2
        if once[: middle * RECORD_SIZE] == again[: middle * RECORD_SIZE]:
            least = middle
        else:
            most = middle - 1
    return least
