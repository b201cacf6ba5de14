"""Who stands beside the joiner: what it needs of others, and who is told what it finds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from wattspan.http.messages import Peer
from wattspan.model import Consumer
from wattspan.spanfeed.delivery import Claim, Delivery, Told
from wattspan.spans import Ended, Outcome, Span, SpanEnergy, Started

if TYPE_CHECKING:
    from wattspan.forward.forwarder import ForwardStats
    from wattspan.spanfeed.feed import FeedCounts


class Resolver(Protocol):
    """Knows which process spans belong to. Safe from any thread."""

    def resolve(self, peer: Peer, claim: Claim) -> Consumer | Outcome: ...

    def identify(self, pid: int) -> Consumer | None: ...


class Report(Protocol):
    """What one process told over its side channel since the last time."""

    @property
    def pid(self) -> int: ...
    @property
    def records(self) -> Sequence[Started | Ended]: ...
    @property
    def lost(self) -> int: ...
    @property
    def gone(self) -> bool: ...


class SideChannel(Protocol):
    def drain(self) -> Sequence[Report]: ...

    @property
    def counts(self) -> FeedCounts: ...


class FineTimes(Protocol):
    """CPU clocks of watched processes at finer times than the agent's ticks."""

    def watch(self, consumer: Consumer) -> None: ...

    def unwatch(self, consumer: Consumer) -> None: ...

    def take(self, consumer: Consumer) -> Sequence[tuple[int, int]]: ...


class Tap(Protocol):
    """Wants to see spans as soon as they are received."""

    def hand(self, consumer: Consumer, service: str, spans: list[Span], told: list[Told]) -> None:
        """Take the spans of one process, and the same as they were told."""
        ...


class Onward(Protocol):
    """The way to the user's collector."""

    def offer(self, delivery: Delivery, energies: Sequence[SpanEnergy | None]) -> None: ...

    @property
    def stats(self) -> ForwardStats: ...
