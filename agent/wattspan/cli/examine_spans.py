"""Whether spans could come in, questions be answered, and the collector be reached."""

from __future__ import annotations

import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from wattspan.cli.diagnosis import Finding, Mark, Section
from wattspan.cli.examine_collector import PATIENCE, examine_collector, grpc_extra
from wattspan.cli.own_agent import is_there
from wattspan.cli.run_directory import asked_for, run_directory
from wattspan.cli.try_port import why_not_listen
from wattspan.config import Config
from wattspan.model.settings import Listen

_LONGEST = 107  # bytes of a Unix socket's path


def examine_spans(config: Config) -> Section:
    """Looks at ports and sockets and knocks at the collector; leaves nothing behind."""
    spans = config.spans
    findings: list[Finding] = []
    if not spans.enabled:
        findings.append(Finding(Mark.NOTE, "spans", "not received: [spans] enabled = false"))
    else:
        if spans.http:
            findings.append(_port(config, "http", spans.http, lambda at: is_there(at, spans)))
        if spans.grpc:
            findings.append(_port(config, "grpc", spans.grpc, lambda _: _grpc_agent(config)))
            findings += grpc_extra("[spans] grpc")
        if spans.unix:
            names = ("otlp.sock", "feed.sock", *(["otlp-grpc.sock"] if spans.grpc else []))
            findings += _sockets(config, "spans.unix", names)
        if spans.forward:
            from wattspan.collector.destination import parse_destination

            meanwhile = "spans will wait, within spans.forward_queue"
            collector = parse_destination(spans.forward)
            findings += examine_collector(collector, meanwhile, own_receivers(config))
    if config.agent.api:
        findings += _sockets(config, "agent.api", ("api.sock",))
    return Section("Spans and questions", tuple(findings))


def own_receivers(config: Config) -> Iterator[str]:
    """Where an agent with this configuration receives spans, or would, as URLs."""
    spans, run_dir = config.spans, run_directory(config)
    if not spans.enabled:
        return
    if spans.http and (why_not_listen(spans.http) is None or is_there(spans.http, spans)):
        yield f"http://{spans.http}"
    if spans.grpc and (why_not_listen(spans.grpc) is None or _grpc_agent(config)):
        yield f"grpc://{spans.grpc}"
    if spans.unix:
        yield f"unix://{run_dir / 'otlp.sock'}"
        yield f"unix://{run_dir / 'otlp-grpc.sock'}"


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


def _grpc_agent(config: Config) -> bool:
    return _answers(run_directory(config) / "otlp-grpc.sock")


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
