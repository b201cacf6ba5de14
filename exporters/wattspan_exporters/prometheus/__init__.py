"""The Prometheus exporter. Its server is imported only if it is enabled."""

from __future__ import annotations

from typing import Annotated, Literal

from wattspan.config import AccessSettings
from wattspan.model.settings import Duration, Listen, about
from wattspan.ports import Exporter, ExporterContext, ExporterPlugin


class PrometheusSettings(AccessSettings, frozen=True):
    """Listener of `/metrics` and of the live page."""

    listen: Annotated[
        Listen, about('Where to listen; `:9949` is every address, "" turns the exporter off.')
    ] = Listen("127.0.0.1:9949")
    page: Annotated[
        bool, about("Serve the live page at `/`; without it, `/` is a page of links.")
    ] = True
    exemplars: Annotated[
        Literal["auto", "all"],
        about(
            "Readers of exemplars, which have the ids of traces and spans: `auto`: clients with a "
            "token or certificate, so none on a listener without `token_file` or `tls_client_ca`; "
            "`all`: every client."
        ),
    ] = "auto"
    aliases: Annotated[
        tuple[Literal["dcgm", "gen_ai"], ...],
        about(
            "Additional metric names: `dcgm` for GPUs, `gen_ai` for the energy of serving engines, "
            "as drafted for OpenTelemetry."
        ),
    ] = ()
    max_connections: Annotated[
        int,
        about(
            "Connections that are served at once; further ones are rejected.",
            least=1,
            hint='listen = "" turns the exporter off',
        ),
    ] = 64
    max_rate: Annotated[
        int,
        about(
            "Requests a second from one user of this host or from another host, and four times as "
            "many in a burst; further ones are rejected. `/healthz` is answered late instead.",
            least=1,
            hint='listen = "" turns the exporter off',
        ),
    ] = 100
    request_timeout: Annotated[
        Duration,
        about("Time from the first byte of a request to the end of its response.", least="1ms"),
    ] = Duration.parse("10s")
    idle_timeout: Annotated[
        Duration, about("Idle time of a connection between two requests.", least="1ms")
    ] = Duration.parse("90s")


def open_exporter(settings: PrometheusSettings, context: ExporterContext) -> Exporter | None:
    """The exporter, not yet started; None if ``listen`` is empty."""
    if not settings.listen:
        return None
    from wattspan_exporters.prometheus.exporter import PrometheusExporter

    return PrometheusExporter(settings, context)


plugin = ExporterPlugin(settings=PrometheusSettings, open=open_exporter)
