"""Limits of a server, fair sharing of its capacity among owners, and counts of rejections.

An owner is a local user, or a host of the network: no owner can exclude the others.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Hashable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from wattspan.http.sockets import (
    Peer,
    QuotaOwner,
    UserPrincipals,
    transport_peer,
)
from wattspan.model import SECOND
from wattspan.ports import Clock, PeerPrincipals
from wattspan.sharing.fair_pool import FairPool, SharePath, share_path
from wattspan.sharing.pools import BURST_SECONDS, PoolName, Pools, RateLimiter

if TYPE_CHECKING:
    import asyncio

SLOW_REQUEST = 5 * SECOND
"""Age in nanoseconds at which an incomplete request may be dropped for any newcomer."""

T = TypeVar("T")


class ConnectionState(IntEnum):
    """State of a connection, in the order of eviction."""

    IDLE = 0  # between two requests
    WAITING = 1  # receiving a request, or writing a response
    BUSY = 2  # its request is being handled: it is never evicted


class _TrackedConnection(NamedTuple):
    owner: QuotaOwner
    state: ConnectionState
    since: int


class ConnectionLimiter(Generic[T]):
    """The connections of one server, at most ``most``. For one thread, or under a lock.

    A request that is incomplete for more than ``slow`` nanoseconds may be dropped for any owner.
    """

    def __init__(
        self, most: int, slow: int = SLOW_REQUEST, pool: FairPool[object] | None = None
    ) -> None:
        """``pool`` counts the connections, of any number at least ``most``."""
        self._most, self._slow = most, slow
        self._connections: dict[T, _TrackedConnection] = {}
        self._held: FairPool[object] = FairPool(most) if pool is None else pool

    def __len__(self) -> int:
        return len(self._connections)

    @property
    def connections(self) -> frozenset[T]:
        return frozenset(self._connections)

    def eviction_candidate(self, owner: QuotaOwner, now: int) -> T | None:
        """The connection to close before one more of ``owner`` is added; None if there is none.

        Connections of the owner with the most places come first; of these idle ones before waiting
        ones, and the longest in their state first. A waiting connection is closed only for an
        owner with fewer places, or if it is slow.
        """
        if len(self._connections) < self._most:
            return None
        path = share_path(owner)
        found = []
        for connection, one in self._connections.items():
            other = share_path(one.owner)
            if one.state is ConnectionState.IDLE or (
                one.state is ConnectionState.WAITING
                and (self._held.exceeds(other, path) or now - one.since > self._slow)
            ):
                most = tuple(-held for held in self._held.holdings(other))
                found.append(((most, one.state, one.since), connection))
        if not found:
            return None
        self._held.displaced += 1
        return min(found, key=lambda each: each[0])[1]

    def add(self, connection: T, owner: QuotaOwner, now: int) -> bool:
        """Add ``connection`` if there is room; returns False otherwise."""
        if len(self._connections) >= self._most:
            self._held.refused += 1
            return False
        self._connections[connection] = _TrackedConnection(owner, ConnectionState.WAITING, now)
        self._held.force(share_path(owner))
        return True

    def set_state(self, connection: T, state: ConnectionState, now: int) -> ConnectionState | None:
        """Set the state of ``connection``; the state before, None if it is unknown."""
        before = self._connections.get(connection)
        if before is None:
            return None
        if before.state is not state:
            self._connections[connection] = before._replace(state=state, since=now)
        return before.state

    def remove(self, connection: T) -> None:
        removed = self._connections.pop(connection, None)
        if removed is not None:
            self._held.release(share_path(removed.owner))


class FairQueue(Generic[T]):
    """Queue in which owners take turns, and the containers of an owner take its turns.

    The items of one container stay in order.
    """

    def __init__(self) -> None:
        self._waiting: dict[Hashable, dict[SharePath, deque[T]]] = {}

    def put(self, path: SharePath, item: T) -> None:
        self._waiting.setdefault(path[0], {}).setdefault(path, deque()).append(item)

    def pop(self, may: Callable[[SharePath], object] = lambda _: True) -> T | None:
        """The next item, of the permitted owner with the oldest last turn; None without one."""
        found = (next(filter(may, parts), None) for parts in self._waiting.values())
        path = next((one for one in found if one is not None), None)
        if path is None:
            return None
        parts = self._waiting.pop(path[0])
        items = parts.pop(path)
        item = items.popleft()
        if items:
            parts[path] = items
        if parts:
            self._waiting[path[0]] = parts
        return item


class RejectionReason(StrEnum):
    """Reason of a rejection: a label of a metric."""

    CROWDED = "crowded"  # too many connections, in total or of one owner
    MALFORMED = "malformed"  # invalid HTTP
    NAME = "name"  # a web page, or a name that is not this machine's
    RATE = "rate"  # the owner exceeds the rate of requests
    SLOW = "slow"  # the request was not received in time
    TLS = "tls"  # the handshake failed, or the certificate is not trusted
    TOKEN = "token"  # noqa: S105 - a reason, no password: no token, or a wrong one
    TOO_LARGE = "too_large"


CountRejection = Callable[[str], None]


class RejectionCounter:
    """Counts rejections by listener and reason. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()

    def counter(self, listener: str) -> CountRejection:
        """The function with which ``listener`` counts; its counts begin at zero."""
        with self._lock:
            for reason in RejectionReason:
                self._counts.setdefault((listener, reason.value), 0)

        def count(reason: str) -> None:
            with self._lock:
                self._counts[listener, str(reason)] += 1

        return count

    def counts(self) -> Mapping[tuple[str, str], int]:
        with self._lock:
            return dict(self._counts)


def ignore_rejection(_: str) -> None:
    """For a listener whose rejections are not counted."""


MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Sizes in bytes, times in seconds."""

    head: int = 16 * 1024  # the request line and the headers
    body: int = 16 * MIB  # the body of one request, as transmitted
    bodies: int = (
        64 * MIB
    )  # all bodies at a time, at least three of the largest: half for an owner, a third a container
    connections: int = 256
    rate: int = 500  # requests a second of one owner; BURST_SECONDS times as many at once
    receive: float = 60.0  # from the first byte of a request to its last
    idle: float = 75.0  # between two requests
    send: float = 30.0  # transmission of a response
    linger: float = 5.0  # discarding of input after a rejection
    rejection_delay: float = 1.0  # of a request beyond the rate
    slow_request: float = SLOW_REQUEST / SECOND  # age at which any owner may evict a request
    body_message: str = "A request has at most {body} bytes."
    rate_message: str = (
        "More than {rate} requests a second: send more in each, or have max_rate raised in [agent]."
    )


class LimitedConnection(Protocol):
    """A connection that is counted by ServerCapacity."""

    @property
    def answering(self) -> bool: ...

    def close(self) -> None: ...


class FairTurns:
    """Admits at most ``most`` tasks at a time; owners take turns. Used in the server's thread only.

    The loop starts one task at a time: many requests of one owner do not delay a single request
    of another.
    """

    def __init__(self, most: int) -> None:
        self._admitted: FairPool[object] = FairPool(most)
        self._waiting: FairQueue[tuple[SharePath, asyncio.Future[None]]] = FairQueue()
        self._scheduled = False

    @asynccontextmanager
    async def of(self, owner: QuotaOwner) -> AsyncIterator[None]:
        """Wait for the turn of ``owner``, which lasts for the block."""
        from asyncio import get_running_loop  # imports ssl, which few commands need

        turn: asyncio.Future[None] = get_running_loop().create_future()
        path = share_path(owner)
        self._waiting.put(path, (path, turn))
        self._schedule()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._admitted.release(path)
                self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            from asyncio import get_running_loop

            self._scheduled = True
            get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._scheduled = False
        while (waiting := self._waiting.pop(self._admitted.acquire)) is not None:
            path, turn = waiting
            if turn.cancelled():
                self._admitted.release(path)
            else:
                turn.set_result(None)
                self._schedule()
                return


class ServerCapacity:
    """The capacity that one server's connections share. Used in the server's thread only."""

    def __init__(
        self,
        limits: ServerLimits,
        clock: Clock,
        principals: PeerPrincipals | None = None,
        pools: Pools | None = None,
    ) -> None:
        pools = pools or Pools()
        self.limits, self.clock = limits, clock
        self._principals = principals or UserPrincipals()
        self._limiter: ConnectionLimiter[LimitedConnection] = ConnectionLimiter(
            limits.connections,
            round(limits.slow_request * SECOND),
            pools.make(PoolName.CONNECTIONS, limits.connections),
        )
        self._rejected: set[LimitedConnection] = set()  # beyond the limit, being answered so
        self._bytes = pools.make(PoolName.BODIES, max(limits.bodies, 3 * limits.body))
        self.turn = FairTurns(limits.connections).of  # for handlers of requests
        self._rate_limiter = RateLimiter(limits.rate, limits.rate * BURST_SECONDS)

    @property
    def connections(self) -> frozenset[LimitedConnection]:
        return self._limiter.connections | self._rejected

    def peer(self, transport: Any) -> Peer:
        """The peer of a connection that was accepted just now."""
        return transport_peer(transport, self.clock.monotonic(), self._principals)

    def add(
        self,
        connection: LimitedConnection,
        owner: QuotaOwner,
        count: CountRejection = ignore_rejection,
    ) -> bool:
        """Add ``connection``, if need be in the place of another one; False if it is not served.

        ``count`` counts the connection that is closed for it, or its own rejection.
        """
        now = self.clock.monotonic()
        evicted = self._limiter.eviction_candidate(owner, now)
        if evicted is not None:
            count(RejectionReason.CROWDED)
            evicted.close()
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

    def set_state(
        self, connection: LimitedConnection, state: ConnectionState
    ) -> ConnectionState | None:
        """Set the state of ``connection``; the state before, None if it is unknown."""
        return self._limiter.set_state(connection, state, self.clock.monotonic())

    def admits(self, owner: QuotaOwner) -> bool:
        """True if the rate permits one more request of ``owner`` now."""
        return self._rate_limiter.admits(share_path(owner)[0], self.clock.monotonic())

    @property
    def rate_message(self) -> str:
        """The response to a request beyond the rate."""
        return self.limits.rate_message.format(rate=self.limits.rate)

    def reserve(self, size: int, owner: QuotaOwner) -> bool:
        """Reserve ``size`` bytes for bodies of ``owner``; False if there is no room."""
        return bool(self._bytes.acquire(share_path(owner), size))

    def release(self, size: int, owner: QuotaOwner) -> None:
        self._bytes.release(share_path(owner), size)
