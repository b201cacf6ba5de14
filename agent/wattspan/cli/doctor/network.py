"""Checks of listeners and destinations: ports, security, spans, the API and pushed metrics."""

from __future__ import annotations

import socket
import stat
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from wattspan.cli.agent_client import is_local_agent
from wattspan.cli.doctor.findings import Finding, failure, note, ok, warning
from wattspan.config import Config
from wattspan.config.access import AccessSettings
from wattspan.http.access_policy import exposure_warning, token_check
from wattspan.http.tls import AccessError, server_tls
from wattspan.model.settings import Listen
from wattspan.otlp.destination import (
    Destination,
    OtlpProtocol,
    check_destination,
    parse_destination,
)
from wattspan.ports import ConfigError
from wattspan.service.configuration import is_explicit, metrics_destination, run_directory

COLLECTOR_TIMEOUT = 1.0  # seconds


def listen_error(listen: Listen) -> str | None:
    """Why nothing can listen there, in lower case; None if it can."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            listen.host or None, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return None


def examine_ports(config: Config) -> Iterator[Finding]:
    """Check that each exporter can listen, or already does in a running agent."""
    for name, table in config.exporters.items():
        address = getattr(table, "listen", None)
        if not address:
            continue
        where = f"exporters.{name}"
        try:
            listen = Listen.parse(str(address))
        except ValueError as error:
            yield failure(where, str(error), f"Correct {where}.listen.")
            continue
        cause = listen_error(listen)
        if cause is None:
            yield ok(where, f"{listen} is free")
        elif hasattr(table, "token_file") and is_local_agent(listen, cast("AccessSettings", table)):
            yield ok(where, f"a running agent answers at {listen}")
        else:
            remedy = f"Set {where}.listen to a free address of this host."
            yield failure(where, f"cannot listen at {listen}: {cause}", remedy)


def tcp_listeners(config: Config) -> Iterator[tuple[str, AccessSettings, list[Listen]]]:
    """The tables with TCP listeners, and their addresses."""
    spans = config.spans
    if spans.enabled and (spans.http or spans.grpc):
        yield "spans", spans, [listen for listen in (spans.http, spans.grpc) if listen]
    for name, table in config.exporters.items():
        listen = getattr(table, "listen", None)
        if isinstance(listen, Listen) and listen and hasattr(table, "token_file"):
            yield f"exporters.{name}", cast("AccessSettings", table), [listen]


def access_error(name: str, settings: AccessSettings) -> str | None:
    """Why the tokens or certificates of the table ``name`` cannot be used."""
    try:
        server_tls(settings, what="Cannot listen", where=f"in [{name}]", log=lambda _: None)
        token_check(settings, where=f"in [{name}]", log=lambda _: None)
    except AccessError as error:
        return str(error)
    return None


_SPANS_RISK = "any client that reaches it can send spans, which are accepted as genuine"
_METRICS_RISK = "any client that reaches it can read the processes and their energy"


def examine_security(config: Config) -> Iterator[Finding]:
    """The reach and the protection of each TCP listener."""
    for name, settings, listens in tcp_listeners(config):
        if error := access_error(name, settings):
            yield failure(name, error)
        risk = _SPANS_RISK if name == "spans" else _METRICS_RISK
        for listen in listens:
            if exposed := exposure_warning(listen, settings, where=f"[{name}]", risk=risk):
                yield warning(name, exposed)
            elif not listen.loopback:
                yield ok(name, f"{listen} is open to the network, with TLS and authentication")
            elif name != "spans" and not settings.token_file:
                yield note(
                    name,
                    f"{listen} serves this machine only, and every user of it",
                    f"To hide the processes of users from each other, set token_file in [{name}].",
                )
            else:
                yield ok(name, f"{listen} serves this machine only")


# ------------------------------------------------------------------------------ spans and API


def examine_spans(config: Config) -> Iterator[Finding]:
    """Listeners for spans and queries, and the collector. Sends nothing, creates nothing."""
    spans = config.spans
    if not spans.enabled:
        yield note("spans", "not received: [spans] enabled = false")
    else:
        if spans.http:
            yield _span_port(config, "http", spans.http, lambda: is_local_agent(spans.http, spans))
        if spans.grpc:
            yield _span_port(config, "grpc", spans.grpc, lambda: _grpc_agent(config))
            yield from _grpc_extra("[spans] grpc")
        if spans.unix:
            names = ("otlp.sock", "feed.sock", *(["otlp-grpc.sock"] if spans.grpc else []))
            yield from _sockets(config, "spans.unix", names)
        if spans.forward:
            collector = parse_destination(spans.forward)
            waiting = "spans will wait, within spans.forward_queue"
            yield from _collector(collector, waiting, receiver_urls(config))
    if config.agent.api:
        yield from _sockets(config, "agent.api", ("api.sock",))


def receiver_urls(config: Config) -> Iterator[str]:
    """The URLs at which an agent with this configuration receives spans."""
    spans, run_dir = config.spans, run_directory(config)
    if not spans.enabled:
        return
    if spans.http and (listen_error(spans.http) is None or is_local_agent(spans.http, spans)):
        yield f"http://{spans.http}"
    if spans.grpc and (listen_error(spans.grpc) is None or _grpc_agent(config)):
        yield f"grpc://{spans.grpc}"
    if spans.unix:
        yield f"unix://{run_dir / 'otlp.sock'}"
        yield f"unix://{run_dir / 'otlp-grpc.sock'}"


def _span_port(config: Config, key: str, listen: Listen, is_agent: Callable[[], bool]) -> Finding:
    what = f"spans.{key}"
    cause = listen_error(listen)
    if cause is None:
        return ok(what, f"{listen} is free")
    if is_agent():
        return ok(what, f"a running agent receives at {listen}")
    required = is_explicit(config, what)
    result = "will not start" if required else "will go on without it"
    return (failure if required else warning)(
        what,
        f"cannot listen at {listen}: {cause}; the agent {result}",
        f"Find the program with `ss -ltnp sport = :{listen.port}` and end it, or set [spans] {key} "
        "to another address.",
    )


def _grpc_agent(config: Config) -> bool:
    return _accepts_connection(run_directory(config) / "otlp-grpc.sock")


_MAX_SOCKET_PATH = 107  # bytes of a Unix socket's path


def _sockets(config: Config, key: str, names: Iterable[str]) -> Iterator[Finding]:
    """Check that each socket can be created."""
    problem = failure if is_explicit(config, key) else warning
    for path in (run_directory(config) / name for name in names):
        if len(bytes(path)) > _MAX_SOCKET_PATH:
            detail = f"{path} is longer than the {_MAX_SOCKET_PATH} bytes of a Unix socket's path"
            yield problem(path.name, detail, "Set a shorter agent.run_dir.")
            continue
        try:
            mode = path.lstat().st_mode
        except OSError:
            yield ok(path.name, f"{path} is free")
            continue
        if not stat.S_ISSOCK(mode):
            remedy = "Move it away, or set another agent.run_dir."
            yield problem(path.name, f"{path} is not a socket", remedy)
        elif _accepts_connection(path):
            yield ok(path.name, f"a running agent answers at {path}")
        else:
            yield ok(path.name, f"{path} is unused and will be replaced")


def _accepts_connection(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(COLLECTOR_TIMEOUT)
        try:
            probe.connect(str(path))
        except PermissionError:
            return True  # of another user, possibly in use
        except OSError:
            return False
    return True


# --------------------------------------------------------------------------------- collectors


def examine_exporters(config: Config) -> Iterator[Finding]:
    """Check that the receiver of pushed metrics can be reached."""
    try:
        destination = metrics_destination(config)
    except ConfigError as error:
        yield failure("exporters.otlp.endpoint", str(error))
        return
    if destination is None:
        yield note("exporters.otlp", "metrics are not pushed: no endpoint is set")
        return
    waiting = "the newest metrics will be pushed when it can, and no total is lost"
    yield from _collector(destination, waiting, receiver_urls(config))


def _collector(destination: Destination, waiting: str, ours: Iterable[str]) -> Iterator[Finding]:
    """Connects and sends nothing. ``ours`` are the agent's own receivers, which are refused."""
    signal = destination.signal
    if destination.protocol is OtlpProtocol.GRPC:
        yield from _grpc_extra(f"[{signal.table}] {signal.address}")
    what = f"{signal.table}.{signal.address}"
    try:
        check_destination(destination, ours)
    except ConfigError as error:
        yield failure(what, str(error), "The agent does not start with it.")
        return
    try:
        if destination.socket:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(COLLECTOR_TIMEOUT)
                probe.connect(destination.socket)
        else:
            address = (destination.host, destination.port)
            socket.create_connection(address, timeout=COLLECTOR_TIMEOUT).close()
    except OSError as error:
        cause = (error.strerror or str(error)).lower()
        yield warning(
            what,
            f"{destination} cannot be reached: {cause}; {waiting}",
            f"Start the collector, or correct [{signal.table}] {signal.address}.",
        )
    else:
        yield ok(what, f"{destination} can be reached")


def _grpc_extra(setting: str) -> Iterator[Finding]:
    """A failure if ``setting`` needs gRPC and grpclib is not installed."""
    if find_spec("grpclib") is None:
        remedy = f'Run `pip install "wattspan[grpc]"`, or set {setting} otherwise.'
        yield failure("grpclib", f"not installed, {setting} needs it", remedy)
