"""Calls of etcd's gRPC gateway on any member: time limits, tokens and failover."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from threading import Lock
from typing import Any, Final

import h11
import msgspec

from wattspan.config.fleet import EtcdEndpoint
from wattspan.fleet.access import EtcdAccess
from wattspan.fleet.coordination import (
    CoordinationError,
    OutcomeUnknownError,
    PermissionDeniedError,
    UnreachableError,
)
from wattspan.fleet.http_client import (
    Answer,
    BrokenExchangeError,
    JsonStream,
    MemberConnection,
    RefusedCallError,
    describe_failure,
)
from wattspan.http.access_policy import AccessError
from wattspan.ports import Clock, ConfigError
from wattspan.util.encoding import GrpcStatus

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


class EtcdGateway:
    """Calls of etcd's gateway on the first endpoint that answers. Safe from any thread."""

    def __init__(self, access: EtcdAccess, clock: Clock) -> None:
        self._access, self._clock = access, clock
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
        body = msgspec.json.encode(request)

        def exchange(
            connection: MemberConnection, headers: dict[str, str], deadline: int
        ) -> Answer:
            return connection.post(path, body, headers, deadline, answer)

        return self._try_endpoints(exchange, repeatable=repeatable)

    def stream(self, path: str, request: Any) -> JsonStream:
        """Open a streaming call; CoordinationError."""
        body = msgspec.json.encode(request)

        def open_stream(
            connection: MemberConnection, headers: dict[str, str], deadline: int
        ) -> JsonStream:
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
        exchange: Callable[[MemberConnection, dict[str, str], int], Answer],
        *,
        repeatable: bool,
        keep: bool = True,
    ) -> Answer:
        """Divide the time among the endpoints, the last good one first."""
        endpoints, first = self._access.endpoints, self._preferred
        deadline = self._clock.monotonic() + self._access.timeout
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
        self,
        endpoint: EtcdEndpoint,
        exchange: Callable[[MemberConnection, dict[str, str], int], Answer],
        deadline: int,
        keep: bool,
    ) -> Answer:
        """Exchange at one endpoint, with a new token if the present one is not accepted."""
        token = self._token or (self._authenticate(endpoint, deadline) if self._access.user else "")
        try:
            return self._exchange(endpoint, exchange, token, deadline, keep)
        except RefusedCallError as refusal:
            if not (self._access.user and _is_of_token(refusal)):
                raise _error_of(refusal, endpoint) from None
        token = self._authenticate(endpoint, deadline)
        try:
            return self._exchange(endpoint, exchange, token, deadline, keep)
        except RefusedCallError as refusal:
            raise _error_of(refusal, endpoint) from None

    def _authenticate(self, endpoint: EtcdEndpoint, deadline: int) -> str:
        body = msgspec.json.encode({"name": self._access.user, "password": self._access.password()})

        def exchange(connection: MemberConnection, headers: dict[str, str], deadline: int) -> str:
            path = "/v3/auth/authenticate"
            return connection.post(path, body, headers, deadline, _TokenAnswer).token

        try:
            self._token = self._exchange(endpoint, exchange, "", deadline, keep=True)
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
        exchange: Callable[[MemberConnection, dict[str, str], int], Answer],
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
    ) -> Iterator[MemberConnection]:
        connection = self._kept(endpoint) if keep else None
        if connection is None:
            try:
                connection = MemberConnection(
                    endpoint, self._access.tls_context, self._clock, deadline
                )
            except OSError as error:
                raise BrokenExchangeError(describe_failure(error), sent=False) from None
        try:
            yield connection
        except RefusedCallError:
            self._keep(connection)
            raise
        except BaseException:
            connection.close()
            raise
        if keep:
            self._keep(connection)

    def _kept(self, endpoint: EtcdEndpoint) -> MemberConnection | None:
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

    def _keep(self, connection: MemberConnection) -> None:
        with suppress(h11.ProtocolError):
            if connection.reuse():
                with self._lock:
                    if len(self._idle) < _MAX_IDLE:
                        self._idle.append(connection)
                        return
        connection.close()


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
