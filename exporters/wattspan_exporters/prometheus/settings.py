"""``[exporters.prometheus]``: what an operator may choose."""

from __future__ import annotations

import ipaddress
from typing import Annotated, NamedTuple

from wattspan.settings import Duration, Table, about


class Address(NamedTuple):
    """Where to listen."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read ``HOST:PORT``, ``[IPV6]:PORT`` or ``:PORT`` (every interface)."""
        host, separator, port = text.rpartition(":")
        bare = host.removeprefix("[").removesuffix("]")
        bracketed = host.startswith("[") and host.endswith("]")
        digits = port.isascii() and port.isdigit()
        if not separator or not digits or int(port) > 65535 or (":" in bare and not bracketed):
            raise ValueError(
                f"{text!r} is not an address; write for example "
                '"127.0.0.1:9949", "[::1]:9949" or "" for none'
            )
        return cls(bare, int(port))

    @property
    def loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class PrometheusSettings(Table, frozen=True):
    """Where and how `/metrics` is served."""

    listen: Annotated[
        str, about('Where to listen; `:9949` is every address, "" turns the exporter off.')
    ] = "127.0.0.1:9949"
    tls_certificate: Annotated[
        str, about("A PEM file with the certificate and its chain; with it, HTTPS only.")
    ] = ""
    tls_key: Annotated[
        str, about('A PEM file with the key; "" if it is in the certificate\'s file.')
    ] = ""
    tls_client_ca: Annotated[
        str, about("A PEM file; with it, only clients with a certificate by this authority.")
    ] = ""
    max_connections: Annotated[
        int, about("How many connections are served at once; more are turned away.")
    ] = 64
    request_timeout: Annotated[
        Duration, about("From a request's first byte to the end of its answer.")
    ] = Duration.parse("10s")
    idle_timeout: Annotated[
        Duration, about("How long a connection may stay silent between two requests.")
    ] = Duration.parse("90s")

    def __post_init__(self) -> None:
        if self.listen:
            try:
                Address.parse(self.listen)
            except ValueError as error:
                raise ValueError(f"listen = {error}") from None
        if (self.tls_key or self.tls_client_ca) and not self.tls_certificate:
            raise ValueError("tls_key and tls_client_ca are of no use without tls_certificate")
        if self.max_connections < 1:
            raise ValueError('max_connections must be at least 1; listen = "" serves nobody')
        if self.request_timeout <= 0 or self.idle_timeout <= 0:
            raise ValueError("request_timeout and idle_timeout must be longer than nothing")
