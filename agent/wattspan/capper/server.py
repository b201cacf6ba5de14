"""The socket server: one thread and one loop for connections, turns and the request to end.

A client that sends an invalid request is told so. A client that sends too much or too fast, or
does not read, is disconnected, and its leases end. No input ends the loop.
"""

from __future__ import annotations

import os
import selectors
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec

from wattspan.capper import protocol
from wattspan.capper.protocol import MAX_LINE_BYTES, RefusalReason, RefusedReply
from wattspan.capper.requests import RequestHandler
from wattspan.http.rate_limiter import RateLimiter
from wattspan.model import SECOND
from wattspan.ports import Clock
from wattspan.util.text import printable
from wattspan.util.unix_sockets import PeerCredentials, peer_credentials

TICK: Final = SECOND
MAX_CONNECTIONS: Final = 64
MAX_CONNECTIONS_PER_USER: Final = 32
"""Below the total, so that no user can exclude root."""
MAX_REQUEST_RATE: Final = 100
MAX_UNREAD_BYTES: Final = 1024 * 1024
"""Bytes of replies that a peer may leave unread."""

_TOO_LONG = f"A request has at most {MAX_LINE_BYTES} bytes."
_AnyRequest = (
    protocol.HelloRequest
    | protocol.HoldRequest
    | protocol.RenewRequest
    | protocol.ReleaseRequest
    | protocol.CeilingRequest
    | protocol.AllotmentRequest
    | protocol.StatusRequest
    | protocol.RestoreRequest
    | protocol.AcceptRequest
)


def refuse_connections(listener: socket.socket, sentence: str) -> None:
    """Refuse every connection that waits on ``listener``."""
    listener.setblocking(False)
    with suppress(OSError):
        while True:
            _refuse(listener.accept()[0], RefusalReason.ENDING, sentence)


def _refuse(connection: socket.socket, reason: RefusalReason, sentence: str) -> None:
    """Send a refusal, and close."""
    with connection, suppress(OSError):
        connection.send(_encode(RefusedReply(reason=reason, sentence=sentence)))


def _encode(reply: protocol.StateReply | RefusedReply) -> bytes:
    return msgspec.json.encode(reply) + b"\n"


class _DisconnectError(Exception):
    """The connection is to be closed for this reason."""


@dataclass(eq=False, slots=True)
class _ClientConnection:
    socket: socket.socket
    number: int
    peer: PeerCredentials
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)


class CapperSocketServer:
    """Listens until ``stop`` is called, from a signal handler or from anywhere."""

    def __init__(
        self,
        listener: socket.socket,
        requests: RequestHandler,
        clock: Clock,
        allowed: frozenset[int],
        *,
        alive: Callable[[], None] = lambda: None,
        refusal: Callable[[PeerCredentials], str | None] = lambda _: None,
    ) -> None:
        """``alive`` is called every turn, for a watchdog.

        ``refusal`` is the reason why a peer of user 0 is not root of this host, None if it is.
        """
        self._listener, self._requests, self._clock = listener, requests, clock
        self._allowed, self._alive, self._not_root = allowed, alive, refusal
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, _ClientConnection] = {}
        self._numbers = 0
        self._rate = RateLimiter(MAX_REQUEST_RATE, MAX_REQUEST_RATE)
        self._decoder = msgspec.json.Decoder(_AnyRequest)
        self._wake, self._woken = socket.socketpair()
        for one in (listener, self._wake, self._woken):
            one.setblocking(False)
        self._is_listening = False
        self._listen()
        self._selector.register(self._woken, selectors.EVENT_READ, self._drain)
        self._stopped = False
        self._asked: deque[Callable[[], None]] = deque()

    def stopped(self) -> bool:
        return self._stopped

    def stop(self) -> None:
        """End the loop; safe in a signal handler."""
        self._stopped = True
        with suppress(OSError):
            self._wake.send(b"x")

    def ask(self, act: Callable[[], None]) -> None:
        """Have the loop call ``act`` between two requests; safe in a signal handler."""
        self._asked.append(act)
        with suppress(OSError):
            self._wake.send(b"x")

    def permit(self, allowed: frozenset[int]) -> None:
        """Accept these users from now on; other users are disconnected."""
        self._allowed = allowed
        for connection in list(self._connections.values()):
            if connection.peer.uid not in allowed:
                self._close(connection)

    def follow(self, descriptor: int) -> None:
        """End the loop when ``descriptor`` ends, because its other end was closed."""

        def look(mask: int) -> None:
            with suppress(BlockingIOError):
                if not os.read(descriptor, 4096):
                    self._selector.unregister(descriptor)
                    self.stop()

        os.set_blocking(descriptor, False)
        self._selector.register(descriptor, selectors.EVENT_READ, look)

    def run(self) -> None:
        """Serve; returns once stopped."""
        due = self._clock.monotonic()
        while not self.stopped():
            lapse = self._requests.next_expiry
            if self._clock.monotonic() >= (due if lapse is None else min(due, lapse)):
                self._requests.turn()
                self._alive()
                self._listen()
                due = self._clock.monotonic() + TICK
                lapse = self._requests.next_expiry
            until = due if lapse is None else min(due, lapse)
            wait = max(0, until - self._clock.monotonic())
            for key, mask in self._selector.select(wait / SECOND):
                if self.stopped():
                    break
                key.data(mask)
            while self._asked and not self.stopped():
                self._asked.popleft()()

    def close(self) -> None:
        for connection in list(self._connections.values()):
            self._close(connection)
        self._selector.close()
        for one in (self._wake, self._woken, self._listener):
            one.close()

    # --------------------------------------------------------------------------- inner workings

    def _drain(self, mask: int) -> None:
        with suppress(BlockingIOError):
            self._woken.recv(4096)

    def _listen(self) -> None:
        if not self._is_listening:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            self._is_listening = True

    def _accept(self, mask: int) -> None:
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # the client has gone already
        except OSError:  # most likely no descriptor is free: the listener would stay readable
            self._selector.unregister(self._listener)
            self._is_listening = False  # until the next turn
            return
        try:
            accepted.setblocking(False)
            peer = peer_credentials(accepted)
        except OSError:  # the client has gone already
            accepted.close()
            return
        if (refusal := self._refusal(peer)) is not None:
            _refuse(accepted, RefusalReason.NOT_ALLOWED, refusal)
            return
        self._numbers += 1
        connection = _ClientConnection(accepted, self._numbers, peer)
        self._connections[self._numbers] = connection
        self._selector.register(accepted, selectors.EVENT_READ, partial(self._serve, connection))

    def _refusal(self, peer: PeerCredentials) -> str | None:
        if peer.uid not in self._allowed:
            return f"User {peer.uid} may not ask the capper; name it in [caps] users."
        same = sum(one.peer.uid == peer.uid for one in self._connections.values())
        full = len(self._connections) >= MAX_CONNECTIONS
        if full or (peer.uid and same >= MAX_CONNECTIONS_PER_USER):
            return "The capper has too many connections; close some."
        return self._not_root(peer) if peer.uid == 0 else None

    def _serve(self, connection: _ClientConnection, mask: int) -> None:
        try:
            if mask & selectors.EVENT_READ:
                self._receive(connection)
            self._send(connection)
        except _DisconnectError as error:
            self._close(connection, str(error))
        except OSError:
            self._close(connection)

    def _receive(self, connection: _ClientConnection) -> None:
        try:
            received = connection.socket.recv(MAX_LINE_BYTES)
        except BlockingIOError:
            return
        if not received:
            raise ConnectionResetError
        connection.received += received
        while (end := connection.received.find(b"\n")) >= 0:
            line = bytes(connection.received[:end])
            del connection.received[: end + 1]
            if not self._rate.admits(connection.number, self._clock.monotonic()):
                raise _DisconnectError(f"More than {MAX_REQUEST_RATE} requests a second.")
            if end > MAX_LINE_BYTES:
                raise _DisconnectError(_TOO_LONG)
            connection.unsent += _encode(self._reply(connection, line))
            if len(connection.unsent) > MAX_UNREAD_BYTES:
                raise _DisconnectError("Replies are not read.")
        if len(connection.received) > MAX_LINE_BYTES:
            raise _DisconnectError(_TOO_LONG)

    def _reply(
        self, connection: _ClientConnection, line: bytes
    ) -> protocol.StateReply | RefusedReply:
        try:
            request = self._decoder.decode(line)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            cause = printable(str(error)[:200], " ")
            sentence = f"The request is invalid: {cause}. See the reference page on caps."
            return RefusedReply(reason=RefusalReason.MALFORMED, sentence=sentence)
        return self._requests.answer(connection.number, connection.peer, request)

    def _send(self, connection: _ClientConnection) -> None:
        if connection.unsent:
            with suppress(BlockingIOError):
                sent = connection.socket.send(connection.unsent)
                del connection.unsent[:sent]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        key = self._selector.get_key(connection.socket)
        if key.events != wanted:
            self._selector.modify(connection.socket, wanted, key.data)

    def _close(self, connection: _ClientConnection, sentence: str = "") -> None:
        """Close a connection, with a refusal if it has a ``sentence``."""
        self._connections.pop(connection.number, None)
        with suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        if sentence:
            _refuse(connection.socket, RefusalReason.MALFORMED, sentence)
        connection.socket.close()
        self._requests.gone(connection.number)
