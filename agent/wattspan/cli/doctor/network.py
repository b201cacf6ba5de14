"""Checks of listeners and destinations: ports, security, spans, the API and pushed metrics."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import cast

from wattspan.cli.doctor import Finding, Severity, declared, failure, ok, warning
from wattspan.config import AccessSettings, Config
from wattspan.http.access_policy import (
    AccessError,
    bearer_token,
    exposure_warning,
    server_tls,
    token_check,
)
from wattspan.model.settings import Listen, Table, keys
from wattspan.otlp.destination import Destination, parse_destination
from wattspan.ports import ConfigError
from wattspan.sdk import API_SOCKET, OTLP_HTTP_SOCKET
from wattspan.service.configuration import (
    agent_directories,
    metrics_destination,
    run_directory,
    second_listener,
)
from wattspan.util.unix_sockets import PeerCredentials, peer_credentials

CONNECT_TIMEOUT = 1.0  # seconds


def listen_error(listen: Listen) -> str | None:
    """Cause that prevents listening there, in lower case; None without one."""
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
        listen = getattr(table, "listen", None)
        if isinstance(listen, Listen) and listen:
            where = f"exporters.{name}"
            answers = partial(_answers_as_agent, listen, table)
            proven = partial(_has_agent, config, listen)
            remedy = f"Set {where}.listen to a free address of this host."
            yield _port(where, listen, answers, proven, failure, "", remedy)


def _answers_as_agent(listen: Listen, table: Table) -> bool:
    return hasattr(table, "token_file") and _is_local_agent(listen, cast("AccessSettings", table))


def _is_local_agent(listen: Listen, settings: AccessSettings) -> bool:
    # http.client and ssl are not imported for `wattspan config`, which uses this module.
    from wattspan.cli.agent_client import is_local_agent

    return is_local_agent(listen, settings)


def _port(
    what: str,
    listen: Listen,
    answers: Callable[[], bool],
    proven: Callable[[], bool],
    problem: Callable[[str, str, str], Finding],
    consequence: str,
    remedy: str,
) -> Finding:
    cause = listen_error(listen)
    if cause is None:
        return ok(what, f"{listen} is free")
    if not answers():
        return problem(what, f"cannot listen at {listen}: {cause}{consequence}", remedy)
    if proven():
        return ok(what, f"a running agent answers at {listen}")
    return declared("listener-unproven", what=what, listen=listen, port=listen.port)


def _has_agent(config: Config, listen: Listen) -> bool:
    """True if the kernel shows that agents of this host have all listeners at an address.

    Any user may listen there before the agent, and answer as it does. Its run directory is its own:
    the kernel names the processes that listen on its Unix sockets. Without rights to see their
    descriptors, it shows the same user only.
    """
    from wattspan.processes.inspector import ProcessInspector, listening_sockets  # heavy for --help

    names = (API_SOCKET, OTLP_HTTP_SOCKET)
    paths = (f"{place}/{name}" for place in agent_directories(config) for name in names)
    agents = {one for path in paths if (one := _listener_of(path)).uid is not None}
    found = socket.getaddrinfo(listen.host or None, listen.port, type=socket.SOCK_STREAM)
    ends = {str(end[0]).partition("%")[0] for *_, end in found}
    owners = [
        owner
        for at, port, owner in listening_sockets(Path("/proc/self/net"))
        if port == listen.port
        and (at.is_unspecified or str(getattr(at, "ipv4_mapped", None) or at) in ends)
    ]
    kernel = ProcessInspector()
    try:
        return bool(owners) and all(
            any(
                agent.uid == owner.user
                and (agent.pid is None or kernel.holds(agent.pid, owner.inode) is not False)
                for agent in agents
            )
            for owner in owners
        )
    finally:
        kernel.close()


def _listener_of(path: str) -> PeerCredentials:
    """The process that listens on a Unix socket."""
    try:
        return _connect_unix(path)
    except OSError:
        return PeerCredentials()


def tcp_listeners(config: Config) -> Iterator[tuple[str, AccessSettings, list[Listen]]]:
    """The tables with TCP listeners, and their addresses."""
    spans = config.spans
    if spans.enabled and (spans.http or spans.grpc):
        yield "spans", spans, [listen for listen in (spans.http, spans.grpc) if listen]
    for name, table in config.exporters.items():
        listen = getattr(table, "listen", None)
        if isinstance(listen, Listen) and listen and hasattr(table, "token_file"):
            yield f"exporters.{name}", cast("AccessSettings", table), [listen]


def answering_agents(config: Config) -> Iterator[Listen]:
    """The addresses of exporters at which a running agent answers."""
    for name, table, listens in tcp_listeners(config):
        yield from (one for one in listens if name != "spans" and _is_local_agent(one, table))


def access_error(name: str, settings: AccessSettings) -> str | None:
    """Fault of the tokens or certificates of the table ``name``; None without one."""
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
                yield declared("listener-without-token", name=name, listen=listen)
            else:
                yield ok(name, f"{listen} serves this machine only")
    yield from (warning("secrets", sentence) for sentence in inline_secrets(config))


def inline_secrets(config: Config) -> Iterator[str]:
    """A sentence for each secret in the configuration itself that a file of its own could hold."""
    for where, table in config.tables.items():
        known = keys(type(table))
        for name, key in known.items():
            if key.secret and getattr(table, name) and f"{name}_file" in known:
                origin = config.origin(f"{where}.{name}")
                yield (
                    f"[{where}] {name} ({origin}) holds a secret, which every reader of the"
                    " configuration sees. Put it into a file of the agent's user with mode 0600,"
                    f" and name that in {name}_file."
                )


# -------------------------------------------------------------------------- spans and metrics


def examine_spans(config: Config) -> Iterator[Finding]:
    """The listeners of spans, and the collector. Sends nothing, creates nothing."""
    spans = config.spans
    if not spans.enabled:
        yield declared("spans-off")
        return
    if spans.http:
        yield _span_port(config, "http", spans.http, partial(_is_local_agent, spans.http, spans))
        if other := second_listener(config):
            answers = partial(_is_local_agent, other, spans)
            found = _span_port(config, "http", other, answers, required=False)
            if found.mark is not Severity.OK:
                yield found
    if spans.grpc:
        grpc_socket = run_directory(config) / "otlp-grpc.sock"
        yield _span_port(config, "grpc", spans.grpc, partial(_accepts_connection, grpc_socket))
    if spans.forward:
        waiting = "spans will wait, within spans.forward_queue"
        yield _collector(parse_destination(spans.forward), waiting)


def examine_engines(config: Config) -> Iterator[Finding]:
    """The serving engines whose pages the agent reads. No port is asked."""
    for engine in config.serving.engine:
        what = f"engine {engine.label}"
        try:
            bearer_token(engine.token_file, "in [[serving.engine]]")
        except AccessError as error:
            yield failure(what, str(error))
            continue
        who = f", processes of {engine.process}" if engine.process else ""
        seen = f'wattspan_source_up{{source="engine:{engine.label}"}}'
        yield ok(what, f"{engine.url} ({engine.kind}{who}), each {engine.interval}; up: {seen}")


def _span_port(
    config: Config,
    key: str,
    listen: Listen,
    answers: Callable[[], bool],
    *,
    required: bool = True,
) -> Finding:
    required = required and f"spans.{key}" in config.origins
    result = "will not start" if required else "will go on without it"
    return _port(
        f"spans.{key}",
        listen,
        answers,
        partial(_has_agent, config, listen),
        failure if required else warning,
        f"; the agent {result}",
        f"Find the program with `ss -ltnp sport = :{listen.port}` and end it, or set [spans] {key} "
        "to another address.",
    )


def _accepts_connection(path: Path) -> bool:
    """True if a process listens there, or one of another user may."""
    try:
        _connect_unix(str(path))
    except PermissionError:
        return True
    except OSError:
        return False
    return True


def examine_exporters(config: Config) -> Iterator[Finding]:
    """Check that the receiver of pushed metrics can be reached."""
    try:
        destination = metrics_destination(config)
    except ConfigError as error:
        yield failure("exporters.otlp.endpoint", str(error))
        return
    if destination is None:
        yield declared("push-off")
    else:
        waiting = "the newest metrics will be pushed when it can, and no total is lost"
        yield _collector(destination, waiting)


def _collector(destination: Destination, waiting: str) -> Finding:
    """Connects and sends nothing."""
    signal = destination.signal
    what = f"{signal.table}.{signal.address}"
    try:
        if destination.socket:
            _connect_unix(destination.socket)
        else:
            address = (destination.host, destination.port)
            socket.create_connection(address, timeout=CONNECT_TIMEOUT).close()
    except OSError as error:
        cause = (error.strerror or str(error)).lower()
        return declared(
            "collector-unreachable",
            what=what,
            destination=destination,
            cause=cause,
            waiting=waiting,
            table=signal.table,
            address=signal.address,
        )
    return ok(what, f"{destination} can be reached")


def _connect_unix(path: str) -> PeerCredentials:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(CONNECT_TIMEOUT)
        probe.connect(path)
        return peer_credentials(probe)
