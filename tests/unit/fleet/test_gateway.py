"""fleet.gateway: endpoints of a configuration, and answers of a server that is no etcd."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

import pytest
from testbed.reserved_port import reserved_port

from wattspan.clock import SystemClock
from wattspan.config import FleetSettings
from wattspan.config.tables import parse_endpoint
from wattspan.fleet.coordination import CoordinationError, KeyWrite, UnreachableError
from wattspan.fleet.etcd import EtcdCoordination
from wattspan.model.settings import Duration


@pytest.mark.parametrize(
    ("url", "written"),
    [
        ("http://etcd-1", "http://etcd-1:2379"),
        ("https://10.0.0.1:4001/", "https://10.0.0.1:4001"),
        ("https://[::1]:1", "https://[::1]:1"),
    ],
)
def test_endpoint_is_parsed(url: str, written: str) -> None:
    assert str(parse_endpoint(url)) == written


@pytest.mark.parametrize(
    ("url", "cause"),
    [
        ("etcd:2379", "begins with neither"),
        ("", "begins with neither"),
        ("http://", "names no host"),
        ("http://h:0", "port 0"),
        ("http://h:x", "Port could not be cast"),
        ("http://h/v3", "it has a path"),
        ("http://h?x=1", "it has a path"),
        ("http://u:secret@h", "set user instead"),
    ],
)
def test_invalid_endpoint_is_refused_without_its_secret(url: str, cause: str) -> None:
    with pytest.raises(ValueError, match=cause) as error:
        parse_endpoint(url)
    assert "secret@" not in str(error.value)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\x00\xff" * 100,
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-length: 28\r\n\r\n{\"header\":{\"revision\":\"abc\"}}",
        b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1000000\r\n" + b"x" * (17 << 20),
        b"HTTP/1.1 404 No\r\ncontent-length: 9\r\n\r\nNot Found",
    ],
)  # fmt: skip
def test_invalid_answer_is_an_error(answer: bytes) -> None:
    with reserved_port() as port, socket.create_server(("127.0.0.1", port)) as listener:

        def serve() -> None:
            with suppress(OSError):  # the end of the listener
                while True:
                    peer, _ = listener.accept()
                    with peer, suppress(OSError):
                        peer.recv(65536)
                        peer.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        long = Duration.parse("20s")
        settings = FleetSettings(
            endpoints=(f"http://127.0.0.1:{port}",), timeout=long, contact=Duration(4 * long)
        )
        client = EtcdCoordination(settings, SystemClock())
        with pytest.raises(UnreachableError):
            client.read("k")
        with pytest.raises(UnreachableError):
            client.commit([KeyWrite("k", b"1")])
        with pytest.raises(CoordinationError):
            client.watch("k", 1).wait(20)
        # A call may meet a connection that the member is about to close.
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(20)
        client.close()
