"""How connections, places and turns are shared among owners: none keeps the others out.

How many were turned away, by listener and reason: how an attack shows.
"""

from __future__ import annotations

import ipaddress
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping
from enum import IntEnum, StrEnum
from typing import Any, Generic, NamedTuple, TypeVar

SLOW_REQUEST = 5 * 10**9
"""Nanoseconds after which a request that is not whole yet may be broken off for others."""

T = TypeVar("T")
QuotaOwner = Hashable


class ConnectionState(IntEnum):
    """What a connection does; the first is the first to make way."""

    RESTING = 0  # between two requests
    WAITED_FOR = 1  # for the rest of a request, or to take an answer
    BUSY = 2  # its request is answered now: it never makes way


class _TrackedConnection(NamedTuple):
    peer: QuotaOwner
    state: ConnectionState
    since: int


class ConnectionLimiter(Generic[T]):
    """The connections of one server, at most ``most``. For one thread, or under a lock.

    A request on its way for more than ``slow`` nanoseconds may be broken off for anybody.
    """

    def __init__(self, most: int, slow: int = SLOW_REQUEST) -> None:
        self._most, self._slow = most, slow
        self._guests: dict[T, _TrackedConnection] = {}
        self._held: Counter[QuotaOwner] = Counter()

    def __len__(self) -> int:
        return len(self._guests)

    @property
    def guests(self) -> frozenset[T]:
        return frozenset(self._guests)

    def makes_way(self, peer: QuotaOwner, now: int) -> T | None:
        """Who has to go before one more of ``peer`` comes in; None: nobody does.

        Of whoever holds the most places, who rests goes before who is waited for, and who has
        done so the longest before the others. A request that is on its way is broken off only
        for a peer with fewer places, or if it is slow.
        """
        if len(self._guests) < self._most:
            return None
        own = self._held[peer]
        found = [
            ((-self._held[one.peer], one.state, one.since), guest)
            for guest, one in self._guests.items()
            if one.state is ConnectionState.RESTING
            or (
                one.state is ConnectionState.WAITED_FOR
                and (self._held[one.peer] > own + 1 or now - one.since > self._slow)
            )
        ]
        return min(found, key=lambda each: each[0])[1] if found else None

    def enter(self, guest: T, peer: QuotaOwner, now: int) -> bool:
        """Whether there is room for ``guest``; if so it is here from now on."""
        if len(self._guests) >= self._most:
            return False
        self._guests[guest] = _TrackedConnection(peer, ConnectionState.WAITED_FOR, now)
        self._held[peer] += 1
        return True

    def turn(self, guest: T, state: ConnectionState, now: int) -> ConnectionState | None:
        """``guest`` does this from now on; what it did before, None if it is not here."""
        before = self._guests.get(guest)
        if before is None:
            return None
        if before.state is not state:
            self._guests[guest] = before._replace(state=state, since=now)
        return before.state

    def leave(self, guest: T) -> None:
        gone = self._guests.pop(guest, None)
        if gone is not None:
            self._held[gone.peer] -= 1
            if not self._held[gone.peer]:
                del self._held[gone.peer]


def network_peer(address: str) -> QuotaOwner:
    """Whom an address stands for: a host has a whole /64 of IPv6."""
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
"""The user who owns the socket at the first end of a TCP connection; None if not known."""


def unknown_uid(_: Endpoint, __: Endpoint) -> None:
    """For a server that has no way to look up the owners of TCP connections."""


def endpoint(address: tuple[Any, ...]) -> Endpoint:
    """One end of a TCP connection; one of IPv4 that came to an IPv6 socket is of IPv4."""
    return address[0].removeprefix("::ffff:"), address[1]


def local_user(remote: Endpoint, local: Endpoint, uid_of: UidOf) -> int | None:
    """The user who opened a TCP connection from this host; None for others, or if not known."""
    own = remote[0] == local[0] or network_peer(remote[0]) == "loopback"
    return uid_of(remote, local) if own else None


def connection_owner(remote: Endpoint, user: int | None) -> QuotaOwner:
    """The owner that a TCP connection counts for: a local user, or else a network peer.

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

    def take(self, owner: QuotaOwner, size: int = 1) -> bool:
        """True if ``owner`` may have ``size`` more; if so it holds them from now on."""
        if self._held[owner] + size > self._left:
            return False
        self.force(owner, size)
        return True

    def force(self, owner: QuotaOwner, size: int = 1) -> None:
        """Let ``owner`` hold ``size`` more, however little is left."""
        self._held[owner] += size
        self._left -= size

    @property
    def idle(self) -> bool:
        """True if nobody holds anything."""
        return not self._held

    def give_back(self, owner: QuotaOwner, size: int = 1) -> None:
        self._held[owner] -= size
        self._left += size
        if not self._held[owner]:
            del self._held[owner]


class FairQueue(Generic[T]):
    """Items that wait for their turn. Owners take turns; the items of one owner stay in order."""

    def __init__(self) -> None:
        self._waiting: dict[QuotaOwner, deque[T]] = {}

    def put(self, owner: QuotaOwner, item: T) -> None:
        self._waiting.setdefault(owner, deque()).append(item)

    def pop(self, may: Callable[[QuotaOwner], bool] = lambda _: True) -> T | None:
        """The next one, of the owner whose last turn was the longest ago and who ``may``."""
        owner = next(filter(may, self._waiting), None)
        if owner is None:
            return None
        items = self._waiting.pop(owner)
        item = items.popleft()
        if items:
            self._waiting[owner] = items
        return item


class RejectionReason(StrEnum):
    """Why somebody got no answer, or not the one that was asked for."""

    CROWDED = "crowded"  # too many connections, of all or of one peer
    MALFORMED = "malformed"  # not HTTP as it should be, or too much of it
    NAME = "name"  # a browser that was led here by another name
    RATE = "rate"  # one peer asks too often
    SLOW = "slow"  # the request took too long to arrive
    TLS = "tls"  # the handshake failed, or the certificate is not known
    TOKEN = "token"  # noqa: S105 - a reason, no password: there was none, or a wrong one
    TOO_LARGE = "too_large"


CountRejection = Callable[[str], None]


class RejectionCounter:
    """Counts; safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()

    def of(self, listener: str) -> CountRejection:
        """What ``listener`` calls with every reason; from now on it is known, with zeros."""
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
    """For a listener of which nobody keeps count."""
