"""``[exporters.prometheus]``: what an operator may choose."""

from __future__ import annotations

from typing import Annotated

from wattspan.settings import Duration, Listen, Table, about


class PrometheusSettings(Table, frozen=True):
    """Where and how `/metrics` is served."""

    listen: Annotated[
        Listen, about('Where to listen; `:9949` is every address, "" turns the exporter off.')
    ] = Listen("127.0.0.1:9949")
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
        if (self.tls_key or self.tls_client_ca) and not self.tls_certificate:
            raise ValueError("tls_key and tls_client_ca are of no use without tls_certificate")
        if self.max_connections < 1:
            raise ValueError('max_connections must be at least 1; listen = "" serves nobody')
        if self.request_timeout <= 0 or self.idle_timeout <= 0:
            raise ValueError("request_timeout and idle_timeout must be longer than nothing")
