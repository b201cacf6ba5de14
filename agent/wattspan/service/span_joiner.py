"""The joiner: the thread that joins received spans with the energy of their processes.

Receivers pass export requests on, and ask senders to retry when too many wait. The joiner finds
the process of each resource, converts span times to the monotonic clock, and joins spans with the
energy of their process once it has settled past their end. The results go to the totals and to the
user's collector.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

from wattspan.config import SpansSettings
from wattspan.ingest.export_request import ExportRequest, ResourceSpanRecords
from wattspan.model import SECOND, Checkpoint, Consumer, Instant, SpanAccounts
from wattspan.ports import Clock
from wattspan.service.energy_history import EnergyHistory
from wattspan.service.inference_joiner import InferenceJoiner
from wattspan.service.span_announcers import SpanAnnouncers
from wattspan.service.span_inbox import PendingRequest, SpanInbox
from wattspan.spans.aggregator import SpanAggregator, shortened_name
from wattspan.spans.energy_division import ProcessSpans, without_energy
from wattspan.spans.inference_requests import InferenceRequest
from wattspan.spans.power_model import PowerModel
from wattspan.spans.profiles import EnergyProfile
from wattspan.spans.request_estimate import RequestEstimate
from wattspan.spans.step_division import StepDivider
from wattspan.spans.values import (
    Outcome,
    SpanColumns,
    SpanEnergyColumns,
    SpanStart,
)
from wattspan.spans.waiting_spans import ReceiptDelay
from wattspan.spans.wall_time import WallClockConverter
from wattspan.util.throttle import RateLimitedLog

if TYPE_CHECKING:
    from wattspan.ingest.identity_verification import IdentityResolver
    from wattspan.ingest.side_channel import SideChannelServer
    from wattspan.otlp.forwarder import Forwarder
    from wattspan.processes.cpu_sampler import CpuSampler
    from wattspan.service.static_power import StaticPowerLearner
    from wattspan.tuning.work_units import ReceivedSpanQueue

JOIN_INTERVAL = SECOND // 20
IDLE_INTERVAL = SECOND // 2
"""The period of passes while no process sends spans."""

SETTLEMENT_TIMEOUT = 6 * SECOND
"""A span is joined without further wait this long after its receipt."""

IDLE_PROCESS_TIMEOUT = 60 * SECOND
"""A process without spans is released this long after the end of the history."""

EXITED_PROCESS_TIMEOUT = 10 * SECOND
"""The last spans of an exited process may arrive for this time."""

UNEXPORTED_SPAN_TIMEOUT = 60 * SECOND
"""An announced and ended span arrives within this time or never."""

REPORT_EVERY = SECOND // 4
"""The period of new totals; snapshots are published half as often."""

TIDY_EVERY = SECOND
"""The period of outside energy and of checks for exited processes."""

MAX_REMEMBERED_IDS = 131_072
"""Span ids of all processes that are kept for the detection of duplicates: 12 MB."""

MAX_PROCESSES = 1024
"""Sending processes that are watched; the one without spans for longest is released."""

_REMEMBERED = attrgetter("remembered")


@dataclass(slots=True)
class _PendingSpans:
    """Spans of one process from one request, and the positions of their results."""

    pending: PendingRequest
    positions: Sequence[int]
    spans: SpanColumns
    start: int
    end: int
    due: int  # time at which they are joined, settled or not


@dataclass(slots=True)
class _SendingProcess:
    """A process that sends spans."""

    consumer: Consumer
    spans: ProcessSpans
    profile: EnergyProfile
    last_seen: int
    service: str = ""
    waiting: deque[_PendingSpans] = field(default_factory=deque)
    delay: ReceiptDelay = field(default_factory=ReceiptDelay)
    announces: bool = False
    exited: bool = False


class SpanJoiner:
    """Implements SpanSink; ``turn`` is one pass."""

    def __init__(
        self,
        clock: Clock,
        history: EnergyHistory,
        resolver: IdentityResolver,
        settings: SpansSettings,
        *,
        keep: int,
        side_channel: SideChannelServer | None = None,
        sampler: CpuSampler | None = None,
        forwarder: Forwarder | None = None,
        tap: ReceivedSpanQueue | None = None,
        static_powers: StaticPowerLearner | None = None,
        checkpoint: Checkpoint | None = None,
        remembered: int = MAX_REMEMBERED_IDS,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._clock = clock
        self._history = history
        self._inbox = SpanInbox(resolver, settings.buffer)
        self._open_spans = settings.open_spans
        self._keep = keep
        self._remembered = remembered
        self._by_cpu = settings.weight == "cpu"
        self._side_channel = side_channel
        self._sampler = sampler
        self._forwarder = forwarder
        self._tap = tap
        self._static_powers = static_powers
        self._totals = (
            SpanAggregator(settings.names, checkpoint.spans, checkpoint.outside, clock.monotonic())
            if checkpoint is not None
            else SpanAggregator(settings.names)
        )
        self._wall = WallClockConverter()
        self._pending: deque[PendingRequest] = deque()
        self._processes: dict[Consumer, _SendingProcess] = {}
        self._announcers = SpanAnnouncers(2 * settings.open_spans, resolver, self._awaits)
        self._powers = PowerModel()
        self._inference = InferenceJoiner(history, checkpoint=checkpoint, presets=settings.presets)
        self._accounts = SpanAccounts()
        self._open = 0
        self._tidied = self._reported = 0
        self._failures = RateLimitedLog(clock.monotonic, log)

    # ---------------------------------------------------------------- for the receivers' thread

    def accept(self, request: ExportRequest) -> None:
        """Add a request; ReceiverBusyError while too many wait."""
        self._inbox.accept(request)

    def refuse(self, reason: str, spans: int = 1) -> None:
        """Count spans that are not accepted."""
        self._inbox.refuse(reason, spans)

    def estimate(self, process: Consumer, request: InferenceRequest) -> RequestEstimate | None:
        """The provisional energy of a request to a language model. Safe from any thread."""
        return self._inference.estimate(process, request)

    def accounts(self) -> SpanAccounts:
        """The newest totals. Safe from any thread."""
        return self._accounts

    # ------------------------------------------------------------------------------ the thread

    def run(self, stop: threading.Event) -> None:
        """Run passes until ``stop``, then finish. Failures of a pass are logged."""
        while not stop.wait((IDLE_INTERVAL if self._idle else JOIN_INTERVAL) / 1e9):
            self._guarded(self.turn)
        self._guarded(self.finish)

    @property
    def _idle(self) -> bool:
        """True if no process sends or announces spans."""
        announced = self._side_channel is not None and self._side_channel.counts.connected
        return not (self._processes or self._inbox or announced)

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - the joining of other spans continues
            self._failures.failure("A pass of the joiner", error)

    def turn(self) -> None:
        """Process all new requests and all spans whose energy has settled."""
        now = self._clock.now()
        self._wall.observe(now)
        self._read_side_channel(now.mono)
        for pending in self._inbox.take():
            self._distribute(pending)
        for process in self._processes.values():
            self._join(process, now)
        if now.mono - self._tidied >= TIDY_EVERY:
            self._tidied = now.mono
            for process in list(self._processes.values()):
                self._tidy(process, now.mono)
            self._open = sum(one.spans.announced for one in self._processes.values())
            self._forget_ids(now.mono)
        self._inference.turn(now.mono)
        self._forward()
        if now.mono - self._reported >= REPORT_EVERY:
            self._reported = now.mono
            self._report()

    def finish(self) -> None:
        """Join all waiting spans with the known energy and release all processes."""
        self.turn()
        now = self._clock.now()
        for process in list(self._processes.values()):
            self._join(process, now, wait=False)
            self._forget(process, now.mono)
        self._inference.turn(now.mono, wait=False)
        self._forward()
        self._report()

    def _report(self) -> None:
        others = SpanAccounts(
            refused=self._inbox.refused(),
            deferred=self._inbox.deferred,
            open=self._open,
            senders=self._senders(),
            inference=self._inference.rows,
            inference_idle=self._inference.idle,
            inference_waiting=self._inference.waiting,
        )
        if self._forwarder is not None:
            stats = self._forwarder.stats
            others = replace(
                others,
                forwarded=stats.forwarded,
                forward_drops=stats.drops,
                forward_queue=stats.queue_bytes,
                forward_repeats=stats.perhaps_twice,
            )
        if self._side_channel is not None:
            counts = self._side_channel.counts
            others = replace(
                others,
                announcers=counts.connected,
                announcers_refused={"no_room": counts.crowded_out, "protocol": counts.put_out},
                announcements_lost=counts.lost,
            )
        self._accounts = self._totals.accounts(others)

    def _senders(self) -> dict[str, tuple[Consumer, ...]]:
        senders: dict[str, list[Consumer]] = {}
        for process in self._processes.values():
            senders.setdefault(shortened_name(process.service), []).append(process.consumer)
        return {service: tuple(consumers) for service, consumers in senders.items()}

    # ------------------------------------------------------------------------------- receiving

    def _read_side_channel(self, now: int) -> None:
        """Read announced starts and ends of spans."""
        if self._side_channel is None:
            return
        for report in self._side_channel.drain():
            consumer = self._announcers.process(report, now)
            if consumer is None or report.principal is None:
                continue
            process = self._process(consumer, now)
            process.last_seen = now
            if self._tap is not None:
                self._tap.announce(consumer, report.records)
            process.announces = process.announces or bool(report.records)
            process.exited = process.exited or report.gone
            room = self._open_spans - self._open
            for record in report.records:
                if isinstance(record, SpanStart):
                    self._announcers.add(record.id, report.principal, consumer)
                    if room > 0 and process.spans.open(record):
                        room -= 1
                else:
                    process.spans.close(record)
            self._open = self._open_spans - room
        self._announcers.age(now, self._keep)

    def _distribute(self, pending: PendingRequest) -> None:
        """Queue all spans of a request at their processes."""
        request = pending.request
        self._pending.append(pending)
        self._totals.received(request.count)
        positions: Sequence[int] = range(len(pending.energies))
        if request.skipped:
            positions = [at for at in positions if at not in request.skipped]
        at = 0
        for part, identity in zip(request.parts, pending.identities, strict=True):
            own = positions[at : at + len(part.spans)]
            at += len(part.spans)
            if part.spans:
                senders = self._announcers.senders(part.spans.id, identity)
                for sender, some, places in _by_sender(senders, part, own):
                    self._enqueue(pending, some, places, sender)

    def _enqueue(
        self,
        pending: PendingRequest,
        part: ResourceSpanRecords,
        positions: Sequence[int],
        consumer: Consumer | Outcome,
    ) -> None:
        if isinstance(consumer, Outcome):
            self._totals.outcome(consumer, len(part.spans))
            pending.left -= len(part.spans)
            return
        now = pending.request.received
        process = self._process(consumer, now)
        process.last_seen = now
        process.service = part.claim.service
        spans = self._spans(part)
        if self._tap is not None:
            self._tap.append(consumer, part.claim.service, spans, part.spans)
        if self._static_powers is not None:
            self._static_powers.add_spans(consumer, spans, now)
        found = self._inference.add(consumer, spans, part, now)
        if found and self._forwarder is not None:
            pending.requests += [(positions[i], consumer, one) for i, one in found.items()]
        process.delay.add(spans.start, spans.end, now)
        start, end, due = min(spans.start), max(spans.end), now + SETTLEMENT_TIMEOUT
        self._history.expect(end)
        process.waiting.append(_PendingSpans(pending, positions, spans, start, end, due))

    def _spans(self, part: ResourceSpanRecords) -> SpanColumns:
        """The spans of a part, on the monotonic clock."""
        received, count = part.spans, len(part.spans)
        offset = self._wall.offset(min(received.start), max(received.end))
        if offset is None:
            starts = list(map(self._wall.monotonic, received.start))
            ends = list(map(self._wall.monotonic, received.end))
        else:
            starts = [start - offset for start in received.start]
            ends = [end - offset for end in received.end]
        return SpanColumns(
            received.trace,
            received.id,
            received.parent,
            [part.claim.service] * count,
            received.name,
            starts,
            ends,
            received.weight,
            received.tokens_in,
            received.tokens_out,
        )

    def _process(self, consumer: Consumer, now: int) -> _SendingProcess:
        process = self._processes.get(consumer)
        if process is None:
            if len(self._processes) >= MAX_PROCESSES:
                self._forget(min(self._processes.values(), key=lambda one: one.last_seen), now)
            samples = None
            if self._sampler is not None:
                self._sampler.watch(consumer)
                samples = partial(self._sampler.take, consumer)
            profile = self._history.watch(consumer, samples=samples)
            spans = ProcessSpans(
                by_cpu=self._by_cpu,
                announced=self._open_spans,
                steps=StepDivider(self._powers, consumer),
            )
            process = _SendingProcess(consumer, spans, profile, now)
            self._processes[consumer] = process
        return process

    # --------------------------------------------------------------------------------- joining

    def _join(self, process: _SendingProcess, now: Instant, *, wait: bool = True) -> None:
        """Join the spans that have settled or timed out; all spans without ``wait``.

        The spans of a process that does not announce them wait for later batches of the same time.
        """
        waiting = process.waiting
        if not waiting:
            return
        ready: list[_PendingSpans] = []
        hold = 0 if process.announces or self._inbox.scarce else process.delay.hold
        with self._history.lock:
            settled = min(process.profile.watermark, now.mono - hold)
            while waiting and (waiting[0].end <= settled or waiting[0].due <= now.mono or not wait):
                ready.append(waiting.popleft())
            if not ready:
                return
            spans = SpanColumns.joined([chunk.spans for chunk in ready])
            until = max(chunk.end for chunk in ready)
            later = [chunk.spans for chunk in waiting if chunk.start < until]
            results = self._settled(process, spans, later, now.mono)
        rows = iter(results)
        for chunk in ready:
            chunk.pending.left -= len(chunk.spans)
            if self._forwarder is not None:
                for position, result in zip(chunk.positions, rows, strict=False):
                    chunk.pending.energies[position] = result
        self._totals.add(results, now)

    def _settled(
        self,
        process: _SendingProcess,
        spans: SpanColumns,
        later: Sequence[SpanColumns],
        now: int,
    ) -> SpanEnergyColumns:
        """The energies of ``spans``; after a failure they have no energy and are not lost."""
        try:
            # Only forwarded spans need inclusive energies.
            inclusive = self._forwarder is not None
            return process.spans.settle(
                spans, process.profile, now, inclusive=inclusive, waiting=later
            )
        except Exception as error:  # noqa: BLE001 - one process must not affect others
            self._failures.failure(
                f"Joining {len(spans)} spans of process {process.consumer.pid}", error
            )
            return without_energy(spans)

    def _tidy(self, process: _SendingProcess, now: int) -> None:
        """Count outside energy, and release a process that has exited or sends no spans.

        A process that announces its spans has no unknown open span. Others may always have one, so
        their outside energy is counted at the end of the history.
        """
        if not process.waiting and (
            (process.exited and now - process.last_seen > EXITED_PROCESS_TIMEOUT)
            or now - process.last_seen > self._keep + IDLE_PROCESS_TIMEOUT
        ):
            self._forget(process, now)
            return
        abandoned = process.spans.expire(0, now - UNEXPORTED_SPAN_TIMEOUT)
        self._totals.outcome(Outcome.ABANDONED, abandoned)
        wait = EXITED_PROCESS_TIMEOUT if process.announces else self._keep
        self._count_outside(process, now - wait)

    def _forget_ids(self, now: int) -> None:
        """Remove span ids older than the history, and beyond the limit half of the most."""
        for process in self._processes.values():
            process.spans.age(now, self._keep)
        ascending = sorted((p.spans for p in self._processes.values()), key=_REMEMBERED)
        total = sum(map(_REMEMBERED, ascending))
        while total > self._remembered and ascending:
            spans = ascending.pop()
            total -= spans.remembered
            spans.forget_half()
            total += spans.remembered

    def _awaits(self, span: bytes, consumer: Consumer) -> bool:
        process = self._processes.get(consumer)
        return process is not None and process.spans.awaits(span)

    def _count_outside(self, process: _SendingProcess, before: int) -> None:
        with self._history.lock:
            outside = process.spans.outside(process.profile, before)
        for kind, energy in outside.items():
            if energy:
                self._totals.outside(process.service, kind, energy)

    def _forget(self, process: _SendingProcess, now: int) -> None:
        del self._processes[process.consumer]
        self._totals.outcome(Outcome.ABANDONED, process.spans.expire(now, now))
        self._count_outside(process, now)
        process.spans.forget()
        self._history.forget(process.consumer)
        if self._sampler is not None:
            self._sampler.unwatch(process.consumer)

    def _forward(self) -> None:
        """Forward and release completed requests in the order of their receipt."""
        done = []
        while self._pending and self._pending[0].left <= 0:
            pending = self._pending.popleft()
            done.append(pending)
            if self._forwarder is not None:
                pending.request.estimates = {
                    position: estimate
                    for position, process, one in pending.requests
                    if (estimate := self._inference.estimate(process, one)) is not None
                }
                self._forwarder.offer(pending.request, pending.energies)
        if done:
            self._inbox.release(done)


def _by_sender(
    senders: Sequence[Consumer | Outcome] | Consumer | Outcome,
    part: ResourceSpanRecords,
    positions: Sequence[int],
) -> Iterator[tuple[Consumer | Outcome, ResourceSpanRecords, Sequence[int]]]:
    """The spans of each sender with their positions; ``senders`` has one for all or for each."""
    if isinstance(senders, Consumer | Outcome):
        yield senders, part, positions
        return
    for sender in dict.fromkeys(senders):
        own = [at for at, one in enumerate(senders) if one == sender]
        some = part._replace(spans=part.spans.chosen(own))
        yield sender, some, [positions[at] for at in own]
