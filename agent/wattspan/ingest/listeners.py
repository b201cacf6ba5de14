"""Opens the configured receivers of spans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from wattspan.config.settings import SpansSettings
from wattspan.http.access_policy import AccessError, AccessPolicy, exposure_warning, tcp_policy
from wattspan.http.limits import RejectionCounter
from wattspan.http.server import HttpServer, LimitedProtocolFactory
from wattspan.http.sockets import ListeningSocket, listen_tcp, listen_unix
from wattspan.ingest.export_request import NOTHING_REQUESTED, RequestedAttributes, SpanSink
from wattspan.ingest.otlp_http import OtlpHttpHandler
from wattspan.ingest.trace_receiver import TraceReceiver
from wattspan.model.settings import Listen
from wattspan.ports import Clock, ConfigError, ListenError
from wattspan.sdk import OTLP_HTTP_SOCKET, OTLP_TRACES_PATH
from wattspan.sharing.pools import Pools
from wattspan.util.text import pip_command

GRPC_SOCKET = "otlp-grpc.sock"
FORWARDER_SOCKETS = {"http": "otlp-forwarder.sock", "grpc": "otlp-forwarder-grpc.sock"}
"""Sockets of those that forward the spans of others, by protocol."""

CONFIG_TABLE = "[spans]"
EXPOSURE_RISK = "any client that reaches it may send spans and be believed"
"""The risk of a listener for spans that is open to the network."""

Log = Callable[[str], None]

_PROTOCOLS = (  # key, title, protocol of TLS (ALPN), Unix socket, path
    ("http", "OTLP/HTTP", "http/1.1", OTLP_HTTP_SOCKET, OTLP_TRACES_PATH),
    ("grpc", "OTLP/gRPC", "h2", GRPC_SOCKET, ""),
)
_BUILTIN_WEIGHTS = ("equal", "cpu")


def open_receivers(
    server: HttpServer,
    settings: SpansSettings,
    run_dir: Path,
    sink: SpanSink,
    clock: Clock,
    *,
    is_set: Callable[[str], bool],
    log: Log,
    asked: RequestedAttributes = NOTHING_REQUESTED,
    refusals: RejectionCounter | None = None,
    pools: Pools | None = None,
    second: Listen | None = None,
) -> tuple[str, ...]:
    """Add listeners for spans to ``server``; returns their addresses.

    ``asked`` names the spans that report work, latencies and instructions; weights and tokens are
    those of the settings. ``is_set`` returns True if the operator set a key: a failure to listen is
    a ListenError for such a key, and else logged. ConfigError if gRPC is not installed, or for
    invalid files of TLS or tokens. Unix sockets need neither TLS nor tokens, because the kernel
    identifies the sender. ``refusals`` counts rejected connections. ``second`` is one more address
    for OTLP/HTTP, never required.
    """
    if not settings.enabled:
        return ()
    receiver = TraceReceiver(
        sink,
        clock,
        replace(
            asked,
            weight="" if settings.weight in _BUILTIN_WEIGHTS else settings.weight,
            presets=settings.presets,
            names=settings.attributes,
        ),
        max_request=settings.max_request,
        log=log,
        keep=bool(settings.forward),
        pools=pools,
    )
    refusals = refusals or RejectionCounter()
    opened = []

    def attempt(
        key: str,
        url: str,
        listen: Callable[[], ListeningSocket],
        policy: AccessPolicy,
        receiver: TraceReceiver = receiver,
    ) -> bool:
        """Open a listener; ``url`` has braces in place of its address."""
        if url.startswith("grpc"):
            make = _grpc(receiver, log, policy)
        else:
            make = server.http(OtlpHttpHandler(receiver), policy)
        try:
            opened.append(url.format(server.add(listen(), make, policy)))
        except ListenError as error:
            if is_set(key):
                raise
            log(f"The agent continues without this listener: {error}")
            return False
        return True

    unix_policy = AccessPolicy(refusals.counter("unix"))
    for key, title, alpn, name, path in _PROTOCOLS:
        address: Listen = getattr(settings, key)
        if address:
            policy = _tcp_policy(settings, key, alpn, log, refusals)
            at = partial(listen_tcp, what=title, setting=f"{CONFIG_TABLE} {key}")
            exposed = exposure_warning(address, settings, where=CONFIG_TABLE, risk=EXPOSURE_RISK)
            url = f"{key}{'s' * (policy.tls is not None)}://{{}}{path}"
            if attempt(key, url, partial(at, address.host, address.port), policy):
                if exposed:
                    log(exposed)
                if key == "http" and second:
                    attempt("", url, partial(at, second.host, second.port), policy)
        if settings.unix and (address or key == "http"):
            listen = partial(listen_unix, run_dir / name, 0o666, what=title)
            attempt("unix", f"{key}+unix://{{}}", listen, unix_policy)
        if settings.forwarders and (address or key == "http"):
            # The permission of the file is the right to name any process.
            listen = partial(listen_unix, run_dir / FORWARDER_SOCKETS[key], 0o660, what=title)
            attempt(
                "forwarders",
                f"{key}+unix://{{}}",
                listen,
                unix_policy,
                receiver.for_forwarders(),
            )
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
            f'run {pip_command("h2")}, or set grpc = "".'
        ) from error
    return partial(OtlpGrpcConnection, receiver, log, policy)
