"""Opens what spans come in by, as it is configured."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from wattspan.config.tables import Spans
from wattspan.ports import Clock, ConfigError, ListenError
from wattspan.spanfeed.delivery import Counted, SpanSink
from wattspan.spanfeed.http import PATH, OtlpHttp
from wattspan.spanfeed.otlp import Intake
from wattspan.web.listening import listen_tcp, listen_unix
from wattspan.web.server import MakeProtocol, WebServer

HTTP_SOCKET, GRPC_SOCKET = "otlp.sock", "otlp-grpc.sock"

Log = Callable[[str], None]

_HTTP, _GRPC = "OTLP/HTTP", "OTLP/gRPC"

_NOT_ATTRIBUTES = ("equal", "cpu")


def open_receivers(
    server: WebServer,
    settings: Spans,
    run_dir: Path,
    sink: SpanSink,
    clock: Clock,
    *,
    asked: Callable[[str], bool],
    log: Log,
    work: Collection[Counted] = (),
) -> tuple[str, ...]:
    """Have ``server`` listen for spans, wherever ``settings`` say; the addresses.

    ``work`` says which spans count their work, and in which attribute.

    ``asked`` tells whether a key was set by somebody: what was asked for is had or a ListenError,
    what is only the default is done without, and logged. ConfigError if gRPC is not installed.
    """
    if not settings.enabled:
        return ()
    intake = Intake(
        sink,
        clock,
        max_request=settings.max_request,
        weight="" if settings.weight in _NOT_ATTRIBUTES else settings.weight,
        work=work,
        keep=bool(settings.forward),
    )
    opened = []

    def attempt(key: str, scheme: str, listen: Callable[[], str], path: str = "") -> None:
        try:
            opened.append(f"{scheme}://{listen()}{path}")
        except ListenError as error:
            if asked(key):
                raise
            log(f"Going on without it: {error}")

    http = OtlpHttp(intake)
    if settings.http:
        tcp = partial(server.listen_tcp, settings.http.host, settings.http.port, http)
        attempt("http", "http", partial(tcp, what=_HTTP, setting="[spans] http"), PATH)
    if settings.unix:
        unix = partial(server.listen_unix, run_dir / HTTP_SOCKET, http, what=_HTTP)
        attempt("unix", "http+unix", unix)
    if settings.grpc:
        grpc = _grpc(intake, log)

        def tcp_grpc() -> str:
            where = settings.grpc
            listening = listen_tcp(where.host, where.port, what=_GRPC, setting="[spans] grpc")
            return server.add(listening, grpc)

        def unix_grpc() -> str:
            return server.add(listen_unix(run_dir / GRPC_SOCKET, 0o666, what=_GRPC), grpc)

        attempt("grpc", "grpc", tcp_grpc)
        if settings.unix:
            attempt("unix", "grpc+unix", unix_grpc)
    return tuple(opened)


def _grpc(intake: Intake, log: Log) -> MakeProtocol:
    try:
        from wattspan.spanfeed.grpc import OtlpGrpc
    except ImportError as error:
        raise ConfigError(
            f"[spans] grpc needs grpclib, which is not installed ({error}); "
            'run `pip install "wattspan[grpc]"`, or set grpc = "".'
        ) from error
    return OtlpGrpc(intake, log)
