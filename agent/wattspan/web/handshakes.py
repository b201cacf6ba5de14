"""Who may shake hands: a listener's TLS connections, until they are established or given up."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from wattspan.access.crowd import (
    Crowd,
    UidOf,
    connection_owner,
    end_of,
    local_user,
    unknown_uid,
)
from wattspan.access.refusals import Count, Reason
from wattspan.access.tls import Contexts
from wattspan.ports import Clock
from wattspan.web.listening import BACKLOG

HANDSHAKES = 256
"""TLS connections of one listener that may be neither established nor given up."""

HANDSHAKE, FAREWELL = 5.0, 2.0
"""Seconds that a client is given to shake hands, and to end TLS as it should."""

_PATIENCE = 1.0  # seconds until another connection is accepted where the first try failed

Protocols = Callable[[], asyncio.Protocol]


class Handshakes:
    """Accepts connections, each with the newest context; used in the server's thread only.

    asyncio's own servers take one context for ever, and know no peer before TLS is established:
    whoever begins many handshakes and ends none would keep everybody else out.
    """

    def __init__(
        self,
        listener: socket.socket,
        make: Protocols,
        tls: Contexts,
        clock: Clock,
        refused: Count,
        *,
        most: int = HANDSHAKES,
        uid_of: UidOf = unknown_uid,
    ) -> None:
        self._listener, self._make, self._tls = listener, make, tls
        self._clock, self._refused = clock, refused
        self._most, self._uid_of = most, uid_of
        self._crowd: Crowd[asyncio.Task[None]] = Crowd(most)
        self._loop = asyncio.get_running_loop()
        listener.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Accept nobody any more, and give up whoever still shakes hands."""
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for task in self._crowd.guests:
            task.cancel()

    def _listen(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(BACKLOG):
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor is left, most likely
                told = {"message": "a connection cannot be accepted", "exception": error}
                self._loop.call_exception_handler(told)
                self._loop.remove_reader(self._listener)
                self._loop.call_later(_PATIENCE, self._listen)
                return
            connection.setblocking(False)
            self._welcome(connection, address)

    def _welcome(self, connection: socket.socket, address: tuple[Any, ...]) -> None:
        """Shake hands, if need be in the place of one of whoever has the most."""
        remote, local = end_of(address), end_of(connection.getsockname())
        peer = connection_owner(remote, local_user(remote, local, self._uid_of))
        now = self._clock.monotonic()
        leaving = self._crowd.makes_way(peer, now)
        if leaving is not None:
            leaving.cancel()
            self._crowd.leave(leaving)
            self._refused(Reason.CROWDED)
        if len(self._crowd) >= self._most:
            connection.close()
            self._refused(Reason.CROWDED)
            return
        task = self._loop.create_task(self._shake(connection))
        self._crowd.enter(task, peer, now)

        def over(_: object) -> None:
            self._crowd.leave(task)
            if task.cancelled():
                connection.close()  # which nobody has done if it had not begun

        task.add_done_callback(over)

    async def _shake(self, connection: socket.socket) -> None:
        with suppress(OSError):  # it failed, which is counted, or took too long
            await self._loop.connect_accepted_socket(
                self._make,
                connection,
                ssl=self._tls(),
                ssl_handshake_timeout=HANDSHAKE,
                ssl_shutdown_timeout=FAREWELL,
            )
