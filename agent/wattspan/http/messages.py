"""Requests and responses, and the strict framing of HTTP/1.1 requests (RFC 9112).

A lenient parser can find the end of a request elsewhere than the proxy in front of it, which
permits request smuggling. Everything that the RFC permits a server to refuse is refused.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from wattspan.http.sockets import Peer

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_REQUEST = re.compile(_TOKEN + rb" [\x21-\x7e]+ (HTTP/[1-9]\.[0-9])")
_FIELD = re.compile(rb"(" + _TOKEN + rb"):[ \t]*([\t\x20-\x7e\x80-\xff]*)")
_END = re.compile(rb"\n\r?\n")
_LENGTH_DIGITS = 15


def request_head(received: bytes | bytearray) -> bytes:
    """The head at the start of ``received``, its empty line included; b"" if it is incomplete."""
    end = _END.search(received)
    return bytes(received[: end.end()]) if end else b""


def framing_fault(head: bytes) -> str:
    """The clause with the fault of a head; "" if it is valid.

    The head ends with its empty line, or is refused.
    """
    if not head.endswith(b"\r\n\r\n"):
        return "the head does not end with an empty line, ended by CRLF"
    first, *lines = head[:-4].split(b"\r\n")
    request = _REQUEST.fullmatch(first)
    if request is None:
        return "the request line is not METHOD TARGET HTTP/1.1, ended by CRLF"
    found: dict[bytes, list[bytes]] = {b"host": [], b"content-length": [], b"transfer-encoding": []}
    for line in lines:
        field = _FIELD.fullmatch(line)
        if field is None:
            return "a header is not NAME: VALUE on one line, ended by CRLF"
        if (name := field[1].lower()) in found:
            found[name].append(field[2].rstrip(b" \t"))
    return _length_fault(found[b"content-length"], found[b"transfer-encoding"], request[1]) or (
        _host_fault(found[b"host"], request[1])
    )


class SimpleRequest(NamedTuple):
    """A head of ``size`` bytes that needs no more of HTTP: a body of ``length`` bytes follows.

    ``closes``: the client wants no further response on the connection.
    """

    method: bytes
    target: bytes
    headers: Sequence[tuple[bytes, bytes]]
    http_version: bytes
    length: int
    size: int
    closes: bool


_NOT_SIMPLE = frozenset({b"transfer-encoding", b"expect", b"connection", b"upgrade"})


def simple_request(received: bytes) -> SimpleRequest | None:
    """The simple request at the start of ``received``: a valid GET or POST in HTTP/1.1.

    A general parser takes three times as long for the small requests of exporters and scrapes.
    """
    if not received.startswith((b"POST ", b"GET ")):
        return None
    head = request_head(received)
    if framing_fault(head):
        return None
    first, *lines = head[:-4].split(b"\r\n")
    method, target, version = first.split(b" ")
    headers: dict[bytes, bytes] = {}
    for line in lines:
        name, _, value = line.partition(b":")
        headers[name.lower()] = value.strip(b" \t")
    repeated = len(headers) < len(lines)
    if method == b"GET":
        length = b"0" if b"content-length" not in headers else b""
    else:
        length = headers.get(b"content-length", b"")
    connection = headers.get(b"connection", b"").lower()
    if connection in (b"keep-alive", b"close"):
        del headers[b"connection"]
    if (
        repeated
        or version != b"HTTP/1.1"
        or not 0 < len(length) <= _LENGTH_DIGITS
        or not _NOT_SIMPLE.isdisjoint(headers)
    ):
        return None
    closes = connection == b"close"
    return SimpleRequest(method, target, [*headers.items()], b"1.1", int(length), len(head), closes)


def response_head(status: int, reason: str, headers: Sequence[tuple[str, str]]) -> bytes:
    """The head of a response in HTTP/1.1; ValueError for an invalid header."""
    lines = [f"{name}: {value}".encode("latin-1") for name, value in headers]
    for line in lines:
        if not _FIELD.fullmatch(line):
            raise ValueError(f"the header {line!r} is invalid")
    return b"\r\n".join((f"HTTP/1.1 {status} {reason}".encode(), *lines, b"", b""))


def _length_fault(lengths: list[bytes], encodings: list[bytes], version: bytes) -> str:
    if len(lengths) > 1 or not all(map(bytes.isdigit, lengths)):
        return "Content-Length is not one number"
    if lengths and encodings:
        return "a request has a Content-Length or a Transfer-Encoding, not both"
    if encodings and version == b"HTTP/1.0":
        return "HTTP/1.0 has no Transfer-Encoding"
    return ""


def _host_fault(hosts: list[bytes], version: bytes) -> str:
    if len(hosts) > 1 or (not hosts and version == b"HTTP/1.1"):
        return "a request has one Host header"
    return ""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request. Header names are in lower case; ``query`` holds the last value of each name.

    ``acknowledge`` tells the client that a server works on it; its response may take a while.
    """

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    peer: Peer
    acknowledge: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class HttpResponse:
    status: int
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)


def plain_response(
    status: int, sentence: str, headers: Mapping[str, str] | None = None
) -> HttpResponse:
    """One line of text."""
    return HttpResponse(status, f"{sentence}\n".encode(), headers=headers or {})


Handler = Callable[[HttpRequest], Awaitable[HttpResponse]]
"""Handles a request. All handlers share one thread, so none may block it."""
