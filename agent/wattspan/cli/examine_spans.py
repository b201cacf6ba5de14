"""Whether spans could come in, questions be answered, and the collector be reached."""

from __future__ import annotations

import http.client
import socket
import stat
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from wattspan.cli.diagnosis import Finding, Mark, Section
from wattspan.cli.run_directory import asked_for, run_directory
from wattspan.cli.try_port import why_not_listen
from wattspan.config import Config
from wattspan.settings import Listen

PATIENCE = 1.0  # seconds
_LONGEST = 107  # bytes of a Unix socket's path
_GRPC = 'Run `pip install "wattspan[grpc]"`, or set {} otherwise.'


def examine_spans(config: Config) -> Section:
    """Looks at ports and sockets and knocks at the collector; leaves nothing behind."""
    spans = config.spans
    findings: list[Finding] = []
    if not spans.enabled:
        findings.append(Finding(Mark.NOTE, "spans", "not received: [spans] enabled = false"))
    else:
        if spans.http:
            findings.append(_port(config, "http", spans.http, _is_agent))
        if spans.grpc:
            findings.append(_port(config, "grpc", spans.grpc, lambda _: _grpc_agent(config)))
            findings += _grpc("[spans] grpc")
        if spans.unix:
            names = ("otlp.sock", "feed.sock", *(["otlp-grpc.sock"] if spans.grpc else []))
            findings += _sockets(config, "spans.unix", names)
        if spans.forward:
            findings += _collector(spans.forward)
    if config.agent.api:
        findings += _sockets(config, "agent.api", ("api.sock",))
    return Section("Spans and questions", tuple(findings))


def _port(config: Config, key: str, listen: Listen, is_agent: Callable[[Listen], bool]) -> Finding:
    what = f"spans.{key}"
    cause = why_not_listen(listen)
    if cause is not None:
        if is_agent(listen):
            return Finding(Mark.OK, what, f"a running agent receives at {listen}")
        must = asked_for(config, what)
        return Finding(
            Mark.FAIL if must else Mark.WARN,
            what,
            f"cannot listen at {listen}: {cause}; the agent "
            f"{'will not start' if must else 'will go on without it'}",
            f"`ss -ltnp sport = :{listen.port}` names who has it; end that, or set [spans] {key} "
            "to another address.",
        )
    return Finding(Mark.OK, what, f"{listen} is free")


def _is_agent(listen: Listen) -> bool:
    """Whether a wattspan agent receives OTLP/HTTP there: it alone says so of metrics."""
    connection = http.client.HTTPConnection(
        listen.host or "localhost", listen.port, timeout=PATIENCE
    )
    try:
        connection.request("GET", "/v1/metrics")
        return connection.getresponse().read(64).startswith(b"wattspan ")
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _grpc_agent(config: Config) -> bool:
    return _answers(run_directory(config) / "otlp-grpc.sock")


def _grpc(setting: str) -> Iterator[Finding]:
    if find_spec("grpclib") is None:
        yield Finding(Mark.FAIL, "grpclib", f"not installed, {setting} needs it", _remedy(setting))


def _remedy(setting: str) -> str:
    return _GRPC.format(setting)


def _sockets(config: Config, key: str, names: tuple[str, ...]) -> Iterator[Finding]:
    """Whether each could be listened on; that the directory can be written is told elsewhere."""
    bad = Mark.FAIL if asked_for(config, key) else Mark.WARN
    for path in (run_directory(config) / name for name in names):
        if len(bytes(path)) > _LONGEST:
            detail = f"{path} is longer than the {_LONGEST} bytes of a Unix socket's path"
            yield Finding(bad, path.name, detail, "Set a shorter agent.run_dir.")
            continue
        try:
            mode = path.lstat().st_mode
        except OSError:
            yield Finding(Mark.OK, path.name, f"{path} is free")
            continue
        if not stat.S_ISSOCK(mode):
            detail = f"{path} is something else than a socket"
            yield Finding(bad, path.name, detail, "Move it away, or set another agent.run_dir.")
        elif _answers(path):
            yield Finding(Mark.OK, path.name, f"a running agent answers at {path}")
        else:
            yield Finding(Mark.OK, path.name, f"{path} was left behind and will be replaced")


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PATIENCE)
        try:
            probe.connect(str(path))
        except PermissionError:
            return True  # somebody's, and not for us to say whether it is dead
        except OSError:
            return False
    return True


def _collector(url: str) -> Iterator[Finding]:
    from wattspan.forward.destination import Protocol, parse_destination

    destination = parse_destination(url)
    if destination.protocol is Protocol.GRPC:
        yield from _grpc("[spans] forward")
    try:
        if destination.socket:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(PATIENCE)
                probe.connect(destination.socket)
        else:
            place = (destination.host, destination.port)
            socket.create_connection(place, timeout=PATIENCE).close()
    except OSError as error:
        yield Finding(
            Mark.WARN,
            "spans.forward",
            f"{destination} cannot be reached: {(error.strerror or str(error)).lower()}; spans "
            "will wait, within spans.forward_queue",
            "Start the collector, or correct [spans] forward.",
        )
    else:
        yield Finding(Mark.OK, "spans.forward", f"{destination} can be reached")
