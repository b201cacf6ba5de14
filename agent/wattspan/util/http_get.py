"""HTTP requests of bounded answers, without redirects."""

from __future__ import annotations

import io
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from time import monotonic  # noqa: TID251 - deadlines of sockets are in real time
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import ssl
    from http.client import HTTPConnection, HTTPResponse

OK = 200
_BESIDE = 1 << 20  # bytes of an answer beside its body: the head, and the sizes of parts


class HttpAnswer(NamedTuple):
    """Status and body; the body has at most one byte more than permitted."""

    status: int
    body: bytes


class FetchError(Exception):
    """The request had no answer; the message is the cause in lower case."""


def client_context(authority: str = "") -> ssl.SSLContext:
    """A context that verifies servers by the authorities in a file, or by those of the host.

    Raises OSError, SSLError included, for a file without authorities. Python 3.13 and newer refuse
    certificates without the key identifiers of RFC 5280 unless told otherwise; OpenSSL 3.0 and
    many own authorities issue such certificates.
    """
    import ssl  # takes 10 ms and 4 MB, and few commands need it

    context = ssl.create_default_context(cafile=authority or None)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def import_for_threads() -> None:
    """Import what ``http_get`` needs, before a thread calls it.

    A thread that imports while the program forks leaves the child with an import lock that is never
    released.
    """
    import urllib.request  # noqa: F401


def http_get(
    url: str,
    *,
    timeout: float,
    most: int,
    headers: Mapping[str, str] = MappingProxyType({}),
    trust: ssl.SSLContext | None = None,
    posted: bytes | None = None,
) -> HttpAnswer:
    """The answer to a GET request, of any status, read up to ``most`` + 1 bytes; FetchError.

    With ``posted``, that to a POST request of these bytes.
    ``trust`` verifies the server's certificate, by default by the host's authorities.
    ``timeout`` is the seconds for the whole answer, the connection included, however slowly a
    server sends it. The resolver has limits of its own.
    """
    # Imported here: most agents query no server.
    from http.client import HTTPConnection, HTTPSConnection
    from urllib import parse, request
    from urllib.error import HTTPError

    bounds = monotonic() + timeout, most

    def connection(kind: type[HTTPConnection], host: str, **settings: Any) -> HTTPConnection:
        return _bounded(kind(host, **settings), lambda: bounds)

    class Plain(request.HTTPHandler):
        """HTTP with a deadline."""

        def http_open(self, req: request.Request) -> HTTPResponse:
            return self.do_open(partial(connection, HTTPConnection), req)

    class Encrypted(request.HTTPSHandler):
        """HTTPS with a deadline."""

        def https_open(self, req: request.Request) -> HTTPResponse:
            made = partial(connection, HTTPSConnection, context=trust or client_context())
            return self.do_open(made, req)

    class NoRedirect(request.HTTPRedirectHandler):
        """Follows no redirect: the agent contacts only the configured server."""

        def redirect_request(self, *_: object) -> None:
            return None

    with _fetch_errors():
        try:
            host = parse.urlsplit(url).hostname or ""
            here = host.startswith("127.") or host in ("localhost", "::1")
            # Proxies of the environment are for other hosts: Docker lists 127.0.0.0/8 in no_proxy,
            # which urllib does not understand.
            direct = [request.ProxyHandler({})] if here else []
            opener = request.build_opener(NoRedirect, Plain, Encrypted, *direct)
            sent = request.Request(url, posted, dict(headers))  # noqa: S310
            with opener.open(sent, timeout=timeout) as answer:
                return HttpAnswer(answer.status, answer.read(most + 1))
        except HTTPError as error:
            with error:
                return HttpAnswer(error.code, error.read(most + 1))


class KeptConnection:
    """A connection to a server without TLS for several requests. For one thread.

    It connects only in ``open``: a request goes over the connection whose ends were examined.
    """

    def __init__(self, host: str, port: int) -> None:
        from http.client import HTTPConnection  # most agents query no server

        self._bounds = 0.0, 0  # deadline and bytes of the present request
        self._http = _bounded(HTTPConnection(host, port), lambda: self._bounds)
        self._http.auto_open = 0

    def open(self, timeout: float) -> None:
        """Connect, unless the last answer left a connection that the server keeps; FetchError."""
        if self._http.sock is not None and not _is_quiet(self._http.sock):
            self.close()
        if self._http.sock is None:
            self._bounds = monotonic() + timeout, 0
            with _fetch_errors():
                self._http.connect()

    @property
    def ends(self) -> tuple[tuple[str, int], tuple[str, int]] | None:
        """Our end and the server's end; None without a connection."""
        if self._http.sock is None:
            return None
        try:
            local, remote = self._http.sock.getsockname(), self._http.sock.getpeername()
        except OSError:
            return None
        return (local[0], local[1]), (remote[0], remote[1])

    def get(
        self, path: str, *, timeout: float, most: int, headers: Mapping[str, str]
    ) -> HttpAnswer:
        """The answer of any status, as that of ``http_get``; FetchError closes the connection."""
        from http.client import NotConnected

        self._bounds = monotonic() + timeout, most
        whole = False
        try:
            with _fetch_errors():
                if self._http.sock is None:
                    raise NotConnected("no connection")
                self._http.sock.settimeout(timeout)
                self._http.request("GET", path, headers=dict(headers))
                answer = self._http.getresponse()
                body = answer.read(most + 1)
                if len(body) <= most and answer.length:
                    raise OSError("the answer breaks off")
                whole = len(body) <= most
                return HttpAnswer(answer.status, body)
        finally:
            if not whole:
                self.close()

    def close(self) -> None:
        self._http.close()


def _bounded(made: HTTPConnection, bounds: Callable[[], tuple[float, int]]) -> HTTPConnection:
    """``made``, with the deadline and the bytes of a body that ``bounds`` returns for a request."""
    from http.client import HTTPResponse

    def response(connection: socket.socket, *args: Any, **kwargs: Any) -> HTTPResponse:
        answer = HTTPResponse(connection, *args, **kwargs)
        answer.fp.close()
        answer.fp = io.BufferedReader(_BoundedReader(connection, *bounds()))
        return answer

    def connect(
        address: tuple[str, int], _: object = None, source: tuple[str, int] | None = None
    ) -> socket.socket:
        return _connect(address, source, bounds()[0])

    made.response_class = response  # type: ignore[assignment]
    made._create_connection = connect  # type: ignore[attr-defined]  # noqa: SLF001
    return made


@contextmanager
def _fetch_errors() -> Iterator[None]:
    from http.client import HTTPException, InvalidURL

    try:
        yield
    except (ValueError, InvalidURL):  # whose message may repeat a password or a token
        raise FetchError("the address or a header is invalid") from None
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        cause = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        raise FetchError(str(cause).lower()) from None


def _left(deadline: float) -> float:
    left = deadline - monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def _connect(
    address: tuple[str, int], source: tuple[str, int] | None, deadline: float
) -> socket.socket:
    """Try the addresses of a host within one deadline, not one for each."""
    error: OSError = ConnectionRefusedError(f"{address[0]} has no address")
    found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    for place in dict.fromkeys(end for *_, end in found):
        try:
            return socket.create_connection((str(place[0]), int(place[1])), _left(deadline), source)
        except OSError as failed:
            error = failed
    raise error


def _is_quiet(connection: socket.socket) -> bool:
    """True for a connection that the server has not ended, and over which it has sent nothing."""
    try:
        connection.settimeout(0)
        connection.recv(1, socket.MSG_PEEK)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


class _BoundedReader(io.RawIOBase):
    """Reads a socket until a deadline, and not much more than a body of ``most`` bytes.

    The parts of a body have sizes that the server states: a negative one means all that it sends.
    """

    def __init__(self, connection: socket.socket, deadline: float, most: int) -> None:
        super().__init__()
        self._connection, self._deadline = connection, deadline
        self._room = 2 * most + _BESIDE
        self._raw = connection.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._connection.settimeout(_left(self._deadline))
        count = self._raw.readinto(buffer)
        self._room -= count or 0
        if self._room < 0:
            raise OSError("the answer is too large")
        return count

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()
