"""The Prometheus exporter. Its server is imported only if it is enabled."""

from __future__ import annotations

from typing import Annotated, Literal

from wattspan.config import AccessSettings
from wattspan.model.settings import Duration, Listen, about
from wattspan.ports import Exporter, ExporterContext, ExporterPlugin

_OFF = 'listen = "" turns the exporter off'


class PrometheusSettings(AccessSettings, frozen=True):
    """Listener of `/metrics` and of the live page.

    Keys:
        listen: Where to listen; `:9949` is every address, "" turns the exporter off.
        page: Serve the live page at `/`; without it, `/` is a page of links.
        exemplars: Readers of exemplars, which have the ids of traces and spans: `auto`: clients
            with a token or certificate, so none on a listener without `token_file` or
            `tls_client_ca`; `all`: every client.
        aliases: Additional metric names: `dcgm` for GPUs, `gen_ai` for the energy of serving
            engines, as drafted for OpenTelemetry.
        max_connections: Connections that are served at once; further ones are rejected.
        max_rate: Requests a second from one user of this host or from another host, and four times
            as many in a burst; further ones are rejected. `/healthz` is answered late instead.
        request_timeout: Time from the first byte of a request to the end of its response.
        idle_timeout: Idle time of a connection between two requests.
    """

    listen: Listen = Listen("127.0.0.1:9949")
    page: bool = True
    exemplars: Literal["auto", "all"] = "auto"
    aliases: tuple[Literal["dcgm", "gen_ai"], ...] = ()
    max_connections: Annotated[int, about(least=1, hint=_OFF)] = 64
    max_rate: Annotated[int, about(least=1, hint=_OFF)] = 100
    request_timeout: Annotated[Duration, about(least="1ms")] = Duration.parse("10s")
    idle_timeout: Annotated[Duration, about(least="1ms")] = Duration.parse("90s")


def open_exporter(settings: PrometheusSettings, context: ExporterContext) -> Exporter | None:
    """The exporter, not yet started; None if ``listen`` is empty."""
    if not settings.listen:
        return None
    from wattspan_exporters.prometheus.exporter import PrometheusExporter

    return PrometheusExporter(settings, context)


plugin = ExporterPlugin(settings=PrometheusSettings, open=open_exporter)
