"""A real OTLP exporter that pushes a snapshot, which grows by a second with every look."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from testbed.scrapes import full_host
from wattspan.clock import SystemClock
from wattspan.model import SECOND, Instant, Snapshot
from wattspan.model.settings import Duration
from wattspan.ports import ExporterContext
from wattspan_exporters.otlp import OtlpSettings
from wattspan_exporters.otlp.exporter import OtlpExporter, open_otlp

OFTEN = Duration.parse("20ms")


@dataclass
class Pusher:
    """The world an exporter is shown; ``change`` it at any time."""

    world: Snapshot = field(default_factory=full_host)
    log: list[str] = field(default_factory=list)
    exporter: OtlpExporter | None = None
    stands_still: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def look(self) -> Snapshot:
        with self.lock:
            if not self.stands_still:
                at = self.world.at
                now = Instant(at.mono + SECOND, at.wall + SECOND, at.asleep)
                self.world = replace(self.world, at=now, sequence=self.world.sequence + 1)
            return self.world

    def change(self, **parts: Any) -> None:
        with self.lock:
            self.world = replace(self.world, **parts)

    @property
    def running(self) -> OtlpExporter:
        assert self.exporter is not None
        return self.exporter


def opened(
    endpoint: str, *, log: list[str], environ: Mapping[str, str] | None = None, **settings: Any
) -> OtlpExporter:
    table = OtlpSettings(endpoint=endpoint, **{"interval": OFTEN, **settings})
    context = ExporterContext(SystemClock(), "1.2.3", log.append)
    return open_otlp(table, context, environ or {})


@contextmanager
def pushing(endpoint: str, **settings: Any) -> Iterator[Pusher]:
    """Pushes while the block runs."""
    pusher = Pusher()
    pusher.exporter = opened(endpoint, log=pusher.log, **settings)
    pusher.exporter.start(pusher.look)
    try:
        yield pusher
    finally:
        pusher.exporter.stop()
