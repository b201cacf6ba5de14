"""The way of log records to the user's collector: that of spans, with less room to wait in.

What is told here is told elsewhere too, in files that are kept, so what cannot be sent is
dropped sooner, and counted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

import msgspec

from wattspan.config import SpansSettings
from wattspan.model import SourceHealth
from wattspan.model.settings import Size
from wattspan.otlp.destination import LOGS, parse_destination, parse_headers
from wattspan.otlp.forwarder import Forwarder, open_transport
from wattspan.otlp.health import RetryBackoff
from wattspan.otlp.log_records import LogAttributes, LogRecord, LogRecordEncoder
from wattspan.otlp.transport import ExportResult, ExportStatus, Transport
from wattspan.ports import Clock

QUEUE_SIZE = Size.parse("1MiB")
"""What may wait: about a thousand records."""

REFUSED_PAUSE = LOGS.quiet
"""A collector that refuses is left alone for so long: many take spans only, and never will."""

REFUSED_REMEDY = "If it takes no logs, [spans] forward_decisions = false sends none."


class LogForwarder:
    """Takes records from any thread; never waits for the collector, and never raises."""

    def __init__(
        self,
        settings: SpansSettings,
        clock: Clock,
        log: Callable[[str], None],
        resource: LogAttributes,
        *,
        version: str = "",
        transport: Transport | None = None,
        backoff: RetryBackoff | None = None,
    ) -> None:
        """Raises ConfigError for an address or headers that cannot be, or a missing extra."""
        self._clock = clock
        self._writer = LogRecordEncoder(resource, version)
        inner = transport or open_transport(
            parse_destination(settings.forward, LOGS),
            parse_headers(settings.forward_headers),
            clock,
            version,
        )
        self._forwarder = Forwarder(
            msgspec.structs.replace(settings, forward_queue=QUEUE_SIZE, forward_spool=False),
            clock,
            log,
            signal=LOGS,
            transport=RefusalBackoffTransport(inner, clock),
            backoff=backoff or RetryBackoff(random.random),
        )
        self.start, self.stop = self._forwarder.start, self._forwarder.stop
        self.turn = self._forwarder.turn

    def offer(self, record: LogRecord) -> None:
        """Send ``record`` on, when the collector takes it."""
        self._forwarder.put(self._writer.written(record, self._clock.now().wall), 1)

    @property
    def sent(self) -> int:
        return self._forwarder.stats.forwarded

    @property
    def drops(self) -> Mapping[str, int]:
        """Records that were not sent, by reason; see ForwardStats."""
        return self._forwarder.stats.drops

    def health(self) -> SourceHealth:
        return self._forwarder.health()


class RefusalBackoffTransport:
    """A transport to a collector that is not asked again and again what it has refused."""

    def __init__(self, transport: Transport, clock: Clock) -> None:
        self._transport, self._clock = transport, clock
        self._refusal: ExportResult | None = None
        self._until = 0
        self.abort, self.close = transport.abort, transport.close

    def send(self, body: bytes) -> ExportResult:
        if self._refusal is not None and self._clock.monotonic() < self._until:
            return self._refusal
        answer = self._transport.send(body)
        self._refusal = None
        if answer.verdict is ExportStatus.REFUSED:
            remedy = f"{answer.remedy} {REFUSED_REMEDY}".strip()
            self._refusal = answer = replace(answer, remedy=remedy)
            self._until = self._clock.monotonic() + REFUSED_PAUSE
        return answer
