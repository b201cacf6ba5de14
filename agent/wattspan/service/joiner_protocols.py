"""The interfaces of the joiner to its neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from wattspan.http.messages import Peer
from wattspan.ingest.export_request import ExportRequest, ResourceClaim, SpanRecord
from wattspan.model import Consumer
from wattspan.spans.values import Outcome, Span, SpanEnd, SpanEnergy, SpanStart

if TYPE_CHECKING:
    from wattspan.ingest.side_channel import SideChannelCounters
    from wattspan.otlp.forwarder import ForwardStats


class ProcessResolver(Protocol):
    """Finds the process of spans. Safe from any thread."""

    def resolve(self, peer: Peer, claim: ResourceClaim) -> Consumer | Outcome: ...

    def identify(self, pid: int) -> Consumer | None: ...


class AnnouncedRecords(Protocol):
    """The records of one process's side channel since the last call."""

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
    """Samples of the CPU clocks of watched processes between the agent's ticks."""

    def watch(self, consumer: Consumer) -> None: ...

    def unwatch(self, consumer: Consumer) -> None: ...

    def take(self, consumer: Consumer) -> Sequence[tuple[int, int]]: ...


class SpanConsumer(Protocol):
    """Receives spans before they are joined."""

    def hand(
        self, consumer: Consumer, service: str, spans: list[Span], records: list[SpanRecord]
    ) -> None:
        """Add the spans of one process, and the records that they were made of."""
        ...


class SpanForwarding(Protocol):
    """Forwards requests to the user's collector."""

    def offer(self, delivery: ExportRequest, energies: Sequence[SpanEnergy | None]) -> None: ...

    @property
    def stats(self) -> ForwardStats: ...
