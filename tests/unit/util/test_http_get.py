"""The total deadline of one HTTP request."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

import pytest

from wattspan.util.http_get import FetchError, KeptConnection, http_get

HEAD = b"HTTP/1.1 200 OK\r\n"


@contextmanager
def dripping(first: bytes, then: bytes) -> Iterator[str]:
    """A server that sends ``first``, and ``then`` again and again, 10 ms apart."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                connection.sendall(first)
                while not ended.wait(0.01):
                    connection.sendall(then)

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}/"
        finally:
            ended.set()
            thread.join()


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (b"", b"H"),
        (HEAD, b"a: b\r\n"),
        (HEAD + b"Content-Length: 100000\r\n\r\n", b"x"),
        (HEAD + b"\r\n", b"x"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
    ],
    ids=["status", "head", "body", "endless", "chunked"],
)
def test_dripping_answer_ends_at_the_deadline(first: bytes, then: bytes) -> None:
    with dripping(first, then) as url, pytest.raises(FetchError):
        http_get(url, timeout=0.3, most=1 << 20)


NEGATIVE = HEAD + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n"


@pytest.mark.parametrize("kept", [False, True])
def test_part_of_a_negative_size_is_read_up_to_the_limit(kept: bool) -> None:
    # CPython reads such a part to the end of the connection, which does not come.
    with dripping(NEGATIVE, b"x" * (1 << 16)) as url:
        connection = KeptConnection("127.0.0.1", int(url.rstrip("/").rpartition(":")[2]))
        get = partial(http_get, url)
        if kept:
            connection.open(60)
            get = partial(connection.get, "/", headers={})
        with pytest.raises(FetchError, match="too large"):
            get(timeout=60, most=100)


@contextmanager
def answering(*answers: bytes) -> Iterator[KeptConnection]:
    """A connection to a server that accepts one after another, sends each an answer and closes."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):
                for answer in answers:
                    connection, _ = server.accept()
                    with connection:
                        connection.recv(1 << 16)
                        connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        made = KeptConnection("127.0.0.1", server.getsockname()[1])
        try:
            yield made
        finally:
            made.close()
            server.shutdown(socket.SHUT_RDWR)  # of an accept that has no connection
            thread.join()


def test_body_that_breaks_off_is_no_answer() -> None:
    with answering(HEAD + b"Content-Length: 20\r\n\r\na 1\nb") as connection:
        connection.open(10)
        with pytest.raises(FetchError, match="breaks off"):
            connection.get("/", timeout=10, most=100, headers={})
        assert connection.ends is None


def test_connection_that_the_server_has_closed_is_opened_anew() -> None:
    answer = HEAD + b"Content-Length: 2\r\n\r\nok"
    with answering(answer, answer) as connection:
        for _ in range(2):
            connection.open(10)
            assert connection.get("/", timeout=10, most=9, headers={}) == (200, b"ok")
            if connection.ends is not None:
                _await_end(connection)


def _await_end(connection: KeptConnection) -> None:
    made = connection._http.sock
    made.settimeout(10)
    assert made.recv(1, socket.MSG_PEEK) == b""


def test_server_of_this_host_is_asked_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "*.example.com,127.0.0.0/8")  # as Docker's documentation has it
    with dripping(HEAD + b"Content-Length: 2\r\n\r\nok", b"") as url:
        assert http_get(url, timeout=10, most=9) == (200, b"ok")


@pytest.mark.parametrize(
    ("url", "headers"),
    [
        ("http://me:secret@127.0.0.1/", {}),
        ("http://127.0.0.1:9/?key=secret key", {}),
        ("http://127.0.0.1:9/", {"auth-token": "secret\n"}),
    ],
)
def test_invalid_request_is_told_without_its_secrets(url: str, headers: dict[str, str]) -> None:
    with pytest.raises(FetchError, match="the address or a header is invalid"):
        http_get(url, timeout=5.0, most=10, headers=headers)
