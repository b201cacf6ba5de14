"""What clients may take of the server, and what they have taken so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from wattspan.ports import Clock

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes, times in seconds."""

    head: int = 16 * 1024  # the request line and the headers
    body: int = 64 * MIB  # one request's body, as it is sent
    bodies: int = 128 * MIB  # the bodies of all connections at a time; never less than one
    connections: int = 256
    receive: float = 60.0  # from the first byte of a request to its last
    idle: float = 75.0  # between two requests
    send: float = 30.0  # until the client has taken its answer
    linger: float = 5.0  # for a client that still sends to notice that it was refused


class Guest(Protocol):
    """A connection, as the room sees it."""

    @property
    def answering(self) -> bool: ...

    def close(self) -> None: ...


class Room:
    """What one server's connections share. Used in the server's thread only."""

    def __init__(self, limits: Limits, clock: Clock) -> None:
        self.limits, self.clock = limits, clock
        self.guests: set[Guest] = set()
        self._resting: dict[Guest, None] = {}  # between requests, the longest rest first
        self._held = 0  # bytes of bodies

    def enter(self, guest: Guest) -> bool:
        """Whether ``guest`` may stay; if it is crowded, who has rested longest makes way."""
        if len(self.guests) >= self.limits.connections and self._resting:
            next(iter(self._resting)).close()
        self.guests.add(guest)
        return len(self.guests) <= self.limits.connections

    @property
    def overrun(self) -> bool:
        """Whether there are so many that they cannot even be told so."""
        return len(self.guests) > 2 * self.limits.connections

    def leave(self, guest: Guest) -> None:
        self.guests.discard(guest)
        self._resting.pop(guest, None)

    def rest(self, guest: Guest) -> None:
        """``guest`` may be sent away when others need its place."""
        self._resting[guest] = None

    def wake(self, guest: Guest) -> bool:
        """``guest`` has something to do; whether it rested until now."""
        return self._resting.pop(guest, self) is None

    def take(self, size: int) -> bool:
        """Whether there is room for ``size`` more bytes of bodies; if so they are taken."""
        if self._held + size > max(self.limits.bodies, self.limits.body):
            return False
        self._held += size
        return True

    def give_back(self, size: int) -> None:
        self._held -= size
