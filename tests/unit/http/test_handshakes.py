"""TLS connections that are not established yet: no peer keeps the others out."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import deque
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, cast

from testbed.certificates import Authority

from wattspan.config.settings import SpansSettings
from wattspan.http.access_policy import TlsContexts, server_tls
from wattspan.http.server import TlsAcceptor
from wattspan.testing import ManualClock

GREEDY, HONEST = "192.0.2.1", "198.51.100.7"
PATIENCE = 60.0  # seconds, for the hopeless case only


class Elsewhere(socket.socket):
    """A listener on loopback whose clients are where a test says, the first one first."""

    def __init__(self) -> None:
        super().__init__(socket.AF_INET)
        self.bind(("127.0.0.1", 0))
        self.listen(16)
        self.clients: deque[str | OSError] = deque()

    def accept(self) -> tuple[socket.socket, Any]:
        if self.clients and isinstance(self.clients[0], OSError):
            raise cast(OSError, self.clients.popleft())
        connection, _ = super().accept()
        return connection, (self.clients.popleft(), 5)

    def connected(self, client: str) -> socket.socket:
        """A connection from there, on which nothing is ever said."""
        self.clients.append(client)
        return socket.create_connection(self.getsockname())


class Greeter(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(b"here")
        transport.close()


def spoken(authority: Authority) -> TlsContexts:
    pair = authority.issue("server")
    settings = SpansSettings(tls_certificate=str(pair.certificate), tls_key=str(pair.key))
    tls = server_tls(settings, what="Cannot", where="here", log=print)
    assert tls is not None
    return tls


async def greeted(listener: Elsewhere, client: str, authority: Authority) -> bytes:
    """Response to a client with a valid handshake."""
    listener.clients.append(client)
    reader, writer = await asyncio.open_connection(
        *listener.getsockname(), ssl=authority.client(), server_hostname="localhost"
    )
    with closing(writer):
        return await reader.read()


async def ended(connection: socket.socket) -> bool:
    """Wait until the server has ended it."""
    connection.setblocking(False)
    try:
        return not await asyncio.get_running_loop().sock_recv(connection, 1)
    except ConnectionError:
        return True


def run(scenario: Any) -> None:
    asyncio.run(asyncio.wait_for(scenario, PATIENCE))


def test_unfinished_handshakes_make_way_for_other_owners(tmp_path: Path) -> None:
    authority, refused = Authority(tmp_path), list[str]()

    async def scenario() -> None:
        with ExitStack() as held, Elsewhere() as listener:
            stalled = [held.enter_context(listener.connected(GREEDY)) for _ in range(3)]
            tls = spoken(authority)
            shaking = TlsAcceptor(listener, Greeter, tls, ManualClock(), refused.append, most=3)
            assert await greeted(listener, HONEST, authority) == b"here"
            assert refused == ["crowded"]
            assert await ended(stalled[0]), "it made way"
            shaking.close()
            assert [await ended(one) for one in stalled[1:]] == [True, True]

    run(scenario())


def test_handshakes_of_one_owner_are_limited(tmp_path: Path) -> None:
    authority, refused = Authority(tmp_path), list[str]()

    async def scenario() -> None:
        with ExitStack() as held, Elsewhere() as listener:
            begun = [held.enter_context(listener.connected(GREEDY)) for _ in range(4)]
            tls = spoken(authority)
            shaking = TlsAcceptor(listener, Greeter, tls, ManualClock(), refused.append, most=3)
            assert await ended(begun[3]), "there was no place for it"
            assert refused == ["crowded"]
            begun[0].close()
            said = b""
            while not said:  # until the free slot is detected
                with suppress(OSError):
                    said = await greeted(listener, GREEDY, authority)
            assert said == b"here"
            shaking.close()

    run(scenario())


def test_failed_accept_loses_only_that_connection(tmp_path: Path) -> None:
    authority, told = Authority(tmp_path), list[object]()

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        with Elsewhere() as listener:
            listener.clients.append(OSError(errno.EMFILE, "Too many open files"))
            shaking = TlsAcceptor(listener, Greeter, spoken(authority), ManualClock(), print)
            assert await greeted(listener, HONEST, authority) == b"here"
            shaking.close()
        assert len(told) == 1

    run(scenario())
