"""Opens what spans come in by, as it is configured."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from wattspan.config.tables import SpansSettings
from wattspan.http.access_policy import AccessPolicy, admit_all, exposure_warning, token_check
from wattspan.http.connection_limiter import RejectionCounter
from wattspan.http.server import HttpServer, LimitedProtocolFactory
from wattspan.http.sockets import listen_tcp, listen_unix
from wattspan.http.tls import AccessError, server_tls
from wattspan.ingest.export_request import SpanSink, WorkAttribute
from wattspan.ingest.otlp_http import TRACES_PATH, OtlpHttpHandler
from wattspan.ingest.trace_receiver import TraceReceiver
from wattspan.model.settings import Listen
from wattspan.ports import Clock, ConfigError, ListenError

HTTP_SOCKET, GRPC_SOCKET = "otlp.sock", "otlp-grpc.sock"

Log = Callable[[str], None]

_HTTP, _GRPC = "OTLP/HTTP", "OTLP/gRPC"

CONFIG_TABLE = "[spans]"
EXPOSURE_RISK = "whoever reaches it may send spans and be believed"
"""What a listener for spans lets anybody do."""

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
    """Have ``server`` listen for spans, wherever ``settings`` say; the addresses.

    ``work`` says which spans count their work, and in which attribute.

    ``asked`` tells whether a key was set by somebody: what was asked for is had or a ListenError,
    what is only the default is done without, and logged. ConfigError if gRPC is not
    installed, or for files of TLS or tokens that cannot be used. Neither is asked for on Unix
    sockets, where the kernel says who sends. ``refusals`` counts who is turned away.
    """
    if not settings.enabled:
        return ()
    intake = TraceReceiver(
        sink,
        clock,
        max_request=settings.max_request,
        weight="" if settings.weight in _BUILTIN_WEIGHTS else settings.weight,
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

    doors = _ListenerPolicies(settings, log, refusals or RejectionCounter())
    http = OtlpHttpHandler(intake)
    if settings.http:
        door = doors.tcp("http", "http/1.1", settings.http)
        tcp = partial(server.listen_tcp, settings.http.host, settings.http.port, http)
        attempt(
            "http",
            _is_protected("http", door),
            partial(tcp, what=_HTTP, setting="[spans] http", door=door),
            TRACES_PATH,
        )
    if settings.unix:
        unix = partial(
            server.listen_unix, run_dir / HTTP_SOCKET, http, what=_HTTP, door=doors.unix()
        )
        attempt("unix", "http+unix", unix)
    if settings.grpc:
        door = doors.tcp("grpc", "h2", settings.grpc)
        grpc, grpc_unix = _grpc(intake, log, door), _grpc(intake, log, doors.unix())

        def tcp_grpc() -> str:
            where = settings.grpc
            listening = listen_tcp(where.host, where.port, what=_GRPC, setting="[spans] grpc")
            return server.add(listening, grpc, door)

        def unix_grpc() -> str:
            return server.add(listen_unix(run_dir / GRPC_SOCKET, 0o666, what=_GRPC), grpc_unix)

        attempt("grpc", _is_protected("grpc", door), tcp_grpc)
        if settings.unix:
            attempt("unix", "grpc+unix", unix_grpc)
    return tuple(opened)


class _ListenerPolicies:
    """What is asked of senders, by listener."""

    def __init__(self, settings: SpansSettings, log: Log, refusals: RejectionCounter) -> None:
        self._settings, self._log, self._refusals = settings, log, refusals

    def tcp(self, listener: str, speaks: str, listen: Listen) -> AccessPolicy:
        """ConfigError if what is asked for cannot be."""
        settings, log, count = self._settings, self._log, self._refusals.of(listener)
        try:
            tls = server_tls(
                settings, what="Cannot receive spans", where=f"in {CONFIG_TABLE}", log=log,
                speaks=(speaks,), count=count,
            )  # fmt: skip
            admits = token_check(settings, where=f"in {CONFIG_TABLE}", log=log)
        except AccessError as error:
            raise ConfigError(str(error)) from None
        if warning := exposure_warning(listen, settings, where=CONFIG_TABLE, risk=EXPOSURE_RISK):
            log(warning)
        return AccessPolicy(count, tls, admits or admit_all, browsers=False)

    def unix(self) -> AccessPolicy:
        return AccessPolicy(self._refusals.of("unix"))


def _is_protected(scheme: str, door: AccessPolicy) -> str:
    return scheme if door.tls is None else f"{scheme}s"


def _grpc(intake: TraceReceiver, log: Log, door: AccessPolicy) -> LimitedProtocolFactory:
    try:
        from wattspan.ingest.otlp_grpc import OtlpGrpcFactory
    except ImportError as error:
        raise ConfigError(
            f"[spans] grpc needs grpclib, which is not installed ({error}); "
            'run `pip install "wattspan[grpc]"`, or set grpc = "".'
        ) from error
    return OtlpGrpcFactory(intake, log, door)
