"""What waits for the collector: whole requests in order, within a bound, in memory or on disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from wattspan.forward.shallow import part

OVERHEAD = 256
"""Bytes that a waiting request takes beside its own, roughly."""

MEMORY = 64 << 20
"""What may wait in memory, whatever the bound, when the disk that it was set for is full."""


class Record(Protocol):
    """A request kept on disk."""

    @property
    def spans(self) -> int: ...

    @property
    def settled(self) -> int:
        """How many of its spans, the first ones, have been dealt with."""
        ...

    @property
    def size(self) -> int: ...

    def read(self) -> bytes | None:
        """The whole request; None if it can no longer be read."""
        ...

    def settle(self, spans: int) -> None:
        """Its first ``spans`` have been dealt with, and must not come back after a restart."""
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
    """One waiting request: its bytes, or where they are on disk. ``settled`` as of a Record."""

    spans: int
    size: int
    body: bytes | None = None
    record: Record | None = None
    settled: int = 0

    @property
    def left(self) -> int:
        """The spans that still wait."""
        return self.spans - self.settled

    def read(self, most: int | None = None) -> bytes | None:
        """The request with the spans that still wait, or the first ``most`` of them.

        None if it can no longer be read.
        """
        body = self.body if self.record is None else self.record.read()
        end = self.spans if most is None else min(self.spans, self.settled + most)
        if body is None or (self.settled, end) == (0, self.spans):
            return body
        return part(body, self.settled, end)

    def settle(self, spans: int) -> None:
        """So many more have been dealt with."""
        self.settled += spans
        if self.record is not None:
            self.record.settle(self.settled)


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
                parcel = Parcel(record.spans, record.size + OVERHEAD, record=record)
                parcel.settled = record.settled
                self._append(parcel)
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

    def settle_some(self, spans: int) -> bool:
        """So many spans of the first parcel have been dealt with; whether those were the last."""
        first = self._parcels[0]
        self._taken = 0
        if spans >= first.left:
            self._remove(0)
            return True
        first.settle(spans)
        self.spans -= spans
        return False

    def leave(self) -> int:
        """Empty it, at the end: the spans that were not on disk, and so are lost."""
        lost = 0
        for parcel in self._parcels:
            if parcel.record is None and not self._rescued(parcel):
                lost += parcel.left
        self._parcels.clear()
        self.size = self.spans = self._in_memory = self._taken = 0
        if self._keeper is not None:
            self._keeper.close()
        return lost

    # ------------------------------------------------------------------------------- details

    def _rescued(self, parcel: Parcel) -> bool:
        """Whether what the disk did not take at first could be kept at last."""
        body = parcel.read() if self._keeper is not None else None
        if self._keeper is None or body is None:
            return False
        return self._keeper.keep(body, parcel.left) is not None

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
                spans = parcel.left
                self._remove(position)
                self._dropped(spans)
                return True
        return False

    def _append(self, parcel: Parcel) -> None:
        self._parcels.append(parcel)
        self._count(parcel, 1)

    def _remove(self, position: int) -> None:
        parcel = self._parcels[position]
        del self._parcels[position]
        self._count(parcel, -1)
        parcel.settle(parcel.left)

    def _count(self, parcel: Parcel, sign: int) -> None:
        self.size += sign * parcel.size
        self.spans += sign * parcel.left
        if parcel.record is None:
            self._in_memory += sign * parcel.size
