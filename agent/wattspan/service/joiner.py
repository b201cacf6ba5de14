"""From deliveries to joules: the thread in which spans meet the energy of their processes.

Receivers hand deliveries in, and are told to come again when too much waits. Here each resource
is led to its process, each span's times are brought to the monotonic clock, and when everything
up to a span's end has settled, its process's spans are joined with its energy. Totals, and the
user's collector, get the result.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any

from wattspan.http.connection_limiter import FairQuota
from wattspan.ingest.export_request import ExportRequest, ReceiverBusyError, ResourceSpanRecords
from wattspan.model import SECOND, Checkpoint, Consumer, Instant, SpanAccounts
from wattspan.ports import Clock
from wattspan.service.energy_history import EnergyHistory
from wattspan.service.joiner_protocols import (
    AnnouncedRecords,
    CpuSampleSource,
    ProcessResolver,
    SideChannel,
    SpanConsumer,
    SpanForwarding,
    SpanOrigins,
)
from wattspan.spans.aggregator import SpanAggregator, shortened_name
from wattspan.spans.joining import ProcessSpans
from wattspan.spans.profiles import NO_ENERGY, EnergyProfile
from wattspan.spans.values import Outcome, Span, SpanEnergy, SpanStart
from wattspan.spans.wall_time import WallClockConverter
from wattspan.util.rate_limited_log import RateLimitedLog

JOIN_INTERVAL = SECOND // 20
SETTLEMENT_TIMEOUT = 6 * SECOND
"""Energy that has not settled so long after a span was received is not waited for."""

IDLE_PROCESS_TIMEOUT = 60 * SECOND
"""A process is no longer watched so long after its history went by without a span of it."""

EXITED_PROCESS_TIMEOUT = 10 * SECOND
"""After its end the last spans of a process may be under way for so long."""

UNEXPORTED_SPAN_TIMEOUT = 60 * SECOND
"""A span that its process announced and closed comes within so long, or never."""

SHOW_EVERY = SECOND // 4
"""How often the totals are made anew: as often as anybody can see the difference."""

TIDY_EVERY = SECOND
"""How often it is seen to what no span has claimed, and to who is gone."""

MAX_REMEMBERED_IDS = 131_072
"""Ids of spans that are kept over all processes, to know what is sent twice: 12 MB."""

MAX_PROCESSES = 1024
"""Span-sending processes that are watched at once; beyond, the longest quiet is let go."""

BYTES_PER_SPAN = 700
"""Bytes that a waiting span takes beside its share of the request, measured."""

_TUPLE: Any = tuple.__new__
_START, _END = attrgetter("start"), attrgetter("end")
_REMEMBERED = attrgetter("remembered")


@dataclass(slots=True)
class _PendingDelivery:
    """A delivery whose spans are not all joined yet."""

    delivery: ExportRequest
    cost: int
    energies: list[SpanEnergy | None]
    left: int


@dataclass(frozen=True, slots=True)
class _NewDelivery:
    """A delivery that has only been taken; ``whose`` are its parts, by their claims."""

    delivery: ExportRequest
    cost: int
    whose: tuple[Consumer | Outcome, ...]


@dataclass(slots=True)
class _PendingSpans:
    """Spans of one process from one delivery, and where their results go."""

    held: _PendingDelivery
    positions: Sequence[int]
    spans: list[Span]
    end: int
    due: int  # joined by then, settled or not


@dataclass(slots=True)
class _SendingProcess:
    """A process that sends spans."""

    consumer: Consumer
    spans: ProcessSpans
    profile: EnergyProfile
    heard: int
    service: str = ""
    waiting: deque[_PendingSpans] = field(default_factory=deque)
    announces: bool = False
    gone: bool = False


class SpanJoiner:
    """Implements SpanSink; ``turn`` is one pass and can be called by a test."""

    def __init__(
        self,
        clock: Clock,
        history: EnergyHistory,
        resolver: ProcessResolver,
        *,
        buffer: int,
        open_spans: int,
        names: int,
        keep: int,
        weight: str = "cpu",
        side_channel: SideChannel | None = None,
        sampler: CpuSampleSource | None = None,
        forwarder: SpanForwarding | None = None,
        tap: SpanConsumer | None = None,
        checkpoint: Checkpoint | None = None,
        remembered: int = MAX_REMEMBERED_IDS,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._clock = clock
        self._history = history
        self._resolver = resolver
        self._room = FairQuota(buffer)  # by user: one of them may not take all of it
        self._open_spans = open_spans
        self._keep = keep
        self._remembered = remembered
        self._by_cpu = weight == "cpu"
        self._side_channel = side_channel
        self._sampler = sampler
        self._forwarder = forwarder
        self._tap = tap
        self._totals = (
            SpanAggregator(names, checkpoint.spans, checkpoint.outside, clock.monotonic())
            if checkpoint is not None
            else SpanAggregator(names)
        )
        self._wall = WallClockConverter()
        self._lock = threading.Lock()
        self._inbox: deque[_NewDelivery] = deque()
        self._refused: Counter[str] = Counter()
        self._deferred = 0
        self._held: deque[_PendingDelivery] = deque()
        self._processes: dict[Consumer, _SendingProcess] = {}
        self._origins = SpanOrigins(open_spans)
        self._accounts = SpanAccounts()
        self._open = 0
        self._announcers: dict[int, Consumer] = {}  # by pid, as long as they are connected
        self._tidied = self._shown = 0
        self._failures = RateLimitedLog(clock.monotonic, log)

    # ---------------------------------------------------------------- for the receivers' thread

    def accept(self, delivery: ExportRequest) -> None:
        """Take a delivery, or ask to come again while too much waits."""
        cost = delivery.size + BYTES_PER_SPAN * delivery.count
        with self._lock:
            if self._room.idle:  # then a delivery of any size is taken
                self._room.force(delivery.peer.whose, cost)
            elif not self._room.take(delivery.peer.whose, cost):
                self._deferred += delivery.count
                raise ReceiverBusyError
        try:
            # Now, while the sender waits for the answer, it lives and can be looked at.
            whose = tuple(self._resolver.resolve(delivery.peer, p.claim) for p in delivery.parts)
        except BaseException:
            with self._lock:
                self._room.give_back(delivery.peer.whose, cost)
            raise
        with self._lock:
            self._inbox.append(_NewDelivery(delivery, cost, whose))

    def refuse(self, reason: str, spans: int = 1) -> None:
        """Count spans that could not be taken."""
        with self._lock:
            self._refused[reason] += spans

    # --------------------------------------------------------------------------- for everybody

    def accounts(self) -> SpanAccounts:
        """The newest totals. Safe from any thread."""
        return self._accounts

    # ------------------------------------------------------------------------------ the thread

    def run(self, stop: threading.Event) -> None:
        """Turn until ``stop``, then finish. A turn that fails is told, and others follow."""
        while not stop.wait(JOIN_INTERVAL / 1e9):
            self._guarded(self.turn)
        self._guarded(self.finish)

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - without this thread nobody's spans are joined
            self._failures.failure("A turn of the spans", error)

    def turn(self) -> None:
        """One pass over everything that came and everything that settled."""
        now = self._clock.now()
        self._wall.observe(now)
        self._listen(now.mono)
        with self._lock:
            taken = list(self._inbox)
            self._inbox.clear()
        for fresh in taken:
            self._introduce(fresh)
        for process in self._processes.values():
            self._join(process, now)
        if now.mono - self._tidied >= TIDY_EVERY:
            self._tidied = now.mono
            for process in list(self._processes.values()):
                self._tidy(process, now.mono)
            self._open = sum(one.spans.announced for one in self._processes.values())
            self._forget_ids(now.mono)
        self._send_on()
        if now.mono - self._shown >= SHOW_EVERY:
            self._shown = now.mono
            self._show()

    def finish(self) -> None:
        """Join what waits with what is known, and give up the rest: nothing more will come."""
        self.turn()
        now = self._clock.now()
        for process in list(self._processes.values()):
            self._join(process, now, wait=False)
            self._forget(process, now.mono)
        self._send_on()
        self._show()

    def _show(self) -> None:
        with self._lock:
            others = SpanAccounts(
                refused=dict(self._refused),
                deferred=self._deferred,
                open=self._open,
                senders=self._senders(),
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

    # --------------------------------------------------------------------------- what is heard

    def _listen(self, now: int) -> None:
        """Take what processes told of their own spans, at once and by themselves."""
        if self._side_channel is None:
            return
        for report in self._side_channel.drain():
            consumer = self._announcer(report)
            if consumer is None:
                continue
            process = self._process(consumer, now)
            process.heard = now
            process.announces = process.announces or bool(report.records)
            process.gone = process.gone or report.gone
            room = self._open_spans - self._open
            for record in report.records:
                if isinstance(record, SpanStart):
                    self._origins.remember(record.id, consumer)
                    if room > 0 and process.spans.open(record):
                        room -= 1
                else:
                    process.spans.close(record)
            self._open = self._open_spans - room
        self._origins.age(now, self._keep, self._awaits)

    def _announcer(self, report: AnnouncedRecords) -> Consumer | None:
        """Who told it. What a process told last is often read when it has ended."""
        known = self._announcers.pop(report.pid, None)
        consumer = self._resolver.identify(report.pid) or known
        if consumer is not None and not report.gone:
            self._announcers[report.pid] = consumer
        return consumer

    def _introduce(self, fresh: _NewDelivery) -> None:
        """Lead every span of a delivery to its process, and let it wait there."""
        delivery = fresh.delivery
        total = delivery.count + len(delivery.skipped)
        held = _PendingDelivery(delivery, fresh.cost, [None] * total, delivery.count)
        self._held.append(held)
        self._totals.received(delivery.count)
        positions: Sequence[int] = range(total)
        if delivery.skipped:
            positions = [at for at in positions if at not in delivery.skipped]
        at = 0
        for part, claimed in zip(delivery.parts, fresh.whose, strict=True):
            own = positions[at : at + len(part.spans)]
            at += len(part.spans)
            if part.spans:
                self._await(held, part, own, self._announced(part) or claimed)

    def _await(
        self,
        held: _PendingDelivery,
        part: ResourceSpanRecords,
        positions: Sequence[int],
        whose: Consumer | Outcome,
    ) -> None:
        if isinstance(whose, Outcome):
            self._totals.outcome(whose, len(part.spans))
            held.left -= len(part.spans)
            return
        now = held.delivery.received
        process = self._process(whose, now)
        process.heard = now
        process.service = part.claim.service
        spans = self._spans(part)
        if self._tap is not None:
            self._tap.hand(whose, part.claim.service, spans, part.spans)
        end = max(map(_END, spans))
        process.waiting.append(_PendingSpans(held, positions, spans, end, now + SETTLEMENT_TIMEOUT))

    def _announced(self, part: ResourceSpanRecords) -> Consumer | None:
        """The process that announced these spans itself: no claim is as good."""
        for told in (part.spans[0], part.spans[-1]):
            consumer = self._origins.of(told.id)
            if consumer is not None:
                return consumer
        return None

    def _spans(self, part: ResourceSpanRecords) -> list[Span]:
        """The spans of a part, on the monotonic clock."""
        service = part.claim.service
        offset = self._wall.offset(min(map(_START, part.spans)), max(map(_END, part.spans)))
        if offset is None:
            monotonic = self._wall.monotonic
            times = [(monotonic(told.start), monotonic(told.end)) for told in part.spans]
        else:
            times = [(told.start - offset, told.end - offset) for told in part.spans]
        # A named tuple's own constructor is written in Python and takes three times as long.
        return [
            _TUPLE(
                Span,
                (trace, own, parent, service, name, start, end, thread, None, weight, into, out),
            )
            for (trace, own, parent, name, _, _, thread, weight, into, out, _), (start, end) in zip(
                part.spans, times, strict=True
            )
        ]

    def _process(self, consumer: Consumer, now: int) -> _SendingProcess:
        process = self._processes.get(consumer)
        if process is None:
            if len(self._processes) >= MAX_PROCESSES:
                self._forget(min(self._processes.values(), key=lambda one: one.heard), now)
            samples = None
            if self._sampler is not None:
                self._sampler.watch(consumer)
                samples = partial(self._sampler.take, consumer)
            profile = self._history.watch(consumer, samples=samples)
            spans = ProcessSpans(by_cpu=self._by_cpu, announced=self._open_spans)
            process = _SendingProcess(consumer, spans, profile, now)
            self._processes[consumer] = process
        return process

    # -------------------------------------------------------------------------- what is joined

    def _join(self, process: _SendingProcess, now: Instant, *, wait: bool = True) -> None:
        """Join what has settled, or has waited long enough."""
        waiting = process.waiting
        if not waiting:
            return
        ready: list[_PendingSpans] = []
        with self._history.lock:
            settled = process.profile.watermark
            while waiting and (waiting[0].end <= settled or waiting[0].due <= now.mono or not wait):
                ready.append(waiting.popleft())
            if not ready:
                return
            spans = [span for chunk in ready for span in chunk.spans]
            results = self._settled(process, spans, now.mono)
        at = 0
        for chunk in ready:
            own = results[at : at + len(chunk.spans)]
            at += len(chunk.spans)
            chunk.held.left -= len(own)
            if self._forwarder is not None:
                for position, result in zip(chunk.positions, own, strict=True):
                    chunk.held.energies[position] = result
        self._totals.add(results, now)

    def _settled(self, process: _SendingProcess, spans: list[Span], now: int) -> list[SpanEnergy]:
        """What each of ``spans`` spent; nothing is known of any, and never lost, if that fails."""
        try:
            # Only who is forwarded to is told inclusive energies.
            inclusive = self._forwarder is not None
            return process.spans.settle(spans, process.profile, now, inclusive=inclusive)
        except Exception as error:  # noqa: BLE001 - one process's spans are not everybody's
            self._failures.failure(
                f"Joining {len(spans)} spans of process {process.consumer.pid}", error
            )
            return [SpanEnergy(span, {}, NO_ENERGY, Outcome.NO_ENERGY) for span in spans]

    def _tidy(self, process: _SendingProcess, now: int) -> None:
        """Close the account of what no span has claimed, and let go of who is gone.

        Who announces spans is known to have none open when it has announced none. Of others
        there may always be one that has not ended, so theirs is closed as late as may be.
        """
        if not process.waiting and (
            (process.gone and now - process.heard > EXITED_PROCESS_TIMEOUT)
            or now - process.heard > self._keep + IDLE_PROCESS_TIMEOUT
        ):
            self._forget(process, now)
            return
        given_up = process.spans.expire(0, now - UNEXPORTED_SPAN_TIMEOUT)
        self._totals.outcome(Outcome.ABANDONED, given_up)
        self._close(process, now - (EXITED_PROCESS_TIMEOUT if process.announces else self._keep))

    def _forget_ids(self, now: int) -> None:
        """Keep ids no longer than the energy they could claim; too many, those of who has most."""
        for process in self._processes.values():
            process.spans.age(now, self._keep)
        most_last = sorted((p.spans for p in self._processes.values()), key=_REMEMBERED)
        total = sum(map(_REMEMBERED, most_last))
        while total > self._remembered and most_last:
            spans = most_last.pop()
            total -= spans.remembered
            spans.forget_half()
            total += spans.remembered

    def _awaits(self, consumer: Consumer, span: bytes) -> bool:
        process = self._processes.get(consumer)
        return process is not None and process.spans.awaits(span)

    def _close(self, process: _SendingProcess, before: int) -> None:
        with self._history.lock:
            outside = process.spans.outside(process.profile, before)
        for kind, energy in outside.items():
            if energy:
                self._totals.outside(process.service, kind, energy)

    def _forget(self, process: _SendingProcess, now: int) -> None:
        del self._processes[process.consumer]
        self._totals.outcome(Outcome.ABANDONED, process.spans.expire(now, now))
        self._close(process, now)
        self._history.forget(process.consumer)
        if self._sampler is not None:
            self._sampler.unwatch(process.consumer)

    def _send_on(self) -> None:
        """Let go of deliveries in the order in which they came."""
        done = []
        while self._held and self._held[0].left <= 0:
            held = self._held.popleft()
            done.append(held)
            if self._forwarder is not None:
                self._forwarder.offer(held.delivery, held.energies)
        if done:
            with self._lock:
                for held in done:
                    self._room.give_back(held.delivery.peer.whose, held.cost)
