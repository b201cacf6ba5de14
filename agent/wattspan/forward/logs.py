"""The way of log records to the user's collector: that of spans, with less room to wait in.

What is told here is told elsewhere too, in files that are kept, so what cannot be sent is
dropped sooner, and counted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

import msgspec

from wattspan.collector.answers import Answer, Verdict
from wattspan.collector.backoff import Backoff
from wattspan.collector.destination import parse_destination, parse_headers
from wattspan.collector.signals import LOGS
from wattspan.collector.transport import Transport
from wattspan.config import SpansSettings
from wattspan.forward.forwarder import Forwarder, open_transport
from wattspan.forward.records import Attributes, Record, Writer
from wattspan.model import SourceHealth
from wattspan.model.settings import Size
from wattspan.ports import Clock

QUEUE = Size.parse("1MiB")
"""What may wait: about a thousand records."""

REST = LOGS.quiet
"""A collector that refuses is left alone for so long: many take spans only, and never will."""

REMEDY = "If it takes no logs, [spans] forward_decisions = false sends none."


class Records:
    """Takes records from any thread; never waits for the collector, and never raises."""

    def __init__(
        self,
        settings: SpansSettings,
        clock: Clock,
        log: Callable[[str], None],
        resource: Attributes,
        *,
        version: str = "",
        transport: Transport | None = None,
        backoff: Backoff | None = None,
    ) -> None:
        """Raises ConfigError for an address or headers that cannot be, or a missing extra."""
        self._clock = clock
        self._writer = Writer(resource, version)
        inner = transport or open_transport(
            parse_destination(settings.forward, LOGS),
            parse_headers(settings.forward_headers),
            clock,
            version,
        )
        self._forwarder = Forwarder(
            msgspec.structs.replace(settings, forward_queue=QUEUE, forward_spool=False),
            clock,
            log,
            signal=LOGS,
            transport=Resting(inner, clock),
            backoff=backoff or Backoff(random.random),
        )
        self.start, self.stop = self._forwarder.start, self._forwarder.stop
        self.turn = self._forwarder.turn

    def offer(self, record: Record) -> None:
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


class Resting:
    """A transport to a collector that is not asked again and again what it has refused."""

    def __init__(self, transport: Transport, clock: Clock) -> None:
        self._transport, self._clock = transport, clock
        self._refusal: Answer | None = None
        self._until = 0
        self.abort, self.close = transport.abort, transport.close

    def send(self, body: bytes) -> Answer:
        if self._refusal is not None and self._clock.monotonic() < self._until:
            return self._refusal
        answer = self._transport.send(body)
        self._refusal = None
        if answer.verdict is Verdict.REFUSED:
            remedy = f"{answer.remedy} {REMEDY}".strip()
            self._refusal = answer = replace(answer, remedy=remedy)
            self._until = self._clock.monotonic() + REST
        return answer
