"""Pushes of the newest snapshot at an interval by a thread, and the receiver that they go to.

Nothing is queued: sums are cumulative, so the newest push has the totals of all older ones. While
the receiver is unavailable, intermediate totals and values of gauges are lost.
"""

from __future__ import annotations

import os
import random
import ssl
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

from wattspan.http.access_policy import client_tls
from wattspan.model import SECOND, Snapshot, SourceHealth
from wattspan.otlp.destination import (
    METRICS,
    Destination,
    as_grpc,
    can_examine,
    parse_destination,
    parse_headers,
    read_headers,
)
from wattspan.otlp.http_transport import address_errors, open_transport
from wattspan.otlp.transport import (
    MAX_BACKOFF,
    DestinationHealth,
    ExportResult,
    ExportStatus,
    Transport,
    retry_result,
)
from wattspan.ports import (
    Clock,
    ConfigError,
    ExporterContext,
    SnapshotView,
    error_sentences,
)
from wattspan.util.http_get import client_context
from wattspan.util.throttle import RetryBackoff
from wattspan_exporters.catalogue import select_metrics
from wattspan_exporters.otlp import OtlpSettings
from wattspan_exporters.otlp.encoder import MetricsEncoder, Value

_TABLE_NAME = "in [exporters.otlp]"


def endpoint_address(settings: OtlpSettings) -> str:
    """The endpoint with the scheme of its protocol."""
    return as_grpc(settings.endpoint) if settings.protocol == "grpc" else settings.endpoint


def endpoint_destination(settings: OtlpSettings) -> Destination:
    """The address of the receiver; ConfigError."""
    return parse_destination(endpoint_address(settings), METRICS)


def endpoint_transport(settings: OtlpSettings, clock: Clock, version: str) -> Transport:
    """The transport to the receiver; a WattspanError for invalid settings or files."""
    destination = endpoint_destination(settings)
    return open_transport(
        destination,
        parse_headers(settings.headers, METRICS) | _file_headers(settings),
        clock,
        version,
        trust=tls_context_factory(settings) if destination.tls else client_context,
        answer_within=settings.timeout / SECOND,
        compress={"gzip": True, "none": False}.get(settings.compression),
    )


def _file_headers(settings: OtlpSettings) -> dict[str, str]:
    return read_headers(settings.headers_file, "headers_file", _TABLE_NAME)


def tls_context_factory(settings: OtlpSettings) -> Callable[[], ssl.SSLContext]:
    """A function that makes the TLS context; AccessError now for invalid files."""

    def context() -> ssl.SSLContext:
        files = settings.tls_ca, settings.tls_certificate, settings.tls_key
        return client_tls(*files, what="Cannot push metrics", where=_TABLE_NAME)

    context()
    return context


def otlp_faults(settings: OtlpSettings) -> Iterator[str]:
    """A sentence for each error of the settings.

    Files that this user may not read are skipped; the agent's user may.
    """
    yield from address_errors(endpoint_address(settings), settings.headers, METRICS)
    if settings.headers_file and can_examine(settings.headers_file):
        yield from error_sentences(lambda: _file_headers(settings))
    tls = [path for path in (settings.tls_ca, settings.tls_certificate, settings.tls_key) if path]
    if tls and all(map(can_examine, tls)):
        yield from error_sentences(lambda: tls_context_factory(settings))
    yield from error_sentences(
        lambda: configured_attributes(settings.resource),
        lambda: select_metrics(settings.metrics, "exporters.otlp"),
    )


# ------------------------------------------------------------------------- resource attributes

MACHINE_ID_PATHS = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))

_NAMESPACE = uuid.UUID("4d63009a-8d0f-11ee-aad7-4c796ed8e320")
"""OpenTelemetry's namespace for a ``service.instance.id`` made from other values."""


class ResourceAttributes:
    """The resource attributes of a snapshot, the same after a restart.

    Settings override the environment, and the environment overrides the agent's own values.
    """

    def __init__(
        self,
        version: str,
        *,
        configured: Mapping[str, str],
        environ: Mapping[str, str],
        machine_id: str,
    ) -> None:
        self._version = version
        self._machine_id = machine_id
        name = "OTEL_RESOURCE_ATTRIBUTES"
        self._overrides = parse_attributes(environ.get(name, ""), name)
        if service := environ.get("OTEL_SERVICE_NAME"):
            self._overrides["service.name"] = service
        self._overrides |= configured

    def __call__(self, snapshot: Snapshot) -> dict[str, Value]:
        known: dict[str, Value] = {
            "service.name": "wattspan",
            "service.version": self._version,
            "service.instance.id": self._instance(snapshot.host),
            "host.name": snapshot.host,
        }
        if snapshot.emulated:
            known["wattspan.emulated"] = True
        elif self._machine_id:
            known["host.id"] = self._machine_id
        return known | self._overrides

    def _instance(self, host: str) -> str:
        # Includes the host name, because an emulated host has the machine id of the real one.
        return str(uuid.uuid5(_NAMESPACE, f"wattspan/{self._machine_id}/{host}"))


def machine_id(places: tuple[Path, ...] = MACHINE_ID_PATHS) -> str:
    """The id of this machine; "" if it has none, as in some containers."""
    for place in places:
        try:
            found = place.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if found and found.isalnum():
            return found
    return ""


def configured_attributes(text: str) -> dict[str, str]:
    """The attributes of the setting ``resource``; ConfigError."""
    return parse_attributes(text, "[exporters.otlp] resource")


def parse_attributes(text: str, where: str) -> dict[str, str]:
    """Percent-encoded ``name=value`` pairs, separated by commas, as OTEL_RESOURCE_ATTRIBUTES.

    ConfigError with ``where`` and the number of an invalid pair.
    """
    found: dict[str, str] = {}
    for number, pair in enumerate(text.split(","), start=1):
        if not pair.strip():
            continue
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not name:
            raise ConfigError(f'{where}, pair {number}: it is not of the form "name=value".')
        found[unquote(name)] = unquote(value)
    return found


CLOCK_STEP = 60 * SECOND
"""Wait for a clock that was set back to catch up, before its time is accepted."""

MIN_REQUEST_BYTES = 64 << 10
"""Size down to which requests are reduced for a receiver that rejects them as too large."""

STOP_TIMEOUT = 2 * SECOND


class OtlpExporter:
    """Pushes in a thread, one request at a time. ``turn`` makes one push; tests call it."""

    name = "otlp"
    address: str | None = None
    drops = 0
    """Points of failed pushes, and points that the receiver rejected."""

    def __init__(
        self,
        destination: Destination,
        transport: Transport,
        encoder: MetricsEncoder,
        clock: Clock,
        log: Callable[[str], None],
        *,
        interval: int,
        backoff: RetryBackoff | None = None,
    ) -> None:
        self._transport, self._encoder = transport, encoder
        self._clock = clock
        self._interval = interval
        self._receiver_health = DestinationHealth(destination, clock, log)
        self._backoff = backoff or RetryBackoff(SECOND, max(interval, MAX_BACKOFF), random.random)
        self._view: SnapshotView | None = None
        self._pushed: Snapshot | None = None
        self._due = self._tick = clock.monotonic()
        self._failed_points = 0  # points of the failed push
        self._wake = threading.Event()
        self._stopping = False
        self._worker = threading.Thread(target=self._run, name="wattspan-otlp", daemon=True)

    @property
    def health(self) -> SourceHealth:
        """The health of the receiver."""
        return self._receiver_health.health()

    def start(self, view: SnapshotView) -> None:
        self._view = view
        self._due = self._tick = self._clock.monotonic()
        self._worker.start()

    def stop(self) -> None:
        """Push once more, within two seconds."""
        if not self._worker.is_alive():
            self._transport.close()
            return
        self._stopping = True
        self._wake.set()
        self._worker.join(STOP_TIMEOUT / SECOND)
        if self._worker.is_alive():
            self._transport.abort()
            self._worker.join(0.5)  # a name server may block it longer; it is a daemon thread

    # ------------------------------------------------------------------------------ the worker

    def turn(self) -> int:
        """Push if it is due; returns the monotonic time of the next push."""
        now = self._clock.monotonic()
        if now < self._due or self._view is None:
            return self._due
        self._count_ticks(now)
        snapshot = self._view()
        if self._is_new(snapshot):
            self._push(snapshot)
        else:
            self._due = self._tick
        return self._due

    def _run(self) -> None:
        while not self._stopping:
            left = self._guarded(self.turn) - self._clock.monotonic()
            if left > 0:
                self._wake.wait(left / SECOND)
        self._due = 0
        self._guarded(self.turn)  # the last snapshot
        self.drops += self._failed_points
        self._transport.close()

    def _guarded(self, turn: Callable[[], int]) -> int:
        """Run ``turn``; an unexpected error does not end the pushes."""
        try:
            return turn()
        except Exception as error:  # noqa: BLE001
            self._due = self._tick
            why = f"a push failed unexpectedly ({type(error).__name__}: {error})"
            self._receiver_health.failed(retry_result(why, "Report it to the authors of wattspan."))
            return self._due

    def _count_ticks(self, now: int) -> None:
        """Count the points of a failed push as dropped, once an interval."""
        ticks = max(0, (now - self._tick) // self._interval + 1)
        self._tick += ticks * self._interval
        self.drops += ticks * self._failed_points

    def _is_new(self, snapshot: Snapshot) -> bool:
        """True if the points are newer than the pushed ones: none is sent twice or out of order."""
        last = self._pushed
        if last is None or snapshot.sequence == last.sequence:
            return last is None
        stepped = snapshot.at.mono - last.at.mono > CLOCK_STEP
        return snapshot.at.wall > last.at.wall or stepped

    def _push(self, snapshot: Snapshot) -> None:
        """Push all requests; one that the receiver refuses costs no other one."""
        requests = self._encoder.encode(snapshot)
        taken: list[tuple[ExportResult, int]] = []
        failure: ExportResult | None = None
        for request in requests:
            answer = self._transport.send(request.body)
            if answer.verdict is ExportStatus.TAKEN:
                taken.append((answer, request.points))
            elif (failure := answer).verdict is not ExportStatus.REFUSED:
                break
        self.drops += sum(min(answer.rejected, points) for answer, points in taken)
        if failure is not None:
            missing = sum(one.points for one in requests) - sum(points for _, points in taken)
            self._failed(failure, missing)
            return
        for answer, points in taken:
            self._receiver_health.answered(answer, points)
        self._pushed, self._failed_points = snapshot, 0
        self._backoff.reset()
        self._due = self._tick

    def _failed(self, answer: ExportResult, points: int) -> None:
        self._failed_points = points
        self._receiver_health.failed(
            replace(answer, verdict=ExportStatus.AGAIN)
        )  # all failures are retried
        if answer.verdict is ExportStatus.TOO_LARGE and self._encoder.limit > MIN_REQUEST_BYTES:
            self._encoder.limit //= 2
        self._due = self._backoff.failed(self._clock.monotonic(), answer.after)


def open_otlp(
    settings: OtlpSettings, context: ExporterContext, environ: Mapping[str, str] = os.environ
) -> OtlpExporter:
    """The exporter, not started; a WattspanError for invalid settings."""
    resource = ResourceAttributes(
        context.version,
        configured=configured_attributes(settings.resource),
        environ=environ,
        machine_id=machine_id(),
    )
    receiver = endpoint_destination(settings)
    if (settings.headers or settings.headers_file) and not (receiver.tls or receiver.is_local):
        context.log(
            f"Headers are sent to {receiver} without TLS and can be read on the network; write "
            "https:// or grpcs:// in [exporters.otlp] endpoint."
        )
    return OtlpExporter(
        receiver,
        endpoint_transport(settings, context.clock, context.version),
        MetricsEncoder(
            resource, context.version, select_metrics(settings.metrics, "exporters.otlp")
        ),
        context.clock,
        context.log,
        interval=settings.interval,
    )
