"""The total deadline of one HTTP request."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from wattspan.util.http_get import FetchError, http_get

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
