"""Which process announced a span: better known than any claim that the span comes with.

Who stands beside the joiner: what it needs of others, and who is told what it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from wattspan.http.messages import Peer
from wattspan.ingest.export_request import ExportRequest, ResourceClaim, SpanRecord
from wattspan.model import Consumer
from wattspan.spans.values import Outcome, Span, SpanEnd, SpanEnergy, SpanStart

if TYPE_CHECKING:
    from wattspan.ingest.side_channel import SideChannelCounters
    from wattspan.otlp.forwarder import ForwardStats


class SpanOrigins:
    """The processes of announced spans, by the span's id, in two generations.

    The older generation is forgotten with age, or when ``limit`` spans have been announced since it
    was the younger one. A span that is still awaited is not: it may be open for days.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._young: dict[bytes, Consumer] = {}
        self._old: dict[bytes, Consumer] = {}
        self._kept = 0  # of the younger ones, those that were the older before
        self._since = 0

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def remember(self, span: bytes, whose: Consumer) -> None:
        """``whose`` announced ``span``; who was first stays."""
        if span not in self._old:
            self._young.setdefault(span, whose)

    def of(self, span: bytes) -> Consumer | None:
        """Who announced ``span``, if that is remembered."""
        return self._young.get(span) or self._old.get(span)

    def age(self, now: int, memory: int, awaited: Callable[[Consumer, bytes], bool]) -> None:
        """Forget what was announced longer ago than ``memory`` and is not ``awaited``."""
        if now - self._since < memory and len(self._young) - self._kept <= self._limit:
            return
        kept = {span: whose for span, whose in self._old.items() if awaited(whose, span)}
        self._kept = len(kept)
        self._old, self._young = self._young, kept
        self._since = now


class ProcessResolver(Protocol):
    """Knows which process spans belong to. Safe from any thread."""

    def resolve(self, peer: Peer, claim: ResourceClaim) -> Consumer | Outcome: ...

    def identify(self, pid: int) -> Consumer | None: ...


class AnnouncedRecords(Protocol):
    """What one process told over its side channel since the last time."""

    @property
    def pid(self) -> int: ...
    @property
    def records(self) -> Sequence[SpanStart | SpanEnd]: ...
    @property
    def lost(self) -> int: ...
    @property
    def gone(self) -> bool: ...


class SideChannel(Protocol):
    def drain(self) -> Sequence[AnnouncedRecords]: ...

    @property
    def counts(self) -> SideChannelCounters: ...


class CpuSampleSource(Protocol):
    """CPU clocks of watched processes at finer times than the agent's ticks."""

    def watch(self, consumer: Consumer) -> None: ...

    def unwatch(self, consumer: Consumer) -> None: ...

    def take(self, consumer: Consumer) -> Sequence[tuple[int, int]]: ...


class SpanConsumer(Protocol):
    """Wants to see spans as soon as they are received."""

    def hand(
        self, consumer: Consumer, service: str, spans: list[Span], told: list[SpanRecord]
    ) -> None:
        """Take the spans of one process, and the same as they were told."""
        ...


class SpanForwarding(Protocol):
    """The way to the user's collector."""

    def offer(self, delivery: ExportRequest, energies: Sequence[SpanEnergy | None]) -> None: ...

    @property
    def stats(self) -> ForwardStats: ...
