"""The joiner: the thread that joins received spans with the energy of their processes.

Receivers pass export requests on, and ask senders to retry when too many wait. The joiner finds
the process of each resource, converts span times to the monotonic clock, and joins spans with the
energy of their process once it has settled past their end. The results go to the totals and to the
user's collector.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter, mul
from typing import TYPE_CHECKING, cast
from weakref import WeakValueDictionary

from wattspan.config import SpansSettings
from wattspan.inference.estimate import RequestEstimate
from wattspan.inference.requests import InferenceRequest
from wattspan.inference.traces import SpanPlace, TokenTraces
from wattspan.ingest.export_request import ResourceSpans
from wattspan.model import (
    SECOND,
    Checkpoint,
    Consumer,
    Instant,
    Principal,
    SpanAccounts,
    service_label,
)
from wattspan.ports import Clock
from wattspan.processes.principals import owner_label
from wattspan.service.device_history import WindowEdges
from wattspan.service.energy_history import EnergyHistory
from wattspan.service.inference_joiner import InferenceJoiner
from wattspan.service.sampling_demand import ASKED_FOR, Reason, SamplingDemand
from wattspan.service.sending_processes import (
    EXPECTED,
    MAX_PROCESSES,
    PendingPart,
    PendingRequest,
    PendingSpans,
    SampledProcesses,
    SendingProcess,
    SendingProcesses,
    SpanInbox,
)
from wattspan.service.span_announcers import SpanAnnouncers
from wattspan.sharing.fair_pool import FairPool, share_path
from wattspan.sharing.pools import PoolName, Pools
from wattspan.spans.aggregator import SpanAggregator
from wattspan.spans.energy_division import ProcessSpans, without_energy
from wattspan.spans.power_model import PowerModel
from wattspan.spans.step_division import StepDivider
from wattspan.spans.values import TOKENS, Outcome, SpanColumns, SpanEnergyColumns, SpanStart
from wattspan.spans.wall_time import OBSERVATIONS, WallClockConverter
from wattspan.util.throttle import RateLimitedLog

if TYPE_CHECKING:
    from wattspan.advice.boards import StaticPowerLearner
    from wattspan.ingest.identity_verification import IdentityResolver
    from wattspan.ingest.side_channel import SideChannelServer
    from wattspan.otlp.forwarder import Forwarder
    from wattspan.processes.cpu_sampler import CpuSampler
    from wattspan.tuning.work_units import ReceivedSpanQueue

JOIN_INTERVAL = SECOND // 20

PARTS_A_PASS, LONGEST_QUEUEING = 256, SECOND // 10
"""Parts of requests that a pass queues at their processes, and the time after which it queues no
further one; with more, passes have no pause."""

IDLE_INTERVAL = 5 * SECOND
"""The longest wait for a request or a process while none has sent spans recently."""

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
"""The period of checks of processes whose spans are open or were joined, or that have exited."""

TIDY_IDLE_EVERY = 10 * SECOND
"""The period of checks of other processes, and of their outside energy."""

POOLED = 2 * SECOND
"""The largest time by which a profile that another one replaces may place energy differently."""

MAX_REMEMBERED_IDS = 131_072
"""Span ids of all processes that are kept for the detection of duplicates: 12 MB."""

_REMEMBERED = attrgetter("remembered")


class SpanJoiner:
    """Joins the spans of its ``inbox``, the sink of the receivers; ``turn`` is one pass."""

    def __init__(
        self,
        clock: Clock,
        history: EnergyHistory,
        resolver: IdentityResolver,
        settings: SpansSettings,
        *,
        keep: int,
        side_channel: SideChannelServer | None = None,
        edges: WindowEdges | None = None,
        sampler: CpuSampler | None = None,
        forwarder: Forwarder | None = None,
        tap: ReceivedSpanQueue | None = None,
        static_powers: StaticPowerLearner | None = None,
        demand: SamplingDemand | None = None,
        checkpoint: Checkpoint | None = None,
        pools: Pools | None = None,
        remembered: int = MAX_REMEMBERED_IDS,
        processes: int = MAX_PROCESSES,
        share_idle: bool = False,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._clock = clock
        self._history = history
        pools = pools or Pools()
        self._resolver = resolver
        self.inbox = SpanInbox(resolver, settings.buffer, pools)
        self._places = pools.make(PoolName.OPEN_SPANS, settings.open_spans)
        self._open_spans = settings.open_spans
        self._keep = keep
        self._remembered = remembered
        self._by_cpu = settings.weight == "cpu"
        self._side_channel, self._edges = side_channel, edges or WindowEdges()
        self._sampler = sampler
        clocks: FairPool[Consumer] = pools.make(PoolName.CPU_CLOCKS)
        self._sampled = SampledProcesses(sampler, clocks, history)
        self._forwarder = forwarder
        self._tap = tap
        self._static_powers = static_powers
        self._demand = demand
        rows, outside = (checkpoint.spans, checkpoint.outside) if checkpoint else ((), {})
        self._totals = SpanAggregator(settings.names, rows, outside, clock.monotonic(), pools)
        self._wall = WallClockConverter()
        self._processes = SendingProcesses(processes)
        self._waiting: dict[Consumer, SendingProcess] = {}  # those with spans that wait for energy
        self._announcers = SpanAnnouncers(2 * settings.open_spans, resolver, self._awaits)
        # By user: spans teach powers of names to spans of their own user only.
        self._powers: WeakValueDictionary[Hashable, PowerModel] = WeakValueDictionary()
        self._traces = TokenTraces()
        self._inference = InferenceJoiner(
            history,
            traces=self._traces,
            checkpoint=checkpoint,
            presets=settings.presets,
            pools=pools,
            now=clock.monotonic(),
            share_idle=share_idle,
        )
        self._accounts = SpanAccounts()
        self._tidied = self._reported = self._settled_until = 0
        self._grown = False  # more span ids than at the last tidying
        self._failures = RateLimitedLog(clock.monotonic, log)

    # ------------------------------------------------------------------------------ any thread

    def estimate(self, process: Consumer, request: InferenceRequest) -> RequestEstimate | None:
        """The provisional energy of a request to a language model. Safe from any thread."""
        return self._inference.estimate(process, request)

    def accounts(self) -> SpanAccounts:
        """The newest totals. Safe from any thread."""
        return self._accounts

    # ------------------------------------------------------------------------------ the thread

    def run(self, stop: threading.Event) -> None:
        """Run passes until ``stop``, then finish. Failures of a pass are logged."""
        while not self._paused(stop):
            self._guarded(self.turn)
        self._guarded(self.finish)
        self.inbox.close()

    def _paused(self, stop: threading.Event) -> bool:
        """Wait until the next pass is due; True to end."""
        if not self._rests:
            return stop.wait(0 if self.inbox.backlog else JOIN_INTERVAL / 1e9)
        channel, used = self._side_channel, self._processes or self._inference.in_use
        rest = TIDY_EVERY if used or (channel and channel.counts.connected) else IDLE_INTERVAL
        arrived = self.inbox.rest(rest, None if channel is None else channel.descriptor)
        for _ in range(OBSERVATIONS):  # of a small step since the last pass
            self._wall.observe(self._clock.now())
        # The requests that follow soon are joined in the same pass.
        return stop.wait(JOIN_INTERVAL / 1e9) if arrived else stop.is_set()

    @property
    def _rests(self) -> bool:
        """True while no span waits for energy, and no process announces any."""
        channel = self._side_channel
        return not (self._waiting or self.inbox or (channel and channel.counts.active))

    def _guarded(self, act: Callable[[], None], what: str = "A pass of the joiner") -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - the joining of other spans continues
            self._failures.failure(what, error)

    def turn(self) -> None:
        """Process all new requests and all spans whose energy has settled."""
        now = self._clock.now()
        self._wall.observe(now)
        self._read_side_channel(now.mono)
        until = self._clock.monotonic() + LONGEST_QUEUEING
        for part in self.inbox.take(PARTS_A_PASS):
            self._distribute(part)
            if self._clock.monotonic() >= until:
                break
        self._join_settled(now)
        if now.mono - self._tidied >= TIDY_EVERY:
            self._tidied = now.mono
            self._sampled.read()
            for process in tuple(self._processes.values()):
                if process.tidy_at <= now.mono:
                    self._tidy(process, now)
            if self._grown:
                self._forget_ids()
        self._inference.turn(now.mono)
        self._forward()
        if now.mono - self._reported >= REPORT_EVERY or self._rests:
            self._reported = now.mono
            self._report()

    def finish(self) -> None:
        """Join all waiting spans with the known energy and release all processes."""
        self.turn()
        while self.inbox.backlog:
            self.turn()
        now = self._clock.now()
        for process in tuple(self._processes.values()):
            self._forget(process, now)
        self._inference.turn(now.mono, wait=False)
        self._forward()
        self._report()

    def _report(self) -> None:
        others = SpanAccounts(
            refused=self.inbox.refused(),
            deferred=self.inbox.deferred,
            open=len(self._places),
            senders=self._processes.services(),
        )
        others = self._inference.add_totals(others)
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
                announcements_conflicts=self._announcers.conflicts,
            )
        self._accounts = self._totals.accounts(others)

    # ------------------------------------------------------------------------------- receiving

    def _read_side_channel(self, now: int) -> None:
        """Read announced starts and ends of spans."""
        if self._side_channel is None:
            return
        if self._demand is not None and self._side_channel.counts.active:
            self._demand.hold(Reason.SIDE_CHANNEL, ASKED_FOR)
        for report in self._side_channel.drain():
            consumer = self._announcers.process(report, now)
            known = consumer in self._processes
            edges = report.edges if consumer else ()
            self._edges.update(report.pid, report.principal, edges, now, ended=report.gone)
            if not (consumer and report.principal and (report.records or known)):
                continue
            process = self._process(consumer, now, report.principal)
            self._processes.seen(process, now)
            if self._tap is not None:
                self._tap.announce(consumer, report.records)
            process.announces = process.announces or bool(report.records)
            process.exited = process.exited or report.gone
            process.tidy_at = min(process.tidy_at, now + TIDY_EVERY)
            for record in report.records:
                if isinstance(record, SpanStart):
                    self._announcers.add(record.id, report.principal, consumer)
                    self._open_span(process, record, now)
                else:
                    process.spans.close(record)
            process.schedule(now)
            self._note_open(process)
        self._announcers.age(now, self._keep)

    def _open_span(self, process: SendingProcess, started: SpanStart, now: int) -> None:
        """Add an announced start if its owner has a place, perhaps in that of a larger owner."""
        if process.spans.awaits(started.id):
            return
        admission = self._places.acquire(process.path)
        for path in admission.displaced:
            loser = self._processes[cast(Consumer, path[-1])]
            loser.spans.displace()
            loser.places -= 1
            loser.crowded_until = now + self._keep
        if not admission:
            process.crowded_until = now + self._keep
        elif process.spans.open(started):
            process.places += 1
        else:
            self._places.release(process.path)

    def _free_places(self, process: SendingProcess, left: int) -> None:
        """Free the places of a process that its ``left`` announced spans do not use."""
        if process.places > left:
            self._places.release(process.path, process.places - left)
            process.places = left

    def _distribute(self, received: PendingPart) -> None:
        """Queue the spans of one part of a request at their processes."""
        pending, part, identity, _ = received
        self._totals.received(len(part.spans))
        before = self._announcers.conflicts
        senders = self._announcers.senders(part.spans.id, identity)
        if self._announcers.conflicts > before:
            service, owner = part.claim.service, owner_label(identity.principal)
            self._failures.write(
                f"Spans of {service_label(service, owner)!r} were announced by a process of "
                "another user, container or pod: the sender that the kernel proves counts.",
                key=owner,
            )
        for sender, some, places in received.by_sender(senders):
            try:
                self._enqueue(pending, some, places, sender, identity.principal)
            except Exception as error:  # noqa: BLE001 - later requests wait for this one
                self._failures.failure(f"Queueing {len(places)} spans", error)
                self._totals.outcome(Outcome.NO_ENERGY, len(places))
                pending.left -= len(places)

    def _enqueue(
        self,
        pending: PendingRequest,
        part: ResourceSpans,
        positions: Sequence[int],
        consumer: Consumer | Outcome,
        principal: Principal | None,
    ) -> None:
        if isinstance(consumer, Outcome):
            self._totals.outcome(consumer, len(part.spans))
            pending.left -= len(part.spans)
            return
        now = pending.request.received
        process = self._process(consumer, now, principal)
        self._processes.seen(process, now, part.claim.service)
        self._sampled.grant(process)
        if self._demand is not None:
            self._demand.register(Reason.SPANS, consumer, process.principal)
        spans, due = self._wall.spans(part.spans), now + SETTLEMENT_TIMEOUT
        chunk = PendingSpans(pending, positions, spans, min(spans.start), max(spans.end), due)
        about = f"Reading {len(spans)} spans of process {consumer.pid}"
        self._guarded(partial(self._observe, process, chunk), about)
        process.learn_delay(spans, now)
        self._history.expect(chunk.end)
        process.waiting.append(chunk)
        process.schedule(now)
        self._waiting[consumer] = process

    def _observe(self, process: SendingProcess, chunk: PendingSpans) -> None:
        """Pass spans on to those that read them besides their energy."""
        consumer, spans, pending = process.consumer, chunk.spans, chunk.pending
        now = pending.request.received
        if self._tap is not None:
            self._tap.append(consumer, spans.service[0], spans)
        if self._static_powers is not None:
            self._static_powers.add_spans(consumer, spans, now)
        found = self._inference.add(
            consumer, spans, now, process.path[:-1], process.owner, process.proven
        )
        if found and self._forwarder is not None:
            pending.requests += [(chunk.positions[i], consumer, one) for i, one in found.items()]

    def _process(self, consumer: Consumer, now: int, principal: Principal | None) -> SendingProcess:
        """The account of a process; ``principal`` counts if the process has ended."""
        process = self._processes.get(consumer)
        if process is None:
            known = self._resolver.principal(consumer) or principal
            share = share_path(known)[0]
            if (displaced := self._processes.displaced(share)) is not None:
                self._forget(displaced, self._clock.now())
            samples = None if self._sampler is None else partial(self._sampler.take, consumer)
            begin = self._processes.begin(consumer, share)
            with self._history.lock:
                shared = consumer in self._history.watched
                profile = self._history.watch(consumer, samples=samples, since=begin)
            spans = ProcessSpans(
                by_cpu=self._by_cpu,
                announced=self._open_spans,
                steps=StepDivider(self._powers.setdefault(share, PowerModel()), consumer),
                begin=begin + POOLED if shared and begin else 0,
            )
            process = SendingProcess(consumer, spans, profile, now, known, owner_label(known))
            process.tidy_at = now + TIDY_IDLE_EVERY
            self._processes.add(process)
        return process

    def _note_open(self, process: SendingProcess) -> None:
        self._free_places(process, process.spans.announced)
        if process.spans.announced:
            self._sampled.grant(process)

    # --------------------------------------------------------------------------------- joining

    def _join_settled(self, now: Instant) -> None:
        """Join the spans of all processes whose energy may have settled."""
        if not self._waiting:
            return
        self._settled_until, scarce = self._history.settled(), self.inbox.scarce
        for process in tuple(self._waiting.values()):
            if scarce or process.join_at <= now.mono:
                self._join(process, now)

    def _join(self, process: SendingProcess, now: Instant, *, wait: bool = True) -> None:
        """Join the spans that have settled or timed out; all spans without ``wait``.

        The spans of a process that does not announce them wait for later batches of the same time.
        """
        waiting = process.waiting
        hold = 0 if self.inbox.scarce else process.hold(now.mono)
        possible = min(self._settled_until, now.mono - hold)
        if not waiting or (wait and waiting[0].due > now.mono and waiting[0].end > possible):
            return
        with self._history.lock:
            if process.merged != self._settled_until or waiting[0].due <= now.mono or not wait:
                self._merge(process)
            settled = min(process.profile.watermark, now.mono - hold)
        ready: list[PendingSpans] = []
        while waiting and (waiting[0].end <= settled or waiting[0].due <= now.mono or not wait):
            ready.append(waiting.popleft())
        if not ready:
            return
        spans = SpanColumns.joined([self._counted(process, chunk.spans) for chunk in ready])
        later = process.sharing(max(chunk.end for chunk in ready))
        results = self._settled(process, spans, later, now.mono)
        self._grown = True
        process.schedule(now.mono)
        process.tidy_at = min(process.tidy_at, now.mono + TIDY_EVERY)
        if not waiting:
            del self._waiting[process.consumer]
        self._note_open(process)
        at = 0
        for chunk in ready:
            first, at = at, at + len(chunk.spans)
            chunk.pending.left -= len(chunk.spans)
            if self._forwarder is not None:
                chunk.pending.energies.parts.append((chunk.positions, results[first:at]))
        self._totals.add(results, now, process.owner, self._history.baseline_unknown())

    def _counted(self, process: SendingProcess, spans: SpanColumns) -> SpanColumns:
        """``spans`` without tokens that count elsewhere.

        Those of a caller are no tokens of its own energy, and an outer span repeats those of the
        spans in it.
        """
        if not (spans.tokens_in or spans.tokens_out):
            return spans
        roles = spans.full("role")
        calls = {role: self._inference.is_call(process.consumer, role) for role in set(roles)}
        counted = [
            not calls[role]
            and not self._traces.is_repeated(process.proven, SpanPlace(trace, ident))
            for role, trace, ident in zip(roles, spans.trace, spans.id, strict=True)
        ]
        return spans.replaced(
            **{name: list(map(mul, spans.full(name), counted)) for name in TOKENS}
        )

    def _merge(self, process: SendingProcess) -> None:
        """Bring the profile up to date; after a failure, spans get the energy that it has."""
        process.merged = self._settled_until
        try:
            self._history.merge(process.consumer)
        except Exception as error:  # noqa: BLE001 - one process must not affect others
            self._failures.failure(f"The energy of process {process.consumer.pid}", error)

    def _settled(
        self,
        process: SendingProcess,
        spans: SpanColumns,
        later: Sequence[SpanColumns],
        now: int,
    ) -> SpanEnergyColumns:
        """The energies of ``spans``; after a failure they have no energy and are not lost."""
        try:
            # Only forwarded spans need inclusive energies.
            inclusive = self._forwarder is not None
            energies = process.spans.settle(
                spans,
                process.profile,
                now,
                inclusive=inclusive,
                waiting=later,
                lock=self._history.lock,
            )
            missing = self._history.missing_until(process.consumer)
            return energies.missing_before(max(missing.values())) if missing else energies
        except Exception as error:  # noqa: BLE001 - one process must not affect others
            self._failures.failure(
                f"Joining {len(spans)} spans of process {process.consumer.pid}", error
            )
            return without_energy(spans)

    def _tidy(self, process: SendingProcess, now: Instant) -> None:
        """Count outside energy, and release a process that has exited or sends no spans.

        A process that announces its spans has no unknown open span. Others may always have one, so
        their outside energy is counted at the end of the history.
        """
        quiet = now.mono - process.last_seen
        if not process.waiting and (
            (process.exited and quiet > EXITED_PROCESS_TIMEOUT)
            or quiet > self._keep + IDLE_PROCESS_TIMEOUT
        ):
            self._forget(process, now)
            return
        abandoned = process.spans.expire(0, now.mono - UNEXPORTED_SPAN_TIMEOUT)
        self._totals.outcome(Outcome.ABANDONED, abandoned)
        self._note_open(process)
        if not process.active and quiet > EXPECTED:
            self._sampled.end(process.consumer)
        wait = EXITED_PROCESS_TIMEOUT if process.announces_all(now.mono) else self._keep
        self._count_outside(process, now.mono - wait)
        process.spans.age(now.mono, self._keep)
        often = process.exited or process.spans.announced
        process.tidy_at = now.mono + (TIDY_EVERY if often else TIDY_IDLE_EVERY)

    def _forget_ids(self) -> None:
        """Remove span ids beyond the limit: half of the most."""
        self._grown = False
        ascending = sorted((one.spans for one in self._processes.values()), key=_REMEMBERED)
        total = sum(map(_REMEMBERED, ascending))
        while total > self._remembered and ascending:
            spans = ascending.pop()
            total -= spans.remembered
            spans.forget_half()
            total += spans.remembered

    def _awaits(self, span: bytes, consumer: Consumer) -> bool:
        process = self._processes.get(consumer)
        return process is not None and process.spans.awaits(span)

    def _count_outside(self, process: SendingProcess, before: int) -> None:
        with self._history.lock:
            outside = process.spans.outside(process.profile, before)
        for kind, energy in outside.items():
            if energy:
                self._totals.outside(process.service, kind, energy, process.owner)

    def _forget(self, process: SendingProcess, now: Instant) -> None:
        """Release a process. Its waiting spans are joined with the known energy."""
        self._join(process, now, wait=False)
        self._processes.remove(process)
        self._totals.outcome(Outcome.ABANDONED, process.spans.expire(now.mono, now.mono))
        self._free_places(process, 0)
        with self._history.lock:
            self._merge(process)
            self._processes.divided(process, process.profile.newest, now.mono)
            self._count_outside(process, now.mono)
        process.spans.forget()
        self._sampled.end(process.consumer)
        self._history.forget(process.consumer)

    def _forward(self) -> None:
        """Forward and release completed requests, those of an owner in the order of receipt."""
        for pending in self.inbox.release():
            if self._forwarder is not None:
                estimates = {
                    position: estimate
                    for position, process, one in pending.requests
                    if (estimate := self._inference.estimate(process, one)) is not None
                }
                self._forwarder.offer(pending.request, pending.energies, estimates)
