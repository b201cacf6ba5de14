"""Log records in wire format: one thing that happened, told to the user's collector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

AttributeValue = str | bool | int | float | list[str] | list[float]
LogAttributes = Mapping[str, AttributeValue]

_INFO, _WARN = 9, 13  # SeverityNumber, of which each word has four


@dataclass(frozen=True, slots=True)
class LogRecord:
    """An event, by OpenTelemetry's meaning: a log record with a ``name``.

    ``wall`` is when it happened, in Unix nanoseconds; ``body`` is a sentence. ``warns`` of what
    somebody should look at.
    """

    name: str
    wall: int
    body: str
    attributes: LogAttributes
    warns: bool = False


class LogRecordEncoder:
    """Writes ExportLogsServiceRequests of one record each, which appended are one request."""

    def __init__(self, resource: LogAttributes, version: str = "") -> None:
        """``resource`` says who tells: the attributes of an OpenTelemetry resource."""
        from opentelemetry.proto.collector.logs.v1 import logs_service_pb2

        self._request = logs_service_pb2.ExportLogsServiceRequest
        empty = self._request()
        told_by = empty.resource_logs.add()
        _fill(told_by.resource.attributes, resource)
        scope = told_by.scope_logs.add().scope
        scope.name, scope.version = "wattspan", version
        self._empty: bytes = empty.SerializeToString()

    def written(self, record: LogRecord, now: int) -> bytes:
        """``record`` in wire format, as it was noticed at the Unix nanoseconds ``now``."""
        request = self._request.FromString(self._empty)
        log = request.resource_logs[0].scope_logs[0].log_records.add()
        log.time_unix_nano, log.observed_time_unix_nano = _time(record.wall), _time(now)
        log.severity_number = _WARN if record.warns else _INFO
        log.severity_text = "WARN" if record.warns else "INFO"
        log.body.string_value = _text(record.body)
        if "event_name" in log.DESCRIPTOR.fields_by_name:
            log.event_name = record.name
        # The field is younger than the attribute, and not everybody reads it yet.
        _fill(log.attributes, {"event.name": record.name, **record.attributes})
        wire: bytes = request.SerializeToString()
        return wire


def _fill(pairs: Any, attributes: LogAttributes) -> None:
    for key, value in attributes.items():
        pair = pairs.add(key=key)
        if isinstance(value, list):
            pair.value.array_value.SetInParent()  # an empty list is a list
            for each in value:
                _set(pair.value.array_value.values.add(), each)
        else:
            _set(pair.value, value)


def _set(to: Any, value: str | bool | int | float) -> None:
    if isinstance(value, bool):
        to.bool_value = value
    elif isinstance(value, int) and -(2**63) <= value < 2**63:
        to.int_value = value
    elif isinstance(value, float):
        to.double_value = value
    else:
        to.string_value = _text(value)


def _time(wall: int) -> int:
    return min(max(0, wall), 2**64 - 1)


def _text(text: object) -> str:
    """As protobuf takes it: names come from applications, and may hold what is no Unicode."""
    return str(text).encode("utf-8", "replace").decode()
