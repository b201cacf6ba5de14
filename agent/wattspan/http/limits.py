"""What clients may take of the server, and what they have taken so far."""

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
    body: int = 16 * MIB  # one request's body, as it is sent
    bodies: int = 64 * MIB  # all bodies at a time, or two of the largest; half of them one owner's
    connections: int = 256
    rate: int = 500  # one peer's requests a second; RESERVE times as many at once
    receive: float = 60.0  # from the first byte of a request to its last
    idle: float = 75.0  # between two requests
    send: float = 30.0  # until the client has taken its answer
    linger: float = 5.0  # for a client that still sends to notice that it was refused
    hold: float = 1.0  # until a request beyond the rate is refused: a refusal is not free
    slow: float = SLOW_REQUEST / SECOND  # age of an incomplete request that makes way for anybody
    too_often: str = (
        "More than {rate} requests a second: send more in each, or have max_rate raised in [agent]."
    )


class LimitedConnection(Protocol):
    """A connection, as the room sees it."""

    @property
    def answering(self) -> bool: ...

    def close(self) -> None: ...


class FairLock:
    """A lock for which owners take turns. Used in the server's thread only."""

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
                turn.set_result(None)  # the lock stays held, for the next one
                return
        self._held = False


class ServerCapacity:
    """What one server's connections share. Used in the server's thread only."""

    def __init__(self, limits: ServerLimits, clock: Clock, uid_of: UidOf = unknown_uid) -> None:
        self.limits, self.clock, self._uid_of = limits, clock, uid_of
        self._crowd: ConnectionLimiter[LimitedConnection] = ConnectionLimiter(
            limits.connections, round(limits.slow * SECOND)
        )
        self._turned_away: set[LimitedConnection] = (
            set()
        )  # they have no place, and are being told so
        self._bytes = FairQuota(max(limits.bodies, 2 * limits.body))
        self._answering = FairQuota(limits.connections)
        self._waiting: FairQueue[tuple[Hashable, asyncio.Future[None]]] = FairQueue()
        self._scheduled = False
        self._pace = RateLimiter(limits.rate, limits.rate * BURST_SECONDS)

    @property
    def guests(self) -> frozenset[LimitedConnection]:
        return self._crowd.guests | self._turned_away

    def peer(self, transport: Any) -> Peer:
        """The peer of a connection that was accepted just now."""
        return transport_peer(transport, self.clock.monotonic(), self._uid_of)

    def enter(
        self, guest: LimitedConnection, peer: Hashable, refused: CountRejection = ignore_rejection
    ) -> bool:
        """Whether ``guest`` may stay; if the server is full, another connection makes way.

        ``refused`` counts a connection that makes way, and a guest that may not stay.
        """
        now = self.clock.monotonic()
        leaving = self._crowd.makes_way(peer, now)
        if leaving is not None:
            refused(RejectionReason.CROWDED)
            leaving.close()
        if self._crowd.enter(guest, peer, now):
            return True
        refused(RejectionReason.CROWDED)
        self._turned_away.add(guest)
        return False

    @property
    def overrun(self) -> bool:
        """Whether there are so many that they cannot even be told so."""
        return len(self._turned_away) > self.limits.connections

    def leave(self, guest: LimitedConnection) -> None:
        self._crowd.leave(guest)
        self._turned_away.discard(guest)

    def rest(self, guest: LimitedConnection) -> None:
        """``guest`` may be sent away when others need its place."""
        self._turn(guest, ConnectionState.RESTING)

    def wake(self, guest: LimitedConnection) -> bool:
        """``guest`` has something to do; whether it rested until now."""
        return self._turn(guest, ConnectionState.WAITED_FOR) is ConnectionState.RESTING

    def answer(self, guest: LimitedConnection) -> None:
        """``guest`` is answered, and makes way for nobody."""
        self._turn(guest, ConnectionState.BUSY)

    def _turn(self, guest: LimitedConnection, state: ConnectionState) -> ConnectionState | None:
        return self._crowd.turn(guest, state, self.clock.monotonic())

    def hears(self, peer: Hashable) -> bool:
        """Whether one more request of ``peer`` is taken now."""
        return self._pace.admits(peer, self.clock.monotonic())

    @property
    def too_often(self) -> str:
        """The response to a request beyond the rate."""
        return self.limits.too_often.format(rate=self.limits.rate)

    def take(self, size: int, peer: Hashable) -> bool:
        """True if there is room for ``size`` more bytes of bodies; if so they are taken."""
        return self._bytes.take(peer, size)

    def give_back(self, size: int, peer: Hashable) -> None:
        self._bytes.give_back(peer, size)

    @asynccontextmanager
    async def turn(self, owner: Hashable) -> AsyncIterator[None]:
        """Wait until a request of ``owner`` is answered next, and answer it in the block.

        The loop begins to answer one request at a time, and owners take turns: the many requests
        of one owner do not delay the single one of another.
        """
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.put(owner, (owner, turn))
        self._schedule()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._answering.give_back(owner)
                self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._scheduled = False
        while (waiting := self._waiting.pop(self._answering.take)) is not None:
            owner, turn = waiting
            if turn.cancelled():
                self._answering.give_back(owner)
            else:
                turn.set_result(None)
                self._schedule()
                return
