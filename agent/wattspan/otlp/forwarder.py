"""The way to the user's collector: enriched requests, in order, at the collector's pace.

Delivery is at least once. A request is sent again when it was not taken, and also when nobody
can know whether it was: everything was sent and no answer came. Such spans are counted
(``perhaps_twice``), and a repetition is the same bytes, by which backends know it.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from wattspan.config import SpansSettings
from wattspan.model import HwType, Provenance, SourceHealth
from wattspan.otlp.destination import SPANS, Destination, Signal, parse_destination, parse_headers
from wattspan.otlp.destination import OtlpProtocol as Wire
from wattspan.otlp.enrichment import EnergyAttributeEncoder, enrich
from wattspan.otlp.health import DestinationHealth, RetryBackoff
from wattspan.otlp.queue import AsyncSpool, QueuedRequest, RequestQueue
from wattspan.otlp.spool import Spool
from wattspan.otlp.transport import ExportResult, ExportStatus, Transport
from wattspan.ports import Clock
from wattspan.spans.values import SpanEnergy

MAX_BATCH_REQUESTS = 64
MAX_BATCH_BYTES = 2 << 20
"""Waiting requests are sent as one up to here: half of what a gRPC collector takes by default."""


class ReceivedRequest(Protocol):
    """A request as it came in. ``message`` is parsed; None if it is not to go on."""

    @property
    def message(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class ForwardStats:
    """What became of the spans; all but the last three only grow.

    ``drops`` are by reason: ``queue_full``, ``refused`` (the collector says it never will),
    ``rejected`` (part of a request that it took), ``too_large``, ``damaged`` (the spool cannot
    be read), ``stopped`` (still waiting at the end). ``perhaps_twice`` were sent again although
    the collector may have had them. ``restored`` waited on disk from an earlier run.
    ``unkept_bytes`` of the queue are in memory only: they are lost if the agent is killed.
    """

    forwarded: int = 0
    drops: Mapping[str, int] = field(default_factory=dict)
    perhaps_twice: int = 0
    restored: int = 0
    queue_bytes: int = 0
    queue_spans: int = 0
    unkept_bytes: int = 0


class Forwarder:
    """One worker, one request under way, of one signal: spans, unless another is named.

    ``turn`` is one attempt and can be called by a test.
    """

    def __init__(
        self,
        settings: SpansSettings,
        clock: Clock,
        log: Callable[[str], None],
        spool_dir: Path | None = None,
        *,
        provenance: Callable[[], Mapping[HwType, Provenance]] = dict,
        version: str = "",
        signal: Signal = SPANS,
        transport: Transport | None = None,
        backoff: RetryBackoff | None = None,
        spool: Spool | None = None,
    ) -> None:
        """Raises ConfigError for an address or headers that cannot be, or a missing extra.

        ``provenance`` says how the energy of each kind is obtained, now. ``spool_dir`` is where
        waiting spans are kept over a restart, if the settings want that; or ``spool`` keeps them.
        """
        self.destination = parse_destination(settings.forward, signal)
        self._transport = transport or open_transport(
            self.destination, parse_headers(settings.forward_headers), clock, version
        )
        self._clock = clock
        self._provenance = provenance
        self._attributes = EnergyAttributeEncoder({})
        self._backoff = backoff or RetryBackoff(random.random)
        self._condition = DestinationHealth(self.destination, clock, log)
        self._lock = threading.Condition()
        self._drops: Counter[str] = Counter()
        self._forwarded = self._perhaps_twice = 0
        self._due = clock.monotonic()
        self._piece: int | None = None  # so many spans of a request that is too large, at a time
        self._one_by_one = 0  # so many requests are to be sent alone, for one of them is bad
        self._stopping: int | None = None
        self._ended = False
        if spool is None and settings.forward_spool and spool_dir is not None:
            spool = Spool(spool_dir, settings.forward_queue, log)
        self._disk = None if spool is None else AsyncSpool(spool, clock, self._lock, log)
        self._waiting = RequestQueue(settings.forward_queue, self._disk, dropped=self._crowded_out)
        self._restored = self._waiting.spans
        self._worker = threading.Thread(
            target=self._run, name=f"wattspan-{signal.name}", daemon=True
        )

    # ------------------------------------------------------------------------- from outside

    @property
    def name(self) -> str:
        return self.destination.signal.name

    @property
    def addresses(self) -> tuple[str, ...]:
        return ()

    def offer(self, delivery: ReceivedRequest, energies: Sequence[SpanEnergy | None]) -> None:
        """Let a delivery's spans go on, with their energy.

        Never waits: neither for the collector, nor for the disk that keeps what waits for it.
        """
        if delivery.message is None or not energies:
            return
        provenance = self._provenance()
        if provenance != self._attributes.provenance:
            self._attributes = EnergyAttributeEncoder(provenance)
        self.put(enrich(delivery.message, energies, self._attributes), len(energies))

    def put(self, body: bytes, count: int) -> None:
        """Let a request go on that is ready to be sent, with so many spans, or what it sends."""
        with self._lock:
            if self._ended:
                self._drops["stopped"] += count
            elif self._waiting.add(body, count) and len(self._waiting) == 1:
                self._lock.notify()
        if self._disk is not None:
            self._disk.look()

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
        """How the collector is doing, as of a source that is written to; and if the disk hangs."""
        health = self._condition.health()
        hangs = None if self._disk is None else self._disk.failure
        return health if hangs is None else replace(health, failures=(hangs, *health.failures))

    def start(self) -> None:
        self._worker.start()

    def stop(self, deadline: int | None = None) -> None:
        """Send what can be sent until the monotonic time ``deadline``, by default 2 s from now.

        What is left then is on disk, if it is to be kept, or dropped and counted; a disk that does
        not answer is waited for five seconds more. A request that is under way at the deadline is
        among it, though the collector may yet have it.
        """
        with self._lock:
            self._stopping = self._clock.monotonic() + 2 * 10**9 if deadline is None else deadline
            self._lock.notify_all()
        if self._worker.is_alive():
            self._worker.join(self._left(self._stopping))
            if self._worker.is_alive():
                self._end()
                self._transport.abort()
                self._worker.join(0.5)  # a name server may hold it longer; it is a daemon
        else:
            self._transport.close()
        self._end()

    # ------------------------------------------------------------------------------ the worker

    def turn(self) -> int | None:
        """One attempt, if one is due: the monotonic time of the next; None once nothing waits."""
        with self._lock:
            if self._ended or not len(self._waiting):
                return None
            if self._clock.monotonic() < self._due:
                return self._due
            alone = self._one_by_one or self._piece
            parcels = self._waiting.take(1 if alone else MAX_BATCH_REQUESTS, MAX_BATCH_BYTES)
        bodies = [parcel.read(self._piece) for parcel in parcels]
        if None in bodies:
            self._leave_out_damaged(parcels, bodies)
            return self._due
        # Requests one after the other are one request: so protobuf has it.
        answer = self._transport.send(b"".join(each for each in bodies if each is not None))
        with self._lock:
            if self._over():
                return None
            self._conclude(parcels, answer)
            due = self._due if len(self._waiting) else None
        if self._disk is not None:  # so that what was sent does not come back, if we are killed now
            self._disk.wait(parcels)
        return due

    def _conclude(self, parcels: Sequence[QueuedRequest], answer: ExportResult) -> None:
        """What an answer means for the requests that were sent as one."""
        spans = sum(parcel.left for parcel in parcels)
        if self._piece is not None:
            spans = min(spans, self._piece)
        self._due = self._clock.monotonic()
        if answer.verdict is ExportStatus.AGAIN:
            self._again(spans, answer, alone=len(parcels) == 1)
            return
        self._backoff.succeeded()
        if answer.verdict is not ExportStatus.TAKEN and len(parcels) > 1:
            self._waiting.put_back()
            self._one_by_one = len(parcels)
            return
        if answer.verdict is ExportStatus.TOO_LARGE and spans > 1:
            self._waiting.put_back()
            self._piece = spans // 2
            return
        if answer.verdict is ExportStatus.TAKEN:
            rejected = min(answer.rejected, spans)
            self._forwarded += spans - rejected
            self._drop("rejected", rejected)
        else:
            self._drop(
                "too_large" if answer.verdict is ExportStatus.TOO_LARGE else "refused", spans
            )
        if self._piece is None:
            self._waiting.settle()
        elif self._waiting.settle_some(spans):
            self._piece = None
        self._one_by_one = max(0, self._one_by_one - 1)
        self._condition.answered(answer, spans)

    def _again(self, spans: int, answer: ExportResult, *, alone: bool) -> None:
        self._waiting.put_back()
        if answer.unfinished and alone and spans > 1:
            self._piece = spans // 2  # it may be too much for the time there is, or for a proxy
        self._one_by_one = max(1, self._one_by_one)  # until one goes through
        if answer.perhaps_taken:
            self._perhaps_twice += spans
        self._due += self._backoff.failed(answer.after)
        self._condition.failed(answer)

    def _leave_out_damaged(
        self, parcels: Sequence[QueuedRequest], bodies: Sequence[bytes | None]
    ) -> None:
        """Drop what the spool can no longer read, up to and with the first such request."""
        with self._lock:
            self._waiting.put_back()
            first = bodies.index(None)
            if first == 0:
                self._drop("damaged", parcels[0].left)
                self._waiting.take(1, 0)
                self._waiting.settle()
                self._piece = None
            else:
                self._one_by_one = max(self._one_by_one, first)

    def _run(self) -> None:
        while True:
            due = self.turn()
            with self._lock:
                if self._over() or self._done(due):
                    break
                if not len(self._waiting):
                    self._lock.wait()
                elif due is not None and (left := self._left(due)):
                    self._lock.wait(left)
        self._transport.close()

    def _over(self) -> bool:
        return self._ended

    def _done(self, due: int | None) -> bool:
        """Whether the agent is stopping, and nothing more can be sent before it does."""
        if self._stopping is None:
            return False
        return not len(self._waiting) or (due or self._clock.monotonic()) >= self._stopping

    def _end(self) -> None:
        """From now on nothing is taken, sent or counted; what still waits is lost or on disk."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            unkept = self._waiting.leave()
            self._lock.notify_all()
        if self._disk is not None:
            self._disk.close()  # without the lock, for it is told what is kept
        with self._lock:
            lost = sum(parcel.left for parcel in unkept if parcel.record is None)
            self._drop("stopped", lost)
            (self._condition if self._disk is None else self._disk).ended(lost)

    # -------------------------------------------------------------------------------- details

    def _left(self, until: int) -> float:
        return max(0, until - self._clock.monotonic()) / 1e9

    def _drop(self, reason: str, spans: int) -> None:
        if spans:
            self._drops[reason] += spans

    def _crowded_out(self, spans: int) -> None:
        self._drop("queue_full", spans)


def open_transport(
    destination: Destination, headers: Mapping[str, str], clock: Clock, version: str
) -> Transport:
    """The transport that an address asks for; ConfigError if its extra is not installed."""
    if destination.protocol is Wire.GRPC:
        from wattspan.otlp.grpc_transport import GrpcTransport

        return GrpcTransport(destination, headers, clock)
    from wattspan.otlp.http_transport import HttpTransport

    return HttpTransport(destination, headers, clock, agent=f"wattspan/{version}".rstrip("/"))
