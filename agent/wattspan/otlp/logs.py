"""Log records in wire format, and their export to the user's collector.

Every exported event is also in files that are kept, so records that cannot be sent wait in a
small queue and are dropped and counted sooner than spans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from wattspan.config import SpansSettings
from wattspan.model import SourceHealth
from wattspan.model.settings import Size
from wattspan.otlp.destination import LOGS
from wattspan.otlp.forwarder import Forwarder
from wattspan.otlp.transport import Transport
from wattspan.ports import Clock
from wattspan.util.protobuf import Attributes, add_attributes, serialize, valid_text
from wattspan.util.throttle import RetryBackoff

QUEUE_SIZE = Size.parse("1MiB")
"""The size of the queue, about a thousand records."""

_INFO, _WARN = 9, 13  # SeverityNumber, the first of the four of each severity


@dataclass(frozen=True, slots=True)
class LogRecord:
    """An OpenTelemetry event: a log record with a ``name``.

    ``wall`` is the time of the event in Unix nanoseconds, ``body`` a sentence. ``warns`` marks
    events that need attention.
    """

    name: str
    wall: int
    body: str
    attributes: Attributes
    warns: bool = False


class LogRecordEncoder:
    """Encodes ExportLogsServiceRequests of one record; concatenated they are one request."""

    def __init__(self, resource: Attributes, version: str = "") -> None:
        """``resource`` are the attributes of the OpenTelemetry resource."""
        from opentelemetry.proto.collector.logs.v1 import logs_service_pb2

        self._request = logs_service_pb2.ExportLogsServiceRequest
        empty = self._request()
        resource_logs = empty.resource_logs.add()
        add_attributes(resource_logs.resource.attributes, resource)
        scope = resource_logs.scope_logs.add().scope
        scope.name, scope.version = "wattspan", version
        self._empty = serialize(empty)

    def encode(self, record: LogRecord, now: int) -> bytes:
        """``record`` in wire format, observed at the Unix nanoseconds ``now``."""
        request = self._request.FromString(self._empty)
        log = request.resource_logs[0].scope_logs[0].log_records.add()
        log.time_unix_nano, log.observed_time_unix_nano = _time(record.wall), _time(now)
        log.severity_number = _WARN if record.warns else _INFO
        log.severity_text = "WARN" if record.warns else "INFO"
        log.body.string_value = valid_text(record.body)
        if "event_name" in log.DESCRIPTOR.fields_by_name:
            log.event_name = record.name
        # The field is newer than the attribute, and some collectors read the attribute only.
        add_attributes(log.attributes, {"event.name": record.name, **record.attributes})
        return serialize(request)


def _time(wall: int) -> int:
    return min(max(0, wall), 2**64 - 1)


class LogForwarder:
    """Sends records to the collector. Accepts them from any thread; never waits or raises."""

    def __init__(
        self,
        settings: SpansSettings,
        clock: Clock,
        log: Callable[[str], None],
        resource: Attributes,
        *,
        version: str = "",
        transport: Transport | None = None,
        backoff: RetryBackoff | None = None,
    ) -> None:
        """ConfigError for an invalid address or header, or a missing extra."""
        self._clock = clock
        self._encoder = LogRecordEncoder(resource, version)
        self._forwarder = Forwarder(
            msgspec.structs.replace(settings, forward_queue=QUEUE_SIZE, forward_spool=False),
            clock,
            log,
            version=version,
            signal=LOGS,
            transport=transport,
            backoff=backoff,
        )
        self.start, self.stop = self._forwarder.start, self._forwarder.stop
        self.turn = self._forwarder.turn

    def offer(self, record: LogRecord) -> None:
        """Queue ``record`` for the collector."""
        self._forwarder.put(self._encoder.encode(record, self._clock.now().wall), 1)

    @property
    def sent(self) -> int:
        return self._forwarder.stats.forwarded

    @property
    def drops(self) -> Mapping[str, int]:
        """Dropped records by reason, as in ForwardStats."""
        return self._forwarder.stats.drops

    def health(self) -> SourceHealth:
        return self._forwarder.health()
