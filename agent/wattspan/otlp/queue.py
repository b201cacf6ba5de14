"""What waits for the collector: whole requests in order, within a bound, in memory or on disk.

The thread that writes the spool: nobody else waits for its disk, which may not answer.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from wattspan.model import Failure
from wattspan.otlp.destination import SPANS
from wattspan.otlp.messages import slice_spans
from wattspan.otlp.spool import Spool
from wattspan.ports import Clock
from wattspan.storage.async_writer import (
    CLOSE_TIMEOUT_SECONDS,
    HANG_AFTER,
    AsyncWriter,
    hang_failure,
)

REQUEST_OVERHEAD = 256
"""Bytes that a waiting request takes beside its own, roughly."""

MAX_MEMORY = 64 << 20
"""What may wait in memory, whatever the bound, for a disk that is slow, full or does not answer."""


class StoredRequest(Protocol):
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


class SpoolPort(Protocol):
    """A disk, as far as it can be relied on. It keeps nobody waiting: what is asked is done later.

    Who asks holds the lock under which a parcel changes.
    """

    def restored(self) -> Iterable[StoredRequest]:
        """What an earlier run left, oldest first. Asked once, before anything else."""
        ...

    def keep(
        self, parcel: QueuedRequest, kept: Callable[[QueuedRequest, StoredRequest], None]
    ) -> None:
        """Have the disk tell of a parcel what is so then: that it waits, or how much of it does.

        ``kept`` is told, under the lock, where one is that the disk did not have yet; never if the
        disk cannot take it.
        """
        ...

    def spare(self, parcel: QueuedRequest) -> None:
        """Nothing of it waits any more: if it is not on disk, it need not be written."""
        ...


@dataclass(eq=False, slots=True)
class QueuedRequest:
    """One waiting request: its bytes, until it is on disk. ``settled`` as of a Record."""

    spans: int
    size: int
    body: bytes | None = None
    record: StoredRequest | None = None
    settled: int = 0

    @property
    def left(self) -> int:
        """The spans that still wait."""
        return self.spans - self.settled

    def read(self, most: int | None = None) -> bytes | None:
        """The request with the spans that still wait, or the first ``most`` of them.

        None if it can no longer be read.
        """
        body = self.body  # before ``record``: another thread has it kept, and then leaves the body
        if body is None and self.record is not None:
            body = self.record.read()
        end = self.spans if most is None else min(self.spans, self.settled + most)
        if body is None or (self.settled, end) == (0, self.spans):
            return body
        return slice_spans(body, self.settled, end)

    def settle(self, spans: int) -> None:
        """So many more have been dealt with."""
        self.settled += spans


class RequestQueue:
    """A bounded first-in, first-out queue of parcels; not safe from several threads by itself.

    The first ``taken`` parcels are being sent and stay; when there is no room, the oldest of the
    others goes. What is ``in_memory``, in bytes, is lost if the agent is killed.
    """

    def __init__(
        self,
        limit: int,
        disk: SpoolPort | None = None,
        *,
        dropped: Callable[[int], None],
        memory: int = MAX_MEMORY,
    ) -> None:
        """``dropped`` is told the spans of every request for which there was no room.

        With a disk, ``memory`` bytes wait in memory at most.
        """
        self._limit = limit
        self._memory = memory
        self._disk = disk
        self._dropped = dropped
        self._parcels: deque[QueuedRequest] = deque()
        self._taken = 0
        self.in_memory = 0
        self.size = 0
        self.spans = 0
        if disk is not None:
            for record in disk.restored():
                parcel = QueuedRequest(record.spans, record.size + REQUEST_OVERHEAD, record=record)
                parcel.settled = record.settled
                self._append(parcel)
            self._make_room(0)

    def __len__(self) -> int:
        return len(self._parcels)

    def add(self, body: bytes, spans: int) -> bool:
        """Let a request wait; False if even an emptied queue has no room for it."""
        size = len(body) + REQUEST_OVERHEAD
        if not self._make_room(size):
            self._dropped(spans)
            return False
        if self._disk is not None and not self._make_room_in_memory(size):
            self._dropped(spans)
            return False
        parcel = QueuedRequest(spans, size, body=body)
        self._append(parcel)
        if self._disk is not None:
            self._disk.keep(parcel, self._kept)
        return True

    def take(self, most: int, bytes_: int) -> list[QueuedRequest]:
        """The oldest parcels, to be sent: ``most`` at most, and beyond the first within bytes."""
        chosen: list[QueuedRequest] = []
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
        self._tell(first)
        return False

    def leave(self) -> list[QueuedRequest]:
        """Empty it, at the end. Those that are not on disk, which it is asked for once more."""
        unkept = [parcel for parcel in self._parcels if parcel.record is None]
        if self._disk is not None:
            for parcel in unkept:
                self._disk.keep(parcel, self._kept)
        self._parcels.clear()
        self.size = self.spans = self._taken = 0
        return unkept

    # ------------------------------------------------------------------------------- details

    def _kept(self, parcel: QueuedRequest, record: StoredRequest) -> None:
        """It is on disk, though some of it, or all, may have been dealt with meanwhile."""
        parcel.record = record  # first: see Parcel.read
        parcel.body = None
        if parcel.left:
            self.in_memory -= parcel.size

    def _tell(self, parcel: QueuedRequest) -> None:
        """Have the disk know how much of a parcel is settled."""
        if self._disk is not None and parcel.record is not None:
            self._disk.keep(parcel, self._kept)
        elif self._disk is not None and not parcel.left:
            self._disk.spare(parcel)

    def _make_room_in_memory(self, size: int) -> bool:
        """For one that the disk has not taken yet. One by itself may be as large as it is."""
        while self.in_memory and self.in_memory + size > self._memory:
            if not self._drop_oldest(in_memory=True):
                return False
        return True

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

    def _append(self, parcel: QueuedRequest) -> None:
        self._parcels.append(parcel)
        self._count(parcel, 1)

    def _remove(self, position: int) -> None:
        parcel = self._parcels[position]
        del self._parcels[position]
        self._count(parcel, -1)
        parcel.settle(parcel.left)
        self._tell(parcel)

    def _count(self, parcel: QueuedRequest, sign: int) -> None:
        self.size += sign * parcel.size
        self.spans += sign * parcel.left
        if parcel.record is None:
            self.in_memory += sign * parcel.size


SHUTDOWN_TIMEOUT = 5.0
"""Seconds for what is still to be written at the end, by a disk that does answer, and durably."""


class AsyncSpool:
    """A disk as ``waiting`` wants it: it tells what became of the newest state of each parcel."""

    def __init__(
        self,
        spool: Spool,
        clock: Clock,
        lock: AbstractContextManager[object],
        log: Callable[[str], None],
    ) -> None:
        """``lock`` is that under which parcels change."""
        self._spool = spool
        self._lock = lock
        self._log = log
        self._said = False
        self._keeper = AsyncWriter[Callable[[], None]](operator.call, clock, name="wattspan-spool")

    def restored(self) -> Iterable[StoredRequest]:
        return self._spool.restored()

    def keep(
        self, parcel: QueuedRequest, kept: Callable[[QueuedRequest, StoredRequest], None]
    ) -> None:
        self._keeper.hand_over(partial(self._write, parcel, kept), parcel)

    def spare(self, parcel: QueuedRequest) -> None:
        self._keeper.take_back(parcel)

    def wait(self, parcels: Iterable[QueuedRequest]) -> None:
        """Until the disk knows of these what was told of them, but a moment at most."""
        self._keeper.wait(parcels)

    @property
    def idle(self) -> bool:
        """Whether the disk knows of all that was told of parcels, as far as it can."""
        return self._keeper.idle

    @property
    def failure(self) -> Failure | None:
        """What there is to tell of a disk that does not answer."""
        if self._keeper.overdue() < HANG_AFTER:
            return None
        return hang_failure(
            SPANS.name,
            f"waiting spans to {self._spool.folder}",
            "They wait in memory, and do not outlive a restart, until it does.",
        )

    def look(self) -> None:
        """Log when the disk no longer answers, and when it does again."""
        failure = self.failure
        if (failure is not None) != self._said:
            self._said = failure is not None
            answers = f"The disk of {self._spool.folder} answers again."
            self._log(str(failure) if failure is not None else answers)

    def close(self) -> None:
        """Write what is still to be written, and force it to the disk, if that answers in time."""
        self._keeper.hand_over(self._spool.close)
        if not self._keeper.close(
            SHUTDOWN_TIMEOUT if self.failure is None else CLOSE_TIMEOUT_SECONDS
        ):
            self._log(
                f"The disk of {self._spool.folder} does not answer and is left behind: what was "
                "sent in the end may be sent again."
            )

    def ended(self, lost: int) -> None:
        """So many spans are not on disk after all."""
        if lost:
            self._log(
                f"{lost} spans still waited at the end, could not be written to "
                f"{self._spool.folder}, and are dropped."
            )

    def _write(
        self, parcel: QueuedRequest, kept: Callable[[QueuedRequest, StoredRequest], None]
    ) -> None:
        with self._lock:
            body, record, settled = parcel.body, parcel.record, parcel.settled
        if record is None:
            if body is None or settled == parcel.spans:
                return
            record = self._spool.keep(body, parcel.spans, settled)
            if record is None:
                return
            with self._lock:
                kept(parcel, record)
                settled = parcel.settled  # which may have gone on since it was begun to be written
        if record.settled != settled:
            record.settle(settled)
