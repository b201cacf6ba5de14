"""Stand-ins for the neighbours of the joiner: a believing resolver, and requests of one span."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from wattspan.http.sockets import Peer
from wattspan.ingest.export_request import ExportRequest, ResourceClaim, ResourceSpans
from wattspan.ingest.identity_verification import SpanIdentity
from wattspan.ingest.process_lookups import Sender
from wattspan.model import Consumer, Domain, HwType, Instant, Principal, Provenance
from wattspan.spans.values import Outcome, Span, SpanColumns

USER = Principal(1000)
CPU = Domain("cpu0", HwType.CPU, "package-0", "fake", Provenance.MEASURED, resource="cpu")
NOBODY = Peer()
LARGEST_PID = 1 << 31


class BelievingResolver:
    """Believes a claimed pid, of ``known`` ones if given. Implements what the joiner asks.

    Pids from ``of_another`` on belong to another user.
    """

    def __init__(self, known: Collection[int] | None = None, of_another: int = LARGEST_PID) -> None:
        self.known, self.of_another = known, of_another
        self.ended: set[int] = set()
        self.changed: set[int] = set()  # of processes with another principal than before

    def resolve(self, peer: Peer, claims: Iterable[ResourceClaim]) -> tuple[SpanIdentity, ...]:
        return tuple(map(self._believed, claims))

    def _believed(self, claim: ResourceClaim) -> SpanIdentity:
        sender = Sender(None, USER)
        if claim.pid is None:
            return SpanIdentity(Outcome.UNKNOWN_PROCESS, None, sender)
        if claim.pid >= LARGEST_PID:
            raise OverflowError
        return SpanIdentity(self.identify(claim.pid) or Outcome.NOT_BELIEVED, USER, sender)

    def announcer(self, pid: int, proven: Principal) -> Consumer | Outcome | None:
        return Outcome.NOT_BELIEVED if pid in self.changed else self.identify(pid)

    def principal(self, consumer: Consumer) -> Principal:
        return Principal(1000 + consumer.pid // self.of_another)

    def may_announce(self, sender: Sender, announcer: Consumer) -> bool:
        return False

    def identify(self, pid: int) -> Consumer | None:
        known = self.known is None or pid in self.known
        return Consumer(pid, 1) if known and pid not in self.ended else None


def request_of_span(
    number: int, pid: int, now: Instant, length: int, *, name: str = "s", peer: Peer = NOBODY
) -> ExportRequest:
    """A request with one span of a process, which lasted ``length`` nanoseconds and ends now."""
    ident = number.to_bytes(8, "big")
    span = Span(ident * 2, ident, b"", "app", name, now.wall - length, now.wall)
    part = ResourceSpans(ResourceClaim("app", pid), SpanColumns.of([span]))
    return ExportRequest(peer, now.mono, 300, (part,), b"raw")
