"""coordination.Coordination on etcd's v3 API, over its gRPC gateway (HTTP and JSON).

Names and meanings of messages: etcd's `rpc.proto`, versions 3.4 and later, which serve the gateway
at `/v3`. Reads are linearizable, etcd's default. Keys and values are base64, 64-bit numbers are
decimal strings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

import h11
import msgspec

from wattspan.config import FleetSettings
from wattspan.config.tables import EtcdEndpoint, parse_endpoint
from wattspan.fleet.coordination import (
    ConflictError,
    CoordinationError,
    KeyChange,
    KeyWrite,
    LeaseEndedError,
    OutcomeUnknownError,
    PermissionDeniedError,
    PrefixState,
    RevisionCondition,
    StoredKey,
    UnreachableError,
    WatchEndedError,
    check_commit,
)
from wattspan.fleet.http_client import (
    MAX_RESPONSE_BYTES,
    Answer,
    BrokenExchangeError,
    MemberConnection,
    RefusedCallError,
    describe_failure,
)
from wattspan.http.access_policy import AccessError, client_tls, is_world_accessible
from wattspan.model import MILLISECOND, SECOND
from wattspan.ports import Clock, ConfigError
from wattspan.util.encoding import GrpcStatus
from wattspan.util.files import read_regular

if TYPE_CHECKING:
    import ssl


_MAX_PASSWORD_BYTES: Final = 4096


# ----------------------------------------------------------------------------------------- gateway


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


_Exchange = Callable[[MemberConnection, dict[str, str], int], Answer]
"""A call on a connection with these headers, until a deadline."""


class EtcdGateway:
    """Calls of etcd's gateway on the first endpoint that answers. Safe from any thread.

    The files of the settings are read at each use.
    """

    def __init__(self, settings: FleetSettings, clock: Clock) -> None:
        self._settings, self._clock = settings, clock
        self._endpoints = tuple(map(parse_endpoint, settings.endpoints))
        self._lock = Lock()
        self._idle: list[MemberConnection] = []
        self._preferred = 0
        self._token = ""

    def call(
        self, path: str, request: Any, answer: type[Answer], *, repeatable: bool = True
    ) -> Answer:
        """The answer to ``request``, which is sent again elsewhere if it is ``repeatable``.

        KeyError for an unknown lease (its message), CoordinationError.
        """
        return self._try_endpoints(_posted(path, request, answer), repeatable=repeatable)

    def stream(self, path: str, request: Any) -> MemberConnection:
        """A connection of its own with the answers to ``request``; CoordinationError."""
        body = msgspec.json.encode(request)

        def open_stream(
            connection: MemberConnection, headers: dict[str, str], deadline: int
        ) -> MemberConnection:
            try:
                connection.detect_silence()
                # A member without a leader ends the stream, instead of staying silent.
                leader = {"grpc-metadata-hasleader": "true"}
                connection.send(path, body, headers | leader, deadline)
                head = connection.next_event(deadline)
            except (OSError, h11.ProtocolError) as error:
                raise BrokenExchangeError(describe_failure(error), sent=True) from None
            if head.status_code != HTTPStatus.OK:
                raise RefusedCallError(head.status_code, b"")
            return connection

        return self._try_endpoints(open_stream, repeatable=True, keep=False)

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    # --------------------------------------------------------------------------- inner workings

    def _try_endpoints(
        self, exchange: _Exchange[Answer], *, repeatable: bool, keep: bool = True
    ) -> Answer:
        """Divide the time among the endpoints, the last good one first."""
        endpoints, first = self._endpoints, self._preferred
        deadline = self._clock.monotonic() + self._settings.call_timeout
        causes: dict[EtcdEndpoint, str] = {}
        for attempt in range(len(endpoints)):
            index = (first + attempt) % len(endpoints)
            now = self._clock.monotonic()
            until = now + max(0, deadline - now) // (len(endpoints) - attempt)
            try:
                answer = self._at(endpoints[index], exchange, until, keep)
            except (ConfigError, AccessError) as error:
                raise PermissionDeniedError(str(error)) from None
            except BrokenExchangeError as error:
                causes[endpoints[index]] = str(error)
                if error.sent and not repeatable:
                    raise OutcomeUnknownError(
                        f"etcd at {endpoints[index]}: {error}. The change may have been made; it"
                        " is read before the next."
                    ) from None
            else:
                self._preferred = index
                return answer
        failures = "; ".join(f"{endpoint}: {cause}" for endpoint, cause in causes.items())
        raise UnreachableError(
            f"No etcd member decides: {failures}. Check that a majority of the members runs and"
            " that [fleet] endpoints names them; the call is retried.",
            tuple(causes.values()),
        )

    def _at(
        self, endpoint: EtcdEndpoint, exchange: _Exchange[Answer], deadline: int, keep: bool
    ) -> Answer:
        """Exchange at one endpoint, with a new token if the present one is not accepted."""
        has_user = bool(self._settings.user)
        token = self._token or (self._authenticate(endpoint, deadline) if has_user else "")
        try:
            return self._exchange(endpoint, exchange, token, deadline, keep)
        except RefusedCallError as refusal:
            if not (has_user and _is_of_token(refusal)):
                raise _error_of(refusal, endpoint) from None
        token = self._authenticate(endpoint, deadline)
        try:
            return self._exchange(endpoint, exchange, token, deadline, keep)
        except RefusedCallError as refusal:
            raise _error_of(refusal, endpoint) from None

    def _authenticate(self, endpoint: EtcdEndpoint, deadline: int) -> str:
        user = {"name": self._settings.user, "password": self._password()}
        exchange = _posted("/v3/auth/authenticate", user, _TokenAnswer)
        try:
            self._token = self._exchange(endpoint, exchange, "", deadline, keep=True).token
        except BrokenExchangeError as error:
            raise BrokenExchangeError(str(error), sent=False) from None
        except RefusedCallError as refusal:
            if "authentication is not enabled" in refusal.sentence:
                return ""  # users are named before authentication is enabled
            raise _error_of(refusal, endpoint) from None
        return self._token

    def _exchange(
        self,
        endpoint: EtcdEndpoint,
        exchange: _Exchange[Answer],
        token: str,
        deadline: int,
        keep: bool,
    ) -> Answer:
        connection = (self._kept(endpoint) if keep else None) or self._opened(endpoint, deadline)
        try:
            answer = exchange(connection, {"authorization": token} if token else {}, deadline)
        except RefusedCallError:
            self._keep(connection)
            raise
        except BaseException:
            connection.close()
            raise
        if keep:
            self._keep(connection)
        return answer

    def _opened(self, endpoint: EtcdEndpoint, deadline: int) -> MemberConnection:
        try:
            return MemberConnection(endpoint, self._tls_context, self._clock, deadline)
        except OSError as error:
            raise BrokenExchangeError(describe_failure(error), sent=False) from None

    def _kept(self, endpoint: EtcdEndpoint) -> MemberConnection | None:
        with self._lock:
            connection = next((one for one in self._idle if one.endpoint == endpoint), None)
            if connection is None:
                return None
            self._idle.remove(connection)
        if connection.is_fresh:
            return connection
        connection.close()
        return None

    def _keep(self, connection: MemberConnection) -> None:
        with suppress(h11.ProtocolError):
            if connection.reuse():
                with self._lock:
                    if len(self._idle) < _MAX_IDLE:
                        self._idle.append(connection)
                        return
        connection.close()

    def _tls_context(self) -> ssl.SSLContext:
        """AccessError if a file is unreadable or invalid."""
        settings = self._settings
        files = settings.tls_ca, settings.tls_certificate, settings.tls_key
        return client_tls(*files, what="Cannot reach etcd", where="in [fleet]")

    def _password(self) -> str:
        """The password in its file; ConfigError."""
        path = self._settings.password_file
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


def _posted(path: str, request: Any, answer: type[Answer]) -> _Exchange[Answer]:
    """The exchange of one request for one answer."""
    body = msgspec.json.encode(request)
    return lambda connection, headers, deadline: connection.post(
        path, body, headers, deadline, answer
    )


class _TokenAnswer(msgspec.Struct):
    token: str = ""


def _is_of_token(refusal: RefusedCallError) -> bool:
    return refusal.code == GrpcStatus.UNAUTHENTICATED or any(
        one in refusal.sentence for one in _TOKEN_ERRORS
    )


def _error_of(refusal: RefusedCallError, endpoint: EtcdEndpoint) -> Exception:
    """The error of a refusal by ``endpoint``."""
    cause = refusal.sentence.removeprefix("etcdserver: ")
    if refusal.code == GrpcStatus.NOT_FOUND:
        return KeyError(cause)
    if _is_of_token(refusal) or "authentication failed" in cause:
        return PermissionDeniedError(
            f"etcd at {endpoint} rejects the credentials: {cause}. Correct user and"
            " password_file in [fleet]."
        )
    if refusal.code == GrpcStatus.PERMISSION_DENIED:
        return PermissionDeniedError(
            f"etcd at {endpoint} rejects the request: {cause}. Grant the user of [fleet] a"
            " role with readwrite permission for the prefix of the fleet."
        )
    if refusal.code in _FINAL:
        return CoordinationError(f"etcd at {endpoint} refuses the request: {cause}.")
    is_unsent = _NO_LEADER in cause or refusal.code == GrpcStatus.RESOURCE_EXHAUSTED
    return BrokenExchangeError(cause, sent=not is_unsent)


# ------------------------------------------------------------------------------------ coordination


_ALL = b"\x00"
"""As a key, the first of all keys; as the end of a range, after the last one."""


class _ResponseHeader(msgspec.Struct):
    revision: int = 0


class _StoredPair(msgspec.Struct):
    key: bytes = b""
    value: bytes = b""
    mod_revision: int = 0
    lease: int = 0


class _KeysAnswer(msgspec.Struct):
    """The answer to a read or a commit, or to the end of a lease."""

    header: _ResponseHeader
    kvs: list[_StoredPair] = []
    succeeded: bool = False


class _GrantAnswer(msgspec.Struct):
    id: int = msgspec.field(name="ID")


class _Renewal(msgspec.Struct):
    ttl: int = msgspec.field(name="TTL", default=0)


class _RenewAnswer(msgspec.Struct):
    result: _Renewal


class _WatchEvent(msgspec.Struct):
    kv: _StoredPair
    type: str = "PUT"


class _WatchResult(msgspec.Struct):
    created: bool = False
    canceled: bool = False
    compact_revision: int = 0
    cancel_reason: str = ""
    events: list[_WatchEvent] = []


class _WatchAnswer(msgspec.Struct):
    result: _WatchResult | None = None
    error: Any = None


_WATCH_DECODER = msgspec.json.Decoder(_WatchAnswer, strict=False)


class EtcdCoordination:
    """A client of an etcd cluster. Safe from any thread."""

    def __init__(self, settings: FleetSettings, clock: Clock) -> None:
        self._gateway, self._clock = EtcdGateway(settings, clock), clock

    def read(self, prefix: str) -> PrefixState:
        answer = self._gateway.call("/v3/kv/range", _range_of(prefix), _KeysAnswer)
        return PrefixState(tuple(map(_stored, answer.kvs)), answer.header.revision)

    def commit(
        self, writes: Sequence[KeyWrite], conditions: Sequence[RevisionCondition] = ()
    ) -> int:
        check_commit(writes, conditions)
        request = {
            "compare": [
                {
                    "key": condition.key.encode(),
                    "target": "MOD",
                    "result": "EQUAL",
                    "mod_revision": str(condition.revision),
                }
                for condition in conditions
            ],
            "success": list(map(_operation, writes)),
        }
        try:
            answer = self._gateway.call("/v3/kv/txn", request, _KeysAnswer, repeatable=False)
        except KeyError as error:
            raise LeaseEndedError(f"etcd refuses a key: {error.args[0]}.") from None
        if not answer.succeeded:
            keys = ", ".join(condition.key for condition in conditions)
            raise ConflictError(f"One of {keys} was changed by another participant.")
        return answer.header.revision

    def grant(self, seconds: int) -> int:
        return self._gateway.call("/v3/lease/grant", {"TTL": str(seconds)}, _GrantAnswer).id

    def renew(self, lease: int) -> None:
        answer = self._gateway.call("/v3/lease/keepalive", {"ID": str(lease)}, _RenewAnswer)
        if answer.result.ttl <= 0:
            raise LeaseEndedError(f"Lease {lease:x} has ended.")

    def revoke(self, lease: int) -> None:
        with suppress(KeyError):  # it has ended
            self._gateway.call("/v3/lease/revoke", {"ID": str(lease)}, _KeysAnswer)

    def watch(self, prefix: str, after: int) -> EtcdChanges:
        create = _range_of(prefix) | {"start_revision": str(after + 1)}
        connection = self._gateway.stream("/v3/watch", {"create_request": create})
        return EtcdChanges(connection, self._clock)

    def close(self) -> None:
        self._gateway.close()


class EtcdChanges:
    """The changes of a prefix in an etcd cluster: a stream of lines of JSON. For one thread."""

    def __init__(self, connection: MemberConnection, clock: Clock) -> None:
        self._connection, self._clock = connection, clock
        self._received = bytearray()
        self._is_closed = False

    def wait(self, seconds: float) -> tuple[KeyChange, ...]:
        deadline = self._clock.monotonic() + max(MILLISECOND, round(seconds * SECOND))
        try:
            while True:
                if changes := self._changes(self._line(deadline)):
                    return changes
        except TimeoutError:
            return ()
        except (OSError, h11.RemoteProtocolError, ValueError, RecursionError) as error:
            self.close()
            endpoint, cause = self._connection.endpoint, describe_failure(error)
            raise WatchEndedError(
                f"The changes of etcd at {endpoint} ended: {cause}. They are read again."
            ) from None

    def close(self) -> None:
        self._is_closed = True
        self._connection.close()

    # --------------------------------------------------------------------------- inner workings

    def _line(self, deadline: int) -> bytes:
        """The next message. TimeoutError; ConnectionResetError once the stream has ended."""
        if self._is_closed:
            raise ConnectionResetError("it is closed")
        while (end := self._received.find(b"\n")) < 0:
            event = self._connection.next_event(deadline)
            if not isinstance(event, h11.Data):
                raise ConnectionResetError("it ended the stream")
            self._received += event.data
            if len(self._received) > MAX_RESPONSE_BYTES:
                raise ConnectionResetError("its message is too long")
        message = bytes(self._received[:end])
        del self._received[: end + 1]
        return message

    def _changes(self, message: bytes) -> tuple[KeyChange, ...]:
        """The changes in a message; ValueError if it ends the watch."""
        answer = _WATCH_DECODER.decode(message)
        result = answer.result
        if result is None:
            raise ValueError(f"it refuses ({answer.error})")
        if result.compact_revision:
            raise ValueError(f"changes before {result.compact_revision} are forgotten")
        if result.canceled:
            raise ValueError(result.cancel_reason or "it ended the watch")
        return tuple(map(_change, result.events))


def _range_of(prefix: str) -> dict[str, bytes]:
    """The request for all keys that begin with ``prefix``."""
    first = prefix.encode()
    if not first:
        return {"key": _ALL, "range_end": _ALL}
    return {"key": first, "range_end": first[:-1] + bytes([first[-1] + 1])}  # UTF-8 has no 0xff


def _operation(write: KeyWrite) -> dict[str, Any]:
    key = write.key.encode()
    if write.value is None:
        return {"request_delete_range": {"key": key}}
    return {"request_put": {"key": key, "value": write.value, "lease": str(write.lease)}}


def _stored(sent: _StoredPair) -> StoredKey:
    key = sent.key.decode("utf-8", "replace")
    return StoredKey(key, sent.value, sent.mod_revision, sent.lease)


def _change(event: _WatchEvent) -> KeyChange:
    stored = _stored(event.kv)
    return KeyChange(stored.key, None if event.type == "DELETE" else stored, stored.revision)
