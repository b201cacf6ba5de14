"""A real Prometheus exporter on a loopback port, and a client for it."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from testbed.scrapes import full_host
from wattspan.model import Snapshot
from wattspan.model.settings import convert
from wattspan.ports import Clock, Exporter, ExporterContext
from wattspan.processes.principals import PrincipalResolver
from wattspan.service.span_assembly import PeerPrincipalLookup
from wattspan.testing import ManualClock
from wattspan_exporters.prometheus import plugin


@dataclass
class Answer:
    """Responses received."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes


@dataclass
class Served:
    """A running exporter; ``snapshot`` may be replaced at any time."""

    exporter: Exporter
    snapshot: Snapshot
    clock: Clock
    log: list[str] = field(default_factory=list)
    before: Callable[[], None] = lambda: None  # called whenever the exporter looks

    def look(self) -> Snapshot:
        self.before()
        return self.snapshot

    @property
    def port(self) -> int:
        assert self.exporter.address
        port = urlsplit(self.exporter.address).port
        assert port
        return port

    def connect(self, tls: ssl.SSLContext | None = None) -> http.client.HTTPConnection:
        if tls is None:
            return http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=20, context=tls)

    def ask(
        self, path: str = "/metrics", method: str = "GET", tls: ssl.SSLContext | None = None,
        body: bytes | None = None, **headers: str,
    ) -> Answer:  # fmt: skip
        """One request on a connection of its own; ``accept_encoding`` is Accept-Encoding."""
        with closing(self.connect(tls)) as connection:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body=body, headers=named)
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())


@contextmanager
def serving(clock: Clock | None = None, **settings: object) -> Iterator[Served]:
    """An exporter of ``full_host()`` while the block runs."""
    clock = clock or ManualClock()
    log: list[str] = []
    table = convert({"listen": "127.0.0.1:0", **settings}, plugin.settings, "exporters.prometheus")
    users = PeerPrincipalLookup(clock, PrincipalResolver.of_host())
    context = ExporterContext(clock, "1.2.3", log.append, principals=users)
    exporter = plugin.open(table, context)
    assert exporter is not None
    served = Served(exporter, full_host(), clock, log)
    exporter.start(served.look)
    try:
        yield served
    finally:
        exporter.stop()
        users.close()
