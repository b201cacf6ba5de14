"""The queue of requests that wait for the collector: in order, bounded, in memory or on disk.

Owners share it: a full queue drops the oldest request of the user or host with most bytes. The disk
keeps no owners, so all requests of an earlier run have the share of one.

A thread of its own writes the spool, so no caller waits for a disk that may hang.
"""

from __future__ import annotations

import operator
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from wattspan.model import Failure
from wattspan.otlp.destination import SPANS
from wattspan.otlp.enrichment import slice_spans
from wattspan.otlp.spool import Spool, SpooledRequest
from wattspan.ports import Clock
from wattspan.storage.async_writer import (
    CLOSE_TIMEOUT_SECONDS,
    HANG_AFTER,
    AsyncWriter,
    hang_failure,
)

REQUEST_OVERHEAD = 512
"""Bytes that a waiting request takes in addition to its body, roughly."""

MAX_MEMORY = 64 << 20
"""Bytes that may wait in memory for a disk that is slow, full or hangs."""

SHUTDOWN_TIMEOUT = 5.0
"""Seconds for the last writes, and for syncing them, on a disk that responds."""


@dataclass(eq=False, slots=True)
class QueuedRequest:
    """A waiting request, with a body until it is on disk; its first ``settled`` spans are done."""

    spans: int
    size: int
    owner: Hashable = None
    body: bytes | None = None
    record: SpooledRequest | None = None
    settled: int = 0

    @property
    def left(self) -> int:
        """The spans that still wait."""
        return self.spans - self.settled

    def read(self, limit: int | None = None) -> bytes | None:
        """The request with the first ``limit`` of its waiting spans; None if it is unreadable."""
        body = self.body  # before ``record``: another thread sets the record, then drops the body
        if body is None and self.record is not None:
            body = self.record.read()
        end = self.spans if limit is None else min(self.spans, self.settled + limit)
        if body is None or (self.settled, end) == (0, self.spans):
            return body
        return slice_spans(body, self.settled, end)


class _OwnedRequests:
    """Requests by owner, the oldest first, and the sum of their bytes."""

    def __init__(self) -> None:
        self.size = 0
        self._of: dict[Hashable, OrderedDict[QueuedRequest, None]] = {}
        self._sizes: Counter[Hashable] = Counter()

    def add(self, request: QueuedRequest) -> None:
        self._of.setdefault(request.owner, OrderedDict())[request] = None
        self._sizes[request.owner] += request.size
        self.size += request.size

    def remove(self, request: QueuedRequest) -> None:
        """Idempotent."""
        own = self._of.get(request.owner)
        if own is not None and request in own:
            del own[request]
            self._sizes[request.owner] -= request.size
            self.size -= request.size
            if not own:
                del self._of[request.owner], self._sizes[request.owner]

    def surplus(
        self, room: int, owner: Hashable, size: int, kept: Collection[QueuedRequest]
    ) -> list[QueuedRequest] | None:
        """The requests to drop so that the rest and ``size`` bytes of ``owner`` fit into ``room``.

        Each is the oldest of the owner with most, and none is ``kept``. None if ``owner`` itself
        would have most without another one.
        """
        excess = self.size + size - room
        if excess <= 0:
            return []
        held = self._sizes + Counter({owner: size})
        left = {key: (one for one in own if one not in kept) for key, own in self._of.items()}
        dropped: list[QueuedRequest] = []
        while excess > 0:
            largest = max(held, key=held.__getitem__)
            request = next(left.get(largest, iter(())), None)
            if request is not None:
                dropped.append(request)
                held[largest] -= request.size
                excess -= request.size
            elif largest == owner:
                return None
            else:
                del held[largest]
        return dropped


class RequestQueue:
    """A bounded first-in, first-out queue; callers hold its lock.

    The first ``taken`` requests are being sent and stay. Where there is no room, the oldest of
    the others is dropped, of the owner with most bytes. The ``in_memory`` bytes are lost if the
    agent is killed.
    """

    def __init__(
        self,
        limit: int,
        disk: AsyncSpool | None = None,
        *,
        dropped: Callable[[int], None],
        memory: int = MAX_MEMORY,
    ) -> None:
        """``dropped`` gets the spans of every dropped request.

        With a disk, at most ``memory`` bytes wait in memory.
        """
        self._limit = limit
        self._memory = memory
        self._disk = disk
        self._dropped = dropped
        self._requests: OrderedDict[QueuedRequest, None] = OrderedDict()  # the oldest first
        self._taken: list[QueuedRequest] = []
        self._waiting, self._unstored = _OwnedRequests(), _OwnedRequests()
        self.spans = 0
        if disk is not None:
            for record in disk.restored():
                size = record.size + REQUEST_OVERHEAD
                self._append(
                    QueuedRequest(record.spans, size, record=record, settled=record.settled)
                )
            self._make_room(self._waiting, limit, None, 0)

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def size(self) -> int:
        return self._waiting.size

    @property
    def in_memory(self) -> int:
        return self._unstored.size

    def add(self, body: bytes, spans: int, owner: Hashable = None) -> bool:
        """Append a request; False if it is too large for the queue, or for the owner's share."""
        size = len(body) + REQUEST_OVERHEAD
        in_memory = max(self._memory, size)  # a single request may have any size
        if not self._make_room(self._waiting, self._limit, owner, size) or (
            self._disk is not None and not self._make_room(self._unstored, in_memory, owner, size)
        ):
            self._dropped(spans)
            return False
        request = QueuedRequest(spans, size, owner, body)
        self._append(request)
        if self._disk is not None:
            self._disk.keep(request, self._stored)
        return True

    def take(self, limit: int, max_bytes: int) -> list[QueuedRequest]:
        """The oldest requests: at most ``limit``, and after the first within ``max_bytes``."""
        chosen: list[QueuedRequest] = []
        size = 0
        for request in self._requests:
            size += request.size
            if len(chosen) == limit or (chosen and size > max_bytes):
                break
            chosen.append(request)
        self._taken = chosen
        return list(chosen)

    def put_back(self) -> None:
        """The taken requests wait again."""
        self._taken = []

    def settle(self) -> None:
        """The taken requests are done."""
        for request in self._taken:
            self._remove(request)
        self._taken = []

    def settle_some(self, spans: int) -> bool:
        """The next ``spans`` of the first request are done; True if they were the last."""
        first = next(iter(self._requests))
        self._taken = []
        if spans >= first.left:
            self._remove(first)
            return True
        first.settled += spans
        self.spans -= spans
        self._update_disk(first)
        return False

    def leave(self) -> list[QueuedRequest]:
        """Empty the queue at the end; returns the requests that are not on disk yet."""
        unstored = [request for request in self._requests if request.record is None]
        if self._disk is not None:
            for request in unstored:
                self._disk.keep(request, self._stored)
        self._requests.clear()
        self._waiting, self._taken, self.spans = _OwnedRequests(), [], 0
        return unstored

    # ------------------------------------------------------------------------------- details

    def _stored(self, request: QueuedRequest, record: SpooledRequest) -> None:
        request.record = record  # first: see QueuedRequest.read
        request.body = None
        self._unstored.remove(request)

    def _update_disk(self, request: QueuedRequest) -> None:
        """Have the disk know how much of a request is settled."""
        if self._disk is not None and request.record is not None:
            self._disk.keep(request, self._stored)
        elif self._disk is not None and not request.left:
            self._disk.spare(request)

    def _make_room(self, among: _OwnedRequests, room: int, owner: Hashable, size: int) -> bool:
        surplus = among.surplus(room, owner, size, self._taken)
        for request in surplus or ():
            spans = request.left
            self._remove(request)
            self._dropped(spans)
        return surplus is not None

    def _append(self, request: QueuedRequest) -> None:
        self._requests[request] = None
        self.spans += request.left
        self._waiting.add(request)
        if request.record is None:
            self._unstored.add(request)

    def _remove(self, request: QueuedRequest) -> None:
        del self._requests[request]
        self.spans -= request.left
        self._waiting.remove(request)
        self._unstored.remove(request)
        request.settled = request.spans
        self._update_disk(request)


class AsyncSpool:
    """Writes the newest state of each request to the spool, in a thread.

    No call waits but ``wait`` and ``close``. Callers hold the lock of the queue.
    """

    def __init__(
        self,
        spool: Spool,
        clock: Clock,
        lock: AbstractContextManager[object],
        log: Callable[[str], None],
    ) -> None:
        """``lock`` protects the requests."""
        self._spool = spool
        self._lock = lock
        self._log = log
        self._reported = False
        self._writer = AsyncWriter[Callable[[], None]](operator.call, clock, name="wattspan-spool")

    def restored(self) -> Iterable[SpooledRequest]:
        """The requests of an earlier run, oldest first. Called once, before anything else."""
        return self._spool.restored()

    def keep(
        self, request: QueuedRequest, on_stored: Callable[[QueuedRequest, SpooledRequest], None]
    ) -> None:
        """Write the state of a request at the time of the write: that it waits, and its rest.

        ``on_stored`` is called under the lock when a new request is on disk; never if the disk
        cannot store it.
        """
        self._writer.submit(partial(self._write, request, on_stored), request)

    def spare(self, request: QueuedRequest) -> None:
        """Nothing of the request waits: if it is not on disk, it need not be written."""
        self._writer.cancel(request)

    def wait(self, requests: Iterable[QueuedRequest]) -> None:
        """Wait shortly until the newest states of ``requests`` are on disk."""
        self._writer.wait(requests)

    @property
    def idle(self) -> bool:
        """True if every state is on disk, as far as the disk can store it."""
        return self._writer.idle

    @property
    def failure(self) -> Failure | None:
        """The failure of a disk that does not respond."""
        if self._writer.overdue() < HANG_AFTER:
            return None
        return hang_failure(
            SPANS.name,
            f"waiting spans to {self._spool.folder}",
            "They wait in memory, and do not outlive a restart, until it does.",
        )

    def report(self) -> None:
        """Log that the disk does not respond, and that it responds again."""
        failure = self.failure
        if (failure is not None) != self._reported:
            self._reported = failure is not None
            recovered = f"The disk of {self._spool.folder} responds again."
            self._log(str(failure) if failure is not None else recovered)

    def close(self) -> None:
        """Write and sync the waiting states, if the disk responds in time."""
        self._writer.submit(self._spool.close)
        if not self._writer.close(
            SHUTDOWN_TIMEOUT if self.failure is None else CLOSE_TIMEOUT_SECONDS
        ):
            self._log(
                f"The disk of {self._spool.folder} does not respond and is abandoned: spans "
                "sent at the end may be sent again."
            )

    def ended(self, lost: int) -> None:
        """Log the spans that could not be stored at the end."""
        if lost:
            self._log(
                f"{lost} spans still waited at the end, could not be written to "
                f"{self._spool.folder}, and are dropped."
            )

    def _write(
        self, request: QueuedRequest, on_stored: Callable[[QueuedRequest, SpooledRequest], None]
    ) -> None:
        with self._lock:
            body, record, settled = request.body, request.record, request.settled
        if record is None:
            if body is None or settled == request.spans:
                return
            record = self._spool.keep(body, request.spans, settled)
            if record is None:
                return
            with self._lock:
                on_stored(request, record)
                settled = request.settled  # may have changed during the write
        if record.settled != settled:
            record.settle(settled)
