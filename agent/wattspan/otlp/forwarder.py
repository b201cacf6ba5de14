"""Sends enriched requests to the user's collector, in order, at the collector's pace.

Delivery is at least once. A request is sent again if it was not accepted, and if acceptance is
unknown because everything was sent and no response came. The spans of such repetitions are counted
(``perhaps_twice``). A repetition is the same bytes, by which backends recognise it.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from wattspan.config import SpansSettings
from wattspan.model import SECOND, HwType, Provenance, SourceHealth
from wattspan.otlp.destination import SPANS, Signal, forward_headers, parse_destination
from wattspan.otlp.enrichment import EnergyAttributeEncoder, enrich
from wattspan.otlp.http_transport import open_transport
from wattspan.otlp.queue import AsyncSpool, QueuedRequest, RequestQueue
from wattspan.otlp.spool import Spool
from wattspan.otlp.transport import (
    MAX_BACKOFF,
    DestinationHealth,
    ExportResult,
    ExportStatus,
    Transport,
)
from wattspan.ports import Clock
from wattspan.sharing.fair_pool import share_path
from wattspan.spans.values import SpanEnergy
from wattspan.util.process import report_failure
from wattspan.util.throttle import RetryBackoff

if TYPE_CHECKING:
    from wattspan.inference.estimate import RequestEstimate
    from wattspan.ingest.export_request import ExportRequest

MAX_BATCH_REQUESTS = 64
MAX_BATCH_BYTES = 2 << 20
"""Limit of waiting requests that are sent as one: half the default limit of gRPC collectors."""


@dataclass(frozen=True, slots=True)
class ForwardStats:
    """Counters of spans; the last three values are of the present queue.

    ``drops`` are by reason: ``queue_full``, ``refused`` (final failures), ``rejected`` (a part of
    an accepted request), ``too_large``, ``damaged`` (unreadable in the spool), ``stopped``
    (waiting at the end). ``perhaps_twice`` were sent again although the collector may have
    accepted them. ``restored`` waited on disk since an earlier run. ``unkept_bytes`` of the queue
    are in memory only and lost if the agent is killed.
    """

    forwarded: int = 0
    drops: Mapping[str, int] = field(default_factory=dict)
    perhaps_twice: int = 0
    restored: int = 0
    queue_bytes: int = 0
    queue_spans: int = 0
    unkept_bytes: int = 0


class Forwarder:
    """Sends the requests of one signal, one at a time, in a thread of its own.

    ``turn`` makes one attempt; tests call it without the thread.
    """

    def __init__(
        self,
        settings: SpansSettings,
        clock: Clock,
        log: Callable[[str], None],
        spool_dir: Path | None = None,
        *,
        provenance: Callable[[], Mapping[HwType, Provenance]] = dict,
        baseline_unknown: Callable[[], Mapping[HwType, int]] = dict,
        version: str = "",
        signal: Signal = SPANS,
        transport: Transport | None = None,
        backoff: RetryBackoff | None = None,
        spool: Spool | None = None,
    ) -> None:
        """ConfigError for an invalid address or header, or a missing extra.

        ``provenance`` returns the present provenance of each kind of hardware,
        ``baseline_unknown`` the monotonic time until which its idle power was unknown.
        ``spool_dir`` is the folder of waiting spans where the settings enable the spool; ``spool``
        replaces it.
        """
        self.destination = parse_destination(settings.forward, signal)
        self._transport = transport or open_transport(
            self.destination, forward_headers(settings), clock, version
        )
        self._clock = clock
        self._provenance, self._baseline_unknown = provenance, baseline_unknown
        self._attributes = EnergyAttributeEncoder({})
        self._backoff = backoff or RetryBackoff(SECOND, MAX_BACKOFF, random.random)
        self._health = DestinationHealth(self.destination, clock, log)
        self._lock = threading.Condition()
        self._drops: Counter[str] = Counter()
        self._forwarded = self._perhaps_twice = 0
        self._due = clock.monotonic()
        self._piece: int | None = None  # spans to send at a time of a request that is too large
        self._one_by_one = 0  # requests to send alone, because one of them is bad
        self._refusal: ExportResult | None = None
        self._refused_until = 0
        self._stopping: int | None = None  # deadline, once the agent is stopping
        self._ended = False
        if spool is None and settings.forward_spool and spool_dir is not None:
            spool = Spool(spool_dir, settings.forward_queue, log)
        self._disk = None if spool is None else AsyncSpool(spool, clock, self._lock, log)
        self._waiting = RequestQueue(
            settings.forward_queue,
            self._disk,
            dropped=lambda spans: self._drop("queue_full", spans),
        )
        self._restored = self._waiting.spans
        self._worker = threading.Thread(
            target=self._run, name=f"wattspan-{signal.name}", daemon=True
        )

    # ------------------------------------------------------------------- called from any thread

    def offer(
        self,
        delivery: ExportRequest,
        energies: Sequence[SpanEnergy | None],
        estimates: Mapping[int, RequestEstimate] = MappingProxyType({}),
    ) -> None:
        """Queue a request with the energies of its spans. Waits neither for network nor disk.

        ``estimates`` are the provisional energies of requests to language models, by position.
        """
        if delivery.message is None or not energies:
            return
        provenance, unknown = self._provenance(), self._baseline_unknown()
        if (provenance, unknown) != (
            self._attributes.provenance,
            self._attributes.baseline_unknown,
        ):
            self._attributes = EnergyAttributeEncoder(provenance, unknown)
        body = enrich(delivery.message, energies, self._attributes, estimates)
        self.put(body, len(energies), share_path(delivery.peer.quota_owner)[0])

    def put(self, body: bytes, count: int, owner: Hashable = None) -> None:
        """Queue a request in wire format with ``count`` spans or records of a user or host."""
        with self._lock:
            if self._ended:
                self._drops["stopped"] += count
            elif self._waiting.add(body, count, owner) and len(self._waiting) == 1:
                self._lock.notify()
        if self._disk is not None:
            self._disk.report()

    @property
    def stats(self) -> ForwardStats:
        with self._lock:
            return ForwardStats(
                forwarded=self._forwarded,
                drops=dict(self._drops),
                perhaps_twice=self._perhaps_twice,
                restored=self._restored,
                queue_bytes=self._waiting.size,
                queue_spans=self._waiting.spans,
                unkept_bytes=self._waiting.in_memory,
            )

    def health(self) -> SourceHealth:
        """The health of the collector, and of a hanging disk."""
        health = self._health.health()
        failure = None if self._disk is None else self._disk.failure
        return health if failure is None else replace(health, failures=(failure, *health.failures))

    def start(self) -> None:
        self._worker.start()

    def stop(self, deadline: int | None = None) -> None:
        """Send until the monotonic time ``deadline``, by default for 2 s, and end.

        Spans left over then are on disk, or dropped and counted. A disk that does not respond is
        waited for five more seconds. A request in progress at the deadline counts as left over,
        though the collector may accept it.
        """
        with self._lock:
            self._stopping = self._clock.monotonic() + 2 * SECOND if deadline is None else deadline
            self._lock.notify_all()
        if self._worker.is_alive():
            self._worker.join(self._seconds_until(self._stopping))
            if self._worker.is_alive():
                self._end()
                self._transport.abort()
                self._worker.join(0.5)  # a name server may block it longer; it is a daemon thread
        else:
            self._transport.close()
        self._end()

    # ------------------------------------------------------------------------------ the worker

    def turn(self) -> int | None:
        """Make one attempt if it is due; returns the time of the next, None for an empty queue."""
        with self._lock:
            if self._ended or not len(self._waiting):
                return None
            if self._clock.monotonic() < self._due:
                return self._due
            alone = self._one_by_one or self._piece
            requests = self._waiting.take(1 if alone else MAX_BATCH_REQUESTS, MAX_BATCH_BYTES)
        bodies = [request.read(self._piece) for request in requests]
        if None in bodies:
            self._drop_damaged(requests, bodies)
            return self._due
        # Concatenated requests are one request: protobuf merges repeated fields.
        result = self._send(b"".join(each for each in bodies if each is not None))
        with self._lock:
            if self._has_ended():  # meanwhile
                return None
            self._apply(requests, result)
            due = self._due if len(self._waiting) else None
        if self._disk is not None:  # so that sent spans do not return if the agent is killed now
            self._disk.wait(requests)
        return due

    def _send(self, body: bytes) -> ExportResult:
        """The result of a request; during the pause after a refusal, the same refusal."""
        if self._refusal is not None and self._clock.monotonic() < self._refused_until:
            return self._refusal
        result, signal = self._transport.send(body), self.destination.signal
        self._refusal = None
        if result.verdict is ExportStatus.REFUSED and signal.refusal_pause:
            remedy = f"{result.remedy} {signal.refusal_remedy}".strip()
            self._refusal = result = replace(result, remedy=remedy)
            self._refused_until = self._clock.monotonic() + signal.refusal_pause
        return result

    def _apply(self, requests: Sequence[QueuedRequest], result: ExportResult) -> None:
        """Update the queue after ``requests`` were sent as one."""
        spans = sum(request.left for request in requests)
        if self._piece is not None:
            spans = min(spans, self._piece)
        self._due = self._clock.monotonic()
        if result.verdict is ExportStatus.AGAIN:
            self._retry(spans, result, alone=len(requests) == 1)
            return
        self._backoff.reset()
        if result.verdict is not ExportStatus.TAKEN and len(requests) > 1:
            self._waiting.put_back()
            self._one_by_one = len(requests)
            return
        if result.verdict is ExportStatus.TOO_LARGE and spans > 1:
            self._waiting.put_back()
            self._piece = spans // 2
            return
        if result.verdict is ExportStatus.TAKEN:
            rejected = min(result.rejected, spans)
            self._forwarded += spans - rejected
            self._drop("rejected", rejected)
        else:
            too_large = result.verdict is ExportStatus.TOO_LARGE
            self._drop("too_large" if too_large else "refused", spans)
        if self._piece is None:
            self._waiting.settle()
        elif self._waiting.settle_some(spans):
            self._piece = None
        self._one_by_one = max(0, self._one_by_one - 1)
        self._health.answered(result, spans)

    def _retry(self, spans: int, result: ExportResult, *, alone: bool) -> None:
        self._waiting.put_back()
        if result.unfinished and alone and spans > 1:
            self._piece = spans // 2  # it may exceed the limit of a proxy, or its time
        self._one_by_one = max(1, self._one_by_one)  # until a request is accepted
        if result.perhaps_taken:
            self._perhaps_twice += spans
        self._due = self._backoff.failed(self._due, result.after)
        self._health.failed(result)

    def _drop_damaged(
        self, requests: Sequence[QueuedRequest], bodies: Sequence[bytes | None]
    ) -> None:
        """Drop an unreadable first request; otherwise send those before it one by one."""
        with self._lock:
            self._waiting.put_back()
            first = bodies.index(None)
            if first == 0:
                self._drop("damaged", requests[0].left)
                self._waiting.take(1, 0)
                self._waiting.settle()
                self._piece = None
            else:
                self._one_by_one = max(self._one_by_one, first)

    def _run(self) -> None:
        while True:
            due = self._guarded_turn()
            with self._lock:
                if self._ended or self._is_finished(due):
                    break
                if not len(self._waiting):
                    self._lock.wait()
                elif due is not None and (left := self._seconds_until(due)):
                    self._lock.wait(left)
        self._transport.close()

    def _guarded_turn(self) -> int | None:
        try:
            return self.turn()
        except Exception as error:  # noqa: BLE001 - spans would never be sent again
            report_failure(error)
            with self._lock:
                self._waiting.put_back()
                self._due = self._backoff.failed(self._clock.monotonic())
                return self._due

    def _is_finished(self, due: int | None) -> bool:
        """True if the agent is stopping and no attempt is left before its deadline."""
        if self._stopping is None:
            return False
        return not len(self._waiting) or (due or self._clock.monotonic()) >= self._stopping

    def _end(self) -> None:
        """Accept, send and count nothing from now on; waiting spans are lost or on disk."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            unstored = self._waiting.leave()
            self._lock.notify_all()
        if self._disk is not None:
            self._disk.close()  # without the lock, which the writes need
        with self._lock:
            lost = sum(request.left for request in unstored if request.record is None)
            self._drop("stopped", lost)
            (self._health if self._disk is None else self._disk).ended(lost)

    def _has_ended(self) -> bool:
        return self._ended

    def _seconds_until(self, time: int) -> float:
        return max(0, time - self._clock.monotonic()) / SECOND

    def _drop(self, reason: str, spans: int) -> None:
        if spans:
            self._drops[reason] += spans
