"""Whether a collector that something is sent to can be reached.

Whether spans could come in, questions be answered, and the collector be reached.

Whether what exporters push to could be reached.
"""

from __future__ import annotations

import socket
import stat
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

from wattspan.cli.agent_client import is_local_agent
from wattspan.cli.doctor.configuration import listen_error
from wattspan.cli.doctor.findings import DiagnosisSection, Finding, Severity
from wattspan.config import Config
from wattspan.model.settings import Listen
from wattspan.otlp.destination import Destination, OtlpProtocol, check_destination
from wattspan.ports import ConfigError
from wattspan.service.configuration import is_explicit, run_directory
from wattspan.service.destinations import metrics_destination

COLLECTOR_TIMEOUT = 1.0  # seconds


def examine_collector(
    destination: Destination, meanwhile: str, ours: Iterable[str]
) -> Iterator[Finding]:
    """Knocks, and sends nothing; ``meanwhile`` says what becomes of what is to be sent.

    ``ours`` are the agent's own receivers, which are no collector.
    """
    signal = destination.signal
    if destination.protocol is OtlpProtocol.GRPC:
        yield from grpc_extra(f"[{signal.table}] {signal.address}")
    what = f"{signal.table}.{signal.address}"
    try:
        check_destination(destination, ours)
    except ConfigError as error:
        yield Finding(Severity.FAIL, what, str(error), "The agent will not start before.")
        return
    try:
        if destination.socket:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(COLLECTOR_TIMEOUT)
                probe.connect(destination.socket)
        else:
            place = (destination.host, destination.port)
            socket.create_connection(place, timeout=COLLECTOR_TIMEOUT).close()
    except OSError as error:
        cause = (error.strerror or str(error)).lower()
        yield Finding(
            Severity.WARN,
            what,
            f"{destination} cannot be reached: {cause}; {meanwhile}",
            f"Start the collector, or correct [{signal.table}] {signal.address}.",
        )
    else:
        yield Finding(Severity.OK, what, f"{destination} can be reached")


def grpc_extra(setting: str) -> Iterator[Finding]:
    """A finding if ``setting`` asks for gRPC and there is none."""
    if find_spec("grpclib") is None:
        remedy = f'Run `pip install "wattspan[grpc]"`, or set {setting} otherwise.'
        yield Finding(Severity.FAIL, "grpclib", f"not installed, {setting} needs it", remedy)


_MAX_SOCKET_PATH = 107  # bytes of a Unix socket's path


def examine_spans(config: Config) -> DiagnosisSection:
    """Looks at ports and sockets and knocks at the collector; leaves nothing behind."""
    spans = config.spans
    findings: list[Finding] = []
    if not spans.enabled:
        findings.append(Finding(Severity.NOTE, "spans", "not received: [spans] enabled = false"))
    else:
        if spans.http:
            findings.append(
                _check_port(config, "http", spans.http, lambda at: is_local_agent(at, spans))
            )
        if spans.grpc:
            findings.append(_check_port(config, "grpc", spans.grpc, lambda _: _grpc_agent(config)))
            findings += grpc_extra("[spans] grpc")
        if spans.unix:
            names = ("otlp.sock", "feed.sock", *(["otlp-grpc.sock"] if spans.grpc else []))
            findings += _check_sockets(config, "spans.unix", names)
        if spans.forward:
            from wattspan.otlp.destination import parse_destination

            meanwhile = "spans will wait, within spans.forward_queue"
            collector = parse_destination(spans.forward)
            findings += examine_collector(collector, meanwhile, receiver_urls(config))
    if config.agent.api:
        findings += _check_sockets(config, "agent.api", ("api.sock",))
    return DiagnosisSection("Spans and questions", tuple(findings))


def receiver_urls(config: Config) -> Iterator[str]:
    """Where an agent with this configuration receives spans, or would, as URLs."""
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


def _check_port(
    config: Config, key: str, listen: Listen, is_agent: Callable[[Listen], bool]
) -> Finding:
    what = f"spans.{key}"
    cause = listen_error(listen)
    if cause is not None:
        if is_agent(listen):
            return Finding(Severity.OK, what, f"a running agent receives at {listen}")
        must = is_explicit(config, what)
        return Finding(
            Severity.FAIL if must else Severity.WARN,
            what,
            f"cannot listen at {listen}: {cause}; the agent "
            f"{'will not start' if must else 'will go on without it'}",
            f"`ss -ltnp sport = :{listen.port}` names who has it; end that, or set [spans] {key} "
            "to another address.",
        )
    return Finding(Severity.OK, what, f"{listen} is free")


def _grpc_agent(config: Config) -> bool:
    return _accepts_connection(run_directory(config) / "otlp-grpc.sock")


def _check_sockets(config: Config, key: str, names: tuple[str, ...]) -> Iterator[Finding]:
    """Whether each could be listened on; that the directory can be written is told elsewhere."""
    bad = Severity.FAIL if is_explicit(config, key) else Severity.WARN
    for path in (run_directory(config) / name for name in names):
        if len(bytes(path)) > _MAX_SOCKET_PATH:
            detail = f"{path} is longer than the {_MAX_SOCKET_PATH} bytes of a Unix socket's path"
            yield Finding(bad, path.name, detail, "Set a shorter agent.run_dir.")
            continue
        try:
            mode = path.lstat().st_mode
        except OSError:
            yield Finding(Severity.OK, path.name, f"{path} is free")
            continue
        if not stat.S_ISSOCK(mode):
            detail = f"{path} is something else than a socket"
            yield Finding(bad, path.name, detail, "Move it away, or set another agent.run_dir.")
        elif _accepts_connection(path):
            yield Finding(Severity.OK, path.name, f"a running agent answers at {path}")
        else:
            yield Finding(Severity.OK, path.name, f"{path} was left behind and will be replaced")


def _accepts_connection(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(COLLECTOR_TIMEOUT)
        try:
            probe.connect(str(path))
        except PermissionError:
            return True  # somebody's, and not for us to say whether it is dead
        except OSError:
            return False
    return True


def examine_exporters(config: Config) -> DiagnosisSection:
    """Knocks at the receiver of metrics; that ports can be listened on is told elsewhere."""
    try:
        destination = metrics_destination(config)
    except ConfigError as error:
        return DiagnosisSection(
            "Exporters", (Finding(Severity.FAIL, "exporters.otlp.endpoint", str(error)),)
        )
    if destination is None:
        note = Finding(
            Severity.NOTE, "exporters.otlp", "metrics are not pushed: no endpoint is set"
        )
        return DiagnosisSection("Exporters", (note,))
    meanwhile = "the newest metrics will be pushed when it can, and no total is lost"
    return DiagnosisSection(
        "Exporters", tuple(examine_collector(destination, meanwhile, receiver_urls(config)))
    )
