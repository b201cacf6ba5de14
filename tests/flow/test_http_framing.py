"""Every HTTP server of the agent refuses each framing error that RFC 9112 permits to refuse."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from testbed.exporting import serving as exporting
from testbed.web import read_all, serving, statuses

GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
Connect = Callable[[], socket.socket]


@pytest.fixture(params=["spans and questions", "metrics"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Connect]:
    if request.param == "metrics":
        with exporting() as served:
            yield lambda: socket.create_connection(("127.0.0.1", served.port), timeout=20)
    else:
        with serving(tmp_path) as site:
            yield site.connect


def told(connect: Connect, data: bytes) -> bytes:
    """All that is answered until the server closes."""
    with closing(connect()) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return read_all(connection)


def body(*headers: bytes) -> bytes:
    return b"\r\n".join((GET[:-2], *headers, b"", b"12345"))


REFUSED = {
    "no version": b"GET /healthz\r\n",
    "no version, no CR": b"GET /healthz\n",
    "HTTP/0.9": b"GET /healthz HTTP/0.9\r\nHost: localhost\r\n\r\n",
    "no request line": b"\r\n" + GET + b"\r\n",
    "two spaces": b"GET  /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a tab": b"GET\t/healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a space before the line": b" " + GET + b"\r\n",
    "no CR after the request line": b"GET /healthz HTTP/1.1\nHost: localhost\r\n\r\n",
    "no CR after a header": GET + b"X-A: 1\nX-B: 2\r\n\r\n",
    "no CR at the end": GET + b"\n",
    "no CR anywhere": b"GET /healthz HTTP/1.1\nHost: localhost\n\n",
    "a CR within a line": GET + b"X-A: 1\rX-B: 2\r\n\r\n",
    "a NUL in the target": b"GET /heal\0thz HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a NUL in a name": GET + b"X-\0A: 1\r\n\r\n",
    "a NUL in a value": GET + b"X-A: 1\0\r\n\r\n",
    "a control byte in a value": GET + b"X-A: \x0b1\r\n\r\n",
    "a folded header": GET + b"X-A: 1\r\n 2\r\n\r\n",
    "a folded first header": b"GET /healthz HTTP/1.1\r\n X-A: 1\r\nHost: localhost\r\n\r\n",
    "a header without a colon": GET + b"X-A\r\n\r\n",
    "a header without a name": GET + b": 1\r\n\r\n",
    "a space before the colon": body(b"Content-Length : 5"),
    "a tab before the colon": body(b"Content-Length\t: 5"),
    "a space in a name": body(b"Content Length: 5"),
    "two lengths": body(b"Content-Length: 5", b"Content-Length: 6"),
    "the same length twice": body(b"Content-Length: 5", b"Content-Length: 5"),
    "a list of lengths": body(b"Content-Length: 5, 5"),
    "a signed length": body(b"Content-Length: +5"),
    "an empty length": body(b"Content-Length:"),
    "a length that is none": body(b"Content-Length: 0x5"),
    "both lengths": body(b"Content-Length: 5", b"Transfer-Encoding: chunked"),
    "both lengths, the other first": body(b"Transfer-Encoding: chunked", b"Content-Length: 5"),
    "chunks in HTTP/1.0": b"GET /healthz HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "no Host": b"GET /healthz HTTP/1.1\r\n\r\n",
    "two Hosts": GET + b"Host: localhost\r\n\r\n",
    "half a head": GET,
}


@pytest.mark.parametrize("sent", REFUSED.values(), ids=REFUSED)
def test_request_of_bad_framing_is_refused_and_ends_the_connection(
    connect: Connect, sent: bytes
) -> None:
    answer = told(connect, sent + (b"" if sent == GET else GET + b"\r\n"))
    assert statuses(answer) == [400]
    assert b"\r\nconnection: close\r\n" in answer.partition(b"\r\n\r\n")[0].lower() + b"\r\n"


ACCEPTED = {
    "HTTP/1.1": GET + b"\r\n",
    "HTTP/1.0": b"GET /healthz HTTP/1.0\r\n\r\n",
    "no space after the colon": b"GET /healthz HTTP/1.1\r\nHost:localhost\r\n\r\n",
    "an empty header": GET + b"X-A:\r\n\r\n",
    "spaces around a value": GET + b"X-A: \t 1 \t\r\n\r\n",
    "text beyond ASCII": GET + "X-A: \u00e9\r\n\r\n".encode(),
    "a header twice": GET + b"X-A: 1\r\nX-A: 2\r\n\r\n",
}


@pytest.mark.parametrize("sent", ACCEPTED.values(), ids=ACCEPTED)
def test_request_of_good_framing_is_answered(connect: Connect, sent: bytes) -> None:
    assert statuses(told(connect, sent)) == [200]


def test_next_request_on_a_connection_is_checked_as_the_first(connect: Connect) -> None:
    second = GET + b"X-A : 1\r\n\r\n"
    assert statuses(told(connect, GET + b"\r\n" + second + GET + b"\r\n")) == [200, 400]


def test_request_in_pieces_is_checked_as_one_in_whole(connect: Connect) -> None:
    with closing(connect()) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in GET + b"X-A: 1\n\r\n":
            connection.sendall(bytes([byte]))
        assert statuses(read_all(connection)) == [400]
