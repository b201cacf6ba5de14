"""The agent's receivers as they are configured, on free ports and in a directory of their own."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from testbed.otlp import KeptSink
from wattspan.clock import SystemClock
from wattspan.config.settings import SpansSettings
from wattspan.http.limits import RejectionCounter, ServerLimits
from wattspan.http.server import HttpServer
from wattspan.ingest.export_request import RequestedAttributes, WorkAttributes
from wattspan.ingest.listeners import GRPC_SOCKET, open_receivers
from wattspan.model.settings import Listen, Size
from wattspan.ports import Clock
from wattspan.processes.principals import PrincipalResolver
from wattspan.sdk import OTLP_HTTP_SOCKET
from wattspan.service.span_assembly import PeerPrincipalLookup


@dataclass
class Receiving:
    sink: KeptSink
    addresses: tuple[str, ...]
    run_dir: Path
    log: list[str]

    @property
    def http(self) -> tuple[str, int]:
        return self._end("http")

    @property
    def grpc(self) -> tuple[str, int]:
        return self._end("grpc")

    @property
    def http_socket(self) -> str:
        return str(self.run_dir / OTLP_HTTP_SOCKET)

    @property
    def grpc_socket(self) -> str:
        return str(self.run_dir / GRPC_SOCKET)

    def _end(self, scheme: str) -> tuple[str, int]:
        (url,) = [each for each in self.addresses if each.startswith(f"{scheme}://")]
        host, _, port = url.removeprefix(f"{scheme}://").partition("/")[0].rpartition(":")
        return host, int(port)

    def connect(self, scheme: str = "http") -> socket.socket:
        return socket.create_connection(self._end(scheme), timeout=20)


@contextmanager
def receiving(
    run_dir: Path,
    limits: ServerLimits | None = None,
    *,
    max_request: int = 1 << 20,
    token_file: str = "",
    clock: Clock | None = None,
    refusals: RejectionCounter | None = None,
    work: WorkAttributes = tuple,
) -> Iterator[Receiving]:
    """Receivers of every kind, with a sink that keeps all."""
    clock, sink, log = clock or SystemClock(), KeptSink(), []
    any_port = Listen("127.0.0.1:0")
    settings = SpansSettings(
        http=any_port, grpc=any_port, max_request=Size(max_request), token_file=token_file
    )
    users = PeerPrincipalLookup(clock, PrincipalResolver.of_host())
    server = HttpServer(clock, log=log.append, limits=limits, principals=users)
    addresses = open_receivers(
        server, settings, run_dir, sink, clock, is_set=lambda _: True, log=log.append,
        refusals=refusals, asked=RequestedAttributes(work=work),
    )  # fmt: skip
    server.start()
    try:
        yield Receiving(sink, addresses, run_dir, log)
    finally:
        server.stop()
        users.close()
