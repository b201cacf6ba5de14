"""Export targets that are slow, silent, busy, gone or nameless, and clients that never read."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from testbed.faults.arrivals import FORWARDED, NONE_DROPPED, account, all_arrived
from testbed.faults.collector import Collector
from testbed.faults.judge import flowing
from testbed.faults.observation import Sight
from testbed.faults.schedule import Fault, down, rises
from testbed.faults.stage import Stage

NAME = "collector.wattspan.test"
OVER_BIND = 'mount --make-rprivate / && mount --bind "$1" /etc/hosts && shift && exec "$@"'


class TargetStage(Stage):
    """A stage whose agent pushes its metrics and forwards spans to a collector with a name."""

    def __init__(self) -> None:
        self.collector = Collector()
        self._files = tempfile.TemporaryDirectory(prefix="wattspan-hosts-")
        self.hosts = Path(self._files.name) / "hosts"
        self.resolve(known=True)
        self.clients: list[socket.socket] = []
        try:
            super().__init__(
                within=["unshare", "--mount", "sh", "-c", OVER_BIND, "sh", str(self.hosts)],
                settings={
                    "spans.forward": f"http://{NAME}:{self.collector.port}",
                    "exporters.otlp.endpoint": f"http://{NAME}:{self.collector.port}",
                    "exporters.otlp.interval": "1s",
                    "exporters.otlp.timeout": "3s",
                    "exporters.prometheus.request_timeout": "5s",
                    "spans.forward_queue": "1MiB",
                },
            )
        except BaseException:
            self.collector.close()
            self._files.cleanup()
            raise

    def resolve(self, *, known: bool) -> None:
        """True if the collector's name resolves. Written in place: the file is bound elsewhere."""
        line = f"127.0.0.1 {NAME}\n" if known else "127.0.0.1 nobody\n"
        self.hosts.write_text(f"127.0.0.1 localhost\n{line}")

    def close(self) -> None:
        super().close()
        self.collector.close()
        self._files.cleanup()


def of(stage: Stage) -> TargetStage:
    assert isinstance(stage, TargetStage)
    return stage


def behave(mode: str) -> Callable[[Stage], None]:
    return lambda stage: of(stage).collector.behave(mode)


def caught_up(before: Sight, at_end: Sight, now: Sight) -> bool:
    """The agent is healthy, its queue is empty, and it has forwarded spans since."""
    return (
        flowing(before, at_end, now)
        and now.total("wattspan_spans_forward_queue_bytes") == 0
        and now.total(FORWARDED) > at_end.total(FORWARDED)
    )


HAS_ALL = (NONE_DROPPED, all_arrived(lambda stage: of(stage).collector))
BOOKS = account(lambda stage: of(stage).collector)


def bad(name: str, mode: str, means: str, lasts: float = 20.0) -> Fault:
    return Fault(
        name,
        behave(mode),
        behave("takes"),
        means,
        [down("forward"), down("otlp")],
        HAS_ALL,
        lasts=lasts,
        short=2.5,
        well=caught_up,
        note=BOOKS,
    )


# --------------------------------------------------------------------------------- bad clients


def _connect(stage: Stage, send: bytes) -> None:
    address = urlsplit(stage.address())
    assert address.hostname is not None
    with contextlib.suppress(OSError):
        client = socket.create_connection((address.hostname, address.port or 0), timeout=2)
        of(stage).clients.append(client)  # first: a rejected client is disconnected too
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(send)


def never_reads(stage: Stage) -> None:
    """Eight scrapers that send requests continuously and read no response."""
    for _ in range(8):
        _connect(stage, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)


def takes_all(stage: Stage) -> None:
    """A client opens far more connections than are served, and sends no data."""
    threads = [
        threading.Thread(target=lambda: [_connect(stage, b"") for _ in range(25)]) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def hang_up(stage: Stage) -> None:
    for client in of(stage).clients:
        client.close()
    of(stage).clients.clear()


FAULTS = [
    bad(
        "the collector is away for a minute",
        "gone",
        "Spans wait within `spans.forward_queue` and are forwarded in order; pushes are "
        "skipped, and the next has the complete totals.",
        lasts=60.0,
    ),
    bad("the collector accepts and never answers", "silent", "As an unavailable collector.", 40.0),
    bad("the collector answers a byte a second", "trickles", "As an unavailable collector.", 40.0),
    bad("the collector resets every connection", "resets", "As an unavailable collector."),
    bad(
        "the collector is busy (503, Retry-After)",
        "busy",
        "The agent retries after the delay that the collector requests.",
    ),
    Fault(
        "the collector's name no longer resolves",
        lambda stage: (of(stage).resolve(known=False), of(stage).collector.behave("resets")),
        lambda stage: (of(stage).resolve(known=True), of(stage).collector.behave("takes")),
        "As an unavailable collector; the name is resolved for each connection.",
        [down("forward"), down("otlp")],
        HAS_ALL,
        lasts=20.0,
        short=2.5,
        well=caught_up,
        note=BOOKS,
    ),
    Fault(
        "scrapers that never read the response",
        never_reads,
        hang_up,
        "Their connections are closed after `request_timeout`; others are served meanwhile.",
        lasts=10.0,
        short=3.0,
    ),
    Fault(
        "a client opens 200 connections and sends nothing",
        takes_all,
        hang_up,
        "One address gets only a part of the connections; the others are rejected and counted.",
        [rises("wattspan_agent_exporter_drops_total", exporter="prometheus")],
        unanswered="who scrapes has that client's address, and waits until it is hung up on",
        lasts=10.0,
        short=3.0,
    ),
]
