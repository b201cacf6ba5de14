"""Fair sharing of connections, quotas and turns among owners, and counts of rejections.

An owner is a local user, or a host of the network: no owner can exclude the others.
"""

from __future__ import annotations

import ipaddress
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping
from enum import IntEnum, StrEnum
from typing import Any, Generic, NamedTuple, TypeVar

SLOW_REQUEST = 5 * 10**9
"""Age in nanoseconds at which an incomplete request may be dropped for any newcomer."""

T = TypeVar("T")
QuotaOwner = Hashable


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

    def __init__(self, most: int, slow: int = SLOW_REQUEST) -> None:
        self._most, self._slow = most, slow
        self._connections: dict[T, _TrackedConnection] = {}
        self._held: Counter[QuotaOwner] = Counter()

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
        own = self._held[owner]
        found = [
            ((-self._held[one.owner], one.state, one.since), guest)
            for guest, one in self._connections.items()
            if one.state is ConnectionState.IDLE
            or (
                one.state is ConnectionState.WAITING
                and (self._held[one.owner] > own + 1 or now - one.since > self._slow)
            )
        ]
        return min(found, key=lambda each: each[0])[1] if found else None

    def add(self, connection: T, owner: QuotaOwner, now: int) -> bool:
        """Add ``connection`` if there is room; whether there was."""
        if len(self._connections) >= self._most:
            return False
        self._connections[connection] = _TrackedConnection(owner, ConnectionState.WAITING, now)
        self._held[owner] += 1
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
        gone = self._connections.pop(connection, None)
        if gone is not None:
            self._held[gone.owner] -= 1
            if not self._held[gone.owner]:
                del self._held[gone.owner]


def network_peer(address: str) -> QuotaOwner:
    """The quota owner of an address: a host has a whole /64 of IPv6."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0].removeprefix("::ffff:"))
    except ValueError:
        return address
    if ip.is_loopback:
        return "loopback"
    return int(ip) >> 64 if ip.version == 6 else str(ip)


Endpoint = tuple[str, int]
"""Address and port of one end of a TCP connection."""

UidOf = Callable[[Endpoint, Endpoint], int | None]
"""Looks up the user who owns the socket at the first end of a TCP connection; None: unknown."""


def unknown_uid(_: Endpoint, __: Endpoint) -> None:
    """For a server without a look-up of TCP connections' owners."""


def endpoint(address: tuple[Any, ...]) -> Endpoint:
    """One end of a TCP connection; an IPv4-mapped IPv6 address becomes an IPv4 address."""
    return address[0].removeprefix("::ffff:"), address[1]


def local_user(remote: Endpoint, local: Endpoint, uid_of: UidOf) -> int | None:
    """The user who opened a TCP connection from this host; None for other hosts, or if unknown."""
    own = remote[0] == local[0] or network_peer(remote[0]) == "loopback"
    return uid_of(remote, local) if own else None


def connection_owner(remote: Endpoint, user: int | None) -> QuotaOwner:
    """The quota owner of a TCP connection: a local user, or else a network peer.

    Connections of unknown users over loopback have one owner together.
    """
    return network_peer(remote[0]) if user is None else ("uid", user)


class FairQuota:
    """Divides ``most`` places or bytes among owners. For one thread, or under a lock.

    An owner may hold as much as is left. So one owner gets half at most, a second one at least
    a quarter, and something is left for the next one as long as there are few.
    """

    def __init__(self, most: int) -> None:
        self._left = most
        self._held: Counter[QuotaOwner] = Counter()

    def acquire(self, owner: QuotaOwner, size: int = 1) -> bool:
        """Reserve ``size`` for ``owner`` if the quota permits; whether it does."""
        if self._held[owner] + size > self._left:
            return False
        self.force(owner, size)
        return True

    def force(self, owner: QuotaOwner, size: int = 1) -> None:
        """Reserve ``size`` for ``owner`` regardless of the quota."""
        self._held[owner] += size
        self._left -= size

    @property
    def idle(self) -> bool:
        """True if nothing is reserved."""
        return not self._held

    def release(self, owner: QuotaOwner, size: int = 1) -> None:
        self._held[owner] -= size
        self._left += size
        if not self._held[owner]:
            del self._held[owner]


class FairQueue(Generic[T]):
    """Queue in which owners take turns; the items of one owner stay in order."""

    def __init__(self) -> None:
        self._waiting: dict[QuotaOwner, deque[T]] = {}

    def put(self, owner: QuotaOwner, item: T) -> None:
        self._waiting.setdefault(owner, deque()).append(item)

    def pop(self, may: Callable[[QuotaOwner], bool] = lambda _: True) -> T | None:
        """The next item, of the permitted owner with the oldest last turn; None without one."""
        owner = next(filter(may, self._waiting), None)
        if owner is None:
            return None
        items = self._waiting.pop(owner)
        item = items.popleft()
        if items:
            self._waiting[owner] = items
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
