"""Clients of a running agent's TCP listeners: credentials, recognition and ``GET /v1/snapshot``."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

import msgspec

from wattspan.api.snapshot_document import (
    SNAPSHOT_PATH,
    SnapshotDocument,
    SnapshotSchemaError,
    decode_snapshot,
)
from wattspan.config import AccessSettings
from wattspan.model.settings import Listen
from wattspan.ports import Clock, WattspanError
from wattspan.sdk import MeasurementError
from wattspan.sdk.client import request_json
from wattspan.util.files import read_regular

LOCAL_TIMEOUT = 1.0  # seconds
SNAPSHOT_TIMEOUT = 5.0  # seconds
MAX_BODY_BYTES = 64 * 2**20


class AgentReadError(WattspanError):
    """The snapshot of an agent cannot be read."""


# --------------------------------------------------------------------------------- credentials


@dataclass(frozen=True, slots=True)
class AgentCredentials:
    """A bearer token, and a TLS context that trusts the agent's certificate only."""

    token: str = ""
    context: ssl.SSLContext | None = None


def credentials_for(settings: AccessSettings | None) -> AgentCredentials:
    """The credentials in the files that ``settings`` name, where this user may read them."""
    if settings is None:
        return AgentCredentials()
    certificate = settings.tls_certificate and _first_certificate(settings.tls_certificate)
    context = _pinned_context(certificate) if certificate else None
    return AgentCredentials(_first_token(settings.token_file), context)


def _pinned_context(certificate: str) -> ssl.SSLContext | None:
    """A context that accepts this one certificate, for any host name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        context.load_verify_locations(cadata=certificate)
    except ssl.SSLError:
        return None
    return context


def _first_certificate(path: str) -> str:
    """The first certificate of a file, the server's own; "" if it cannot be read."""
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    _, _, rest = _read_text(path).partition(begin)
    body, found, _ = rest.partition(end)
    return f"{begin}{body}{end}\n" if found else ""


def _first_token(path: str) -> str:
    lines = (line.strip() for line in _read_text(path).splitlines())
    return next((line for line in lines if line and not line.startswith("#")), "")


def _read_text(path: str) -> str:
    try:
        return read_regular(path).content.decode("ascii") if path else ""
    except (OSError, UnicodeDecodeError):
        return ""


# --------------------------------------------------------------------------------- recognition


def is_local_agent(listen: Listen, settings: AccessSettings) -> bool:
    """True if an agent with ``settings`` listens there, by its certificate or its answer."""
    if settings.tls_certificate:
        return _has_certificate(listen, credentials_for(settings).context)
    connection = http.client.HTTPConnection(
        listen.host or "localhost", listen.port, timeout=LOCAL_TIMEOUT
    )
    try:
        connection.request("GET", "/v1/metrics")  # receivers of spans name themselves there
        answer = connection.getresponse()
        body = answer.read(256)
        named = answer.getheader("Server", "").startswith("wattspan/")
        return named or body.startswith((b"wattspan ", b"A token of the agent's"))
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _has_certificate(listen: Listen, context: ssl.SSLContext | None) -> bool:
    """A listener that requires a client certificate shows its own before it rejects a client."""
    if context is None:
        return False
    address = (listen.host or "localhost", listen.port)
    try:
        with socket.create_connection(address, LOCAL_TIMEOUT) as plain, context.wrap_socket(plain):
            return True
    except OSError:
        return False


# ----------------------------------------------------------------------------------- snapshots

Fetch = Callable[[str], bytes]
"""The body of a URL; AgentReadError."""


class SnapshotClient:
    """Reads an agent's snapshot at each call.

    The first call raises AgentReadError if the agent does not answer. A later one returns the
    last snapshot, and ``notice`` holds the error and the snapshot's age.
    """

    def __init__(self, address: str, clock: Clock, fetch: Fetch) -> None:
        """``address``: ``host:port`` or a URL, with or without ``/metrics``."""
        self._url = _snapshot_url(address)
        self._clock, self._fetch = clock, fetch
        self._last: SnapshotDocument | None = None
        self.notice = ""

    def __call__(self) -> SnapshotDocument:
        try:
            self._last = self._read()
        except AgentReadError as error:
            if self._last is None:
                raise
            age = (self._clock.now().wall - self._last.at_unix_ns) // 10**9
            self.notice = f"{error} These figures are {age} s old."
        else:
            self.notice = ""
        return self._last

    def _read(self) -> SnapshotDocument:
        try:
            return decode_snapshot(self._fetch(self._url))
        except SnapshotSchemaError as error:
            raise AgentReadError(
                f"Cannot use the answer of {self._url}: {error}. "
                "Check the address, and use the same release of wattspan at both ends."
            ) from None


def _snapshot_url(address: str) -> str:
    url = address if "://" in address else f"http://{address}"
    return url.rstrip("/").removesuffix("/metrics").removesuffix(SNAPSHOT_PATH) + SNAPSHOT_PATH


def http_fetch(credentials: AgentCredentials) -> Fetch:
    """Fetches URLs over HTTP or HTTPS with ``credentials``."""
    # Agents are on this host or near it: the proxy of the environment is not used.
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if credentials.context is not None:
        handlers.append(urllib.request.HTTPSHandler(context=credentials.context))
    opener = urllib.request.build_opener(*handlers)

    def fetch(url: str) -> bytes:
        if not url.startswith(("http://", "https://")):
            raise AgentReadError(f"Cannot read {url}: not an http or https address.")
        try:
            request = urllib.request.Request(url)  # noqa: S310 - the scheme is checked above
            if credentials.token:
                request.add_unredirected_header("Authorization", f"Bearer {credentials.token}")
            with opener.open(request, timeout=SNAPSHOT_TIMEOUT) as answer:
                body: bytes = answer.read(MAX_BODY_BYTES + 1)
        except (http.client.HTTPException, OSError, ValueError) as error:
            remedy = _REMEDIES.get(getattr(error, "code", 0), _REMEDY)
            raise AgentReadError(f"Cannot read {url}: {_cause(error)}. {remedy}") from None
        if len(body) > MAX_BODY_BYTES:
            raise AgentReadError(f"Cannot read {url}: it answers more than 64 MiB.")
        return body

    return fetch


def fetch_with_fallback(fetch: Fetch, directories: tuple[str, ...]) -> Fetch:
    """``fetch``, and the agent's Unix socket for a snapshot that this user may not read by it.

    Raises the error of ``fetch`` if no agent answers on a socket in ``directories`` either.
    """

    def fetch_either(url: str) -> bytes:
        try:
            return fetch(url)
        except AgentReadError:
            with contextlib.suppress(MeasurementError):
                facts = request_json(
                    SNAPSHOT_PATH, {}, patience=SNAPSHOT_TIMEOUT, directories=directories
                )
                return msgspec.json.encode(facts)
            raise

    return fetch_either


_REMEDY = "Start the agent with `wattspan run`, or name the address of a running one: --address."
_REMEDIES: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "It requires a token: run this as a user who may read token_file.",
    HTTPStatus.NOT_FOUND: "Check that it is an agent, of this release of wattspan or a later one.",
}


def _cause(error: Exception) -> str:
    reason = getattr(error, "reason", None) or error
    if isinstance(reason, TimeoutError):
        return f"no answer within {SNAPSHOT_TIMEOUT:.0f} s"
    if isinstance(error, urllib.error.HTTPError):
        return f"it answers {error.code} {error.reason}"
    text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
    return str(text[:1].lower() + text[1:])
