"""Settings of ``[exporters.prometheus]``."""

from __future__ import annotations

from typing import Annotated, Literal

from wattspan.config.access import AccessSettings
from wattspan.model.settings import Duration, Listen, about


class PrometheusSettings(AccessSettings, frozen=True):
    """Listener of `/metrics` and of the live page."""

    listen: Annotated[
        Listen, about('Where to listen; `:9949` is every address, "" turns the exporter off.')
    ] = Listen("127.0.0.1:9949")
    page: Annotated[
        bool, about("Whether `/` is the live page; without it, a page with links only.")
    ] = True
    aliases: Annotated[
        tuple[Literal["dcgm"], ...],
        about("Names that other tools' dashboards know, beside our own: of GPUs, DCGM's."),
    ] = ()
    max_connections: Annotated[
        int, about("How many connections are served at once; more are turned away.")
    ] = 64
    max_rate: Annotated[
        int,
        about(
            "How many requests a second of one user of this host, or of another host, are "
            "answered; four times as many at once. More are turned away. `/healthz` is answered "
            "late instead."
        ),
    ] = 100
    request_timeout: Annotated[
        Duration, about("From a request's first byte to the end of its answer.")
    ] = Duration.parse("10s")
    idle_timeout: Annotated[
        Duration, about("How long a connection may stay silent between two requests.")
    ] = Duration.parse("90s")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_connections < 1:
            raise ValueError('max_connections must be at least 1; listen = "" serves nobody')
        if self.max_rate < 1:
            raise ValueError('max_rate must be at least 1; listen = "" serves nobody')
        if self.request_timeout <= 0 or self.idle_timeout <= 0:
            raise ValueError("request_timeout and idle_timeout must be longer than nothing")
