"""The way to this host's own agent, behind whatever its listeners ask for."""

from __future__ import annotations

import http.client
import socket
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wattspan.util.files import read_regular

if TYPE_CHECKING:
    from wattspan.config.access import AccessSettings
    from wattspan.model.settings import Listen

TIMEOUT = 1.0  # seconds
_END = "-----END CERTIFICATE-----"


@dataclass(frozen=True, slots=True)
class AgentCredentials:
    """What gets a local client in: a token, and the one certificate that is believed."""

    token: str = ""
    context: ssl.SSLContext | None = None


def credentials_for(settings: AccessSettings | None) -> AgentCredentials:
    """What ``settings`` ask of a client, as far as this user may read it."""
    if settings is None:
        return AgentCredentials()
    certificate = settings.tls_certificate and _own_certificate(settings.tls_certificate)
    context = _pinned_context(certificate) if certificate else None
    return AgentCredentials(_first_token(settings.token_file), context)


def is_local_agent(listen: Listen, settings: AccessSettings) -> bool:
    """Whether this host's agent has that port: it shows its certificate, or says who it is."""
    if settings.tls_certificate:
        return _shows_certificate(listen, settings.tls_certificate)
    connection = http.client.HTTPConnection(_connect_host(listen), listen.port, timeout=TIMEOUT)
    try:
        connection.request("GET", "/v1/metrics")  # the receivers of spans tell there who they are
        answer = connection.getresponse()
        body = answer.read(256)
        named = answer.getheader("Server", "").startswith("wattspan/")
        return named or body.startswith((b"wattspan ", b"A token of the agent's"))
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _shows_certificate(listen: Listen, path: str) -> bool:
    """A listener that wants a client's certificate tells us its own before it turns us away."""
    expected = _own_certificate(path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection((_connect_host(listen), listen.port), TIMEOUT) as plain,
            context.wrap_socket(plain) as secure,
        ):
            shown = secure.getpeercert(binary_form=True)
        return bool(expected) and shown == ssl.PEM_cert_to_DER_cert(expected)
    except (OSError, ValueError):
        return False


def _connect_host(listen: Listen) -> str:
    return listen.host or "localhost"


def _pinned_context(certificate: str) -> ssl.SSLContext | None:
    """A context for which this is the only certificate there is, by whatever name it is shown."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        context.load_verify_locations(cadata=certificate)
    except ssl.SSLError:
        return None
    return context


def _own_certificate(path: str) -> str:
    """The first certificate of a file, which is the server's own; "" if it cannot be had."""
    _, _, rest = _read_text(path).partition("-----BEGIN CERTIFICATE-----")
    body, end, _ = rest.partition(_END)
    return f"-----BEGIN CERTIFICATE-----{body}{end}\n" if end else ""


def _first_token(path: str) -> str:
    lines = (line.strip() for line in _read_text(path).splitlines())
    return next((line for line in lines if line and not line.startswith("#")), "")


def _read_text(path: str) -> str:
    try:
        return read_regular(path).content.decode("ascii") if path else ""
    except (OSError, UnicodeDecodeError):
        return ""
