"""What waits for the collector: whole requests in order, within a bound, in memory or on disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

OVERHEAD = 256
"""Bytes that a waiting request takes beside its own, roughly."""

MEMORY = 64 << 20
"""What may wait in memory, whatever the bound, when the disk that it was set for is full."""


class Record(Protocol):
    """A request kept on disk."""

    @property
    def spans(self) -> int: ...

    @property
    def size(self) -> int: ...

    def read(self) -> bytes | None:
        """The request; None if it can no longer be read."""
        ...

    def done(self) -> None:
        """It has been sent, or dropped: it must not come back after a restart."""
        ...


class Keeper(Protocol):
    """A disk, as far as it can be relied on."""

    def restored(self) -> Iterable[Record]:
        """What an earlier run left, oldest first. Asked once."""
        ...

    def keep(self, body: bytes, spans: int) -> Record | None:
        """Keep a request; None if the disk cannot."""
        ...

    def close(self) -> None: ...


@dataclass(eq=False, slots=True)
class Parcel:
    """One waiting request: its bytes, or where they are on disk."""

    spans: int
    size: int
    body: bytes | None = None
    record: Record | None = None

    def read(self) -> bytes | None:
        return self.body if self.record is None else self.record.read()

    def done(self) -> None:
        if self.record is not None:
            self.record.done()
            self.record = None
        self.body = None


class Waiting:
    """A bounded first-in, first-out queue of parcels; not safe from several threads by itself.

    The first ``taken`` parcels are being sent and stay; when there is no room, the oldest of the
    others goes.
    """

    def __init__(
        self, limit: int, keeper: Keeper | None = None, *, dropped: Callable[[int], None]
    ) -> None:
        """``dropped`` is told the spans of every request for which there was no room."""
        self._limit = limit
        self._keeper = keeper
        self._dropped = dropped
        self._parcels: deque[Parcel] = deque()
        self._taken = 0
        self._in_memory = 0
        self.size = 0
        self.spans = 0
        if keeper is not None:
            for record in keeper.restored():
                self._append(Parcel(record.spans, record.size, record=record))
            self._make_room(0)

    def __len__(self) -> int:
        return len(self._parcels)

    def add(self, body: bytes, spans: int) -> bool:
        """Let a request wait; False if even an emptied queue has no room for it."""
        size = len(body) + OVERHEAD
        if not self._make_room(size):
            self._dropped(spans)
            return False
        record = self._keeper.keep(body, spans) if self._keeper is not None else None
        if record is not None:
            self._append(Parcel(spans, size, record=record))
            return True
        while self._keeper is not None and self._in_memory + size > min(self._limit, MEMORY):
            if not self._drop_oldest(in_memory=True):
                self._dropped(spans)
                return False
        self._append(Parcel(spans, size, body=body))
        return True

    def take(self, most: int, bytes_: int) -> list[Parcel]:
        """The oldest parcels, to be sent: ``most`` at most, and beyond the first within bytes."""
        chosen: list[Parcel] = []
        size = 0
        for parcel in self._parcels:
            size += parcel.size
            if len(chosen) == most or (chosen and size > bytes_):
                break
            chosen.append(parcel)
        self._taken = len(chosen)
        return chosen

    def put_back(self) -> None:
        """What was taken waits again."""
        self._taken = 0

    def settle(self) -> None:
        """What was taken has been dealt with."""
        for _ in range(self._taken):
            self._remove(0)
        self._taken = 0

    def replace(self, parts: Iterable[tuple[bytes, int]]) -> None:
        """In place of the one parcel that was taken, its parts wait, in memory."""
        self.settle()
        for body, spans in reversed(list(parts)):
            self._append(Parcel(spans, len(body) + OVERHEAD, body=body), first=True)

    def leave(self) -> int:
        """Empty it, at the end: the spans that were not on disk, and so are lost."""
        lost = 0
        for parcel in self._parcels:
            if parcel.record is None and not self._rescued(parcel):
                lost += parcel.spans
        self._parcels.clear()
        self.size = self.spans = self._in_memory = self._taken = 0
        if self._keeper is not None:
            self._keeper.close()
        return lost

    # ------------------------------------------------------------------------------- details

    def _rescued(self, parcel: Parcel) -> bool:
        """Whether a parcel that fell back to memory could be kept at last."""
        if self._keeper is None or parcel.body is None:
            return False
        return self._keeper.keep(parcel.body, parcel.spans) is not None

    def _make_room(self, size: int) -> bool:
        if size + sum(self._parcels[i].size for i in range(self._taken)) > self._limit:
            return False
        while self.size + size > self._limit:
            self._drop_oldest()
        return True

    def _drop_oldest(self, *, in_memory: bool = False) -> bool:
        for position in range(self._taken, len(self._parcels)):
            parcel = self._parcels[position]
            if not in_memory or parcel.record is None:
                self._remove(position)
                self._dropped(parcel.spans)
                return True
        return False

    def _append(self, parcel: Parcel, *, first: bool = False) -> None:
        if first:
            self._parcels.appendleft(parcel)
        else:
            self._parcels.append(parcel)
        self.size += parcel.size
        self.spans += parcel.spans
        if parcel.record is None:
            self._in_memory += parcel.size

    def _remove(self, position: int) -> None:
        parcel = self._parcels[position]
        del self._parcels[position]
        self.size -= parcel.size
        self.spans -= parcel.spans
        if parcel.record is None:
            self._in_memory -= parcel.size
        parcel.done()
