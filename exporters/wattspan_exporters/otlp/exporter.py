"""Pushes the newest snapshot at an interval, from a thread of its own.

Nothing is queued: sums are cumulative, so the newest push has the totals of all older ones. While
the receiver is unavailable, the course of the totals and the values of gauges are lost.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

from wattspan.model import SECOND, Snapshot, SourceHealth
from wattspan.otlp.destination import Destination
from wattspan.otlp.transport import (
    MAX_BACKOFF,
    DestinationHealth,
    ExportResult,
    ExportStatus,
    Transport,
    retry_result,
)
from wattspan.ports import Clock, ExporterContext, SnapshotView
from wattspan.util.backoff import RetryBackoff
from wattspan_exporters.catalogue.metrics import select_metrics
from wattspan_exporters.otlp import OtlpSettings
from wattspan_exporters.otlp.encoder import MetricsEncoder
from wattspan_exporters.otlp.endpoint import (
    ResourceAttributes,
    configured_attributes,
    endpoint_destination,
    endpoint_transport,
    machine_id,
)

CLOCK_STEP = 60 * SECOND
"""Wait for a clock that was set back to catch up, before its time is accepted."""

MIN_REQUEST_BYTES = 64 << 10
"""Size down to which requests are reduced for a receiver that rejects them as too large."""

STOP_TIMEOUT = 2 * SECOND


class OtlpExporter:
    """Pushes in a thread, one request at a time. ``turn`` makes one push; tests call it."""

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
        self._condition = DestinationHealth(destination, clock, log)
        self._backoff = backoff or RetryBackoff(SECOND, max(interval, MAX_BACKOFF), random.random)
        self._view: SnapshotView | None = None
        self._pushed: Snapshot | None = None
        self._due = self._tick = clock.monotonic()
        self._owed = 0  # points of the failed push
        self._drops = 0
        self._bell = threading.Event()
        self._stopping = False
        self._worker = threading.Thread(target=self._run, name="wattspan-otlp", daemon=True)

    @property
    def name(self) -> str:
        return "otlp"

    @property
    def address(self) -> str | None:
        return None

    @property
    def drops(self) -> int:
        """Points of failed pushes, and points that the receiver rejected."""
        return self._drops

    @property
    def health(self) -> SourceHealth:
        """The health of the receiver."""
        return self._condition.health()

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
        self._bell.set()
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
                self._bell.wait(left / SECOND)
        self._due = 0
        self._guarded(self.turn)  # the last snapshot
        self._drops += self._owed
        self._transport.close()

    def _guarded(self, turn: Callable[[], int]) -> int:
        """Run ``turn``; an unexpected error does not end the pushes."""
        try:
            return turn()
        except Exception as error:  # noqa: BLE001
            self._due = self._tick
            why = f"a push failed unexpectedly ({type(error).__name__}: {error})"
            self._condition.failed(retry_result(why, "Report it to the authors of wattspan."))
            return self._due

    def _count_ticks(self, now: int) -> None:
        """Count the points of a failed push as dropped, once an interval."""
        ticks = max(0, (now - self._tick) // self._interval + 1)
        self._tick += ticks * self._interval
        self._drops += ticks * self._owed

    def _is_new(self, snapshot: Snapshot) -> bool:
        """True if the points are newer than the pushed ones: none is sent twice or out of order."""
        last = self._pushed
        if last is None or snapshot.sequence == last.sequence:
            return last is None
        stepped = snapshot.at.mono - last.at.mono > CLOCK_STEP
        return snapshot.at.wall > last.at.wall or stepped

    def _push(self, snapshot: Snapshot) -> None:
        requests = self._encoder.encode(snapshot)
        rejected = 0
        for position, request in enumerate(requests):
            answer = self._transport.send(request.body)
            if answer.verdict is not ExportStatus.TAKEN:
                self._failed(answer, sum(one.points for one in requests[position:]))
                self._drops += rejected
                return
            rejected += min(answer.rejected, request.points)
            self._condition.answered(answer, request.points)
        self._pushed, self._owed = snapshot, 0
        self._drops += rejected
        self._backoff.reset()
        self._due = self._tick

    def _failed(self, answer: ExportResult, points: int) -> None:
        self._owed = points
        self._condition.failed(replace(answer, verdict=ExportStatus.AGAIN))  # whatever its status
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
