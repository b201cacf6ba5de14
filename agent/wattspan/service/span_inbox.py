"""The inbox of the joiner: export requests whose spans are not joined yet, in bounded memory."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from wattspan.inference.requests import InferenceRequest
from wattspan.ingest.export_request import ExportRequest
from wattspan.ingest.request_limits import ReceiverBusyError
from wattspan.model import Consumer
from wattspan.sharing.fair_pool import share_path
from wattspan.sharing.pools import PoolName, Pools
from wattspan.spans.values import SpanEnergy

if TYPE_CHECKING:
    from wattspan.ingest.identity_verification import IdentityResolver, SpanIdentity

BYTES_PER_SPAN = 700
"""Measured memory of a waiting span, without its part of the request."""


@dataclass(slots=True)
class PendingRequest:
    """A request with spans that are not joined yet.

    ``identities`` are those of its parts, ``left`` is the number of spans without a result.
    ``requests`` are those to language models, with their positions and processes.
    """

    request: ExportRequest
    cost: int
    identities: tuple[SpanIdentity, ...]
    energies: list[SpanEnergy | None]
    left: int
    requests: list[tuple[int, Consumer, InferenceRequest]] = field(default_factory=list)


class SpanInbox:
    """Accepts requests from receivers until ``release``, as far as there is room. Thread-safe.

    ``room`` is in bytes; the quota is by user, so that no user can take all of it.
    """

    def __init__(self, resolver: IdentityResolver, room: int, pools: Pools | None = None) -> None:
        self._resolver = resolver
        self._quota = (pools or Pools()).make(PoolName.SPAN_BUFFER, room)
        self._lock = threading.Lock()
        self._received: deque[PendingRequest] = deque()
        self._refused: Counter[str] = Counter()
        self._deferred = 0

    def __bool__(self) -> bool:
        """True if `take` would return requests."""
        return bool(self._received)

    def accept(self, request: ExportRequest) -> None:
        """Add a request; ReceiverBusyError while too many wait."""
        cost = request.size + BYTES_PER_SPAN * request.count
        with self._lock:
            if self._quota.idle:  # then a request of any size is accepted
                self._quota.force(share_path(request.peer.quota_owner), cost)
            elif not self._quota.acquire(share_path(request.peer.quota_owner), cost):
                self._deferred += request.count
                raise ReceiverBusyError
        try:
            # At once, because the sender still runs while it waits for the response.
            identities = tuple(self._resolver.resolve(request.peer, p.claim) for p in request.parts)
        except BaseException:
            with self._lock:
                self._quota.release(share_path(request.peer.quota_owner), cost)
            raise
        energies: list[SpanEnergy | None] = [None] * (request.count + len(request.skipped))
        with self._lock:
            self._received.append(
                PendingRequest(request, cost, identities, energies, request.count)
            )

    def refuse(self, reason: str, spans: int) -> None:
        """Count spans that are not accepted."""
        with self._lock:
            self._refused[reason] += spans

    def take(self) -> list[PendingRequest]:
        """The requests since the last call, in order."""
        with self._lock:
            taken = list(self._received)
            self._received.clear()
        return taken

    def release(self, done: Iterable[PendingRequest]) -> None:
        """Free the room of requests."""
        with self._lock:
            for pending in done:
                self._quota.release(share_path(pending.request.peer.quota_owner), pending.cost)

    @property
    def scarce(self) -> bool:
        """True if there is little room left."""
        return self._quota.scarce

    def refused(self) -> dict[str, int]:
        """The refused spans by reason."""
        with self._lock:
            return dict(self._refused)

    @property
    def deferred(self) -> int:
        """The spans whose senders were asked to retry."""
        return self._deferred
