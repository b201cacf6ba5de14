"""Opens the configured receivers of spans."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from wattspan.config.tables import SpansSettings
from wattspan.http.access_policy import AccessPolicy, exposure_warning, tcp_policy
from wattspan.http.limits import RejectionCounter
from wattspan.http.server import HttpServer, LimitedProtocolFactory
from wattspan.http.sockets import listen_tcp, listen_unix
from wattspan.http.tls import AccessError
from wattspan.ingest.export_request import SpanSink, WorkAttribute
from wattspan.ingest.otlp_http import TRACES_PATH, OtlpHttpHandler
from wattspan.ingest.trace_receiver import TraceReceiver
from wattspan.ports import Clock, ConfigError, ListenError

HTTP_SOCKET, GRPC_SOCKET = "otlp.sock", "otlp-grpc.sock"
CONFIG_TABLE = "[spans]"
EXPOSURE_RISK = "any client that reaches it may send spans and be believed"
"""The risk of a listener for spans that is open to the network."""

Log = Callable[[str], None]

_HTTP, _GRPC = "OTLP/HTTP", "OTLP/gRPC"
_BUILTIN_WEIGHTS = ("equal", "cpu")


def open_receivers(
    server: HttpServer,
    settings: SpansSettings,
    run_dir: Path,
    sink: SpanSink,
    clock: Clock,
    *,
    asked: Callable[[str], bool],
    log: Log,
    work: Collection[WorkAttribute] = (),
    refusals: RejectionCounter | None = None,
) -> tuple[str, ...]:
    """Add listeners for spans to ``server``; returns their addresses.

    ``work`` lists the spans that report work. ``asked`` returns whether the operator set a key:
    a failure to listen is a ListenError for such a key, and else logged. ConfigError if gRPC is
    not installed, or for invalid files of TLS or tokens. Unix sockets need neither TLS nor
    tokens, because the kernel identifies the sender. ``refusals`` counts rejected connections.
    """
    if not settings.enabled:
        return ()
    receiver = TraceReceiver(
        sink,
        clock,
        max_request=settings.max_request,
        weight="" if settings.weight in _BUILTIN_WEIGHTS else settings.weight,
        work=work,
        keep=bool(settings.forward),
    )
    opened = []

    def attempt(
        key: str,
        scheme: str,
        listen: Callable[[], str],
        path: str = "",
        exposed: str = "",
    ) -> None:
        try:
            opened.append(f"{scheme}://{listen()}{path}")
        except ListenError as error:
            if asked(key):
                raise
            log(f"The agent continues without this listener: {error}")
            return
        if exposed:
            log(exposed)

    warn = partial(exposure_warning, settings=settings, where=CONFIG_TABLE, risk=EXPOSURE_RISK)
    refusals = refusals or RejectionCounter()
    unix_policy = AccessPolicy(refusals.counter("unix"))
    http = OtlpHttpHandler(receiver)
    if settings.http:
        policy = _tcp_policy(settings, "http", "http/1.1", log, refusals)
        tcp = partial(server.listen_tcp, settings.http.host, settings.http.port, http)
        attempt(
            "http",
            f"http{'s' * (policy.tls is not None)}",
            partial(tcp, what=_HTTP, setting="[spans] http", policy=policy),
            TRACES_PATH,
            warn(settings.http),
        )
    if settings.unix:
        unix = partial(
            server.listen_unix, run_dir / HTTP_SOCKET, http, what=_HTTP, policy=unix_policy
        )
        attempt("unix", "http+unix", unix)
    if settings.grpc:
        policy = _tcp_policy(settings, "grpc", "h2", log, refusals)
        grpc, grpc_unix = _grpc(receiver, log, policy), _grpc(receiver, log, unix_policy)

        def tcp_grpc() -> str:
            host, port = settings.grpc.host, settings.grpc.port
            listening = listen_tcp(host, port, what=_GRPC, setting="[spans] grpc")
            return server.add(listening, grpc, policy)

        def unix_grpc() -> str:
            return server.add(listen_unix(run_dir / GRPC_SOCKET, 0o666, what=_GRPC), grpc_unix)

        attempt(
            "grpc", f"grpc{'s' * (policy.tls is not None)}", tcp_grpc, exposed=warn(settings.grpc)
        )
        if settings.unix:
            attempt("unix", "grpc+unix", unix_grpc)
    return tuple(opened)


def _tcp_policy(
    settings: SpansSettings,
    listener: str,
    protocol: str,
    log: Log,
    refusals: RejectionCounter,
) -> AccessPolicy:
    """The requirements for senders over TCP; ConfigError for invalid files."""
    try:
        policy = tcp_policy(
            settings,
            what="receive spans",
            table=CONFIG_TABLE,
            protocol=protocol,
            log=log,
            count=refusals.counter(listener),
        )
    except AccessError as error:
        raise ConfigError(str(error)) from None
    return policy._replace(browsers=False)


def _grpc(receiver: TraceReceiver, log: Log, policy: AccessPolicy) -> LimitedProtocolFactory:
    try:
        from wattspan.ingest.otlp_grpc import OtlpGrpcConnection
    except ImportError as error:
        raise ConfigError(
            f"[spans] grpc needs h2, which is not installed ({error}); "
            'run `pip install "wattspan[grpc]"`, or set grpc = "".'
        ) from error
    return partial(OtlpGrpcConnection, receiver, log, policy)
