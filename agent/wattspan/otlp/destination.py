"""The signals of OTLP, and the addresses and headers of collectors as operators write them.

The requests of all signals have the same structure and field numbers (resource, scope, items), as
have the responses. Code that treats a request as bytes or counts its items serves every signal.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote, urlsplit

from wattspan.http.access_policy import AccessError, unreadable_error
from wattspan.model import SECOND
from wattspan.model.settings import Listen, quoted
from wattspan.ports import ConfigError
from wattspan.util.files import read_regular

if TYPE_CHECKING:
    from wattspan.config import SpansSettings


class Signal(NamedTuple):
    """One kind of telemetry.

    ``name`` identifies its export in the agent's health, ``things`` is its noun in messages.
    ``path`` and ``method`` belong to OTLP/HTTP and OTLP/gRPC. ``patience`` is the state of items
    while the collector is unavailable, ``loss`` that of items left at the end. A message is
    repeated after ``quiet`` nanoseconds at the earliest. ``address`` and ``headers`` are settings
    in ``table``. After a refusal, nothing is sent for ``refusal_pause`` nanoseconds.
    """

    name: str
    things: str
    path: str
    method: str
    patience: str
    loss: str
    quiet: int
    table: str = "spans"
    address: str = "forward"
    headers: str = "forward_headers"
    verb: str = "forward"
    refusal_pause: int = 0
    refusal_remedy: str = ""

    @property
    def away(self) -> str:
        """The remedy where no collector answers."""
        return f"Is the collector running, and is `{self.address}` its address?"

    @property
    def elsewhere(self) -> str:
        """The remedy where another server answers."""
        return f"Is `{self.address}` the address of an OTLP endpoint?"

    @property
    def credentials(self) -> str:
        return f"Give the collector's credentials in `{self.headers}`."


SPANS = Signal(
    name="forward",
    things="spans",
    path="/v1/traces",
    method="/opentelemetry.proto.collector.trace.v1.TraceService/Export",
    patience="Spans wait meanwhile, within `forward_queue`.",
    loss="[spans] forward_spool = true keeps them on disk over a restart.",
    quiet=600 * SECOND,
)

LOGS = Signal(
    name="forward_logs",
    things="log records",
    path="/v1/logs",
    method="/opentelemetry.proto.collector.logs.v1.LogsService/Export",
    patience="The newest wait meanwhile.",
    loss="the agent's history of decisions and the capper's audit log have them.",
    quiet=3600 * SECOND,
    refusal_pause=3600 * SECOND,  # many collectors accept spans only and always refuse
    refusal_remedy="If it takes no logs, [spans] forward_decisions = false sends none.",
)

METRICS = Signal(
    name="otlp",
    things="metrics",
    path="/v1/metrics",
    method="/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
    patience="The newest are pushed as soon as they can be, and no total is lost.",
    loss="the next run goes on with the same totals.",
    quiet=600 * SECOND,
    table="exporters.otlp",
    address="endpoint",
    headers="headers",
    verb="push",
)

ADDRESS_FORMATS = (
    '"http://HOST:4318", "https://HOST", "unix:///PATH", "grpc://HOST:4317", "grpcs://HOST" or '
    '"grpc+unix:///PATH"'
)

_SCHEMES = {  # grpc?, tls?, unix?, port
    "http": (False, False, False, 80),
    "https": (False, True, False, 443),
    "unix": (False, False, True, None),
    "http+unix": (False, False, True, None),
    "grpc": (True, False, False, 4317),
    "grpcs": (True, True, False, 443),
    "grpc+unix": (True, False, True, None),
}

_RESERVED_HEADERS = {
    *("content-type", "content-length", "content-encoding", "transfer-encoding"),
    *("connection", "host"),
}


class OtlpProtocol(Enum):
    HTTP = "OTLP/HTTP"
    GRPC = "OTLP/gRPC"


@dataclass(frozen=True, slots=True)
class Destination:
    """The address of a collector. ``target`` is the path and query of HTTP requests."""

    protocol: OtlpProtocol
    tls: bool = False
    host: str = ""
    port: int = 0
    target: str = SPANS.path
    socket: str = ""  # a Unix socket in place of host and port
    signal: Signal = SPANS

    @property
    def is_local(self) -> bool:
        """True if the address is local, where compression has no benefit."""
        return bool(self.socket) or Listen(Listen.written(self.host, 1)).loopback

    def __str__(self) -> str:
        """The address without the query, which may contain a secret."""
        grpc = self.protocol is OtlpProtocol.GRPC
        if self.socket:
            return f"{'grpc+' if grpc else ''}unix://{self.socket}"
        scheme = ("grpc" if grpc else "http") + "s" * self.tls
        path = "" if grpc else self.target.partition("?")[0]
        return f"{scheme}://{Listen.written(self.host, self.port)}{path}"


def parse_destination(url: str, signal: Signal = SPANS) -> Destination:
    """The address of a setting; ConfigError names the accepted forms."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise _invalid_address(url, str(error), signal) from None
    if parts.scheme not in _SCHEMES:
        raise _invalid_address(url, "it names no known protocol", signal)
    grpc, tls, unix, usual = _SCHEMES[parts.scheme]
    protocol = OtlpProtocol.GRPC if grpc else OtlpProtocol.HTTP
    if "@" in parts.netloc:
        raise ConfigError(
            f"[{signal.table}] {signal.address} holds a user name or a password, and addresses are "
            f"not secret; put them into {signal.headers}, as authorization=Basic%20..."
        )
    if parts.fragment or not url.isascii() or not url.isprintable() or " " in url:
        raise _invalid_address(url, "it has characters that an address cannot have", signal)
    if unix:
        if parts.netloc or not parts.path.startswith("/") or parts.query:
            raise _invalid_address(
                url, "a socket is written with three slashes and its whole path", signal
            )
        return Destination(protocol, target=signal.path, socket=unquote(parts.path), signal=signal)
    if not parts.hostname:
        raise _invalid_address(url, "it names no host", signal)
    if grpc and (parts.path not in ("", "/") or parts.query):
        raise _invalid_address(url, "OTLP/gRPC has no path", signal)
    if port == 0:
        raise _invalid_address(url, "nothing listens on port 0", signal)
    return Destination(
        protocol,
        tls,
        parts.hostname,
        port or usual or 0,
        _target(parts.path, parts.query, signal),
        signal=signal,
    )


def as_grpc(url: str) -> str:
    """The same address with the protocol gRPC."""
    return f"grpc{url.removeprefix('http')}" if url.startswith(("http:", "https:")) else url


def _target(path: str, query: str, signal: Signal) -> str:
    """The path of a base endpoint with the path of the signal appended, as OTLP specifies.

    In an address with the path of spans, the path of another signal replaces it.
    """
    whole = path.rstrip("/").removesuffix(SPANS.path) + signal.path
    return f"{whole}?{query}" if query else whole


def _invalid_address(url: str, cause: str, signal: Signal) -> ConfigError:
    shown = re.sub(r"//[^/@]*@", "//...@", url.partition("?")[0])
    return ConfigError(
        f"[{signal.table}] {signal.address} = {quoted(shown)} cannot be: {cause}; "
        f"write {ADDRESS_FORMATS}."
    )


def parse_headers(text: str, signal: Signal = SPANS) -> dict[str, str]:
    """The headers of a setting, names in lower case.

    The form is that of OTEL_EXPORTER_OTLP_HEADERS: percent-encoded pairs, separated by commas.
    ConfigError never shows a value, which is usually a secret.
    """
    headers: dict[str, str] = {}
    for number, pair in enumerate(text.split(","), start=1):
        if not pair.strip():
            continue
        name, equals, value = (part.strip() for part in pair.partition("="))
        name, value = unquote(name).lower() if equals else "", unquote(value)
        if fault := header_error(name, value, "name=value"):
            raise ConfigError(f"[{signal.table}] {signal.headers}, pair {number}: {fault}.")
        headers[name] = value
    return headers


def header_error(name: str, value: str, form: str) -> str:
    """The reason why a header is invalid, "" if it is valid; ``form`` is the expected form.

    The reason shows neither a value nor an invalid name, which may be a value.
    """
    if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9a-z-]+", name):
        return f"it is not of the form {quoted(form)}"
    if name in _RESERVED_HEADERS or name.startswith("grpc-"):
        return f"{quoted(name)} is a header of the protocol itself"
    if not (value.isascii() and value.isprintable()):
        return f"the value of {quoted(name)} holds characters that a header cannot have"
    return ""


def read_headers(path: str, setting: str, where: str) -> dict[str, str]:
    """The headers of a file with lines ``name: value``, empty lines and # comments; {} for no path.

    ``setting`` names the file ``where``, for errors. AccessError, which shows no value.
    """
    if not path:
        return {}
    try:
        lines = read_regular(path).content.decode("utf-8").splitlines()
    except OSError as error:
        raise unreadable_error(path, error, setting, where) from None
    except UnicodeDecodeError:
        raise AccessError(
            f"Cannot read {path}: it is not text; correct {setting} {where}."
        ) from None
    found: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, colon, value = (part.strip() for part in line.partition(":"))
        name = name.lower() if colon else ""
        if fault := header_error(name, value, "name: value"):
            raise AccessError(
                f"{path}, line {number}: {fault}; correct the file, which {setting} {where} names."
            )
        found[name] = value
    return found


def forward_headers(settings: SpansSettings) -> dict[str, str]:
    """The headers of [spans] for the collector; ConfigError or AccessError."""
    path = settings.forward_headers_file
    found = read_headers(path, "forward_headers_file", "in [spans]")
    return parse_headers(settings.forward_headers) | found


def can_examine(path: str) -> bool:
    """True if this user can determine the errors of a file, including its absence."""
    try:
        Path(path).stat()
    except PermissionError:
        return False
    except OSError:
        return True
    return os.access(path, os.R_OK)


def check_destination(destination: Destination, listeners: Iterable[str]) -> None:
    """ConfigError if the destination is one of ``listeners``, the agent's own receivers.

    ``listeners`` are URLs of the bound addresses. A name that does not resolve is accepted.
    """
    signal = destination.signal
    for listener in listeners:
        if leads_to(destination, listener):
            raise ConfigError(
                f"[{signal.table}] {signal.address} = {quoted(str(destination))} is where this "
                f"agent itself receives spans ({listener}); name the collector's address, or move "
                "ours away with [spans] http and grpc."
            )


def leads_to(destination: Destination, listener: str) -> bool:
    """True if the destination is the listener with this URL."""
    # a listener without a host listens on every address
    return _same_listener(destination, parse_destination(listener.replace("://:", "://0.0.0.0:")))


def _same_listener(destination: Destination, listener: Destination) -> bool:
    if destination.socket or listener.socket:
        return Path(destination.socket).resolve() == Path(listener.socket).resolve()
    if destination.port != listener.port:
        return False
    ours, theirs = _addresses(listener.host), _addresses(destination.host)
    if any(address.is_unspecified for address in ours):
        return any(map(_is_local, theirs))
    # On Linux a connection to 0.0.0.0 or :: reaches the loopback address.
    loopback = {4: ipaddress.ip_address("127.0.0.1"), 6: ipaddress.ip_address("::1")}
    return bool(ours & {loopback[one.version] if one.is_unspecified else one for one in theirs})


_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def _addresses(host: str) -> set[_Address]:
    """All addresses of a host, IPv4 unmapped; none for an unknown name."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return set()
    addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
    return {getattr(one, "ipv4_mapped", None) or one for one in addresses}


def _is_local(address: _Address) -> bool:
    """True if the address belongs to this host, which alone can bind it."""
    try:
        with socket.create_server(
            (str(address), 0),
            family=socket.AF_INET if address.version == 4 else socket.AF_INET6,
        ):
            return True
    except OSError:
        return False
