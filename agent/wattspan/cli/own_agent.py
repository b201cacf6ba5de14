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

PATIENCE = 1.0  # seconds
_END = "-----END CERTIFICATE-----"


@dataclass(frozen=True, slots=True)
class Pass:
    """What gets a local client in: a token, and the one certificate that is believed."""

    token: str = ""
    context: ssl.SSLContext | None = None


def pass_for(settings: AccessSettings | None) -> Pass:
    """What ``settings`` ask of a client, as far as this user may read it."""
    if settings is None:
        return Pass()
    certificate = settings.tls_certificate and _own_certificate(settings.tls_certificate)
    context = _believing(certificate) if certificate else None
    return Pass(_first_token(settings.token_file), context)


def is_there(listen: Listen, settings: AccessSettings) -> bool:
    """Whether this host's agent has that port: it shows its certificate, or says who it is."""
    if settings.tls_certificate:
        return _shows_certificate(listen, settings.tls_certificate)
    connection = http.client.HTTPConnection(_near(listen), listen.port, timeout=PATIENCE)
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
            socket.create_connection((_near(listen), listen.port), PATIENCE) as plain,
            context.wrap_socket(plain) as secure,
        ):
            shown = secure.getpeercert(binary_form=True)
        return bool(expected) and shown == ssl.PEM_cert_to_DER_cert(expected)
    except (OSError, ValueError):
        return False


def _near(listen: Listen) -> str:
    return listen.host or "localhost"


def _believing(certificate: str) -> ssl.SSLContext | None:
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
    _, _, rest = _text(path).partition("-----BEGIN CERTIFICATE-----")
    body, end, _ = rest.partition(_END)
    return f"-----BEGIN CERTIFICATE-----{body}{end}\n" if end else ""


def _first_token(path: str) -> str:
    lines = (line.strip() for line in _text(path).splitlines())
    return next((line for line in lines if line and not line.startswith("#")), "")


def _text(path: str) -> str:
    try:
        return read_regular(path).content.decode("ascii") if path else ""
    except (OSError, UnicodeDecodeError):
        return ""
