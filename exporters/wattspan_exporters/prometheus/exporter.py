"""The exporter: pages on a server in a thread of its own."""

from __future__ import annotations

import errno
import socket
import threading

from wattspan.http.access_policy import admit_all, exposure_warning, token_check
from wattspan.http.tls import AccessError, server_tls
from wattspan.model.settings import Listen
from wattspan.ports import ExporterContext, ExporterError, SnapshotView
from wattspan_exporters.page.site import LivePage
from wattspan_exporters.prometheus.dcgm import DCGM
from wattspan_exporters.prometheus.pages import MetricsPages
from wattspan_exporters.prometheus.self_metrics import SelfMetrics
from wattspan_exporters.prometheus.server import MetricsServer, ScrapeLimits
from wattspan_exporters.prometheus.settings import PrometheusSettings

_WHERE = "[exporters.prometheus]"

EXPOSURE_RISK = "whoever reaches it sees every process and what it spends"
"""What a listener for metrics gives away."""

GRACE_SECONDS = 2.0
"""What a request in hand is given when the agent stops."""


class PrometheusExporter:
    """Serves ``/metrics``, ``/healthz`` and the live page."""

    def __init__(self, settings: PrometheusSettings, context: ExporterContext) -> None:
        self._settings, self._context = settings, context
        self._listen = settings.listen
        self._itself = SelfMetrics(context.version)
        self._server: MetricsServer | None = None
        self._thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        return "prometheus"

    @property
    def address(self) -> str | None:
        """The URL of the metrics; None until started."""
        if self._server is None:
            return None
        scheme = "https" if self._server.tls else "http"
        host = self._listen.host or socket.gethostname()
        return f"{scheme}://{Listen.written(host, self._server.server_port)}/metrics"

    @property
    def drops(self) -> int:
        """Connections that were refused, or closed to make room for another one."""
        return self._itself.refusals

    def start(self, view: SnapshotView) -> None:
        clock, version = self._context.clock, self._context.version
        settings = self._settings
        log, count = self._context.log, self._context.refusals("prometheus")
        try:
            tls = server_tls(
                settings,
                what="Cannot serve metrics",
                where=f"in {_WHERE}",
                log=log,
                speaks=("http/1.1",),
                count=count,
            )
            admits = token_check(settings, where=f"in {_WHERE}", log=log) or admit_all
        except AccessError as error:
            raise ExporterError(str(error)) from None
        itself = self._itself
        site = LivePage(view, clock, version) if settings.page else None
        aliases = DCGM if "dcgm" in settings.aliases else ()
        pages = MetricsPages(
            view,
            clock,
            version,
            itself,
            site,
            aliases,
            guarded=tls is None and self._listen.loopback,  # TLS proves the name
            admits=admits,
            count=count,
        )
        limits = ScrapeLimits(
            settings.max_connections,
            settings.request_timeout,
            settings.idle_timeout,
            settings.max_rate,
        )
        try:
            family, _, _, _, address = socket.getaddrinfo(
                self._listen.host or None,
                self._listen.port,
                type=socket.SOCK_STREAM,
                flags=socket.AI_PASSIVE,
            )[0]
            self._server = MetricsServer(
                address,
                family,
                pages.get,
                limits,
                clock,
                log,
                itself.refused,
                count,
                tls,
                f"wattspan/{version}",
                site.remember if site is not None else lambda: None,
                self._context.uid_of,
            )
        except OSError as error:
            raise ExporterError(self._sentence(error)) from None
        if warning := exposure_warning(self._listen, settings, where=_WHERE, risk=EXPOSURE_RISK):
            log(warning)
        self._thread = threading.Thread(
            target=self._server.serve, name="wattspan-prometheus", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(GRACE_SECONDS)
            self._server = None
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _sentence(self, error: OSError) -> str:
        listen = self._listen
        another = "choose another address in [exporters.prometheus] listen"
        if error.errno == errno.EADDRINUSE:
            cause = "the port is in use"
            remedy = f"stop its user (`ss -ltnp sport = :{listen.port}` names it) or {another}"
        elif error.errno == errno.EACCES:
            cause = "ports below 1024 are privileged"
            remedy = f"{another}, or give the service CAP_NET_BIND_SERVICE"
        elif isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            cause = "this host has no such address"
            remedy = another
        else:
            cause = error.strerror or str(error)
            remedy = another
        return f"Cannot serve metrics on {listen}: {cause}; {remedy}."
