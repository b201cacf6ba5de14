"""JSON over HTTP to etcd's gRPC gateway: endpoints, time limits, TLS, tokens and failover."""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from threading import Lock
from typing import Any, Final, TypeVar

import h11
import msgspec

from wattspan.config import FleetSettings
from wattspan.config.fleet import EtcdEndpoint, parse_endpoint
from wattspan.fleet.coordination import (
    CoordinationError,
    OutcomeUnknownError,
    PermissionDeniedError,
    UnreachableError,
)
from wattspan.http.access_policy import (
    AccessError,
    is_world_accessible,
    load_certificate,
    readable_pem,
)
from wattspan.model import SECOND
from wattspan.model.settings import Listen
from wattspan.ports import Clock, ConfigError
from wattspan.util.encoding import GrpcStatus
from wattspan.util.files import read_regular
from wattspan.util.text import printable

MAX_RESPONSE_BYTES: Final = 16 << 20
_READ_SIZE: Final = 1 << 16
_MAX_PASSWORD_BYTES: Final = 4096
_MAX_IDLE: Final = 2
"""Connections that are kept between calls."""

_NO_LEADER: Final = "no leader"
_FINAL: Final = (
    GrpcStatus.INVALID_ARGUMENT,
    GrpcStatus.FAILED_PRECONDITION,
    GrpcStatus.OUT_OF_RANGE,
    GrpcStatus.UNIMPLEMENTED,
)
"""Codes of requests that had no effect, and have none elsewhere."""
_TOKEN_ERRORS: Final = (
    "invalid auth token",  # it has ended, or the member was restarted
    "revision of auth store is old",  # users or roles were changed since
    "user name is empty",  # authentication was enabled since
)

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    """Addresses and credentials of an etcd cluster. Files are read at each use.

    ``authority`` is the file of the certificates that sign the members', by default the host's
    trusted ones; ``certificate`` and ``key`` are the client's. ``timeout`` is in nanoseconds.
    """

    endpoints: tuple[EtcdEndpoint, ...]
    authority: str = ""
    certificate: str = ""
    key: str = ""
    user: str = ""
    password_file: str = ""
    timeout: int = 3 * SECOND

    @classmethod
    def configured(cls, settings: FleetSettings) -> EtcdAccess:
        return cls(
            tuple(map(parse_endpoint, settings.endpoints)),
            settings.tls_ca,
            settings.tls_certificate,
            settings.tls_key,
            settings.user,
            settings.password_file,
            settings.timeout,
        )

    def tls_context(self) -> ssl.SSLContext:
        """WattspanError if a file is unreadable or invalid."""
        what, where = "Cannot reach etcd", "in [fleet]"
        context = ssl.create_default_context()
        if self.authority:
            readable_pem("tls_ca", self.authority, where)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            try:
                context.load_verify_locations(self.authority)
            except ssl.SSLError:
                raise ConfigError(
                    f"{what} over TLS: {self.authority} holds no certificate in PEM form; correct"
                    f" tls_ca {where}."
                ) from None
        if self.certificate:
            load_certificate(context, self.certificate, self.key, what, where)
        return context

    def password(self) -> str:
        """The password in its file; ConfigError."""
        path = self.password_file
        try:
            content, status = read_regular(Path(path), _MAX_PASSWORD_BYTES)
        except OSError as error:
            raise ConfigError(
                f"Cannot read the password of etcd in {path}: {error.strerror}. Correct"
                " password_file in [fleet]."
            ) from None
        if is_world_accessible(status.st_mode):
            raise ConfigError(
                f"Cannot use the password of etcd in {path}: other users can read or change it;"
                f" run `chmod 0640 {path}`."
            )
        return content.decode("utf-8", "replace").strip()


class _BrokenError(Exception):
    """An exchange without an answer; ``sent``: the service may have received the request."""

    def __init__(self, cause: str, *, sent: bool) -> None:
        super().__init__(cause)
        self.sent = sent


class _GatewayError(msgspec.Struct):
    """The body of a refusal. ``error`` is a sentence, or in a stream a struct with one."""

    code: int = 0
    error: Any = ""
    message: str = ""


class _Connection:
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
        """One call and its decoded answer; _RefusedError, _BrokenError."""
        try:
            self.send(path, body, headers, deadline)
            status, content = self._response(deadline)
            if status == HTTPStatus.OK:
                return msgspec.json.decode(content, type=answer, strict=False)
        except msgspec.MsgspecError as error:
            raise _BrokenError(f"invalid response ({error})", sent=True) from None
        except (OSError, ValueError, h11.ProtocolError) as error:
            raise _BrokenError(_cause(error), sent=True) from None
        raise _RefusedError(status, content)

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


class JsonStream:
    """The messages of a streaming call, as raw JSON. For one thread."""

    def __init__(self, connection: _Connection, clock: Clock) -> None:
        self._connection, self._clock = connection, clock
        self._received = bytearray()
        self._is_closed = False
        self.endpoint = connection.endpoint

    def next(self, seconds: float) -> bytes | None:
        """The next message, None if there is none within ``seconds``; ConnectionError."""
        deadline = self._clock.monotonic() + max(1_000_000, round(seconds * SECOND))
        if self._is_closed:
            raise ConnectionResetError("it is closed")
        while (end := self._received.find(b"\n")) < 0:
            try:
                event = self._connection.next_event(deadline)
            except TimeoutError:
                return None
            except (OSError, h11.RemoteProtocolError) as error:
                raise ConnectionResetError(_cause(error)) from None
            if isinstance(event, h11.Data):
                self._received += event.data
            elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                raise ConnectionResetError("it ended the stream")
            if len(self._received) > MAX_RESPONSE_BYTES:
                raise ConnectionResetError("its message is too long")
        message = bytes(self._received[:end])
        del self._received[: end + 1]
        return message

    def close(self) -> None:
        self._is_closed = True
        self._connection.close()


class EtcdGateway:
    """Calls of etcd's gateway on the first endpoint that answers. Safe from any thread."""

    def __init__(self, access: EtcdAccess, clock: Clock) -> None:
        self._access, self._clock = access, clock
        self._lock = Lock()
        self._idle: list[_Connection] = []
        self._preferred = 0
        self._token = ""

    def call(
        self, path: str, request: Any, answer: type[Answer], *, repeatable: bool = True
    ) -> Answer:
        """The answer to ``request``, which is sent again elsewhere if it is ``repeatable``.

        KeyError for an unknown lease (its message), CoordinationError.
        """
        body = msgspec.json.encode(request)

        def exchange(connection: _Connection, headers: dict[str, str], deadline: int) -> Answer:
            return connection.post(path, body, headers, deadline, answer)

        return self._try_endpoints(exchange, repeatable=repeatable)

    def stream(self, path: str, request: Any) -> JsonStream:
        """Open a streaming call; CoordinationError."""
        body = msgspec.json.encode(request)

        def open_stream(
            connection: _Connection, headers: dict[str, str], deadline: int
        ) -> JsonStream:
            try:
                connection.detect_silence()
                # A member without a leader ends the stream, instead of staying silent.
                leader = {"grpc-metadata-hasleader": "true"}
                connection.send(path, body, headers | leader, deadline)
                head = connection.next_event(deadline)
            except (OSError, h11.ProtocolError) as error:
                raise _BrokenError(_cause(error), sent=True) from None
            if head.status_code != HTTPStatus.OK:
                raise _RefusedError(head.status_code, b"")
            return JsonStream(connection, self._clock)

        return self._try_endpoints(open_stream, repeatable=True, keep=False)

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    # --------------------------------------------------------------------------- inner workings

    def _try_endpoints(
        self,
        exchange: Callable[[_Connection, dict[str, str], int], Answer],
        *,
        repeatable: bool,
        keep: bool = True,
    ) -> Answer:
        """Divide the time among the endpoints, the last good one first."""
        endpoints, first = self._access.endpoints, self._preferred
        deadline = self._clock.monotonic() + self._access.timeout
        failures: list[str] = []
        for attempt in range(len(endpoints)):
            index = (first + attempt) % len(endpoints)
            now = self._clock.monotonic()
            until = now + max(0, deadline - now) // (len(endpoints) - attempt)
            try:
                answer = self._at(endpoints[index], exchange, until, keep)
            except (ConfigError, AccessError) as error:
                raise PermissionDeniedError(str(error)) from None
            except _BrokenError as error:
                failures.append(f"{endpoints[index]}: {error}")
                if error.sent and not repeatable:
                    raise OutcomeUnknownError(
                        f"etcd at {failures[-1]}. The change may have been made; it is read"
                        " before the next."
                    ) from None
            else:
                self._preferred = index
                return answer
        raise UnreachableError(
            f"No etcd member decides: {'; '.join(failures)}. Check that a majority of the members"
            " runs and that [fleet] endpoints names them; the call is retried."
        )

    def _at(
        self,
        endpoint: EtcdEndpoint,
        exchange: Callable[[_Connection, dict[str, str], int], Answer],
        deadline: int,
        keep: bool,
    ) -> Answer:
        """Exchange at one endpoint, with a new token if the present one is not accepted."""
        token = self._token or (self._authenticate(endpoint, deadline) if self._access.user else "")
        try:
            return self._exchange(endpoint, exchange, token, deadline, keep)
        except _RefusedError as refusal:
            if not (self._access.user and refusal.is_of_token):
                raise refusal.at(endpoint) from None
        token = self._authenticate(endpoint, deadline)
        try:
            return self._exchange(endpoint, exchange, token, deadline, keep)
        except _RefusedError as refusal:
            raise refusal.at(endpoint) from None

    def _authenticate(self, endpoint: EtcdEndpoint, deadline: int) -> str:
        body = msgspec.json.encode({"name": self._access.user, "password": self._access.password()})

        def exchange(connection: _Connection, headers: dict[str, str], deadline: int) -> str:
            path = "/v3/auth/authenticate"
            return connection.post(path, body, headers, deadline, _TokenAnswer).token

        try:
            self._token = self._exchange(endpoint, exchange, "", deadline, keep=True)
        except _BrokenError as error:
            raise _BrokenError(str(error), sent=False) from None
        except _RefusedError as refusal:
            if "authentication is not enabled" in refusal.sentence:
                return ""  # users are named before authentication is enabled
            raise refusal.at(endpoint) from None
        return self._token

    def _exchange(
        self,
        endpoint: EtcdEndpoint,
        exchange: Callable[[_Connection, dict[str, str], int], Answer],
        token: str,
        deadline: int,
        keep: bool,
    ) -> Answer:
        headers = {"authorization": token} if token else {}
        with self._connection(endpoint, deadline, keep) as connection:
            return exchange(connection, headers, deadline)

    @contextmanager
    def _connection(
        self, endpoint: EtcdEndpoint, deadline: int, keep: bool
    ) -> Iterator[_Connection]:
        connection = self._kept(endpoint) if keep else None
        if connection is None:
            try:
                connection = _Connection(endpoint, self._access.tls_context, self._clock, deadline)
            except OSError as error:
                raise _BrokenError(_cause(error), sent=False) from None
        try:
            yield connection
        except _RefusedError:
            self._keep(connection)
            raise
        except BaseException:
            connection.close()
            raise
        if keep:
            self._keep(connection)

    def _kept(self, endpoint: EtcdEndpoint) -> _Connection | None:
        with self._lock:
            for connection in self._idle:
                if connection.endpoint == endpoint:
                    self._idle.remove(connection)
                    break
            else:
                return None
        if connection.is_fresh:
            return connection
        connection.close()
        return None

    def _keep(self, connection: _Connection) -> None:
        with suppress(h11.ProtocolError):
            if connection.reuse():
                with self._lock:
                    if len(self._idle) < _MAX_IDLE:
                        self._idle.append(connection)
                        return
        connection.close()


class _TokenAnswer(msgspec.Struct):
    token: str = ""


class _RefusedError(Exception):
    """An answer other than success."""

    def __init__(self, status: int, content: bytes) -> None:
        code, sentence = 0, ""
        with suppress(msgspec.MsgspecError):
            sent = msgspec.json.decode(content, type=_GatewayError)
            code, sentence = sent.code, sent.message or str(sent.error)
        self.code = code
        self.sentence = printable(sentence or f"HTTP status {status}")[:200]
        super().__init__(self.sentence)

    @property
    def is_of_token(self) -> bool:
        return self.code == GrpcStatus.UNAUTHENTICATED or any(
            one in self.sentence for one in _TOKEN_ERRORS
        )

    def at(self, endpoint: EtcdEndpoint) -> Exception:
        """The error of a refusal by ``endpoint``."""
        cause = self.sentence.removeprefix("etcdserver: ")
        if self.code == GrpcStatus.NOT_FOUND:
            return KeyError(cause)
        if self.is_of_token or "authentication failed" in cause:
            return PermissionDeniedError(
                f"etcd at {endpoint} rejects the credentials: {cause}. Correct user and"
                " password_file in [fleet]."
            )
        if self.code == GrpcStatus.PERMISSION_DENIED:
            return PermissionDeniedError(
                f"etcd at {endpoint} rejects the request: {cause}. Grant the user of [fleet] a"
                " role with readwrite permission for the prefix of the fleet."
            )
        if self.code in _FINAL:
            return CoordinationError(f"etcd at {endpoint} refuses the request: {cause}.")
        is_unsent = _NO_LEADER in cause or self.code == GrpcStatus.RESOURCE_EXHAUSTED
        return _BrokenError(cause, sent=not is_unsent)


def _cause(error: Exception) -> str:
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
