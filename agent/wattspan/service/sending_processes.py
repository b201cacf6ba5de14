"""The processes that send spans: a bounded number, whose cost depends on their spans.

A process is *active* while it has spans that wait for energy or are open. Others cost nothing
between two rare checks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from wattspan.model import SECOND, Consumer, Principal, service_label
from wattspan.service.span_inbox import PendingRequest
from wattspan.sharing.fair_pool import SharePath, share_path
from wattspan.spans.aggregator import shortened_name
from wattspan.spans.energy_division import ProcessSpans
from wattspan.spans.profiles import EnergyProfile
from wattspan.spans.values import SpanColumns
from wattspan.spans.waiting_spans import ReceiptDelay, SpanOverlaps

MAX_PROCESSES = 1024
"""Sending processes that are watched."""

EXPECTED = 15 * SECOND
"""Three periods of an exporter: more spans of a sender are expected so long after the last ones."""


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
        if self.overlaps.add(spans):
            self.delay.add(spans.start, spans.end, received)
        else:
            prompt = [received] * len(spans)
            self.delay.add(prompt, prompt, received)

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
    """At most ``most`` processes, in the order of their last spans or announcements."""

    def __init__(self, most: int = MAX_PROCESSES) -> None:
        self._most = most
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

    def remove(self, process: SendingProcess) -> None:
        del self._processes[process.consumer]
        self._owners[process.share] -= 1
        self._owners += Counter()  # without owners of none
        self._services = None

    def displaced(self) -> SendingProcess | None:
        """The process that is removed for another one; None while there is room.

        One that is not active, of the owner with most processes among those; without any, an active
        one of the owner with most. Of the processes of one owner, the one without spans for longest
        is removed.
        """
        if len(self._processes) < self._most:
            return None
        found: dict[bool, SendingProcess] = {}
        largest = max(self._owners.values())
        for process in self._processes.values():
            active, held = process.active, self._owners[process.share]
            known = found.get(active)
            if known is None or held > self._owners[known.share]:
                found[active] = process
                if held == largest and not active:
                    break
        return found[False] if False in found else found[True]

    def services(self) -> dict[str, tuple[Consumer, ...]]:
        """The processes of each service and owner."""
        if self._services is None:
            senders: dict[str, list[Consumer]] = {}
            for process in self._processes.values():
                service = service_label(shortened_name(process.service), process.owner)
                senders.setdefault(service, []).append(process.consumer)
            self._services = {service: tuple(each) for service, each in senders.items()}
        return self._services
