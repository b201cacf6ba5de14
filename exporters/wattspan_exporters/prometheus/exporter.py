"""The exporter: metrics, snapshot, health and live page on the agent's HTTP server.

Formats are negotiated here and not by prometheus-client, which takes the first format it knows
and ignores the quality values by which a client states its preference.
"""

from __future__ import annotations

import asyncio
import gzip
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import msgspec
from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from wattspan.api.snapshot_document import SNAPSHOT_PATH, snapshot_document
from wattspan.http.access_policy import AccessPolicy, exposure_warning, tcp_policy
from wattspan.http.limits import RejectionReason, ServerLimits
from wattspan.http.messages import HttpRequest, HttpResponse, plain_response
from wattspan.http.server import HttpServer
from wattspan.http.sockets import listen_tcp
from wattspan.model import MILLISECOND, SECOND, Snapshot, SpanRow
from wattspan.ports import Clock, ExporterContext, ExporterError, ListenError, SnapshotView
from wattspan_exporters.catalogue import CATALOGUE
from wattspan_exporters.catalogue.definition import Instrument, Metric, sanitize, single
from wattspan_exporters.catalogue.gpu import DCGM
from wattspan_exporters.catalogue.inference import GEN_AI_PROPOSAL
from wattspan_exporters.page import LIVE_JSON_PATH, SECURITY_HEADERS, LivePage
from wattspan_exporters.prometheus import PrometheusSettings
from wattspan_exporters.prometheus.renderer import (
    OPENMETRICS_END,
    ExpositionFormat,
    Renderer,
)

PROCESS_METRICS_EVERY = 5 * SECOND
"""The period of reads of the process's own metrics: with the open files, a sixth of a scrape."""


class SelfMetrics:
    """Metrics of the exporter and of its process, which are not in the catalogue.

    The standard metrics of the process are rendered at most once in `PROCESS_METRICS_EVERY`.
    """

    def __init__(self, version: str) -> None:
        self.scrapes = dict.fromkeys(ExpositionFormat, 0)
        self.refused = 0  # connections
        self.duration = 0  # of the last rendering, in nanoseconds
        self.metrics = (
            Metric("wattspan.build.info", Instrument.INFO, "", "The version of wattspan.",
                   ("version",), lambda _: (((version,), 1),)),
            Metric("wattspan.scrapes", Instrument.COUNTER, "",
                   "Number of scrapes answered before this one.", ("format",),
                   lambda _: (((form.name.lower(),), n) for form, n in self.scrapes.items())),
            Metric("wattspan.scrape.connections.refused", Instrument.COUNTER, "",
                   "Connections refused because too many were open.",
                   (), single(lambda _: self.refused)),
            Metric("wattspan.scrape.duration", Instrument.GAUGE, "s",
                   "Duration of the rendering of the previous scrape.",
                   (), single(lambda _: self.duration)),
        )  # fmt: skip
        """Those of the exporter, which any snapshot draws."""
        self._process = ProcessCollector(registry=None)
        self._texts: dict[ExpositionFormat, str] = {}
        self._read = -PROCESS_METRICS_EVERY

    def render(self, form: ExpositionFormat, now: int = 0) -> str:
        """Those of the process at a monotonic time, without OpenMetrics' closing line."""
        if now - self._read >= PROCESS_METRICS_EVERY:
            self._read = now
            self._texts.clear()
        if form not in self._texts:
            render = generate_latest if form is ExpositionFormat.TEXT else generate_openmetrics
            text = render(self._process).decode()
            self._texts[form] = text.removesuffix(OPENMETRICS_END)
        return self._texts[form]


_PARAMETER = re.compile(r';\s*([^=;\s]+)\s*=\s*"?([^";]*)')

_SERVED = {
    "application/openmetrics-text": (ExpositionFormat.OPENMETRICS, "1.0.0"),
    "text/plain": (ExpositionFormat.TEXT, "0.0.4"),
    "text/*": (ExpositionFormat.TEXT, "0.0.4"),
    "*/*": (ExpositionFormat.TEXT, "0.0.4"),
}
"""Format and version by the value of an Accept header."""


@lru_cache(maxsize=64)  # a client sends the same header with each request
def choose_format(accept: str) -> ExpositionFormat:
    """The format with the highest quality; plain text if the client accepts none of them."""
    chosen, best = ExpositionFormat.TEXT, 0.0
    for value, parameters, quality in _offers(accept):
        form, version = _SERVED.get(value, (None, ""))
        if form and quality > best and parameters.get("version", version) == version:
            chosen, best = form, quality
    return chosen


@lru_cache(maxsize=64)
def accepts_gzip(accept_encoding: str) -> bool:
    """True if a client accepts gzip; a quality of gzip overrides that of ``*``."""
    qualities = {value: quality for value, _, quality in _offers(accept_encoding)}
    return qualities.get("gzip", qualities.get("*", 0.0)) > 0


def _offers(header: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Value, parameters and quality of each element of an Accept header."""
    for element in header.lower().split(","):
        parameters = {name: text.strip() for name, text in _PARAMETER.findall(element)}
        yield element.partition(";")[0].strip(), parameters, _quality(parameters.get("q", "1"))


def _quality(text: str) -> float:
    """A quality value; 1 if it is invalid."""
    try:
        quality = float(text)
    except ValueError:
        return 1.0
    return quality if 0 <= quality <= 1 else 1.0


HEALTH_PATH = "/healthz"
METRICS_PATH = "/metrics"

QUICK = 5 * MILLISECOND
"""Limit of the duration of a rendering in the server's thread: a hand-over to a worker thread takes
a seventh of the CPU time of a scrape of 300 series."""

STALE_AFTER = 60 * SECOND
"""Age of the newest snapshot beyond which the agent is not healthy."""


class ViewWithoutExemplars:
    """A view of snapshots without the ids of spans, for readers who may be of any user.

    A span's id lets its reader announce the span as his own. Unchanged rows stay the same objects.
    """

    def __init__(self, view: SnapshotView) -> None:
        self._view = view
        self._lock = threading.Lock()
        self._shown: tuple[Snapshot, Snapshot] | None = None
        self._rows: dict[tuple[str, str, str], tuple[SpanRow, SpanRow]] = {}

    def __call__(self) -> Snapshot:
        snapshot = self._view()
        with self._lock:
            if self._shown is None or self._shown[0] is not snapshot:
                self._rows = {row.key: self._stripped(row) for row in snapshot.spans.rows}
                rows = tuple(shown for _, shown in self._rows.values())
                spans = replace(snapshot.spans, rows=rows)
                self._shown = snapshot, replace(snapshot, spans=spans)
            return self._shown[1]

    def _stripped(self, row: SpanRow) -> tuple[SpanRow, SpanRow]:
        known = self._rows.get(row.key)
        return known if known and known[0] is row else (row, replace(row, exemplars={}))


_ALIASES = {"dcgm": DCGM, "gen_ai": GEN_AI_PROPOSAL}


class MetricsPages:
    """Answers with the newest snapshot; requests change nothing.

    Each body is rendered once for each snapshot and format, in a worker thread; metrics that are
    rendered quickly are rendered in the server's thread.
    """

    def __init__(
        self,
        view: SnapshotView,
        clock: Clock,
        version: str,
        self_metrics: SelfMetrics,
        site: LivePage | None = None,
        aliases: Sequence[Metric] = (),
    ) -> None:
        self._view, self._clock = view, clock
        self._version, self._self_metrics = version, self_metrics
        self._site = site
        self._renderer = Renderer((*CATALOGUE, *aliases, *self_metrics.metrics))
        self._lock = threading.Lock()
        self._snapshot: Snapshot | None = None
        self._bodies: dict[tuple[str, bool], bytes] = {}
        self._duration: int | None = None  # of the last rendering of metrics

    async def __call__(self, request: HttpRequest) -> HttpResponse:
        if request.method not in ("GET", "HEAD"):
            return plain_response(405, "Use GET or HEAD.", {"Allow": "GET, HEAD"})
        if request.path == HEALTH_PATH:
            return self._health()
        if request.path == METRICS_PATH and self._is_quick():
            return self._get(request)
        return await asyncio.to_thread(self._get, request)

    def _is_quick(self) -> bool:
        """True if a rendering of metrics does not delay the other connections of the server.

        A held lock means that a worker thread renders.
        """
        return self._duration is not None and self._duration <= QUICK and not self._lock.locked()

    def _get(self, request: HttpRequest) -> HttpResponse:
        path, headers = request.path, request.headers
        zipped = accepts_gzip(headers.get("accept-encoding", ""))
        if path == METRICS_PATH:
            return self._metrics(choose_format(headers.get("accept", "")), zipped)
        if path == SNAPSHOT_PATH:
            return self._json("snapshot", zipped, self._encode)
        if self._site is not None:
            if path == LIVE_JSON_PATH:
                return self._json("live", zipped, self._live, **SECURITY_HEADERS)
            page = self._site.file(path, zipped, headers.get("if-none-match", ""))
            if page is not None:
                return page
        if path == "/":
            return _links(self._view(), self._version)
        return plain_response(404, "There is nothing here; the metrics are at /metrics.")

    def _metrics(self, form: ExpositionFormat, zipped: bool) -> HttpResponse:
        body = self._body(form, zipped, partial(self._render, form))
        with self._lock:
            self._self_metrics.scrapes[form] += 1
        return _negotiated(form.value, body, zipped)

    def _render(self, form: ExpositionFormat, snapshot: Snapshot) -> bytes:
        began = self._clock.monotonic()
        body = self._renderer.render(snapshot, form, self._self_metrics.render(form, began))
        self._duration = self._clock.monotonic() - began
        self._self_metrics.duration = self._duration
        return body

    def _json(
        self, name: str, zipped: bool, make: Callable[[Snapshot], bytes], **more: str
    ) -> HttpResponse:
        body = self._body(name, zipped, make)
        age = max(0, self._clock.monotonic() - self._view().at.mono) // SECOND
        caching = {"Cache-Control": "no-store", "Age": str(age)}
        return _negotiated("application/json", body, zipped, **caching, **more)

    def _live(self, snapshot: Snapshot) -> bytes:
        assert self._site is not None  # noqa: S101 - its path is served only then
        return self._site.document(snapshot, self._encode(snapshot))

    def _encode(self, snapshot: Snapshot) -> bytes:
        return msgspec.json.encode(snapshot_document(snapshot, self._version))

    def _body(self, name: str, zipped: bool, make: Callable[[Snapshot], bytes]) -> bytes:
        """``make`` of the newest snapshot, made once for each snapshot."""
        with self._lock:
            snapshot = self._view()
            if snapshot is not self._snapshot:
                self._bodies.clear()
                self._snapshot = snapshot
            if (name, False) not in self._bodies:
                self._bodies[name, False] = make(snapshot)
            if (name, zipped) not in self._bodies:
                # Level 1 takes a tenth of the default's time for a fifth more bytes.
                body = gzip.compress(self._bodies[name, False], compresslevel=1, mtime=0)
                self._bodies[name, True] = body
            return self._bodies[name, zipped]

    def _health(self) -> HttpResponse:
        snapshot = self._view()
        age, ticks = self._clock.monotonic() - snapshot.at.mono, snapshot.stats.recent_ticks
        if age > STALE_AFTER:
            return plain_response(503, f"The newest snapshot is {age // SECOND} s old.")
        if ticks.missed:
            # Not an error status: a restart of the agent would lose more ticks.
            return plain_response(
                200,
                f"degraded: {ticks.missed} of {ticks.due} polls of the last minute were missed; "
                f"the longest poll took {ticks.longest_poll // MILLISECOND} ms. "
                "Keep agent.interval at auto, see wattspan_agent_consumers, or set a longer one.",
            )
        return plain_response(200, "ok")


def _negotiated(content_type: str, body: bytes, zipped: bool, **more: str) -> HttpResponse:
    headers = {"Vary": "Accept, Accept-Encoding", **more}
    if zipped:
        headers["Content-Encoding"] = "gzip"
    return HttpResponse(200, body, content_type, headers)


def _links(snapshot: Snapshot, version: str) -> HttpResponse:
    """The page of links, without the live page: no script, no external resource."""
    from html import escape

    emulated = "<p><strong>Emulated host</strong></p>" if snapshot.emulated else ""
    page = (
        '<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>wattspan</title>'
        f"<h1>wattspan on {escape(sanitize(snapshot.host))}</h1>{emulated}"
        '<ul><li><a href="/metrics">Metrics</a> for Prometheus, as text or OpenMetrics</li>'
        '<li><a href="/healthz">Health</a></li></ul>'
        f"<p>Version {escape(version)}</p></html>\n"
    )
    return HttpResponse(200, page.encode(), "text/html; charset=utf-8", SECURITY_HEADERS)


# ----------------------------------------------------------------------------------- the server

_WHERE = "[exporters.prometheus]"

EXPOSURE_RISK = "every client can read the names and the energy of all processes"
"""The consequence of a listener for metrics that is open to the network."""

MAX_BODY = 4096
"""Bytes of a request's body, which is ignored."""


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
            [metric for alias in dict.fromkeys(settings.aliases) for metric in _ALIASES[alias]],
        )
        try:
            listening = listen_tcp(
                listen.host, listen.port, verb="serve", what="metrics", setting=f"{_WHERE} listen"
            )
            at = server.add_http(listening, pages, policy)
        except ListenError as error:
            raise ExporterError(str(error)) from None
        if site is not None:
            server.every(site.pause, site.remember, due=site.is_due)
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
            self._self_metrics.refused += 1
        self._rejected(reason)
