"""HTTP/1.1 to one member of a cluster, with a deadline for each call."""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Final, TypeVar

import h11
import msgspec

from wattspan.config.tables import EtcdEndpoint
from wattspan.model import SECOND
from wattspan.model.settings import Listen
from wattspan.ports import Clock
from wattspan.util.text import printable

MAX_RESPONSE_BYTES: Final = 16 << 20
_READ_SIZE: Final = 1 << 16

Answer = TypeVar("Answer")


class BrokenExchangeError(Exception):
    """An exchange without an answer; ``sent``: the service may have received the request."""

    def __init__(self, cause: str, *, sent: bool) -> None:
        super().__init__(cause)
        self.sent = sent


class _Refusal(msgspec.Struct):
    """The body of a refusal. ``error`` is a sentence, or in a stream a struct with one."""

    code: int = 0
    error: Any = ""
    message: str = ""


class RefusedCallError(Exception):
    """An answer other than success."""

    def __init__(self, status: int, content: bytes) -> None:
        code, sentence = 0, ""
        with suppress(ValueError, RecursionError):
            sent = msgspec.json.decode(content, type=_Refusal)
            code, sentence = sent.code, sent.message or str(sent.error)
        self.code = code
        self.sentence = printable(sentence or f"HTTP status {status}")[:200]
        super().__init__(self.sentence)


class MemberConnection:
    """One HTTP/1.1 connection to an endpoint. For one thread at a time."""

    def __init__(
        self,
        endpoint: EtcdEndpoint,
        trust: Callable[[], ssl.SSLContext],
        clock: Clock,
        deadline: int,
    ) -> None:
        self.endpoint = endpoint
        self._clock = clock
        self._http = h11.Connection(h11.CLIENT)
        left = self._seconds_to(deadline)
        self._socket = socket.create_connection((endpoint.host, endpoint.port), left)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if endpoint.tls:
                self._socket = trust().wrap_socket(self._socket, server_hostname=endpoint.host)
        except BaseException:
            self._socket.close()
            raise

    def post(
        self, path: str, body: bytes, headers: dict[str, str], deadline: int, answer: type[Answer]
    ) -> Answer:
        """One call and its decoded answer; RefusedCallError, BrokenExchangeError."""
        try:
            self.send(path, body, headers, deadline)
            status, content = self._response(deadline)
            if status == HTTPStatus.OK:
                return msgspec.json.decode(content, type=answer, strict=False)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise BrokenExchangeError(f"invalid response ({error})", sent=True) from None
        except (OSError, ValueError, h11.ProtocolError) as error:
            raise BrokenExchangeError(describe_failure(error), sent=True) from None
        raise RefusedCallError(status, content)

    def send(self, path: str, body: bytes, headers: dict[str, str], deadline: int) -> None:
        request = h11.Request(
            method="POST",
            target=path,
            headers=[
                ("host", Listen.written(self.endpoint.host, self.endpoint.port)),
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                *headers.items(),
            ],
        )
        events = (request, h11.Data(data=body), h11.EndOfMessage())
        wire = b"".join(filter(None, map(self._http.send, events)))
        self._socket.settimeout(self._seconds_to(deadline))
        self._socket.sendall(wire)

    def next_event(self, deadline: int) -> Any:
        """The next event of the response; TimeoutError, OSError, h11.RemoteProtocolError."""
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._socket.settimeout(self._seconds_to(deadline))
            self._http.receive_data(self._socket.recv(_READ_SIZE))
        return event

    def _response(self, deadline: int) -> tuple[int, bytes]:
        head = self.next_event(deadline)
        body = bytearray()
        while isinstance(event := self.next_event(deadline), h11.Data):
            body += event.data
            if len(body) > MAX_RESPONSE_BYTES:
                raise ValueError("its answer is too long")
        if not isinstance(head, h11.Response) or not isinstance(event, h11.EndOfMessage):
            raise ConnectionResetError("its answer broke off")
        return head.status_code, bytes(body)

    def detect_silence(self) -> None:
        """Let the kernel end the connection within about 15 s if the other end is gone."""
        for option, value in (
            (socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 2),
        ):  # fmt: skip
            self._socket.setsockopt(socket.IPPROTO_TCP, option, value)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def reuse(self) -> bool:
        """Prepare the next exchange; False if the connection must be closed."""
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        return True

    @property
    def is_fresh(self) -> bool:
        """False if the other end has closed the connection or sent something unasked."""
        return not select.select([self._socket], [], [], 0)[0]

    def close(self) -> None:
        self._socket.close()

    def _seconds_to(self, deadline: int) -> float:
        left = deadline - self._clock.monotonic()
        if left <= 0:
            raise TimeoutError
        return left / SECOND


def describe_failure(error: Exception) -> str:
    """An error as a clause."""
    match error:
        case TimeoutError():
            return "it does not answer in time"
        case ssl.SSLCertVerificationError():
            return f"its certificate is not trusted ({error.verify_message}; set tls_ca in [fleet])"
        case ssl.SSLError():
            reason = (error.reason or str(error)).replace("_", " ").lower()
            return f"TLS failed ({reason}; check tls_certificate and tls_key in [fleet])"
        case socket.gaierror():
            return f"its name cannot be resolved ({error.strerror})"
        case h11.RemoteProtocolError():
            return "it does not answer with HTTP, or closed the connection"
        case OSError():
            return (error.strerror or str(error)).lower()
    return printable(str(error))[:200]
