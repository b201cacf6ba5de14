"""Limits of a server, and the capacity that its connections share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from wattspan.http.connection_limiter import (
    SLOW_REQUEST,
    ConnectionLimiter,
    ConnectionState,
    CountRejection,
    FairQueue,
    FairQuota,
    RejectionReason,
    UidOf,
    ignore_rejection,
    unknown_uid,
)
from wattspan.http.messages import Peer
from wattspan.http.rate_limiter import BURST_SECONDS, RateLimiter
from wattspan.http.sockets import transport_peer
from wattspan.model import SECOND
from wattspan.ports import Clock

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Sizes in bytes, times in seconds."""

    head: int = 16 * 1024  # the request line and the headers
    body: int = 16 * MIB  # the body of one request, as transmitted
    bodies: int = (
        64 * MIB
    )  # all bodies at a time, at least two of the largest; an owner may use half
    connections: int = 256
    rate: int = 500  # requests a second of one owner; BURST_SECONDS times as many at once
    receive: float = 60.0  # from the first byte of a request to its last
    idle: float = 75.0  # between two requests
    send: float = 30.0  # transmission of a response
    linger: float = 5.0  # discarding of input after a rejection
    rejection_delay: float = 1.0  # of a request beyond the rate
    slow_request: float = SLOW_REQUEST / SECOND  # age at which any owner may evict a request
    rate_message: str = (
        "More than {rate} requests a second: send more in each, or have max_rate raised in [agent]."
    )


class LimitedConnection(Protocol):
    """A connection that is counted by ServerCapacity."""

    @property
    def answering(self) -> bool: ...

    def close(self) -> None: ...


class FairLock:
    """An asyncio lock for which owners take turns. Used in the server's thread only."""

    def __init__(self) -> None:
        self._held = False
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()

    @asynccontextmanager
    async def of(self, owner: Hashable) -> AsyncIterator[None]:
        """Hold the lock for ``owner`` in the block."""
        if self._held:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.put(owner, turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():
                    self._release()
                raise
        self._held = True
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        while (turn := self._waiting.pop()) is not None:
            if not turn.cancelled():
                turn.set_result(None)  # the lock passes to the next owner
                return
        self._held = False


class ServerCapacity:
    """The capacity that one server's connections share. Used in the server's thread only."""

    def __init__(self, limits: ServerLimits, clock: Clock, uid_of: UidOf = unknown_uid) -> None:
        self.limits, self.clock, self._uid_of = limits, clock, uid_of
        self._limiter: ConnectionLimiter[LimitedConnection] = ConnectionLimiter(
            limits.connections, round(limits.slow_request * SECOND)
        )
        self._rejected: set[LimitedConnection] = set()  # beyond the limit, being answered so
        self._bytes = FairQuota(max(limits.bodies, 2 * limits.body))
        self._answering = FairQuota(limits.connections)
        self._waiting: FairQueue[tuple[Hashable, asyncio.Future[None]]] = FairQueue()
        self._scheduled = False
        self._rate_limiter = RateLimiter(limits.rate, limits.rate * BURST_SECONDS)

    @property
    def connections(self) -> frozenset[LimitedConnection]:
        return self._limiter.connections | self._rejected

    def peer(self, transport: Any) -> Peer:
        """The peer of a connection that was accepted just now."""
        return transport_peer(transport, self.clock.monotonic(), self._uid_of)

    def add(
        self,
        connection: LimitedConnection,
        owner: Hashable,
        count: CountRejection = ignore_rejection,
    ) -> bool:
        """Add ``connection``, if need be in the place of another one; whether it is served.

        ``count`` counts the connection that is closed for it, or its own rejection.
        """
        now = self.clock.monotonic()
        leaving = self._limiter.eviction_candidate(owner, now)
        if leaving is not None:
            count(RejectionReason.CROWDED)
            leaving.close()
        if self._limiter.add(connection, owner, now):
            return True
        count(RejectionReason.CROWDED)
        self._rejected.add(connection)
        return False

    @property
    def overloaded(self) -> bool:
        """True if so many connections are rejected that the next ones get no response."""
        return len(self._rejected) > self.limits.connections

    def remove(self, connection: LimitedConnection) -> None:
        self._limiter.remove(connection)
        self._rejected.discard(connection)

    def set_idle(self, connection: LimitedConnection) -> None:
        """Mark ``connection`` as the first to be evicted."""
        self._set_state(connection, ConnectionState.IDLE)

    def set_waiting(self, connection: LimitedConnection) -> bool:
        """Mark ``connection`` as receiving or sending; whether it was idle before."""
        return self._set_state(connection, ConnectionState.WAITING) is ConnectionState.IDLE

    def set_busy(self, connection: LimitedConnection) -> None:
        """Mark ``connection`` as never to be evicted."""
        self._set_state(connection, ConnectionState.BUSY)

    def _set_state(
        self, connection: LimitedConnection, state: ConnectionState
    ) -> ConnectionState | None:
        return self._limiter.set_state(connection, state, self.clock.monotonic())

    def admits(self, owner: Hashable) -> bool:
        """True if the rate permits one more request of ``owner`` now."""
        return self._rate_limiter.admits(owner, self.clock.monotonic())

    @property
    def rate_message(self) -> str:
        """The response to a request beyond the rate."""
        return self.limits.rate_message.format(rate=self.limits.rate)

    def reserve(self, size: int, owner: Hashable) -> bool:
        """Reserve ``size`` bytes for bodies of ``owner``; whether there was room."""
        return self._bytes.acquire(owner, size)

    def release(self, size: int, owner: Hashable) -> None:
        self._bytes.release(owner, size)

    @asynccontextmanager
    async def turn(self, owner: Hashable) -> AsyncIterator[None]:
        """Wait for the turn of ``owner``; the block handles one of its requests.

        The loop starts one handler at a time, and owners take turns: many requests of one owner do
        not delay a single request of another.
        """
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.put(owner, (owner, turn))
        self._schedule()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._answering.release(owner)
                self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._scheduled = False
        while (waiting := self._waiting.pop(self._answering.acquire)) is not None:
            owner, turn = waiting
            if turn.cancelled():
                self._answering.release(owner)
            else:
                turn.set_result(None)
                self._schedule()
                return
