"""A request and its response, as handlers see them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from wattspan.access.crowd import connection_owner


class Peer(NamedTuple):
    """Who sent something, as far as the kernel proves it; None is unknown.

    On a Unix socket pid and uid are the peer's credentials. On TCP ``address`` and ``local`` are
    the two ends, from which the kernel's own tables may tell more. ``accepted`` is when the
    connection was accepted, in monotonic nanoseconds: it tells connections apart that had the
    same ends, or whose openers had the same pid, one after the other. ``owner`` is the user who
    owns the other end of a TCP connection from this host, for the sharing of places only.
    """

    pid: int | None = None
    uid: int | None = None
    address: tuple[str, int] | None = None  # the sender's end
    local: tuple[str, int] | None = None  # ours
    accepted: int | None = None
    owner: int | None = None

    @property
    def whose(self) -> Hashable:
        """Whom it counts for, where one may not take everything: a user, or a host."""
        if self.address is not None:
            return connection_owner(self.address, self.owner)
        return None if self.uid is None else ("uid", self.uid)


@dataclass(frozen=True, slots=True)
class Request:
    """One whole request; header names are in lower case, ``query`` holds the last of each name."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    peer: Peer


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)


Handler = Callable[[Request], Awaitable[Response]]
"""Answers a request; awaits nothing for long without need, for all share one thread."""
