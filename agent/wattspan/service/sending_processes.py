"""The processes that send spans: a bounded number, whose cost depends on their spans.

A process is *active* while it has spans that wait for energy or are open. Others cost nothing
between two rare checks.
"""

from __future__ import annotations

import os
import select
import threading
import weakref
from collections import Counter, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from wattspan.inference.requests import InferenceRequest
from wattspan.ingest.export_request import ExportRequest, ResourceSpans
from wattspan.ingest.request_limits import ReceiverBusyError
from wattspan.model import MILLISECOND, SECOND, Consumer, Principal, service_label
from wattspan.service.energy_history import BACKFILL, EnergyHistory
from wattspan.sharing.fair_pool import FairPool, Overflow
from wattspan.sharing.pools import PoolName, Pools
from wattspan.spans.values import RequestEnergies

if TYPE_CHECKING:
    from wattspan.ingest.identity_verification import IdentityResolver, SpanIdentity
    from wattspan.processes.cpu_sampler import CpuSampler
from wattspan.sharing.fair_pool import SharePath, share_path
from wattspan.spans.aggregator import shortened_name
from wattspan.spans.energy_division import ProcessSpans
from wattspan.spans.profiles import EnergyProfile
from wattspan.spans.values import Outcome, SpanColumns
from wattspan.spans.waiting_spans import ReceiptDelay, SpanOverlaps

MAX_PROCESSES = 1024
"""Sending processes that are watched."""

EXPECTED = 15 * SECOND
"""Three periods of an exporter: more spans of a sender are expected so long after the last ones."""

MAX_SHARING = 8192
"""Waiting spans of a process that share energy with the spans that are joined: 40 ms."""

BYTES_PER_SPAN = 700
"""Measured memory of a waiting span, without its part of the request."""


@dataclass(slots=True)
class PendingRequest:
    """A request with spans that are not joined yet.

    ``identities`` are those of its parts, ``left`` is the number of spans without a result.
    ``requests`` are those to language models, with their positions and processes.
    """

    request: ExportRequest
    cost: int
    identities: tuple[SpanIdentity, ...]
    energies: RequestEnergies
    left: int
    requests: list[tuple[int, Consumer, InferenceRequest]] = field(default_factory=list)

    @property
    def owner(self) -> Hashable:
        """The user or host that sent it."""
        return share_path(self.request.peer.quota_owner)[0]

    def parts(self) -> Iterator[PendingPart]:
        """The parts that have spans."""
        skipped, at = self.request.skipped, 0
        positions: Sequence[int] = range(len(self.energies))
        if skipped:
            positions = [at for at in positions if at not in skipped]
        for part, identity in zip(self.request.parts, self.identities, strict=True):
            own = positions[at : at + len(part.spans)]
            at += len(part.spans)
            if part.spans:
                yield PendingPart(self, part, identity, own)


class PendingPart(NamedTuple):
    """The spans of one resource, and their positions in the request."""

    pending: PendingRequest
    part: ResourceSpans
    identity: SpanIdentity
    positions: Sequence[int]

    def by_sender(
        self, senders: Sequence[Consumer | Outcome] | Consumer | Outcome
    ) -> Iterator[tuple[Consumer | Outcome, ResourceSpans, Sequence[int]]]:
        """The spans of each sender and their positions; ``senders`` has one for all or for each."""
        if isinstance(senders, Consumer | Outcome):
            yield senders, self.part, self.positions
            return
        owned: dict[Consumer | Outcome, list[int]] = {}
        for at, sender in enumerate(senders):
            owned.setdefault(sender, []).append(at)
        for sender, own in owned.items():
            some = self.part._replace(spans=self.part.spans.chosen(own))
            yield sender, some, [self.positions[at] for at in own]


class SpanInbox:
    """Accepts requests from receivers until ``release``, as far as there is room. Thread-safe.

    ``room`` is in bytes; the quota is by user, so that no user can take all of it. Users do not
    wait for each other: their requests are taken in turn, and each has its own order of releases.
    """

    def __init__(self, resolver: IdentityResolver, room: int, pools: Pools | None = None) -> None:
        self._resolver = resolver
        self._quota = (pools or Pools()).make(PoolName.SPAN_BUFFER, room)
        self._lock = threading.Lock()
        self._received: deque[PendingRequest] = deque()
        self._pending: dict[Hashable, deque[PendingRequest]] = {}  # taken, not released
        self._parts: dict[Hashable, deque[Iterator[PendingPart]]] = {}  # not taken
        self._refused: Counter[str] = Counter()
        self._deferred = 0
        self._arrivals = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closing = weakref.finalize(self, os.close, self._arrivals)

    def rest(self, longest: int, other: int | None = None) -> bool:
        """Wait for ``longest`` nanoseconds at most; True once something has arrived.

        Arrivals are requests, refusals, calls of ``notify``, and data at the descriptor ``other``.
        """
        waiting = select.poll()
        for descriptor in (self._arrivals, other):
            if descriptor is not None:
                waiting.register(descriptor, select.POLLIN)
        arrived = bool(waiting.poll(longest / MILLISECOND))
        with suppress(BlockingIOError):
            os.eventfd_read(self._arrivals)
        return arrived

    def notify(self) -> None:
        """End the present or the next rest; no effect after ``close``."""
        with self._lock:
            if self._closing.alive:
                os.eventfd_write(self._arrivals, 1)

    def close(self) -> None:
        """End all rests."""
        with self._lock:
            self._closing()

    def __bool__(self) -> bool:
        """True if `take` would return parts."""
        return bool(self._received or self._parts)

    @property
    def backlog(self) -> bool:
        """True if the last `take` has left parts of requests."""
        return bool(self._parts)

    def accept(self, request: ExportRequest) -> None:
        """Add a request; ReceiverBusyError while too many wait."""
        cost = request.size + BYTES_PER_SPAN * request.count
        with self._lock:
            if self._quota.idle:  # then a request of any size is accepted
                self._quota.force(share_path(request.peer.quota_owner), cost)
            elif not self._quota.acquire(share_path(request.peer.quota_owner), cost):
                self._deferred += request.count
                raise ReceiverBusyError
        try:
            # At once, because the sender still runs while it waits for the response.
            identities = self._resolver.resolve(request.peer, [p.claim for p in request.parts])
        except BaseException:
            with self._lock:
                self._quota.release(share_path(request.peer.quota_owner), cost)
            raise
        energies = RequestEnergies(request.count + len(request.skipped))
        with self._lock:
            self._received.append(
                PendingRequest(request, cost, identities, energies, request.count)
            )
        self.notify()

    def refuse(self, reason: str, spans: int = 1) -> None:
        """Count spans that are not accepted."""
        with self._lock:
            self._refused[reason] += spans
        self.notify()

    def take(self, most: int) -> Iterator[PendingPart]:
        """At most ``most`` parts of requests: one of each owner in turn, in their order."""
        with self._lock:
            received = list(self._received)
            self._received.clear()
        for pending in received:
            self._pending.setdefault(pending.owner, deque()).append(pending)
            self._parts.setdefault(pending.owner, deque()).append(pending.parts())
        for _ in range(most):
            if not self._parts:
                return
            owner = next(iter(self._parts))
            requests = self._parts[owner] = self._parts.pop(owner)  # the last in turn
            if (part := next(requests[0], None)) is not None:
                yield part
                continue
            requests.popleft()
            if not requests:
                del self._parts[owner]

    def release(self) -> list[PendingRequest]:
        """Free the room of completed requests; those of an owner in the order of receipt."""
        done = []
        for owner, requests in tuple(self._pending.items()):
            while requests and requests[0].left <= 0:
                done.append(requests.popleft())
            if not requests:
                del self._pending[owner]
        with self._lock:
            for pending in done:
                self._quota.release(share_path(pending.request.peer.quota_owner), pending.cost)
        return done

    @property
    def scarce(self) -> bool:
        """True if there is little room left."""
        return self._quota.scarce

    def refused(self) -> dict[str, int]:
        """The refused spans by reason."""
        with self._lock:
            return dict(self._refused)

    @property
    def deferred(self) -> int:
        """The spans whose senders were asked to retry."""
        return self._deferred


@dataclass(slots=True)
class PendingSpans:
    """Spans of one process from one request, and the positions of their results."""

    pending: PendingRequest
    positions: Sequence[int]
    spans: SpanColumns
    start: int
    end: int
    due: int  # time at which they are joined, settled or not


@dataclass(slots=True, eq=False)
class SendingProcess:
    """A process that sends spans. ``owner`` is the label of its principal."""

    consumer: Consumer
    spans: ProcessSpans
    profile: EnergyProfile
    last_seen: int
    principal: Principal | None = None
    owner: str = ""
    service: str = ""
    waiting: deque[PendingSpans] = field(default_factory=deque)
    delay: ReceiptDelay = field(default_factory=ReceiptDelay)
    overlaps: SpanOverlaps = field(default_factory=SpanOverlaps)
    announces: bool = False
    exited: bool = False
    places: int = 0  # of its announced spans
    crowded_until: int = 0  # it may have open spans without a place
    join_at: int = 0  # no waiting span can be joined before
    tidy_at: int = 0
    merged: int = -1  # the time up to which energy had settled at its last merge

    @property
    def share(self) -> Hashable:
        """The owner whose share of the room it takes."""
        return self.path[0]

    @property
    def proven(self) -> Hashable:
        """Its principal, else the process itself: spans of others have nothing to do with its."""
        return self.consumer if self.principal is None else self.principal

    @property
    def path(self) -> SharePath:
        """The levels of its shares of pools, the process itself last."""
        return (*share_path(self.principal), self.consumer)

    def announces_all(self, now: int) -> bool:
        """True if the process has no open span that is not announced."""
        return self.announces and now >= self.crowded_until

    def hold(self, now: int) -> int:
        """Nanoseconds that spans wait for others of the same time."""
        return 0 if self.announces_all(now) else self.delay.hold

    def learn_delay(self, spans: SpanColumns, received: int) -> None:
        """Learn how long spans wait; not at all where none is open beside another."""
        if self.overlaps.add(spans, received):
            self.delay.add(spans.start, spans.end, received)
        else:
            prompt = [received] * len(spans)
            self.delay.add(prompt, prompt, received)

    def sharing(self, until: int) -> list[SpanColumns]:
        """Waiting spans that may share energy before ``until``: the next ones to be joined."""
        found, room = [], MAX_SHARING
        for chunk in self.waiting:
            if chunk.start < until and room > 0:
                found.append(chunk.spans if len(chunk.spans) <= room else chunk.spans[:room])
                room -= len(chunk.spans)
        return found

    @property
    def active(self) -> bool:
        """True while spans wait for energy or are open."""
        return bool(self.waiting) or self.spans.announced > 0

    def schedule(self, now: int) -> None:
        """Set the next time at which a waiting span may be joined."""
        if self.waiting:
            first = self.waiting[0]
            self.join_at = min(first.due, first.end + self.hold(now))


class SendingProcesses(Mapping[Consumer, SendingProcess]):
    """At most ``most`` processes, in the order of their last spans or announcements.

    Of removed ones, the time up to which energy was divided is kept: they may return. If an owner
    has too many of them, new processes of the owner begin at the latest of these times.
    """

    def __init__(self, most: int = MAX_PROCESSES) -> None:
        self._most = most
        self._removed: FairPool[Consumer] = FairPool(4 * most, Overflow.REPLACE)
        self._divided: dict[Consumer, tuple[int, Hashable]] = {}
        self._begins: dict[Hashable, int] = {}  # of owners
        self._processes: dict[Consumer, SendingProcess] = {}
        self._owners: Counter[Hashable] = Counter()
        self._services: dict[str, tuple[Consumer, ...]] | None = None

    def __len__(self) -> int:
        return len(self._processes)

    def __iter__(self) -> Iterator[Consumer]:
        return iter(self._processes)

    def __getitem__(self, consumer: Consumer) -> SendingProcess:
        return self._processes[consumer]

    def add(self, process: SendingProcess) -> None:
        """Add a process; ``displaced`` is to be removed before."""
        self._processes[process.consumer] = process
        self._owners[process.share] += 1
        self._services = None

    def seen(self, process: SendingProcess, now: int, service: str | None = None) -> None:
        """Note a span or an announcement of a process."""
        process.last_seen = now
        self._processes[process.consumer] = self._processes.pop(process.consumer)
        if service is not None and service != process.service:
            process.service = service
            self._services = None

    def begin(self, consumer: Consumer, share: Hashable) -> int:
        """The time from which energy of a new process may be divided."""
        return max(self._divided.get(consumer, (0,))[0], self._begins.get(share, 0))

    def divided(self, process: SendingProcess, until: int, now: int) -> None:
        """Note that no energy of a removed process may be divided again before ``until``."""
        until = max(until, self.begin(process.consumer, process.share))
        self._divided[process.consumer] = until, process.share
        admission = self._removed.admit(process.consumer, (process.share,))
        for lost in admission.displaced if admission else (process.consumer,):
            until, share = self._divided.pop(lost)
            self._begins[share] = max(until, self._begins.get(share, 0))
        self._begins = {share: at for share, at in self._begins.items() if at > now - BACKFILL}

    def remove(self, process: SendingProcess) -> None:
        del self._processes[process.consumer]
        self._owners[process.share] -= 1
        self._owners += Counter()  # without owners of none
        self._services = None

    def displaced(self, share: Hashable) -> SendingProcess | None:
        """The process that is removed for another one of owner ``share``; None while there is room.

        One of the owner that would have most; of its processes, one that is not active if there is
        any, and of those the one without spans for longest.
        """
        if len(self._processes) < self._most:
            return None
        owners = self._owners + Counter([share])
        most = max(owners.values())
        largest = (one for one in self._processes.values() if owners[one.share] == most)
        first = next(largest)
        return next((one for one in chain((first,), largest) if not one.active), first)

    def services(self) -> dict[str, tuple[Consumer, ...]]:
        """The processes of each service and owner."""
        if self._services is None:
            senders: dict[str, list[Consumer]] = {}
            for process in self._processes.values():
                service = service_label(shortened_name(process.service), process.owner)
                senders.setdefault(service, []).append(process.consumer)
            self._services = {service: tuple(each) for service, each in senders.items()}
        return self._services


class SampledProcesses:
    """The processes whose CPU clock the ``sampler`` reads, in the places of a pool.

    Energy of a process without a place is known at the resolution of ticks, and its uncertainty
    includes that.
    """

    def __init__(
        self, sampler: CpuSampler | None, places: FairPool[Consumer], history: EnergyHistory
    ) -> None:
        self._sampler, self._places, self._history = sampler, places, history
        self._sampled: set[Consumer] = set()

    def read(self) -> None:
        """Add the new samples to the profiles."""
        for consumer in self._sampled:
            self._history.sample(consumer)

    def grant(self, process: SendingProcess) -> None:
        """Sample a process, if its owner's share of places permits."""
        consumer = process.consumer
        if self._sampler is None or consumer in self._sampled:
            return
        admission = self._places.admit(consumer, process.path)
        for displaced in admission.displaced:
            self.end(displaced)
        if admission and self._sampler.watch(consumer):
            self._sampled.add(consumer)
        else:
            self._places.remove(consumer)

    def end(self, consumer: Consumer) -> None:
        """Free the place of a process, if it has one."""
        if self._sampler is not None and consumer in self._sampled:
            self._sampled.remove(consumer)
            self._places.remove(consumer)
            self._history.sample(consumer)
            self._sampler.unwatch(consumer)
