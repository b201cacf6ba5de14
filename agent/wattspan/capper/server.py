"""One thread, one loop: connections, the second's turn, and the request to end.

Whoever speaks nonsense is told so; whoever speaks too much, too fast or does not listen is put
out, and its leases with it. Nothing that comes in ends the loop.
"""

from __future__ import annotations

import os
import selectors
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import msgspec

from wattspan.access.pace import Pace
from wattspan.capper import protocol
from wattspan.capper.peers import peer_of
from wattspan.capper.protocol import LONGEST_LINE, Refusal, Refused
from wattspan.capper.requests import Desk
from wattspan.capper.wishes import Peer
from wattspan.model import SECOND
from wattspan.plaintext import printable
from wattspan.ports import Clock

TURN: Final = SECOND
MOST_CONNECTIONS: Final = 64
MOST_OF_ONE_USER: Final = 32
"""So that nobody but root can keep root out."""
MOST_A_SECOND: Final = 100
MOST_UNREAD: Final = 1024 * 1024
"""Bytes of answers that a peer may leave lying."""

_TOO_LONG = f"A request has at most {LONGEST_LINE} bytes."
_Anything = (
    protocol.Hello
    | protocol.Hold
    | protocol.Renew
    | protocol.Release
    | protocol.Ceiling
    | protocol.Status
    | protocol.Restore
    | protocol.Accept
)


def turn_away(listener: socket.socket, sentence: str) -> None:
    """Refuse everybody who waits on ``listener``, with a sentence."""
    listener.setblocking(False)
    told = msgspec.json.encode(Refused(reason=Refusal.ENDING, sentence=sentence)) + b"\n"
    with suppress(OSError):
        while True:
            waiting, _ = listener.accept()
            with waiting, suppress(OSError):
                waiting.send(told)


class _PutOutError(Exception):
    """The connection is closed, and ``str`` of this is why."""


@dataclass(eq=False, slots=True)
class _Connection:
    socket: socket.socket
    number: int
    peer: Peer
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)


class Server:
    """Listens until ``stop`` is called, from a signal handler or from anywhere."""

    def __init__(
        self,
        listener: socket.socket,
        desk: Desk,
        clock: Clock,
        allowed: frozenset[int],
        *,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        """``alive`` is called every turn: whoever watches this loop sees that it runs."""
        self._listener, self._desk, self._clock = listener, desk, clock
        self._allowed, self._alive = allowed, alive
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, _Connection] = {}
        self._numbers = 0
        self._pace = Pace(MOST_A_SECOND, MOST_A_SECOND)
        self._decoder = msgspec.json.Decoder(_Anything)
        self._wake, self._woken = socket.socketpair()
        for one in (listener, self._wake, self._woken):
            one.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
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

    def admit(self, allowed: frozenset[int]) -> None:
        """Let these users in from now on; whoever is not of them any more is put out."""
        self._allowed = allowed
        for connection in list(self._connections.values()):
            if connection.peer.uid not in allowed:
                self._close(connection)

    def follow(self, descriptor: int) -> None:
        """End the loop when ``descriptor`` ends: when whoever holds its other end has gone."""

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
            lapse = self._desk.next_lapse
            if self._clock.monotonic() >= (due if lapse is None else min(due, lapse)):
                self._desk.turn()
                self._alive()
                due = self._clock.monotonic() + TURN
                lapse = self._desk.next_lapse
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

    def _accept(self, mask: int) -> None:
        try:
            accepted, _ = self._listener.accept()
            accepted.setblocking(False)
            peer = peer_of(accepted)
        except OSError:  # it has gone already, or there are no descriptors left
            return
        why = self._unwelcome(peer)
        if why is not None:
            with suppress(OSError):
                accepted.send(msgspec.json.encode(why) + b"\n")
            accepted.close()
            return
        self._numbers += 1
        connection = _Connection(accepted, self._numbers, peer)
        self._connections[self._numbers] = connection
        self._selector.register(
            accepted, selectors.EVENT_READ, lambda mask: self._serve(connection, mask)
        )

    def _unwelcome(self, peer: Peer) -> Refused | None:
        if peer.uid not in self._allowed:
            return Refused(
                reason=Refusal.NOT_ALLOWED,
                sentence=f"User {peer.uid} may not ask the capper; name it in [caps] users.",
            )
        same = sum(one.peer.uid == peer.uid for one in self._connections.values())
        if len(self._connections) >= MOST_CONNECTIONS or (peer.uid and same >= MOST_OF_ONE_USER):
            return Refused(
                reason=Refusal.NOT_ALLOWED, sentence="Too many ask the capper at once; close some."
            )
        return None

    def _serve(self, connection: _Connection, mask: int) -> None:
        try:
            if mask & selectors.EVENT_READ:
                self._receive(connection)
            self._send(connection)
        except _PutOutError as error:
            refused = Refused(reason=Refusal.MALFORMED, sentence=str(error))
            with suppress(OSError):
                connection.socket.send(msgspec.json.encode(refused) + b"\n")
            self._close(connection)
        except OSError:
            self._close(connection)

    def _receive(self, connection: _Connection) -> None:
        try:
            got = connection.socket.recv(LONGEST_LINE)
        except BlockingIOError:
            return
        if not got:
            raise ConnectionResetError
        connection.received += got
        while (end := connection.received.find(b"\n")) >= 0:
            line = bytes(connection.received[:end])
            del connection.received[: end + 1]
            if not self._pace.admits(connection.number, self._clock.monotonic()):
                raise _PutOutError(f"More than {MOST_A_SECOND} requests a second.")
            if end > LONGEST_LINE:
                raise _PutOutError(_TOO_LONG)
            answer = self._answer(connection, line)
            connection.unsent += msgspec.json.encode(answer) + b"\n"
            if len(connection.unsent) > MOST_UNREAD:
                raise _PutOutError("Answers are not read.")
        if len(connection.received) > LONGEST_LINE:
            raise _PutOutError(_TOO_LONG)

    def _answer(self, connection: _Connection, line: bytes) -> protocol.State | Refused:
        try:
            request = self._decoder.decode(line)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            cause = printable(str(error)[:200], " ")
            return Refused(reason=Refusal.MALFORMED, sentence=f"This is no request: {cause}.")
        return self._desk.answer(connection.number, connection.peer, request)

    def _send(self, connection: _Connection) -> None:
        if connection.unsent:
            with suppress(BlockingIOError):
                sent = connection.socket.send(connection.unsent)
                del connection.unsent[:sent]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        key = self._selector.get_key(connection.socket)
        if key.events != wanted:
            self._selector.modify(connection.socket, wanted, key.data)

    def _close(self, connection: _Connection) -> None:
        self._connections.pop(connection.number, None)
        with suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.socket.close()
        self._desk.gone(connection.number)
