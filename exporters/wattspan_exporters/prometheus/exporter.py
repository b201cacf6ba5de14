"""The exporter: metrics, snapshot and live page on the agent's HTTP server."""

from __future__ import annotations

import socket

from wattspan.http.access_policy import AccessPolicy, exposure_warning, tcp_policy
from wattspan.http.limits import RejectionReason, ServerLimits
from wattspan.http.server import HttpServer
from wattspan.http.sockets import listen_tcp
from wattspan.model import SECOND
from wattspan.ports import ExporterContext, ExporterError, ListenError, SnapshotView
from wattspan_exporters.catalogue.gpu import DCGM
from wattspan_exporters.page.site import LivePage
from wattspan_exporters.prometheus import PrometheusSettings
from wattspan_exporters.prometheus.pages import (
    HEALTH_PATH,
    MetricsPages,
    SelfMetrics,
    ViewWithoutExemplars,
)

_WHERE = "[exporters.prometheus]"

EXPOSURE_RISK = "every client can read the names and the energy of all processes"
"""The consequence of a listener for metrics that is open to the network."""

MAX_BODY = 4096
"""Bytes of a request's body, which is ignored."""

REMEMBER_SECONDS = 1.0
"""Interval at which the page's history records the newest snapshot."""


class PrometheusExporter:
    """Serves ``/metrics``, ``/v1/snapshot``, ``/healthz`` and the live page."""

    name = "prometheus"
    address: str | None = None
    """The URL of the metrics; None until started."""
    drops = 0
    """Connections that were refused, or closed to make room for another one."""

    def __init__(self, settings: PrometheusSettings, context: ExporterContext) -> None:
        self._settings, self._context = settings, context
        self._self_metrics = SelfMetrics(context.version)
        self._rejected = context.refusals(self.name)
        self._server: HttpServer | None = None

    def start(self, view: SnapshotView) -> None:
        context, settings, listen = self._context, self._settings, self._settings.listen
        policy = self._policy()
        if not (settings.exemplars == "all" or settings.token_file or settings.tls_client_ca):
            view = ViewWithoutExemplars(view)
        site = LivePage(view) if settings.page else None
        server = HttpServer(
            context.clock,
            log=context.log,
            limits=ServerLimits(
                body=MAX_BODY,
                connections=settings.max_connections,
                rate=settings.max_rate,
                receive=settings.request_timeout / SECOND,
                send=settings.request_timeout / SECOND,
                idle=settings.idle_timeout / SECOND,
                slow_request=0.0,  # a scrape has no body: its request arrives at once
                rate_message="More than {rate} requests a second: ask less often, or have max_rate "
                "raised in [exporters.prometheus].",
            ),
            principals=context.principals,
            name=self.name,
            pools=context.pools,
        )
        pages = MetricsPages(
            view,
            context.clock,
            context.version,
            self._self_metrics,
            site,
            DCGM if "dcgm" in settings.aliases else (),
        )
        try:
            listening = listen_tcp(
                listen.host, listen.port, verb="serve", what="metrics", setting=f"{_WHERE} listen"
            )
            at = server.add_http(listening, pages, policy)
        except ListenError as error:
            raise ExporterError(str(error)) from None
        if site is not None:
            server.every(REMEMBER_SECONDS, site.remember, due=site.is_due)
        server.start()
        if exposed := exposure_warning(listen, self._settings, where=_WHERE, risk=EXPOSURE_RISK):
            self._context.log(exposed)
        self._server = server
        scheme = "http" if policy.tls is None else "https"
        host = at if listen.host else f"{socket.gethostname()}{at}"
        self.address = f"{scheme}://{host}/metrics"

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
        self._server = self.address = None

    def _policy(self) -> AccessPolicy:
        listen = self._settings.listen
        policy = tcp_policy(
            self._settings,
            what="serve metrics",
            table=_WHERE,
            protocol="http/1.1",
            log=self._context.log,
            count=self._count,
        )
        local = policy.tls is None and listen.loopback  # TLS proves the name
        return policy._replace(local_names=local, open_paths=frozenset({HEALTH_PATH}))

    def _count(self, reason: str) -> None:
        if reason == RejectionReason.CROWDED:
            self.drops += 1
            self._self_metrics.refused.inc()
        self._rejected(reason)
